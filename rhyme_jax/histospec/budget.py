"""How much to draft: what drafts have yielded, what verifying them costs, and the choice that follows.

- `Tally` counts, on the device, what became of the drafts of a chunk of iterations.
- `Acceptance` keeps those counts over chunks, steps and resumes, as estimates by source, match length and depth.
- `CostTable` holds the time of an iteration by rows, cache slots and K, measured once at the start of a run.
- `choose_bucket` takes the K with the most expected tokens per second; K = 1 is among the candidates, so that
  speculation turns itself off where it does not pay.
- `next_window` is the rule of the paper and that of its authors' released code, for comparison: they adapt a length
  for each row to its last draft alone.

Suffix letters: B rows, X sources, M match lengths 0..MAX_MATCH, D depths (a draft's first token has depth 0),
L draft lengths 0..D.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rhyme_jax.errors import InputError
from rhyme_jax.histospec.drafts import MAX_MATCH, SOURCES, Beliefs

WINDOWS = ("marginal", "paper", "released")
FIRST_WINDOW, PAPER_LONGEST, RELEASED_LONGEST = 2, 32, 16
SHAPE_XM = (len(SOURCES), MAX_MATCH + 1)


def next_window(rule: str, window_B: jax.Array, proposed_B: jax.Array, accepted_B: jax.Array) -> jax.Array:
    """The longest draft of each row's next iteration. What was accepted is compared with what was *proposed*; a row
    without a draft keeps its window.

    "paper" (He et al. 2025): two longer when all were accepted, back to 2 at a rejection, 32 at most.
    "released" (the code of its authors): doubled or halved, from 2 to 16.
    """
    whole_B = accepted_B == proposed_B
    if rule == "paper":
        next_B = jnp.where(whole_B, jnp.minimum(window_B + 2, PAPER_LONGEST), FIRST_WINDOW)
    elif rule == "released":
        next_B = jnp.clip(jnp.where(whole_B, window_B * 2, window_B // 2), FIRST_WINDOW, RELEASED_LONGEST)
    else:
        raise ValueError(f"next_window: {rule!r} has no window of each row")
    return jnp.where(proposed_B > 0, next_B, window_B)


@struct.dataclass
class Tally:
    """What became of drafts. A draft *stops* at the length at which it could yield no more, whatever its allowance:
    where a token was rejected, or where it ended of itself. A draft that was accepted to the end of its allowance
    (K, window, budget) was *cut*: how far it would have gone is not known.
    """

    proposed_XML: jax.Array  # int32 drafts by length
    stopped_XML: jax.Array  # int32 drafts by accepted tokens, of those that stopped
    cut_XML: jax.Array  # int32 drafts by accepted tokens, of those that were cut
    without: jax.Array  # int32 iterations of active rows without a draft

    @classmethod
    def zeros(cls, depths: int) -> "Tally":
        zeros = np.zeros((*SHAPE_XM, depths + 1), np.int32)
        return cls(zeros, zeros, zeros, np.int32(0))

    def count(self, source_B, match_B, proposed_B, accepted_B, allowance_B, active_B) -> "Tally":
        """With the drafts of one iteration. Rows with an allowance of 0 could not draft, and are not counted."""
        drafted_B = active_B & (proposed_B > 0)
        cut_B = (accepted_B == proposed_B) & (proposed_B == allowance_B)

        def add(counts_XML, length_B, where_B):
            return (
                jnp.asarray(counts_XML)
                .at[source_B, match_B, length_B]
                .add((drafted_B & where_B).astype(jnp.int32), mode="drop")
            )

        return Tally(
            proposed_XML=add(self.proposed_XML, proposed_B, True),
            stopped_XML=add(self.stopped_XML, accepted_B, ~cut_B),
            cut_XML=add(self.cut_XML, accepted_B, cut_B),
            without=self.without + jnp.sum(active_B & (allowance_B > 0) & (proposed_B == 0), dtype=jnp.int32),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return jax.tree.map(lambda a, b: a + b, self, other)

    @property
    def mix(self) -> "Mix":
        return Mix(np.asarray(self.proposed_XML).sum(-1), int(self.without))


@struct.dataclass
class Mix:
    """How often rows had a draft of which kind."""

    drafts_XM: jax.Array  # int32 drafts by source and match length
    without: jax.Array  # int32 rows without one


class Acceptance:
    """Estimates of what a draft yields, by source, match length and depth.

    The yield of a draft is the number of its tokens that would be accepted with no limit on its length; cut drafts
    are censored observations of it, as in Kaplan & Meier (1958). The chance of going on at a depth is estimated from
    the drafts that got there; where these are few it leans on the depth before, on the match length as a whole, on
    the source, and in the end on `PRIOR_X`.

    `state` and `load` carry the counts over a resume. A resumed run decides alike, because nothing else goes in.
    """

    # Chance of a further token, of a source never seen. A row's own response under the same noise is followed
    # before anything is known of it.
    PRIOR_X = np.array([0.95 if source == "own" else 0.5 for source in SOURCES])
    STRENGTH = 4.0  # observations that a prior counts for
    MEMORY = 0.75  # weight of older counts after each chunk: policies and histories change

    def __init__(self, depths: int):
        self.reached_XMD = np.zeros((*SHAPE_XM, depths))  # drafts that got to this depth and could go on
        self.went_on_XMD = np.zeros((*SHAPE_XM, depths))  # of those, the ones whose token at this depth was accepted
        self._estimates: tuple[np.ndarray, np.ndarray] | None = None  # survival and yield, until the counts change

    def add(self, tally: Tally) -> None:
        stopped_XML, cut_XML = (np.asarray(x, np.float64) for x in (tally.stopped_XML, tally.cut_XML))
        beyond_XML = np.cumsum((stopped_XML + cut_XML)[..., ::-1], axis=-1)[..., ::-1]  # accepted this many or more
        went_on_XMD = beyond_XML[..., 1:]
        depths = self.reached_XMD.shape[-1]
        if went_on_XMD.shape[-1] != depths:
            raise ValueError(f"Acceptance: a tally of {went_on_XMD.shape[-1]} depths, want {depths}")
        if beyond_XML[..., 0].sum() == 0:
            return
        self._estimates = None
        self.went_on_XMD = self.MEMORY * self.went_on_XMD + went_on_XMD
        self.reached_XMD = self.MEMORY * self.reached_XMD + went_on_XMD + stopped_XML[..., :-1]

    def going_on_XMD(self) -> np.ndarray:
        """Chance that a draft that got to a depth yields its token there."""
        k = self.STRENGTH

        def estimate(went_on, reached, prior):
            return (went_on + k * prior) / (reached + k)

        source_X = estimate(self.went_on_XMD.sum((1, 2)), self.reached_XMD.sum((1, 2)), self.PRIOR_X)
        chance_XM = estimate(self.went_on_XMD.sum(2), self.reached_XMD.sum(2), source_X[:, None])
        chances = []
        for d in range(self.reached_XMD.shape[-1]):
            chance_XM = estimate(self.went_on_XMD[..., d], self.reached_XMD[..., d], chance_XM)
            chances.append(chance_XM)
        return np.stack(chances, axis=-1) if chances else np.zeros(self.reached_XMD.shape)

    @property
    def survival_XMD(self) -> np.ndarray:
        """Chance that a draft yields its token at a depth."""
        return self._estimate()[0]

    @property
    def yield_XML(self) -> np.ndarray:
        """Expected accepted tokens of a draft that may be as long as 0, 1, ..., D tokens."""
        return self._estimate()[1]

    def _estimate(self) -> tuple[np.ndarray, np.ndarray]:
        if self._estimates is None:
            survival_XMD = np.cumprod(self.going_on_XMD(), axis=-1)
            yield_XML = np.concatenate([np.zeros((*SHAPE_XM, 1)), np.cumsum(survival_XMD, axis=-1)], axis=-1)
            self._estimates = survival_XMD, yield_XML
        return self._estimates

    def tokens_per_iteration(self, mix: Mix, k: int) -> float:
        """Expected tokens of a row in an iteration with K = k, where drafts come in this mix."""
        drafts_XM = np.asarray(mix.drafts_XM)
        rows = drafts_XM.sum() + int(mix.without)
        return 1.0 + float((drafts_XM * self.yield_XML[..., k - 1]).sum() / max(1, rows))

    def beliefs(self, least_chance: float, windows: bool) -> Beliefs:
        """What the device needs to know.

        Args:
          least_chance: with `windows`, a draft goes one deeper while the chance of getting there is at least that;
            the first token always may.
        """
        depths = self.reached_XMD.shape[-1]
        window_XM = np.full(SHAPE_XM, depths, np.int32)
        if windows:
            window_XM = np.maximum(1, (self.survival_XMD >= least_chance).sum(-1)).astype(np.int32)
        return Beliefs(value_XM=self.yield_XML[..., -1].astype(np.float32), window_XM=window_XM)

    def state(self) -> dict[str, list]:
        """The counts, as plain lists that JSON keeps exactly."""
        return {"reached": self.reached_XMD.tolist(), "went_on": self.went_on_XMD.tolist()}

    def load(self, state: dict[str, list]) -> None:
        """Raises ValueError where the counts are of another shape (of other draft buckets)."""
        reached, went_on = (np.array(state[name], np.float64) for name in ("reached", "went_on"))
        if reached.shape != self.reached_XMD.shape or went_on.shape != self.went_on_XMD.shape:
            raise ValueError(
                f"Acceptance: counts of shapes {reached.shape} and {went_on.shape}, want {self.reached_XMD.shape}"
            )
        self.reached_XMD, self.went_on_XMD, self._estimates = reached, went_on, None


@dataclasses.dataclass(frozen=True)
class Cost:
    """Measured seconds of one iteration of a shape, and what of it goes into drafting and sampling."""

    rows: int
    slots: int  # of the cache
    k: int
    seconds: float
    draft: float = 0.0
    sample: float = 0.0


class CostTable:
    """Seconds of an iteration by rows, cache slots and K.

    A shape that was not measured takes those of the nearest that were: rows and slots by ratio, then interpolated in
    K, and beyond the largest K in proportion. An empty table counts in iterations and takes each further position for
    `assumed` of one.
    """

    def __init__(self, costs: tuple[Cost, ...] = (), assumed: float = 0.0):
        self.assumed = assumed
        self.costs = {(c.rows, c.slots, c.k): c for c in costs}

    def __len__(self) -> int:
        return len(self.costs)

    def add(self, cost: Cost) -> None:
        self.costs[cost.rows, cost.slots, cost.k] = cost

    def seconds(self, rows: int, slots: int, k: int) -> float:
        return self.parts(rows, slots, k).seconds

    def parts(self, rows: int, slots: int, k: int) -> Cost:
        if not self.costs:
            return Cost(rows, slots, k, 1.0 + self.assumed * (k - 1))
        near = min(
            ((r, s) for r, s, _ in self.costs), key=lambda rs: (abs(np.log(rs[0] / rows)), abs(np.log(rs[1] / slots)))
        )
        measured = sorted(c.k for (r, s, _), c in self.costs.items() if (r, s) == near)

        def at(name: str) -> float:
            value = float(np.interp(k, measured, [getattr(self.costs[*near, m], name) for m in measured]))
            return value * max(1.0, k / measured[-1])

        return Cost(rows, slots, k, at("seconds"), at("draft"), at("sample"))

    def to_json(self) -> dict:
        return {"assumed": self.assumed, "costs": [dataclasses.asdict(c) for c in self.costs.values()]}

    @classmethod
    def from_json(cls, value: dict) -> "CostTable":
        """Raises InputError where the value is not that of a cost table."""
        try:
            costs, assumed = tuple(Cost(**c) for c in value["costs"]), value["assumed"]
            if not _is_amount(assumed):
                raise ValueError(f"assumed={assumed!r}")
            for c in costs:
                whole = all(type(x) is int and x > 0 for x in (c.rows, c.slots, c.k))
                if not (whole and all(map(_is_amount, (c.seconds, c.draft, c.sample))) and c.seconds > 0):
                    raise ValueError(str(c))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InputError(f"not a cost table ({type(e).__name__}: {e})") from e
        return cls(costs, assumed)


def _is_amount(x) -> bool:
    return type(x) in (int, float) and 0 <= x < float("inf")


MARGIN = 1.03  # by which drafting must promise to beat plain decoding


def choose_bucket(
    acceptance: Acceptance, costs: CostTable, mix: Mix, rows: int, slots: int, buckets: tuple[int, ...]
) -> int:
    """The K with the most expected tokens per second for rows in a batch of this shape. A pure function of tokens
    seen and costs measured: a repeated run decides alike.
    """

    def rate(k: int) -> float:
        tokens = acceptance.tokens_per_iteration(mix, k) if k > 1 else MARGIN
        return tokens / costs.seconds(rows, slots, k)

    return max(sorted(buckets), key=rate)  # the smallest of equals
