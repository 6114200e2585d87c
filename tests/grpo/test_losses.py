"""The policy loss against a plain float64 loop and against cases computed by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.losses import LossConfig, LossSums, policy_loss

FIELDS = [f.name for f in dataclasses.fields(LossSums)]
B, T = 4, 5
SEQUENCE = LossConfig()
TOKEN = LossConfig(clip_low=0.1, clip_high=0.3, aggregate="token")
WITH_KL = dataclasses.replace(SEQUENCE, kl_coef=0.25, clip_high=0.28)
TOKEN_WITH_KL = dataclasses.replace(TOKEN, kl_coef=2.0, importance_cap=1.2)
CONFIGS = [SEQUENCE, TOKEN, WITH_KL, TOKEN_WITH_KL]

loss_of = jax.jit(policy_loss, static_argnums=0)
gradient = jax.jit(
    jax.grad(lambda log_prob, config, *rest: policy_loss(config, log_prob, *rest).loss), static_argnums=1
)


def oracle(
    config, log_prob, entropy, behaviour, advantage, mask, reference, stale=(False,) * B, proximal=None
) -> dict[str, float]:
    """Token by token, from the formulas, in float64."""
    sums = dict.fromkeys(FIELDS, 0.0)
    for b in range(len(mask)):
        length = sum(mask[b])
        share = 1.0 if config.aggregate == "token" else 1 / max(length, 1)
        sums["weight"] += length if config.aggregate == "token" else length > 0
        for t in np.flatnonzero(mask[b]):
            factor, near = 1.0, float(behaviour[b, t])
            if stale[b]:
                importance, near = math.exp(float(proximal[b, t]) - near), float(proximal[b, t])
                factor = min(importance, config.importance_cap)
                sums["stale"] += 1
                sums["importance"] += factor
                sums["truncated"] += importance >= config.importance_cap
            else:
                sums["gap"] += abs(float(log_prob[b, t]) - near)
            ratio = math.exp(float(log_prob[b, t]) - near)
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            gain, bounded_gain = ratio * float(advantage[b]), bounded * float(advantage[b])
            kl = 0.0
            if config.kl_coef > 0:
                odds = math.exp(float(reference[b, t]) - float(log_prob[b, t]))
                kl = odds - math.log(odds) - 1
            sums["loss"] += share * (config.kl_coef * kl - factor * min(gain, bounded_gain))
            sums["kl"] += share * kl
            sums["tokens"] += 1
            sums["entropy"] += float(entropy[b, t])
            sums["clipped"] += bounded_gain < gain
            sums["ratio"] += ratio
    return sums


def random_case(seed: int):
    """Log-probs near -2 that differ by about a half, advantages of both signs; every row masked from a length on,
    one wholly masked.
    """
    rng = np.random.default_rng(seed)
    log_prob, behaviour, reference = (rng.normal(-2, 0.5, (B, T)).astype(np.float32) for _ in range(3))
    entropy = rng.uniform(0, 3, (B, T)).astype(np.float32)
    advantage = rng.normal(0, 1, B).astype(np.float32)
    length = rng.permutation([0, T, *rng.integers(1, T + 1, B - 2)])
    mask = np.arange(T) < length[:, None]
    return log_prob, entropy, behaviour, advantage, mask, reference


def stale_case(seed: int):
    """random_case with two of four rows stale, and what the policy said before the batch's first update."""
    case = random_case(seed)
    rng = np.random.default_rng([seed, 1])
    stale = rng.permutation([True, True, False, False])
    proximal = case[0] + rng.normal(0, 0.3, (B, T)).astype(np.float32)
    return *case, stale, proximal


def assert_sums(sums: LossSums, want: dict[str, float], **tolerance):
    for name in FIELDS:
        value = getattr(sums, name)
        assert value.shape == () and value.dtype == jnp.float32, name
        np.testing.assert_allclose(value, want[name], err_msg=name, **({"rtol": 2e-5, "atol": 2e-6} | tolerance))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equals_the_oracle(config):
    for seed in range(20):
        for case in (random_case(seed), stale_case(seed)):
            assert_sums(loss_of(config, *case), oracle(config, *case))


@pytest.mark.parametrize("case", [random_case(7), stale_case(7)], ids=["fresh", "stale"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_gradient_is_that_of_the_oracle(config, case):
    """By central differences in float64; at a kink of the clip they would differ, but no case has one."""
    log_prob, *rest = case
    got = gradient(log_prob, config, *rest)
    step = 1e-5
    for b in range(B):
        for t in range(T):
            up, down = (log_prob.astype(np.float64) for _ in range(2))
            up[b, t] += step
            down[b, t] -= step
            slope = (oracle(config, up, *rest)["loss"] - oracle(config, down, *rest)["loss"]) / (2 * step)
            assert got[b, t] == pytest.approx(slope, abs=2e-5), (b, t)


# --- stale rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_without_a_proximal_policy_it_is_the_policy_itself_and_a_constant(config):
    log_prob, *rest, stale, _ = stale_case(5)
    got, want = (loss_of(config, log_prob, *rest, stale, p) for p in (None, log_prob))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    got, want = (gradient(log_prob, config, *rest, stale, p) for p in (None, log_prob))
    np.testing.assert_array_equal(got, want)
    assert got.any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fresh_rows_do_not_look_at_the_proximal_policy(config):
    """To the bit: what stands in it, and whether staleness is spoken of at all."""
    log_prob, *rest = random_case(6)
    want, want_gradient = loss_of(config, log_prob, *rest), gradient(log_prob, config, *rest)
    for extra in ((np.zeros(B, bool), None), (np.zeros(B, bool), np.full((B, T), np.nan, np.float32))):
        jax.tree.map(np.testing.assert_array_equal, loss_of(config, log_prob, *rest, *extra), want)
        np.testing.assert_array_equal(gradient(log_prob, config, *rest, *extra), want_gradient)
    assert float(want.stale) == float(want.importance) == float(want.truncated) == 0


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_stale_rows_of_an_unchanged_policy_are_like_fresh_ones(config):
    """mu = pi: every weight and every ratio is 1."""
    log_prob, entropy, _, advantage, mask, reference = random_case(8)
    rest = (entropy, log_prob, advantage, mask, reference)
    fresh, stale = (loss_of(config, log_prob, *rest, np.full(B, s)) for s in (False, True))
    assert float(stale.importance) == float(stale.stale) == float(stale.tokens) == mask.sum()
    assert float(stale.loss) == float(fresh.loss) and float(stale.kl) == float(fresh.kl)
    np.testing.assert_array_equal(
        gradient(log_prob, config, *rest, np.ones(B, bool)), gradient(log_prob, config, *rest)
    )


@pytest.mark.parametrize(
    ("importance", "ratio", "advantage", "loss", "slope", "clipped", "truncated"),
    [
        # At a batch's first update the ratio is 1: the weight scales the loss and its slope.
        (1.0, 1.0, 2.0, -2.0, -2.0, 0, 0),
        (0.25, 1.0, 2.0, -0.5, -0.5, 0, 0),
        (1.5, 1.0, -2.0, 3.0, 3.0, 0, 0),
        (2.0, 1.0, 1.0, -2.0, -2.0, 0, 1),  # at the cap
        (8.0, 1.0, 1.0, -2.0, -2.0, 0, 1),  # cut to 2
        (1e30, 1.0, -1.0, 2.0, 2.0, 0, 1),
        (0.0, 1.0, 1.0, 0.0, 0.0, 0, 0),
        # Later the clip is around the policy of the first update, wherever mu was.
        (0.5, 1.5, 2.0, -1.3, 0.0, 1, 0),
        (0.5, 1.5, -2.0, 1.5, 1.5, 0, 0),
        (4.0, 0.5, -2.0, 3.2, 0.0, 1, 1),
    ],
)
def test_a_stale_token(importance, ratio, advantage, loss, slope, clipped, truncated):
    config = LossConfig(clip_low=0.2, clip_high=0.3, importance_cap=2.0)
    log_prob = np.full((1, 1), -1.5, np.float32)
    proximal = log_prob - np.float32(math.log(ratio))
    behaviour = proximal - np.float32(np.log(importance) if importance else -200)
    advantage, yes = np.array([advantage], np.float32), np.ones((1, 1), bool)
    case = np.zeros((1, 1), np.float32), behaviour, advantage, yes, None, np.ones(1, bool), proximal
    sums = loss_of(config, log_prob, *case)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-6)
    assert float(gradient(log_prob, config, *case)[0, 0]) == pytest.approx(slope, rel=1e-6)
    want = {"clipped": clipped, "truncated": truncated, "stale": 1, "tokens": 1, "gap": 0}
    assert {k: float(getattr(sums, k)) for k in want} == want
    assert float(sums.importance) == pytest.approx(min(importance, 2.0), rel=1e-6)
    assert float(sums.ratio) == pytest.approx(ratio, rel=1e-6)


# --- by hand --------------------------------------------------------------------------------------------------


def one_token(config, ratio, advantage, reference_ratio=1.0):
    """A batch of one token with the given pi/behaviour and reference/pi."""
    log_prob = np.full((1, 1), -1.5, np.float32)
    case = (
        np.zeros((1, 1), np.float32),
        log_prob - np.float32(math.log(ratio)),
        np.array([advantage], np.float32),
        np.ones((1, 1), bool),
        log_prob + np.float32(math.log(reference_ratio)),
    )
    return loss_of(config, log_prob, *case), float(gradient(log_prob, config, *case)[0, 0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # The gradient of -ratio * advantage with respect to the log-prob is the same value again.
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.0, -2.0, 2.0, 2.0, 0),
        (1.25, 2.0, -2.5, -2.5, 0),  # inside 0.8 .. 1.3
        (1.5, 2.0, -2.6, 0.0, 1),  # good and already likelier: held at 1.3
        (1.5, -2.0, 3.0, 3.0, 0),  # bad and likelier: pushed down with full force
        (0.5, 2.0, -1.0, -1.0, 0),  # good and less likely: pulled up with full force
        (0.5, -2.0, 1.6, 0.0, 1),  # bad and already less likely: held at 0.8
        (1.5, 0.0, 0.0, 0.0, 0),
        (0.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_the_clip(ratio, advantage, loss, slope, clipped):
    sums, got_slope = one_token(LossConfig(clip_low=0.2, clip_high=0.3), ratio, advantage)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-6)
    assert got_slope == pytest.approx(slope, rel=1e-6)
    assert float(sums.clipped) == clipped
    assert float(sums.ratio) == pytest.approx(ratio, rel=1e-6)
    assert float(sums.gap) == pytest.approx(abs(math.log(ratio)), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("reference_ratio", [1.0, 2.0, 0.5, math.e**2])
def test_kl_is_the_k3_estimate(reference_ratio):
    """r - log r - 1 with r = reference / policy: never negative, 0 where they agree; its slope is 1 - r."""
    sums, slope = one_token(LossConfig(kl_coef=0.5), 1.0, 0.0, reference_ratio)
    k3 = reference_ratio - math.log(reference_ratio) - 1
    assert float(sums.kl) == pytest.approx(k3, abs=1e-6)
    assert float(sums.loss) == pytest.approx(0.5 * k3, abs=1e-6)
    assert slope == pytest.approx(0.5 * (1 - reference_ratio), rel=1e-5, abs=1e-6)


def test_aggregation():
    """One response of one token and advantage 3, one of three tokens and advantage -1, all ratios 1."""
    log_prob = np.full((2, 3), -1, np.float32)
    entropy = np.array([[1, 100, 100], [2, 3, 4]], np.float32)
    case = (log_prob, entropy, log_prob, np.array([3, -1], np.float32), np.array([[1, 0, 0], [1, 1, 1]], bool))
    common = {"kl": 0, "tokens": 4, "entropy": 10, "clipped": 0, "ratio": 4, "gap": 0}
    common |= {"stale": 0, "importance": 0, "truncated": 0}
    # Each response counts once: -3 + 1, over 2. Each token counts once: -3 + 3, over 4.
    assert_sums(loss_of(SEQUENCE, *case), {**common, "loss": -2, "weight": 2})
    assert_sums(loss_of(TOKEN, *case), {**common, "loss": 0, "weight": 4})


# --- masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_fully_masked_batch_gives_zeros(config):
    log_prob, entropy, behaviour, advantage, mask, reference = random_case(0)
    mask = np.zeros_like(mask)
    assert_sums(loss_of(config, log_prob, entropy, behaviour, advantage, mask, reference), dict.fromkeys(FIELDS, 0))
    assert not gradient(log_prob, config, entropy, behaviour, advantage, mask, reference).any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_fully_masked_row_does_not_count(config):
    case = stale_case(3)
    used = case[4].any(axis=1)
    assert (~used).sum() == 1
    assert_sums(loss_of(config, *case), oracle(config, *(x[used] for x in case)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("garbage", [1e30, -1e30, 3e38])
def test_garbage_in_masked_slots_changes_nothing(config, garbage):
    log_prob, entropy, behaviour, advantage, mask, reference, stale, proximal = stale_case(1)

    def dirty(x, value):
        return np.where(mask, x, np.float32(value))

    advantage_too = np.where(mask.any(axis=1), advantage, np.float32(garbage))
    want = loss_of(config, log_prob, entropy, behaviour, advantage, mask, reference, stale, proximal)
    want_gradient = gradient(log_prob, config, entropy, behaviour, advantage, mask, reference, stale, proximal)
    for signs in ((1, 1, 1, 1), (1, 1, -1, -1), (1, -1, 1, 1), (-1, 1, 1, -1)):
        dirt = [dirty(x, s * garbage) for x, s in zip((log_prob, behaviour, reference, proximal), signs, strict=True)]
        rest = (dirty(entropy, garbage), dirt[1], advantage_too, mask, dirt[2], stale, dirt[3])
        jax.tree.map(np.testing.assert_array_equal, loss_of(config, dirt[0], *rest), want)
        np.testing.assert_array_equal(gradient(dirt[0], config, *rest), want_gradient)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(CONFIGS))
def test_micro_batches_add_up(seed, config):
    """However the rows are cut up, the sums of the pieces are those of the whole."""
    case = stale_case(seed)
    whole = loss_of(config, *case)
    pieces = [loss_of(config, *(x[b : b + 1] for x in case)) for b in range(B)]
    assert_sums(whole, {name: sum(float(getattr(p, name)) for p in pieces) for name in FIELDS}, atol=1e-5)


# --- configs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": -0.1}, r"^grpo.clip_low=-0.1: must not be negative$"),
        ({"clip_high": -1.0}, r"^grpo.clip_high=-1.0: must not be negative$"),
        ({"kl_coef": math.nan}, r"^grpo.kl_coef=nan: must not be negative$"),
        ({"importance_cap": 0.99}, r"^grpo.importance_cap=0.99: must be at least 1$"),
        ({"importance_cap": math.nan}, r"^grpo.importance_cap=nan: must be at least 1$"),
        ({"aggregate": "mean"}, r"^grpo.aggregate='mean': must be one of sequence, token$"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        LossConfig(**change)
