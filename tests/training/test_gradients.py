"""The stream of gradients: in which order groups are learned from, whenever their grades come."""

import types
from concurrent.futures import Future

import numpy as np
import pytest

from rhyme_jax.grpo.learner import Batch
from rhyme_jax.training import gradients
from rhyme_jax.training.gradients import GradientStream

GROUP = 2  # rollouts of a group


class Learner:
    micro_rows = 3

    def __init__(self):
        self.pieces = []

    def accumulate(self, state, sums, rows, log_prob):
        assert log_prob is None
        self.pieces.append(rows.tokens[:, 0].tolist())
        return (sums or 0) + len(rows.tokens)


def source(step, groups, deferred=()):
    """A step's rollouts, all finished and none graded; its groups in the order in which they were finished."""
    flight = types.SimpleNamespace(step=step, deferred=set(deferred))
    grades = {g: (np.arange(g * GROUP, (g + 1) * GROUP), Future()) for g in groups}
    return types.SimpleNamespace(flight=flight, grades=grades, reward_N=np.zeros(20))


@pytest.fixture
def stream(monkeypatch):
    """(the stream of a step that learns from a deferred group too, its learner, its sources)."""
    before, current = source(4, [3, 0, 1], deferred=[1]), source(5, [2, 0, 1])
    monkeypatch.setattr(gradients, "graded", lambda source, groups: (source.flight.step, *groups))
    learner = Learner()

    def batch(graded, step):
        assert step == 5
        of_row, log_prob = np.full(GROUP, 10 * graded[0] + graded[1]), np.zeros((GROUP, 1), np.float32)
        return Batch(of_row[:, None], of_row, of_row, log_prob, of_row, of_row > 0, of_row < 50)

    made = GradientStream(learner, None, None, batch, 5, [before, current])
    return made, learner, before, current


def grade(source, *groups):
    for g in groups:
        source.grades[g][1].set_result([0.5, 1.0])


WANT = [[41, 41, 52], [52, 50, 50], [51, 51]]  # the deferred group first, then as they were finished


@pytest.mark.parametrize(
    "answers",
    [
        [("before", 1), ("current", 2), ("current", 0), ("current", 1)],
        [("current", 1), ("current", 2), ("before", 1), ("current", 0)],
        [("current", 0), ("current", 1), ("current", 2), ("before", 1)],
        [("current", 2), ("before", 1), ("current", 1), ("current", 0)],
    ],
)
def test_the_order_of_grades_does_not_matter(stream, answers):
    made, learner, before, current = stream
    for who, group in answers:
        grade({"before": before, "current": current}[who], group)
        made.flow()
    assert made.finish(rows=8) == 8
    assert learner.pieces == WANT
    np.testing.assert_array_equal(before.reward_N[2:4], [0.5, 1.0])
    assert before.reward_N[6:8].sum() == 0, "a group that the step before learned from is not looked at again"


def test_what_is_graded_flows_at_once(stream):
    made, learner, before, current = stream
    grade(before, 1)
    grade(current, 2)
    made.flow()
    assert learner.pieces == WANT[:1]
    grade(current, 1)  # finished last: waits for group 0
    made.flow()
    assert learner.pieces == WANT[:1]


def test_a_lost_row_is_noticed(stream):
    made, _, before, current = stream
    grade(before, 1)
    grade(current, 0, 1, 2)
    with pytest.raises(RuntimeError, match="8 rows were accumulated of a batch of 9"):
        made.finish(rows=9)
