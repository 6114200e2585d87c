"""How the policy learns from a step: the updates on its batch, and a stream of gradients where the learner has devices
of its own, accumulated group by group while other groups are decoded.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from rhyme_jax.grpo.advantages import AdvantageConfig, batch_advantages
from rhyme_jax.grpo.learner import Accumulated, Batch, Learner, LearnerState
from rhyme_jax.training.batches import Graded, StepRollouts, graded


class GradientStream:
    """Adds up the gradients of a step, group by group.

    Groups are taken in the order in which they were finished, those of an earlier step first, whenever their grades
    come: so a repeated run adds them up alike.

    Args:
      state: what the step's gradients are taken at.
      reference: parameters of the reference policy; None where there is no KL penalty.
      batch: what the learner gets of graded groups at a step.
      step: the one that learns.
      sources: the rollouts that it learns from; of those of an earlier step only what was deferred.
    """

    def __init__(
        self,
        learner: Learner,
        state: LearnerState,
        reference: dict | None,
        batch: Callable[[Graded, int], Batch],
        step: int,
        sources: Iterable[StepRollouts],
    ):
        self.learner, self.state, self.reference = learner, state, reference
        self.batch, self.step, self.sources = batch, step, tuple(sources)
        self.taken: dict[int, set[int]] = {s.flight.step: set() for s in self.sources}  # groups, by step
        self.rows: Batch | None = None  # of finished groups, less than a micro-batch
        self.count = 0
        self.sums: Accumulated | None = None

    def flow(self, wait: bool = False) -> None:
        """Takes the groups that are graded; with `wait`, all that belong to the step."""
        for source in self.sources:
            earlier = source.flight.step < self.step
            taken = self.taken[source.flight.step]
            for group, (numbers, rewards) in source.grades.items():
                if group in taken or (earlier and group not in source.flight.deferred):
                    continue
                if not wait and not rewards.done():
                    return
                source.reward_N[numbers] = rewards.result()
                taken.add(group)
                self._add(self.batch(graded(source, [group]), self.step))
            if earlier and taken != source.flight.deferred:
                return

    def finish(self, rows: int) -> Accumulated:
        """The sums over the whole batch of so many rows, which are as large as the parameters: they are handed over."""
        self.flow(wait=True)
        if self.rows is not None:
            self._accumulate(self.rows)
        if self.count != rows:
            raise RuntimeError(f"learner: {self.count} rows were accumulated of a batch of {rows}")
        sums, self.sums = self.sums, None
        return sums

    def _add(self, batch: Batch) -> None:
        rows = batch if self.rows is None else jax.tree.map(lambda *x: np.concatenate(x), self.rows, batch)
        size = self.learner.micro_rows
        while len(rows.valid) >= size:
            self._accumulate(jax.tree.map(lambda x: x[:size], rows))
            rows = jax.tree.map(lambda x: x[size:], rows)
        self.rows = rows if len(rows.valid) else None

    def _accumulate(self, rows: Batch) -> None:
        log_prob = None if self.reference is None else self.learner.score(self.reference, rows)
        self.sums = self.learner.accumulate(self.state, self.sums, rows, log_prob)
        self.count += len(rows.valid)


def rows_of_updates(rows: int, passes: int, minibatches: int, key: Sequence[int]) -> list[np.ndarray | None]:
    """The rows of a batch that each of its updates learns from; None: all.

    In each pass each row comes once, in an order that follows from the key and the number of the pass alone.
    """
    if minibatches == 1:
        return [None] * passes
    orders = [np.random.default_rng([*key, number, 0x4D42]).permutation(rows) for number in range(passes)]
    return [part for order in orders for part in np.array_split(order, min(minibatches, rows))]


def update_policy(
    learner: Learner,
    state: LearnerState,
    batch: Batch,
    parts: Sequence[np.ndarray | None],
    advantages: AdvantageConfig,
    reference: dict | None,
    runs_ahead: bool,
    stream: GradientStream | None,
) -> tuple[LearnerState, dict[str, float]]:
    """An update on each of these parts of a batch; returns the learner's metrics of the last.

    Args:
      parts: as `rows_of_updates` gives them.
      reference: as for `GradientStream`.
      runs_ahead: whether batches of this run may have stale rows.
      stream: has, or will have, the gradients of the first update, on all rows; None: they are still to be computed.
    """
    reference_log_prob = proximal = penalty = None
    if reference is not None and (stream is None or len(parts) > 1):
        reference_log_prob = learner.score(reference, batch)
    if advantages.whole_batch:
        mask_NT = (np.arange(batch.log_prob.shape[1]) < batch.response_length[:, None]) & batch.valid[:, None]
        k1_NT = None
        if advantages.kl_coef > 0:  # in the reward, and so not in the loss
            k1_NT, reference_log_prob = batch.log_prob - reference_log_prob, None
            penalty = float(k1_NT[mask_NT].mean(dtype=np.float64)) if mask_NT.any() else 0.0
        batch = batch.replace(advantage=batch_advantages(advantages, batch.advantage, mask_NT, k1_NT))
    if len(parts) > 1 and (runs_ahead or learner.loss.decoupled):
        # Always an array, so that one program is compiled; rows that are not stale need not look at it.
        needed = learner.loss.decoupled or batch.stale.any()
        proximal = learner.score(state.params, batch) if needed else np.zeros_like(batch.log_prob)
    metrics: dict[str, float] = {}
    for number, rows in enumerate(parts):
        if number == 0 and stream is not None:
            state, new = learner.apply(state, stream.finish(len(batch.valid)))
        else:
            piece = (batch, reference_log_prob, proximal)
            if rows is not None:
                piece = jax.tree.map(lambda x, rows=rows: x[rows], piece)
            state, new = learner.update(state, *piece)
        # The gap between rollout and learner means something before the batch's first update only.
        metrics = new if number == 0 else {**new, "rollout_gap": metrics["rollout_gap"]}
    return state, metrics if penalty is None else {**metrics, "kl": penalty}
