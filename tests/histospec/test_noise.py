"""The noise of a rollout: a function of (seed, noise word, prompt, sample, position) and of nothing else."""

import contextlib

import hypothesis
import jax
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from scipy import stats

from rhyme_jax.histospec import noise

PROMPT = 0x0123_4567_89AB_CDEF
GOLDEN_RATIO = 0x9E3779B9  # the step of the vocabulary counter
MOST = 2**32 - 1

position_keys = jax.jit(noise.position_keys)
jitted_exponentials = jax.jit(noise.exponentials, static_argnums=1)


def keys(positions, seed=0, word=1, prompt=PROMPT, sample=2) -> np.ndarray:
    """[B, K, 2]: of one row, or of many where word, prompt or sample is a list."""
    rows = max(np.size(x) for x in (word, prompt, sample))
    word = np.broadcast_to(np.asarray(word, np.uint32), rows)
    sample = np.broadcast_to(np.asarray(sample, np.int32), rows)
    prompts = np.broadcast_to(noise.prompt_words(np.atleast_1d(np.array(prompt, np.uint64))), (rows, 2))
    row_keys = noise.row_keys(seed, word, prompts, sample)
    return np.asarray(position_keys(row_keys, np.broadcast_to(positions, (rows, np.size(positions)))))


def exponentials(keys, size) -> np.ndarray:
    return np.asarray(jitted_exponentials(np.asarray(keys, np.uint32), size))


# --- what it depends on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"word": 2},
        {"word": 1 | noise.COUPLED},
        {"sample": 3},
        {"prompt": PROMPT ^ 1},
        {"prompt": PROMPT ^ (1 << 31)},
        {"prompt": PROMPT ^ (1 << 32)},
        {"prompt": PROMPT ^ (1 << 63)},
        {"prompt": (PROMPT >> 32) | ((PROMPT & 0xFFFF_FFFF) << 32)},  # the words, swapped
        {"word": 2, "sample": 1},  # the same numbers in other roles
    ],
    ids=str,
)
def test_each_input_changes_every_word(other):
    positions = np.arange(64)
    # 128 pairs of independent words coincide with probability 3e-8.
    assert not (keys(positions) == keys(positions, **other)).any()


def test_positions_differ():
    assert all(len(np.unique(words)) == 256 for words in keys(np.arange(256))[0].T)


def test_rows_do_not_depend_on_their_batch():
    """The same row alone, in another order, and among other rows."""
    positions, samples, words = np.arange(5), np.arange(6), np.array([3, 1, 4, 1, 5, MOST])
    batch = keys(positions, word=words, sample=samples)
    order = np.array([4, 0, 5, 2, 1, 3])
    np.testing.assert_array_equal(keys(positions, word=words[order], sample=samples[order]), batch[order])
    for b in range(6):
        np.testing.assert_array_equal(keys(positions, word=words[b], sample=samples[b])[0], batch[b])


def test_positions_do_not_depend_on_their_chunk():
    whole = keys(np.arange(9))
    np.testing.assert_array_equal(np.concatenate([keys(np.arange(a, a + 3)) for a in (0, 3, 6)], 1), whole)
    np.testing.assert_array_equal(keys(np.array([7, 2]))[0], whole[0, [7, 2]])


def test_noise_does_not_depend_on_its_batch():
    """Nor on the size of the vocabulary: a padded one keeps the noise of its tokens."""
    words = keys(np.arange(5), sample=np.arange(3))
    whole = exponentials(words, 300)
    assert whole.shape == (3, 5, 300)
    np.testing.assert_array_equal(exponentials(words[1, 2], 300), whole[1, 2])
    np.testing.assert_array_equal(exponentials(words[::-1, 3:], 41), whole[::-1, 3:, :41])


def test_compilation_changes_nothing():
    row = noise.row_keys(0, np.array([1], np.uint32), noise.prompt_words([PROMPT]), np.array([2], np.int32))
    words = noise.position_keys(row, np.arange(5)[None])
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words, keys(np.arange(5)))
    np.testing.assert_allclose(noise.exponentials(words, 40), exponentials(words, 40), rtol=3e-7)


GOLDEN_KEYS = [[571328124, 3748334019], [2230910443, 1298102225], [1695527663, 4204060599]]
GOLDEN_ZERO_KEYS = [[3952908011, 3835524538], [4274742258, 3380111416], [2302395330, 2478373364]]
GOLDEN_TIMES = [[0.2140407716, 2.293394459, 1.655770634], [0.3795141264, 1.173327963, 0.4938563956]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"default_prng_impl": "rbg"},
        {"threefry_partitionable": False},
        {"enable_x64": True},
        {"default_prng_impl": "unsafe_rbg", "threefry_partitionable": False, "enable_x64": True},
    ],
    ids=str,
)
def test_golden_values(settings):
    """Stored runs resume with these numbers. Where a jax upgrade changes them, no run made before it can be
    resumed exactly: say so in the release notes before updating them.
    """
    usual = exponentials(keys([0, 1], seed=7, word=3, sample=5)[0], 1000)
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(getattr(jax, name)(value))
        # Another default generator compiles nothing anew: it is felt only where nothing is compiled.
        for compiled in (True, False) if "default_prng_impl" in settings else (True,):
            with contextlib.nullcontext() if compiled else jax.disable_jit():
                row = noise.row_keys(7, np.array([3], np.uint32), noise.prompt_words([PROMPT]), np.array([5], np.int32))
                words = keys([0, 1, 100_000], seed=7, word=3, sample=5)[0]
                zero_words = keys([0, 1, 2], seed=0, word=0, prompt=0, sample=0)[0]
            assert row.dtype == words.dtype == np.uint32
            np.testing.assert_array_equal(row, [[1980766721, 2302476598]])
            np.testing.assert_array_equal(words, GOLDEN_KEYS)
            np.testing.assert_array_equal(zero_words, GOLDEN_ZERO_KEYS)
        times = exponentials(words[:2], 1000)
        assert times.dtype == np.float32
        np.testing.assert_allclose(times[:, [0, 1, 999]], GOLDEN_TIMES, rtol=3e-7)
        np.testing.assert_array_equal(times, usual)


def test_prompt_words():
    words = noise.prompt_words([PROMPT, 0, 2**64 - 1, 1 << 32])
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words, [[0x89AB_CDEF, 0x0123_4567], [0, 0], [0xFFFF_FFFF, 0xFFFF_FFFF], [0, 1]])


# --- noise words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2**16, 2**31 - 1])
def test_fresh_words_are_the_steps(step):
    assert noise.fresh_word(step) == step


@pytest.mark.parametrize("step", [-1, 2**31, 2**31 + 5, 2**40])
def test_steps_out_of_bounds(step):
    with pytest.raises(ValueError, match=f"noise: step {step} is outside"):
        noise.fresh_word(step)


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (-1, -1, -1)])
def test_coupled_words_of_negative_numbers(wrong):
    with pytest.raises(ValueError, match="epoch={}, sample={}, refresh_epochs={}".format(*wrong)):
        noise.coupled_word(*wrong)


@pytest.mark.parametrize(
    ("refresh_epochs", "rounds"),
    [
        # of samples 0..3, in epochs 0..5
        (0, ["000000", "000000", "000000", "000000"]),
        (1, ["012345", "123456", "234567", "345678"]),
        (2, ["001122", "011223", "112233", "122334"]),
        (3, ["000111", "001112", "011122", "111222"]),
        (4, ["000011", "000111", "001111", "011112"]),
    ],
)
def test_coupled_words(refresh_epochs, rounds):
    for sample, want in enumerate(rounds):
        words = [noise.coupled_word(epoch, sample, refresh_epochs) for epoch in range(6)]
        assert words == [noise.COUPLED + int(n) for n in want]


def renewed(refresh_epochs: int, samples: int, epoch: int) -> list[int]:
    """The samples that meet new noise in an epoch."""
    return [
        i
        for i in range(samples)
        if noise.coupled_word(epoch, i, refresh_epochs) != noise.coupled_word(epoch - 1, i, refresh_epochs)
    ]


@hypothesis.given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 40))
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_samples_take_turns(refresh_epochs, turns, epoch):
    """Each epoch renews the noise of exactly 1 / refresh_epochs of a group, all of it once in refresh_epochs."""
    samples = refresh_epochs * turns
    assert len(renewed(refresh_epochs, samples, epoch)) == turns
    round_ = [renewed(refresh_epochs, samples, epoch + e) for e in range(refresh_epochs)]
    assert sorted(i for epoch_samples in round_ for i in epoch_samples) == list(range(samples))
    # Also where a group is no multiple: one more or less.
    assert abs(len(renewed(refresh_epochs, samples + 1, epoch)) - turns) <= 1


@hypothesis.given(st.integers(0, 20), st.integers(0, 1000), st.integers(0, 10_000))
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_noise_that_was_left_does_not_come_back(refresh_epochs, sample, epoch):
    """The words of a sample only ever grow, by one at a time: a round is one run of epochs."""
    step = noise.coupled_word(epoch + 1, sample, refresh_epochs) - noise.coupled_word(epoch, sample, refresh_epochs)
    assert step in {0: [0], 1: [1]}.get(refresh_epochs, [0, 1])


def test_coupled_words_are_no_steps():
    """A run that changes from one kind to the other meets no noise twice; nor does either equal what is unknown."""
    coupled = {noise.coupled_word(e, i, m) for e in range(20) for i in range(8) for m in range(5)}
    steps = {noise.fresh_word(step) for step in (*range(100), 2**31 - 1)}
    assert not coupled & steps and min(coupled) > max(steps)
    assert noise.UNKNOWN_NOISE not in coupled | steps
    assert all(0 <= word < 2**32 for word in coupled | steps)  # they are uint32 words


def test_a_coupled_word_leaves_the_step_out():
    """The same word, prompt and sample: the same keys, in whichever step and batch a prompt comes again. Not so in
    another round, and not for fresh noise.
    """
    positions = np.arange(40)

    def visit(epoch, samples):
        return keys(positions, word=[noise.coupled_word(epoch, i, 2) for i in samples], sample=samples)

    first, again, later = visit(2, [0, 1, 2]), visit(3, [2, 0, 1]), visit(4, [0, 1, 2])
    np.testing.assert_array_equal(again[1], first[0])  # epochs 2 and 3 are one round of the even samples
    np.testing.assert_array_equal(again[0], first[2])
    np.testing.assert_array_equal(later[1], again[2])  # 3 and 4 one of the odd ones
    for x, y in ((again[2], first[1]), (later[0], first[0]), (later[2], first[2])):
        assert not (x == y).any()
    fresh = [keys(positions, word=noise.fresh_word(step)) for step in (10, 11)]
    assert not (fresh[0] == fresh[1]).any()


def test_rounds_and_samples_do_not_trade_places():
    """Sample 1 in epoch 0 and sample 0 in epoch 1 share a word, but the sample is in the key as well."""
    assert noise.coupled_word(0, 1, 1) == noise.coupled_word(1, 0, 1)
    word = noise.coupled_word(0, 1, 1)
    assert not (keys(np.arange(40), word=word, sample=1) == keys(np.arange(40), word=word, sample=0)).any()


# --- its formula ----------------------------------------------------------------------------------------------


def test_the_hash_is_murmur3s():
    """The empty text's published hashes are those of its seed."""
    seeds, hashes = np.uint32([0, 1, MOST]), [0, 0x514E28B7, 0x81F16F39]
    np.testing.assert_array_equal(oracle.finalize(seeds), hashes)
    np.testing.assert_array_equal(noise._finalize(jax.numpy.asarray(seeds)), hashes)


def test_exponentials_are_the_oracles():
    words = np.random.default_rng(0).integers(0, 2**32, (20, 2), np.uint32)
    words[:4] = [[0, 0], [MOST, MOST], [0, MOST], [MOST, 0]]
    have = exponentials(words, 50_000)
    assert have.dtype == np.float32 and np.isfinite(have).all() and have.min() > 0
    np.testing.assert_allclose(have, oracle.exponentials(words, 50_000), rtol=1e-6)


def test_every_hash_gives_a_positive_finite_time():
    """From the smallest hash to the largest, and around each power of two, where float32 begins to round them."""
    edges = {2**n + d for n in range(33) for d in (-129, -128, -127, -2, -1, 0, 1, 2, 127, 128, 129)}
    bits = np.array(sorted({0, MOST} | {b for b in edges if 0 <= b <= MOST}))
    for index in (0, 39):
        words = np.array([oracle.forced_key(index, int(b)) for b in bits])
        np.testing.assert_array_equal(oracle.noise_bits(words, 40)[:, index], bits)
        times = exponentials(words, 40)[:, index].astype(np.float64)
        assert np.isfinite(times).all() and times[0] > 1e-10 and (np.diff(times) >= 0).all()
        np.testing.assert_allclose(times, oracle.exponentials(words, 40)[:, index], rtol=1e-6)
        # Rounding moves a uniform number by at most 2^-24 of itself: little at the fast end, which decides.
        exact = -np.log1p(-(bits + 0.5) / 2**32)
        np.testing.assert_allclose(times[bits < 2**28], exact[bits < 2**28], rtol=3e-7)
        assert times[0] < 1.2e-10 and times[-1] == pytest.approx(24 * np.log(2))


# --- its law --------------------------------------------------------------------------------------------------

SAMPLES, LONG, FEW = 8, 25_000, 6


@pytest.fixture(scope="module")
def group() -> np.ndarray:
    """Times [sample, position, index] of the first few tokens over one group: 1,200,000 in all."""
    return exponentials(keys(np.arange(LONG), sample=np.arange(SAMPLES)), FEW)


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    """The keys [row, 2] of `vocabularies`."""
    return keys(np.arange(4), sample=np.arange(6)).reshape(24, 2)


@pytest.fixture(scope="module")
def vocabularies(words) -> np.ndarray:
    """Times [row, index] over whole vocabularies: 1,179,648 in all."""
    return exponentials(words, 49_152)


def assert_exponential(times) -> None:
    assert stats.kstest(times.ravel(), "expon").pvalue > 1e-6
    counts = np.bincount((-np.expm1(-times.ravel()) * 1000).astype(int), minlength=1000)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_exponential_over_positions(group):
    assert_exponential(group)
    for row in group:
        assert_exponential(row)
    for token in np.moveaxis(group, -1, 0):
        assert_exponential(token)


def test_exponential_over_the_vocabulary(vocabularies):
    assert_exponential(vocabularies)
    for row in vocabularies:
        assert stats.kstest(row, "expon").pvalue > 1e-6


def test_exponential_over_rows_at_the_first_position():
    """The other direction: first tokens over many prompts, steps, rounds and samples."""
    prompts = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    for many in (
        {"prompt": prompts},
        {"word": np.arange(20_000)},
        {"word": noise.COUPLED + np.arange(20_000)},
        {"sample": np.arange(20_000)},
    ):
        for token in exponentials(keys([0], **many)[:, 0], FEW).T:
            assert stats.kstest(token, "expon").pvalue > 1e-6


def test_the_fastest_times_keep_their_share(words):
    """The winners of a race over a large vocabulary come from the far end of the law."""
    times = exponentials(words[:16], 2**20)
    for limit in (1e-3, 1e-4, 1e-5, 1e-6):
        assert stats.binomtest(int((times < limit).sum()), times.size, -np.expm1(-limit)).pvalue > 1e-6


def test_each_bit_of_the_hash_is_fair(words):
    """Of the hash that `test_exponentials_are_the_oracles` holds the noise to."""
    bits = oracle.noise_bits(words, 49_152).ravel()
    for n in range(32):
        ones = int(((bits >> np.uint32(n)) & 1).sum())
        assert stats.binomtest(ones, len(bits)).pvalue > 1e-6, n
    for byte in (bits >> np.uint32(24), bits & np.uint32(255)):
        assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-6
    pairs = (bits >> np.uint32(24)) << np.uint32(8) | bits & np.uint32(255)  # the high bits given the low ones
    assert stats.chisquare(np.bincount(pairs, minlength=65536)).pvalue > 1e-6


# --- independence ---------------------------------------------------------------------------------------------


def assert_uncorrelated(x, y, about=None) -> None:
    """Within 6 sigma: the correlation of n independent pairs has standard deviation 1 / sqrt(n)."""
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 6 / np.sqrt(x.size), about


def assert_independent(x, y, about=None) -> None:
    """Uncorrelated, and spread evenly over a 10 x 10 grid of tenths: no dependence beyond the linear one either."""
    assert_uncorrelated(x, y, about)
    x, y = ((-np.expm1(-z.ravel()) * 10).astype(np.int32) for z in (x, y))
    assert stats.chisquare(np.bincount(x * 10 + y, minlength=100)).pvalue > 1e-6, about


def test_samples_of_a_group_are_independent(group):
    for i in range(SAMPLES):
        for j in range(i):
            assert_independent(group[i], group[j], (i, j))


@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_positions_are_independent(group, lag):
    assert_independent(group[:, lag:], group[:, :-lag])


def test_whole_vocabularies_of_neighbouring_rows_are_independent(vocabularies):
    for i in range(len(vocabularies)):
        assert_independent(vocabularies[i], vocabularies[i - 1], i)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 255, 256, 1024])
def test_vocabulary_entries_are_independent(vocabularies, lag):
    assert_independent(vocabularies[:, lag:], vocabularies[:, :-lag])


def test_the_first_vocabulary_entries_are_independent(group):
    """Over positions, rather than along the vocabulary."""
    for i in range(FEW):
        for j in range(i):
            assert_independent(group[..., i], group[..., j], (i, j))


@pytest.mark.parametrize(
    "other", [{"word": 2}, {"word": noise.COUPLED | 1}, {"prompt": PROMPT + 1}, {"seed": 1}], ids=str
)
def test_steps_prompts_and_seeds_are_independent(group, other):
    assert_independent(group, exponentials(keys(np.arange(LONG), sample=np.arange(SAMPLES), **other), FEW))


SIZE = 2**19


@pytest.mark.parametrize("word", [0, 1])
def test_keys_that_differ_in_one_bit_are_uncorrelated(words, word):
    """Threefry makes such pairs by chance only; a weaker hash would show here. Bits of the second word pass a single
    round, which for some of them leaves tenths a few percent off their share: no more is asked there.
    """
    key, check = words[0], (assert_independent, assert_uncorrelated)[word]
    base = exponentials(key, SIZE)
    for n in range(32):
        check(base, exponentials(key ^ np.uint32([word == 0, word == 1]) << np.uint32(n), SIZE), n)


def test_related_keys_are_independent(words):
    """Keys apart by steps of the vocabulary counter, keys with a word in common, and words in other roles."""
    (first, second), strangers = words[0], words[1:9]
    related = {
        **{f"{n} steps in word 0": (int(first) + n * GOLDEN_RATIO, second) for n in (-2, -1, 1, 2)},
        **{f"{n} steps in word 1": (first, int(second) + n * GOLDEN_RATIO) for n in (-2, -1, 1, 2)},
        **{f"the first word of {i}": (first, other) for i, (_, other) in enumerate(strangers)},
        **{f"the second word of {i}": (other, second) for i, (other, _) in enumerate(strangers)},
        "swapped": (second, first),
        "equal words": (first, first),
        "all bits": (~first, ~second),
    }
    base = exponentials(words[0], SIZE)
    for about, key in related.items():
        assert_independent(base, exponentials([int(word) % 2**32 for word in key], SIZE), about)


def test_a_step_of_the_first_word_shifts_the_noise(words):
    """The first word is where the counter starts. Rows numbered in it would share their noise: keys must be hashes."""
    shifted = exponentials(words[0] + np.uint32([GOLDEN_RATIO, 0]), 1000)
    np.testing.assert_array_equal(shifted[:-1], exponentials(words[0], 1000)[1:])
