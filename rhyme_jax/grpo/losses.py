"""The clipped policy loss and the KL penalty, as sums and counts.

Nothing is divided here: sums and counts add over micro-batches and devices, and the learner divides once, so the
result does not depend on how a batch is cut up.

Suffix letters: B rows, T response positions.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rhyme_jax.errors import InputError

AGGREGATES = ("sequence", "token")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2  # the ratio counts down to 1 - clip_low ...
    clip_high: float = 0.2  # ... and up to 1 + clip_high (larger in DAPO: "clip-higher")
    kl_coef: float = 0.0  # weight of the KL penalty to the reference; 0 keeps no reference
    aggregate: str = "sequence"  # "sequence": mean over a response's tokens, then over responses (GRPO);
    # "token": mean over all tokens of the batch (DAPO)
    importance_cap: float = 2.0  # most that a token of a stale rollout may weigh

    def __post_init__(self):
        if self.aggregate not in AGGREGATES:
            raise InputError(f"grpo.aggregate={self.aggregate!r}: must be one of {', '.join(AGGREGATES)}")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if not getattr(self, name) >= 0:
                raise InputError(f"grpo.{name}={getattr(self, name)}: must not be negative")
        if not self.importance_cap >= 1:  # below 1, rollouts of the policy itself would be scaled down too
            raise InputError(f"grpo.importance_cap={self.importance_cap}: must be at least 1")


@struct.dataclass
class LossSums:
    """Float32 scalars. Divide `loss`, `kl` by `weight`; `entropy`, `clipped`, `ratio` by `tokens`; `gap` by
    `tokens - stale`; `importance`, `truncated` by `stale`.
    """

    loss: jax.Array  # policy loss plus kl_coef * KL, weighted as `aggregate` says
    kl: jax.Array  # k3 estimate of KL(policy || reference), weighted likewise
    weight: jax.Array  # number of responses ("sequence") or of tokens ("token")
    tokens: jax.Array
    entropy: jax.Array
    clipped: jax.Array  # tokens at which the clip takes the gradient away
    ratio: jax.Array  # policy / proximal policy
    gap: jax.Array  # |learner's log-prob - rollout's| over fresh rows; near 0 until the first update of a batch
    stale: jax.Array  # tokens that an older policy sampled
    importance: jax.Array  # their importance weights, truncated
    truncated: jax.Array  # those of them whose weight was cut to importance_cap


def policy_loss(
    config: LossConfig,
    log_prob_BT: jax.Array,
    entropy_BT: jax.Array,
    behaviour_log_prob_BT: jax.Array,
    advantage_B: jax.Array,
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
    (Espeholt et al. 2018) and for rollouts of language models (Yao et al. 2025). The KL penalty is not weighted.

    Args:
      behaviour_log_prob_BT: of the policy that sampled the tokens, at the same temperature.
      mask_BT: bool, real response tokens of graded samples. A row may be all False; a batch too (sums of 0).
      reference_log_prob_BT: needed where kl_coef > 0. KL by the k3 estimator (Schulman 2020).
      stale_B: bool, rows sampled by an older policy; None: no row is.
      proximal_log_prob_BT: the learner's before the batch's first update, looked at in stale rows only. None takes
        log_prob_BT itself, which is exact at that first update.
    """
    chex.assert_equal_shape([log_prob_BT, entropy_BT, behaviour_log_prob_BT, mask_BT])
    chex.assert_shape(advantage_B, log_prob_BT.shape[:1])
    if stale_B is None:
        stale_B = jnp.zeros(log_prob_BT.shape[:1], bool)
    if proximal_log_prob_BT is None:
        proximal_log_prob_BT = log_prob_BT
    chex.assert_equal_shape([stale_B, advantage_B])
    chex.assert_equal_shape([proximal_log_prob_BT, log_prob_BT])
    stale_BT = stale_B[:, None] & mask_BT
    proximal_log_prob_BT = jax.lax.stop_gradient(proximal_log_prob_BT)
    importance_BT = jnp.exp(jnp.where(stale_BT, proximal_log_prob_BT - behaviour_log_prob_BT, 0.0))
    factor_BT = jnp.minimum(importance_BT, config.importance_cap)
    proximal_log_prob_BT = jnp.where(stale_BT, proximal_log_prob_BT, behaviour_log_prob_BT)

    # Masked slots hold arbitrary finite values; zeroing the difference keeps exp from overflowing to inf * 0.
    log_ratio_BT = jnp.where(mask_BT, log_prob_BT - proximal_log_prob_BT, 0.0)
    ratio_BT = jnp.exp(log_ratio_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - config.clip_low, 1 + config.clip_high)
    gain_BT, clipped_gain_BT = ratio_BT * advantage_B[:, None], clipped_BT * advantage_B[:, None]
    loss_BT = -factor_BT * jnp.minimum(gain_BT, clipped_gain_BT)
    kl_BT = jnp.zeros_like(loss_BT)
    if config.kl_coef > 0:
        log_odds_BT = jnp.where(mask_BT, reference_log_prob_BT - log_prob_BT, 0.0)
        kl_BT = jnp.exp(log_odds_BT) - log_odds_BT - 1

    length_B = jnp.sum(mask_BT, axis=1)
    tokens = jnp.sum(length_B).astype(jnp.float32)
    if config.aggregate == "sequence":
        weight_BT = mask_BT / jnp.maximum(length_B, 1)[:, None]
        weight = jnp.sum(length_B > 0).astype(jnp.float32)
    else:
        weight_BT, weight = mask_BT.astype(jnp.float32), tokens

    def total(x_BT):
        return jnp.sum(x_BT * mask_BT, dtype=jnp.float32)

    return LossSums(
        loss=jnp.sum(weight_BT * (loss_BT + config.kl_coef * kl_BT)),
        kl=jnp.sum(weight_BT * kl_BT),
        weight=weight,
        tokens=tokens,
        entropy=total(entropy_BT),
        clipped=total(clipped_gain_BT < gain_BT),
        ratio=total(ratio_BT),
        gap=total(jnp.abs(log_ratio_BT) * ~stale_BT),
        stale=total(stale_BT),
        importance=total(factor_BT * stale_BT),
        truncated=total(stale_BT & (importance_BT >= config.importance_cap)),
    )
