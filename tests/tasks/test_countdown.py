"""Countdown: the checker against Python's own arithmetic, what it refuses, and that no text can stall it."""

import ast
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.tasks import countdown
from rhyme_jax.tasks.countdown import CountdownProblem, evaluate, makes, sample_puzzle, tokenize

GIVEN = ((2, 3, 7), 13)


def value(expression: str) -> Fraction | None:
    """The slow oracle: Python's parser, and fractions."""

    def work_out(node) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        a, b = work_out(node.left), work_out(node.right)
        return {ast.Add: a.__add__, ast.Sub: a.__sub__, ast.Mult: a.__mul__, ast.Div: a.__truediv__}[type(node.op)](b)

    try:
        return work_out(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return None


EXPRESSIONS = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " * "]), inner).map("".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_values_are_those_of_python(expression):
    assert evaluate(tokenize(expression)) == value(expression)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*"0123456789+-*/() ", "12", "x", "**", "//", "."]), max_size=12).map("".join))
def test_what_is_no_expression(text):
    """Any text that is accepted is one to Python, too, and has the same value there."""
    tokens = tokenize(text)
    found = None if tokens is None else evaluate(tokens)
    if found is not None:
        assert found == value("".join(str(int(t)) if t.isdigit() else t for t in tokens))


@pytest.mark.parametrize(
    "answer",
    [
        "2*3+7", "7+3*2", "(2*3)+7", "((2)*(3))+(7)", " 7 + 2 * 3 ", "2*3+7=13", "2*3+7 = 13",
        "2 \u00d7 3 + 7", "2 \u00b7 3 + 7",
        "$2 \\times 3 + 7$", "2\\cdot3+7", "\\left(2*3\\right)+7", "**2*3+7**", "2*3+7.",
    ],
)  # fmt: skip
def test_right_answers(answer):
    assert makes(answer, *GIVEN)


@pytest.mark.parametrize(
    "answer",
    [
        "", "13", "2*3+8", "2*3+7+0", "2*3+7*1", "2+3+7", "23-7", "7*2-3+2", "2*3", "10+3", "2*3+7=14", "2*3+7=13=13",
        "2*3+7=", "=13", "2*3+", "*2*3+7*(", "2 3 7", "2*(3+7", "2*3)+7", "2*3+7)", "()2*3+7", "2(3)+7", "-2*-3+7",
        "+7+2*3", "7+2**3", "7+2//3", "2*3+7;", "x=2*3+7", "2*3+7 # 13", "int(2*3+7)", "2.0*3+7", "2e0*3+7",
        "\uff12*3+7", "7+6", ".2*3+7",
        "__import__('os')", "7*2-3/3", "7/(2-2)+3",
    ],
)  # fmt: skip
def test_wrong_answers(answer):
    assert not makes(answer, *GIVEN)


def test_each_number_counts_as_often_as_it_is_given():
    assert makes("(5+5)*5", (5, 5, 5), 50) and makes("5*(5+5)", (5, 5, 5), 50)
    assert not makes("5*5+5*5", (5, 5, 5), 50) and not makes("5*10", (5, 5, 5), 50)
    assert makes("(1/3+2)*6", (1, 2, 3, 6), 14)  # exact, where floats would not be
    assert not makes("1/(3-3)", (1, 3, 3), 0)


HOSTILE = {
    "parentheses": "(" * 10**6 + "2" + ")" * 10**6,
    "as deep as the length allows": "(" * 99 + "2" + ")" * 99,
    "digits": "9" * 10**6,
    "digits within the length": "9" * 199,
    "products": "*".join(["99999999"] * 22),
    "operators": "2" + "+" * 10**6,
    "spaces": " " * 10**6,
    "a tower": "9**9**9**9",
    "braces": "\\left(" * 10**5,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_costs_no_time(name):
    problem = CountdownProblem("?", True, "countdown", *GIVEN, "2*3+7", ("hashes", "boxed", "phrase"))
    start = time.process_time()
    for response in (HOSTILE[name], f"#### {HOSTILE[name]}", f"\\boxed{{{HOSTILE[name]}}}"):
        assert problem.reward(response) == 0
    assert not makes(HOSTILE[name], (2,), 2)
    assert time.process_time() - start < 2


def test_nesting_is_bounded():
    deep = countdown.MAX_DEPTH
    assert makes("(" * deep + "2" + ")" * deep, (2,), 2)
    assert not makes("(" * (deep + 1) + "2" + ")" * (deep + 1), (2,), 2)


@pytest.mark.parametrize("difficulty", range(2, 7))
def test_puzzles(difficulty):
    rng = np.random.default_rng(difficulty)
    for _ in range(30):
        puzzle = sample_puzzle(rng, difficulty)
        assert len(puzzle.numbers) == difficulty and puzzle.numbers == tuple(sorted(puzzle.numbers))
        assert 1 <= puzzle.target <= 999 and puzzle.target not in puzzle.numbers
        assert max(puzzle.numbers) <= (20 if difficulty <= 3 else 99)
        assert value(puzzle.solution) == puzzle.target and makes(puzzle.solution, puzzle.numbers, puzzle.target)
        assert len(puzzle.solution) < 50
        assert not makes(puzzle.solution, puzzle.numbers, puzzle.target + 1)
        assert not makes(f"{puzzle.solution}+{puzzle.numbers[0]}-{puzzle.numbers[0]}", puzzle.numbers, puzzle.target)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31 - 1), st.integers(2, 6), st.data())
def test_another_operator_gets_nothing_unless_it_is_right_too(seed, difficulty, data):
    puzzle = sample_puzzle(np.random.default_rng(seed), difficulty)
    places = [i for i, c in enumerate(puzzle.solution) if c in "+-*/"]
    place = data.draw(st.sampled_from(places))
    changed = puzzle.solution[:place] + data.draw(st.sampled_from("+-*/")) + puzzle.solution[place + 1 :]
    assert makes(changed, puzzle.numbers, puzzle.target) == (value(changed) == puzzle.target)
