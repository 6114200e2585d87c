"""What the slices did when: records for `timeline.jsonl`, and how long they stood still.

Three kinds of record, each with its `step`, and its `round` within it where sampling is dynamic (both counted from 1,
as in the metrics):

- *plan*: what the planner thought of each layout (predicted seconds), and which it took;
- *chunk*: iterations of the decoding loop on one slice: `start` and `end` in seconds of training, `iterations`, `k`,
  `rows` of the batch, `alive` of them at the end, the `groups` that had a row;
- *group*: from the first to the last chunk in which a slice decoded a prompt group: `start`, `end`, `iterations`, and
  `alive`, the slice's rows at the end. A group that is decoded during two training steps has a record for each.

Suffix letters: S slices.
"""

from collections.abc import Sequence

import numpy as np

from rhyme_jax.histopipe.dispatch import Span
from rhyme_jax.histopipe.plan import Plan


def bubble_ratios(spans: Sequence[Span], slices: int, rollouts: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Shares of the slices' time in which they stood still while others decoded; 0 where nothing was decoded.

    `pipeline/bubble_iterations` counts time in iterations of the decoding loop, which no machine's noise touches: 1 -
    mean over slices / most of a slice. `seconds/bubble_share` is 1 - busy seconds / (slices x seconds) within
    `rollouts`: (start, end) of when the step's rollouts were made, on the clock of the spans.
    """
    iterations_S, busy_S = np.zeros(slices), np.zeros(slices)
    for span in spans:
        iterations_S[span.slice] += span.chunk.iterations
        busy_S[span.slice] += sum(max(0.0, min(span.end, end) - max(span.start, start)) for start, end in rollouts)
    most, seconds = iterations_S.max(initial=0), slices * sum(end - start for start, end in rollouts)
    return {
        "pipeline/bubble_iterations": float(1 - iterations_S.mean() / most) if most else 0.0,
        "seconds/bubble_share": float(1 - busy_S.sum() / seconds) if seconds > 0 else 0.0,
    }


def plan_record(step: int, round: int, plan: Plan) -> dict:
    return {
        "kind": "plan",
        "step": step + 1,
        "round": round + 1,
        "layout": plan.layout,
        "scores": {name: float(score) for name, score in plan.scores.items()},
        "rollouts": [len(numbers) for numbers in plan.rollouts_by_slice],
        "seconds": [float(s) for s in plan.seconds_by_slice],
    }


def span_records(spans: Sequence[Span]) -> list[dict]:
    """Records of chunks, then of groups. The spans' times are in seconds of training."""
    chunks, groups = [], {}
    for s in spans:
        times = {"start": round(s.start, 4), "end": round(s.end, 4)}
        of_step = {"step": s.step + 1, "round": s.round + 1, "slice": s.slice}
        record = {**of_step, **times, "iterations": s.chunk.iterations, "alive": s.alive}
        chunks.append({"kind": "chunk", **record, "k": s.chunk.k, "rows": s.chunk.rows, "groups": list(s.groups)})
        for g in s.groups:
            key = (s.step, s.round, s.slice, g)
            if key in groups:
                known = groups[key]
                known |= {"end": times["end"], "alive": s.alive, "iterations": known["iterations"] + s.chunk.iterations}
            else:
                groups[key] = {"kind": "group", "group": g, **record}
    return chunks + list(groups.values())
