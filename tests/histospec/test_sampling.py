"""The draw against sorting and float64, and against the frequencies it promises."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from scipy import stats

from rhyme_jax.errors import InputError
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.sampling import BLOCK, GREEDY, SamplingParams, _argmax, draw

INF = np.inf
FASTEST, SLOWEST = 0, 2**32 - 1  # the hashes of the extreme times

fast = jax.jit(draw, static_argnums=2)
many = jax.jit(jax.vmap(draw, in_axes=(None, 0, None)), static_argnums=2)  # many keys for one distribution


def random_keys(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (*shape, 2), np.uint32)


def check(logits_BV, key_B2, params: SamplingParams):
    """Asserts that each draw is the oracle's, but for one in which the two fastest tokens all but tie, and returns
    the tokens.
    """
    token_B, log_prob_B, behaviour_B = (np.asarray(x) for x in fast(logits_BV, key_B2, params))
    assert token_B.dtype == np.int32 and log_prob_B.dtype == behaviour_B.dtype == np.float32
    near_ties = 0
    for logits, key, token, log_prob, behaviour in zip(
        logits_BV, key_B2, token_B, log_prob_B, behaviour_B, strict=True
    ):
        p = oracle.filtered_probabilities(logits, params)
        assert p[token] > 0, "a token outside the support"
        if token != oracle.draw(logits, key, params):
            assert int(token) in oracle.near_draws(logits, key, params)
            near_ties += 1
        np.testing.assert_allclose(behaviour, np.log(p[token]), atol=1e-5)
        whole = oracle.filtered_probabilities(logits, SamplingParams(params.temperature))
        np.testing.assert_allclose(log_prob, np.log(whole[token]), atol=1e-5)
    assert near_ties <= 1
    return token_B


# --- against the oracle ---------------------------------------------------------------------------------------

CASES = [
    # vocabulary, temperature, top_k, top_p
    (1, 1.0, 1, 0.5),
    (2, 0.5, 0, 0.6),
    (7, 1.0, 0, 1.0),
    (40, 1.0, 1, 1.0),
    (40, 2.5, 10, 1.0),
    (40, 1.0, 1000, 1.0),  # k > V: off
    (40, 1.5, 10, 0.5),
    (BLOCK, 1.0, BLOCK, 0.95),  # k = V: off
    (BLOCK + 1, 1.0, 0, 1.0),
    (BLOCK + 1, 1.0, 5, 0.9),
    (2 * BLOCK - 1, 0.7, 0, 1.0),
    (1000, 1.0, 0, 1.0),
    (1000, 2.5, 300, 1.0),
    (1000, 0.3, 50, 0.9),
    (1000, 1.0, 0, 1e-6),
]


@pytest.mark.parametrize(("vocab", "temperature", "top_k", "top_p"), CASES)
def test_matches_the_oracle(vocab, temperature, top_k, top_p):
    rng = np.random.default_rng(vocab)
    logits_BV = np.repeat(rng.normal(0, 3, (8, vocab)).astype(np.float32), 40, axis=0)
    key_B2 = random_keys(len(logits_BV), seed=vocab)
    key_B2[0::40], key_B2[1::40] = 0, SLOWEST
    # The extreme times, at the first, the last and the most likely token of each distribution.
    for row in range(0, len(logits_BV), 40):
        tokens = [0, vocab - 1, int(np.argmax(logits_BV[row]))]
        forced = [oracle.forced_key(token, bits) for token in tokens for bits in (FASTEST, SLOWEST)]
        key_B2[row + 2 : row + 2 + len(forced)] = forced
    check(logits_BV, key_B2, SamplingParams(temperature, top_k, top_p))


FEW = [
    SamplingParams(),
    SamplingParams(0.5, top_k=3),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(2.0, top_k=4, top_p=0.6),
]


@hypothesis.given(
    logits=st.lists(
        st.lists(st.sampled_from([-INF, -90.0, -2.0, -1.0, 0.0, 1.0, 2.0, 30.0]), min_size=9, max_size=9).filter(
            lambda row: max(row) > -INF
        ),
        min_size=4,
        max_size=4,
    ),
    key=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2), min_size=4, max_size=4),
    params=st.sampled_from(FEW),
)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_matches_the_oracle_among_ties_and_impossible_tokens(logits, key, params):
    check(np.array(logits, np.float32), np.array(key, np.uint32), params)


def test_any_leading_axes():
    rng = np.random.default_rng(0)
    logits, keys = rng.normal(0, 2, (2, 3, 30)).astype(np.float32), random_keys(2, 3)
    params = SamplingParams(0.8, top_k=9, top_p=0.8)
    flat = fast(logits.reshape(6, 30), keys.reshape(6, 2), params)
    for whole, part in zip(fast(logits, keys, params), flat, strict=True):
        np.testing.assert_array_equal(np.asarray(whole).reshape(6), part)
    for whole, part in zip(fast(logits[1, 2], keys[1, 2], params), flat, strict=True):
        assert whole.shape == () and whole == part[5]


def test_wide_numbers_change_nothing():
    """Under jax_enable_x64, also where the logits are float64."""
    rng = np.random.default_rng(0)
    logits_BV, key_B2, params = rng.normal(0, 2, (50, 300)).astype(np.float32), random_keys(50), FEW[3]
    want = fast(logits_BV, key_B2, params)
    with jax.enable_x64(True):
        for logits in (logits_BV, logits_BV.astype(np.float64)):
            for x, y in zip(fast(logits, key_B2, params), want, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


# --- what can never be emitted --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, BLOCK + 44, 3 * BLOCK])
@pytest.mark.parametrize("params", [FEW[0], FEW[3]], ids=str)
def test_impossible_tokens_are_never_emitted(vocab, params):
    """-inf logits, and logits so low that their weight is 0 in float32: at the start, at the end, in whole blocks,
    and all but one token; also where an impossible token is the fastest or a possible one the slowest.
    """
    rng, rows, keys = np.random.default_rng(0), [], []
    for low in (-INF, -1e4):
        for possible in ([0], [vocab - 1], [vocab // 2], [1, vocab - 2], rng.choice(vocab, 1 + vocab // 20, False)):
            logits = np.full(vocab, low, np.float32)
            logits[possible] = rng.normal(0, 1, len(possible))
            impossible = np.flatnonzero(logits == low)
            fastest = [
                oracle.forced_key(int(token), FASTEST) for token in (*impossible[[0, -1]], rng.choice(impossible))
            ]
            slowest = [oracle.forced_key(int(token), SLOWEST) for token in possible[:2]]
            forced = [*fastest, *slowest, *random_keys(20, seed=len(rows))]
            rows += [logits] * len(forced)
            keys += forced
    token_B, log_prob_B, behaviour_B = fast(np.array(rows), np.array(keys), params)
    assert (np.array(rows)[np.arange(len(token_B)), token_B] > -100).all()
    assert np.isfinite(log_prob_B).all() and np.isfinite(behaviour_B).all()


@pytest.mark.parametrize("token", [0, 2, BLOCK + 1])
def test_the_ends_of_the_noise(token):
    """A token 10 nats below the others wins at the fastest time, and the likeliest one loses at the slowest; alone,
    it wins nevertheless.
    """
    low, high, alone = (np.full(BLOCK + 9, x, np.float32) for x in (0, -5, -INF))
    low[token], high[token], alone[token] = -10, 0, 0
    fastest, slowest = oracle.forced_key(token, FASTEST), oracle.forced_key(token, SLOWEST)
    token_B = check(np.array([low, high, alone]), np.array([fastest, slowest, slowest]), SamplingParams())
    assert (token_B == token).tolist() == [True, False, True]


def test_large_logits_do_not_overflow():
    logits_BV = np.float32([[3e38, 0, -3e38], [1e4, 1e4 - 1, 0], [-1e4, -1e4 - 1, -2e4]])
    check(np.repeat(logits_BV, 20, axis=0), random_keys(60), SamplingParams())


# --- the maximum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5000])
def test_argmax_is_that_of_jax(size):
    """Random scores, scores full of ties, -inf in part and throughout, and a maximum in each place of interest."""
    rng = np.random.default_rng(size)
    ties = rng.integers(-1, 3, (40, size)).astype(np.float32)
    sparse = np.where(rng.random((40, size)) < 2 / size, ties, -INF)
    places = sorted({i % size for n in (0, 1, BLOCK, 2 * BLOCK, size) for i in (n - 1, n, n + 1)})
    single = np.full((len(places), size), -INF)
    single[np.arange(len(places)), places] = -3e38
    pairs = np.zeros((len(places), size))
    pairs[np.arange(len(places)), places] = pairs[:, -1] = 1
    scores = np.concatenate([rng.normal(0, 1, (40, size)), ties, -ties, sparse, single, pairs]).astype(np.float32)
    scores = np.concatenate([scores, np.full((2, size), [[-INF], [INF]], np.float32)])
    have = jax.jit(_argmax)(scores)
    assert have.dtype == np.int32
    np.testing.assert_array_equal(have, jnp.argmax(scores, axis=-1))
    np.testing.assert_array_equal(have, np.argmax(scores, axis=-1))


def test_argmax_over_any_leading_axes():
    scores = np.random.default_rng(0).normal(0, 1, (2, 3, BLOCK + 44)).astype(np.float32)
    np.testing.assert_array_equal(_argmax(scores), np.argmax(scores, axis=-1))
    assert _argmax(scores[1, 2]) == np.argmax(scores[1, 2])


# --- robustness -----------------------------------------------------------------------------------------------


def test_rounding_differences_seldom_change_a_token():
    """What rollouts rest on: the same logits computed in another order, or in another batch, give the same token. A
    draw by the inverse CDF changes twelve of the 2,000 here.
    """
    rng, changed = np.random.default_rng(0), 0
    for turn in range(20):
        logits = rng.normal(0, 2, 49_152).astype(np.float32)
        disturbed = logits + rng.normal(0, 1e-5, len(logits)).astype(np.float32)
        keys = random_keys(100, seed=turn)
        token, other = (np.asarray(many(x, keys, SamplingParams())[0]) for x in (logits, disturbed))
        assert len(set(token.tolist())) > 50
        changed += (token != other).sum()
    assert changed <= 3


# --- the filters ----------------------------------------------------------------------------------------------


def support(logits, params: SamplingParams) -> set[int]:
    """Every token met in many draws, and with the fastest time of its own."""
    padded = np.full(40, -INF, np.float32)  # one shape, so one compilation for each `params`
    padded[: len(logits)] = logits
    keys = np.array([*random_keys(4096), *(oracle.forced_key(token, FASTEST) for token in range(40))])
    return set(np.asarray(many(padded, keys, params)[0]).tolist())


P = np.log([0.4, 0.3, 0.2, 0.1])
TIES = np.log([0.1, 0.2, 0.3, 0.2, 0.2])


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        pytest.param(P, SamplingParams(top_k=2), {0, 1}, id="top-k"),
        pytest.param(P[::-1], SamplingParams(top_k=2), {3, 2}, id="top-k, reversed"),
        pytest.param(P, SamplingParams(top_k=4), {0, 1, 2, 3}, id="k = V"),
        pytest.param(P, SamplingParams(top_p=0.39), {0}, id="top-p just below the first"),
        pytest.param(P, SamplingParams(top_p=0.41), {0, 1}, id="top-p just above the first"),
        pytest.param(P, SamplingParams(top_p=0.89), {0, 1, 2}, id="the smallest set with at least this mass"),
        pytest.param(P, SamplingParams(top_p=0.91), {0, 1, 2, 3}, id="the last one needed"),
        pytest.param(P, SamplingParams(top_p=1e-30), {0}, id="tiny top-p keeps the argmax"),
        pytest.param(np.roll(P, 2), SamplingParams(top_p=1e-30), {2}, id="tiny top-p keeps the argmax elsewhere"),
        pytest.param(P, SamplingParams(top_p=1 - 1e-9), {0, 1, 2, 3}, id="top-p that rounds to 1"),
        # 0.4 of 0.7 is 0.57: top-p over what top-k left. The other way round keeps {0, 1}.
        pytest.param(P, SamplingParams(top_k=2, top_p=0.5), {0}, id="k before p"),
        # At T = 0.5 the first has 0.16 / 0.30 = 0.53; at T = 2, 0.33. Unscaled: 0.4.
        pytest.param(P, SamplingParams(0.5, top_p=0.5), {0}, id="temperature before p, cold"),
        pytest.param(P, SamplingParams(2.0, top_p=0.39), {0, 1}, id="temperature before p, hot"),
        pytest.param(TIES, SamplingParams(top_k=1), {2}, id="no tie at the boundary"),
        pytest.param(TIES, SamplingParams(top_k=2), {1, 2, 3, 4}, id="ties at the top-k boundary stay together"),
        pytest.param(TIES, SamplingParams(top_k=3), {1, 2, 3, 4}, id="also in the middle of the ties"),
        pytest.param(TIES, SamplingParams(top_p=0.4), {1, 2, 3, 4}, id="ties at the top-p boundary stay together"),
        pytest.param(np.zeros(6), SamplingParams(top_k=1), set(range(6)), id="all tied, k = 1"),
        pytest.param(np.zeros(6), SamplingParams(top_p=0.01), set(range(6)), id="all tied, tiny p"),
        pytest.param([0, -INF, 0, -INF], SamplingParams(top_k=3), {0, 2}, id="k above the number of possible tokens"),
    ],
)
def test_support(logits, params, kept):
    assert support(logits, params) == kept
    probabilities = oracle.filtered_probabilities(logits, params)
    assert set(np.flatnonzero(probabilities).tolist()) == kept, "the oracle disagrees with the table"


def test_filters_do_not_depend_on_token_order():
    rng = np.random.default_rng(0)
    logits, order = rng.integers(-2, 3, 40), rng.permutation(40)
    for params in FEW[1:]:
        assert {int(order[t]) for t in support(logits[order], params)} == support(logits, params)


# --- log-probabilities ----------------------------------------------------------------------------------------


def test_log_prob_ignores_the_filters_and_behaviour_log_prob_does_not():
    logits_BV, key_B2 = np.float32([P] * 2), np.array([oracle.forced_key(token, FASTEST) for token in (0, 1)])
    token_B, log_prob_B, behaviour_B = fast(logits_BV, key_B2, SamplingParams(top_k=2))
    np.testing.assert_array_equal(token_B, [0, 1])
    np.testing.assert_allclose(log_prob_B, np.log([0.4, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(behaviour_B, np.log([4 / 7, 3 / 7]), rtol=1e-6)


def test_without_filters_both_log_probs_are_the_same_numbers():
    rng = np.random.default_rng(0)
    _, log_prob_B, behaviour_B = fast(
        rng.normal(0, 2, (50, 30)).astype(np.float32), random_keys(50), SamplingParams(0.6)
    )
    np.testing.assert_array_equal(log_prob_B, behaviour_B)


# --- greedy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [[0, 0], oracle.forced_key(3, FASTEST).tolist()], ids=str)
def test_greedy_takes_the_first_argmax_for_certain(key):
    logits_BV = np.float32([[0, 3, 1, 3], [-INF, -INF, -5, -INF], [7, 0, 0, 0]])
    token_B, log_prob_B, behaviour_B = fast(logits_BV, np.uint32([key] * 3), GREEDY)
    assert token_B.dtype == np.int32
    np.testing.assert_array_equal(token_B, [1, 2, 0])
    np.testing.assert_array_equal(log_prob_B, np.zeros(3))
    np.testing.assert_array_equal(behaviour_B, np.zeros(3))


def test_low_temperatures_approach_greedy():
    rng = np.random.default_rng(0)
    logits_BV = rng.normal(0, 1, (200, 50)).astype(np.float32)
    token_B = fast(logits_BV, random_keys(200), SamplingParams(1e-5))[0]
    np.testing.assert_array_equal(token_B, fast(logits_BV, random_keys(200), GREEDY)[0])


# --- frequencies ----------------------------------------------------------------------------------------------

ROWS, POSITIONS = 16, 13_000
DRAWS = ROWS * POSITIONS


@functools.cache
def row_keys() -> np.ndarray:
    """The keys [row, position, 2] of the rows of one group, as rollouts use them."""
    keys_B2 = noise.row_keys(
        0, np.ones(ROWS, np.uint32), np.zeros((ROWS, 2), np.uint32), np.arange(ROWS, dtype=np.int32)
    )
    return np.asarray(jax.jit(noise.position_keys)(keys_B2, np.broadcast_to(np.arange(POSITIONS), (ROWS, POSITIONS))))


def assert_distributed(counts, p) -> None:
    """Every count within 6 sigma, and all together by chi-square."""
    draws = counts.sum()
    assert (counts[p == 0] == 0).all()
    assert (np.abs(counts - draws * p) <= 6 * np.sqrt(draws * p * (1 - p)) + 1e-9).all()
    often = draws * p > 5
    expected = draws * p[often] * counts[often].sum() / (draws * p[often].sum())
    assert stats.chisquare(counts[often], expected).pvalue > 1e-6


@pytest.mark.parametrize(
    ("vocab", "params"),
    [
        (12, SamplingParams()),
        (12, SamplingParams(0.5)),
        (12, SamplingParams(1.0, top_k=5)),
        (12, SamplingParams(1.0, top_p=0.7)),
        (12, SamplingParams(1.7, top_k=8, top_p=0.8)),
        (2 * BLOCK + 7, SamplingParams()),
        (2 * BLOCK + 7, SamplingParams(1.3, top_k=40)),
    ],
    ids=str,
)
def test_frequencies(vocab, params):
    """Every token within 6 sigma of the exact softmax, and all together by chi-square."""
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    counts = sum(np.bincount(many(logits, keys, params)[0], minlength=vocab) for keys in row_keys())
    assert counts.sum() == DRAWS
    assert_distributed(counts, oracle.filtered_probabilities(logits, params))


# --- fresh and coupled noise ----------------------------------------------------------------------------------

RUNS = 200_000  # first tokens, each of another row
LOGITS = np.log(np.float32([0.22, 0.17, 0.14, 0.11, 0.09, 0.08, 0.06, 0.05, 0.04, 0.02, 0.015, 0.005]))
PLAIN = SamplingParams()
FILTERS = [
    PLAIN,
    SamplingParams(0.7),
    SamplingParams(1.3),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(0.7, top_k=8, top_p=0.8),
]
position_keys = jax.jit(noise.position_keys)


@functools.cache
def run_keys(kind: str, count: int = RUNS, sample: int = 0) -> np.ndarray:
    """The keys [row, 2] of rows that differ in one thing, at one position."""
    word, prompts, samples = noise.coupled_word(3, 0, 4), [12345], sample
    match kind:
        case "fresh: over steps":
            word = np.arange(count)
        case "coupled: over prompts":  # 64-bit ids, as hashes are
            prompts = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
        case "coupled: over samples":
            samples = np.arange(count)
        case "coupled: over rounds":
            word = np.array([noise.coupled_word(epoch, sample, 1) for epoch in range(count)])
    keys_B2 = noise.row_keys(
        0,
        np.broadcast_to(np.asarray(word, np.uint32), count),
        np.broadcast_to(noise.prompt_words(prompts), (count, 2)),
        np.broadcast_to(np.asarray(samples, np.int32), count),
    )
    return np.asarray(position_keys(keys_B2, np.full((count, 1), 5)))[:, 0]


def tokens(logits, keys, params=PLAIN) -> np.ndarray:
    return np.asarray(many(logits, keys, params)[0])


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        *(("fresh: over steps", params) for params in FILTERS),
        *(("coupled: over prompts", params) for params in FILTERS),
        ("coupled: over samples", PLAIN),
        ("coupled: over rounds", PLAIN),
    ],
    ids=str,
)
def test_each_rollout_is_an_exact_sample(kind, params):
    """Of its own policy, whichever noise it meets: 200,000 draws against the exact softmax."""
    counts = np.bincount(tokens(LOGITS, run_keys(kind), params), minlength=len(LOGITS))
    assert_distributed(counts, oracle.filtered_probabilities(LOGITS, params))


@pytest.mark.parametrize("kind", ["fresh: over steps", "coupled: over prompts", "coupled: over rounds"])
def test_samples_of_a_group_are_drawn_independently(kind):
    """Pairs of tokens have the product of the probabilities, also where all samples meet coupled noise."""
    p = oracle.filtered_probabilities(LOGITS, PLAIN)
    first, second, third = (tokens(LOGITS, run_keys(kind, sample=i)).astype(int) for i in (0, 1, 7))
    for one, other in ((first, second), (first, third), (second, third)):
        assert_distributed(np.bincount(one * 12 + other, minlength=144), np.outer(p, p).ravel())


def test_rounds_are_independent_and_epochs_of_a_round_are_equal():
    """What refresh_epochs renews is new, and what it keeps is kept."""
    prompts = noise.prompt_words(np.random.default_rng(1).integers(0, 2**64, RUNS, np.uint64))

    def epoch(number):
        word = np.full(RUNS, noise.coupled_word(number, 1, 3), np.uint32)
        keys_B2 = noise.row_keys(0, word, prompts, np.ones(RUNS, np.int32))
        return tokens(LOGITS, np.asarray(position_keys(keys_B2, np.zeros((RUNS, 1), int)))[:, 0]).astype(int)

    p = oracle.filtered_probabilities(LOGITS, PLAIN)
    before, after = epoch(1), epoch(2)  # sample 1 is renewed in epochs 2, 5, ...
    assert_distributed(np.bincount(before * 12 + after, minlength=144), np.outer(p, p).ravel())
    np.testing.assert_array_equal(epoch(4), after)


def nearby(change: float) -> np.ndarray:
    """The logits of a policy that has moved a little."""
    return LOGITS + np.random.default_rng(5).normal(0, change, len(LOGITS)).astype(np.float32)


@pytest.mark.parametrize("change", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("params", [PLAIN, FILTERS[-1]], ids=str)
def test_nearby_policies_draw_the_same_token(change, params):
    """Under coupled noise with probability sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x), which is at
    least (1 - d) / (1 + d) at a total variation distance of d, and at most 1 - d; with fresh noise p . q, no more.
    """
    keys, new = run_keys("coupled: over prompts"), nearby(change)
    p, q = (oracle.filtered_probabilities(x, params) for x in (LOGITS, new))
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both)
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) - 1e-12 <= exact <= 1 - distance + 1e-12

    def matches(other_keys) -> float:
        return float((tokens(LOGITS, keys, params) == tokens(new, other_keys, params)).mean())

    coupled, independent = matches(keys), matches(run_keys("coupled: over rounds"))
    sigma = np.sqrt(exact * (1 - exact) / RUNS)
    assert abs(coupled - exact) <= 6 * sigma
    assert coupled >= (1 - distance) / (1 + distance) - 6 * sigma
    chance = float(p @ q)
    assert abs(independent - chance) <= 6 * np.sqrt(chance * (1 - chance) / RUNS)
    assert coupled > independent + 0.1


def test_each_policy_is_sampled_exactly_under_the_noise_that_both_meet():
    """Coupling is between them; neither pays for it."""
    for change in (0.3, 1.0):
        counts = np.bincount(tokens(nearby(change), run_keys("coupled: over prompts")), minlength=len(LOGITS))
        assert_distributed(counts, oracle.filtered_probabilities(nearby(change), PLAIN))


def test_an_unchanged_policy_repeats_itself():
    first = tokens(LOGITS, run_keys("coupled: over prompts")[:1000])
    np.testing.assert_array_equal(tokens(LOGITS.copy(), run_keys("coupled: over prompts")[:1000]), first)
    assert len(set(first.tolist())) > 6


# --- wrong input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"temperature": -0.1}, "rollout.temperature=-0.1"),
        ({"temperature": float("nan")}, "rollout.temperature=nan"),
        ({"top_k": -1}, "rollout.top_k=-1"),
        ({"top_p": 0.0}, "rollout.top_p=0.0"),
        ({"top_p": 1.1}, "rollout.top_p=1.1"),
        ({"top_p": float("nan")}, "rollout.top_p=nan"),
    ],
)
def test_wrong_parameters_name_their_field(wrong, field):
    with pytest.raises(InputError, match=field):
        SamplingParams(**wrong)
