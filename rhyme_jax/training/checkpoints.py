"""Checkpoints of a run with Orbax: learner state, history, lengths, and the counters of the loop.

`checkpoints/<step>/` holds the items `learner` (arrays, sharded), `history` and `lengths` (flat arrays; absent while
they are empty, because Orbax refuses zero-size arrays) and `loop` (JSON). Saving is asynchronous; a checkpoint appears
under its final name only when it is complete. With several processes all of them save and restore together, and any
number of processes can restore what any number saved.
"""

import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from rhyme_jax.errors import InputError, one_line

ARRAYS = ("history", "lengths")


class Checkpoints:
    def __init__(self, directory, keep: int):
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep}: must be at least 1")
        self._manager = ocp.CheckpointManager(
            pathlib.Path(directory).absolute(),
            item_names=("learner", *ARRAYS, "loop"),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
        )

    @property
    def latest(self) -> int | None:
        """The newest complete checkpoint's step (number of training steps done)."""
        return self._manager.latest_step()

    def save(self, step: int, learner: Any, arrays: dict[str, dict[str, np.ndarray]], loop: dict) -> None:
        """Starts saving; returns when the arrays have left the device.

        Args:
          arrays: host arrays by name for each item of ARRAYS, the same in every process. They must not be changed
            afterwards (`HistoryStore.to_arrays` makes a snapshot).
        """
        shapes = {item: {k: [list(v.shape), str(v.dtype)] for k, v in arrays[item].items()} for item in ARRAYS}
        items = {"learner": ocp.args.StandardSave(learner), "loop": ocp.args.JsonSave({**loop, "arrays": shapes})}
        items |= {item: ocp.args.StandardSave(arrays[item]) for item in ARRAYS if arrays[item]}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int, abstract_learner: Any) -> tuple[Any, dict[str, dict[str, np.ndarray]], dict]:
        """(learner state in the given shapes and shardings, arrays of the items ARRAYS, loop counters).

        Raises:
          InputError: the checkpoint is damaged, or of another model.
        """
        try:
            return self._restore(step, abstract_learner)
        except Exception as e:  # Orbax and TensorStore raise many kinds
            raise InputError(
                f"{self._manager.directory}/{step}: cannot be restored ({one_line(e)}); move that folder away to go on "
                f"from an earlier one"
            ) from e

    def _restore(self, step: int, abstract_learner: Any) -> tuple[Any, dict[str, dict[str, np.ndarray]], dict]:
        loop = self._manager.restore(step, args=ocp.args.Composite(loop=ocp.args.JsonRestore()))["loop"]
        shapes = loop.pop("arrays")
        items = {"learner": ocp.args.StandardRestore(abstract_learner)}
        for item in ARRAYS:
            if shapes[item]:
                items[item] = ocp.args.StandardRestore({k: np.empty(s, d) for k, (s, d) in shapes[item].items()})
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        arrays = {
            item: {k: np.asarray(v) for k, v in restored[item].items()} if item in items else {} for item in ARRAYS
        }
        return restored["learner"], arrays, loop

    def wait(self) -> None:
        """Returns when everything asked for is on disk; raises what went wrong while saving."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()
