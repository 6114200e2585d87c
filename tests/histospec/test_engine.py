"""The exactness proof: speculative rollouts are those of plain decoding, which are those of a slow oracle; no
schedule, batch or mesh changes them; and what is recorded about them is right.

Shapes are the same wherever a test allows it (128 rows, prompts of up to 16 tokens, budgets of up to 64), so that
few programs are compiled.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import SMALL, group_requests, one_device, random_prompts

from rhyme_jax.errors import InputError
from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec.drafts import MAX_MATCH, SEPARATOR, HistoryBlock
from rhyme_jax.histospec.engine import PROBE, EngineConfig, Request, RolloutEngine, Rollouts
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.params import ROLLOUT_RULES, init_params, make_mesh, param_shardings
from rhyme_jax.models.scoring import score_responses

SEED, STEP, GROUPS, SAMPLES, LONGEST = 5, 3, 16, 8, 64
EOS = (2, 0)  # 0 is also the id that pads prompts and responses
MODEL = dataclasses.replace(SMALL, tie_embeddings=False)

SAMPLINGS = {
    "T=1": SamplingParams(),
    "T=0.7": SamplingParams(0.7),
    "greedy": SamplingParams(0.0),
    "T=1.3 k=12 p=0.8": SamplingParams(1.3, top_k=12, top_p=0.8),
}
K_BUCKETS = (1, 2, 4, 8, 16)


class ScheduledEngine(RolloutEngine):
    """Takes K from `schedule`, chunk by chunk, so that one engine serves for every K."""

    schedule = itertools.repeat(8)

    def __init__(self, *args):
        super().__init__(*args)
        chunk = self._chunk

        def scheduled_chunk(params, history, *rest, k):
            k = 1 if history is None else next(self.schedule)
            return chunk(params, history if k > 1 else None, *rest, k=k)

        self._chunk = scheduled_chunk

    def _smaller_batch(self, rows):
        """Shrinks once at most, to save compilations: `test_the_schedule_changes_nothing` shrinks twice."""
        smaller = super()._smaller_batch(rows)
        return smaller if smaller >= 32 else 0


# --- the world: a policy, prompts, and histories of several kinds ---------------------------------------------


def policy(distance=0.0, eos_scale=0.7, model=MODEL) -> dict:
    """Random weights whose text is neither constant nor uniform: about 1.4 nats a token, and an EOS now and then.
    `distance` moves every weight by that share of its spread.
    """
    params, other = (init_params(model, jax.random.key(seed)) for seed in (0, 1))
    params = jax.tree.map(lambda x, y: x + distance * jnp.std(x) * y, params, other)
    return {**params, "head": 3 * params["head"].at[:, np.array(EOS)].multiply(eos_scale)}


def make_prompts() -> list[np.ndarray]:
    prompts = random_prompts(GROUPS, MODEL.vocab_size, seed=0)
    prompts[0][-1], prompts[1][0], prompts[2][1:3], prompts[3][:] = 0, 2, (0, 2), 0  # EOS and padding ids inside
    return prompts


PROMPTS = make_prompts()
BUDGETS = np.random.default_rng(1).integers(1, LONGEST + 1, GROUPS * SAMPLES)
BUDGETS[::SAMPLES] = LONGEST  # the first of each group
REQUESTS = group_requests(PROMPTS, SAMPLES, STEP, lambda n: int(BUDGETS[n]))


@functools.cache
def params():
    return policy()


@functools.cache
def engine(name: str) -> ScheduledEngine:
    config = EngineConfig(SAMPLINGS[name], EOS, draft_buckets=K_BUCKETS, min_prob=0.4, chunk=8, prompt_slots=16)
    return ScheduledEngine(MODEL, config, one_device(), SEED)


@functools.cache
def plain(name: str) -> Rollouts:
    """The reference: no history, so K = 1 throughout."""
    return engine(name).generate(params(), REQUESTS)


def speculative(name: str, schedule, requests=REQUESTS, history=None, weights=None) -> Rollouts:
    engine(name).schedule = itertools.cycle(schedule)
    return engine(name).generate(weights or params(), requests, history or mixed_history(name))


OWN, NEAR, SPOILED, UNSEEN = range(4)
KIND_N = np.arange(GROUPS * SAMPLES) // SAMPLES % 4  # of each request's history


@functools.cache
def mixed_history(name: str) -> HistoryBlock:
    """By turns: the very response to come; those of a nearby policy; a response made to mislead at every token;
    none.
    """
    reference = plain(name)
    # Under the same noise, so that texts part late; greedy texts are the same until the policies differ by more.
    near = engine(name).generate(policy(distance=0.1 if name == "greedy" else 0.015), REQUESTS)
    histories = []
    for g, prompt in enumerate(PROMPTS):
        first, group = g * SAMPLES, range(g * SAMPLES, (g + 1) * SAMPLES)
        own = reference.response(first)
        texts = [[own], [near.response(n) for n in group], [mislead(prompt, own)], []]
        histories.append(texts[g % 4])
    return as_block(PROMPTS, histories)


def as_block(prompts, histories) -> HistoryBlock:
    store = HistoryStore(depth=1, max_tokens=10**6)
    for prompt, texts in zip(prompts, histories, strict=True):
        store.add(prompt, [Response(np.asarray(t, np.int32), 0.0, 0, 0) for t in texts])
    return store.query(prompts, len(prompts))


def mislead(prompt, response) -> list[int]:
    """A history in which every context of three tokens of the response is followed by a token that is wrong."""
    text = [*prompt.tolist(), *response.tolist()]
    wrong = [(t + 1) % MODEL.vocab_size for t in text]
    out = [wrong[len(prompt)]]
    for t in range(len(prompt) + 1, min(len(text), len(prompt) + 16)):
        out += [*text[t - 3 : t], wrong[t]]
    return out


# --- comparing ------------------------------------------------------------------------------------------------


def assert_same(have: Rollouts, want: Rollouts, requests, sampling, weights=None, model=MODEL) -> None:
    """Token for token, with equal ends and log-probs.

    Logits of another batch shape differ in their last bits, so where the two fastest tokens of a race are within
    1e-5 of each other, either may win. Such a coin on its edge is looked up in the oracle and is allowed, once in a
    comparison; any other difference is an error.
    """
    edges = 0
    for n, request in enumerate(requests):
        a, b = have.response(n), want.response(n)
        if len(a) == len(b) and (a == b).all():
            assert have.ended_N[n] == want.ended_N[n]
            for x, y in (
                (have.log_prob_NT, want.log_prob_NT),
                (have.behaviour_log_prob_NT, want.behaviour_log_prob_NT),
            ):
                np.testing.assert_allclose(x[n, : len(a)], y[n, : len(a)], atol=1e-4, err_msg=f"rollout {n}")
            continue
        shared = min(len(a), len(b))
        assert (a[:shared] != b[:shared]).any(), f"rollout {n}: {len(a)} tokens, wanted {len(b)}; equal so far"
        t = int(np.argmax(a[:shared] != b[:shared]))
        logits = oracle.next_logits(weights or params(), model, [*request.prompt, *a[:t]])
        near = oracle.near_draws(logits, oracle.position_keys(SEED, request)[t], sampling)
        assert {int(a[t]), int(b[t])} <= near, f"rollout {n}, position {t}: {a[t]}, wanted {b[t]}"
        edges += 1
    assert edges <= 1


def check_records(r: Rollouts, requests, most_drafts: int, sampling: SamplingParams) -> None:
    """What every row records about itself fits together."""
    n = np.arange(len(requests))
    length_N, slots = r.response_length_N, np.arange(r.log_prob_NT.shape[1])
    inside_NT = slots < length_N[:, None]
    last_N = np.array([r.response(i)[-1] for i in n])
    last_drafted_N = r.drafted_NT[n, length_N - 1]

    np.testing.assert_array_equal(r.prompt_length_N, [len(q.prompt) for q in requests])
    for i, q in enumerate(requests):
        np.testing.assert_array_equal(r.tokens_NS[i, : len(q.prompt)], q.prompt)
        np.testing.assert_array_equal(r.tokens_NS[i, len(q.prompt) + length_N[i] :], 0)
        assert not np.isin(r.response(i)[:-1], EOS).any(), "text after an EOS"
    budget_N = np.array([q.budget for q in requests])
    assert (length_N >= 1).all() and (length_N <= budget_N).all()
    np.testing.assert_array_equal(r.ended_N, np.isin(last_N, EOS))
    assert (r.ended_N | (length_N == budget_N)).all()

    np.testing.assert_array_equal(r.accepted_N, r.drafted_NT.sum(axis=1))
    assert not (r.drafted_NT & ~inside_NT).any()
    assert (r.accepted_N <= r.proposed_N).all() and (r.proposed_N <= most_drafts * r.forwards_N).all()
    # Each forward commits its accepted drafts and one token more, unless an EOS among the drafts ends the row.
    np.testing.assert_array_equal(length_N, r.forwards_N + r.accepted_N - last_drafted_N)
    assert (r.ended_N | ~last_drafted_N).all(), "the last token of a budget is never drafted"
    assert r.iterations >= r.forwards_N.max()
    assert r.generated == length_N.sum()
    assert r.acceptance == r.accepted_N.sum() / max(1, r.proposed_N.sum())
    assert r.tokens_per_row_forward == length_N.sum() / r.forwards_N.sum()

    for x_NT in (r.log_prob_NT, r.behaviour_log_prob_NT):
        assert x_NT.dtype == np.float32 and np.isfinite(x_NT).all()
        assert (x_NT[~inside_NT] == 0).all() and (x_NT <= 1e-6).all()
    assert (r.behaviour_log_prob_NT >= r.log_prob_NT - 1e-6).all()
    if not sampling.filters:
        np.testing.assert_array_equal(r.log_prob_NT, r.behaviour_log_prob_NT)


# --- speculative == plain -------------------------------------------------------------------------------------

CASES = [
    # sampling, K of the chunks
    ("T=1", [2]),
    ("T=1", [4]),
    ("T=1", [8]),
    ("T=1", [16]),
    ("T=1", [16, 1, 4, 8, 2]),
    ("T=0.7", [8]),
    ("greedy", [4]),
    ("greedy", [4, 1]),
    ("T=1.3 k=12 p=0.8", [16]),
]
FEWEST = 2_500  # tokens compared in each case
assert len(CASES) * FEWEST > 20_000


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=str)
def test_speculative_is_plain(name, schedule):
    """Token for token, over ragged prompts and budgets, with drafts that are all right, mostly right, all wrong and
    absent, side by side.
    """
    want, have = plain(name), speculative(name, schedule)
    assert want.generated > FEWEST
    assert_same(have, want, REQUESTS, SAMPLINGS[name])
    check_records(want, REQUESTS, 0, SAMPLINGS[name])
    check_records(have, REQUESTS, max(schedule) - 1, SAMPLINGS[name])
    assert want.acceptance == 0 and want.tokens_per_row_forward == 1

    # The comparison means something only if drafts were accepted, rejected, and mixed.
    near = KIND_N == NEAR
    assert 0.2 < have.accepted_N[near].sum() / have.proposed_N[near].sum() < 0.95
    assert ((have.proposed_N > 0) & (have.accepted_N == have.proposed_N)).any(), "no row accepted all its drafts"
    assert ((have.proposed_N > 3) & (have.accepted_N == 0)).any(), "no row rejected all its drafts"
    assert (have.proposed_N[KIND_N == UNSEEN] == 0).all()
    if 1 not in schedule:
        own = (KIND_N == OWN) & (np.arange(len(REQUESTS)) % SAMPLES == 0)
        # A response foretold in full takes one forward for each K tokens, but for the ambiguity of repeated text.
        assert (have.forwards_N[own] <= have.response_length_N[own] / max(schedule) * 1.5 + 2).all()


def test_the_texts_are_worth_comparing():
    for name, sampling in SAMPLINGS.items():
        r = plain(name)
        texts = [tuple(r.response(n)) for n in range(len(REQUESTS))]
        assert len(set(r.response_length_N.tolist())) > 20
        assert 0 < r.ended_N.sum() < len(REQUESTS)
        if sampling.temperature > 0:
            assert len(set(texts)) > 100
            assert -2.5 < r.log_prob_NT.sum() / r.generated < -0.5


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
    noise with separators and EOS in any place, with any weights, and every other time with ids that the
    vocabulary does not have.
    """
    model = dataclasses.replace(MODEL, vocab_size=6, layers=1)
    weights = policy(eos_scale=0.3, model=model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 6, n).astype(np.int32) for n in (1, 2, 5, 8)]
    requests = group_requests(prompts, 4, STEP, lambda n: 1 + 2 * n)
    sampling = SamplingParams(1.5)
    config = EngineConfig(sampling, EOS, draft_buckets=(1, 4), min_match=1, min_prob=0.0)
    garbled = RolloutEngine(model, config, one_device(), SEED)
    want, proposed, accepted = garbled.generate(weights, requests), 0, 0
    for i in range(12):
        tokens_GRP = rng.integers(SEPARATOR, 6, (4, 4, MAX_MATCH + 64)).astype(np.int32)
        if i % 2:
            tokens_GRP = np.where(rng.random(tokens_GRP.shape) < 0.2, rng.choice([6, 99, 2**31 - 1]), tokens_GRP)
        weight_GR = rng.choice(np.float32([0, 1e-30, 1, 1e30]), (4, 4))
        have = garbled.generate(weights, requests, HistoryBlock(tokens_GRP.astype(np.int32), weight_GR))
        assert_same(have, want, requests, sampling, weights, model)
        check_records(have, requests, 3, sampling)
        proposed, accepted = proposed + have.proposed_N.sum(), accepted + have.accepted_N.sum()
    assert proposed > 2000 and accepted > 100


def test_a_large_vocabulary_of_unlikely_tokens():
    """Where rounding has the most boundaries to move. A draw by the inverse CDF failed here: it parted two of these
    32 rows from plain decoding.
    """
    model = dataclasses.replace(MODEL, vocab_size=49_152, layers=1)
    weights = init_params(model, jax.random.key(0))
    weights["head"] *= 3
    prompts = random_prompts(4, model.vocab_size, seed=0)
    requests = group_requests(prompts, 8, STEP, LONGEST)
    large = RolloutEngine(model, EngineConfig(SamplingParams(), EOS), one_device(), SEED)
    want = large.generate(weights, requests)
    # Each row's own response, with a wrong token now and then.
    wrong = np.arange(LONGEST) % 11 == 10
    texts = [np.where(wrong[: len(r)], 3, r) for r in map(want.response, range(len(requests)))]
    have = large.generate(weights, requests, as_block(prompts, [texts[g * 8 : (g + 1) * 8] for g in range(4)]))
    assert want.generated > 1500 and want.log_prob_NT.sum() / want.generated < -6
    assert 0.5 < have.acceptance < 0.95 and have.forwards_N.sum() < want.generated / 2
    assert_same(have, want, requests, SamplingParams(), weights, model)
    check_records(have, requests, 7, SamplingParams())


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


# --- schedules ------------------------------------------------------------------------------------------------


def regrouped(order) -> tuple[list[Request], HistoryBlock]:
    """The requests in another order, with the groups of the history renumbered to fit."""
    history = mixed_history("T=1")
    swap = np.random.default_rng(7).permutation(GROUPS)  # old group -> new
    back = np.argsort(swap)
    requests = [dataclasses.replace(REQUESTS[n], group=int(swap[REQUESTS[n].group])) for n in order]
    return requests, HistoryBlock(history.tokens_GRP[back], history.weight_GR[back])


def pick(r: Rollouts, order) -> Rollouts:
    fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    return Rollouts(**{k: v[list(order)] if isinstance(v, np.ndarray) else v for k, v in fields.items()})


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


@pytest.mark.parametrize(
    ("other", "sizes"),
    [
        ({"max_rows": 20, "chunk": 3}, [32, 8]),  # turns of 32 rows; the last has 16 requests
        ({"max_rows": 1000, "chunk": 1000, "prompt_slots": 50}, [128, 32, 8]),
    ],
    ids=str,
)
def test_the_schedule_changes_nothing(other, sizes):
    config = dataclasses.replace(engine("T=1").config, draft_buckets=(1, 4), **other)
    other_engine, calls = RolloutEngine(MODEL, config, one_device(), SEED), []
    requests = REQUESTS[:-16]
    have = other_engine.generate(
        params(), requests, mixed_history("T=1"), progress=lambda done, total: calls.append((done, total))
    )
    assert_same(have, pick(plain("T=1"), range(len(requests))), requests, SAMPLINGS["T=1"])
    check_records(have, requests, 3, SAMPLINGS["T=1"])
    # All turns, the last and smaller one too, share one prefill, one decoding program for each size of batch, and the
    # steps between those.
    decoded = [program for program in other_engine.compiled if program.startswith("decode")]
    assert [int(program.split()[1].split("x")[0]) for program in decoded] == sizes
    shrunk = [f"shrink {a} to {b} rows" for a, b in itertools.pairwise(sizes)]
    assert [p for p in other_engine.compiled if p.startswith("shrink")] == shrunk
    assert len(other_engine.compiled) == 1 + len(decoded) + len(shrunk)

    done = [d for d, _ in calls]
    assert done == sorted(done) and done[-1] == len(requests) and {total for _, total in calls} == {len(requests)}
    # One call for each chunk. In each turn, the first chunk and the last one of each size of batch may be short.
    turns, chunk = -(-len(requests) // other_engine.row_bucket(config.max_rows)), max(config.chunk, PROBE)
    assert have.iterations <= len(calls) * chunk
    assert len(calls) * config.chunk <= have.iterations + turns * (1 + len(sizes)) * (config.chunk - 1)


def test_a_rollout_alone():
    requests, history = [REQUESTS[NEAR * SAMPLES]], mixed_history("T=1")
    have = speculative("T=1", [8], requests, history)
    assert have.accepted_N[0] > 0
    assert_same(have, pick(plain("T=1"), [NEAR * SAMPLES]), requests, SAMPLINGS["T=1"])


def test_the_budget_only_cuts():
    """A rollout with less budget is a prefix of the one with more: the budget is no input of the noise."""
    longer = [dataclasses.replace(r, budget=LONGEST) for r in REQUESTS]
    have = engine("T=1").generate(params(), longer)
    for n, request in enumerate(REQUESTS):
        np.testing.assert_array_equal(have.response(n)[: request.budget], plain("T=1").response(n))


def test_samples_and_steps_differ():
    other = engine("T=1").generate(params(), [dataclasses.replace(r, step=STEP + 1) for r in REQUESTS])
    texts = [tuple(r.response(n)[:10]) for r in (plain("T=1"), other) for n in np.flatnonzero(BUDGETS >= 10)]
    assert len(set(texts)) > 0.97 * len(texts)


# --- meshes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "spec"), [((8, 1, 1), True), ((2, 2, 2), True), ((2, 2, 2), False)], ids=str)
def test_eight_devices_make_the_same_rollouts(mesh, spec):
    mesh = make_mesh(*mesh)
    config = dataclasses.replace(engine("T=1").config, draft_buckets=(1, 4))
    wide = RolloutEngine(MODEL, config, mesh, SEED)
    placed = jax.device_put(params(), param_shardings(MODEL, mesh, ROLLOUT_RULES))
    have = wide.generate(placed, REQUESTS, mixed_history("T=1") if spec else None)
    assert_same(have, plain("T=1"), REQUESTS, SAMPLINGS["T=1"])
    check_records(have, REQUESTS, 3, SAMPLINGS["T=1"])


@pytest.mark.parametrize(
    ("mesh", "rows"), [((1, 1, 1), [1, 2, 4, 8, 128]), ((8, 1, 1), [8, 8, 8, 8, 128]), ((3, 1, 2), [3, 3, 6, 9, 129])]
)
def test_rows_fill_the_mesh(mesh, rows):
    """A power of two, rounded up to a multiple of the devices that rows are split over."""
    sized = RolloutEngine(MODEL, engine("T=1").config, make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]), 0)
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
    config = EngineConfig(SamplingParams(), EOS, draft_buckets=(1, 16), prompt_slots=8)
    tight = RolloutEngine(model, config, one_device(), SEED)
    want = tight.generate(weights, requests)
    n = int(np.flatnonzero(want.response_length_N == 16)[0])
    own = want.response(n)
    # Wrong in its first token, so that drafts start with the fifth, when three tokens match again.
    have = tight.generate(weights, requests, as_block([requests[0].prompt], [[[own[0] + 1, *own[1:]]]]))
    assert have.tokens_NS.shape[1] == 24
    assert_same(have, want, requests, SamplingParams(), weights, model)
    check_records(have, requests, 15, SamplingParams())
    assert have.drafted_NT[n].tolist() == [False] * 4 + [True] * 11 + [False]


# --- what is recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["T=0.7", "T=1.3 k=12 p=0.8"])
def test_log_probs_are_those_of_the_learner(name):
    """Without it the first ratio of policies would not be 1."""
    r, sampling = speculative(name, [max(s[0] for n, s in CASES if n == name)]), SAMPLINGS[name]
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


# --- compilations ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting_compilations():
    """Collects the programs compiled: also those that no new trace announces, such as for another sharding."""
    compiled, counting = [], [True]

    def listen(event, *args, **kwargs):
        if counting and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        counting.clear()  # there is no public way to take a single listener back


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_the_same_shapes_compile_nothing_again(mesh):
    """Neither other texts and ragged lengths within the buckets, nor later chunks, nor other weights."""
    mesh = make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    model = dataclasses.replace(MODEL, layers=1)
    config = EngineConfig(SamplingParams(), EOS, draft_buckets=(1, 2), chunk=4, prompt_slots=16)
    small = RolloutEngine(model, config, mesh, SEED)

    def run(step, count, spec):
        weights = jax.device_put(policy(model=model, distance=step / 100), param_shardings(model, mesh, ROLLOUT_RULES))
        prompts = random_prompts(2, MODEL.vocab_size, seed=step)
        history = as_block(prompts, [[[step + 3] * (20 + step)]] * 2)
        requests = group_requests(prompts, 8, step, lambda n: 17 + (n + step) % 16)[:count]
        jax.block_until_ready(weights)
        with counting_compilations() as compiled:
            small.generate(weights, requests, history if spec else None)
        return len(compiled)

    with counting_compilations() as control:
        jax.jit(lambda x: x + 1)(np.zeros(3))
    assert len(control) >= 1, "the counter does not count: jax renamed its event"

    assert run(1, 16, False) > 0
    assert run(1, 16, True) > 0
    assert small.compiled == [
        f"prefill {small.row_bucket(2)}x16 for 16 rows",
        "decode 16x48 K=1",
        "decode 16x48 K=2 history 2x1x71",
    ]
    assert [run(2, 16, True), run(3, 9, False), run(4, 12, True)] == [0, 0, 0]
    assert len(small.compiled) == 3


def test_nothing_is_traced_twice():
    """Over all that this module asked of an engine until here: one trace for each shape."""
    speculative("T=1", [8])
    assert len(engine("T=1").compiled) == len(set(engine("T=1").compiled))


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"draft_buckets": ()}, "draft.buckets="),
        ({"draft_buckets": (4, 8)}, "draft.buckets="),
        ({"draft_buckets": (1, 0)}, "draft.buckets="),
        ({"eos_ids": ()}, "rollout.eos_ids="),
        ({"min_match": 0}, "draft.min_match=0"),
        ({"chunk": 0}, "rollout.chunk=0"),
        ({"max_rows": 0}, "rollout.max_rows=0"),
        ({"prompt_slots": 0}, "rollout.prompt_slots=0"),
    ],
    ids=str,
)
def test_wrong_settings_name_their_field(wrong, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**{"sampling": SamplingParams(), "eos_ids": EOS, **wrong})
