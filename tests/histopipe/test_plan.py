"""Plans: every rollout once, whatever the layout; the baseline by hand; and gains where lengths are known."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe import plan
from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.histopipe.plan import LAYOUTS, MODES, Work, make_plan, score

COST = SliceCost.roofline(14e9, 131e3, 3.3e12, 14e9, 0.9e15, 2e-4, max_rows=32)
WHOLE = ("equal", "paper", "contiguous", "longest_group")  # layouts that keep groups on one slice


def work_of(means, samples=1, sigma=0.4, **fields):
    mean = np.array(means, np.float64)
    upper = mean * np.exp(1.2815515655 * sigma - sigma**2 / 2)
    return Work(mean, upper, np.full(len(mean), 20), samples, **fields)


def random_work(groups=64, samples=8, seed=0, sigma=0.4, log_mean=7.0, **fields):
    return work_of(
        np.exp(log_mean + 0.9 * np.random.default_rng(seed).standard_normal(groups)), samples, sigma, **fields
    )


def draw(work, seed, sigma=0.4):
    """Lengths of all rollouts, by the law that was forecast."""
    normal = np.random.default_rng(seed).standard_normal((work.groups, work.samples))
    lengths = work.mean_G[:, None] * np.exp(sigma * normal - sigma**2 / 2)
    return np.minimum(lengths, work.longest).ravel()


def true_seconds(plan, lengths):
    start = np.concatenate([[0], np.cumsum([len(queue) for queue in plan.rollouts_by_slice])])
    return completion(COST, lengths[np.concatenate(plan.rollouts_by_slice)], start)


@pytest.mark.parametrize(
    ("groups", "slices", "layout"),
    [
        (1, 1, [[0]]),
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (3, 3, [[0], [1], [2]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (8, 3, [[0, 1], [2, 3, 4], [5, 6, 7]]),
    ],
)
def test_sync_is_the_equal_split_in_the_order_of_the_data(groups, slices, layout):
    means = 10.0 + np.arange(groups) * 7 % 5
    plan = make_plan(work_of(means, samples=2), slices, COST, "sync")
    assert [queue.tolist() for queue in plan.rollouts_by_slice] == [
        [n for g in share for n in (2 * g, 2 * g + 1)] for share in layout
    ]
    assert (plan.layout, list(plan.scores), plan.slices) == ("equal", ["equal"], slices)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rollout_once(data):
    groups, samples = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    slices = data.draw(st.integers(1, groups))
    means = data.draw(st.lists(st.floats(0, 5000), min_size=groups, max_size=groups))
    work = work_of(means, samples, split_cost=data.draw(st.sampled_from([0.0, 0.5])))
    cost = dataclasses.replace(COST, seconds_B=COST.seconds_B[: data.draw(st.integers(2, 33))])
    busy = np.array(data.draw(st.lists(st.floats(0, 100), min_size=slices, max_size=slices)))
    mode, layout = data.draw(st.sampled_from(MODES)), data.draw(st.sampled_from(LAYOUTS))
    arguments = (work, slices, cost, mode, layout, data.draw(st.integers(0, 3)), busy)
    plan, again = make_plan(*arguments), make_plan(*arguments)
    assert plan.slices == slices == len(plan.seconds_by_slice)
    assert sorted(np.concatenate(plan.rollouts_by_slice).tolist()) == list(range(groups * samples))
    assert all(queue.dtype == np.int32 for queue in plan.rollouts_by_slice)
    assert np.isfinite(plan.seconds_by_slice).all()
    assert plan.scores[plan.layout] == min(plan.scores.values())
    for queue, same in zip(plan.rollouts_by_slice, again.rollouts_by_slice, strict=True):
        assert queue.tolist() == same.tolist()
        changes = np.count_nonzero(np.diff(queue // samples))
        assert changes == max(0, len(set((queue // samples).tolist())) - 1)  # a group's rollouts are side by side
    if plan.layout in WHOLE:
        where = np.empty(groups * samples, int)
        for s, queue in enumerate(plan.rollouts_by_slice):
            where[queue] = s
        assert (where.reshape(groups, samples) == where[::samples, None]).all()


@pytest.mark.parametrize("mode", ["balanced", "cross_step"])
def test_best_is_the_best_of_all_and_the_equal_split_is_among_them(mode):
    busy = np.arange(8.0)
    best = make_plan(random_work(), 8, COST, mode, busy_S=busy)
    assert "equal" in best.scores and len(best.scores) >= 6
    for layout in best.scores:
        alone = make_plan(random_work(), 8, COST, mode, layout, busy_S=busy)
        assert (alone.layout, alone.scores[layout]) == (layout, best.scores[layout])
        assert alone.scores[layout] >= best.scores[best.layout]


def test_predicted_seconds_are_those_of_draws():
    work = random_work()
    plan = make_plan(work, 8, COST, "balanced", "longest_group")
    drawn = np.mean([true_seconds(plan, draw(work, seed)) for seed in range(100)], axis=0)
    assert plan.seconds_by_slice == pytest.approx(drawn, rel=0.25)  # eight scenarios
    assert plan.scores["longest_group"] >= plan.seconds_by_slice.max()


def test_best_gains_on_lengths_it_has_not_seen():
    work = random_work(groups=128, samples=16, log_mean=8.0, longest=16384.0)
    plans = [make_plan(work, 32, COST, "balanced", layout) for layout in ("equal", "best")]
    equal, best = (np.mean([true_seconds(plan, draw(work, seed)).max() for seed in range(10)]) for plan in plans)
    assert equal / best > 1.3


def test_useless_forecasts_do_no_harm():
    work = work_of(np.full(128, 1000.0), 8)
    plans = [make_plan(work, 32, COST, "balanced", layout) for layout in ("equal", "best")]
    equal, best = (np.mean([true_seconds(plan, draw(work, seed)).max() for seed in range(20)]) for plan in plans)
    assert best < 1.02 * equal


def test_groups_stay_whole_where_spreading_them_is_dear():
    work = random_work(split_cost=3.0)
    assert make_plan(work, 8, COST, "balanced").layout in WHOLE
    free = make_plan(dataclasses.replace(work, split_cost=0.0), 8, COST, "balanced", "dealt")
    dear = make_plan(work, 8, COST, "balanced", "dealt")
    assert (dear.seconds_by_slice > 2.5 * free.seconds_by_slice).all()


def test_what_is_busy_gets_less():
    busy = np.zeros(8)
    busy[3] = 1.5 * make_plan(random_work(), 8, COST, "balanced").seconds_by_slice.mean()
    for layout in ("contiguous", "longest_group", "longest_rollout"):
        plan = make_plan(random_work(), 8, COST, "balanced", layout, busy_S=busy)
        assert plan.seconds_by_slice.argmin() == 3


def test_the_papers_line_turns_about_with_the_step():
    work = random_work(512)
    even, odd = (make_plan(work, 8, COST, "cross_step", "paper", step) for step in (4, 5))
    assert [q.tolist() for q in even.rollouts_by_slice] == [q.tolist() for q in odd.rollouts_by_slice[::-1]]
    means = [np.mean(work.mean_G[queue // 8]) for queue in odd.rollouts_by_slice]
    assert means == sorted(means)  # odd: short to long
    assert len(odd.rollouts_by_slice[0]) > 5 * len(odd.rollouts_by_slice[-1])  # long groups have more slices
    seconds = odd.seconds_by_slice
    line = np.polyval(np.polyfit(range(8), seconds, 1), range(8))
    assert seconds == pytest.approx(line, abs=0.15 * seconds.max())
    both = seconds + even.seconds_by_slice
    assert np.ptp(both) < 0.25 * np.ptp(seconds)  # a long turn meets a short one


def test_the_papers_line_is_flat_in_a_balanced_step():
    level = make_plan(random_work(256), 8, COST, "balanced", "paper").seconds_by_slice
    equal = make_plan(random_work(256), 8, COST, "balanced", "equal").seconds_by_slice
    assert level.max() / level.mean() < equal.max() / equal.mean()


def test_scores_by_hand():
    seconds, busy = np.array([4.0, 8.0]), np.array([1.0, 2.0])
    assert score("balanced", seconds, busy) == 10.0
    assert score("cross_step", seconds, busy) == 7.5  # the mean; the last is less than half a step (3) later
    assert score("cross_step", np.array([1.0, 9.0]), busy) == 8.5  # 11, less half a step of 5
    assert score("cross_step", np.array([1.0, 1.0, 16.0]), np.zeros(3)) == 13.0  # 16, less half a step of 6


def test_in_a_scenario_a_few_groups_are_not_what_was_forecast():
    work = random_work(groups=2000, samples=4, sigma=0.05)
    task = plan._Task(work, 8, COST, "balanced", 0, np.zeros(8))
    for lengths in task.scenarios:
        off = np.abs(np.log(lengths.reshape(2000, 4).mean(axis=1) / work.mean_G)) > 0.3
        assert 0.5 * plan.SURPRISES < off.mean() < 1.5 * plan.SURPRISES


@pytest.mark.parametrize(("groups", "slices"), [(4, 0), (4, -1), (4, 5), (0, 1), (0, 0)])
def test_impossible_slices_are_refused(groups, slices):
    message = rf"^slices={slices}: must be from 1 to the {groups} prompts of a step$"
    with pytest.raises(InputError, match=message):
        make_plan(work_of(np.ones(groups)), slices, COST, "sync")


def test_unknown_names_are_refused_with_those_there_are():
    work = work_of([1.0, 2.0])
    with pytest.raises(InputError, match=r"^mode='fast': must be one of sync, balanced, cross_step$"):
        make_plan(work, 1, COST, "fast")
    with pytest.raises(InputError, match=r"^layout='odd': must be one of best, equal, paper, "):
        make_plan(work, 1, COST, "balanced", "odd")


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="one entry for each prompt"):
        Work(np.ones(3), np.ones(2), np.ones(3), 1)
    with pytest.raises(ValueError, match="finite"):
        work_of([1.0, np.nan])
    with pytest.raises(ValueError, match="busy_S"):
        make_plan(work_of([1.0, 2.0]), 2, COST, "balanced", busy_S=np.zeros(3))
