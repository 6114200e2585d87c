"""A run's settings: typed, checked copies of the sections of its config.

The dataclasses are the schema. `Settings.from_config` refuses unknown, missing and mistyped fields and impossible
combinations with a one-line `InputError`, before anything is loaded or compiled.
"""

import dataclasses
import difflib
import math
from typing import Any

import ml_collections

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.learner import OptimizerConfig
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.histopipe.plan import LAYOUTS, MODES
from rhyme_jax.history.store import VOTE_WEIGHTS
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import WINDOWS
from rhyme_jax.histospec.drafts import SOURCES, DraftRules
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.presets import PRESETS
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.config import DTYPES


def one_of(name: str, value: str, choices) -> None:
    """Raises InputError unless a field's value is among the choices."""
    if value not in choices:
        raise InputError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def at_least(section: str, settings, minimum: int, *names: str) -> None:
    """Raises InputError unless these fields of a section's settings reach the minimum."""
    for name in names:
        if getattr(settings, name) < minimum:
            raise InputError(f"{section}.{name}={getattr(settings, name)}: must be at least {minimum}")


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    path: str
    seed: int
    train_size: int
    eval_size: int
    difficulties: tuple
    system_prompt: str

    def __post_init__(self):
        for name in ("path", "system_prompt"):
            if getattr(self, name) and self.name == "arithmetic":
                raise InputError(f"task.{name}={getattr(self, name)!r}: is not used by task.name='arithmetic'")
        at_least("task", self, 0, "seed")
        at_least("task", self, 1, "train_size", "eval_size")


@dataclasses.dataclass(frozen=True)
class Init:
    weights: str


@dataclasses.dataclass(frozen=True)
class Model:
    dtype: str
    param_dtype: str

    def __post_init__(self):
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise InputError(f"model.{name}={getattr(self, name)!r}: must be one of {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True)
class Rollout:
    prompts_per_step: int
    samples_per_prompt: int
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    noise: str
    chunk: int
    max_rows: int

    def __post_init__(self):
        at_least("rollout", self, 1, "prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens")
        if not self.temperature > 0:
            raise InputError(f"rollout.temperature={self.temperature}: training needs a temperature above 0")
        one_of("rollout.noise", self.noise, noise.KINDS)

    @property
    def rows(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class Noise:
    refresh_epochs: int

    def __post_init__(self):
        at_least("noise", self, 0, "refresh_epochs")


PRESET = "preset"  # in place of a value: that of draft.preset


@dataclasses.dataclass(frozen=True)
class Draft:
    preset: str
    buckets: tuple
    sources: str
    weight: str
    window: str
    by_length: bool
    min_match: int
    min_prob: float
    costs: str

    def __post_init__(self):
        one_of("draft.preset", self.preset, PRESETS)
        if self.min_prob != -1 and not 0 <= self.min_prob <= 1:
            raise InputError(f"draft.min_prob={self.min_prob}: must lie in [0, 1], or be -1 for the preset's")
        one_of("draft.weight", self.weight, (PRESET, *VOTE_WEIGHTS))
        one_of("draft.window", self.window, (PRESET, *WINDOWS))
        for source in [] if self.sources == PRESET else self.sources.split("+"):
            if source not in SOURCES[:3]:
                raise InputError(
                    f"draft.sources={self.sources!r}: no source {source!r}; join {', '.join(SOURCES[:3])} with +, or "
                    f"say {PRESET!r}"
                )

    @property
    def vote_weight(self) -> str:
        return PRESETS[self.preset].weight if self.weight == PRESET else self.weight

    @property
    def window_rule(self) -> str:
        return PRESETS[self.preset].window if self.window == PRESET else self.window

    def rules(self) -> DraftRules:
        preset = PRESETS[self.preset]
        return DraftRules(
            sources=preset.sources if self.sources == PRESET else tuple(self.sources.split("+")),
            min_match=self.min_match,
            min_prob=preset.min_prob if self.min_prob < 0 else self.min_prob,
        )


@dataclasses.dataclass(frozen=True)
class History:
    depth: int
    max_tokens: int

    def __post_init__(self):
        at_least("history", self, 1, "depth", "max_tokens")


@dataclasses.dataclass(frozen=True)
class Grpo:
    clip_low: float
    clip_high: float
    kl_coef: float
    aggregate: str
    normalize_std: bool
    updates_per_batch: int
    importance_cap: float

    def __post_init__(self):
        at_least("grpo", self, 1, "updates_per_batch")

    def loss(self) -> LossConfig:
        return LossConfig(self.clip_low, self.clip_high, self.kl_coef, self.aggregate, self.importance_cap)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float
    schedule: str
    warmup_updates: int
    b1: float
    b2: float
    weight_decay: float
    clip_norm: float
    micro_batches: int
    remat: bool

    def config(self, total_updates: int) -> OptimizerConfig:
        return OptimizerConfig(**dataclasses.asdict(self), total_updates=total_updates)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    data: int
    fsdp: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
    mode: str
    layout: str
    slices: int
    learner_devices: int
    tensor: int
    migration: bool
    defer: float

    def __post_init__(self):
        one_of("pipeline.mode", self.mode, MODES)
        one_of("pipeline.layout", self.layout, LAYOUTS)
        if self.runs_ahead and self.slices == 1:
            raise InputError("pipeline.slices=1: pipeline.mode='cross_step' needs 2 or more")
        if self.mode == "sync" and self.layout not in ("best", "equal"):
            raise InputError(f"pipeline.layout={self.layout!r}: pipeline.mode='sync' knows equal shares only")
        at_least("pipeline", self, 1, "slices")
        at_least("pipeline", self, 0, "learner_devices", "tensor")
        if not 0 <= self.defer <= 0.5:
            raise InputError(f"pipeline.defer={self.defer}: must be a share of a step's prompts from 0 to 0.5")

    @property
    def migrates(self) -> bool:
        return self.migration and self.mode != "sync" and self.slices > 1

    @property
    def runs_ahead(self) -> bool:
        return self.mode == "cross_step"


@dataclasses.dataclass(frozen=True)
class Grading:
    workers: int
    timeout: float

    def __post_init__(self):
        at_least("grading", self, 0, "workers", "timeout")
        if self.timeout and not self.workers:
            raise InputError(f"grading.timeout={self.timeout}: needs grading.workers of at least 1")


@dataclasses.dataclass(frozen=True)
class Eval:
    every: int

    def __post_init__(self):
        at_least("eval", self, 1, "every")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every: int
    keep: int

    def __post_init__(self):
        at_least("checkpoint", self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int
    steps: int
    task: Task
    init: Init
    model: Model
    rollout: Rollout
    noise: Noise
    draft: Draft
    history: History
    grpo: Grpo
    optimizer: Optimizer
    mesh: MeshShape
    pipeline: Pipeline
    grading: Grading
    eval: Eval
    checkpoint: Checkpoint

    def __post_init__(self):
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed={self.seed}: must be from 0 to 2**31 - 1")
        if self.steps < 1:
            raise InputError(f"steps={self.steps}: must be at least 1")
        if self.rollout.prompts_per_step > self.task.train_size:
            raise InputError(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}: must not exceed "
                f"task.train_size={self.task.train_size}"
            )
        if self.rollout.samples_per_prompt == 1:
            raise InputError(
                "rollout.samples_per_prompt=1: a group of one has no advantage, nothing would be learned; use 2 or more"
            )
        for name, prompts in (
            ("rollout.prompts_per_step", self.rollout.prompts_per_step),
            ("task.eval_size", self.task.eval_size),
        ):
            if self.pipeline.slices > prompts:
                raise InputError(f"pipeline.slices={self.pipeline.slices}: must not exceed {name}={prompts}")
        # Their own checks run now rather than after the weights are loaded.
        self.engine(self.rollout.sampling(), eos_ids=(0,), prompt_slots=self.rollout.max_prompt_tokens)
        self.grpo.loss()
        self.optimizer.config(self.total_updates)

    def engine(self, sampling: SamplingParams, eos_ids: tuple[int, ...], prompt_slots: int) -> EngineConfig:
        return EngineConfig(
            sampling=sampling,
            eos_ids=eos_ids,
            draft_buckets=self.draft.buckets,
            rules=self.draft.rules(),
            window=self.draft.window_rule,
            by_length=self.draft.by_length,
            chunk=self.rollout.chunk,
            max_rows=self.rollout.max_rows,
            prompt_slots=prompt_slots,
        )

    @property
    def total_updates(self) -> int:
        return self.steps * self.grpo.updates_per_batch

    @classmethod
    def from_config(cls, config: ml_collections.ConfigDict) -> "Settings":
        return section(cls, config.to_dict(), "")


def section(cls: type, values: dict, path: str) -> Any:
    """A settings dataclass from the values of a config, sections within it too.

    Args:
      path: what the names of its fields begin with in errors: "" or "name.".

    Raises:
      InputError: a field is unknown, missing, of another type, or out of range.
    """
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise unknown_field(f"{path}{name}", [f"{path}{f}" for f in fields])
    arguments = {}
    for name, kind in fields.items():
        if name not in values:
            raise InputError(f"config.{path}{name}: missing")
        value = values[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise InputError(f"config.{path}{name}={value!r}: must be a section of fields")
            arguments[name] = section(kind, value, f"{path}{name}.")
        else:
            arguments[name] = _typed(f"{path}{name}", value, kind)
    return cls(**arguments)


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not kind:
        raise InputError(f"config.{name}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}")
    if kind is tuple and not all(type(v) is int for v in value):
        raise InputError(f"config.{name}={value!r}: must hold whole numbers")
    if kind is float and not math.isfinite(value):
        raise InputError(f"config.{name}={value!r}: must be finite")
    return value


def unknown_field(name: str, known: list[str]) -> InputError:
    """The error for a config field that does not exist, with the nearest that do."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return InputError(f"config.{name}: no such field; {hint}")
