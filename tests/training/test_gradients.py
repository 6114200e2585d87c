"""The stream of gradients: in which order groups are learned from, whenever their grades come."""

import types
from concurrent.futures import Future

import numpy as np
import pytest

from rhyme_jax.grpo.advantages import AdvantageConfig, batch_advantages
from rhyme_jax.grpo.learner import Batch
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.training import gradients
from rhyme_jax.training.gradients import GradientStream, rows_of_updates, update_policy

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


# --- updates --------------------------------------------------------------------------------------------------

ROWS, SLOTS = 6, 3
GRPO, GROUP_ADVANTAGES = LossConfig(), AdvantageConfig()


class Recorder:
    """A learner whose policy is a number: an update adds one, and scores are the policy's number."""

    def __init__(self, loss):
        self.loss, self.seen = loss, []

    def score(self, params, batch):
        return np.full(batch.log_prob.shape, params, np.float32)

    def update(self, state, batch, reference, proximal):
        self.seen.append((batch, reference, proximal))
        return types.SimpleNamespace(params=state.params + 1), {"kl": -1.0, "rollout_gap": len(self.seen)}


def update(loss=GRPO, advantages=GROUP_ADVANTAGES, reference=None, runs_ahead=False, stale=False, **parts):
    """(what a learner saw, the metrics) of updates on a batch whose row n has the token n."""
    of_row = np.arange(ROWS, dtype=np.int32)
    batch = Batch(
        tokens=of_row[:, None],
        prompt_length=of_row + 1,
        response_length=of_row % SLOTS + 1,
        log_prob=np.full((ROWS, SLOTS), 2, np.float32),
        advantage=of_row.astype(np.float32),
        valid=of_row != 1,
        stale=np.full(ROWS, stale),
    )
    learner, state = Recorder(loss), types.SimpleNamespace(params=7)
    parts = rows_of_updates(ROWS, **{"passes": 1, "minibatches": 1, "key": (0, 0)} | parts)
    _, metrics = update_policy(learner, state, batch, parts, advantages, reference, runs_ahead, None)
    return batch, learner.seen, metrics


def test_rows_of_updates():
    assert rows_of_updates(8, passes=3, minibatches=1, key=(0, 0)) == [None] * 3
    parts = rows_of_updates(8, passes=2, minibatches=4, key=(1, 2))
    assert [len(p) for p in parts] == [2] * 8
    first, second = np.concatenate(parts[:4]), np.concatenate(parts[4:])
    assert sorted(first) == sorted(second) == list(range(8)) and (first != second).any()
    for key, same in (((1, 2), True), ((1, 3), False), ((2, 2), False)):
        again = np.concatenate(rows_of_updates(8, passes=1, minibatches=4, key=key))
        assert (again == first).all() == same
    # A batch that is closed with fewer rows (cross_step) still gives each of them once.
    assert sorted(np.concatenate(rows_of_updates(3, 1, 4, (0, 0)))) == [0, 1, 2]


def test_minibatches_carry_their_own_rows():
    """The second and later updates too are judged by the policy before the first one."""
    loss = LossConfig(behaviour="recomputed", kl_coef=0.1)
    batch, seen, metrics = update(loss, reference=3, passes=2, minibatches=3)
    assert len(seen) == 6 and metrics["rollout_gap"] == 1
    for part, reference, proximal in seen:
        rows = part.tokens[:, 0]
        np.testing.assert_array_equal(part.advantage, batch.advantage[rows])
        np.testing.assert_array_equal(part.valid, batch.valid[rows])
        assert reference.shape == proximal.shape == (2, SLOTS) and (reference == 3).all() and (proximal == 7).all()


@pytest.mark.parametrize(
    ("behaviour", "runs_ahead", "stale", "passes", "want"),
    [
        ("rollout", False, False, 2, None),
        ("rollout", True, False, 2, 0),  # an array that nobody looks at
        ("rollout", True, True, 2, 7),
        ("rollout", True, True, 1, None),  # exact at the first update
        ("corrected", False, False, 1, None),
        ("corrected", False, False, 2, 7),
        ("recomputed", True, True, 2, 7),
    ],
)
def test_the_proximal_policy_is_scored_only_where_it_is_needed(behaviour, runs_ahead, stale, passes, want):
    _, seen, _ = update(LossConfig(behaviour=behaviour), runs_ahead=runs_ahead, stale=stale, passes=passes)
    for _, _, proximal in seen:
        assert (proximal is None) if want is None else (proximal == want).all()


def test_advantages_that_need_the_whole_batch_are_made_once():
    config = AdvantageConfig("none", "batch", kl_coef=0.5)
    batch, seen, metrics = update(advantages=config, reference=1.5, minibatches=2)
    mask = (np.arange(SLOTS) < batch.response_length[:, None]) & batch.valid[:, None]
    want = batch_advantages(config, batch.advantage, mask, np.full(mask.shape, 0.5, np.float32))
    for part, reference, _ in seen:
        np.testing.assert_array_equal(part.advantage, want[part.tokens[:, 0]])
        assert reference is None, "the penalty is in the reward"
    assert metrics["kl"] == pytest.approx(0.5)  # 2 - 1.5 at every token
