"""Moves: only from who has to who is free, only where they pay, and residual life as the law has it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.migration import Live, moves, outliers, remaining_tokens
from rhyme_jax.history.lengths import lognormal

COST = SliceCost(np.array([0.0, 1.0, 1.1, 1.2, 1.3]), prefill=0.01)  # four rows


def live(rows, expected=100.0, upper=150.0, prompt=10):
    """Of rows (slice, elapsed), with elapsed None where the rollout waits; a group for each, rollouts from 10."""
    slices, elapsed = zip(*rows, strict=True)
    n = len(rows)
    return Live(
        rollout_N=np.arange(10, 10 + n, dtype=np.int32),
        slice_N=np.array(slices, np.int32),
        elapsed_N=np.array([0 if e is None else e for e in elapsed]),
        waiting_N=np.array([e is None for e in elapsed]),
        expected_N=np.full(n, float(expected)),
        upper_N=np.full(n, float(upper)),
        prompt_N=np.full(n, prompt),
        group_N=np.arange(n, dtype=np.int32),
    )


def test_outliers_by_hand():
    table = [  # group, elapsed, waits, finished share of its group, outlier
        (0, 151, False, 0.9, True),
        (0, 150, False, 0.9, False),  # not past its threshold
        (0, 0, True, 0.9, False),  # not even running
        (1, 900, False, 0.89, False),  # among too many
        (1, 900, False, 0.89, False),
        (2, 900, False, 0.75, True),  # the last of four
    ]
    group, elapsed, waiting, share, want = (np.array(column) for column in zip(*table, strict=True))
    rollouts = dataclasses.replace(live([(0, 1)] * 6), group_N=group, elapsed_N=elapsed, waiting_N=waiting)
    assert outliers(rollouts, share).tolist() == want.tolist()


@pytest.mark.parametrize(("mean", "upper"), [(100.0, 160.0), (1000.0, 1800.0), (300.0, 320.0)])
def test_remaining_tokens_are_those_of_draws_that_got_so_far(mean, upper):
    mu, sigma = lognormal(mean, upper)
    length = np.exp(mu + sigma * np.random.default_rng(0).standard_normal(400_000))
    assert np.mean(length) == pytest.approx(mean, rel=0.01)
    assert np.mean(length <= upper) == pytest.approx(0.9, abs=0.005)
    for elapsed in np.quantile(length, [0.0, 0.1, 0.5, 0.9, 0.99]):
        drawn = np.mean(length[length > elapsed] - elapsed)
        assert remaining_tokens(elapsed, mean, upper) == pytest.approx(drawn, rel=0.05)


@given(st.floats(0, 1e6), st.floats(0, 1e5), st.floats(0, 1e6))
def test_remaining_tokens_are_numbers_of_at_least_one(elapsed, mean, upper):
    assert 1.0 <= float(remaining_tokens(elapsed, mean, upper)) < np.inf


def test_remaining_tokens_before_the_start_are_the_forecast():
    assert remaining_tokens(np.zeros(2), np.array([100.0, 7.0]), np.array([150.0, 9.0])) == pytest.approx([100, 7])


def test_what_waits_goes_first_and_from_the_end_of_the_queue():
    rollouts = live([(0, 50)] * 4 + [(0, None)] * 4)
    assert moves(rollouts, [1], np.array([250.0, 0.0]), COST, limit=1) == [(17, 1)]
    every = moves(rollouts, [1], np.array([250.0, 0.0]), COST)
    assert [rollout for rollout, _ in every] == [17, 16, 15, 14][: len(every)] and len(every) >= 2
    assert {to for _, to in every} == {1}


def test_waiting_rollouts_spread_over_the_free_slices():
    rollouts = live([(0, 50)] * 4 + [(0, None)] * 6)
    result = moves(rollouts, [2, 1], np.array([400.0, 0.0, 0.0]), COST)
    assert {to for _, to in result} == {1, 2}


def test_a_running_outlier_moves_where_the_batch_it_leaves_is_slow():
    steep = SliceCost(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), prefill=0.01)
    rollouts = live([(0, 300), (0, 400), (0, 300), (0, 300)])
    may = np.array([False, True, True, False])
    seconds = np.array([140.0, 0.0])
    first = moves(rollouts, [1], seconds, steep, movable_N=may)
    assert first and first[0] == (11, 1)  # the one that will run longest
    assert moves(rollouts, [1], seconds, steep) == []  # none may
    dear = dataclasses.replace(steep, prefill=100.0)
    assert moves(rollouts, [1], seconds, dear, movable_N=may) == []  # 410 tokens to prefill
    flat = SliceCost(np.array([0.0, 1.0, 1.0, 1.0, 1.0]))
    assert moves(rollouts, [1], seconds, flat, movable_N=may) == []  # alone it is no faster


def test_force_moves_one_running_rollout_to_each_free_slice():
    rollouts = live([(0, 50), (0, 60), (0, None), (1, 10)])
    result = moves(rollouts, [2, 3], np.array([100.0, 90.0, 0.0, 0.0]), COST, force=True)
    assert [to for _, to in result] == [2, 3]
    assert {rollout for rollout, _ in result} == {10, 11}  # slice 1 has only one
    assert moves(live([(0, 50)]), [1], np.array([10.0, 0.0]), COST, force=True) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_moves_are_sound(data):
    slices = data.draw(st.integers(2, 5))
    free = data.draw(st.lists(st.integers(0, slices - 1), unique=True, max_size=slices - 1))
    busy = [s for s in range(slices) if s not in free]
    rows = data.draw(
        st.lists(st.tuples(st.sampled_from(busy), st.one_of(st.none(), st.integers(0, 500))), min_size=1, max_size=12)
    )
    rollouts = live(rows)
    seconds = np.array(data.draw(st.lists(st.floats(0, 1000), min_size=slices, max_size=slices)))
    may = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    limit, force = data.draw(st.one_of(st.none(), st.integers(0, 4))), data.draw(st.booleans())
    result = moves(rollouts, free, seconds, COST, may, limit, force)
    assert result == moves(rollouts, free, seconds, COST, may, limit, force)
    assert len({rollout for rollout, _ in result}) == len(result) <= (len(rows) if limit is None else limit)
    where = dict(zip(rollouts.rollout_N.tolist(), rollouts.slice_N.tolist(), strict=True))
    occupied = set(where.values())
    for rollout, to in result:
        assert to in free and where[rollout] in busy
        n = rollout - 10
        assert force or rollouts.waiting_N[n] or may[n]
        where[rollout] = to
    assert occupied <= set(where.values())
