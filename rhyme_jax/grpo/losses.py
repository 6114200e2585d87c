"""The clipped policy loss, the KL penalty and the entropy bonus, as sums and counts.

Nothing is divided here: sums and counts add over micro-batches and devices, and the learner divides once, so the
result does not depend on how a batch is cut up. What the papers call which combination: `presets`, docs/losses.md.

Suffix letters: B rows, T response positions.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rhyme_jax.errors import InputError

AGGREGATES = ("sequence", "token", "constant")
RATIOS = ("token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
BEHAVIOURS = ("rollout", "recomputed", "corrected")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2  # the ratio counts down to 1 - clip_low ...
    clip_high: float = 0.2  # ... and up to 1 + clip_high (larger in DAPO: "clip-higher")
    kl_coef: float = 0.0  # weight of the KL penalty to the reference; 0 keeps no reference
    aggregate: str = "sequence"  # "sequence": mean over a response's tokens, then over responses (GRPO);
    # "token": mean over all tokens of the batch (DAPO); "constant": sum over a response's tokens divided by `budget`,
    # then mean over responses (Dr. GRPO)
    importance_cap: float = 2.0  # most that a token of a stale rollout may weigh
    ratio: str = "token"  # "token": of each token (PPO); "sequence": one of the response, the geometric mean (GSPO)
    clip_dual: float = 0.0  # bad responses count up to this ratio (above 1); 0 is off
    kl_estimator: str = "k3"  # of Schulman 2020; what their gradients are: see `policy_loss`
    entropy_coef: float = 0.0  # weight of the entropy bonus
    behaviour: str = "rollout"  # the policy that fresh rows were sampled by, and clip around: "rollout", as the rollout
    # computed it; "recomputed", as the learner does; "corrected", that too, weighted by importance as stale rows are
    budget: int = 0  # tokens of a response at most; needed with aggregate "constant"

    def __post_init__(self):
        for name, choices in (
            ("aggregate", AGGREGATES),
            ("ratio", RATIOS),
            ("kl_estimator", KL_ESTIMATORS),
            ("behaviour", BEHAVIOURS),
        ):
            if getattr(self, name) not in choices:
                raise InputError(f"grpo.{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise InputError(f"grpo.{name}={getattr(self, name)}: must not be negative")
        if not self.importance_cap >= 1:  # below 1, rollouts of the policy itself would be scaled down too
            raise InputError(f"grpo.importance_cap={self.importance_cap}: must be at least 1")
        if self.clip_dual != 0 and not self.clip_dual > 1:
            raise InputError(f"grpo.clip_dual={self.clip_dual}: must be above 1, or 0 for off")
        if self.aggregate == "constant" and self.budget < 1:
            raise InputError(f"grpo.aggregate='constant': divides by a budget of {self.budget} tokens; needs 1 or more")

    @property
    def decoupled(self) -> bool:
        """Whether fresh rows too look at the proximal policy."""
        return self.behaviour != "rollout"


@struct.dataclass
class LossSums:
    """Float32 scalars. Divide `loss`, `kl` by `weight`; `entropy`, `clipped`, `ratio` by `tokens`; `gap` by
    `tokens - stale`; `importance`, `truncated` by `weighted`.
    """

    loss: jax.Array  # policy loss plus kl_coef * KL less entropy_coef * entropy, weighted as `aggregate` says
    kl: jax.Array  # estimate of KL(policy || reference), weighted likewise
    weight: jax.Array  # number of responses ("sequence", "constant") or of tokens ("token")
    tokens: jax.Array
    entropy: jax.Array
    clipped: jax.Array  # tokens at which the clip takes the gradient away
    ratio: jax.Array  # policy / proximal policy, or the response's mean of that where `ratio` is "sequence"
    gap: jax.Array  # |learner's log-prob - rollout's| over fresh rows; near 0 until the first update of a batch
    stale: jax.Array  # tokens that an older policy sampled
    weighted: jax.Array  # tokens that have an importance weight: the stale ones, all where behaviour is "corrected"
    importance: jax.Array  # their weights, truncated
    truncated: jax.Array  # those of them whose weight was cut to importance_cap


def policy_loss(
    config: LossConfig,
    log_prob_BT: jax.Array,
    entropy_BT: jax.Array,
    behaviour_log_prob_BT: jax.Array,
    advantage: jax.Array,
    mask_BT: jax.Array,
    reference_log_prob_BT: jax.Array | None = None,
    stale_B: jax.Array | None = None,
    proximal_log_prob_BT: jax.Array | None = None,
) -> LossSums:
    """PPO's clipped surrogate with group advantages (Shao et al. 2024, eq. 3) over the tokens in mask_BT.

    The clip keeps the policy near a *proximal* one. For fresh rows that is the policy that sampled. A stale row was
    sampled by an older one, mu; clipping around mu would drag the policy back. There the proximal policy is the
    learner's at the batch's first update, and each token's policy loss is multiplied by the constant
    min(proximal / mu, importance_cap) instead: decoupled PPO (Hilton et al. 2022), its weights truncated as in IMPALA
    (Espeholt et al. 2018) and for rollouts of language models (Yao et al. 2025). KL and entropy are not weighted.
    With `behaviour` "recomputed" fresh rows clip around the learner's policy too, with "corrected" they also have
    weights: what the rollout's kernels and the learner's make different of one policy is then corrected.

    With `ratio` "sequence" the ratio, and the weight, of a token is that of its response, the geometric mean over its
    tokens (GSPO, Zheng et al. 2025). The gradient is that of GSPO-token (ibid., 4.3), which is the same as long as
    a response has one advantage, and is defined where its tokens have their own.

    The gradient of a good token (positive advantage) ends above 1 + clip_high, that of a bad one below 1 - clip_low,
    and, with `clip_dual` c, above c (Ye et al. 2020).

    KL penalties, with x = log policy - log reference, and gradients with respect to the log-prob (Schulman 2020; Tang &
    Munos 2025): k1 = x, 1, whose mean over samples of the policy itself is 0: as a loss it does nothing but make noise;
    k2 = x^2 / 2, x, whose mean is the gradient of KL(policy || reference); k3 = exp(-x) - 1 + x, 1 - exp(-x), whose
    mean is the gradient of KL(reference || policy).

    Args:
      behaviour_log_prob_BT: of the policy that sampled the tokens, at the same temperature.
      advantage: [B], of responses, or [B, T], of tokens; the latter finite everywhere.
      mask_BT: bool, real response tokens of graded samples. A row may be all False; a batch too (sums of 0).
      reference_log_prob_BT: needed where kl_coef > 0.
      stale_B: bool, rows sampled by an older policy; None: no row is.
      proximal_log_prob_BT: the learner's before the batch's first update, looked at in stale rows only, or in all where
        `behaviour` is not "rollout". None takes log_prob_BT itself, which is exact at that first update.
    """
    chex.assert_equal_shape([log_prob_BT, entropy_BT, behaviour_log_prob_BT, mask_BT])
    chex.assert_shape(advantage, log_prob_BT.shape[: advantage.ndim])
    advantage_BT = advantage[:, None] if advantage.ndim == 1 else advantage
    if stale_B is None:
        stale_B = jnp.zeros(log_prob_BT.shape[:1], bool)
    if proximal_log_prob_BT is None:
        proximal_log_prob_BT = log_prob_BT
    chex.assert_shape(stale_B, log_prob_BT.shape[:1])
    chex.assert_equal_shape([proximal_log_prob_BT, log_prob_BT])
    stale_BT = stale_B[:, None] & mask_BT
    decoupled_BT = mask_BT if config.decoupled else stale_BT
    weighted_BT = mask_BT if config.behaviour == "corrected" else stale_BT
    length_B = jnp.sum(mask_BT, axis=1)

    def of_unit(log_BT):  # of what has a ratio of its own: a token or a response
        if config.ratio == "token":
            return log_BT
        mean_B = jnp.sum(log_BT, axis=1) / jnp.maximum(length_B, 1)
        return jnp.where(mask_BT, mean_B[:, None], 0.0)

    proximal_log_prob_BT = jax.lax.stop_gradient(proximal_log_prob_BT)
    mismatch_BT = proximal_log_prob_BT - behaviour_log_prob_BT
    importance_BT = jnp.exp(of_unit(jnp.where(weighted_BT, mismatch_BT, 0.0)))
    factor_BT = jnp.minimum(importance_BT, config.importance_cap)
    proximal_log_prob_BT = jnp.where(decoupled_BT, proximal_log_prob_BT, behaviour_log_prob_BT)

    # Masked slots hold arbitrary finite values; zeroing the difference keeps exp from overflowing to inf * 0.
    log_ratio_BT = jnp.where(mask_BT, log_prob_BT - proximal_log_prob_BT, 0.0)
    gap_BT = jnp.where(mask_BT, mismatch_BT, 0.0) if config.decoupled else log_ratio_BT
    if config.ratio == "sequence":  # a token's gradient, the response's value
        log_ratio_BT += jax.lax.stop_gradient(of_unit(log_ratio_BT) - log_ratio_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - config.clip_low, 1 + config.clip_high)
    gain_BT, clipped_gain_BT = ratio_BT * advantage_BT, clipped_BT * advantage_BT
    held_BT, is_clipped_BT = jnp.minimum(gain_BT, clipped_gain_BT), clipped_gain_BT < gain_BT
    if config.clip_dual:
        least_BT = config.clip_dual * advantage_BT
        is_least_BT = (advantage_BT < 0) & (held_BT < least_BT)
        held_BT, is_clipped_BT = jnp.where(is_least_BT, least_BT, held_BT), is_clipped_BT | is_least_BT
    loss_BT = -factor_BT * held_BT
    kl_BT = jnp.zeros_like(loss_BT)
    if config.kl_coef > 0:
        log_odds_BT = jnp.where(mask_BT, reference_log_prob_BT - log_prob_BT, 0.0)
        kl_BT = {
            "k1": lambda: -log_odds_BT,
            "k2": lambda: log_odds_BT**2 / 2,
            "k3": lambda: jnp.exp(log_odds_BT) - log_odds_BT - 1,
        }[config.kl_estimator]()
    penalty_BT = config.kl_coef * kl_BT
    if config.entropy_coef > 0:
        penalty_BT -= config.entropy_coef * jnp.where(mask_BT, entropy_BT, 0.0)

    tokens = jnp.sum(length_B).astype(jnp.float32)
    weight = jnp.sum(length_B > 0).astype(jnp.float32)
    if config.aggregate == "sequence":
        weight_BT = mask_BT / jnp.maximum(length_B, 1)[:, None]
    elif config.aggregate == "constant":
        weight_BT = mask_BT / jnp.float32(config.budget)
    else:
        weight_BT, weight = mask_BT.astype(jnp.float32), tokens

    def total(x_BT):
        return jnp.sum(x_BT * mask_BT, dtype=jnp.float32)

    return LossSums(
        loss=jnp.sum(weight_BT * (loss_BT + penalty_BT)),
        kl=jnp.sum(weight_BT * kl_BT),
        weight=weight,
        tokens=tokens,
        entropy=total(entropy_BT),
        clipped=total(is_clipped_BT),
        ratio=total(ratio_BT),
        gap=total(jnp.abs(gap_BT) * ~stale_BT),
        stale=total(stale_BT),
        weighted=total(weighted_BT),
        importance=total(factor_BT * weighted_BT),
        truncated=total(weighted_BT & (importance_BT > config.importance_cap)),
    )
