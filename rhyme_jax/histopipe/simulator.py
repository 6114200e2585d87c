"""A discrete-event simulator of rollouts over slices: true lengths, plans from predictions.

It drives the planner of the real runtime (`histopipe.plan`, `histopipe.migration`, `history.lengths`); what it adds is
time. A slice decodes up to max_rows rollouts together; every iteration gives each live row a token, and costs what
`SliceCost` says for that many rows and that much cached context. Between two events (a row ends, rows come) nothing
about a slice changes, so its clock advances by a closed formula: k iterations of j rows with c cached tokens take
`k seconds_B[j] + context (k c + j k (k - 1) / 2)` seconds. When a slice is free, the policy says what it does next.

A learner trains on the batches in order; the update of batch s makes version s + 1 of the weights. A batch is closed
when its groups are done. A rollout keeps the weights it was begun with, and a slice takes the newest ones when it has
no live rows. The staleness of a batch is the largest `s - version` of its rollouts: 0 for policies with a barrier, at
most 1 for the others, which is asserted for every batch.

The learner has accelerators of its own, or takes turns with the slices on theirs: then decoding rests during an update
and goes on afterwards. The clock of the rollouts leaves these rests out, the wall clock does not.

Shapes: S slices, G prompt groups of a batch, C samples of a group, N rollouts of all batches
(n = (batch * G + g) * C + i), B live rows.
"""

import collections
import dataclasses
import heapq
import itertools
import math

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.histopipe.migration import Live, moves, outliers, remaining_tokens
from rhyme_jax.histopipe.plan import Work, make_plan
from rhyme_jax.histopipe.traces import Trace
from rhyme_jax.history.lengths import LengthPredictor

WAITING, RUNNING, DONE = 0, 1, 2  # states of a rollout
TAKERS, GIVERS = 64, 256  # slices that one look considers at most: with thousands, moves cost more than they gain


@dataclasses.dataclass(frozen=True)
class Policy:
    """Who decodes what, when."""

    mode: str = "sync"  # of the planner
    layout: str = "best"  # of the planner; or "spread": dealt out blindly; "oracle": longest first, knowing all lengths
    staleness: int = 0  # batches that a slice may run ahead of the learner
    move: bool = False  # free slices take waiting rollouts, and, at staleness 0, running ones
    defer: bool = False  # a batch may close without a few outliers
    provision: float = 1.0  # prompts rolled out for each one trained on
    stream: bool = False  # the learner takes groups as they finish, not the whole batch at once


POLICIES = {
    # With a barrier. "equal": contiguous equal shares of the batch, groups whole, as verl does; "spread": the same, but
    # the samples are dealt out one by one, without any forecast.
    "equal": Policy(layout="equal"),
    "spread": Policy(layout="spread", stream=True),
    "balanced": Policy("balanced", move=True, stream=True),
    "longest_first_oracle": Policy(layout="oracle", stream=True),
    # One step ahead.
    "async": Policy(layout="equal", staleness=1, stream=True),
    "async_spread": Policy(layout="spread", staleness=1, stream=True),
    "paper": Policy("cross_step", "paper", staleness=1, defer=True, stream=True),
    "cross_step": Policy("cross_step", staleness=1, move=True, defer=True, stream=True),
    # A barrier that does not wait for the slowest.
    "over_provision": Policy(layout="equal", provision=1.25, stream=True),
}


@dataclasses.dataclass(frozen=True)
class Learner:
    """What an update costs."""

    token_seconds: float  # seconds for each response token of the batch
    fixed_seconds: float  # the optimizer's step, and the transfer of the weights to the slices
    own: bool  # has accelerators of its own; else it takes turns with the slices on theirs


@dataclasses.dataclass(frozen=True)
class System:
    """The machine and the batch."""

    slices: int
    cost: SliceCost
    learner: Learner
    groups: int  # prompts of a batch
    look_seconds: float  # between two looks of the controller for something to move or to defer
    defer_share: float  # of a batch's groups that may be deferred at most
    first_tokens: float  # forecast of a response while nothing is known
    max_tokens: int  # that a response may have

    def __post_init__(self):
        if not 1 <= self.slices <= self.groups:
            raise InputError(f"slices={self.slices}: must be from 1 to the {self.groups} prompts of a step")


@dataclasses.dataclass(frozen=True)
class Update:
    """One batch, as it was trained on."""

    began: float  # its first rollout did, seconds on the clock of the rollouts
    closed: float  # on the clock of the rollouts
    done: float  # its update was, on the clock of the rollouts
    wall: float  # the same, on the wall clock
    tokens: int  # of responses
    rollouts: int
    stale: int  # rollouts that are one version behind
    staleness: int  # of the batch
    deferred: int  # groups that left it for the next


@dataclasses.dataclass
class Outcome:
    updates: list[Update]
    busy_S: list[list[tuple[float, float]]]  # when each slice decoded, on the clock of the rollouts
    slice_N: np.ndarray  # int32: where each rollout was decoded last; -1 nowhere
    moved: int  # rollouts that another slice than the planned one decoded
    wasted_tokens: int  # decoded and never trained on


def simulate(policy: Policy, system: System, trace: Trace, steps: int, seed: int) -> Outcome:
    """Runs so many steps. One more batch is there to run ahead into, so that the last step is like those before.

    Raises:
      InputError: the trace is too short, or there are more slices than prompts.
    """
    return _Run(policy, system, trace, steps, seed).run()


class _Slice:
    """A slice, as its last event left it."""

    def __init__(self, index: int):
        self.index = index
        self.clock, self.iteration = 0.0, 0
        self.rows: list[tuple[int, int]] = []  # heap of (iteration at which it ends, rollout)
        self.cached = 0  # tokens in the caches of its rows
        self.queue: collections.deque[int] = collections.deque()  # rollouts that wait for a row
        self.coming: collections.deque[collections.deque[int]] = collections.deque()  # shares planned, not begun
        self.next = 0  # the batch whose share it begins next
        self.batch = -1  # the batch that it decodes
        self.shared: set[int] = set()  # groups whose prompt it has in its cache
        self.version = 0  # of its weights
        self.since: float | None = None  # busy since
        self.stamp = 0  # events with an older one are void


class _Run:
    def __init__(self, policy: Policy, system: System, trace: Trace, steps: int, seed: int):
        self.policy, self.system, self.cost, self.steps = policy, system, system.cost, steps
        self.seconds_B = system.cost.seconds_B.tolist()
        self.G, self.C = round(system.groups * policy.provision), trace.samples  # rolled out for each batch
        batches = trace.batches(self.G, seed, steps + 1)
        self.prompts = [prompts_G for prompts_G, _ in batches]
        length_N = np.concatenate([lengths_GC.reshape(-1) for _, lengths_GC in batches])
        self.length_N = length_N.tolist()
        self.prompt_N = np.repeat(trace.prompt_P[np.concatenate(self.prompts)], self.C)
        self.prompt_g = self.prompt_N[:: self.C].tolist()  # by group, over all batches
        self.mean_N, self.upper_N = np.zeros(len(length_N)), np.zeros(len(length_N))  # forecasts
        self.state_N = np.full(len(length_N), WAITING, np.int8)
        self.slice_N = np.full(len(length_N), -1, np.int32)
        self.begun_N = np.zeros(len(length_N), np.int64)  # its slice's iteration when it began, less what it had
        self.version_N = np.full(len(length_N), -1, np.int32)
        self.left_g = [self.C] * (len(length_N) // self.C)  # rollouts of the group that are not done
        self.done: list[dict[int, float]] = [{} for _ in batches]  # by batch: groups that are done, and when
        self.began = [math.inf] * len(batches)
        self.planned = 0  # batches
        self.predictor = LengthPredictor(first=system.first_tokens)

        self.slices = [_Slice(i) for i in range(system.slices)]
        self.idle = set(range(system.slices))
        self.clock_S, self.iteration_S = np.zeros(system.slices), np.zeros(system.slices, np.int64)
        self.rows_S, self.cached_S = np.zeros(system.slices, np.int64), np.zeros(system.slices)

        self.version = 0  # of the newest weights: updates that are done
        self.closing = 0  # the batch that closes next
        self.joining: list[int] = []  # groups that were deferred to it
        self.learner_free, self.rested = 0.0, 0.0
        self.events: list[tuple[float, int, str, int, int]] = []  # (when, number, what, slice, stamp)
        self.number, self.now = 0, 0.0
        self.updating: collections.deque[Update] = collections.deque()  # closed batches whose update is not done
        self.out = Outcome([], [[] for _ in self.slices], self.slice_N, 0, 0)

    # --- the clock ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self._begin_shares(sorted(self.idle))
        if self.policy.move or self.policy.defer:
            self._push(self.system.look_seconds, "look")
        while self.version < self.steps:
            self.now, _, what, index, stamp = heapq.heappop(self.events)
            if what == "row":
                if self.slices[index].stamp == stamp:
                    self._rows_end(self.slices[index])
            elif what == "update":
                self._updated()
            else:
                self._look()
                self._push(self.now + self.system.look_seconds, "look")
        for s in self.slices:
            self._rest(s)
        return self.out

    def _push(self, when: float, what: str, index: int = -1, stamp: int = 0) -> None:
        self.number += 1  # so that what happens at the same time happens in the order in which it was foreseen
        heapq.heappush(self.events, (when, self.number, what, index, stamp))

    def _advance(self, s: _Slice, iterations: int) -> None:
        s.clock += self._span(s, iterations)
        s.iteration += iterations
        s.cached += len(s.rows) * iterations

    def _span(self, s: _Slice, iterations: int) -> float:
        """Seconds of a slice's next iterations, while no row ends."""
        j, k = len(s.rows), iterations
        return k * self.seconds_B[j] + self.cost.context * (k * s.cached + j * k * (k - 1) / 2)

    def _schedule(self, s: _Slice) -> None:
        """Notes a slice's state, and foresees its next event."""
        s.stamp += 1
        i = s.index
        self.clock_S[i], self.iteration_S[i] = s.clock, s.iteration
        self.rows_S[i], self.cached_S[i] = len(s.rows), s.cached
        if s.rows:
            self._push(s.clock + self._span(s, s.rows[0][0] - s.iteration), "row", i, s.stamp)

    def _iterations_now_S(self) -> np.ndarray:
        """Whole iterations that each slice has done."""
        j, spent = self.rows_S, np.maximum(self.now - self.clock_S, 0)
        a = self.cost.context * j / 2
        b = self.cost.seconds_B[j] + self.cost.context * (self.cached_S - j / 2)
        # The positive root of a k^2 + b k = spent, in the form that does not cancel where a is small.
        k = 2 * spent / np.where(j > 0, b + np.sqrt(b * b + 4 * a * spent), np.inf)
        return self.iteration_S + np.floor(k + 1e-9).astype(np.int64)

    # --- slices ------------------------------------------------------------------------------------------------

    def _begin_shares(self, indices) -> None:
        """Free slices begin their share of the next batch where the weights are fresh enough for it."""
        for i in indices:
            s = self.slices[i]
            while not s.rows and s.next <= self.steps and s.next <= self.version + self.policy.staleness:
                if self.planned == s.next:
                    self._plan()
                s.next += 1
                s.queue = s.coming.popleft()
                if s.queue:
                    self._wake(s, self.now, s.next - 1, self.version)
                    self._fill(s)

    def _wake(self, s: _Slice, when: float, batch: int, version: int) -> None:
        if s.since is None:
            s.since, s.clock = when, when
            s.batch, s.version, s.shared = batch, version, set()
            self.idle.discard(s.index)

    def _rest(self, s: _Slice) -> None:
        if s.since is not None:
            if s.since < self.now:
                self.out.busy_S[s.index].append((s.since, self.now))
            s.since = None
        self.idle.add(s.index)

    def _fill(self, s: _Slice) -> None:
        while s.queue and len(s.rows) < self.cost.max_rows:
            self._begin(s, s.queue.popleft())
        self._schedule(s)

    def _begin(self, s: _Slice, n: int, elapsed: int = 0) -> None:
        """Gives a rollout a row. One that comes from another slice brings tokens along, and must be prefilled."""
        group, batch = n // self.C, n // (self.C * self.G)
        prompt = self.prompt_g[group]
        if elapsed:
            s.clock += self.cost.prefill * (prompt + elapsed)
        else:
            self.version_N[n] = s.version
            if group not in s.shared:  # a group's prompt is prefilled once, for all of its samples
                s.shared.add(group)
                s.clock += self.cost.prefill * prompt
        heapq.heappush(s.rows, (s.iteration + self.length_N[n] - elapsed, n))
        s.cached += prompt + elapsed
        self.state_N[n], self.slice_N[n], self.begun_N[n] = RUNNING, s.index, s.iteration - elapsed
        self.began[batch] = min(self.began[batch], self.now)

    def _rows_end(self, s: _Slice) -> None:
        self._advance(s, s.rows[0][0] - s.iteration)
        while s.rows and s.rows[0][0] <= s.iteration:
            n = heapq.heappop(s.rows)[1]
            group = n // self.C
            s.cached -= self.prompt_g[group] + self.length_N[n]
            if self.state_N[n] != RUNNING:
                raise AssertionError(f"rollout {n} ends but is not running")
            self.state_N[n] = DONE
            self.left_g[group] -= 1
            if not self.left_g[group]:
                self.done[group // self.G][group] = self.now
        self._fill(s)
        if not s.rows:
            self._rest(s)
        self._close()
        if not s.rows and not (self.updating and self.updating[0].done <= self.now):  # else new weights are just coming
            self._begin_shares([s.index])

    # --- plans -------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Lays out the next batch from what is known now."""
        batch, size = self.planned, self.G * self.C
        self.planned += 1
        first = batch * size
        forecast = self.predictor.predict(self.prompts[batch].tolist())
        self.mean_N[first : first + size] = np.repeat(forecast.mean_G, self.C)
        self.upper_N[first : first + size] = np.repeat(forecast.upper_G, self.C)
        if self.policy.layout == "oracle":
            shares = longest_first(np.array(self.length_N[first : first + size]), self.system.slices)
        elif self.policy.layout == "spread":
            shares = [range(i, size, self.system.slices) for i in range(self.system.slices)]
        else:
            prompt_G = np.array(self.prompt_g[batch * self.G : (batch + 1) * self.G])
            work = Work(forecast.mean_G, forecast.upper_G, prompt_G, self.C, longest=self.system.max_tokens)
            busy_S = self._remaining_S(self._live(self.slices, coming=True)) if self.policy.staleness else None
            plan = make_plan(
                work, self.system.slices, self.cost, self.policy.mode, self.policy.layout, step=batch, busy_S=busy_S
            )
            shares = plan.rollouts_by_slice
        for s, share in zip(self.slices, shares, strict=True):
            s.coming.append(collections.deque((np.asarray(share, np.int64) + first).tolist()))

    def _live(self, slices: list[_Slice], coming: bool = False) -> Live:
        """What slices have that is not done: what runs, then what waits, in the order of their queues; `coming`: also
        shares of theirs that have not begun.
        """
        running_N = np.array([n for s in slices for _, n in s.rows], np.int64)
        queues = [list(itertools.chain(s.queue, *s.coming)) if coming else s.queue for s in slices]
        waiting_N = np.array([n for queue in queues for n in queue], np.int64)
        n = np.concatenate([running_N, waiting_N])
        slice_N = np.repeat([s.index for s in slices] * 2, [len(s.rows) for s in slices] + [len(q) for q in queues])
        elapsed_N = np.zeros(len(n), np.int64)
        elapsed_N[: len(running_N)] = self._iterations_now_S()[slice_N[: len(running_N)]] - self.begun_N[running_N]
        return Live(
            rollout_N=n,
            slice_N=slice_N.astype(np.int32),
            elapsed_N=elapsed_N,
            waiting_N=np.arange(len(n)) >= len(running_N),
            expected_N=self.mean_N[n],
            upper_N=self.upper_N[n],
            prompt_N=self.prompt_N[n],
            group_N=n // self.C,
        )

    def _remaining_S(self, live: Live) -> np.ndarray:
        """Expected seconds until each slice is done with what it has."""
        order = np.argsort(live.slice_N, kind="stable")
        left_N = remaining_tokens(live.elapsed_N, live.expected_N, live.upper_N)
        left_N = np.maximum(1, np.minimum(left_N, self.system.max_tokens - live.elapsed_N))[order]
        start_S = np.searchsorted(live.slice_N[order], np.arange(len(self.slices) + 1))
        return completion(self.cost, left_N, start_S, (live.prompt_N + live.elapsed_N)[order])

    # --- what the controller does between ---------------------------------------------------------------------

    def _look(self) -> None:
        if self.policy.move and self.idle:
            self._move()
        if self.policy.defer:
            self._defer()

    def _move(self) -> None:
        """Gives free slices what waits elsewhere, or outliers that run elsewhere, of the same batch and weights."""
        flights = sorted({(s.batch, s.version) for s in self.slices if s.since is not None})
        for flight in flights:
            free = sorted(self.idle)[:TAKERS]
            slices = [s for s in self.slices if s.since is not None and (s.batch, s.version) == flight]
            if len(slices) > GIVERS:
                busy_S = self._remaining_S(self._live(slices))
                slices = sorted(slices, key=lambda s: -busy_S[s.index])[:GIVERS]
            live = self._live(slices)
            movable_N = self._outliers(live)
            if not free or not (live.waiting_N.any() or movable_N.any()):
                continue
            at = dict(zip(live.rollout_N.tolist(), live.slice_N.tolist(), strict=True))
            for n, to in moves(live, free, self._remaining_S(live), self.cost, movable_N):
                taker, giver = self.slices[to], self.slices[at[n]]
                if self.state_N[n] == RUNNING:
                    self._take_running(n, giver, taker)
                else:
                    giver.queue.remove(n)
                    self._wake(taker, self.now, *flight)
                    taker.queue.append(n)
                    self.out.moved += 1
            for i in free:
                if self.slices[i].since is not None:
                    self._fill(self.slices[i])

    def _outliers(self, live: Live) -> np.ndarray:
        left_N = np.array([self.left_g[g] for g in live.group_N.tolist()], np.int64)
        return outliers(live, 1 - left_N / self.C)

    def _take_running(self, n: int, s: _Slice, to: _Slice) -> None:
        """Moves a rollout when the iteration that its slice is in has ended, unless it ends with it."""
        k = int(self._iterations_now_S()[s.index]) - s.iteration
        if s.clock + self._span(s, k) < self.now:
            k += 1
        self._advance(s, min(k, s.rows[0][0] - s.iteration))
        elapsed = s.iteration - int(self.begun_N[n])
        if elapsed < self.length_N[n]:
            s.rows = [row for row in s.rows if row[1] != n]
            heapq.heapify(s.rows)
            s.cached -= self.prompt_g[n // self.C] + elapsed
            self._wake(to, max(self.now, s.clock), s.batch, s.version)
            self._begin(to, n, elapsed)
            self.out.moved += 1
        self._fill(s)
        if not s.rows:
            self._rest(s)

    def _defer(self) -> None:
        """Closes a batch without its last groups, if they are few, outliers, and not too old for the next batch."""
        batch = self.closing
        if batch >= self.planned or self._unfinished(self.joining):
            return
        late = self.G - len(self.done[batch])
        if not 0 < late <= self.system.defer_share * self.G or not self.done[batch]:
            return  # none is late, too many are, or nothing would be left to train on
        groups = [g for g in range(batch * self.G, (batch + 1) * self.G) if self.left_g[g]]
        members_N = np.concatenate([np.arange(g * self.C, (g + 1) * self.C) for g in groups])
        if (self.version_N[members_N] < batch + 1 - self.policy.staleness).any():
            return  # also where some have not begun: -1
        live = self._live([s for s in self.slices if s.batch == batch])
        if self._outliers(live).all():
            self._train(groups)
            self._close()

    # --- the learner -------------------------------------------------------------------------------------------

    def _unfinished(self, groups) -> bool:
        return any(self.left_g[g] for g in groups)

    def _close(self) -> None:
        """Trains on the batches that are complete."""
        while self.closing < self.planned and not self._unfinished(self.joining):
            if len(self.done[self.closing]) < self.system.groups:
                return
            self._train([])

    def _train(self, deferred: list[int]) -> None:
        """Closes the batch and begins its update; groups that are deferred join the next."""
        batch, learner = self.closing, self.system.learner
        own = sorted(self.done[batch], key=lambda g: (self.done[batch][g], g))[: self.system.groups]
        groups = own + self.joining
        rollouts = [n for g in groups for n in range(g * self.C, (g + 1) * self.C)]
        stale_N = batch - self.version_N[rollouts]
        if not (stale_N >= 0).all() or stale_N.max() > self.policy.staleness:
            raise AssertionError(f"batch {batch}: a staleness of {stale_N.min()} to {stale_N.max()}")
        if self.system.groups < self.G:
            self._abort(batch)
        tokens = {g: sum(self.length_N[g * self.C : (g + 1) * self.C]) for g in groups}
        total = sum(tokens.values())
        if not learner.own:
            done = self.now
            self.rested += total * learner.token_seconds + learner.fixed_seconds
        elif self.policy.stream:
            done = self.learner_free
            for when, g in sorted((self.done[g // self.G][g], g) for g in groups):
                done = max(done, when) + tokens[g] * learner.token_seconds
            done = max(done, self.now) + learner.fixed_seconds
        else:
            done = max(self.now, self.learner_free) + total * learner.token_seconds + learner.fixed_seconds
        self.learner_free = done
        self.updating.append(
            Update(
                began=self.began[batch],
                closed=self.now,
                done=done,
                wall=done + self.rested,
                tokens=total,
                rollouts=len(rollouts),
                stale=int((stale_N > 0).sum()),
                staleness=int(stale_N.max()),
                deferred=len(deferred),
            )
        )
        self._push(done, "update")
        prompts_g = [int(self.prompts[g // self.G][g % self.G]) for g in groups]
        lengths_g = [np.array(self.length_N[g * self.C : (g + 1) * self.C]) for g in groups]
        self.predictor.observe(prompts_g, lengths_g)
        self.closing += 1
        self.joining = deferred

    def _abort(self, batch: int) -> None:
        """Drops what is left of a batch that has enough."""
        kept = set(list(self.done[batch])[: self.system.groups])
        iteration_S = self._iterations_now_S()
        for g in range(batch * self.G, (batch + 1) * self.G):
            if g not in kept:
                for n in range(g * self.C, (g + 1) * self.C):
                    if self.state_N[n] == RUNNING:
                        self.out.wasted_tokens += int(iteration_S[self.slice_N[n]] - self.begun_N[n])
                    elif self.state_N[n] == DONE:
                        self.out.wasted_tokens += self.length_N[n]
        for s in self.slices:
            s.rows, s.cached, s.queue = [], 0, collections.deque()
            self._schedule(s)
            self._rest(s)

    def _updated(self) -> None:
        self.version += 1
        self.out.updates.append(self.updating.popleft())
        self._begin_shares(sorted(self.idle))


def longest_first(length_N: np.ndarray, slices: int) -> list[list[int]]:
    """Rollouts, longest first, each to the slice with the fewest tokens so far: a layout for those who know lengths."""
    shares: list[list[int]] = [[] for _ in range(slices)]
    loads = [(0, i) for i in range(slices)]
    for n in np.argsort(-length_N, kind="stable").tolist():
        load, i = heapq.heappop(loads)
        shares[i].append(n)
        heapq.heappush(loads, (load + int(length_N[n]), i))
    return shares


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What no schedule can beat, seconds on the clock of the rollouts for each step."""

    alone: np.ndarray  # the longest response of the step, on a slice of its own: bounds every step with a barrier
    work: np.ndarray  # the step's tokens, all slices at their most efficient number of rows all the time


def bounds(system: System, trace: Trace, steps: int, seed: int) -> Bounds:
    """For each step."""
    cost = system.cost
    per_token = (cost.seconds_B[1:] / np.arange(1, cost.max_rows + 1)).min()
    alone, work = [], []
    for prompts_G, lengths_GC in trace.batches(system.groups, seed, steps):
        prompt_G1 = trace.prompt_P[prompts_G][:, None]
        context_GC = cost.context * lengths_GC * (prompt_G1 + (lengths_GC - 1) / 2)
        prefill_G1 = cost.prefill * prompt_G1
        alone.append((prefill_G1 + lengths_GC * cost.seconds_B[1] + context_GC).max())
        work.append(((lengths_GC * per_token + context_GC).sum() + prefill_G1.sum()) / system.slices)
    return Bounds(np.array(alone), np.array(work))


def summary(out: Outcome, first: int) -> dict:
    """What is reported of a run.

    Args:
      first: steps of the first epoch, which has nothing to predict from; everything but `overall` leaves them out,
        unless there are no others.
    """
    first = first if first < len(out.updates) else 0
    kept = out.updates[first:]
    before = out.updates[first - 1] if first else Update(0, 0, 0, 0, 0, 0, 0, 0, 0)
    wall = kept[-1].wall - before.wall
    busy, span = _busy(out.busy_S, before.done, kept[-1].done)
    tokens, rollouts = sum(u.tokens for u in kept), sum(u.rollouts for u in kept)
    done = [before, *kept]
    return {
        "tokens_per_s": tokens / wall,
        "rollouts_per_s": rollouts / wall,
        "step_seconds": wall / len(kept),
        "rollout_seconds": sum(u.closed - u.began for u in kept) / len(kept),
        "bubble_ratio": max(0.0, 1 - busy / (len(out.busy_S) * span)),  # not -1e-16
        "mean_staleness": sum(u.stale for u in kept) / rollouts,
        "max_staleness": max(u.staleness for u in out.updates),
        "deferred_share": sum(u.deferred for u in kept) * (len(kept) / rollouts if rollouts else 0) / len(kept),
        "moved": out.moved,
        "wasted_tokens": out.wasted_tokens,
        "overall_tokens_per_s": sum(u.tokens for u in out.updates) / out.updates[-1].wall,
        "seconds_by_step": [round(b.wall - a.wall, 2) for a, b in itertools.pairwise(done)],
    }


def _busy(busy_S, start: float, end: float) -> tuple[float, float]:
    """Within a window: busy seconds of all slices together, and the seconds in which any is busy."""
    spans = sorted((max(a, start), min(b, end)) for intervals in busy_S for a, b in intervals if a < end and b > start)
    total = sum(b - a for a, b in spans)
    union, reach = 0.0, start
    for a, b in spans:
        union += max(b - max(a, reach), 0)
        reach = max(reach, b)
    return total, union
