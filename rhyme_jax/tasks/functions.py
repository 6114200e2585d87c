"""Small Python functions, each specified in a line of words: the embedded default task of code_grpo.

A function of difficulty d is a chain of d steps over a number, two numbers or a list::

    def f(xs): # keep even, each plus 3, sum, times 2

    def f(a, b): # larger, minus 4

The first line is the prompt, and the answer is the function's body. Worked out step by step, it is::

     xs = [x for x in xs if x%2==0]
     xs = [x+3 for x in xs]
     x = sum(xs)
     x = x*2
     return x

and in a single expression `return sum([x+3 for x in [x for x in xs if x%2==0]])*2`. What a function has to return is
computed from its steps (`Function.value`), never by running program text.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rhyme_jax.tasks.code import CodeProblem
from rhyme_jax.tasks.generated import check_difficulties, draw_distinct
from rhyme_jax.tasks.problems import Problem, Source
from rhyme_jax.tasks.sandbox import Sandbox

ALPHABET = "abcdefghiklmnopqrstuvx0123456789()[]<>=+-*/%:,# \n"
MAX_DIFFICULTY = 8
PARAMETERS = {"number": "x", "pair": "a, b", "list": "xs"}
KINDS = tuple(PARAMETERS)  # of arguments
# What every function is tested on. Small enough to be told apart by eye, with negative numbers, zero, empty and
# repetitive lists, where slips show.
ARGUMENTS: dict[str, tuple[tuple, ...]] = {
    "number": ((0,), (1,), (-1,), (4,), (-6,), (9,), (13,), (-25,), (38,), (101,)),
    "pair": ((0, 0), (1, 2), (5, -3), (-4, -9), (7, 7), (12, 3), (-8, 10), (31, 6), (2, 45), (-30, -17)),
    "list": (
        ([],),
        ([3],),
        ([-2, -7],),
        ([4, 1, 6],),
        ([9, 2, 2, 5],),
        ([0, 8, -3, 7, 1],),
        ([12, -5, 10, 3, 6, 11],),
        ([6, 5, 4, 3, 2, 1, 0],),
        ([1, 15, -8, 2, 20, 7, 13, 4],),
    ),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A step: from a value and, where it takes one, an operand."""

    takes: str  # one of KINDS
    gives: str  # "number" or "list"
    words: str  # in the specification; "{n}" is the operand
    code: str  # an expression; "{v}" is the value so far
    apply: Callable[[Any, int], Any]  # what it means: (value, operand) -> value
    operands: range = range(0)  # those it may have; none: it takes no operand
    infix: bool = False  # its expression needs parentheses within one that is infix, too


_SMALL = range(2, 10)
OPERATIONS: dict[str, Operation] = {
    "add": Operation("number", "number", "plus {n}", "{v}+{n}", lambda v, n: v + n, _SMALL, infix=True),
    "subtract": Operation("number", "number", "minus {n}", "{v}-{n}", lambda v, n: v - n, _SMALL, infix=True),
    "multiply": Operation("number", "number", "times {n}", "{v}*{n}", lambda v, n: v * n, _SMALL, infix=True),
    "divide": Operation("number", "number", "over {n}", "{v}//{n}", lambda v, n: v // n, range(2, 5), infix=True),
    "modulo": Operation("number", "number", "mod {n}", "{v}%{n}", lambda v, n: v % n, range(3, 10), infix=True),
    "negate": Operation("number", "number", "negated", "-{v}", lambda v, n: -v, infix=True),
    "square": Operation("number", "number", "squared", "{v}**2", lambda v, n: v * v, infix=True),
    "absolute": Operation("number", "number", "absolute", "abs({v})", lambda v, n: abs(v)),
    "at_least": Operation("number", "number", "at least {n}", "max({v}, {n})", lambda v, n: max(v, n), _SMALL),
    "at_most": Operation("number", "number", "at most {n}", "min({v}, {n})", lambda v, n: min(v, n), _SMALL),
    "sum_of_two": Operation("pair", "number", "added", "a+b", lambda v, n: v[0] + v[1], infix=True),
    "difference": Operation("pair", "number", "difference", "a-b", lambda v, n: v[0] - v[1], infix=True),
    "product": Operation("pair", "number", "multiplied", "a*b", lambda v, n: v[0] * v[1], infix=True),
    "larger": Operation("pair", "number", "larger", "max(a, b)", lambda v, n: max(v)),
    "smaller": Operation("pair", "number", "smaller", "min(a, b)", lambda v, n: min(v)),
    "keep_even": Operation(
        "list", "list", "keep even", "[x for x in {v} if x%2==0]", lambda v, n: [x for x in v if x % 2 == 0]
    ),
    "keep_odd": Operation(
        "list", "list", "keep odd", "[x for x in {v} if x%2==1]", lambda v, n: [x for x in v if x % 2 == 1]
    ),
    "keep_over": Operation(
        "list", "list", "keep over {n}", "[x for x in {v} if x>{n}]", lambda v, n: [x for x in v if x > n], _SMALL
    ),
    "keep_under": Operation(
        "list", "list", "keep under {n}", "[x for x in {v} if x<{n}]", lambda v, n: [x for x in v if x < n], _SMALL
    ),
    "each_add": Operation(
        "list", "list", "each plus {n}", "[x+{n} for x in {v}]", lambda v, n: [x + n for x in v], _SMALL
    ),
    "each_multiply": Operation(
        "list", "list", "each times {n}", "[x*{n} for x in {v}]", lambda v, n: [x * n for x in v], _SMALL
    ),
    "each_square": Operation("list", "list", "each squared", "[x**2 for x in {v}]", lambda v, n: [x * x for x in v]),
    "reverse": Operation("list", "list", "reversed", "{v}[::-1]", lambda v, n: v[::-1]),
    "sort": Operation("list", "list", "sorted", "sorted({v})", lambda v, n: sorted(v)),
    "first": Operation("list", "list", "first {n}", "{v}[:{n}]", lambda v, n: v[:n], range(1, 5)),
    "skip": Operation("list", "list", "skip {n}", "{v}[{n}:]", lambda v, n: v[n:], range(1, 4)),
    "sum": Operation("list", "number", "sum", "sum({v})", lambda v, n: sum(v)),
    "count": Operation("list", "number", "count", "len({v})", lambda v, n: len(v)),
}
_FROM = {kind: tuple(name for name, op in OPERATIONS.items() if op.takes == kind) for kind in KINDS}
_ONCE = frozenset({"square", "each_square"})  # so that numbers stay small


@dataclasses.dataclass(frozen=True)
class Step:
    name: str  # in OPERATIONS
    operand: int = 0  # 0 where the operation takes none

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    @property
    def words(self) -> str:
        return self.operation.words.format(n=self.operand)


@dataclasses.dataclass(frozen=True)
class Function:
    """A specification: what the arguments are, and the steps from them to the result."""

    kind: str  # one of KINDS
    steps: tuple[Step, ...]

    @property
    def difficulty(self) -> int:
        return len(self.steps)

    @property
    def fits(self) -> bool:
        """Whether each step takes what the one before gives."""
        kind = self.kind
        for step in self.steps:
            if step.operation.takes != kind:
                return False
            kind = step.operation.gives
        return kind != "pair"

    @property
    def question(self) -> str:
        return f"def f({PARAMETERS[self.kind]}): # {', '.join(step.words for step in self.steps)}\n"

    def value(self, arguments: tuple) -> Any:
        """What the function returns."""
        value = arguments if self.kind == "pair" else arguments[0]
        for step in self.steps:
            value = step.operation.apply(value, step.operand)
        return value

    def values(self) -> list:
        """What it returns for each of its ARGUMENTS."""
        return [self.value(arguments) for arguments in ARGUMENTS[self.kind]]

    def body(self, lines: int) -> str:
        """A function body: the first `lines` steps in lines of their own, the others in the expression returned."""
        variable = PARAMETERS[self.kind]
        written = []
        for step in self.steps[:lines]:
            expression = step.operation.code.format(v=variable, n=step.operand)
            variable = "xs" if step.operation.gives == "list" else "x"
            written.append(f" {variable} = {expression}\n")
        expression, infix = variable, False
        for step in self.steps[lines:]:
            op = step.operation
            inner = f"({expression})" if infix and op.infix else expression
            expression, infix = op.code.format(v=inner, n=step.operand), op.infix
        return "".join(written) + f" return {expression}"

    def worked_solution(self) -> str:
        """The body with a line for every step."""
        return self.body(self.difficulty)


def sample_function(rng: np.random.Generator, difficulty: int) -> Function:
    """A function whose result depends on its arguments, and on each of its steps: with one of them left out, some of
    the ARGUMENTS come out otherwise.
    """
    kind = KINDS[rng.integers(len(KINDS))]
    while True:
        function = _sample_chain(rng, kind, difficulty)
        values = function.values()
        if len({repr(v) for v in values}) >= 3 and not any(
            shorter.fits and shorter.values() == values for shorter in _without_one(function)
        ):
            return function


def _sample_chain(rng: np.random.Generator, first: str, difficulty: int) -> Function:
    kind, steps = first, []
    for _ in range(difficulty):
        names = [
            name
            for name in _FROM[kind]
            if not (steps and name == steps[-1].name) and not (name in _ONCE and any(s.name in _ONCE for s in steps))
        ]
        name = names[rng.integers(len(names))]
        steps.append(Step(name, _sample_operand(rng, OPERATIONS[name])))
        kind = OPERATIONS[name].gives
    return Function(first, tuple(steps))


def _sample_operand(rng: np.random.Generator, operation: Operation) -> int:
    return int(rng.choice(operation.operands)) if operation.operands else 0


def _without_one(function: Function) -> list[Function]:
    steps = function.steps
    return [Function(function.kind, steps[:i] + steps[i + 1 :]) for i in range(len(steps))]


def slips(function: Function, rng: np.random.Generator, first: int = 0) -> Function:
    """Another function that one might write in haste: of a step from number `first` on the operand or the operation is
    another, or the step is forgotten, or changes places with the next. Some of the ARGUMENTS come out otherwise.
    """
    steps, values = function.steps, function.values()
    while True:
        i = int(rng.integers(first, len(steps)))
        step, op = steps[i], steps[i].operation
        slip = rng.integers(4)
        if slip == 0:
            changed = (Step(step.name, _sample_operand(rng, op)),)
        elif slip == 1:
            alike = [name for name in _FROM[op.takes] if OPERATIONS[name].gives == op.gives]
            name = alike[rng.integers(len(alike))]
            operands = OPERATIONS[name].operands
            kept = step.operand if step.operand in operands else _sample_operand(rng, OPERATIONS[name])
            changed = (Step(name, kept),)
        elif slip == 2:
            changed = ()
        else:
            changed = steps[i : i + 2][::-1]
        after = i + 2 if slip == 3 else i + 1
        wrong = Function(function.kind, steps[:i] + changed + steps[after:])
        if wrong.fits and wrong.values() != values:
            return wrong


def split(
    train_size: int, eval_size: int, difficulties: tuple[int, ...], seed: int, section: str = "task"
) -> tuple[list[Function], list[Function]]:
    """Disjoint train and eval functions. The eval set depends on the seed, not on the size of the train set."""
    stream = (seed, 0xF0C7)
    evaluation = draw_distinct(sample_function, eval_size, difficulties, (*stream, 1), section=section)
    train = draw_distinct(sample_function, train_size, difficulties, (*stream, 0), frozenset(evaluation), section)
    return train, evaluation


def load(source: Source) -> tuple[list[Problem], list[Problem]]:
    """The task's problems, after a first program has run. A base model goes on with the question as it is.

    Raises:
      InputError: programs cannot be run here, or the difficulties are out of range or hold too few functions.
    """
    options, sandbox = source.options, source.sandbox
    check_difficulties(source, 1, MAX_DIFFICULTY, "steps")
    both = split(options.train_size, options.eval_size, tuple(options.difficulties), options.seed, source.section)
    sandbox.check()
    return tuple(
        [to_problem(f, source.task, options.code_reward or "all", sandbox) for f in functions] for functions in both
    )


def to_problem(function: Function, task: str, rewarded: str = "all", sandbox: Sandbox | None = None) -> CodeProblem:
    """A function to write, tested on its ARGUMENTS."""
    calls = (f"f({', '.join(map(repr, arguments))})" for arguments in ARGUMENTS[function.kind])
    return CodeProblem(
        question=function.question,
        chat=False,
        task=task,
        tests=tuple(f"assert {call} == {value!r}" for call, value in zip(calls, function.values(), strict=True)),
        names=("f",),
        prefix=function.question,
        completion=True,
        rewarded=rewarded,
        solution=function.worked_solution(),
        sandbox=sandbox or Sandbox(),
    )
