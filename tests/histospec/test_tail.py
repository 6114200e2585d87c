"""What the engine does with its batch: rows that are done are given to requests that wait, a batch that runs out
shrinks, a cache that fills up grows. None of it may change a token, and all of it keeps to the declared sizes.

One engine serves: 48 requests for 16 rows, which shrink to 4, in a cache of 64 and then 96 slots.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from helpers import group_requests
from world import (
    EOS,
    MODEL,
    STEP,
    as_block,
    assert_same,
    by_group,
    check_records,
    counting_compilations,
    coupled,
    draft_with,
    make_engine,
    params,
    pick,
    policy,
)

from rhyme_jax.histospec import programs as programs_module
from rhyme_jax.histospec import session as session_module
from rhyme_jax.histospec.drafts import MAX_MATCH, OWN, SEPARATOR, SIBLINGS, DraftRules
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.noise import coupled_word
from rhyme_jax.histospec.rollouts import Rollouts
from rhyme_jax.histospec.sampling import SamplingParams

SAMPLES, ROWS = 6, 16  # groups do not divide the rows, so that refills split them
rng = np.random.default_rng(11)
PROMPTS = [rng.integers(3, MODEL.vocab_size, n).astype(np.int32) for n in (30, 1, 21, 2, 13, 3, 8, 5)]
BUDGETS = rng.integers(2, 31, len(PROMPTS) * SAMPLES)
BUDGETS[[0, *range(7, 48, 6)]] = 64
REQUESTS = group_requests(PROMPTS, SAMPLES, STEP, lambda n: int(BUDGETS[n]))
SAMPLING = SamplingParams()
CONFIG = EngineConfig(SAMPLING, EOS, (1, 4), DraftRules(min_prob=0.4), chunk=8, max_rows=ROWS, prompt_slots=8)
NOTHING = as_block(PROMPTS, [[]] * len(PROMPTS), slots=SAMPLES)


@functools.cache
def prepared() -> tuple[RolloutEngine, list[str], list[str]]:
    """The engine, what it compiled before it made a rollout, and what when it then made them with every K in turn."""
    engine = make_engine(CONFIG)
    engine.prepare(params(), REQUESTS, NOTHING)
    before = list(engine.compiled)
    every_k_in_turn(engine)
    return engine, before, engine.compiled[len(before) :]


def every_k_in_turn(engine) -> None:
    for schedule in ([1], [4], [1, 4], [4, 1, 1]):
        draft_with(engine, schedule, REQUESTS, NOTHING)
    engine.generate(params(), REQUESTS)


def engine() -> RolloutEngine:
    return prepared()[0]


@functools.cache
def in_one_batch() -> dict[str, Rollouts]:
    """The reference: every request has a row of its own, and keeps it in a cache of one size."""
    whole = make_engine(dataclasses.replace(CONFIG, max_rows=64, draft_buckets=(1,)))
    shapes = whole.programs.shapes
    whole.programs.shapes = lambda *a, **k: dataclasses.replace(s := shapes(*a, **k), rows=(64,), slots=s.slots[-1:])
    rollouts = {
        "fresh": whole.generate(params(), REQUESTS),
        "coupled": whole.generate(params(), coupled(REQUESTS)),
        "moved": whole.generate(policy(0.01), coupled(REQUESTS)),
    }
    assert all({(c.rows, c.slots) for c in r.chunks} == {(64, 96)} for r in rollouts.values())
    return rollouts


def foretold(kind="fresh"):
    """Each response to come, drawn with the noise that it will meet."""
    words = [STEP if kind == "fresh" else coupled_word(0, i, 0) for i in range(SAMPLES)]
    return as_block(PROMPTS, by_group(in_one_batch()[kind], REQUESTS), words, slots=SAMPLES)


@contextlib.contextmanager
def spying(engine, *names):
    """Collects the arguments of the engine's programs as they are called."""
    calls = {name: [] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(engine.programs, name, functools.partial(_spied, getattr(engine.programs, name), calls[name]))
        yield calls


def _spied(program, calls, *args):
    calls.append(args)
    return program(*args)


# --- refill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, [1], [4], [1, 4, 4]], ids=str)
def test_rows_are_given_to_waiting_requests(schedule):
    """Over prompts of 1 to 30 tokens, in order, with the tokens of one batch."""
    e, progress = engine(), []
    with spying(e, "prefill", "insert") as calls:
        if schedule is None:
            have = e.generate(params(), REQUESTS, progress=lambda *x: progress.append(x))
        else:
            have = draft_with(e, schedule, REQUESTS, foretold())
    assert_same(have, in_one_batch()["fresh"], REQUESTS, SAMPLING)
    check_records(have, REQUESTS, 3, SAMPLING)
    if schedule is None:
        done = [d for d, _ in progress]
        assert done == sorted(done) and done[-1] == len(REQUESTS) and {n for _, n in progress} == {len(REQUESTS)}
        assert len(progress) == len(have.chunks)
    elif 4 in schedule:
        assert have.accepted_N.sum() > 300 and have.acceptance > 0.8

    # Each request got a row once, in order, several at a time; groups were split.
    taken = [int((np.asarray(prompts) >= 0).sum()) for _, _, prompts, _ in calls["insert"]]
    assert sum(taken) == len(REQUESTS) and taken[0] == ROWS
    assert len(taken) == len(calls["prefill"]) <= 1 + (len(REQUESTS) - ROWS) / (ROWS / session_module.REFILL)
    assert all(n >= ROWS // session_module.REFILL for n in taken[:-1])
    assert any(n % SAMPLES for n in itertools.accumulate(taken))
    # A prompt is run once for those of its samples that are placed together, in one of the declared sizes.
    shapes = e.programs.shapes([r.prompt.tobytes() for r in REQUESTS], 30, 64)
    assert shapes.prompts == (1, 4) and {prompt_UP.shape[0] for _, prompt_UP in calls["prefill"]} <= {1, 4}
    for (_, _, prompts, _), (_, prompt_UP) in zip(calls["insert"], calls["prefill"], strict=True):
        assert len({row.tobytes() for row in np.asarray(prompt_UP) if row.any()}) == np.max(prompts) + 1


def spoiled(state, prompt_of_row_B):
    """The state with all that a predecessor could leave in the rows that are given away set to nonsense."""
    given_B = np.asarray(prompt_of_row_B) >= 0

    def spoil(x):
        x = np.array(x)
        x[given_B] = True if x.dtype == bool else 7 if np.issubdtype(x.dtype, np.integer) else 1e4
        return x

    return jax.device_put(jax.tree.map(spoil, state), jax.tree.map(lambda x: x.sharding, state))


@pytest.mark.parametrize("kind", ["fresh", "coupled"])
def test_a_row_knows_nothing_of_its_predecessor(kind, monkeypatch):
    """Neither of its text, cache and log-probs, nor of where and how well it drafted: the drafts are the same too."""
    e, requests = engine(), REQUESTS if kind == "fresh" else coupled(REQUESTS)
    want = draft_with(e, [4], requests, foretold(kind))
    insert, inserted = e.programs.insert, []

    def insert_into_spoiled(state, new, prompt_of_row_B, cache):
        inserted.append(int((np.asarray(prompt_of_row_B) >= 0).sum()))
        return insert(spoiled(state, prompt_of_row_B), new, prompt_of_row_B, cache)

    monkeypatch.setattr(e.programs, "insert", insert_into_spoiled)
    have = draft_with(e, [4], requests, foretold(kind))
    assert sum(inserted) == len(REQUESTS) and len(inserted) > 3
    for r in (have, want):
        assert_same(r, in_one_batch()[kind], requests, SAMPLING)
        check_records(r, requests, 3, SAMPLING)
    assert have.chunks == want.chunks
    for name in ("tokens", "source", "log_prob", "forwards", "proposed", "accepted"):
        name += {"tokens": "_NS", "source": "_NT", "log_prob": "_NT"}.get(name, "_N")
        np.testing.assert_array_equal(getattr(have, name), getattr(want, name), name)


def test_coupled_requests_are_followed_through_refills():
    requests, history = coupled(REQUESTS), foretold("coupled")
    same = draft_with(engine(), [4], requests, history)
    assert_same(same, in_one_batch()["coupled"], requests, SAMPLING)
    assert same.acceptance > 0.99 and (same.source_NT == 1 + OWN).sum() > 0.99 * same.accepted_N.sum()
    moved = draft_with(engine(), [4], requests, history, policy(0.01))
    assert_same(moved, in_one_batch()["moved"], requests, SAMPLING, policy(0.01))
    check_records(moved, requests, 3, SAMPLING)
    assert moved.acceptance > 0.4 and (moved.source_NT == 1 + OWN).sum() > 150


def test_a_request_drafts_from_siblings_that_are_done():
    """Greedy samples of a group are all the same: those of the first batch foretell the later ones, as a row's live
    text stays when the row is given away. Two rows at a time, whose group has six samples.
    """
    weights = policy(sharpness=100.0)  # all but greedy, by the programs that are there
    want = engine().generate(weights, REQUESTS)
    have = draft_with(engine(), [4], REQUESTS, NOTHING, weights)
    assert_same(have, want, REQUESTS, SAMPLING, weights)
    check_records(have, REQUESTS, 3, SAMPLING)
    later_N = np.arange(len(REQUESTS)) >= ROWS
    # Their groups' first samples are in the same boat, so look at those that start later than a sibling.
    split_N = later_N & np.array([r.sample >= 4 for r in REQUESTS])
    assert (have.source_NT == 1 + SIBLINGS)[split_N].sum() > 0.25 * have.response_length_N[split_N].sum()


@pytest.mark.parametrize("schedule", [[4], [1, 4]], ids=str)
def test_the_corpus_holds_what_was_said(schedule, monkeypatch):
    """Each request has a text of its own to the end, whichever rows it shared its row with."""
    e, seen = engine(), []
    chunk = e.programs.chunk

    def watched(*args, k):
        out = chunk(*args, k=k)
        if k > 1:
            seen[:] = [np.array(out[0].tokens_GRP)]
        return out

    monkeypatch.setattr(e.programs, "chunk", watched)
    have, (tokens_GRP,) = draft_with(e, schedule, REQUESTS, NOTHING), seen
    said = 0
    for n, request in enumerate(REQUESTS):
        want_P = np.full(tokens_GRP.shape[2], SEPARATOR)
        tail = request.prompt[-MAX_MATCH:]
        want_P[MAX_MATCH - len(tail) : MAX_MATCH] = tail
        want_P[MAX_MATCH : MAX_MATCH + have.response_length_N[n]] = have.response(n)
        live_P = tokens_GRP[request.group, SAMPLES + request.sample]
        if schedule != [4]:  # what a row says without drafts is told at the next look, if it is still there
            want_P = np.where(live_P == SEPARATOR, SEPARATOR, want_P)
        np.testing.assert_array_equal(live_P, want_P)
        said += (live_P[MAX_MATCH:] != SEPARATOR).sum()
    assert said > 0.85 * have.generated
    for group, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(tokens_GRP[group, -1, MAX_MATCH : MAX_MATCH + len(prompt)], prompt)


# --- shrinking and growing ------------------------------------------------------------------------------------

SIZES = [
    # what is changed, the sizes that the batch then had
    ({"chunk": 1}, [(16, 64), (16, 96), (4, 96)]),
    ({"chunk": 1000}, [(16, 64), (16, 96), (4, 96)]),
    ({"SLOT_START": 1000}, [(16, 96), (4, 96)]),
    ({"ROW_SIZES": 1}, [(16, 64), (16, 96)]),
    ({"max_rows": 1, "SLOT_START": 8}, [(1, 40), (1, 62), (1, 96)]),
    ({"FEWEST_ROWS": 1}, [(16, 64), (16, 96), (4, 96), (1, 96)]),
    ({"REFILL": 2, "FIRST_CHUNK": 1}, [(16, 64), (16, 96), (4, 96)]),
]


def changed(monkeypatch, e, changes) -> None:
    for name, value in changes.items():
        if name.isupper():
            monkeypatch.setattr(session_module if hasattr(session_module, name) else programs_module, name, value)
        else:
            config = dataclasses.replace(CONFIG, **{name: value})
            monkeypatch.setattr(e, "config", config)
            monkeypatch.setattr(e.programs, "config", config)


@pytest.mark.parametrize(("changes", "sizes"), SIZES, ids=str)
def test_sizes_change_nothing(changes, sizes, monkeypatch):
    """Neither the length of a chunk, nor the rows, nor the slots, nor when either changes."""
    e = engine()
    changed(monkeypatch, e, changes)
    # A token too many in the middle of each text, so that rows part: some accept all, some not.
    groups = by_group(in_one_batch()["fresh"], REQUESTS)
    texts = [[[*r[: len(r) // 2], 5, *r[len(r) // 2 :]] for r in group] for group in groups]
    history = as_block(PROMPTS, texts, slots=SAMPLES)
    have = draft_with(e, [4], REQUESTS, history)
    assert_same(have, in_one_batch()["fresh"], REQUESTS, SAMPLING)
    check_records(have, REQUESTS, 3, SAMPLING)
    assert [size for size, _ in itertools.groupby((c.rows, c.slots) for c in have.chunks)] == sizes
    assert set(sizes) <= set(e._shapes(REQUESTS).batches)


@pytest.mark.parametrize("schedule", [None, [4], [1, 4]], ids=str)
def test_rows_without_a_request_count_for_nothing(schedule):
    """Thirteen requests in 16 rows."""
    few = [*REQUESTS[:7], *REQUESTS[12:18]]
    if schedule is None:
        have = engine().generate(params(), few)
    else:
        have = draft_with(engine(), schedule, few, foretold())
    assert have.chunks[0].rows == ROWS
    assert_same(have, pick(in_one_batch()["fresh"], [*range(7), *range(12, 18)]), few, SAMPLING)
    check_records(have, few, 3, SAMPLING)


def test_plain_decoding_meets_every_size():
    """With the whole cache in three steps, and every drop in rows."""
    have = engine().generate(params(), REQUESTS)
    assert [s for s, _ in itertools.groupby((c.rows, c.slots) for c in have.chunks)] == [(16, 64), (16, 96), (4, 96)]
    np.testing.assert_array_equal(have.forwards_N, have.response_length_N)
    assert all(c.iterations <= CONFIG.chunk for c in have.chunks)


# --- what is compiled -----------------------------------------------------------------------------------------


def test_only_what_is_declared_is_compiled():
    e, before, _ = prepared()
    shapes = e._shapes(REQUESTS)
    assert shapes.batches == [(16, 64), (16, 96), (4, 96)] and (shapes.prompts, shapes.prompt_slots) == ((1, 4), 32)
    decodes = [p for p in before if p.startswith("decode")]
    assert decodes == [
        f"decode {rows}x{slots} K={k}{'' if k == 1 else ' corpus 8x13x71'}"
        for rows, slots in shapes.batches
        for k in CONFIG.draft_buckets
    ]
    assert len(decodes) <= len(shapes.batches) * len(CONFIG.draft_buckets)
    others = [p for p in before if p not in decodes]
    most = {"peek": len(shapes.rows), "judge": len(shapes.rows), "prefill": len(shapes.prompts)}
    most["insert"] = len(shapes.prompts) * len(shapes.slots)
    assert {kind: sum(p.startswith(kind) for p in others) for kind in most} == most
    assert {p for p in others if not p.startswith(("peek", "judge", "prefill", "insert"))} == {
        "empty cache 16x64",
        "grow 16x64 to 96 slots",
        "shrink 16x64 to 4x96",
        "shrink 16x96 to 4x96",
    }


def test_a_prepared_engine_compiles_nothing_more():
    """Whatever K is chosen, and whenever rows are refilled."""
    e, _, later = prepared()
    assert later == []
    with counting_compilations() as control:
        jax.jit(lambda x: x + 1)(np.zeros(3))
    assert len(control) >= 1, "the counter does not count: jax renamed its event"
    with counting_compilations() as again:
        every_k_in_turn(e)
    assert again == []
