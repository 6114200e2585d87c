"""The order in which prompts are trained on: a fresh permutation for each epoch, and a position that is saved."""

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

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def seek(self, position: dict[str, int]) -> None:
        self.epoch, self.index = position["epoch"], position["index"]
