"""Countdown: numbers and a target, to be reached with + - * / and each number exactly once.

A problem of difficulty d has d numbers. Its answer is an expression, and there are usually several right ones, so the
checker works out the response's own (Gandhi et al. 2024, Stream of Search, have the game; Pan et al. 2025, TinyZero,
reward it like this). What a response says is parsed here and never run.
"""

import dataclasses
import operator
import re
from fractions import Fraction

import numpy as np

from rhyme_jax.tasks import grading, templates
from rhyme_jax.tasks.generated import check_difficulties, train_and_eval
from rhyme_jax.tasks.problems import Problem, Source, Split

MAX_TARGET = 999
MAX_LENGTH = 200  # characters of an expression; one of six numbers with all parentheses has under 50
MAX_DEPTH = 20  # of parentheses
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_SIGNS = {
    "\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-",
    "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left(": "(", "\\right)": ")",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Puzzle:
    numbers: tuple[int, ...]
    target: int
    # One of the ways to reach it. Puzzles that differ in it alone are the same puzzle.
    solution: str = dataclasses.field(compare=False)

    @property
    def question(self) -> str:
        return (
            f"Use the numbers {', '.join(map(str, self.numbers))} to make {self.target}. Use each of them exactly "
            "once, with +, -, *, / and parentheses. The answer is an expression."
        )


@dataclasses.dataclass(frozen=True)
class CountdownProblem(Problem):
    numbers: tuple[int, ...]
    target: int
    solution: str
    extractors: tuple[str, ...]  # how a response may declare its expression

    def reward(self, response: str) -> float:
        """1.0 where the expression that the response declares makes the target of the numbers, else 0.0."""
        answer = grading.extract_answer(response, self.extractors)
        return float(answer is not None and makes(answer, self.numbers, self.target))

    def reference(self) -> str:
        return templates.declared(self.extractors[0], self.solution)


def makes(answer: str, numbers: tuple[int, ...], target: int) -> bool:
    """Whether an answer is an expression of the numbers, each of them once, with the target's value. It may go on with
    "= target".
    """
    if len(answer) > MAX_LENGTH:
        return False
    for written, sign in _SIGNS.items():
        answer = answer.replace(written, sign)
    expression, equals, result = answer.lstrip(" \t$*`").rstrip(" \t.$*`").partition("=")
    if equals and result.strip() != str(target):
        return False
    tokens = tokenize(expression)
    if tokens is None or sorted(int(t) for t in tokens if t.isdigit()) != sorted(numbers):
        return False
    return evaluate(tokens) == target


def tokenize(expression: str) -> list[str] | None:
    """Whole numbers, operators and parentheses; None where there is anything else."""
    tokens, position, expression = [], 0, expression.rstrip()
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            return None
        tokens.append(match[1])
        position = match.end()
    return tokens


def evaluate(tokens: list[str]) -> Fraction | None:
    """The exact value of an expression; None where it is none, divides by zero or is nested too deeply.

    sum: product (("+" | "-") product)*;  product: atom (("*" | "/") atom)*;  atom: number | "(" sum ")"
    """
    position = 0

    def next_is(choices: str) -> str | None:
        nonlocal position
        if position < len(tokens) and tokens[position] in choices:
            position += 1
            return tokens[position - 1]
        return None

    def chain(operators: str, part, depth: int) -> Fraction:
        value = part(depth)
        while sign := next_is(operators):
            other = part(depth)
            if sign == "/" and not other:
                raise _Malformed
            value = _OPERATIONS[sign](value, other)
        return value

    def sums(depth: int) -> Fraction:
        return chain("+-", products, depth)

    def products(depth: int) -> Fraction:
        return chain("*/", atom, depth)

    def atom(depth: int) -> Fraction:
        nonlocal position
        if next_is("("):
            if depth == MAX_DEPTH:
                raise _Malformed
            value = sums(depth + 1)
            if not next_is(")"):
                raise _Malformed
            return value
        if position == len(tokens) or not tokens[position].isdigit():
            raise _Malformed
        position += 1
        return Fraction(int(tokens[position - 1]))

    try:
        value = sums(0)
    except _Malformed:
        return None
    return value if position == len(tokens) else None


class _Malformed(Exception):
    """Not an expression."""


def sample_puzzle(rng: np.random.Generator, difficulty: int) -> Puzzle:
    """Numbers up to 20 at difficulties 2 and 3, up to 99 above, joined two at a time in random order; again where the
    result is no whole number from 1 to MAX_TARGET.
    """
    limit = 20 if difficulty <= 3 else 99
    while True:
        numbers = tuple(sorted(rng.integers(1, limit + 1, difficulty).tolist()))
        text, value = _joined([(str(n), Fraction(n)) for n in numbers], rng)
        if value is not None and value.denominator == 1 and 1 <= value <= MAX_TARGET and value not in numbers:
            return Puzzle(numbers, int(value), text.removeprefix("(").removesuffix(")"))


def _joined(parts: list[tuple[str, Fraction]], rng: np.random.Generator) -> tuple[str, Fraction | None]:
    """Expressions and their values joined to one; no value where it divides by zero."""
    while len(parts) > 1:
        (a, x), (b, y) = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
        sign = "+-*/"[rng.integers(4)]
        if sign == "/" and not y:
            return "", None
        parts.append((f"({a}{sign}{b})", _OPERATIONS[sign](x, y)))
    return parts[0]


def load(source: Source) -> Split:
    """The task's problems, for models that read words."""
    check_difficulties(source, 2, 6, "numbers")
    template, extractors = templates.template(source, "instruct"), templates.extractors(source, "hashes")

    def problem(p: Puzzle) -> CountdownProblem:
        question = templates.asked(template, p.question, extractors[0])
        return CountdownProblem(question, True, source.task, p.numbers, p.target, p.solution, extractors)

    train, evaluation = train_and_eval(sample_puzzle, source, 0xC0DA)
    return [problem(p) for p in train], [problem(p) for p in evaluation]
