"""Problems for training and evaluation, and the tasks that they come from.

A task is a `Loader` in `TASKS`: a function from a `Source`, which is a task's section of the config, to disjoint train
and eval problems. Loaders are imported when they are first used. Nothing here imports JAX: graders unpickle problems in
processes of their own. docs/tasks.md says how to add a task.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import grading, templates
from rhyme_jax.tasks.sandbox import Sandbox


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt and how responses to it are rewarded. Abstract; picklable, and importable without JAX: graders have it
    in processes of their own.
    """

    question: str  # what the user asks; the prompt is this, or this in the model's chat template
    chat: bool  # render through the chat template
    task: str  # name of the task it belongs to, for metrics by task

    def reward(self, response: str) -> float | None:
        """Reward of a response; None (or NaN) says that grading itself failed, and masks the sample."""
        raise NotImplementedError

    def reference(self) -> str | None:
        """A response that deserves full reward, where one is known."""
        return None


@dataclasses.dataclass(frozen=True)
class MathProblem(Problem):
    """A problem with one final answer."""

    gold: str  # the answer
    extractors: tuple[str, ...]  # how a response may declare its answer (see `grading.extract_answer`)

    def reward(self, response: str) -> float | None:
        return grading.grade(response, self.gold, self.extractors)

    def reference(self) -> str | None:
        return templates.declared(self.extractors[0], self.gold)


Split = tuple[list[Problem], list[Problem]]  # train, eval


def silent(line: str) -> None:
    """Says nothing."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What a loader is given: a task's section of the config, and what to call it."""

    options: Any  # with the fields of `training.settings.Task`
    section: str = "task"  # of the config, for errors: "task", or "tasks.LABEL" in a mixture
    label: str = ""  # `Problem.task` of its problems; "": the task's name
    say: Callable[[str], None] = silent  # takes a line that the user should see
    sandbox: Sandbox = dataclasses.field(default_factory=Sandbox)  # where programs run

    @property
    def task(self) -> str:
        return self.label or self.options.name

    def error(self, field: str, message: str, value: Any = ...) -> InputError:
        """An InputError about a field of the section, to raise. `value`: in place of the field's."""
        return InputError(
            f"{self.section}.{field}={getattr(self.options, field) if value is ... else value}: {message}"
        )


@dataclasses.dataclass(frozen=True)
class Loader:
    """A task that a config can name."""

    function: str  # "module:function", which takes a Source and returns (train, eval) lists of problems
    # Those of the section's OPTIONAL fields that it reads; where another one is set the config is refused.
    uses: frozenset[str] = frozenset()

    def load(self, source: Source) -> Split:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(source)


# Fields of a task's section that not every task reads. "" leaves them to the task.
OPTIONAL = (
    *("path", "eval_path", "question_column", "answer_column", "template", "answer_style", "system_prompt"),
    *("code_reward", "completion"),
)
_ASKED = frozenset({"template", "answer_style", "system_prompt"})  # by tasks that ask in words
_FILE = Loader("rhyme_jax.tasks.formats:load", _ASKED | {"path", "eval_path", "question_column", "answer_column"})
_PROGRAMS = Loader(
    "rhyme_jax.tasks.code:load", frozenset({"path", "eval_path", "system_prompt", "code_reward", "completion"})
)

TASKS: dict[str, Loader] = {
    "arithmetic": Loader("rhyme_jax.tasks.arithmetic:load"),
    "gsm8k": _FILE,
    "math": _FILE,
    "dapo": _FILE,
    "qa": _FILE,
    "countdown": Loader("rhyme_jax.tasks.countdown:load", _ASKED),
    "equations": Loader("rhyme_jax.tasks.equations:load", _ASKED),
    "humaneval": _PROGRAMS,
    "mbpp": _PROGRAMS,
    "code": _PROGRAMS,
    "functions": Loader("rhyme_jax.tasks.functions:load", frozenset({"code_reward"})),
}


def check_options(options: Any, section: str) -> None:
    """Checks what can be checked of a task's section without loading it.

    Raises:
      InputError: the task does not exist, or a field is set that it does not read.
    """
    if options.name not in TASKS:
        raise InputError(f"{section}.name={options.name!r}: must be one of {', '.join(TASKS)}")
    for name in OPTIONAL:
        if (value := getattr(options, name)) and name not in TASKS[options.name].uses:
            raise InputError(f"{section}.{name}={value!r}: is not used by {section}.name={options.name!r}")


def load_problems(
    options: Any,
    section: str = "task",
    label: str = "",
    say: Callable[[str], None] = silent,
    sandbox: Sandbox | None = None,
) -> Split:
    """Disjoint (train, eval) problems of a task.

    Args:
      options, section, label, say, sandbox: see `Source`.

    Raises:
      InputError: unknown task, a field that it does not read, a missing or malformed file, or fewer problems than
        asked for.
    """
    check_options(options, section)
    return TASKS[options.name].load(Source(options, section, label, say, sandbox or Sandbox()))


def load_mixture(
    tasks: Mapping[str, Any], say: Callable[[str], None] = silent, sandbox: Sandbox | None = None
) -> dict[str, Split]:
    """Problems of the tasks of a mixture, by label. No question is trained on that any of them evaluates with, and none
    is trained on as part of two of them.

    Args:
      tasks: sections of the config by label.
      say: takes a line for each task that loses train problems to another one.

    Raises:
      InputError: as `load_problems`; or a task is left without train problems.
    """
    loaded = {label: load_problems(options, f"tasks.{label}", label, say, sandbox) for label, options in tasks.items()}
    taken = {normalized(p.question) for _, evaluation in loaded.values() for p in evaluation}
    for label, (train, evaluation) in loaded.items():
        kept = [p for p in train if normalized(p.question) not in taken]
        taken |= {normalized(p.question) for p in train}
        if dropped := len(train) - len(kept):
            say(f"tasks.{label}: {dropped} of {len(train)} train problems are also in other tasks, and left out")
        if not kept:
            raise InputError(f"tasks.{label}: all of its {len(train)} train problems are also in other tasks")
        loaded[label] = kept, evaluation
    return loaded


def normalized(question: str) -> str:
    """What two questions have in common that differ only in white space."""
    return " ".join(question.split())
