"""Slices: the devices cut into sub-meshes that roll out, and the mesh of the learner.

*Colocated*, the learner's mesh spans the devices of all slices, and they take turns. *Disaggregated*, it has devices
of its own, and learns from finished groups while others are still decoded. With several processes each cuts its own
devices into slices, and the learner's mesh spans those of all.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from rhyme_jax.errors import InputError
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import ROLLOUT_RULES, make_mesh, param_shardings


@dataclasses.dataclass(frozen=True)
class Slices:
    """The meshes of a run, as this process sees them."""

    learner: Mesh
    meshes: tuple[Mesh, ...]  # of this process's slices
    first: int  # number of the first of these among all slices
    total: int  # slices of all processes
    colocated: bool

    def place(self, params: dict, model: DecoderConfig) -> tuple[dict, ...]:
        """Weights on each of this process's slices, from those of `Learner.rollout_params` (cast, on the learner's
        mesh or the part of it that is this process's).

        An explicit transfer, never a donation: donating across disjoint devices crashes on CPU.
        """
        return tuple(jax.device_put(params, param_shardings(model, mesh, ROLLOUT_RULES)) for mesh in self.meshes)


def cut_slices(
    shape: tuple[int, int, int],
    slices: int = 1,
    learner_devices: int = 0,
    tensor: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> Slices:
    """Cuts the devices.

    Args:
      shape: (data, fsdp, tensor) of the learner's mesh; one may be -1.
      slices: rollout slices, over all processes; each has as many devices.
      learner_devices: the last so many devices are the learner's alone; 0: it shares those of the slices.
      tensor: devices over which a slice splits the model, by `params.ROLLOUT_RULES`; 0: as the learner. Its other
        devices split the rows.
      devices: default: all.

    Raises:
      InputError: the numbers do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    processes = sorted({d.process_index for d in devices})
    if not 0 <= learner_devices < len(devices):
        raise InputError(
            f"pipeline.learner_devices={learner_devices}: must be from 0 (shared) to {len(devices) - 1}, one less "
            f"than there are devices"
        )
    if learner_devices and len(processes) > 1:
        raise InputError(
            f"pipeline.learner_devices={learner_devices}: the learner spans all devices where there are several "
            f"processes; use 0"
        )
    rollout = devices[: len(devices) - learner_devices]
    learner = make_mesh(*shape, devices=devices[len(rollout) :] if learner_devices else rollout)
    if len(processes) > 1 and learner.size != len(devices):
        raise InputError(
            f"mesh={tuple(learner.shape.values())}: must use all {len(devices)} devices of the "
            f"{len(processes)} processes"
        )
    if learner_devices and learner.size != learner_devices:
        raise InputError(
            f"mesh={tuple(learner.shape.values())}: must use all pipeline.learner_devices={learner_devices} devices"
        )
    if not learner_devices:  # a mesh of fewer devices than there are leaves the rest alone
        rollout = list(learner.devices.flat)
    if slices < 1 or len(rollout) % slices or slices % len(processes):
        each = f", in each of {len(processes)} processes" if len(processes) > 1 else ""
        raise InputError(f"pipeline.slices={slices}: must divide the {len(rollout)} devices that roll out{each}")
    size = len(rollout) // slices
    name, tensor = ("pipeline.tensor", tensor) if tensor else ("mesh.tensor", learner.shape["tensor"])
    if size % tensor:
        raise InputError(f"{name}={tensor}: must divide the {size} devices of a slice")
    here = [d for d in rollout if d.process_index == jax.process_index()]
    before = sum(d.process_index < jax.process_index() for d in rollout)
    meshes = tuple(make_mesh(-1, 1, tensor, here[i : i + size]) for i in range(0, len(here), size))
    return Slices(learner, meshes, before // size, slices, colocated=not learner_devices)
