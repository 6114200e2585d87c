import copy
import random

import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.tasks.demonstrations import HASTE_FORGETS, HASTE_IS_RIGHT, WORKED_ONLY, Mixture, hasty
from rhyme_jax.tasks.functions import (
    ALPHABET,
    ARGUMENTS,
    OPERATIONS,
    Function,
    Step,
    sample_function,
    slips,
    split,
    to_problem,
)

DIFFICULTIES = (1, 2, 3, 4, 5, 8)


@pytest.fixture(scope="module")
def sampled() -> list[Function]:
    rng = np.random.default_rng(3)
    return [sample_function(rng, DIFFICULTIES[i % len(DIFFICULTIES)]) for i in range(600)]


def executed(function: Function, body: str) -> list:
    """The oracle: what Python makes of the program text, on copies of the arguments."""
    scope = {}
    exec(function.question + body, scope)
    return [scope["f"](*copy.deepcopy(arguments)) for arguments in ARGUMENTS[function.kind]]


def test_every_way_of_writing_a_function_computes_its_values(sampled):
    assert {s.name for f in sampled for s in f.steps} == set(OPERATIONS)
    for function in sampled:
        for lines in range(function.difficulty + 1):
            assert executed(function, function.body(lines)) == function.values(), function
        assert executed(function, function.worked_solution()) == function.values()


def test_how_chosenlook():
    keep, add, total = Step("keep_even"), Step("each_add", 3), Step("sum")
    function = Function("list", (keep, add, total, Step("subtract", 4), Step("multiply", 2)))
    assert function.question == "def f(xs): # keep even, each plus 3, sum, minus 4, times 2\n"
    assert function.worked_solution() == (
        " xs = [x for x in xs if x%2==0]\n xs = [x+3 for x in xs]\n x = sum(xs)\n x = x-4\n x = x*2\n return x"
    )
    assert function.body(0) == " return (sum([x+3 for x in [x for x in xs if x%2==0]])-4)*2"
    assert function.body(3).endswith("\n x = sum(xs)\n return (x-4)*2")
    assert function.value(([4, 5, -6],)) == ((4 + 3 + -6 + 3) - 4) * 2
    pair = Function("pair", (Step("larger"), Step("at_most", 9)))
    assert pair.question == "def f(a, b): # larger, at most 9\n"
    assert pair.worked_solution() == " x = max(a, b)\n x = min(x, 9)\n return x"


def test_the_alphabet_is_what_is_written(sampled):
    texts = [t for f in sampled for t in (f.question, *(f.body(lines) for lines in range(f.difficulty + 1)))]
    assert set("".join(texts)) == set(ALPHABET) and len(set(ALPHABET)) == len(ALPHABET)
    assert not any(p.isupper() for p in ALPHABET)
    assert all(len(f.question) < 96 and len(f.worked_solution()) < 160 for f in sampled if f.difficulty <= 5)


def test_each_step_shows_in_the_values(sampled):
    for function in sampled:
        values = executed(function, function.worked_solution())
        assert len({repr(v) for v in values}) >= 3
        for i in range(function.difficulty):
            shorter = Function(function.kind, function.steps[:i] + function.steps[i + 1 :])
            assert not shorter.fits or shorter.values() != values, function


def test_slips_are_wrong_from_the_given_step_on(sampled):
    rng, lengths = np.random.default_rng(0), set()
    for function in sampled:
        for first in {0, function.difficulty // 2, function.difficulty - 1}:
            wrong = slips(function, rng, first)
            assert wrong.steps[:first] == function.steps[:first]
            assert executed(function, wrong.body(first)) != function.values()
            lengths.add(wrong.difficulty - function.difficulty)
    assert lengths == {-1, 0}


def test_the_split_is_disjoint_and_stable():
    train, evaluation = split(100, 40, (2, 3), seed=0)
    assert (train, evaluation) == split(100, 40, (2, 3), seed=0)
    assert len(set(train) | set(evaluation)) == 140
    assert split(7, 40, (2, 3), seed=0)[1] == evaluation
    assert [sum(f.difficulty == d for f in train) for d in (2, 3)] == [50, 50]
    # The first problems of an evaluation set are those of a smaller one: what pretraining leaves out covers both.
    assert set(split(1, 20, (2, 3), seed=0)[1]) < set(evaluation)
    other = split(100, 40, (2, 3), seed=1)
    assert len(set(other[0]) & set(train)) < 20 and not set(other[1]) & set(split(100, 40, (2, 3), seed=0)[1])
    # Neighbouring seeds share no stream: what one trains on is not what the next is evaluated on.
    assert len(set(split(500, 40, (3,), seed=1)[0]) & set(split(1, 500, (3,), seed=0)[1])) < 50


def test_too_few_different_functions():
    with pytest.raises(InputError, match="too few different problems of difficulty 1; ask for fewer"):
        split(1000, 10, (1,), seed=0)


def test_hasty_answers_are_mostly_wrong_in_the_same_way(sampled):
    rng = np.random.default_rng(1)
    chosen = [f for f in sampled if 2 <= f.difficulty <= 5]
    right = forgotten = 0
    for function in chosen:
        shown = random.Random(repr(function)).choice((0, function.difficulty // 2))
        answer = hasty(function, shown, rng)
        assert answer.count("\n") == shown
        assert answer.splitlines()[:shown] == function.worked_solution().splitlines()[:shown]
        right += executed(function, answer) == function.values()
        forgotten += answer == Function(function.kind, function.steps[:-1]).body(shown)
    assert right / len(chosen) == pytest.approx(HASTE_IS_RIGHT, abs=0.04)
    # Among the other slips are such, too.
    assert forgotten / len(chosen) == pytest.approx((1 - HASTE_IS_RIGHT) * HASTE_FORGETS, abs=0.08)


def test_the_mixture_has_its_styles_in_their_shares(sampled):
    rng, mixture = np.random.default_rng(2), Mixture(worked=0.25, sloppy=0.25)
    chosen = [f for f in sampled if f.difficulty == 4] * 4
    lines = [mixture.response(f, rng).count("\n") for f in chosen]
    # Slips at difficulty 4 keep the number of lines: 4 of a worked solution, 2, or none.
    assert [lines.count(n) / len(lines) for n in (4, 2, 0)] == pytest.approx([0.25, 0.25, 0.5], abs=0.07)
    assert all(WORKED_ONLY.response(f, rng) == f.worked_solution() for f in chosen[:20])
    with pytest.raises(TypeError, match="no demonstrations for str"):
        hasty("text", 0, rng)


def test_problems_are_completed_and_tested_by_assertions(sampled):
    for function in sampled[:100]:
        problem = to_problem(function, "functions")
        (program,) = problem.program(problem.reference())
        assert program == function.question + function.worked_solution()
        scope = {}
        exec(program, scope)
        for test in problem.tests:
            exec(test, scope)
        assert len(problem.tests) == len(ARGUMENTS[function.kind])
        (wrong,) = problem.program(slips(function, np.random.default_rng(0)).body(0))
        with pytest.raises(AssertionError):
            exec("\n".join([wrong, *problem.tests]), {})
