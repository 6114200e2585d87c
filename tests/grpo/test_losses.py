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
TOKEN_WITH_KL = dataclasses.replace(TOKEN, kl_coef=2.0, importance_cap=1.2)
GSPO = LossConfig(
    ratio="sequence", clip_low=0.1, clip_high=0.15, behaviour="recomputed", kl_coef=0.3, kl_estimator="k2"
)
CONSTANT = LossConfig(
    aggregate="constant", budget=7, behaviour="corrected", clip_dual=1.3, entropy_coef=0.1, importance_cap=1.2
)
GSPO_CORRECTED = dataclasses.replace(CONSTANT, ratio="sequence", kl_coef=0.2, kl_estimator="k1", aggregate="token")
CONFIGS = [SEQUENCE, TOKEN_WITH_KL, GSPO, CONSTANT, GSPO_CORRECTED]
COUPLED = [c for c in CONFIGS if c.behaviour == "rollout"]

loss_of = jax.jit(policy_loss, static_argnums=0)
gradient = jax.jit(
    jax.grad(lambda log_prob, config, *rest: policy_loss(config, log_prob, *rest).loss), static_argnums=1
)


def oracle(
    config, log_prob, entropy, behaviour, advantage, mask, reference, stale=(False,) * B, proximal=None
) -> dict[str, float]:
    """Token by token, from the formulas, in float64."""
    sums = dict.fromkeys(FIELDS, 0.0)
    if proximal is None:
        proximal = log_prob
    for b in range(len(mask)):
        length = sum(mask[b])
        share = {"token": 1.0, "sequence": 1 / max(length, 1), "constant": 1 / max(config.budget, 1)}[config.aggregate]
        sums["weight"] += length if config.aggregate == "token" else length > 0
        tokens = np.flatnonzero(mask[b])
        decoupled = stale[b] or config.behaviour != "rollout"
        weighted = stale[b] or config.behaviour == "corrected"
        near = {t: float(proximal[b, t] if decoupled else behaviour[b, t]) for t in tokens}
        ratios = {t: math.exp(float(log_prob[b, t]) - near[t]) for t in tokens}
        weights = {t: math.exp(float(proximal[b, t]) - float(behaviour[b, t])) for t in tokens}
        if config.ratio == "sequence":
            ratios, weights = ({t: math.prod(x.values()) ** (1 / length) for t in tokens} for x in (ratios, weights))
        for t in tokens:
            factor, ratio = 1.0, ratios[t]
            if weighted:
                factor = min(weights[t], config.importance_cap)
                sums["weighted"] += 1
                sums["importance"] += factor
                sums["truncated"] += weights[t] > config.importance_cap
            if stale[b]:
                sums["stale"] += 1
            else:
                mine = proximal if decoupled else log_prob
                sums["gap"] += abs(float(mine[b, t]) - float(behaviour[b, t]))
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            gain, held = ratio * float(advantage[b]), min(ratio * float(advantage[b]), bounded * float(advantage[b]))
            if config.clip_dual and advantage[b] < 0:
                held = max(held, config.clip_dual * float(advantage[b]))
            kl = 0.0
            if config.kl_coef > 0:
                log_odds = float(reference[b, t]) - float(log_prob[b, t])
                kl = {"k1": -log_odds, "k2": log_odds**2 / 2, "k3": math.exp(log_odds) - log_odds - 1}[
                    config.kl_estimator
                ]
            penalty = config.kl_coef * kl - config.entropy_coef * float(entropy[b, t])
            sums["loss"] += share * (penalty - factor * held)
            sums["kl"] += share * kl
            sums["tokens"] += 1
            sums["entropy"] += float(entropy[b, t])
            sums["clipped"] += held != gain
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
    if len(rest) == 5:
        rest += [(False,) * B, log_prob]  # the proximal policy does not move with the policy
    rest[5] = np.array(rest[5])
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


@pytest.mark.parametrize("config", COUPLED, ids=str)
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
    common |= {"stale": 0, "weighted": 0, "importance": 0, "truncated": 0}
    # Each response counts once: -3 + 1, over 2. Each token counts once: -3 + 3, over 4. By a budget of 6 tokens:
    # -3/6 + 3/6, over 2.
    assert_sums(loss_of(SEQUENCE, *case), {**common, "loss": -2, "weight": 2})
    assert_sums(loss_of(TOKEN, *case), {**common, "loss": 0, "weight": 4})
    assert_sums(loss_of(LossConfig(aggregate="constant", budget=6), *case), {**common, "loss": 0, "weight": 2})


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (4.0, -2.0, 6.0, 0.0, 1),  # bad and four times as likely: counts three times
        (2.5, -2.0, 5.0, 5.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),  # the usual clip goes on
        (4.0, 2.0, -2.6, 0.0, 1),
        (1.0, -2.0, 2.0, 2.0, 0),
    ],
)
def test_the_dual_clip(ratio, advantage, loss, slope, clipped):
    sums, got_slope = one_token(LossConfig(clip_low=0.2, clip_high=0.3, clip_dual=3.0), ratio, advantage)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-6)
    assert got_slope == pytest.approx(slope, rel=1e-6)
    assert float(sums.clipped) == clipped


def test_the_ratio_of_a_response():
    """Log-ratios of 0.3 and -0.1, and of 0.3 alone: the responses' ratios are exp(0.1) and exp(0.3)."""
    config = LossConfig(ratio="sequence", clip_low=0.1, clip_high=0.2)
    log_prob = np.full((2, 2), -1, np.float32)
    behaviour = log_prob - np.array([[0.3, -0.1], [0.3, 9]], np.float32)
    mask = np.array([[1, 1], [1, 0]], bool)
    case = (np.zeros((2, 2), np.float32), behaviour, np.array([2, 2], np.float32), mask)
    sums = loss_of(config, log_prob, *case)
    assert float(sums.ratio) == pytest.approx(2 * math.exp(0.1) + math.exp(0.3), rel=1e-6)
    assert float(sums.loss) == pytest.approx(-2 * math.exp(0.1) - 2 * 1.2, rel=1e-6)
    assert float(sums.clipped) == 1
    slopes = gradient(log_prob, config, *case)
    np.testing.assert_allclose(slopes, [[-math.exp(0.1), -math.exp(0.1)], [0, 0]], rtol=1e-6)
    # GSPO-token: each token's own advantage, the clip by the response's ratio.
    case = (case[0], behaviour, np.array([[2, -1], [-3, 0]], np.float32), mask)
    assert float(loss_of(config, log_prob, *case).loss) == pytest.approx(
        -math.exp(0.1) / 2 + 3 * math.exp(0.3), rel=1e-6
    )
    slopes = gradient(log_prob, config, *case)
    np.testing.assert_allclose(slopes, [[-math.exp(0.1), math.exp(0.1) / 2], [3 * math.exp(0.3), 0]], rtol=1e-6)


@pytest.mark.parametrize("config", [TOKEN_WITH_KL, GSPO_CORRECTED], ids=str)
def test_advantages_of_tokens(config):
    """A response's advantage, given to each of its tokens, changes nothing."""
    log_prob, entropy, behaviour, advantage, *rest = stale_case(2)
    of_tokens = np.repeat(advantage[:, None], T, axis=1)
    got, want = (loss_of(config, log_prob, entropy, behaviour, a, *rest) for a in (of_tokens, advantage))
    assert_sums(got, {name: float(getattr(want, name)) for name in FIELDS})


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_first_update_is_plain_policy_gradient(config):
    """Where rollout, learner and reference agree: each token's advantage, no clip at work; k1 pulls at all alike."""
    log_prob, entropy, _, advantage, mask, _ = random_case(4)
    case = (entropy, log_prob, advantage, mask, log_prob)
    sums = loss_of(config, log_prob, *case)
    assert float(sums.clipped) == float(sums.gap) == 0
    length = mask.sum(1, keepdims=True)
    share = {"token": 1.0, "sequence": 1 / np.maximum(length, 1), "constant": 1 / 7}[config.aggregate]
    pull = config.kl_coef if config.kl_estimator == "k1" else 0.0
    want = np.where(mask, share * (pull - advantage[:, None]), 0.0)
    np.testing.assert_allclose(gradient(log_prob, config, *case), want, rtol=1e-6, atol=1e-7)


def test_the_mean_gradients_of_the_kl_penalties():
    """Over all tokens of a policy, each as often as it is drawn: k1's is 0, k2's that of KL(policy || reference), k3's
    that of KL(reference || policy), with respect to the logits.
    """
    rng = np.random.default_rng(9)
    logits, reference = rng.normal(0, 1, 6), np.log(rng.dirichlet(np.ones(6)))
    log_prob = logits - np.log(np.exp(logits).sum())
    p, q = np.exp(log_prob), np.exp(reference)
    want = {"k1": np.zeros(6), "k2": p * (log_prob - reference - p @ (log_prob - reference)), "k3": p - q}
    for name, mean in want.items():
        config = LossConfig(kl_coef=1.0, kl_estimator=name)
        column = [np.float32(x)[:, None] for x in (log_prob, reference)]
        rest = (np.zeros((6, 1), np.float32), column[0], np.zeros(6, np.float32), np.ones((6, 1), bool), column[1])
        slopes = np.asarray(gradient(column[0], config, *rest), np.float64)[:, 0]
        # d log p_i / d logits is e_i - p.
        got = (p * slopes) @ (np.eye(6) - p)
        np.testing.assert_allclose(got, mean, atol=1e-6)
        value = float(loss_of(config, column[0], *rest).loss)
        x = log_prob - reference
        assert value == pytest.approx({"k1": x, "k2": x**2 / 2, "k3": np.exp(-x) - 1 + x}[name].sum(), rel=1e-5)


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
    order = np.random.default_rng(seed).permutation(B)
    assert_sums(loss_of(config, *(x[order] for x in case)), {n: float(getattr(whole, n)) for n in FIELDS}, atol=1e-5)


# --- configs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": -0.1}, r"^grpo.clip_low=-0.1: must not be negative$"),
        ({"clip_high": -1.0}, r"^grpo.clip_high=-1.0: must not be negative$"),
        ({"kl_coef": math.nan}, r"^grpo.kl_coef=nan: must not be negative$"),
        ({"importance_cap": 0.99}, r"^grpo.importance_cap=0.99: must be at least 1$"),
        ({"importance_cap": math.nan}, r"^grpo.importance_cap=nan: must be at least 1$"),
        ({"aggregate": "mean"}, r"^grpo.aggregate='mean': must be one of sequence, token, constant$"),
        ({"aggregate": "constant"}, r"^grpo.aggregate='constant': divides by a budget of 0 tokens; needs 1 or more$"),
        ({"ratio": "group"}, r"^grpo.ratio='group': must be one of token, sequence$"),
        ({"clip_dual": 1.0}, r"^grpo.clip_dual=1.0: must be above 1, or 0 for off$"),
        ({"kl_estimator": "k4"}, r"^grpo.kl_estimator='k4': must be one of k1, k2, k3$"),
        ({"entropy_coef": -0.1}, r"^grpo.entropy_coef=-0.1: must not be negative$"),
        ({"behaviour": "stale"}, r"^grpo.behaviour='stale': must be one of rollout, recomputed, corrected$"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        LossConfig(**change)
