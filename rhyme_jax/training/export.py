"""A checkpoint of a run as a Hugging Face directory.

The checkpoint is read without the learner that wrote it: only its parameters, whatever mesh and optimizer it had.
"""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.models import hf_config, lora
from rhyme_jax.models.export import check_out, write_model
from rhyme_jax.training.settings import Lora, section
from rhyme_jax.training.workdir import Workdir


def export(workdir, out, step: int | None = None, dtype: str | None = None) -> int:
    """Writes the policy of a run, for `models.export.write_model` says how.

    Args:
      workdir: of the run; it may be running.
      out: the directory to write, absent or empty.
      step: of the checkpoint; None for the newest.
      dtype: of the written weights; None for that of the run's parameters.

    Returns:
      The step that was exported.

    Raises:
      InputError: there is no such run or step, the checkpoint is damaged, or `out` cannot be written.
    """
    check_out(out)
    run = Workdir(workdir, writes=False)
    if not run.path.is_dir():
        raise InputError(f"--workdir={workdir}: no such directory")
    model = run.model
    if not model.is_dir():
        raise InputError(f"--workdir={workdir}: holds no {model.name}/, the files of a run's model; is it a run?")
    steps = _steps(run.checkpoints)
    if not steps:
        raise InputError(f"--workdir={workdir}: holds no checkpoint yet")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise InputError(f"--step={step}: no such checkpoint; there are {', '.join(map(str, steps))}")
    merged = lora.merge(read_params(run.checkpoints / str(step)), _adapters(run))
    config = hf_config.read_config(model, param_dtype=str(merged["embed"].dtype))
    write_model(out, merged, config, model, dtype)
    return step


def _adapters(run: Workdir) -> lora.LoraConfig | None:
    """Those that the run trains."""
    stored = run.stored_config() or {}
    return section(Lora, stored["lora"], "lora.").config() if "lora" in stored else None


def read_params(checkpoint: pathlib.Path) -> dict:
    """The parameters of a checkpoint in host memory, as numpy arrays. Nothing else of it is read.

    Raises:
      InputError: it is damaged, or not one of a run.
    """
    folder, handler = epath.Path(checkpoint / "learner"), ocp.PyTreeCheckpointHandler()
    try:
        wanted = {"params": handler.metadata(folder).tree["params"]}
        numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        restore = ocp.args.PyTreeRestore(item=wanted, restore_args=numpy, partial_restore=True)
        return handler.restore(folder, args=restore)["params"]
    except Exception as e:  # Orbax and TensorStore raise many kinds
        raise InputError(f"{checkpoint}: cannot be read ({one_line(e)}); export another --step") from e
    finally:
        handler.close()


def _steps(folder: pathlib.Path) -> list[int]:
    """Complete checkpoints, the oldest first."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
