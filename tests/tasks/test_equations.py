"""Linear equations: made from their solutions, and graded by putting answers into them."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.tasks.equations import Equation, EquationProblem, System, parse_values, sample_system

HALF = Fraction(1, 2)
EXTRACTORS = ("hashes", "boxed", "phrase")


def problem(system: System) -> EquationProblem:
    return EquationProblem(system.question, True, "equations", system, EXTRACTORS)


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ((1, 0, 5), (0, 0, 7), "x + 5 = 7"),
        ((-1, 0, -5), (3, 0, 0), "-x - 5 = 3x"),
        ((2, -1, 0), (0, 0, -3), "2x - y = -3"),
        ((0, -4, 1), (0, 0, 0), "-4y + 1 = 0"),
        ((1, 1, 1), (0, 0, 1), "x + y + 1 = 1"),
    ],
)
def test_equations_as_text(left, right, text):
    assert str(Equation(left, right)) == text


@pytest.mark.parametrize("difficulty", range(1, 7))
def test_systems(difficulty):
    rng = np.random.default_rng(difficulty)
    for _ in range(60):
        system = sample_system(rng, difficulty)
        assert len(system.equations) == len(system.solution) == (1 if difficulty < 5 else 2)
        whole = all(value.denominator == 1 for value in system.solution)
        assert whole == (difficulty not in (3, 6))
        x, y = (*system.solution, Fraction(0))[:2]
        a = np.array([[p - q for p, q in zip(e.left, e.right, strict=True)] for e in system.equations])
        assert all(e.holds(x, y) for e in system.equations)
        if difficulty < 5:  # by hand: (a - c) x = d - b
            assert a[0, 0] and Fraction(int(-a[0, 2]), int(a[0, 0])) == x
            assert (a[0, 0] == 1) == (difficulty == 1) or difficulty == 4
            assert (system.equations[0].right[0] != 0) == (difficulty == 4)
        else:  # Cramer's rule
            (p, q, r), (s, t, u) = a.tolist()
            determinant = p * t - q * s
            assert determinant
            assert (x, y) == (Fraction(q * u - r * t, determinant), Fraction(r * s - p * u, determinant))
        made = problem(system)
        assert made.reward(made.reference()) == 1
        assert made.reward(f"#### {system.answer}.") == made.reward(f"so \\boxed{{{system.answer}}}") == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1), st.integers(1, 6), st.fractions(max_denominator=12), st.fractions(max_denominator=12))
def test_wrong_values_get_nothing(seed, difficulty, dx, dy):
    system = sample_system(np.random.default_rng(seed), difficulty)
    wrong = [v + d for v, d in zip(system.solution, (dx, dy), strict=False)]
    answer = str(wrong[0]) if len(wrong) == 1 else f"({wrong[0]}, {wrong[1]})"
    assert problem(system).reward(f"#### {answer}") == (tuple(wrong) == system.solution)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("3", 3), ("x = 3", 3), ("x=-3", -3), ("+3", 3), ("\u22123", -3), ("0.5", HALF), (".5", HALF),
        ("-1/2", -HALF), ("2/4", HALF),
        ("-\\frac{1}{2}", -HALF), ("\\dfrac{2}{4}", HALF), ("$\\frac{1}{2}$", HALF),
        ("**3**", 3), ("3.", 3), ("3.0", 3), (" 1 / 2 ", HALF),
    ],
)  # fmt: skip
def test_values(answer, value):
    assert parse_values(answer, 1) == (value,)


@pytest.mark.parametrize(
    "answer",
    ["", "x", "x=", "y=3", "3 or 4", "1/0", "1//2", "1/2/3", "1/-2", "--3", "1e3", "0x3", "½", "3x", "x=x", "2+1",
     "nan", "inf", "1_0", "\\frac{1}{2", "\\frac{}{}", "\\frac{1}{0}", "\\frac{1/2}{3}", "(3)", "(3, 4)", "1" * 201],
)  # fmt: skip
def test_what_is_no_value(answer):
    assert parse_values(answer, 1) is None


@pytest.mark.parametrize(
    "answer",
    ["(3,-1/2)", "( 3 , -0.5 )", "x = 3, y = -1/2", "x=3;y=-1/2", "x = 3 and y = -1/2", "x = 3, and y = -1/2",
     "\\left(3, -\\frac{1}{2}\\right)", "$(3, -1/2)$"],
)  # fmt: skip
def test_pairs(answer):
    assert parse_values(answer, 2) == (3, -HALF)


@pytest.mark.parametrize(
    "answer", ["3", "3, -1/2", "(3)", "(3,)", "(3, -1/2, 0)", "y = 3, x = 1", "x = 3", "x=3 y=1", "(3, x)", "((3, 1))"]
)
def test_what_is_no_pair(answer):
    assert parse_values(answer, 2) is None


@pytest.mark.parametrize("text", ["9" * 10**6, "\\frac{" * 10**5, "x=" * 10**5, "(" * 10**6, "1," * 10**5, " " * 10**6])
def test_hostile_text_costs_no_time(text):
    made = problem(sample_system(np.random.default_rng(0), 5))
    start = time.process_time()
    for response in (text, f"#### {text}", f"\\boxed{{{text}}}"):
        assert made.reward(response) == 0
    assert parse_values(text[:200], 2) is None
    assert time.process_time() - start < 2
