"""The exactness proof: speculative rollouts are those of plain decoding, which are those of a slow oracle; no
history, company or mesh changes them; and what is recorded about them is right.

`test_tail` is about what the engine does with its batch, `test_choice` about how much it drafts.
"""

import dataclasses
import functools

import jax
import numpy as np
import oracle
import pytest
from helpers import group_requests, one_device, random_prompts
from world import (
    BUDGETS,
    CONFIGS,
    EOS,
    FORETOLD,
    GROUPS,
    KIND_N,
    LONGEST,
    MODEL,
    NEAR,
    PROMPTS,
    REQUESTS,
    SAMPLES,
    SEED,
    STEP,
    UNSEEN,
    accepted_from,
    as_block,
    assert_same,
    by_group,
    check_records,
    counting_compilations,
    coupled,
    draft_with,
    engine,
    make_engine,
    mixed_history,
    one_size,
    params,
    pick,
    plain,
    policy,
    remembered,
    speculative,
)

from rhyme_jax.errors import InputError
from rhyme_jax.histospec.budget import WINDOWS
from rhyme_jax.histospec.drafts import MAX_MATCH, OWN, SELF, SEPARATOR, SIBLINGS, SOURCES, DraftRules, HistoryBlock
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.noise import COUPLED, UNKNOWN_NOISE, coupled_word
from rhyme_jax.histospec.rollouts import Request
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.params import ROLLOUT_RULES, init_params, make_mesh, param_shardings
from rhyme_jax.models.scoring import score_responses

SAMPLINGS = {name: config.sampling for name, config in CONFIGS.items()}


# --- speculative == plain -------------------------------------------------------------------------------------

CASES = [
    # engine, K of the chunks, least chance that a draft is made longer for
    ("T=1", [2], 0.0),
    ("T=1", [4], 0.0),
    ("T=1", [8], 0.3),
    ("T=1", [16], 0.0),
    ("T=1", [16, 1, 4, 8, 2, 1, 1], 0.1),
    ("T=0.7", [8], 0.0),
    ("greedy", [4], 0.0),
    ("greedy", [4, 1], 0.0),
    ("T=1.3 k=12 p=0.8", [16], 0.0),
]
FEWEST = 3_500  # tokens compared in each case
assert len(CASES) * FEWEST > 30_000


@pytest.mark.parametrize(("name", "schedule", "least_chance"), CASES, ids=str)
def test_speculative_is_plain(name, schedule, least_chance):
    """Token for token, over ragged prompts and budgets, with drafts that are all right, mostly right, all wrong and
    absent, side by side.
    """
    config, want = CONFIGS[name], plain(name)
    have = speculative(name, schedule, least_chance=least_chance)
    assert want.generated > FEWEST
    assert [c.k for c in have.chunks[: len(schedule)]] == schedule
    assert_same(have, want, REQUESTS, config.sampling)
    check_records(want, REQUESTS, 0, config.sampling)
    check_records(have, REQUESTS, max(schedule) - 1, config.sampling)
    assert want.acceptance == 0 and want.tokens_per_row_forward == 1

    # The comparison means something only if drafts of every source that is on were accepted, rejected, and mixed.
    assert [SOURCES[x] for x in np.flatnonzero(accepted_from(have))] == list(config.rules.sources)
    assert ((have.proposed_N > 0) & (have.accepted_N == have.proposed_N)).any(), "no row accepted all its drafts"
    assert ((have.proposed_N > 3) & (have.accepted_N == 0)).any() or name == "greedy", "no row rejected all its drafts"
    if "history" in config.rules.sources:
        near = KIND_N == NEAR
        assert 0.2 < have.accepted_N[near].sum() / have.proposed_N[near].sum() < 0.95
    if config.rules.sources == ("history",):
        assert (have.proposed_N[KIND_N == UNSEEN] == 0).all()
        own = (KIND_N == FORETOLD) & (np.arange(len(REQUESTS)) % SAMPLES == 0)
        # Foretold in full, in windows of 2, 4, 6, ... tokens: but for the ambiguity of repeated text, less than a
        # forward for every three.
        assert have.forwards_N[own].sum() < have.response_length_N[own].sum() / 3


def test_the_cases_cover_every_choice():
    configs = [CONFIGS[name] for name, _, _ in CASES]
    assert {c.window for c in configs} == set(WINDOWS)
    assert {c.by_length for c in configs} == {False, True}
    assert {c.rules.sources for c in configs} >= {(source,) for source in SOURCES[:OWN]} | {SOURCES[:OWN]}


def test_the_texts_are_worth_comparing():
    for name in SAMPLINGS:
        r = plain(name)
        texts = [tuple(r.response(n)) for n in range(len(REQUESTS))]
        assert len(set(r.response_length_N.tolist())) > 20
        assert 0 < r.ended_N.sum() < len(REQUESTS)
        if SAMPLINGS[name].temperature > 0:
            assert len(set(texts)) > 100
            assert -2.5 < r.log_prob_NT.sum() / r.generated < -0.5


def test_drafting_for_the_long_rows_alone():
    """While the batch is crowded, a row that is expected to be short has no draft: it proposes fewer than others."""
    short_N = np.array([0 < r.expected_length < 16 for r in REQUESTS])
    have = speculative("T=0.7", [8])
    assert have.proposed_N[short_N].sum() == 0 and have.proposed_N[~short_N].sum() > 1000
    unknown = [dataclasses.replace(r, expected_length=0.0) for r in REQUESTS]
    other = speculative("T=0.7", [8], unknown)
    assert_same(other, have, unknown, SAMPLINGS["T=0.7"])
    assert other.proposed_N[short_N].sum() > 100


def test_an_eos_ends_a_row_inside_an_accepted_run():
    """Rows whose last token, an EOS, was itself drafted, with more drafts behind it."""
    reference, history = plain("T=1"), []
    ended = [n for n in range(len(REQUESTS)) if reference.ended_N[n] and reference.response_length_N[n] > 3]
    for g in range(GROUPS):
        own = [n for n in ended if n // SAMPLES == g][:1]
        history.append([[*reference.response(n), *range(3, 30)][:64] for n in own] * SAMPLES)
    have = speculative("T=1", [8], history=as_block(PROMPTS, history))
    assert_same(have, reference, REQUESTS, SAMPLINGS["T=1"])
    check_records(have, REQUESTS, 7, SAMPLINGS["T=1"])
    n = np.arange(len(REQUESTS))
    assert (have.ended_N & have.drafted_NT[n, have.response_length_N - 1]).sum() >= 3


def test_garbage_histories_change_nothing():
    """A vocabulary of six, single-token matches and no threshold: nearly every row drafts nearly every time, from
    noise with separators and EOS in any place, with any weights, any sample under any noise, and every other time
    with ids that the vocabulary does not have.
    """
    model = dataclasses.replace(MODEL, vocab_size=6, layers=1)
    weights = policy(eos_scale=0.3, model=model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 6, n).astype(np.int32) for n in (1, 2, 5, 8)]
    requests = group_requests(prompts, 4, STEP, lambda n: 1 + 2 * n)
    sampling = SamplingParams(1.5)
    config = EngineConfig(sampling, EOS, draft_buckets=(1, 4), rules=DraftRules(min_match=1, min_prob=0.0))
    garbled = one_size(make_engine(config, model=model))
    want, proposed, accepted = garbled.generate(weights, requests), 0, np.zeros(len(SOURCES))
    for i in range(12):
        tokens_GRP = rng.integers(SEPARATOR, 6, (4, 4, MAX_MATCH + 64)).astype(np.int32)
        if i % 2:
            tokens_GRP = np.where(rng.random(tokens_GRP.shape) < 0.2, rng.choice([6, 99, 2**31 - 1]), tokens_GRP)
        weight_GR = rng.choice(np.float32([0, 1e-30, 1, 1e30]), (4, 4))
        sample_GR, noise_GR = rng.integers(-1, 4, (4, 4)), rng.choice([UNKNOWN_NOISE, STEP, COUPLED], (4, 4))
        block = HistoryBlock(tokens_GRP.astype(np.int32), weight_GR, sample_GR, noise_GR)
        have = draft_with(garbled, [4], requests, block, weights)
        assert_same(have, want, requests, sampling, weights, model)
        check_records(have, requests, 3, sampling)
        proposed, accepted = proposed + have.proposed_N.sum(), accepted + accepted_from(have)
    assert proposed > 2000 and accepted.sum() > 100 and (accepted > 0).all()


def test_a_large_vocabulary_of_unlikely_tokens():
    """Where rounding has the most boundaries to move. A draw by the inverse CDF failed here: it parted two of these
    32 rows from plain decoding.
    """
    model = dataclasses.replace(MODEL, vocab_size=49_152, layers=1)
    weights = init_params(model, jax.random.key(0))
    weights["head"] *= 3
    prompts = random_prompts(4, model.vocab_size, seed=0)
    requests = group_requests(prompts, 8, STEP, LONGEST)
    large = one_size(make_engine(EngineConfig(SamplingParams(), EOS), model=model))
    want = large.generate(weights, requests)
    # Each row's own response, with a wrong token now and then.
    wrong = np.arange(LONGEST) % 11 == 10
    texts = [[np.where(wrong[: len(r)], 3, r) for r in group] for group in by_group(want, requests)]
    have = draft_with(large, [8], requests, as_block(prompts, texts), weights)
    assert want.generated > 1500 and want.log_prob_NT.sum() / want.generated < -6
    assert 0.5 < have.acceptance < 0.95 and have.forwards_N.sum() < want.generated / 2
    assert_same(have, want, requests, SamplingParams(), weights, model)
    check_records(have, requests, 7, SamplingParams())


# --- the first epoch ------------------------------------------------------------------------------------------


def test_siblings_and_self_give_drafts_before_there_is_any_history():
    """A sharp policy: samples repeat each other, and texts repeat themselves."""
    weights, empty = policy(sharpness=20.0), as_block(PROMPTS, [[]] * GROUPS)
    for name, least in (("T=1", {SIBLINGS: 1000, SELF: 200}), ("T=0.7", {SELF: 1000})):
        want = engine(name).generate(weights, REQUESTS)
        have = speculative(name, [8], REQUESTS, empty, weights)
        assert_same(have, want, REQUESTS, SAMPLINGS[name], weights)
        check_records(have, REQUESTS, 7, SAMPLINGS[name])
        accepted_X = accepted_from(have)
        assert {x for x, n in enumerate(accepted_X) if n} == set(least)
        assert all(accepted_X[x] > n for x, n in least.items())
        assert have.acceptance > 0.4 and have.tokens_per_row_forward > 1.25


# --- coupled noise --------------------------------------------------------------------------------------------


def test_an_unchanged_policy_foretells_itself_under_coupled_noise():
    requests = coupled(REQUESTS)
    want = engine("T=1").generate(params(), requests)
    history = remembered(PROMPTS, want, requests)
    for k, fewest in ((2, 1.9), (8, 6.5), (16, 11.0)):
        have = speculative("T=1", [k], requests, history)
        assert_same(have, want, requests, SAMPLINGS["T=1"])
        check_records(have, requests, k - 1, SAMPLINGS["T=1"])
        assert have.acceptance > 0.995 and have.tokens_per_row_forward > fewest
        assert accepted_from(have).argmax() == OWN and accepted_from(have)[OWN] > 0.99 * have.accepted_N.sum()


@pytest.mark.parametrize(
    ("distance", "acceptance"), [(0.002, 0.7), (0.01, 0.4), (0.05, 0.15)], ids=["near", "further", "far"]
)
def test_a_moved_policy_under_coupled_noise(distance, acceptance):
    """Exact samples of the moved policy, most of them foretold by what the first one said."""
    requests, weights = coupled(REQUESTS), policy(distance)
    history = remembered(PROMPTS, engine("T=1").generate(params(), requests), requests)
    want = engine("T=1").generate(weights, requests)
    have = speculative("T=1", [8], requests, history, weights)
    assert_same(have, want, requests, SAMPLINGS["T=1"], weights)
    check_records(have, requests, 7, SAMPLINGS["T=1"])
    assert have.acceptance > acceptance and accepted_from(have)[OWN] > 1500
    # The same histories are worth much less to requests that meet other noise.
    fresh = [dataclasses.replace(r, noise=STEP) for r in REQUESTS]
    unlike = speculative("T=1", [8], fresh, history, weights)
    assert accepted_from(unlike)[OWN] == 0 and unlike.tokens_per_row_forward < have.tokens_per_row_forward


def test_an_own_response_is_followed_past_what_was_added_and_left_out():
    """The earlier response lacks three of the tokens to come, and has two too many further on."""
    requests = coupled(REQUESTS)
    want = engine("T=1").generate(params(), requests)
    texts = [
        [[*r[:6], *r[9:25], 3, 4, *r[25:]] if len(r) > 40 else r for r in group] for group in by_group(want, requests)
    ]
    history = as_block(PROMPTS, texts, [coupled_word(0, i, 0) for i in range(SAMPLES)])
    have = speculative("T=1", [8], requests, history)
    assert_same(have, want, requests, SAMPLINGS["T=1"])
    check_records(have, requests, 7, SAMPLINGS["T=1"])
    edited = want.response_length_N > 40
    own_NT = have.source_NT[edited] == 1 + OWN
    assert edited.sum() > 20
    assert own_NT[:, :6].mean() > 0.6
    # Found again, by the match of three tokens, in both parts; unmoved pointers would foretell nothing there.
    assert own_NT[:, 16:24].mean() > 0.6 and own_NT[:, 32:40].mean() > 0.6


def test_renewed_samples_meet_other_noise():
    """With refresh, the samples whose turn it is draw anew: nothing of their own is followed."""
    first, second = coupled(REQUESTS, epoch=0, refresh=4), coupled(REQUESTS, epoch=1, refresh=4)
    earlier = engine("T=1").generate(params(), first)
    words = [coupled_word(0, i, 4) for i in range(SAMPLES)]
    history = as_block(PROMPTS, by_group(earlier, first), words)
    have = speculative("T=1", [8], second, history)
    assert_same(have, engine("T=1").generate(params(), second), second, SAMPLINGS["T=1"])
    renewed_N = np.array([r.sample % 4 == 3 for r in REQUESTS])
    assert (have.source_NT[renewed_N] != 1 + OWN).all()
    kept = np.flatnonzero(~renewed_N)
    assert_same(pick(have, kept), pick(earlier, kept), [second[n] for n in kept], SAMPLINGS["T=1"])
    assert have.accepted_N[kept].sum() > 0.98 * have.proposed_N[kept].sum()


# --- plain == slow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_is_the_slow_oracle(name):
    """The first and another sample of each prompt, about 500 tokens: without cache or batch, the distribution and
    the draw in float64.
    """
    sampling, reference, tokens = SAMPLINGS[name], plain(name), 0
    for n in [*range(0, len(REQUESTS), 2 * SAMPLES), *range(1, len(REQUESTS), SAMPLES)]:
        request = dataclasses.replace(REQUESTS[n], budget=min(REQUESTS[n].budget, 24))
        want = oracle.roll_out(params(), MODEL, sampling, EOS, SEED, request)
        assert reference.response(n)[: len(want)].tolist() == want, f"rollout {n}"
        tokens += len(want)
    assert tokens > 250


def test_coupled_rollouts_are_those_of_the_slow_oracle():
    requests = coupled(REQUESTS, epoch=5, refresh=2)
    reference = engine("T=1").generate(params(), requests)
    for n in (0, 9, 18, 27):
        request = dataclasses.replace(requests[n], budget=min(requests[n].budget, 24))
        want = oracle.roll_out(params(), MODEL, SAMPLINGS["T=1"], EOS, SEED, request)
        assert reference.response(n)[: len(want)].tolist() == want, f"rollout {n}"


# --- company --------------------------------------------------------------------------------------------------


def regrouped(order) -> tuple[list[Request], HistoryBlock]:
    """The requests in another order, with the groups of the history renumbered to fit."""
    swap = np.random.default_rng(7).permutation(GROUPS)  # old group -> new
    back = np.argsort(swap)
    requests = [dataclasses.replace(REQUESTS[n], group=int(swap[REQUESTS[n].group])) for n in order]
    return requests, HistoryBlock(*(x[back] for x in vars(mixed_history("T=1")).values()))


@pytest.mark.parametrize("order", ["reversed", "shuffled", "a part"])
@pytest.mark.parametrize("spec", [False, True])
def test_order_and_company_change_nothing(order, spec):
    """A rollout does not depend on its slot, nor on the rows beside it."""
    n = np.arange(len(REQUESTS))
    order = {
        "reversed": n[::-1],
        "shuffled": np.random.default_rng(3).permutation(n),
        "a part": np.delete(n[::-1], [3, 40])[:90],
    }[order]
    requests, history = regrouped(order)
    if spec:
        have = speculative("T=1", [8], requests, history)
    else:
        have = engine("T=1").generate(params(), requests)
    assert_same(have, pick(plain("T=1"), order), requests, SAMPLINGS["T=1"])


def test_the_budget_only_cuts():
    """A rollout with less budget is a prefix of the one with more: the budget is no input of the noise."""
    longer = [dataclasses.replace(r, budget=LONGEST) for r in REQUESTS]
    have = engine("T=1").generate(params(), longer)
    for n, request in enumerate(REQUESTS):
        np.testing.assert_array_equal(have.response(n)[: request.budget], plain("T=1").response(n))


def test_samples_steps_and_couplings_differ():
    others = [[dataclasses.replace(r, noise=STEP + 1) for r in REQUESTS], coupled(REQUESTS)]
    rollouts = [plain("T=1"), *(engine("T=1").generate(params(), requests) for requests in others)]
    texts = [tuple(r.response(n)[:10]) for r in rollouts for n in np.flatnonzero(BUDGETS >= 10)]
    assert len(set(texts)) > 0.97 * len(texts)


# --- meshes ---------------------------------------------------------------------------------------------------


@functools.cache
def on_mesh(shape):
    mesh = make_mesh(*shape)
    config = dataclasses.replace(engine("T=1").config, draft_buckets=(1, 4), max_rows=64)
    return one_size(make_engine(config, mesh)), mesh


@pytest.mark.parametrize(("shape", "spec"), [((8, 1, 1), False), ((2, 2, 2), False), ((2, 2, 2), True)], ids=str)
def test_eight_devices_make_the_same_rollouts(shape, spec):
    """Drafted and plain, and 64 rows at a time, so that rows are given to others on the way."""
    wide, mesh = on_mesh(shape)
    placed = jax.device_put(params(), param_shardings(MODEL, mesh, ROLLOUT_RULES))
    if spec:
        have = draft_with(wide, [4], REQUESTS, mixed_history("T=1"), placed)
        assert have.accepted_N.sum() > 500
    else:
        have = wide.generate(placed, REQUESTS)
    assert_same(have, plain("T=1"), REQUESTS, SAMPLINGS["T=1"])
    check_records(have, REQUESTS, 3 if spec else 0, SAMPLINGS["T=1"])

    others = [dataclasses.replace(r, noise=STEP + 1, budget=1 + r.budget // 2) for r in REQUESTS[:-9]]
    others[0] = dataclasses.replace(others[0], budget=LONGEST)
    with counting_compilations() as compiled:
        if spec:
            draft_with(wide, [4], others, as_block(PROMPTS, [[[5] * 20]] * GROUPS), placed)
        else:
            wide.generate(placed, others)
    assert compiled == [], "other texts and lengths of the same shapes were compiled anew"


@pytest.mark.parametrize(
    ("mesh", "rows"), [((1, 1, 1), [1, 2, 4, 8, 128]), ((8, 1, 1), [8, 8, 8, 8, 128]), ((3, 1, 2), [3, 3, 6, 9, 129])]
)
def test_rows_fill_the_mesh(mesh, rows):
    """A power of two, rounded up to a multiple of the devices that rows are split over."""
    mesh = make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    sized = make_engine(CONFIGS["T=1"], mesh).programs
    assert [sized.row_bucket(n) for n in (1, 2, 3, 7, 100)] == rows


# --- ends and edges -------------------------------------------------------------------------------------------


def test_budgets_of_one():
    requests = [dataclasses.replace(r, budget=LONGEST if n == 0 else 1) for n, r in enumerate(REQUESTS)]
    have = speculative("T=1", [8], requests)
    check_records(have, requests, 7, SAMPLINGS["T=1"])
    assert (have.response_length_N[1:] == 1).all()
    # With one token left there is nothing to draft: the sampled token is the last.
    assert (have.proposed_N[1:] == 0).all() and (have.forwards_N[1:] == 1).all()
    for n in range(len(REQUESTS)):
        np.testing.assert_array_equal(have.response(n), plain("T=1").response(n)[: requests[n].budget])


def test_eos_as_the_first_token():
    weights = policy(eos_scale=1.8)
    want = engine("T=1").generate(weights, REQUESTS)
    history = as_block(PROMPTS, [[want.response(g * SAMPLES)] * SAMPLES for g in range(GROUPS)])
    have = speculative("T=1", [8], REQUESTS, history, weights)
    assert_same(have, want, REQUESTS, SAMPLINGS["T=1"], weights)
    check_records(have, REQUESTS, 7, SAMPLINGS["T=1"])
    empty = have.response_length_N == 1
    assert (empty & have.ended_N & (have.accepted_N == 1)).any(), "an EOS that was drafted"
    assert (empty & have.ended_N & (have.accepted_N == 0)).any(), "an EOS that was not"
    assert {int(have.response(n)[0]) for n in np.flatnonzero(empty & have.ended_N)} == set(EOS)


def test_eos_and_padding_ids_in_the_prompt_end_nothing():
    for p, ids in ((0, {0}), (1, {2}), (2, {0, 2}), (3, {0})):
        assert ids <= set(PROMPTS[p].tolist())
        group = slice(p * SAMPLES, (p + 1) * SAMPLES)
        assert plain("T=1").response_length_N[group].max() > 10


def test_drafts_at_the_end_of_the_longest_context():
    """Prompt and budget fill max_positions exactly, and the last run, accepted in full, is fed with padding that
    reaches past the buffers. A clamped write would fall on the position that the last token is sampled from.
    """
    model = dataclasses.replace(MODEL, layers=1, max_positions=24)
    weights = policy(eos_scale=0.1, model=model)
    requests = group_requests([np.arange(3, 11, dtype=np.int32)], 8, STEP, 16)
    config = EngineConfig(SamplingParams(), EOS, (1, 16), DraftRules(("history",)), prompt_slots=8)
    tight = one_size(make_engine(config, model=model))
    want = tight.generate(weights, requests)
    n = int(np.flatnonzero(want.response_length_N == 16)[0])
    own = want.response(n)
    # Wrong in its first token, so that drafts start with the fifth, when three tokens match again.
    history = as_block([requests[0].prompt], [[[own[0] + 1, *own[1:]]]], tokens=16)
    have = draft_with(tight, [16], requests, history, weights)
    assert have.tokens_NS.shape[1] == 24
    assert_same(have, want, requests, SamplingParams(), weights, model)
    check_records(have, requests, 15, SamplingParams())
    assert have.drafted_NT[n].tolist() == [False] * 4 + [True] * 11 + [False]


# --- what is recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "k"), [("T=0.7", 8), ("T=1.3 k=12 p=0.8", 16)])
def test_log_probs_are_those_of_the_learner(name, k):
    """Without it the first ratio of policies would not be 1."""
    r, sampling = speculative(name, [k]), SAMPLINGS[name]
    slots = r.log_prob_NT.shape[1]
    score = jax.jit(score_responses, static_argnums=(1, 4), static_argnames="temperature")
    log_prob_NT, _ = score(params(), MODEL, r.tokens_NS, r.prompt_length_N, slots, temperature=sampling.temperature)
    inside_NT = np.arange(slots) < r.response_length_N[:, None]
    np.testing.assert_allclose(r.log_prob_NT[inside_NT], np.asarray(log_prob_NT)[inside_NT], atol=1e-4)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_behaviour_log_probs_are_those_of_the_filtered_distribution(name):
    r, sampling = plain(name), SAMPLINGS[name]
    logits_NSV = np.asarray(oracle.sequence_logits(params(), MODEL, r.tokens_NS))
    for n in range(0, len(REQUESTS), SAMPLES):
        for t, token in enumerate(r.response(n)):
            if sampling.temperature == 0:
                want = 0.0
            else:
                want = np.log(
                    oracle.filtered_probabilities(logits_NSV[n, r.prompt_length_N[n] + t - 1], sampling)[token]
                )
            np.testing.assert_allclose(r.behaviour_log_prob_NT[n, t], want, atol=1e-4)
    if sampling.filters:
        assert (r.behaviour_log_prob_NT > r.log_prob_NT + 0.01).any()


# --- wrong input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no requests"),
        ([dataclasses.replace(REQUESTS[0], prompt=np.zeros(0, np.int32))], "is empty"),
        ([REQUESTS[0], dataclasses.replace(REQUESTS[1], budget=0)], "rollout.max_new_tokens=0"),
        ([dataclasses.replace(REQUESTS[0], budget=-3)], "rollout.max_new_tokens=-3"),
        ([dataclasses.replace(REQUESTS[0], budget=MODEL.max_positions)], "256 positions"),
    ],
)
def test_wrong_requests(requests, message):
    with pytest.raises(InputError, match=message):
        engine("T=1").generate(params(), requests)
    with pytest.raises(InputError, match=message):
        engine("T=1").prepare(params(), requests, None)


@pytest.mark.parametrize("group", [-1, GROUPS])
def test_a_request_of_a_group_that_the_history_lacks(group):
    with pytest.raises(ValueError, match=f"group {group}"):
        engine("T=1").generate(params(), [dataclasses.replace(REQUESTS[0], group=group)], mixed_history("T=1"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"draft_buckets": ()}, "draft.buckets="),
        ({"draft_buckets": (4, 8)}, "draft.buckets="),
        ({"draft_buckets": (1, 0)}, "draft.buckets="),
        ({"eos_ids": ()}, "rollout.eos_ids="),
        ({"rules": DraftRules(min_match=0)}, "draft.min_match=0"),
        ({"rules": DraftRules(min_match=MAX_MATCH + 1)}, "draft.min_match=8"),
        ({"rules": DraftRules(min_prob=1.1)}, "draft.min_prob=1.1"),
        ({"rules": DraftRules(("history", "own"))}, "no source 'own'"),
        ({"window": "wide"}, "draft.window='wide'"),
        ({"chunk": 0}, "rollout.chunk=0"),
        ({"max_rows": 0}, "rollout.max_rows=0"),
        ({"prompt_slots": 0}, "rollout.prompt_slots=0"),
    ],
    ids=str,
)
def test_wrong_settings_name_their_field(wrong, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**{"sampling": SamplingParams(), "eos_ids": EOS, **wrong})


def test_nothing_is_drafted_where_drafting_is_off():
    """Neither without sources nor without buckets, whatever is known."""
    for off in ({"rules": DraftRules(())}, {"draft_buckets": (1,)}):
        silent = RolloutEngine(MODEL, dataclasses.replace(engine("T=1").config, **off), one_device(), SEED)
        silent.programs = engine("T=1").programs
        have = silent.generate(params(), REQUESTS, mixed_history("T=1"))
        assert have.tally is None and {c.k for c in have.chunks} == {1}
        assert_same(have, plain("T=1"), REQUESTS, SAMPLINGS["T=1"])
