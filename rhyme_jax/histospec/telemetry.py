"""What became of the drafts of some rollouts, as numbers for the metrics file (`docs/metrics.md`)."""

import dataclasses

import numpy as np

from rhyme_jax.histospec.budget import CostTable, Tally
from rhyme_jax.histospec.drafts import SOURCES
from rhyme_jax.histospec.rollouts import Chunk, Rollouts


def share(part: float, whole: float) -> float | None:
    """part / whole; None (null in JSON) where there is nothing to divide."""
    return float(part / whole) if whole else None


def draft_metrics(rollouts: Rollouts) -> dict:
    """Drafts by source, match length and depth; how long they were; iterations by K."""
    metrics: dict = {"draft/iterations_by_k": _by_k(rollouts.chunks)}
    if rollouts.tally is None:
        return metrics
    proposed_XML, accepted_XML = _lengths(rollouts.tally)
    length_L = np.arange(proposed_XML.shape[-1])
    proposed_XM, accepted_XM = proposed_XML @ length_L, accepted_XML @ length_L
    for x, source in enumerate(SOURCES):
        metrics[f"draft/{source}_proposed"] = int(proposed_XM[x].sum())
        metrics[f"draft/{source}_accepted"] = int(accepted_XM[x].sum())
    metrics["draft/acceptance_by_match"] = list(map(share, accepted_XM.sum(0), proposed_XM.sum(0)))
    metrics["draft/acceptance_by_depth"] = list(map(share, _deeper(accepted_XML), _deeper(proposed_XML)))
    lengths_L = proposed_XML.sum((0, 1))
    lengths_L[0] = int(rollouts.tally.without)
    metrics["draft/lengths"] = lengths_L.tolist()
    return metrics


def predicted(chunks: tuple[Chunk, ...], costs: CostTable) -> dict[str, float]:
    """Where the time went and what drafts gained, by the cost table.

    The seconds of an iteration's parts cannot be taken inside a compiled loop: they are counts of iterations times
    the parts measured at the start. `predicted_speedup` compares the chunks with the time that as many tokens a row
    would have taken with K = 1; it is the machine-independent side of "never slower".
    """
    draft = forward = sample = plain = 0.0
    for c in chunks:
        cost = costs.parts(c.rows, c.slots, c.k)
        draft += c.iterations * cost.draft
        sample += c.iterations * cost.sample
        forward += c.iterations * (cost.seconds - cost.draft - cost.sample)
        plain += c.iterations * c.tokens / max(1, c.forwards) * costs.seconds(c.rows, c.slots, 1)
    return {
        "seconds/rollout_draft": draft,
        "seconds/rollout_forward": forward,
        "seconds/rollout_sample": sample,
        "rollout/predicted_speedup": plain / (draft + forward + sample) if chunks else 1.0,
    }


@dataclasses.dataclass
class EpochCounts:
    """Sums over the steps of an epoch; saved with each checkpoint."""

    tokens: int = 0
    forwards: int = 0
    proposed: list[int] = dataclasses.field(default_factory=lambda: [0] * len(SOURCES))
    accepted: list[int] = dataclasses.field(default_factory=lambda: [0] * len(SOURCES))

    def add(self, rollouts: Rollouts) -> None:
        self.tokens += rollouts.generated
        self.forwards += int(rollouts.forwards_N.sum())
        if rollouts.tally is not None:
            for counts, lengths_XML in zip((self.proposed, self.accepted), _lengths(rollouts.tally), strict=True):
                for x, total in enumerate((lengths_XML @ np.arange(lengths_XML.shape[-1])).sum(-1)):
                    counts[x] += int(total)

    def metrics(self) -> dict:
        by_source = {
            f"epoch/{source}_acceptance": share(a, p)
            for source, p, a in zip(SOURCES, self.proposed, self.accepted, strict=True)
        }
        return {
            "epoch/tokens_per_row_forward": share(self.tokens, self.forwards),
            "epoch/proposed": sum(self.proposed),
            "epoch/accepted": sum(self.accepted),
            "epoch/acceptance": share(sum(self.accepted), sum(self.proposed)),
            **by_source,
        }


def _lengths(tally: Tally) -> tuple[np.ndarray, np.ndarray]:
    """Drafts by proposed and by accepted length, [X, M, L]."""
    return np.array(tally.proposed_XML), np.asarray(tally.stopped_XML) + np.asarray(tally.cut_XML)


def _deeper(counts_XML: np.ndarray) -> np.ndarray:
    """Drafts that reached beyond each depth."""
    return np.cumsum(counts_XML.sum((0, 1))[::-1])[::-1][1:]


def _by_k(chunks: tuple[Chunk, ...]) -> dict[str, int]:
    counts: dict[int, int] = {}
    for c in chunks:
        counts[c.k] = counts.get(c.k, 0) + c.iterations
    return {str(k): n for k, n in sorted(counts.items())}
