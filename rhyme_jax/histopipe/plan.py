"""Plans: which rollout slice decodes which rollouts, in which order.

A plan is data; it names rollouts and slices by index and touches no device. The planner lays a step out in several
ways, scores each under the cost model, and takes the best.

Which of a group's responses will be the long one nobody knows: with fresh noise they are exchangeable. So a layout is
not scored on predicted means, which would promise a balance that no step keeps, but on a few *scenarios*: lengths
drawn from each group's log-normal law, always the same ones. Layouts see the law, never the draws.

What a slice needs is close to `weights * (its longest response) + each * (all of its tokens) + the cache reads`: the
longest response decides how often the weights are read. Layouts are built on this affine form (`_Rates`), and scored
on the exact one (`costs.completion`).

Suffix letters: G prompt groups, C samples of a group, N rollouts (n = g * samples + i) or, where the name says
"queued", rollouts in decoding order, S slices, I items that a layout places as a whole.
"""

import bisect
import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator
from statistics import NormalDist

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.history.lengths import lognormal

MODES = ("sync", "balanced", "cross_step")
SCENARIOS, SCENARIO_ROLLOUTS = 8, 2**18  # scenarios at most, and rollouts in all of them (but 2 scenarios at least)
SHARED = 0.1  # of the variance of log lengths, what a group's samples have in common: forecasts of means are off too
# Of a scenario's groups, those that come from another group's law. In RhymeRL's traces 2 to 4 % of the prompts move by
# more than a tenth of the ranks from epoch to epoch. Without them, layouts that keep a long group together look as good
# as those that spread it: simulated with 3 % (128 slices, 512 x 16), "balanced" took "mixed" and gained 1.78x over
# "equal", where with them it takes "longest_rollout" or "dealt" and gains 1.87x.
SURPRISES = 0.03
# Of a step: how late after the mean slice the last one may be when slices run ahead. A whole step would do if forecasts
# held; simulated, it left 12 % bubbles, and half a step 0.5 %.
SLACK = 0.5
ITEMS = 2**15  # that list scheduling places: more rollouts go in twos, fours, ... (0.5 us an item)
MIXED_SHARES = (0.1, 0.3)  # of the groups, the longest, that "mixed" takes apart
MIXED_PARTS = (4,)  # rollouts that stay together where "mixed" takes all groups apart
LINES = (0.2, 0.5)  # the shortest slice's share of the longest one's time, where completions form a line
LEVEL_STEPS = 8  # of the binary search for a level: to 1/256


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be rolled out."""

    mean_G: np.ndarray  # float64 predicted tokens of a response
    upper_G: np.ndarray  # float64 predicted upper (0.9) quantile of a response
    prompt_G: np.ndarray  # int prompt tokens
    samples: int  # responses of each group; rollout n = g * samples + i
    split_cost: float = 0.0  # by how much (share) a response takes longer where its group is spread over slices
    longest: float = np.inf  # tokens that a response may have

    def __post_init__(self):
        shapes = {np.shape(x) for x in (self.mean_G, self.upper_G, self.prompt_G)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            raise ValueError("Work: mean_G, upper_G and prompt_G must have one entry for each prompt")
        if self.samples < 1:
            raise ValueError(f"Work: samples={self.samples}")
        if not (np.isfinite(self.mean_G).all() and np.isfinite(self.upper_G).all() and self.split_cost >= 0):
            raise ValueError("Work: lengths must be finite, and split_cost at least 0")

    @property
    def groups(self) -> int:
        return len(self.mean_G)


@dataclasses.dataclass(frozen=True)
class Plan:
    layout: str
    rollouts_by_slice: tuple[np.ndarray, ...]  # int32 rollouts of each slice in decoding order; every rollout once
    seconds_by_slice: np.ndarray  # float64 predicted decoding seconds of each slice, without what it is busy with
    scores: dict[str, float]  # predicted seconds of each layout that was tried; see `score`

    @property
    def slices(self) -> int:
        return len(self.rollouts_by_slice)


def make_plan(
    work: Work,
    slices: int,
    cost: SliceCost,
    mode: str,
    layout: str = "best",
    step: int = 0,
    busy_S: np.ndarray | None = None,
) -> Plan:
    """A deterministic function of its arguments.

    Args:
      mode: "sync" is always laid out "equal", and is the baseline; for "balanced" and "cross_step" see `score`.
      layout: one of `LAYOUTS`. "best" scores them all, the equal split among them: where forecasts are useless no
        layout is worse than that in expectation.
      step: the training step; the paper's layout turns about with it.
      busy_S: seconds until each slice is free; none: 0.

    Raises:
      InputError: an unknown mode or layout, or less than one prompt for each slice.
    """
    if mode not in MODES:
        raise InputError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    if slices < 1 or work.groups < slices:
        raise InputError(f"slices={slices}: must be from 1 to the {work.groups} prompts of a step")
    busy_S = np.zeros(slices) if busy_S is None else np.asarray(busy_S, np.float64)
    if busy_S.shape != (slices,):
        raise ValueError(f"make_plan: busy_S of shape {busy_S.shape}, want {(slices,)}")
    task = _Task(work, slices, cost, mode, step, busy_S)
    names = ("equal",) if mode == "sync" else (layout,)
    if names == ("best",):
        same = "paper" if mode == "balanced" else "contiguous" if np.ptp(busy_S) == 0 else None
        names = tuple(name for name in _BUILDERS if name != same)
    tried: dict[str, tuple[float, _Layout, np.ndarray]] = {}
    for name in names:
        for candidate in _BUILDERS[name](task):
            points, seconds_S = task.judge(candidate)
            if name not in tried or points < tried[name][0]:
                tried[name] = points, candidate, seconds_S
    best = min(tried, key=lambda name: tried[name][0])  # the first of equals
    _, chosen, seconds_S = tried[best]
    queues = np.split(chosen.queued_N.astype(np.int32), chosen.start_S[1:-1])
    return Plan(best, tuple(queues), seconds_S, {name: float(points) for name, (points, _, _) in tried.items()})


def score(mode: str, seconds_S: np.ndarray, busy_S: np.ndarray) -> float:
    """What a step costs whose slices need so many seconds each; lower is better.

    "balanced": nothing goes on before all are done, so the last one counts.
    "cross_step": a slice may begin the next step while others still do this one, but not the one after. So the mean
    counts, as long as the last slice is done within `SLACK` of a step after that.
    """
    done_S = busy_S + seconds_S
    if mode == "cross_step":
        return float(max(done_S.mean(), done_S.max() - SLACK * seconds_S.mean()))
    return float(done_S.max())


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Queues, and which groups they spread."""

    queued_N: np.ndarray  # int rollouts, slice after slice, in decoding order; a group's are side by side
    start_S: np.ndarray  # int [S + 1] where each slice's queue starts
    split_G: np.ndarray  # bool: on more than one slice


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Seconds of a slice, roughly: max(weights * longest, weights / rows * tokens) + each * tokens + context * read.

    The second holds where more rollouts wait than there are rows.
    """

    weights: float
    each: float
    context: float
    rows: int

    @classmethod
    def of(cls, cost: SliceCost) -> "_Rates":
        live_B = np.arange(1, cost.max_rows + 1)
        each = 0.0
        if cost.max_rows > 1:
            away_B = live_B - live_B.mean()
            each = max(0.0, float(away_B @ cost.seconds_B[1:] / (away_B @ away_B)))
        return cls(max(0.0, float(cost.seconds_B[1:].mean() - each * live_B.mean())), each, cost.context, cost.max_rows)


class _Task:
    """A step to be laid out, with what all layouts share."""

    def __init__(self, work: Work, slices: int, cost: SliceCost, mode: str, step: int, busy_S: np.ndarray):
        self.work, self.slices, self.cost, self.mode, self.step, self.busy_S = work, slices, cost, mode, step, busy_S
        self.rates = _Rates.of(cost)
        self._mu_G, self._sigma_G = lognormal(work.mean_G, work.upper_G)
        self.order_G = np.argsort(-np.asarray(work.mean_G), kind="stable")  # longest predicted first
        samples = np.arange(work.samples)
        self.order_N = (self.order_G[:, None] * work.samples + samples).ravel()
        self.prompt_G = np.asarray(work.prompt_G, np.float64)
        # Of a response to each group, longest group first: tokens, cached tokens read, and the group's longest.
        mean_G, mu_G, sigma_G = (x[self.order_G] for x in (np.maximum(work.mean_G, 1.0), self._mu_G, self._sigma_G))
        self.tokens_G = np.minimum(mean_G, work.longest)
        square_G = np.minimum(mean_G**2 * np.exp(sigma_G**2), work.longest * self.tokens_G)
        self.read_G = self.prompt_G[self.order_G] * self.tokens_G + square_G / 2
        longest = NormalDist().inv_cdf(1 - 0.5 / (work.samples + 1))
        self.peak_G = np.minimum(np.exp(mu_G + sigma_G * longest), work.longest)

    @functools.cached_property
    def scenarios(self) -> list[np.ndarray]:
        """Lengths of all rollouts, by scenario."""
        groups, samples = self.work.groups, self.work.samples
        result = []
        for seed in range(min(SCENARIOS, max(2, SCENARIO_ROLLOUTS // (groups * samples)))):
            draws = np.random.default_rng(seed)
            group_G1, own_GC = draws.standard_normal((groups, 1)), draws.standard_normal((groups, samples))
            normal_GC = SHARED**0.5 * group_G1 + (1 - SHARED) ** 0.5 * own_GC
            surprise_G = draws.random(groups) < SURPRISES
            law_G = np.where(surprise_G, draws.integers(groups, size=groups), np.arange(groups))
            mu_G1, sigma_G1 = self._mu_G[law_G, None], self._sigma_G[law_G, None]
            result.append(np.clip(np.exp(mu_G1 + sigma_G1 * normal_GC), 1.0, self.work.longest).ravel())
        return result

    def layout(self, slice_N: np.ndarray, order_N: np.ndarray | None = None) -> _Layout:
        """Of each rollout's slice; queues go by the longest predicted group first."""
        order_N = self.order_N if order_N is None else order_N
        narrow = np.int16 if self.slices < 2**15 else np.int32  # int16 is sorted by radix: 1 ms for 131,072 rollouts
        queued_N = order_N[np.argsort(slice_N[order_N].astype(narrow), kind="stable")]
        start_S = np.concatenate([[0], np.cumsum(np.bincount(slice_N, minlength=self.slices))])
        slice_GC = slice_N.reshape(-1, self.work.samples)
        return _Layout(queued_N, start_S, (slice_GC != slice_GC[:, :1]).any(axis=1))

    def judge(self, layout: _Layout) -> tuple[float, np.ndarray]:
        """The mean score over scenarios, and each slice's mean seconds."""
        group_N = layout.queued_N // self.work.samples
        prompt_N = self.prompt_G[group_N]
        # A prompt is prefilled once on each slice that has its group, whose rollouts are side by side.
        first_N = np.concatenate([[True], group_N[1:] != group_N[:-1]])
        first_N[layout.start_S[:-1][layout.start_S[:-1] < len(first_N)]] = True
        total_N = np.concatenate([[0.0], np.cumsum(first_N * prompt_N)])
        prefill_S = total_N[layout.start_S[1:]] - total_N[layout.start_S[:-1]]
        longer_N = (1.0 + self.work.split_cost * layout.split_G)[group_N]
        points, sum_S = [], np.zeros(self.slices)
        for length_N in self.scenarios:
            queued_N = length_N[layout.queued_N] * longer_N
            seconds_S = completion(self.cost, queued_N, layout.start_S, prompt_N, prefill_S)
            points.append(score(self.mode, seconds_S, self.busy_S))
            sum_S += seconds_S
        return float(np.mean(points)), sum_S / len(self.scenarios)


# Layouts. Each yields its variants; the best of them counts.


def _equal(task: _Task) -> Iterator[_Layout]:
    """Contiguous shares of the batch, as equal as they can be, in the order of the data: the baseline."""
    groups, samples = task.work.groups, task.work.samples
    bounds_S = np.arange(task.slices + 1) * groups // task.slices
    slice_G = np.repeat(np.arange(task.slices), np.diff(bounds_S))
    yield task.layout(np.repeat(slice_G, samples), np.arange(groups * samples))


def _paper(task: _Task) -> Iterator[_Layout]:
    """He et al. 2025 (arXiv 2508.18588): groups ranked by predicted length, cut into one run for each slice.

    Within a step (tier 2) long runs have few prompts and short ones many, so that completion times form a straight
    line over the slices; its level is found by binary search. Over steps (tier 1, only where slices may run ahead)
    the line rises with the slices in odd steps and falls in even ones, so that a slice's long turn meets its short
    one. Else it is flat. How steep it is the paper leaves open: the best of a few.
    """
    slices = np.arange(task.slices)
    if task.mode != "cross_step":
        yield _runs(task, slices, lambda level: np.full(task.slices, level))
        return
    longest_first_S = slices[::-1] if task.step % 2 else slices
    for least in LINES:
        line_S = np.linspace(1.0, least, task.slices)
        yield _runs(task, longest_first_S, lambda level, line_S=line_S: level * line_S)


def _contiguous(task: _Task) -> Iterator[_Layout]:
    """Ranked runs as in the paper, but laid over what the slices are still busy with: the longest on the slice that
    is free first, all done at once; or, where slices may run ahead, on a line: who is done last now is busiest then.
    """
    free_first_S = np.argsort(task.busy_S, kind="stable")
    busy_S = task.busy_S[free_first_S]
    for least in (1.0, *LINES) if task.mode == "cross_step" else (1.0,):
        line_S = np.linspace(1.0, least, task.slices)
        yield _runs(task, free_first_S, lambda level, line_S=line_S: level * line_S - busy_S)


def _runs(task: _Task, slices_S: np.ndarray, budget_S: Callable[[float], np.ndarray]) -> _Layout:
    """Whole groups, longest first, in runs over the slices in this order, as many on each as its budget of seconds
    allows, at the lowest level of the budgets at which all have room.

    A slice with any budget takes one group at least: else the longest group would set the level for all, and few
    slices would be filled to it while the last ones had nothing.
    """
    rates, samples = task.rates, task.work.samples
    tokens_G, read_G = samples * task.tokens_G, samples * task.read_G
    each_G, through_G = rates.each * tokens_G + rates.context * read_G, rates.weights / rates.rows * tokens_G
    each = np.concatenate([[0.0], np.cumsum(each_G)]).tolist()
    through = np.concatenate([[0.0], np.cumsum(each_G + through_G)]).tolist()
    peak = (rates.weights * np.minimum(task.peak_G, tokens_G)).tolist()
    groups = len(peak)

    def cuts(level: float) -> list[int]:
        budgets = budget_S(level)
        later_S = np.cumsum(budgets[::-1] > 0)[::-1]  # slices that want a group, from each one on
        at, result = 0, []
        for budget, later in zip(budgets.tolist(), later_S.tolist(), strict=True):
            if at < groups and budget > 0:
                few = bisect.bisect_right(each, each[at] + budget - peak[at]) - 1
                fit = min(few, bisect.bisect_right(through, through[at] + budget) - 1)
                at = max(at + 1, min(fit, groups - later + 1))
            result.append(at)
        return result

    low, high = 0.0, max(peak[0], through[-1] / task.slices) + 1e-9
    while cuts(high)[-1] < groups:
        low, high = high, 2 * high
    for _ in range(LEVEL_STEPS):
        level = (low + high) / 2
        low, high = (low, level) if cuts(level)[-1] == groups else (level, high)
    ends = cuts(high)
    ends[-1] = groups
    slice_G = np.empty(groups, np.int64)
    slice_G[task.order_G] = np.repeat(slices_S, np.diff([0, *ends]))
    return task.layout(np.repeat(slice_G, samples))


def _longest_group(task: _Task) -> Iterator[_Layout]:
    """Whole groups, the longest first, each to the slice that is done first with it: list scheduling."""
    yield _scheduled(task, 0, 1)


def _longest_rollout(task: _Task) -> Iterator[_Layout]:
    """As "longest_group", with single rollouts."""
    yield _scheduled(task, task.work.groups, 1)


def _dealt(task: _Task) -> Iterator[_Layout]:
    """Rollouts dealt out like cards, to and fro, the longest first: as many for each slice.

    Blind to costs and to how busy slices are, and the better for it where tails are heavy: list scheduling gives the
    slices without a long forecast more rows than others, and each may be the long one.
    """
    card_N = np.arange(len(task.order_N))
    turn_N, place_N = card_N // task.slices, card_N % task.slices
    slice_N = np.empty(len(card_N), np.int64)
    slice_N[task.order_N] = np.where(turn_N % 2, task.slices - 1 - place_N, place_N)
    yield task.layout(slice_N)


def _mixed(task: _Task) -> Iterator[_Layout]:
    """The longest groups as single rollouts, the others whole; or all groups in a few parts."""
    for share in MIXED_SHARES:
        yield _scheduled(task, max(1, round(share * task.work.groups)), 1)
    for part in MIXED_PARTS:
        if part < task.work.samples:
            yield _scheduled(task, task.work.groups, part)


def _scheduled(task: _Task, apart: int, part: int) -> _Layout:
    """List scheduling of the first (longest) `apart` groups in parts of so many rollouts, and of the others whole.

    A slice's first item counts for the weights that are read while the longest of its group is decoded; later ones
    are shorter, and add their own tokens and cache reads alone. So the longest come to be on slices with few rows.
    """
    samples, groups = task.work.samples, task.work.groups
    part = min(samples, max(part, -(-apart * samples // ITEMS)))
    parts = np.array([min(part, samples - i) for i in range(0, samples, part)])
    count_I = np.concatenate([np.tile(parts, apart), np.full(groups - apart, samples)])
    group_I = np.concatenate([np.repeat(np.arange(apart), len(parts)), np.arange(apart, groups)])
    rates = task.rates
    tokens_I = count_I * task.tokens_G[group_I]
    add_I = rates.each * tokens_I + rates.context * count_I * task.read_G[group_I]
    through_I = rates.weights / rates.rows * tokens_I
    slice_I = _list_schedule(
        task.busy_S.tolist(), (rates.weights * task.peak_G[group_I]).tolist(), add_I.tolist(), through_I.tolist()
    )
    slice_N = np.empty(groups * samples, np.int64)
    slice_N[task.order_N] = np.repeat(slice_I, count_I)
    return task.layout(slice_N)


def _list_schedule(busy: list[float], peak: list[float], add: list[float], through: list[float]) -> list[int]:
    """The slice of each item, in order: the one that is done first, and among equals the first.

    A slice is done at busy + max(peak of its first item, its sum of through) + its sum of add.
    """
    free = [(seconds, s) for s, seconds in enumerate(busy)]
    heapq.heapify(free)
    empty, longest, passed = [True] * len(busy), [0.0] * len(busy), [0.0] * len(busy)
    result = []
    for peak_i, add_i, through_i in zip(peak, add, through, strict=True):
        seconds, s = free[0]
        if empty[s]:
            empty[s], longest[s] = False, peak_i
            seconds += peak_i
        seconds -= max(longest[s], passed[s])
        passed[s] += through_i
        seconds += max(longest[s], passed[s]) + add_i
        heapq.heapreplace(free, (seconds, s))
        result.append(s)
    return result


_BUILDERS: dict[str, Callable[[_Task], Iterator[_Layout]]] = {
    "equal": _equal,
    "paper": _paper,
    "contiguous": _contiguous,
    "longest_group": _longest_group,
    "longest_rollout": _longest_rollout,
    "dealt": _dealt,
    "mixed": _mixed,
}
LAYOUTS = ("best", *_BUILDERS)
