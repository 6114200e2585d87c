"""Migration: which rollouts to move at the moment a slice becomes free.

A rollout that waits in a queue moves free of charge, but for its prompt. One that runs takes its text along and has to
prefill it where it goes. It comes out token for token the same: noise is keyed by prompt, sample and position, not by
the slice.

A forecast of a rollout that is still going is that of those which got so far: the expected *residual* life. For
log-normal lengths it grows with what has passed, so that an outlier is expected to go on for long.

Suffix letters: N rollouts that are not finished, S slices.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.history.lengths import lognormal

LAST = 0.1  # of a group: the paper's outliers are among them
PAYS = 1.05  # a running rollout moves where the two slices are done sooner by this factor
TRIES = 8  # slices, those that need longest, that one move is sought on: 0.1 ms each


@dataclass(frozen=True)
class Live:
    """Rollouts that are not finished; those that wait are in the order of their slice's queue."""

    rollout_N: np.ndarray  # int32
    slice_N: np.ndarray  # int32 where it runs or waits
    elapsed_N: np.ndarray  # int tokens so far; 0 where it waits
    waiting_N: np.ndarray  # bool: still queued
    expected_N: np.ndarray  # float64 predicted mean tokens in all
    upper_N: np.ndarray  # float64 predicted upper (0.9) quantile of the tokens in all
    prompt_N: np.ndarray  # int prompt tokens
    group_N: np.ndarray  # int32


def outliers(live: Live, finished_share_of_group_N: np.ndarray, last: float = LAST) -> np.ndarray:
    """Which running rollouts outgrow their forecast while their group is all but done: bool [N].

    He et al. 2025 (arXiv 2508.18588): a rollout is migrated, or interrupted, once it is among its group's last tenth
    and past its growth threshold, here the forecast's upper quantile. In a small group the last one will do.

    Args:
      finished_share_of_group_N: of the responses of each rollout's group, the share that is finished.
    """
    _, group_N, left_G = np.unique(live.group_N, return_inverse=True, return_counts=True)
    late_N = (np.asarray(finished_share_of_group_N) >= 1.0 - last) | (left_G[group_N] == 1)
    return late_N & ~live.waiting_N & (live.elapsed_N > live.upper_N)


def remaining_tokens(elapsed: np.ndarray, mean: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Expected further tokens of responses that are still going after `elapsed`, at least 1; any shape.

    With lengths log-normal of mean m, E[X - t | X > t] = m Phi(b + sigma) / Phi(b) - t with
    b = (mu - log t) / sigma. In logs, so that it holds however far beyond the forecast t is.
    """
    elapsed = np.maximum(np.asarray(elapsed, np.float64), 0.0)
    mean = np.maximum(np.asarray(mean, np.float64), 1.0)
    mu, sigma = lognormal(mean, upper)
    beyond = (mu - np.log(np.maximum(elapsed, 1e-9))) / sigma
    return np.maximum(1.0, mean * np.exp(_log_phi(beyond + sigma) - _log_phi(beyond)) - elapsed)


def _log_phi(x: np.ndarray) -> np.ndarray:
    """Log of the normal law's distribution function; of Phi, to 1.2e-7 of its value everywhere.

    Chebyshev fit of erfc in Press et al., Numerical Recipes (1992), section 6.2.
    """
    z = np.abs(x) / math.sqrt(2.0)
    t = 1.0 / (1.0 + z / 2.0)
    fit = np.polynomial.polynomial.polyval(t, _ERFC)
    log_tail = np.log(t / 2.0) - z * z + fit  # of Phi(-|x|)
    return np.where(x < 0, log_tail, np.log1p(-np.exp(log_tail)))


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def moves(
    live: Live,
    free_slices: Sequence[int],
    slice_seconds_S: np.ndarray,
    cost: SliceCost,
    movable_N: np.ndarray | None = None,
    limit: int | None = None,
    force: bool = False,
) -> list[tuple[int, int]]:
    """What to move where: (rollout, free slice), each rollout at most once, in the order decided.

    First those that wait: over and over, from the slice that needs longest, of those where any waits, its last to the
    free slice that will be done first, while the two are done sooner by it. Then, in the same way, what runs and may
    move, with the time to prefill its text there. A slice is never left with nothing.

    Args:
      free_slices: slices with nothing to do.
      slice_seconds_S: predicted seconds that each slice still needs; of free ones it is taken to be 0.
      movable_N: which running rollouts may move (see `outliers`); none: no running one.
      limit: moves at most; none: as many as pay.
      force: moves one running rollout (a movable one where there is any) to each free slice, whatever it costs, from
        a slice that keeps another. For tests of migration itself.
    """
    free = [int(s) for s in dict.fromkeys(free_slices)]
    board = _Board(live, free, np.asarray(slice_seconds_S, np.float64), cost)
    running_N = ~live.waiting_N
    movable_N = np.zeros(len(running_N), bool) if movable_N is None else np.asarray(movable_N, bool) & running_N
    limit = len(live.rollout_N) if limit is None else limit
    if force:
        for to in free[:limit]:
            for allowed_N in (movable_N, running_N):
                n = next(board.candidates(allowed_N), None)
                if n is not None:
                    board.move(n, to, board.after(n, to))
                    break
    else:
        for allowed_N, factor in ((live.waiting_N, 1.0), (movable_N, PAYS)):
            while len(board.moved) < limit and board.move_one(allowed_N, factor):
                pass
    return board.moved


class _Board:
    """Who has what, and how long it takes, while moves are decided."""

    def __init__(self, live: Live, free: list[int], seconds_S: np.ndarray, cost: SliceCost):
        self.live, self.free, self.cost = live, free, cost
        self.left_N = remaining_tokens(live.elapsed_N, live.expected_N, live.upper_N)
        self.cached_N = np.asarray(live.prompt_N, np.float64) + live.elapsed_N
        self.slice_N = np.array(live.slice_N)
        self.fixed_N = np.isin(self.slice_N, free)  # moved, or where it is wanted
        self.seconds_S = seconds_S.copy()
        self.seconds_S[free] = 0.0
        self.moved: list[tuple[int, int]] = []

    def model(self, s: int) -> float:
        """Seconds of a slice with what it has: what runs first, then its queue; what moved here is prefilled."""
        rollouts = np.flatnonzero(self.slice_N == s)
        if len(rollouts) == 0:
            return 0.0
        rollouts = rollouts[np.argsort(self.live.waiting_N[rollouts], kind="stable")]
        cached = self.cached_N[rollouts]
        fresh = self.live.waiting_N[rollouts] | (self.slice_N[rollouts] != self.live.slice_N[rollouts])
        ends = np.array([0, len(rollouts)])
        prefill = np.array([cached[fresh].sum()])
        return float(completion(self.cost, self.left_N[rollouts], ends, cached, prefill)[0])

    def candidates(self, allowed_N: np.ndarray) -> Iterator[int]:
        """Of each slice that would keep another rollout, the one to move, the slice that needs longest first.

        That is the last in the queue of those that wait, and of those that run the one that will run longest.
        """
        allowed_N = allowed_N & ~self.fixed_N
        held_S = np.bincount(self.slice_N, minlength=len(self.seconds_S))
        gives_S = (np.bincount(self.slice_N[allowed_N], minlength=len(self.seconds_S)) > 0) & (held_S > 1)
        for s in np.argsort(-self.seconds_S, kind="stable"):
            if gives_S[s]:
                here = np.flatnonzero(allowed_N & (self.slice_N == s))
                waits = here[self.live.waiting_N[here]]
                yield int(waits[-1] if len(waits) else here[np.argmax(self.left_N[here])])

    def move_one(self, allowed_N: np.ndarray, factor: float) -> bool:
        """Moves the first candidate that pays, if any."""
        if not self.free:
            return False
        to = min(self.free, key=lambda s: (self.seconds_S[s], s))
        for n in itertools.islice(self.candidates(allowed_N), TRIES):
            before = max(self.seconds_S[self.slice_N[n]], self.seconds_S[to])
            after = self.after(n, to)
            if max(after) * factor < before:
                self.move(n, to, after)
                return True
        return False

    def after(self, n: int, to: int) -> tuple[float, float]:
        """Seconds of the slice that gives the rollout and of the one that takes it, if it moves.

        Slices' own accounts of their seconds have what the model lacks, so that it is used for differences alone.
        """
        origin = int(self.slice_N[n])
        before = self.model(origin), self.model(to)
        self.slice_N[n] = to
        given = self.seconds_S[origin] + self.model(origin) - before[0]
        taken = self.seconds_S[to] + self.model(to) - before[1]
        self.slice_N[n] = origin
        return max(0.0, given), max(0.0, taken)

    def move(self, n: int, to: int, after: tuple[float, float]) -> None:
        """Moves a rollout, knowing what its slices need after it."""
        self.seconds_S[int(self.slice_N[n])], self.seconds_S[to] = after
        self.slice_N[n], self.fixed_N[n] = to, True
        self.moved.append((int(self.live.rollout_N[n]), to))
