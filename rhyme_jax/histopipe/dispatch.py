"""Dispatch: carries out plans on the slices, from one controller.

Each slice has at most one session (`histospec.session`) and one chunk of iterations under way; JAX's asynchronous
dispatch keeps all of them busy. The controller goes through their ends one by one.

*Virtual time.* What is decided between slices (who takes over what, which group waits for the next step, which slice
runs ahead) depends on the order in which chunks end. The order of the clock on the wall would differ from run to run,
and a resumed run would go another way than an uninterrupted one. So the controller keeps a clock for each slice that
advances by what the cost table says a chunk takes, and takes chunks in by when they are due: the same inputs give the
same decisions. A slice whose chunk ends before it is due waits for its turn, at most for a chunk. Where nothing depends
on the order, that of the wall clock is taken.

*Running ahead* (`cross_step`). A slice that is through with its share of a step may begin its share of the next with
the weights it has, and groups whose last responses outgrow all forecasts may be left to the next step (`defer`).
A rollout is made by one policy from first to last token, and is labelled with it.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from rhyme_jax.errors import RunError, one_line
from rhyme_jax.histopipe import migration
from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.histopipe.plan import Plan
from rhyme_jax.history.lengths import Forecast
from rhyme_jax.histospec.budget import Tally
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.rollouts import Chunk, Job
from rhyme_jax.histospec.session import Session

POLL_SECONDS = 0.0005
MAX_LAG = 1  # steps by which the policy of a rollout may be behind the one that learns from it


@dataclasses.dataclass(frozen=True)
class Weights:
    """A policy on the slices of this process."""

    version: int  # training steps that it has learned from
    by_slice: tuple[dict, ...]


@dataclasses.dataclass(frozen=True)
class Span:
    """A chunk of iterations on a slice, as it is written to the timeline."""

    step: int  # of the rollouts
    slice: int
    start: float  # seconds on the clock of `time.monotonic`
    end: float
    groups: tuple[int, ...]  # that had a row
    alive: int  # rows at the end of it
    chunk: Chunk
    evidence: Tally | None  # what became of drafts, see `Session`
    round: int = 0  # of sampling within the step


class Flight:
    """The rollouts of a step, from the plan to the last token. N rollouts; all are in the order of the job."""

    def __init__(
        self,
        step: int,
        job: Job,
        plan: Plan,
        forecast: Forecast | None = None,
        describe: Callable[[int], str] = lambda group: f"group {group}",
        round: int = 0,
    ):
        """`describe`: what to call a group in an error. `round`: of sampling within the step."""
        self.step, self.job, self.plan, self.forecast, self.describe = step, job, plan, forecast, describe
        self.round = round
        self.group_N = np.array([r.group for r in job.requests])
        self.here_N = np.zeros(len(job.requests), bool)  # rolled out on slices of this process
        self.version_N = np.full(len(job.requests), -1)  # of the policy that decodes; -1: not begun
        self.deferred: set[int] = set()  # groups that the step was closed without
        self.migrations = 0

    @property
    def unfinished_N(self) -> np.ndarray:
        """bool: this process's rollouts that are not finished."""
        return self.here_N & ~self.job.rows.finished_N


@dataclasses.dataclass
class _Slice:
    """A slice and what it is doing."""

    number: int
    index: int  # among those of this process
    engine: RolloutEngine
    clock: float = 0.0  # virtual seconds, at the start of the chunk that is under way
    due: float = 0.0  # when that ends, if it runs to its limit
    session: Session | None = None
    flight: Flight | None = None
    weights: Weights | None = None
    queue: collections.deque = dataclasses.field(default_factory=collections.deque)  # (flight, numbers)
    leaving: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (rollout, slice's index) at chunk's end
    started: float = 0.0  # of the chunk, on the clock on the wall
    ended: float | None = None


class Dispatcher:
    """Runs flights on the slices of this process.

    Args:
      engines: of this process's slices, all of one shape.
      first: number of the first of these slices.
      migrate: whether rollouts may move between slices once the plan has been carried out on one of them.
      defer: share of a step's groups that it may be closed without; 0 for none.
      force: moves a rollout to each free slice whatever it costs (tests).
      ordered: whether chunks are taken in by virtual time. What follows from their order (moves, running ahead, the
        order in which groups are learned from) is then the same in every run.

    `cost` foretells what is left to do, and `weights` are those that sessions begin with; both are the caller's to set.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        first: int = 0,
        migrate: bool = False,
        defer: float = 0.0,
        force: bool = False,
        ordered: bool = True,
    ):
        self.slices = [_Slice(first + i, i, e) for i, e in enumerate(engines)]
        self.migrate, self.defer, self.force, self.ordered = migrate, defer, force, ordered
        self.cost: SliceCost | None = None
        self.weights: Weights | None = None
        self.spans: list[Span] = []

    @property
    def idle(self) -> bool:
        return all(s.session is None and not s.queue for s in self.slices)

    @property
    def busy_seconds(self) -> np.ndarray:
        """Virtual seconds until each slice of this process is free, as foretold, from when the first one is."""
        if self.idle:
            return np.zeros(len(self.slices))
        now = self._now()
        at_S = np.array([max(s.clock, now) for s in self.slices])
        for flight, weights in self._policies():
            at_S += self._left(self._live(flight, weights)[0])
        for s in self.slices:
            at_S[s.index] += sum(flight.plan.seconds_by_slice[s.number] for flight, _ in s.queue)
        return at_S - at_S.min()

    # --- what the loop asks for ---------------------------------------------------------------------------------

    def launch(self, flight: Flight) -> None:
        """Hands out the shares of a flight. Free slices begin at once, with the newest weights."""
        if self.idle:  # so that decisions do not depend on what was done before, not even by rounding
            for s in self.slices:
                s.clock = 0.0
        now = self._now()
        for s in self.slices:
            numbers = flight.plan.rollouts_by_slice[s.number]
            flight.here_N[numbers] = True
            if len(numbers):
                s.queue.append((flight, [int(n) for n in numbers]))
        for s in self.slices:
            self._begin(s, now)

    def run(
        self,
        flight: Flight,
        before: Flight | None = None,
        ahead: Callable[[], Flight | None] | None = None,
        each: Callable[[Flight, list[int]], None] | None = None,
    ) -> None:
        """Decodes until the flight can be closed; what else is under way goes on.

        Args:
          before: the last step's flight, where that was closed without some groups: they are waited for.
          ahead: gives the next step's flight when a slice has nothing left to do; None: there is none to run ahead to.
          each: called with rollouts as they finish.

        Raises:
          RunError: a slice failed; names the prompts that it was decoding.
        """
        opened = False
        for s in self.slices:
            self._begin(s, self._now())
        while True:
            if before is None or not before.unfinished_N.any():
                late = self._late_groups(flight, ahead is not None)
                if late is not None:
                    flight.deferred = late
                    return
            if ahead is not None and not opened and any(s.session is None for s in self.slices):
                opened = True
                following = ahead()
                if following is not None:
                    self.launch(following)
            self._advance([f for f in (flight, before) if f is not None], each)

    def take_spans(self) -> list[Span]:
        """What was done since this was last asked."""
        spans, self.spans = self.spans, []
        return spans

    # --- one event ----------------------------------------------------------------------------------------------

    def _advance(self, closing: Sequence[Flight], each: Callable | None) -> None:
        """Takes in the chunk that ends next, and starts what follows on it. The slice that ends the flights `closing`
        does not run ahead: the new policy is about to come.
        """
        s = self._next()
        flight, session = s.flight, s.session
        numbers = session.running.tolist()
        groups = tuple(sorted({int(flight.group_N[n]) for n in numbers}))
        finished = self._guarded(s, session.finish)
        chunk = session.chunks[-1]
        s.clock += chunk.iterations * s.engine.costs.seconds(chunk.rows, chunk.slots, chunk.k)
        end = time.monotonic() if s.ended is None else s.ended
        alive = int(session.active_B.sum())
        self.spans.append(
            Span(flight.step, s.number, s.started, end, groups, alive, chunk, session.evidence[-1], flight.round)
        )
        now = s.clock
        for n, to in s.leaving:
            if n in session.running and self._takes(self.slices[to], flight, s.weights):
                session.give_up([n])
                self._give(self.slices[to], flight, s.weights, [n], now)
        s.leaving = []
        if session.busy:
            self._dispatch(s)
        else:
            s.session = s.flight = s.weights = None
            if any(f.unfinished_N.any() for f in closing):
                self._begin(s, now)
        if self.migrate and finished:  # else there is nothing that was not looked at before
            self._migrate(now)
        if each is not None and finished:
            each(flight, finished)

    def _next(self) -> _Slice:
        working = [s for s in self.slices if s.session is not None]
        if not working:
            raise RuntimeError("dispatch: rollouts are left and no slice has any")
        first = min(working, key=lambda s: s.due)
        if len(working) == 1:
            return first
        while True:  # watches all of them, so that each chunk's end is seen when it comes
            for s in working:
                if s.ended is None and s.session.ready:
                    s.ended = time.monotonic()
                if s.ended is not None and (s is first or not self.ordered):
                    return s
            time.sleep(POLL_SECONDS)

    def _begin(self, s: _Slice, now: float) -> None:
        """Starts the next share in a slice's queue, if it has nothing to do."""
        if s.session is None and s.queue:
            flight, numbers = s.queue.popleft()
            self._start(s, flight, self.weights, numbers, now)

    def _start(self, s: _Slice, flight: Flight, weights: Weights, numbers: list[int], now: float) -> None:
        s.clock = max(s.clock, now)
        s.flight, s.weights = flight, weights
        flight.version_N[numbers] = weights.version
        s.session = self._guarded(s, lambda: s.engine.session(weights.by_slice[s.index], flight.job, numbers), numbers)
        self._dispatch(s)

    def _dispatch(self, s: _Slice) -> None:
        s.started, s.ended = time.monotonic(), None
        rows, slots, k, limit = self._guarded(s, s.session.dispatch)
        s.due = s.clock + limit * s.engine.costs.seconds(rows, slots, k)

    def _guarded(self, s: _Slice, work: Callable, numbers: Sequence[int] | None = None):
        """The result of work on a slice's devices; what goes wrong there names the prompts."""
        try:
            return work()
        except Exception as e:  # XLA raises several kinds
            if numbers is None:
                numbers = [*s.session.running.tolist(), *s.session.waiting]
            groups = sorted({int(s.flight.group_N[n]) for n in numbers})
            named = ", ".join(s.flight.describe(g) for g in groups[:3])
            more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
            raise RunError(
                f"step {s.flight.step + 1}: slice {s.number} failed while it decoded {named}{more}: {one_line(e)}"
            ) from e

    # --- between slices -----------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The latest virtual time at which something is known to have happened."""
        working = [s.clock for s in self.slices if s.session is not None]
        return min(working) if working else max(s.clock for s in self.slices)

    def _takes(self, s: _Slice, flight: Flight, weights: Weights) -> bool:
        """Whether a slice may take over rollouts: it is free, or decodes others of the same policy with a row free."""
        if s.session is None:
            return not s.queue
        same = s.flight is flight and s.weights is weights
        return same and not s.session.waiting and not s.session.active_B.all()

    def _give(self, s: _Slice, flight: Flight, weights: Weights, numbers: list[int], now: float) -> None:
        flight.migrations += len(numbers)
        if s.session is None:
            self._start(s, flight, weights, numbers, now)
        else:
            s.session.add(numbers)

    def _migrate(self, now: float) -> None:
        """Gives free slices something to do."""
        coming = {to for s in self.slices for _, to in s.leaving}
        free = [s for s in self.slices if s.session is None and not s.queue and s.index not in coming]
        for flight, weights in self._policies():
            free = [s for s in free if s.session is None]
            if not free:
                return
            live, outlier_N = self._live(flight, weights)
            leaving = [n for s in self.slices for n, _ in s.leaving]
            movable_N = outlier_N & ~np.isin(live.rollout_N, leaving)
            if not (live.waiting_N.any() or movable_N.any() or self.force):
                continue
            seconds_S = self._left(live)
            moves = migration.moves(
                live, [s.index for s in free], seconds_S, self.cost, movable_N=movable_N, force=self.force
            )
            taken: dict[int, list[int]] = {}
            for n, to in moves:
                if n in leaving:
                    continue
                source = next(s for s in self.slices if s.session is not None and _holds(s, flight, n))
                if n in source.session.waiting:
                    source.session.give_up([n])
                    taken.setdefault(to, []).append(n)
                else:
                    source.leaving.append((n, to))
            for to, numbers in taken.items():
                self._give(self.slices[to], flight, weights, numbers, now)

    def _policies(self) -> list[tuple[Flight, Weights]]:
        """What is being decoded of which lengths are foretold: each flight by each of its policies."""
        working = [s for s in self.slices if s.session is not None and s.flight.forecast is not None]
        return list({(s.flight.step, s.weights.version): (s.flight, s.weights) for s in working}.values())

    def _live(self, flight: Flight, weights: Weights) -> tuple[migration.Live, np.ndarray]:
        """The unfinished rollouts of a flight by one policy, and which of those that run are outliers."""
        rollouts, places, elapsed, waiting = [], [], [], []
        rows = flight.job.rows  # a rollout that waits may have been begun elsewhere
        for s in self.slices:
            if s.session is None or s.flight is not flight or s.weights is not weights:
                continue
            running = s.session.running.tolist()
            queued = list(s.session.waiting)
            rollouts += [*running, *queued]
            places += [s.index] * (len(running) + len(queued))
            elapsed += [*s.session.elapsed(running).tolist(), *(len(rows.response(n)) for n in queued)]
            waiting += [False] * len(running) + [True] * len(queued)
        numbers = np.array(rollouts, np.int32)
        group_N = flight.group_N[numbers]
        live = migration.Live(
            rollout_N=numbers,
            slice_N=np.array(places, np.int32),
            elapsed_N=np.array(elapsed),
            waiting_N=np.array(waiting, bool),
            expected_N=flight.forecast.mean_G[group_N],
            upper_N=flight.forecast.upper_G[group_N],
            prompt_N=np.array([len(flight.job.requests[n].prompt) for n in numbers]),
            group_N=group_N,
        )
        return live, migration.outliers(live, self._finished_share_G(flight)[group_N])

    @staticmethod
    def _finished_share_G(flight: Flight) -> np.ndarray:
        groups = flight.group_N.max() + 1
        done_G = np.bincount(flight.group_N, flight.job.rows.finished_N, groups)
        return done_G / np.maximum(1, np.bincount(flight.group_N, minlength=groups))

    def _left(self, live: migration.Live) -> np.ndarray:
        """Seconds that each slice still needs for these rollouts, as foretold; 0 where it has none of them."""
        order = np.argsort(live.slice_N, kind="stable")
        tokens_N = migration.remaining_tokens(live.elapsed_N, live.expected_N, live.upper_N)
        start_S = np.searchsorted(live.slice_N[order], np.arange(len(self.slices) + 1))
        return completion(self.cost, tokens_N[order], start_S, (live.prompt_N + live.elapsed_N)[order])

    def _late_groups(self, flight: Flight, may_defer: bool) -> set[int] | None:
        """The groups that the flight may be closed without; None where it cannot be closed yet."""
        unfinished_N = flight.unfinished_N
        if not unfinished_N.any():
            return set()
        groups = {int(g) for g in flight.group_N[unfinished_N]}
        if not may_defer or len(groups) > self.defer * len(set(flight.group_N.tolist())):
            return None
        # Their policy would be two steps behind when the next step is learned from.
        if (flight.version_N[np.isin(flight.group_N, list(groups))] < flight.step + 1 - MAX_LAG).any():
            return None
        for other, weights in self._policies():
            if other is flight and not self._live(flight, weights)[1].all():
                return None
        return groups if all(f is not flight for s in self.slices for f, _ in s.queue) else None


def _holds(s: _Slice, flight: Flight, n: int) -> bool:
    return s.flight is flight and (n in s.session.waiting or n in s.session.running)
