"""A run's settings: typed, checked copies of the sections of its config.

The dataclasses are the schema. `Settings.from_config` refuses unknown, missing and mistyped fields and impossible
combinations with a one-line `InputError`, before anything is loaded or compiled.
"""

import dataclasses
import datetime
import difflib
import math
import re
import typing
from typing import Any

import ml_collections
import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.grpo import presets
from rhyme_jax.grpo.advantages import BASELINES, NORMALIZERS, AdvantageConfig
from rhyme_jax.grpo.learner import OptimizerConfig
from rhyme_jax.grpo.losses import AGGREGATES, BEHAVIOURS, KL_ESTIMATORS, RATIOS, LossConfig
from rhyme_jax.histopipe.plan import LAYOUTS, MODES
from rhyme_jax.history.store import VOTE_WEIGHTS
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import WINDOWS
from rhyme_jax.histospec.drafts import SOURCES, DraftRules
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.presets import PRESETS
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.config import DTYPES
from rhyme_jax.models.lora import LoraConfig
from rhyme_jax.tasks.code import REWARDS
from rhyme_jax.tasks.problems import TASKS, check_options
from rhyme_jax.tasks.sandbox import Limits, Sandbox

_FLOAT32_MAX = float(np.finfo(np.float32).max)


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
    """A section that names a task: `task`, or one of a mixture's `tasks`."""

    name: str
    weight: float
    path: str
    eval_path: str
    question_column: str
    answer_column: str
    template: str
    answer_style: str
    code_reward: str
    completion: bool
    seed: int
    train_size: int
    eval_size: int
    difficulties: tuple
    system_prompt: str
    chat_date: str

    def check(self, section: str) -> None:
        """Raises InputError, with the section's name, where a field is out of range or of no use to the task."""
        at_least(section, self, 0, "seed")
        at_least(section, self, 1, "train_size", "eval_size")
        if not self.weight > 0:
            raise InputError(f"{section}.weight={self.weight}: must be positive")
        if self.code_reward:
            one_of(f"{section}.code_reward", self.code_reward, REWARDS)
        check_options(self, section)
        try:
            datetime.date.fromisoformat(self.chat_date)
        except ValueError as e:
            raise InputError(f"{section}.chat_date={self.chat_date!r}: must be a date, as 2024-07-26") from e

    @property
    def today(self) -> datetime.date:
        """For chat templates."""
        return datetime.date.fromisoformat(self.chat_date)


@dataclasses.dataclass(frozen=True)
class Init:
    weights: str


@dataclasses.dataclass(frozen=True)
class Model:
    dtype: str
    param_dtype: str
    head_dtype: str

    def __post_init__(self):
        for name in ("dtype", "param_dtype", "head_dtype"):
            if getattr(self, name) not in DTYPES:
                raise InputError(f"model.{name}={getattr(self, name)!r}: must be one of {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: str

    def __post_init__(self):
        at_least("lora", self, 0, "rank")
        LoraConfig(max(1, self.rank), self.alpha, self.matrices)

    @property
    def matrices(self) -> tuple[str, ...]:
        return tuple(self.targets.split("+"))

    def config(self) -> LoraConfig | None:
        return LoraConfig(self.rank, self.alpha, self.matrices) if self.rank else None


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


PRESET = "preset"  # in place of a value: that of draft.preset or grpo.preset; for a number it is -1


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


KL_PLACES = ("loss", "reward")
MAX_ROUNDS = 64  # of sampling in a step; a round and a step share the 31 bits of a noise word
ROUND_BITS = 24  # of the word that are the step's


@dataclasses.dataclass(frozen=True)
class Grpo:
    preset: str
    baseline: str
    normalize_std: str
    ratio: str
    clip_low: float
    clip_high: float
    clip_dual: float
    aggregate: str
    kl_coef: float
    kl_in: str
    kl_estimator: str
    entropy_coef: float
    overlong_buffer: int
    overlong_factor: float
    mask_truncated: bool
    sampling_rounds: int
    updates_per_batch: int
    minibatches: int
    behaviour: str
    importance_cap: float

    def __post_init__(self):
        one_of("grpo.preset", self.preset, presets.PRESETS)
        for name, choices in (
            ("baseline", BASELINES),
            ("normalize_std", NORMALIZERS),
            ("ratio", RATIOS),
            ("aggregate", AGGREGATES),
            ("kl_in", KL_PLACES),
            ("kl_estimator", KL_ESTIMATORS),
            ("behaviour", BEHAVIOURS),
        ):
            one_of(f"grpo.{name}", getattr(self, name), (PRESET, *choices))
        at_least("grpo", self, 1, "updates_per_batch", "minibatches")
        for name, off in (("overlong_buffer", 0), ("sampling_rounds", 1)):
            if not (value := getattr(self, name)) >= off and value != -1:
                raise InputError(f"grpo.{name}={value}: must be {off} (off) or more, or -1 for the preset's")
        if self.rounds > MAX_ROUNDS:
            raise InputError(f"grpo.sampling_rounds={self.rounds}: must be at most {MAX_ROUNDS}")
        if self.of("kl_in") == "reward" and self.kl_estimator not in (PRESET, "k1"):
            raise InputError(
                f"grpo.kl_estimator={self.kl_estimator!r}: grpo.kl_in='reward' takes the log ratio itself, 'k1'"
            )

    def of(self, name: str) -> Any:
        """A field's value, or the preset's where it leaves that to the preset."""
        value = getattr(self, name)
        return getattr(presets.PRESETS[self.preset], name) if value in (PRESET, -1) else value

    @property
    def rounds(self) -> int:
        """Rounds of sampling that a step may take."""
        return self.of("sampling_rounds")

    def loss(self, budget: int) -> LossConfig:
        """`budget`: tokens of a response at most."""
        return LossConfig(
            clip_low=self.of("clip_low"),
            clip_high=self.of("clip_high"),
            kl_coef=self.kl_coef if self.of("kl_in") == "loss" else 0.0,
            aggregate=self.of("aggregate"),
            importance_cap=self.importance_cap,
            ratio=self.of("ratio"),
            clip_dual=self.clip_dual,
            kl_estimator=self.of("kl_estimator"),
            entropy_coef=self.entropy_coef,
            behaviour=self.of("behaviour"),
            budget=budget,
        )

    def advantages(self, budget: int) -> AdvantageConfig:
        buffer = self.overlong_buffer
        if buffer == -1:
            buffer = round(presets.PRESETS[self.preset].overlong_share * budget)
        return AdvantageConfig(
            baseline=self.of("baseline"),
            normalize_std=self.of("normalize_std"),
            kl_coef=self.kl_coef if self.of("kl_in") == "reward" else 0.0,
            budget=budget,
            overlong_buffer=buffer,
            overlong_factor=self.overlong_factor,
            mask_truncated=self.mask_truncated,
        )


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
    remat: str
    vocab_block: int

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
class Programs:
    """How model-written programs are run."""

    wall_s: float
    cpu_s: int
    memory_mb: int
    output_kb: int
    files_mb: int
    open_files: int
    unsafe_subprocess: bool

    def __post_init__(self):
        self.sandbox()

    def sandbox(self) -> Sandbox:
        limits = {f.name: getattr(self, f.name) for f in dataclasses.fields(Limits)}
        return Sandbox(Limits(**limits), self.unsafe_subprocess)


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
    tasks: dict[str, Task]  # of a mixture, by label; none: `task` is the one task
    init: Init
    model: Model
    lora: Lora
    rollout: Rollout
    noise: Noise
    draft: Draft
    history: History
    grpo: Grpo
    optimizer: Optimizer
    mesh: MeshShape
    pipeline: Pipeline
    grading: Grading
    sandbox: Programs
    eval: Eval
    checkpoint: Checkpoint

    def __post_init__(self):
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed={self.seed}: must be from 0 to 2**31 - 1")
        if self.steps < 1:
            raise InputError(f"steps={self.steps}: must be at least 1")
        for label, task in self.tasks.items():
            if not re.fullmatch(r"[a-z0-9_]+", label):
                raise InputError(f"tasks.{label}: a task's label must be of lower-case letters, digits and _")
            task.check(f"tasks.{label}")
        if not self.tasks:
            self.task.check("task")
            if self.rollout.prompts_per_step > self.task.train_size:
                raise InputError(
                    f"rollout.prompts_per_step={self.rollout.prompts_per_step}: must not exceed "
                    f"task.train_size={self.task.train_size}"
                )
        if self.rollout.samples_per_prompt == 1 and self.grpo.of("baseline") in ("group", "leave_one_out"):
            raise InputError(
                "rollout.samples_per_prompt=1: a group of one has no advantage, nothing would be learned; use 2 or more"
            )
        eval_size = sum(t.eval_size for t in self.tasks.values()) if self.tasks else self.task.eval_size
        for name, prompts in (
            ("rollout.prompts_per_step", self.rollout.prompts_per_step),
            ("the eval_size of all tasks" if self.tasks else "task.eval_size", eval_size),
        ):
            if self.pipeline.slices > prompts:
                raise InputError(f"pipeline.slices={self.pipeline.slices}: must not exceed {name}={prompts}")
        # Their own checks run now rather than after the weights are loaded.
        self.engine(self.rollout.sampling(), eos_ids=(0,), prompt_slots=self.rollout.max_prompt_tokens)
        self._check_loss()
        self._check_grading()
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

    def _check_grading(self) -> None:
        """That a program cannot have its grade masked by stalling: its own limits end it, with a reward of 0."""
        runs_programs = any("code_reward" in TASKS[t.name].uses for t in self.tasks.values() or [self.task])
        least = self.sandbox.sandbox().longest_s
        if runs_programs and 0 < self.grading.timeout < least:
            raise InputError(
                f"grading.timeout={self.grading.timeout}: must be 0 or at least {least:g} where programs are run: "
                "sandbox.wall_s, and what making sandboxes may take"
            )

    def _check_loss(self) -> None:
        """That the loss goes with how rollouts are made."""
        grpo, rollout, pipe = self.grpo, self.rollout, self.pipeline
        budget = rollout.max_new_tokens
        grpo.loss(budget)
        advantages = grpo.advantages(budget)
        if rollout.rows % grpo.minibatches:
            raise InputError(
                f"grpo.minibatches={grpo.minibatches}: must divide rollout.prompts_per_step * samples_per_prompt="
                f"{rollout.rows}"
            )
        if pipe.learner_devices:
            # The learner begins with the first group that is finished.
            alone = f"pipeline.learner_devices={pipe.learner_devices}: learns group by group"
            for name in ("baseline", "normalize_std"):
                if grpo.of(name) == "batch":
                    raise InputError(f"{alone}; grpo.{name}='batch' needs the whole batch")
            if advantages.whole_batch:
                raise InputError(f"{alone}; grpo.kl_in='reward' needs the whole batch")
            if grpo.minibatches > 1:
                raise InputError(f"{alone}; grpo.minibatches={grpo.minibatches} needs the whole batch")
        if grpo.rounds == 1:
            return
        rounds = f"grpo.sampling_rounds={grpo.rounds}"
        if (baseline := grpo.of("baseline")) in ("batch", "none"):
            raise InputError(
                f"{rounds}: sets aside groups of equal rewards, which grpo.baseline={baseline!r} learns from"
            )
        if advantages.kl_coef > 0:
            raise InputError(f"{rounds}: sets aside groups of equal rewards, which grpo.kl_in='reward' learns from")
        if pipe.learner_devices:
            raise InputError(f"{rounds}: needs pipeline.learner_devices=0; groups are chosen when all are graded")
        if pipe.runs_ahead:
            raise InputError(f"{rounds}: does not go with pipeline.mode='cross_step', which begins the next step early")
        if rollout.noise == "coupled":
            raise InputError(f"{rounds}: needs rollout.noise='fresh'; 'coupled' would repeat a prompt's responses")
        if self.steps > 1 << ROUND_BITS:
            raise InputError(f"steps={self.steps}: must not exceed {1 << ROUND_BITS} with {rounds}")

    @property
    def total_updates(self) -> int:
        return self.steps * self.grpo.updates_per_batch * self.grpo.minibatches

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
        if typing.get_origin(kind) is dict:  # of sections
            sections = _fields(f"{path}{name}", value)
            arguments[name] = {
                label: section(
                    typing.get_args(kind)[1], _fields(f"{path}{name}.{label}", fields), f"{path}{name}.{label}."
                )
                for label, fields in sections.items()
            }
        elif dataclasses.is_dataclass(kind):
            arguments[name] = section(kind, _fields(f"{path}{name}", value), f"{path}{name}.")
        else:
            arguments[name] = _typed(f"{path}{name}", value, kind)
    return cls(**arguments)


def _fields(name: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise InputError(f"config.{name}={value!r}: must be a section of fields")
    return value


def _typed(name: str, value: Any, kind: type) -> Any:
    for number in value if isinstance(value, tuple | list) else (value,):
        if type(number) is int and abs(number) >= 2**63:  # fields have ranges of their own, which go no further
            raise InputError(f"config.{name}={repr(value)[:80]}: must be a number of at most 64 bits")
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
    if kind is float and abs(value) > _FLOAT32_MAX:
        raise InputError(f"config.{name}={value!r}: must be finite in float32, whose largest number is 3.4e38")
    return value


def unknown_field(name: str, known: list[str]) -> InputError:
    """The error for a config field that does not exist, with the nearest that do."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return InputError(f"config.{name}: no such field; {hint}")
