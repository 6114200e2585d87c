"""Group advantages: hand-computed values, the traps of float32, and what holds for any rewards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.advantages import (
    EPSILON,
    AdvantageConfig,
    batch_advantages,
    group_advantages,
    informative_groups,
    overlong_penalty,
)

NAN = float("nan")
STD = ["group", "none"]


@pytest.mark.parametrize(
    ("rewards", "normalized", "centred"),
    [
        ([0, 1], [-1, 1], [-0.5, 0.5]),
        ([1, 0, 0, 0], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [0.75, -0.25, -0.25, -0.25]),
        ([-2, 0, 2], [-(1.5**0.5), 0, 1.5**0.5], [-2, 0, 2]),
        ([1, NAN, 0, NAN], [1, 0, -1, 0], [0.5, 0, -0.5, 0]),
        ([3, NAN, 3], [0, 0, 0], [0, 0, 0]),
        ([5, NAN], [0, 0], [0, 0]),  # one usable sample
        ([NAN, NAN], [0, 0], [0, 0]),
    ],
)
def test_by_hand(rewards, normalized, centred):
    for normalize_std, want in (("group", normalized), ("none", centred)):
        advantage, valid = group_advantages([rewards], "group", normalize_std)
        assert advantage.dtype == np.float32 and valid.dtype == bool
        np.testing.assert_allclose(advantage, [want], rtol=5e-6)  # EPSILON moves a std of 0.4 by 2.5e-6
        np.testing.assert_array_equal(valid, ~np.isnan([rewards]))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", STD)
@pytest.mark.parametrize("reward", [1.8, 0.1, 1 / 3, 0, -7.7, 1e30, 1e-30])
@pytest.mark.parametrize("samples", [1, 2, 3, 12, 1000])
def test_equal_rewards_give_exactly_zero(samples, reward, normalize_std, baseline):
    """A mean in float32 would turn twelve rewards of 1.8 into advantages of 0.19; float64 rounds too."""
    for dtype in (np.float32, np.float64):
        advantage, valid = group_advantages(np.full((2, samples), reward, dtype), baseline, normalize_std)
        assert not advantage.any() and valid.all()


@pytest.mark.parametrize(
    ("rewards", "want"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),  # each against the mean of the other three
        ([3, 1], [2, -2]),
        ([1, NAN, 0, 5], [1 - 2.5, 0, 0 - 3, 5 - 0.5]),
        ([7, NAN], [0, 0]),  # there is no other
    ],
)
def test_leave_one_out_by_hand(rewards, want):
    np.testing.assert_allclose(group_advantages([rewards], "leave_one_out", "none")[0], [want], rtol=1e-6)


@pytest.mark.parametrize("baseline", ["batch", "none"])
def test_rewards_that_no_group_is_asked_about(baseline):
    """Groups of one too."""
    advantage, valid = group_advantages([[2.5], [NAN], [-1]], baseline, "none")
    np.testing.assert_array_equal(advantage, np.array([[2.5], [0], [-1]], np.float32))
    np.testing.assert_array_equal(valid, [[True], [False], [True]])


def test_rewards_that_differ_by_rounding_only_stay_near_zero():
    advantage, _ = group_advantages([[0.1 + 0.2, 0.3, 0.3]])
    assert np.abs(advantage).max() < 1e-9


@pytest.mark.parametrize("failed", [None, NAN])
def test_a_failed_grade_masks_its_sample_only(failed):
    with_failure, valid = group_advantages([[1, failed, 0, 0], [1, 0, 1, 0]])
    np.testing.assert_array_equal(valid, [[1, 0, 1, 1], [1, 1, 1, 1]])
    without, _ = group_advantages([[1, 0, 0]])
    np.testing.assert_array_equal(with_failure[0, [0, 2, 3]], without[0])
    np.testing.assert_array_equal(with_failure[1:], group_advantages([[1, 0, 1, 0]])[0])
    assert with_failure[0, 1] == 0


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_an_infinite_reward_raises(infinite):
    with pytest.raises(ValueError, match="infinite"):
        group_advantages([[0, 1], [NAN, infinite]])


# Rewards as graders give them: to a thousandth, so that different ones are far apart next to EPSILON.
REWARD = st.integers(-5000, 5000).map(lambda n: n / 1000) | st.just(NAN)
GROUPS = hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=REWARD)


@settings(deadline=None)
@given(GROUPS, st.sampled_from(STD))
def test_the_mean_is_zero_and_the_order_is_that_of_the_rewards(reward_GC, normalize_std):
    advantage_GC, valid_GC = group_advantages(reward_GC, "group", normalize_std)
    assert np.isfinite(advantage_GC).all() and not advantage_GC[~valid_GC].any()
    for reward, advantage, valid in zip(reward_GC, advantage_GC, valid_GC, strict=True):
        if valid.any():
            assert abs(advantage[valid].mean(dtype=np.float64)) < 1e-6
            assert (np.diff(advantage[valid][np.argsort(reward[valid])]) >= 0).all()
        if normalize_std == "group" and advantage.any():
            std = np.nanstd(reward)
            assert advantage[valid].std() == pytest.approx(std / (std + EPSILON), rel=1e-5)


@settings(deadline=None)
@given(GROUPS, st.integers(-1000, 1000), st.sampled_from([0.5, 2.0, 16.0]))
def test_shifts_change_nothing_and_scale_only_what_is_not_normalized(reward_GC, shift, scale):
    for normalize_std in STD:
        advantage, valid = group_advantages(reward_GC, "group", normalize_std)
        shifted, valid_too = group_advantages(reward_GC + shift, "group", normalize_std)
        np.testing.assert_allclose(shifted, advantage, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(valid_too, valid)
    # EPSILON shows next to a std of 3e-4 (one of nine rewards is off by a thousandth), twice as much at half scale.
    tolerance = {"group": 2 * EPSILON / 3e-4, "none": 1e-6}
    for normalize_std, factor in (("group", 1), ("none", scale)):
        scaled, _ = group_advantages(reward_GC * scale, "group", normalize_std)
        want = factor * group_advantages(reward_GC, "group", normalize_std)[0]
        np.testing.assert_allclose(scaled, want, rtol=tolerance[normalize_std], atol=1e-6)


@settings(deadline=None)
@given(GROUPS)
def test_groups_do_not_mix(reward_GC):
    together = group_advantages(reward_GC)[0]
    apart = [group_advantages(group[None])[0][0] for group in reward_GC]
    np.testing.assert_array_equal(together, apart)


@settings(deadline=None)
@given(GROUPS)
def test_leave_one_out_is_the_difference_to_the_others(reward_GC):
    for rewards, advantage in zip(reward_GC, group_advantages(reward_GC, "leave_one_out", "none")[0], strict=True):
        for i in np.flatnonzero(~np.isnan(rewards)):
            others = np.delete(rewards, i)
            others = others[~np.isnan(others)]
            assert advantage[i] == pytest.approx(rewards[i] - others.mean() if others.size else 0, abs=1e-5)


# --- over the batch -------------------------------------------------------------------------------------------

MASK = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]], bool)  # three responses and one that does not count
REWARDS = np.array([2.0, -1.0, 0.5, 99.0], np.float32)
WHITENED = AdvantageConfig(baseline="none", normalize_std="batch")


def test_reinforce_takes_off_the_mean_of_the_responses():
    config = AdvantageConfig(baseline="batch", normalize_std="none")
    np.testing.assert_allclose(batch_advantages(config, REWARDS, MASK), [1.5, -1.5, 0, 0], rtol=1e-6)


def test_reinforce_pp_normalizes_over_tokens():
    """2 once, -1 three times, 0.5 twice: mean 0, variance 7.5 / 6."""
    want = np.array([2, -1, 0.5, 0]) / (1.25**0.5 + EPSILON)
    np.testing.assert_allclose(batch_advantages(WHITENED, REWARDS, MASK), want, rtol=1e-6)
    shifted = batch_advantages(WHITENED, REWARDS + 3, MASK)
    np.testing.assert_allclose(shifted, want, rtol=1e-6)


def test_kl_in_the_reward_counts_from_each_token_on():
    k1 = np.array([[1, 50, 50], [0, 2, -1], [-4, 1, 50], [50, 50, 50]], np.float32)
    config = AdvantageConfig(baseline="none", normalize_std="none", kl_coef=0.5)
    want = np.array([[2 - 0.5, 0, 0], [-1 - 0.5, -1 - 0.5, -1 + 0.5], [0.5 + 1.5, 0.5 - 0.5, 0], [0, 0, 0]])
    got = batch_advantages(config, REWARDS, MASK, k1)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
    whitened = batch_advantages(AdvantageConfig("none", "batch", kl_coef=0.5), REWARDS, MASK, k1)
    values = want[MASK]
    np.testing.assert_allclose(whitened[MASK], (values - values.mean()) / (values.std() + EPSILON), rtol=1e-6)
    assert not whitened[~MASK].any()


@pytest.mark.parametrize("reward", [1.8, 0.1, 1 / 3, -7.7])
@pytest.mark.parametrize("config", [AdvantageConfig("batch", "none"), WHITENED, AdvantageConfig("batch", "batch")])
def test_equal_rewards_give_exactly_zero_over_the_batch(config, reward):
    mask = np.arange(5) < np.arange(1, 13)[:, None]
    assert not batch_advantages(config, np.full(12, reward, np.float32), mask).any()


@pytest.mark.parametrize("config", [AdvantageConfig("batch", "none"), WHITENED, AdvantageConfig("none", "batch", 0.1)])
def test_a_batch_in_which_nothing_counts(config):
    assert not batch_advantages(config, REWARDS, np.zeros_like(MASK), np.ones(MASK.shape, np.float32)).any()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([("batch", "none"), ("none", "batch"), ("group", "batch")]))
def test_neither_order_nor_masked_rows_matter_to_the_batch(seed, names):
    rng = np.random.default_rng(seed)
    config = AdvantageConfig(*names, kl_coef=float(rng.integers(0, 2)) / 4)
    rows, slots = rng.integers(1, 9), rng.integers(1, 5)
    mask = np.arange(slots) < rng.integers(0, slots + 1, rows)[:, None]
    advantage, k1 = rng.normal(0, 1, rows).astype(np.float32), rng.normal(0, 1, (rows, slots)).astype(np.float32)
    want = batch_advantages(config, advantage, mask, k1)
    order = rng.permutation(rows)
    got = batch_advantages(config, advantage[order], mask[order], k1[order])
    np.testing.assert_allclose(got, want[order], rtol=1e-5, atol=1e-6)
    more = (np.append(advantage, 1e30), np.vstack([mask, np.zeros(slots, bool)]), np.vstack([k1, k1[:1]]))
    got = batch_advantages(config, *(np.asarray(x, y.dtype) for x, y in zip(more, (advantage, mask, k1), strict=True)))
    np.testing.assert_allclose(got[:-1], want, rtol=1e-5, atol=1e-6)
    assert not got[-1].any()


# --- which responses count, and for what ----------------------------------------------------------------------


def test_the_overlong_penalty_by_hand():
    """A budget of 20 with a buffer of 5: nothing up to 15, then a fifth of the factor a token."""
    config = AdvantageConfig(budget=20, overlong_buffer=5, overlong_factor=0.5)
    got = overlong_penalty(config, np.array([0, 1, 15, 16, 18, 20], np.int32))
    np.testing.assert_allclose(got, [0, 0, 0, -0.1, -0.3, -0.5])
    assert not overlong_penalty(AdvantageConfig(budget=20), np.array([1, 20])).any()
    np.testing.assert_array_equal(
        overlong_penalty(AdvantageConfig(budget=2, overlong_buffer=2), [0, 1, 2]), [0, -0.5, -1]
    )


@pytest.mark.parametrize(
    ("rewards", "counts", "informative"),
    [
        ([1, 0, 0], [1, 1, 1], True),
        ([1.8, 1.8, 1.8], [1, 1, 1], False),
        ([1, NAN, NAN], [1, 0, 0], False),
        ([1, NAN, 0], [1, 0, 1], True),
        ([1, 0, 0], [0, 0, 0], False),  # all cut off and masked
        ([1, 0, 0], [1, 0, 0], True),
        ([1, 0.5, 0], [0, 1, 0], False),  # what is left is as good as the mean
    ],
)
def test_informative_groups(rewards, counts, informative):
    assert informative_groups([rewards], np.array([counts], bool)).tolist() == [informative]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "mean"}, "baseline='mean': must be one of group, leave_one_out, batch, none"),
        ({"normalize_std": "max"}, "normalize_std='max': must be one of group, batch, none"),
        ({"baseline": "none"}, "normalize_std='group': needs grpo.baseline='group' or 'leave_one_out', not 'none'"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0: must not be negative"),
        ({"overlong_buffer": 9, "budget": 8}, "overlong_buffer=9: must be from 0 to rollout.max_new_tokens=8"),
        ({"overlong_factor": 0.0}, "overlong_factor=0.0: must be positive"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(InputError) as error:
        AdvantageConfig(**change)
    assert str(error.value) == f"grpo.{message}"
