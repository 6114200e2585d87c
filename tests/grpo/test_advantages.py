"""Group advantages: hand-computed values, the traps of float32, and what holds for any rewards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rhyme_jax.grpo.advantages import EPSILON, group_advantages

NAN = float("nan")


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
    for normalize_std, want in ((True, normalized), (False, centred)):
        advantage, valid = group_advantages([rewards], normalize_std)
        assert advantage.dtype == np.float32 and valid.dtype == bool
        np.testing.assert_allclose(advantage, [want], rtol=5e-6)  # EPSILON moves a std of 0.4 by 2.5e-6
        np.testing.assert_array_equal(valid, ~np.isnan([rewards]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [1.8, 0.1, 1 / 3, 0, -7.7, 1e30, 1e-30])
@pytest.mark.parametrize("samples", [1, 2, 3, 12, 1000])
def test_equal_rewards_give_exactly_zero(samples, reward, normalize_std):
    """A mean in float32 would turn twelve rewards of 1.8 into advantages of 0.19; float64 rounds too."""
    for dtype in (np.float32, np.float64):
        advantage, valid = group_advantages(np.full((2, samples), reward, dtype), normalize_std)
        assert not advantage.any() and valid.all()


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
@given(GROUPS, st.booleans())
def test_the_mean_is_zero_and_the_order_is_that_of_the_rewards(reward_GC, normalize_std):
    advantage_GC, valid_GC = group_advantages(reward_GC, normalize_std)
    assert np.isfinite(advantage_GC).all() and not advantage_GC[~valid_GC].any()
    for reward, advantage, valid in zip(reward_GC, advantage_GC, valid_GC, strict=True):
        if valid.any():
            assert abs(advantage[valid].mean(dtype=np.float64)) < 1e-6
            assert (np.diff(advantage[valid][np.argsort(reward[valid])]) >= 0).all()
        if normalize_std and advantage.any():
            std = np.nanstd(reward)
            assert advantage[valid].std() == pytest.approx(std / (std + EPSILON), rel=1e-5)


@settings(deadline=None)
@given(GROUPS, st.integers(-1000, 1000), st.sampled_from([0.5, 2.0, 16.0]))
def test_shifts_change_nothing_and_scale_only_what_is_not_normalized(reward_GC, shift, scale):
    for normalize_std in (True, False):
        advantage, valid = group_advantages(reward_GC, normalize_std)
        shifted, valid_too = group_advantages(reward_GC + shift, normalize_std)
        np.testing.assert_allclose(shifted, advantage, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(valid_too, valid)
    # EPSILON shows next to a std of 3e-4 (one of nine rewards is off by a thousandth), twice as much at half scale.
    tolerance = {True: 2 * EPSILON / 3e-4, False: 1e-6}
    for normalize_std, factor in ((True, 1), (False, scale)):
        scaled, _ = group_advantages(reward_GC * scale, normalize_std)
        want = factor * group_advantages(reward_GC, normalize_std)[0]
        np.testing.assert_allclose(scaled, want, rtol=tolerance[normalize_std], atol=1e-6)


@settings(deadline=None)
@given(GROUPS)
def test_groups_do_not_mix(reward_GC):
    together = group_advantages(reward_GC)[0]
    apart = [group_advantages(group[None])[0][0] for group in reward_GC]
    np.testing.assert_array_equal(together, apart)
