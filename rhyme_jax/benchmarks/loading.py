"""What loading a model takes: seconds, and host memory beyond the arrays themselves.

Measured in a fresh process on virtual CPU devices, whose memory is host memory. Only anonymous memory counts (RssAnon
of /proc, so this needs Linux): pages of mapped files are counted as resident too, but the system takes them back when
it needs them.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np

from rhyme_jax.errors import RunError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.hf_names import slots
from rhyme_jax.models.params import LEARNER_RULES, abstract_params, make_mesh, param_shardings


def write_synthetic(folder: pathlib.Path, config: DecoderConfig, files: int) -> None:
    """A checkpoint of random weights in config.param_dtype, in at least so many files. Holds a tensor at a time."""
    rng = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for slot in slots(config):
            yield slot.hf_name, (rng.random(slot.hf_shape, np.float32) - 0.5).astype(config.storage_dtype)

    total = sum(_bytes(x) for x in jax.tree.leaves(abstract_params(config)))
    hf_weights.save_tensors(folder, tensors(), config, shard_bytes=total // files)


def measure_loading(
    folder: pathlib.Path, mesh_shape: tuple[int, int, int], param_dtype: str = "float32", streamed: bool = True
) -> dict:
    """Loads a Hugging Face directory onto a mesh ("data", "fsdp", "tensor") of CPU devices in a process of its own.

    Args:
      streamed: shard by shard, as runs do; False: read as a whole and then placed, to compare.

    Returns:
      seconds: of loading, headers and values.
      params_bytes: of the parameters, each counted once.
      largest_bytes: of the largest parameter.
      start_bytes, peak_bytes, end_bytes: anonymous memory before, at most during, and after loading.
      extra_bytes: peak_bytes - start_bytes - params_bytes, what loading needed beyond the arrays it made.
      peak_rss_bytes: the process's peak resident memory (VmHWM), with the pages of mapped files.

    Raises:
      RunError: the process failed.
    """
    root = pathlib.Path(__file__).parents[2]
    flags = f"--xla_force_host_platform_device_count={math.prod(mesh_shape)}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(root)}
    arguments = json.dumps([str(folder), list(mesh_shape), param_dtype, streamed])
    done = subprocess.run(
        [sys.executable, "-m", "rhyme_jax.benchmarks.loading", arguments], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise RunError(f"measuring how {folder} is loaded failed: {' '.join(done.stderr.split())[-300:]}")
    return json.loads(done.stdout)


def _measure(folder: str, mesh_shape: list[int], param_dtype: str, streamed: bool) -> dict:
    mesh = make_mesh(*mesh_shape)
    jax.block_until_ready(
        [jax.device_put(np.zeros(1024), device) for device in mesh.devices.flat]
    )  # starts the backend
    start, samples, done = _status("RssAnon"), [], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            samples.append(_status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        began = time.monotonic()
        config = hf_config.read_config(folder, param_dtype=param_dtype)
        shardings = param_shardings(config, mesh, LEARNER_RULES)
        stored = hf_weights.open_params(folder, config)
        params = stored.load(shardings) if streamed else jax.device_put(stored.load(), shardings)
        jax.block_until_ready(params)
        seconds = time.monotonic() - began
    finally:
        done.set()  # else the thread would keep a process that failed
        sampler.join()
    end, sizes = _status("RssAnon"), [_bytes(x) for x in jax.tree.leaves(params)]
    peak = max([start, *samples, end])
    return {
        "seconds": seconds,
        "params_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "start_bytes": start,
        "peak_bytes": peak,
        "end_bytes": end,
        "extra_bytes": peak - start - sum(sizes),
        "peak_rss_bytes": _status("VmHWM"),
    }


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(f"{field}:"))


def _bytes(x) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(*json.loads(sys.argv[1]))))
