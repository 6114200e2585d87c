"""A run's directory: its stored config, metrics, samples, checkpoints and result.

config.json            the config, versions and git revision of the first start
model/                 config.json, tokenizer and the like of the initial model, for export
checkpoints/<step>/    see `training.checkpoints`
metrics.jsonl          one object a step
timeline.jsonl         what each slice did when, see `histopipe.timeline`
samples/step_*.jsonl   the rollouts of each step
cost_table.json        measured seconds of a decoding iteration by shape
result.json            written when the run is complete
lock                   held by the run that is using the directory
"""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import pathlib
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import ml_collections
from flax import traverse_util

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json, write_json, write_whole

# Fields that a resumed run may change: they do not touch what the steps before the change computed.
MAY_CHANGE = ("steps", "eval.every", "checkpoint.every", "checkpoint.keep")


class Workdir:
    """`writes`: whether this process does; of several processes only the first."""

    def __init__(self, path, writes: bool = True):
        self.path, self.writes = pathlib.Path(path), writes
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.samples = self.path / "samples"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.result = self.path / "result.json"
        self.cost_table = self.path / "cost_table.json"
        self.config = self.path / "config.json"
        self._lock_file = self.path / "lock"
        self._made: list[pathlib.Path] = []  # by `prepare`

    def prepare(self, config: ml_collections.ConfigDict) -> None:
        """Makes the directory and stores the config, or checks it against the one stored.

        Raises:
          InputError: the path is not a writable directory, or it holds a run whose config differs in a field that
            matters (see MAY_CHANGE).
        """
        stored = self.stored_config()
        if stored is not None:
            _check_same(stored, config.to_dict(), self.path)
        if not self.writes:
            return
        self._made = [p for p in (self.path, self.config, self.model, self.samples, self._lock_file) if not p.exists()]
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            if stored is None:
                write_json(self.config, {"config": config.to_dict(), **_environment()})
            self._lock = self._lock_file.open("w")
        except OSError as e:
            raise InputError(f"--workdir={self.path}: cannot be written ({e.strerror or e})") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system when the process ends
        except OSError as e:
            self.release()
            raise InputError(f"--workdir={self.path}: another run is using it") from e

    def release(self) -> None:
        """Lets other runs use the directory."""
        if self.writes:
            self._lock.close()

    def abandon(self) -> None:
        """`release`, of a run that could not begin: if the directory held none, it is as it was before `prepare`."""
        self.release()
        if self.writes and self.config in self._made:
            for path in (self.config, self._lock_file):
                path.unlink(missing_ok=True)
            if self.model in self._made:
                shutil.rmtree(self.model, ignore_errors=True)
            for folder in (self.checkpoints, self.samples, self.path):
                if folder in (*self._made, self.checkpoints):
                    with contextlib.suppress(OSError):  # what is not empty stays
                        folder.rmdir()

    def stored_config(self) -> dict | None:
        """The config of the run that the directory holds; None if it holds none.

        Raises:
          InputError: it is damaged.
        """
        try:
            if not self.config.exists():
                return None
        except OSError as e:
            raise InputError(f"--workdir={self.path}: cannot be read ({e.strerror or e})") from e
        try:
            stored = read_json(self.config)
            if not isinstance(stored.get("config"), dict):
                raise InputError("it has no 'config' object")
        except InputError as e:
            raise InputError(f"--workdir={self.path}: its config.json is damaged ({e})") from e
        return stored["config"]

    def write_samples(self, step: int, samples: Iterable[dict]) -> None:
        if self.writes:
            lines = "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples)
            (self.samples / f"step_{step:06d}.jsonl").write_text(lines, encoding="utf-8")

    def write_json(self, path: pathlib.Path, value: dict) -> None:
        if self.writes:
            write_json(path, value)

    def remove_result(self) -> None:
        if self.writes:
            self.result.unlink(missing_ok=True)

    def step_file(self, path: pathlib.Path, done_steps: int) -> "StepFile":
        return StepFile(path if self.writes else None, done_steps)


class StepFile:
    """Appends JSON objects with a `step`, one a line. Opening it for a resumed run drops lines of later steps, and a
    last line that was torn by a crash. With None for a path nothing is written.
    """

    def __init__(self, path: pathlib.Path | None, done_steps: int):
        self._file = None
        if path is not None:
            # With no step done the run starts over, and evaluates its initial weights again.
            kept = [record for record in read_metrics(path) if record["step"] <= done_steps] if done_steps else []
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
            self._file = path.open("a")

    def write(self, *records: dict[str, Any]) -> None:
        """Appends a line each. NaN and infinity, which are not JSON, become null."""
        if self._file is None:
            return
        for record in records:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path) -> list[dict]:
    """The metrics of a run, also of one that is running or was killed; none where the file does not exist.

    Raises:
      InputError: a line but for a torn last one is not an object with a whole number `step`.
    """
    path, metrics = pathlib.Path(path), []
    if not path.exists():
        return metrics
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn, or empty
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if type(record["step"]) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise InputError(f"{path}, line {number}: damaged; remove that line to go on") from e
        metrics.append(record)
    return metrics


def _environment() -> dict:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    root = pathlib.Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = None
    return {
        "git_revision": revision,
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def _flat(config: dict) -> dict[str, Any]:
    """Fields by their dotted names; tuples as lists, which is what JSON made of the stored ones."""
    flat = traverse_util.flatten_dict(config, sep=".")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _check_same(stored: dict, config: dict, path) -> None:
    old, new = _flat(stored), _flat(config)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not _may_change(name, new):
            raise InputError(
                f"--workdir={path}: holds a run with config.{name}={old.get(name)!r}, now {new.get(name)!r}; "
                "use that value or another workdir"
            )


def _may_change(name: str, config: dict) -> bool:
    # A cosine schedule is stretched over the steps, so their number is part of every update.
    return name in MAY_CHANGE and not (name == "steps" and config.get("optimizer.schedule") == "cosine")
