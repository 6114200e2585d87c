"""The order in which prompts are trained on: a fresh permutation for each epoch, and a position that is saved."""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

from rhyme_jax.errors import InputError


class PromptStream:
    """Batches of prompt indices. An epoch is `size // batch` batches of a permutation drawn from (seed, epoch);
    what is left over is skipped, so that no prompt comes twice in a batch.
    """

    def __init__(self, size: int, batch: int, seed: int):
        if batch < 1 or batch > size:
            raise InputError(f"rollout.prompts_per_step={batch}: must be from 1 to the {size} prompts of the task")
        self.size, self.batch, self.seed = size, batch, seed
        self.epoch, self.index = 0, 0  # the next batch: its epoch, and its number within the epoch

    @property
    def batches_per_epoch(self) -> int:
        return self.size // self.batch

    @property
    def progress(self) -> float:
        """Epochs done, with a fraction."""
        return self.epoch + self.index / self.batches_per_epoch

    def next(self) -> np.ndarray:
        order = np.random.default_rng([self.seed, self.epoch, 0x57E4]).permutation(self.size)
        batch = order[self.index * self.batch : (self.index + 1) * self.batch]
        self.index += 1
        if self.index == self.batches_per_epoch:
            self.epoch, self.index = self.epoch + 1, 0
        return batch

    def visit(self) -> tuple[np.ndarray, np.ndarray]:
        """The next batch, and how often each of its prompts was visited before."""
        epoch, batch = self.epoch, self.next()
        return batch, np.full(len(batch), epoch)

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def seek(self, position: dict[str, int]) -> None:
        self.epoch, self.index = position["epoch"], position["index"]


@dataclasses.dataclass
class _Task:
    """Where a task of a mixture stands."""

    first: int  # of its prompts
    size: int
    weight: int
    taken: int = 0  # prompts, since the beginning
    epoch: int = 0
    index: int = 0  # prompts taken in this epoch


class MixtureStream:
    """Batches of prompt indices of several tasks, whose prompts lie one task after the other.

    A place in a batch goes to the task that is furthest behind its share of the places so far (smooth weighted round
    robin), so that shares are exact over time, and with whole weights in each period of their sum. Each task has epochs
    of its own: where fewer of its prompts are left in an epoch than a batch takes, they are skipped, so that no prompt
    comes twice in a batch.
    """

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, float], batch: int, seed: int):
        """
        Args:
          sizes: prompts by task.
          weights: of the same tasks.

        Raises:
          InputError: a batch is empty, or takes more prompts of a task than it has.
        """
        if batch < 1:
            raise InputError(f"rollout.prompts_per_step={batch}: must be at least 1")
        self.batch, self.seed = batch, seed
        self._tasks: dict[str, _Task] = {}
        # Whole numbers in the same proportions, so that nothing is rounded.
        exact = {label: Fraction(weight) for label, weight in weights.items()}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        self._total, first = int(sum(exact.values()) * scale), 0
        for label, size in sizes.items():
            weight = int(exact[label] * scale)
            if weight * batch > size * self._total:
                raise InputError(
                    f"rollout.prompts_per_step={batch}: takes {weight * batch / self._total:.4g} prompts of "
                    f"tasks.{label} on average, and it has {size}; lower it, or tasks.{label}.weight"
                )
            self._tasks[label] = _Task(first, size, weight)
            first += size

    @property
    def epoch(self) -> int:
        """Times that every task's prompts were passed over."""
        return min(task.epoch for task in self._tasks.values())

    @property
    def progress(self) -> float:
        """Epochs done, with a fraction, of the task that has done the fewest."""
        return min(self.epochs().values())

    def epochs(self) -> dict[str, float]:
        """Epochs done, with a fraction, by task."""
        return {label: task.epoch + task.index / task.size for label, task in self._tasks.items()}

    def next(self) -> np.ndarray:
        return self.visit()[0]

    def visit(self) -> tuple[np.ndarray, np.ndarray]:
        """The next batch, and how often each of its prompts was visited before."""
        tasks = list(self._tasks.values())
        places_B, count = [], [0] * len(tasks)
        start = sum(task.taken for task in tasks)
        for place in range(start + 1, start + self.batch + 1):
            # A task whose prompts are all in the batch waits for the next one.
            able = [k for k, task in enumerate(tasks) if count[k] < task.size]
            k = max(able, key=lambda k: tasks[k].weight * place - self._total * (tasks[k].taken + count[k]))
            count[k] += 1
            places_B.append(k)
        drawn = [iter(self._draw(k, task, n)) for k, (task, n) in enumerate(zip(tasks, count, strict=True))]
        visits = [task.epoch for task in tasks]
        for task in tasks:
            if task.index == task.size:
                task.epoch, task.index = task.epoch + 1, 0
        return np.array([next(drawn[k]) for k in places_B]), np.array([visits[k] for k in places_B])

    def _draw(self, number: int, task: _Task, count: int) -> np.ndarray:
        if task.index + count > task.size:
            task.epoch, task.index = task.epoch + 1, 0
        order = np.random.default_rng([self.seed, task.epoch, 0x57E4, number]).permutation(task.size)
        drawn = task.first + order[task.index : task.index + count]
        task.index, task.taken = task.index + count, task.taken + count
        return drawn

    def position(self) -> dict[str, dict[str, int]]:
        return {
            label: {"taken": task.taken, "epoch": task.epoch, "index": task.index}
            for label, task in self._tasks.items()
        }

    def seek(self, position: Mapping[str, Mapping[str, int]]) -> None:
        for label, task in self._tasks.items():
            task.taken, task.epoch, task.index = (position[label][name] for name in ("taken", "epoch", "index"))
