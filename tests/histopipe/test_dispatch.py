"""Contract 1 over slices: whatever the plan, and whoever takes over from whom, the rollouts are the same."""

import functools
import itertools

import jax
import numpy as np
import pytest
from world import (
    CONFIGS,
    MODEL,
    PROMPTS,
    REQUESTS,
    SAMPLES,
    assert_same,
    check_records,
    make_engine,
    one_size,
    params,
)

from rhyme_jax.errors import RunError
from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.dispatch import Dispatcher, Flight, Span, Weights
from rhyme_jax.histopipe.plan import Plan, Work, make_plan
from rhyme_jax.histopipe.slices import cut_slices
from rhyme_jax.histopipe.timeline import bubble_ratios, span_records
from rhyme_jax.history.lengths import Forecast
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.rollouts import Chunk
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.histospec.session import Session

SLICES, GROUPS = 4, 8
ASKED = REQUESTS[: GROUPS * SAMPLES]
CONFIG = EngineConfig(SamplingParams(), CONFIGS["T=1"].eos_ids, (1,), chunk=4, max_rows=8, prompt_slots=16)
COST = SliceCost(np.array([0.0, *(1.0 + 0.1 * np.arange(8))]))


@functools.cache
def slices():
    return cut_slices((8, 1, 1), SLICES)


@functools.cache
def engines() -> list[RolloutEngine]:
    """Of four slices of two devices; one size of batch, to save compilations."""
    return [one_size(make_engine(CONFIG, mesh)) for mesh in slices().meshes]


@functools.cache
def weights(version=0) -> Weights:
    return Weights(version, slices().place(params(), MODEL))


@functools.cache
def reference():
    """All of it on one device, in one batch."""
    return make_engine(EngineConfig(SamplingParams(), CONFIG.eos_ids, (1,), prompt_slots=16)).generate(params(), ASKED)


def forecast() -> Forecast:
    lengths_GC = reference().response_length_N.reshape(GROUPS, SAMPLES)
    mean_G = lengths_GC.mean(1)
    return Forecast(mean_G, np.maximum(np.quantile(lengths_GC, 0.9, axis=1), mean_G + 1), np.ones(GROUPS, bool))


def planned(mode: str, layout="best") -> Plan:
    f = forecast()
    work = Work(f.mean_G, f.upper_G, np.array([len(p) for p in PROMPTS[:GROUPS]]), SAMPLES)
    return make_plan(work, SLICES, COST, mode, layout)


def lopsided(shares) -> Plan:
    """These shares of the rollouts, in order, to the slices."""
    bounds = np.cumsum([0, *shares])
    assert bounds[-1] == len(ASKED)
    numbers = tuple(np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(bounds))
    return Plan("by hand", numbers, np.zeros(SLICES), {})


def flown(plan: Plan, migrate=False, force=False):
    """(the rollouts, the dispatcher, the flight) of a plan that was carried out."""
    dispatcher = Dispatcher(engines(), migrate=migrate, force=force, ordered=migrate)
    dispatcher.cost, dispatcher.weights = COST, weights()
    job = engines()[0].job(ASKED, None, SLICES, migrate)
    flight = Flight(0, job, plan, forecast(), lambda group: f"prompt {group}")
    dispatcher.launch(flight)
    dispatcher.run(flight)
    spans = dispatcher.spans
    rollouts = job.rows.rollouts(slice(None), None, [s.chunk for s in spans], 0.0)
    return rollouts, dispatcher, flight


PLANS = {
    "sync": lambda: planned("sync"),
    "balanced": lambda: planned("balanced"),
    "longest_rollout": lambda: planned("balanced", "longest_rollout"),
    "paper": lambda: planned("cross_step", "paper"),
    "all on one slice": lambda: lopsided([0, len(ASKED), 0, 0]),
    "groups torn apart": lambda: lopsided([3, 30, 17, 14]),
}


@pytest.mark.parametrize("moves", ["stay", "migrate", "forced"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_same_rollouts(name, moves):
    plan = PLANS[name]()
    assert sorted(np.concatenate(plan.rollouts_by_slice).tolist()) == list(range(len(ASKED)))
    have, dispatcher, flight = flown(plan, migrate=moves != "stay", force=moves == "forced")
    assert_same(have, reference(), ASKED, CONFIG.sampling)
    check_records(have, ASKED, 0, CONFIG.sampling)
    assert (flight.version_N == 0).all() and dispatcher.idle
    if moves == "stay":
        assert flight.migrations == 0
    elif name == "all on one slice":
        assert flight.migrations >= 3  # the others do not look on
        assert {s.slice for s in dispatcher.spans} == set(range(SLICES))
    if moves == "forced":
        assert flight.migrations > 0


def test_a_running_rollout_moves_with_what_it_has(monkeypatch):
    """It goes on where it was: no token is decoded twice, and the prefix is computed anew in one pass."""
    given_up = []
    session = "rhyme_jax.histospec.session.Session.give_up"
    original = Session.give_up

    def spy(self, numbers):
        running = [n for n in numbers if n in self.running]
        given_up.extend(self.elapsed(running).tolist())
        original(self, numbers)

    monkeypatch.setattr(session, spy)
    have, _, _ = flown(lopsided([0, len(ASKED), 0, 0]), migrate=True, force=True)
    assert len(given_up) >= 3 and max(given_up) > 4
    np.testing.assert_array_equal(have.forwards_N, have.response_length_N)  # K = 1: a forward a token, never again
    assert_same(have, reference(), ASKED, CONFIG.sampling)


def slow_slices(monkeypatch):
    """One slice's chunks and then another's are seen late."""
    for slow in (0, 2):
        late: dict[int, int] = {}

        def ready(self, slow=slow, late=late):
            late[id(self)] = late.get(id(self), 0) + 1
            return self.programs is not engines()[slow].programs or late[id(self)] % 20 == 0

        monkeypatch.setattr("rhyme_jax.histospec.session.Session.ready", property(ready))
        yield slow


def test_decisions_do_not_depend_on_the_clock(monkeypatch):
    """The same chunks on the same slices, whichever of them is slow today."""
    plan, logs = lopsided([40, 0, 16, 8]), []
    for _ in slow_slices(monkeypatch):
        _, dispatcher, _ = flown(plan, migrate=True)
        logs.append([(s.slice, s.groups, s.alive, s.chunk) for s in dispatcher.spans])
    assert logs[0] == logs[1]


# --- running ahead --------------------------------------------------------------------------------------------


class Relay:
    """Steps of a run whose policy has a new version each, over a dispatcher."""

    def __init__(self, plans, defer=0.0, outgrown=()):
        self.dispatcher = Dispatcher(engines(), defer=defer)
        self.dispatcher.cost = COST
        self.plans, self.outgrown = plans, outgrown
        self.flights: list[Flight] = []
        self.order = []  # (step, rollout) as they were finished

    def begin(self) -> Flight:
        f = forecast()
        upper_G = f.upper_G.copy()
        upper_G[list(self.outgrown)] = 0.5  # so that any length is beyond all forecasts
        forecast_ = Forecast(np.minimum(f.mean_G, upper_G), upper_G, f.seen_G)
        job = engines()[0].job(ASKED, None, SLICES)
        self.flights.append(Flight(len(self.flights), job, self.plans[len(self.flights)], forecast_))
        return self.flights[-1]

    def run(self):
        before = None
        for step in range(len(self.plans)):
            self.dispatcher.weights = weights(step)
            if len(self.flights) == step:
                self.dispatcher.launch(self.begin())
            flight = self.flights[step]
            more = step + 1 < len(self.plans)
            self.dispatcher.run(flight, before, self.begin if more else None, each=self.each)
            yield step, flight
            before = flight if flight.deferred else None

    def each(self, flight, numbers):
        self.order += [(flight.step, n) for n in numbers]


def test_slices_run_ahead_by_one_step_and_no_further():
    """The slice without work takes up the next step with the policy it has; the others do when they are through."""
    relay = Relay([lopsided([40, 8, 8, 8]), lopsided([8, 8, 40, 8]), lopsided([16, 16, 16, 16])])
    for step, flight in relay.run():
        assert not flight.unfinished_N.any() and not flight.deferred
        assert len(relay.flights) <= step + 2, "two steps ahead"
        assert set(flight.version_N) <= {max(0, step - 1), step}
    ahead = [(f.version_N < f.step).sum() for f in relay.flights]
    assert ahead[0] == 0 and ahead[1] == 56, "all but the slice that was busy to the end"
    assert len(relay.order) == len(set(relay.order)) == 3 * len(ASKED)
    for f in relay.flights:
        rollouts = f.job.rows.rollouts(slice(None), None, (), 0.0)
        np.testing.assert_array_equal(rollouts.tokens_NS, reference().tokens_NS)  # here all policies are equal


def test_who_runs_ahead_does_not_depend_on_the_clock(monkeypatch):
    """Also where nothing moves and nothing is deferred."""
    versions = []
    for _ in slow_slices(monkeypatch):
        relay = Relay([lopsided([16, 16, 16, 16])] * 3)
        list(relay.run())
        versions.append([f.version_N.tolist() for f in relay.flights])
    assert versions[0] == versions[1]


def test_outliers_wait_for_the_next_step_once():
    relay = Relay([lopsided([16, 16, 16, 16])] * 3, defer=0.2, outgrown=range(GROUPS))
    deferred = []
    for step, flight in relay.run():
        left = {int(g) for g in flight.group_N[flight.unfinished_N]}
        assert left == flight.deferred and len(left) <= 0.2 * GROUPS
        assert flight.version_N.min() >= step - 1
        if flight.deferred:
            # Learned from at the next step, at which its policy must not be older than one step.
            assert (flight.version_N[np.isin(flight.group_N, list(left))] == step).all()
        deferred.append(len(flight.deferred))
    assert sum(deferred) >= 1 and deferred[-1] == 0, "the last step waits for all"
    for f in relay.flights:
        assert f.job.rows.finished_N.all()


def test_a_failing_slice_names_its_prompts(monkeypatch):
    chunk = engines()[2].programs.chunk
    calls = []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")
        return chunk(*args, **kwargs)

    monkeypatch.setattr(engines()[2].programs, "chunk", fails)
    with pytest.raises(RunError) as error:
        flown(planned("sync"))
    want = "step 1: slice 2 failed while it decoded prompt 4, prompt 5: RESOURCE_EXHAUSTED: out of memory"
    assert str(error.value) == want


# --- the timeline ---------------------------------------------------------------------------------------------


def test_timeline_adds_up():
    have, dispatcher, _ = flown(planned("sync"))
    records = span_records(dispatcher.spans)
    chunks, groups = ([r for r in records if r["kind"] == kind] for kind in ("chunk", "group"))
    assert sum(c["iterations"] for c in chunks) == have.iterations
    assert sorted(g["group"] for g in groups) == list(range(GROUPS))  # equal shares keep groups whole
    for g in groups:
        assert g["slice"] == g["group"] // 2 and g["step"] == 1 and g["end"] > g["start"]
        longest = have.response_length_N[g["group"] * SAMPLES : (g["group"] + 1) * SAMPLES].max()
        assert g["iterations"] >= longest
    for s in range(SLICES):
        ends = [c["alive"] for c in chunks if c["slice"] == s]
        assert ends[-1] == 0
    start, end = min(s.start for s in dispatcher.spans), max(s.end for s in dispatcher.spans)
    ratios = bubble_ratios(dispatcher.spans, SLICES, [(start, end)])
    iterations = [sum(c["iterations"] for c in chunks if c["slice"] == s) for s in range(SLICES)]
    assert ratios["pipeline/bubble_iterations"] == pytest.approx(1 - np.mean(iterations) / max(iterations))
    assert 0 <= ratios["seconds/bubble_share"] < 1


def test_rounds_of_a_step_are_kept_apart():
    """Group 0 of another round is another prompt."""
    chunk = Chunk(8, 64, 1, 5, 0, 0)
    spans = [Span(3, 0, *times, (0,), 0, chunk, None, r) for r, times in enumerate([(0.0, 1.0), (10.0, 11.0)])]
    records = span_records(spans)
    groups = [(r["step"], r["round"], r["start"], r["end"], r["iterations"]) for r in records if r["kind"] == "group"]
    assert groups == [(4, 1, 0.0, 1.0, 5), (4, 2, 10.0, 11.0, 5)]
    assert [r["round"] for r in records if r["kind"] == "chunk"] == [1, 2]


def test_bubbles_by_hand():
    def span(slice, start, end, iterations):
        return Span(0, slice, start, end, (0,), 0, Chunk(8, 64, 1, iterations, 0, 0), None)

    spans = [span(0, 0.0, 2.0, 10), span(0, 2.0, 4.0, 10), span(1, 1.0, 2.0, 5)]
    assert bubble_ratios(spans, 2, [(0.0, 4.0)]) == {
        "pipeline/bubble_iterations": pytest.approx(1 - 12.5 / 20),
        "seconds/bubble_share": pytest.approx(1 - 5 / 8),
    }
    assert bubble_ratios(spans, 4, [(0.0, 4.0)])["pipeline/bubble_iterations"] == pytest.approx(1 - 6.25 / 20)
    # What was decoded before the rollout of this step began does not count as busy in it.
    assert bubble_ratios(spans, 2, [(1.5, 4.0)])["seconds/bubble_share"] == pytest.approx(1 - 3 / 5)
    # Nor does what lies between two rounds of sampling.
    assert bubble_ratios(spans, 2, [(0.0, 1.0), (3.0, 4.0)])["seconds/bubble_share"] == pytest.approx(1 - 2 / 4)
    assert set(bubble_ratios([], 3, [(0.0, 0.0)]).values()) == {0.0}
