"""The world of the engine's tests: a policy, prompts, requests, histories of several kinds, engines that several
modules share, and what it means for two sets of rollouts to be the same.

An iteration with drafts takes seconds to compile. So the engines keep to one size of batch wherever a test is not
about sizes, and the wanted K is forced on them chunk by chunk.
"""

import contextlib
import dataclasses
import functools
import itertools
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from helpers import SMALL, group_requests, one_device, random_prompts

from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec import session as session_module
from rhyme_jax.histospec.budget import Acceptance
from rhyme_jax.histospec.drafts import SOURCES, DraftRules, HistoryBlock
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.noise import UNKNOWN_NOISE, coupled_word
from rhyme_jax.histospec.rollouts import Request, Rollouts
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.params import init_params

SEED, STEP, GROUPS, SAMPLES, LONGEST = 5, 3, 16, 8, 64
EOS = (2, 0)  # 0 is also the id that pads prompts and responses
MODEL = dataclasses.replace(SMALL, tie_embeddings=False)


# --- a policy and what is asked of it -------------------------------------------------------------------------


def policy(distance=0.0, eos_scale=0.7, sharpness=3.0, model=MODEL) -> dict:
    """Random weights whose text is neither constant nor uniform: about 1.4 nats a token, and an EOS now and then.
    `distance` moves every weight by that share of its spread.
    """
    params, other = (init_params(model, jax.random.key(seed)) for seed in (0, 1))
    params = jax.tree.map(lambda x, y: x + distance * jnp.std(x) * y, params, other)
    return {**params, "head": sharpness * params["head"].at[:, np.array(EOS)].multiply(eos_scale)}


@functools.cache
def params() -> dict:
    return policy()


def make_prompts() -> list[np.ndarray]:
    prompts = random_prompts(GROUPS, MODEL.vocab_size, seed=0)
    prompts[0][-1], prompts[1][0], prompts[2][1:3], prompts[3][:] = 0, 2, (0, 2), 0  # EOS and padding ids inside
    return prompts


PROMPTS = make_prompts()
BUDGETS = np.random.default_rng(1).integers(1, LONGEST + 1, GROUPS * SAMPLES)
BUDGETS[::SAMPLES] = LONGEST  # the first of each group
REQUESTS = group_requests(
    PROMPTS, SAMPLES, STEP, lambda n: int(BUDGETS[n]), lambda n: 0.0 if n % 5 == 0 else 0.8 * float(BUDGETS[n])
)


# --- engines --------------------------------------------------------------------------------------------------

# Every source alone and all together, every window, drafts for all and by length, over the samplings.
CONFIGS = {
    "T=1": EngineConfig(SamplingParams(), EOS, (1, 2, 4, 8, 16), DraftRules(min_prob=0.4)),
    "T=0.7": EngineConfig(
        SamplingParams(0.7), EOS, (1, 8), DraftRules(("self",), min_match=1), window="paper", by_length=True
    ),
    "greedy": EngineConfig(SamplingParams(0.0), EOS, (1, 4), DraftRules(("siblings",)), window="released"),
    "T=1.3 k=12 p=0.8": EngineConfig(
        SamplingParams(1.3, top_k=12, top_p=0.8), EOS, (1, 16), DraftRules(("history",), min_prob=0.4), window="paper"
    ),
}


def make_engine(config: EngineConfig, mesh=None, model=MODEL) -> RolloutEngine:
    return RolloutEngine(model, config, mesh or one_device(), SEED)


def one_size(engine: RolloutEngine) -> RolloutEngine:
    """Its batches neither shrink nor grow from now on, to save compilations; `test_tail` is about those that do."""
    shapes = engine.programs.shapes

    def largest(*args, **kwargs):
        whole = shapes(*args, **kwargs)
        return dataclasses.replace(whole, rows=whole.rows[:1], slots=whole.slots[-1:])

    engine.programs.shapes = largest
    return engine


@functools.cache
def engine(name: str) -> RolloutEngine:
    return one_size(make_engine(dataclasses.replace(CONFIGS[name], chunk=8, prompt_slots=16)))


def twin(engine: RolloutEngine, costs=None, **config) -> RolloutEngine:
    """Another engine that has yet seen nothing, with the compiled programs of the first. `config`: what only the host
    reads.
    """
    other = RolloutEngine(engine.model, dataclasses.replace(engine.config, **config), one_device(), SEED, costs)
    other.programs = engine.programs
    return other


@contextlib.contextmanager
def forced(schedule, least_chance=0.0):
    """K is taken from `schedule`, chunk by chunk, over and over, and no marginal window is shorter without a
    `least_chance`.
    """
    with (
        mock.patch.object(session_module, "choose_bucket", side_effect=itertools.cycle(schedule)),
        mock.patch.object(session_module, "LEAST_CHANCE", least_chance),
    ):
        yield


@functools.cache
def plain(name: str) -> Rollouts:
    """The reference: no history, so K = 1 throughout."""
    return engine(name).generate(params(), REQUESTS)


def draft_with(engine: RolloutEngine, schedule, requests, history, weights=None, least_chance=0.0) -> Rollouts:
    """Rollouts with these K, by an engine without experience."""
    engine.acceptance = Acceptance(engine.config.depths)
    with forced(schedule, least_chance):
        return engine.generate(params() if weights is None else weights, requests, history)


def speculative(name: str, schedule, requests=REQUESTS, history=None, weights=None, least_chance=0.0) -> Rollouts:
    return draft_with(engine(name), schedule, requests, history or mixed_history(name), weights, least_chance)


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


# --- histories ------------------------------------------------------------------------------------------------

FORETOLD, NEAR, SPOILED, UNSEEN = range(4)
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


def as_block(prompts, histories, words=None, slots=SAMPLES, tokens=LONGEST) -> HistoryBlock:
    """The block of these texts, the r-th being of sample r. `words`: the noise word of each sample; not on record
    without.
    """
    store = HistoryStore(depth=1, max_tokens=10**6)
    for prompt, texts in zip(prompts, histories, strict=True):
        store.add(
            prompt,
            [
                Response(np.asarray(t, np.int32), 0.0, 0, 0, r, UNKNOWN_NOISE if words is None else words[r])
                for r, t in enumerate(texts)
            ],
        )
    return store.query(prompts, len(prompts), slots, tokens)


def by_group(rollouts: Rollouts, requests) -> list[list[np.ndarray]]:
    """The responses of each group."""
    groups = [[] for _ in range(1 + max(r.group for r in requests))]
    for n, request in enumerate(requests):
        groups[request.group].append(rollouts.response(n))
    return groups


def mislead(prompt, response) -> list[int]:
    """A history in which every context of three tokens of the response is followed by a token that is wrong."""
    text = [*prompt.tolist(), *response.tolist()]
    wrong = [(t + 1) % MODEL.vocab_size for t in text]
    out = [wrong[len(prompt)]]
    for t in range(len(prompt) + 1, min(len(text), len(prompt) + 16)):
        out += [*text[t - 3 : t], wrong[t]]
    return out


def coupled(requests, epoch=0, refresh=0) -> list[Request]:
    return [dataclasses.replace(r, noise=coupled_word(epoch, r.sample, refresh)) for r in requests]


def remembered(prompts, rollouts: Rollouts, requests) -> HistoryBlock:
    """What was said to coupled requests, as the next epoch finds it."""
    return as_block(prompts, by_group(rollouts, requests), [coupled_word(0, i, 0) for i in range(SAMPLES)])


# --- comparing ------------------------------------------------------------------------------------------------


def pick(r: Rollouts, order) -> Rollouts:
    fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    return Rollouts(**{k: v[list(order)] if isinstance(v, np.ndarray) else v for k, v in fields.items()})


def assert_same(have: Rollouts, want: Rollouts, requests, sampling, weights=None, model=MODEL) -> None:
    """Token for token, with equal ends and log-probs.

    Logits of another batch shape differ in their last bits, so where the two fastest tokens of a race are within
    1e-5 of each other, either may win. Such a coin on its edge is looked up in the oracle, shown as a warning, and is
    allowed once in a comparison; any other difference is an error.
    """
    assert len(have.response_length_N) == len(want.response_length_N) == len(requests)
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
        logits = oracle.next_logits(params() if weights is None else weights, model, [*request.prompt, *a[:t]])
        near = oracle.near_draws(logits, oracle.position_keys(SEED, request)[t], sampling)
        assert {int(a[t]), int(b[t])} <= near, f"rollout {n}, position {t}: {a[t]}, wanted {b[t]}"
        warnings.warn(f"a coin on its edge: rollout {n}, position {t}, {a[t]} or {b[t]}", stacklevel=2)
        edges += 1
    assert edges <= 1


def check_records(r: Rollouts, requests, most_drafts: int, sampling: SamplingParams) -> None:
    """What every row records about itself fits together, and with what is counted over all rows."""
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

    assert sum(c.tokens for c in r.chunks) == r.generated
    assert sum(c.forwards for c in r.chunks) == r.forwards_N.sum()
    assert all(1 <= c.forwards <= c.rows * c.iterations and c.tokens <= c.k * c.forwards for c in r.chunks)
    if r.tally is None:
        assert (r.proposed_N == 0).all() and (r.accepted_N == 0).all()
    else:
        length_L = np.arange(most_drafts + 1)
        proposed_XML, stopped_XML, cut_XML = (
            np.asarray(x)[..., : most_drafts + 1] for x in (r.tally.proposed_XML, r.tally.stopped_XML, r.tally.cut_XML)
        )
        assert (proposed_XML * length_L).sum() == r.proposed_N.sum()
        np.testing.assert_array_equal(proposed_XML.sum(-1), (stopped_XML + cut_XML).sum(-1))
        accepted_X = ((stopped_XML + cut_XML) * length_L).sum((1, 2))
        np.testing.assert_array_equal(accepted_X, accepted_from(r))

    for x_NT in (r.log_prob_NT, r.behaviour_log_prob_NT):
        assert x_NT.dtype == np.float32 and np.isfinite(x_NT).all()
        # Positive by no more than a rounding of the largest logits, which XLA may scale in two ways.
        assert (x_NT[~inside_NT] == 0).all() and (x_NT <= 5e-5).all()
    assert (r.behaviour_log_prob_NT >= r.log_prob_NT - 1e-6).all()
    if not sampling.filters:
        np.testing.assert_array_equal(r.log_prob_NT, r.behaviour_log_prob_NT)


def accepted_from(r: Rollouts) -> np.ndarray:
    """Committed draft tokens of each of SOURCES."""
    return np.bincount(r.source_NT.ravel(), minlength=1 + len(SOURCES))[1:]
