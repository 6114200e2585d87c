"""Linear equations, graded by putting the answer into them.

Difficulties:

  1  x + a = b                     4  a x + b = c x + d, whole solutions
  2  a x + b = c, whole solutions  5  two equations in x and y, whole solutions
  3  a x + b = c, fractions        6  two equations in x and y, fractions
"""

import dataclasses
import re
from fractions import Fraction

import numpy as np

from rhyme_jax.tasks import grading, templates
from rhyme_jax.tasks.generated import check_difficulties, train_and_eval
from rhyme_jax.tasks.problems import Problem, Source, Split

MAX_LENGTH = 200  # characters of an answer
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_NUMBER = re.compile(r"(?P<sign>[-+]?)(?P<top>\d+(\.\d+)?|\.\d+)(/(?P<bottom>\d+))?", re.ASCII)
_PAIR = re.compile(r"\((?P<x>[^,()]*),(?P<y>[^,()]*)\)|x=(?P<x1>[^,=;]*?)([,;](and)?|and)y=(?P<y1>[^,=;]*)")


@dataclasses.dataclass(frozen=True)
class Equation:
    """left[0] x + left[1] y + left[2] = right[0] x + right[1] y + right[2]"""

    left: tuple[int, int, int]
    right: tuple[int, int, int]

    def holds(self, x: Fraction, y: Fraction) -> bool:
        a, b, c = (p - q for p, q in zip(self.left, self.right, strict=True))
        return a * x + b * y + c == 0

    def __str__(self) -> str:
        return f"{_sum(self.left)} = {_sum(self.right)}"


def _sum(terms: tuple[int, int, int]) -> str:
    text = ""
    for factor, unknown in zip(terms, ("x", "y", ""), strict=True):
        if factor:
            size = "" if abs(factor) == 1 and unknown else str(abs(factor))
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {size}{unknown}" if text else f"{'-' if factor < 0 else ''}{size}{unknown}"
    return text or "0"


@dataclasses.dataclass(frozen=True)
class System:
    """One equation in x, or two in x and y."""

    equations: tuple[Equation, ...]
    solution: tuple[Fraction, ...] = dataclasses.field(compare=False)

    @property
    def question(self) -> str:
        if len(self.equations) == 1:
            return f"Solve for x: {self.equations[0]}"
        return f"Solve for x and y: {' and '.join(map(str, self.equations))}. The answer is a pair (x, y)."

    @property
    def answer(self) -> str:
        values = [str(value) for value in self.solution]
        return values[0] if len(values) == 1 else f"({', '.join(values)})"


@dataclasses.dataclass(frozen=True)
class EquationProblem(Problem):
    system: System
    extractors: tuple[str, ...]  # how a response may declare its answer

    def reward(self, response: str) -> float:
        """1.0 where the equations hold with the values that the response declares, else 0.0."""
        answer = grading.extract_answer(response, self.extractors)
        values = None if answer is None else parse_values(answer, len(self.system.equations))
        if values is None:
            return 0.0
        x, y = (*values, Fraction(0))[:2]
        return float(all(e.holds(x, y) for e in self.system.equations))

    def reference(self) -> str:
        return templates.declared(self.extractors[0], self.system.answer)


def parse_values(answer: str, unknowns: int) -> tuple[Fraction, ...] | None:
    r"""What an answer says x is, or (x, y): "3", "x = -1/2", "0.5", "\frac{1}{2}"; "(1, 2)", "x = 1, y = 2"."""
    if len(answer) > MAX_LENGTH:
        return None
    text = answer.replace("\u2212", "-").replace("\\left", "").replace("\\right", "").lstrip(" \t$*`").rstrip(" \t.$*`")
    text = _FRACTION.sub(r"\1/\2", re.sub(r"\s+", "", text))
    if unknowns == 1:
        parts = [text.removeprefix("x=")]
    else:
        match = _PAIR.fullmatch(text)
        if match is None:
            return None
        parts = [match["x"] or match["x1"] or "", match["y"] or match["y1"] or ""]
    values = [_number(part) for part in parts]
    return None if None in values else tuple(values)


def _number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    bottom = int(match["bottom"] or 1)
    if not bottom:
        return None
    value = Fraction(match["top"]) / bottom
    return -value if match["sign"] == "-" else value


def _nonzero(rng: np.random.Generator, limit: int) -> int:
    return int(rng.integers(1, limit + 1)) * (1 if rng.random() < 0.5 else -1)


def _whole(rng: np.random.Generator) -> Fraction:
    return Fraction(int(rng.integers(-12, 13)))


def _broken(rng: np.random.Generator) -> Fraction:
    """A fraction that is no whole number, with a denominator up to 6."""
    while True:
        value = Fraction(int(rng.integers(-20, 21)), int(rng.integers(2, 7)))
        if value.denominator > 1:
            return value


def sample_system(rng: np.random.Generator, difficulty: int) -> System:
    """Made from its solution."""
    if difficulty >= 5:
        return _sample_pair(rng, _whole if difficulty == 5 else _broken)
    x = _broken(rng) if difficulty == 3 else _whole(rng)
    a = 1 if difficulty == 1 else x.denominator * int(rng.integers(2 if difficulty != 3 else 1, 10))
    b, c = _nonzero(rng, 20), 0
    while difficulty == 4 and c in (0, a):
        c = int(rng.integers(1, 10))
    d = a * x + b - c * x
    return System((Equation((a, 0, b), (c, 0, int(d))),), (x,))


def _sample_pair(rng: np.random.Generator, value) -> System:
    x, y = value(rng), value(rng)
    while True:
        (a, b), (c, d) = ((_nonzero(rng, 9) * x.denominator, _nonzero(rng, 9) * y.denominator) for _ in range(2))
        if a * d != b * c:  # otherwise there is no one solution
            break
    rows = ((a, b), (c, d))
    return System(tuple(Equation((p, q, 0), (0, 0, int(p * x + q * y))) for p, q in rows), (x, y))


def load(source: Source) -> Split:
    """The task's problems, for models that read words."""
    check_difficulties(source, 1, 6, "levels")
    template, extractors = templates.template(source, "instruct"), templates.extractors(source, "hashes")

    def problem(s: System) -> EquationProblem:
        return EquationProblem(templates.asked(template, s.question, extractors[0]), True, source.task, s, extractors)

    train, evaluation = train_and_eval(sample_system, source, 0xE96A)
    return [problem(s) for s in train], [problem(s) for s in evaluation]
