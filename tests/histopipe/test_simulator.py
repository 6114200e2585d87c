"""The simulator: against pencil and paper, against a simulation that goes token by token, and what must always hold."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe import simulator
from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.simulator import Learner, Policy, System
from rhyme_jax.histopipe.traces import Trace
from rhyme_jax.tasks.stream import PromptStream

EQUAL = simulator.POLICIES["equal"]


def world(batches, seed=0, prompt=1) -> Trace:
    """A trace whose batches, one an epoch, are these lengths [groups][samples], in this order."""
    lengths_EPC = np.array(batches)
    stream = PromptStream(lengths_EPC.shape[1], lengths_EPC.shape[1], seed)
    for epoch in range(len(batches)):
        lengths_EPC[epoch, stream.next()] = batches[epoch]
    return Trace(lengths_EPC, np.full(lengths_EPC.shape[1], prompt))


def system(slices, groups, seconds=(0, 1), context=0.0, prefill=0.0, learner=(0.0, 0.0, False), **fields) -> System:
    made = {"look_seconds": 1.0, "defer_share": 0.0, "first_tokens": 10.0, "max_tokens": 10**6, **fields}
    return System(
        slices, SliceCost(np.array(seconds, float), context, prefill), Learner(*learner), groups, **made
    )  # fmt: skip


def closed(outcome) -> list[float]:
    return [u.closed for u in outcome.updates]


# --- pencil and paper ---------------------------------------------------------------------------------------------


def test_two_slices_three_rollouts():
    """One row a slice, a second a token: slice 0 decodes 4, slice 1 decodes 2 and then 3. Two such steps."""
    trace = world([[[4], [2], [3]]] * 3)
    out = simulator.simulate(EQUAL, system(2, 3, learner=(0.5, 1.0, False)), trace, steps=2, seed=0)
    assert closed(out) == [5, 10]  # decoding rests during the update: 0.5 * 9 + 1 seconds
    assert [u.wall for u in out.updates] == [10.5, 21]
    assert out.busy_S == [[(0, 4), (5, 9)], [(0, 5), (5, 10)]]
    assert simulator.summary(out, first=1)["bubble_ratio"] == pytest.approx(1 - 9 / 10)
    assert simulator.summary(out, first=1)["tokens_per_s"] == pytest.approx(9 / 10.5)


def test_a_learner_of_its_own_makes_a_barrier_wait_and_is_hidden_by_running_ahead():
    trace = world([[[4], [2], [3]]] * 4)
    own = system(2, 3, learner=(0.5, 1.0, True))
    out = simulator.simulate(EQUAL, own, trace, steps=2, seed=0)
    assert [u.done for u in out.updates] == [10.5, 21]
    assert out.busy_S[0] == [(0, 4), (10.5, 14.5)]
    ahead = simulator.simulate(Policy(layout="equal", staleness=1), own, trace, steps=3, seed=0)
    # Slice 0 begins its next 4 at 4, slice 1 its next 2 + 3 at 5; then both wait for the update of 0.5 * 9 + 1.
    assert closed(ahead) == [5, 10, 15.5]
    assert [u.done for u in ahead.updates] == [10.5, 16, 21.5]
    assert ahead.busy_S[0][:3] == [(0, 4), (4, 8), (10.5, 14.5)]
    assert [u.staleness for u in ahead.updates] == [0, 1, 1]


def test_groups_stream_to_a_learner_of_its_own():
    """They are done at 2, 4 and 5, and take 1, 2 and 1.5 seconds: at 3, 6 and 7.5; then the optimizer's step."""
    own = system(2, 3, learner=(0.5, 1.0, True))
    out = simulator.simulate(dataclasses.replace(EQUAL, stream=True), own, world([[[4], [2], [3]]] * 2), 1, 0)
    assert out.updates[0].done == 8.5


def test_rows_context_and_prefill():
    """Two rows: 3 and 5 tokens after a prompt of 2, which is prefilled once."""
    trace = world([[[3, 5]]] * 2, prompt=2)
    out = simulator.simulate(EQUAL, system(1, 1, (0, 1, 1.5), context=0.25, prefill=0.5), trace, 1, 0)
    # Three iterations of two rows with 4, 6 and 8 cached tokens, two of one with 5 and 6.
    assert closed(out) == [0.5 * 2 + 3 * 1.5 + 0.25 * 18 + 2 * 1 + 0.25 * 11]


def test_a_free_slice_takes_what_waits_elsewhere():
    trace = world([[[10], [10], [1], [1]]] * 2)
    equal = dataclasses.replace(EQUAL, mode="balanced")
    assert closed(simulator.simulate(equal, system(2, 4), trace, 1, 0)) == [20]
    out = simulator.simulate(dataclasses.replace(equal, move=True), system(2, 4), trace, 1, 0)
    # Free at 2, looked at, after the event at 2, at 2 or 3.
    assert closed(out)[0] in (12, 13) and out.moved == 1


def test_an_outlier_moves_with_its_text():
    """Two rows of one slice outgrow their forecast of 2 tokens. The other slice is free after 4 seconds and takes one
    of them at the next look or two, for the price of its prefill; from then on both take a second a token, not two.
    """
    even = [[2], [2], [2], [2]]
    trace = world([even, even, [[40], [40], [2], [2]], even])
    two = system(2, 4, (0, 1, 2), prefill=0.1)
    stay = simulator.simulate(Policy("balanced", "equal"), two, trace, 3, 0)
    move = simulator.simulate(Policy("balanced", "equal", move=True), two, trace, 3, 0)
    late = [out.updates[2].closed - out.updates[2].began for out in (stay, move)]
    assert late[0] == pytest.approx(80.2)
    assert move.moved == 1 and 42 < late[1] < 48


def test_an_outlier_is_deferred_once_and_labelled():
    even = [[2, 2, 2, 2]] * 2
    long = [[2, 2, 2, 2], [2, 2, 2, 500]]  # the slice that ends a step begins the next with new weights
    four = system(2, 2, (0, 1, 1, 1, 1), defer_share=0.5)
    trace = world([even, even, even, long, even, even, even])
    policy = Policy("cross_step", "equal", staleness=1, defer=True)
    out = simulator.simulate(policy, four, trace, 6, 0)
    assert [u.deferred for u in out.updates] == [0, 0, 0, 1, 0, 0]
    assert [u.rollouts for u in out.updates] == [8, 8, 8, 4, 12, 8]
    assert [u.staleness for u in out.updates][4] == 1 and max(u.staleness for u in out.updates) == 1
    assert out.updates[3].closed < 100 < out.updates[4].closed  # batch 4 waits for it


def test_over_provision_drops_the_slowest():
    trace = world([[[2], [3], [90]]] * 2)
    out = simulator.simulate(dataclasses.replace(EQUAL, provision=1.5), system(2, 2, (0, 1, 1)), trace, 1, 0)
    assert closed(out) == [3] and out.updates[0].tokens == 5 and out.wasted_tokens == 3


def test_longest_first():
    assert simulator.longest_first(np.array([3, 9, 5, 4, 1]), 2) == [[1, 0], [2, 3, 4]]


# --- token by token -----------------------------------------------------------------------------------------------


def slow(system: System, batches, staleness: int, steps: int) -> list[float]:
    """When each batch is closed, with an equal split and a learner that takes turns: one iteration at a time."""
    cost, prompt = system.cost, 1
    slices = [{"clock": 0.0, "next": 0, "rows": [], "queue": []} for _ in range(system.slices)]
    left = [sum(len(group) for group in batch) for batch in batches]
    ends: list[float] = []
    while len(ends) < steps:
        for i, s in enumerate(slices):
            # A slice whose share is done begins the next one when its weights are fresh enough.
            while not s["rows"] and not s["queue"] and s["next"] <= min(len(ends) + staleness, steps):
                if s["next"] > staleness:
                    s["clock"] = max(s["clock"], ends[s["next"] - 1 - staleness])
                batch = batches[s["next"]]
                low, high = i * len(batch) // len(slices), (i + 1) * len(batch) // len(slices)
                s["queue"] = [[s["next"], g, 0, x] for g in range(low, high) for x in batch[g]]
                s["next"] += 1
                s["seen"] = set()
            while s["queue"] and len(s["rows"]) < cost.max_rows:
                row = s["queue"].pop(0)
                if row[1] not in s["seen"]:
                    s["clock"] += cost.prefill * prompt
                    s["seen"].add(row[1])
                s["rows"].append(row)
        s = min((s for s in slices if s["rows"]), key=lambda s: s["clock"])
        s["clock"] += cost.seconds_B[len(s["rows"])] + cost.context * sum(prompt + row[2] for row in s["rows"])
        for row in s["rows"]:
            row[2] += 1
        for row in [row for row in s["rows"] if row[2] == row[3]]:
            s["rows"].remove(row)
            left[row[0]] -= 1
            row.append(s["clock"])
            s.setdefault("done", []).append((row[0], s["clock"]))
        while len(ends) < steps and not left[len(ends)]:
            ends.append(max(when for s in slices for batch, when in s.get("done", []) if batch == len(ends)))
    return ends


sizes = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 2**32 - 1), st.sampled_from([0, 1]))
def test_events_agree_with_single_tokens(sizes, seed, staleness):
    slices, more, samples, rows = sizes
    rng = np.random.default_rng(seed)
    batches = rng.integers(1, 30, (5, slices + more, samples)).tolist()
    # Prefill is left out where slices interleave: the slow simulation pays for it in another order.
    given_ = system(slices, slices + more, [0, *np.sort(rng.random(rows))], context=rng.random() / 50, prefill=0.1)
    out = simulator.simulate(Policy(layout="equal", staleness=staleness), given_, world(batches), 4, 0)
    np.testing.assert_allclose(closed(out), slow(given_, batches, staleness, 4), rtol=1e-9)


# --- what must always hold ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(simulator.POLICIES)),
    sizes,
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from([0.0, 0.34, 1.0]),
)
def test_invariants(name, sizes, seed, own, defer_share):
    slices, more, samples, rows = sizes
    policy, rng, steps = simulator.POLICIES[name], np.random.default_rng(seed), 6
    prompts = round((slices + more) * policy.provision)
    lengths = np.where(rng.random((steps + 1, prompts, samples)) < 0.1, 300, rng.integers(1, 40, (prompts, 1)))
    trace = Trace(lengths, np.full(prompts, 5))
    given_ = system(
        slices, slices + more, [0, *np.sort(rng.random(rows))], context=rng.random() / 100, prefill=0.01,
        learner=(rng.random() / 10, rng.random() * 9, own), defer_share=defer_share,
    )  # fmt: skip
    out = simulator.simulate(policy, given_, trace, steps, 0)
    again = simulator.simulate(policy, given_, trace, steps, 0)
    assert out.updates == again.updates and out.busy_S == again.busy_S
    # Every rollout is trained on once (one that ends twice raises), but for what was deferred last.
    left = out.updates[-1].deferred * samples
    assert sum(u.rollouts for u in out.updates) + left == steps * (slices + more) * samples
    if policy.provision == 1 and not left:
        assert sum(u.tokens for u in out.updates) == lengths[:steps].sum()
    assert max(u.staleness for u in out.updates) <= policy.staleness
    assert all(u.began <= u.closed <= u.done <= u.wall + 1e-9 for u in out.updates)
    end = out.updates[-1].done
    for spans in out.busy_S:
        assert all(0 <= a <= b <= end + 1e-9 for a, b in spans)
        assert all(b <= c + 1e-9 for (_, b), (c, _) in itertools.pairwise(spans))
    report = simulator.summary(out, first=1)
    assert -1e-9 <= report["bubble_ratio"] <= 1
    if policy.staleness == 0 and policy.provision == 1:
        alone = simulator.bounds(given_, trace, steps, 0).alone
        assert all(u.closed - u.began >= a - 1e-6 for u, a in zip(out.updates, alone, strict=True))
    if policy.provision == 1 and not left:
        assert out.updates[-1].closed >= simulator.bounds(given_, trace, steps, 0).work.sum() - 1e-6


def test_more_slices_than_prompts_are_refused():
    with pytest.raises(InputError, match=r"^slices=3: must be from 1 to the 2 prompts of a step$"):
        system(3, 2)
