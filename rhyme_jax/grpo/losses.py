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

    def __post_init__(self):
        if self.aggregate not in AGGREGATES:
            raise InputError(f"grpo.aggregate={self.aggregate!r}: must be one of {', '.join(AGGREGATES)}")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if not getattr(self, name) >= 0:
                raise InputError(f"grpo.{name}={getattr(self, name)}: must not be negative")


@struct.dataclass
class LossSums:
    """Float32 scalars. Divide `loss`, `kl` by `weight`; the others by `tokens`."""

    loss: jax.Array  # policy loss plus kl_coef * KL, weighted as `aggregate` says
    kl: jax.Array  # k3 estimate of KL(policy || reference), weighted likewise
    weight: jax.Array  # number of responses ("sequence") or of tokens ("token")
    tokens: jax.Array
    entropy: jax.Array
    clipped: jax.Array  # tokens at which the clip takes the gradient away
    ratio: jax.Array
    gap: jax.Array  # |learner's log-prob - rollout's|; stays near 0 until the first update of a batch


def policy_loss(
    config: LossConfig,
    log_prob_BT: jax.Array,
    entropy_BT: jax.Array,
    behaviour_log_prob_BT: jax.Array,
    advantage_B: jax.Array,
    mask_BT: jax.Array,
    reference_log_prob_BT: jax.Array | None = None,
) -> LossSums:
    """PPO's clipped surrogate with group advantages (Shao et al. 2024, eq. 3) over the tokens in mask_BT.

    Args:
      behaviour_log_prob_BT: of the policy that sampled the tokens, at the same temperature.
      mask_BT: bool, real response tokens of graded samples. A row may be all False; a batch too (sums of 0).
      reference_log_prob_BT: needed where kl_coef > 0. KL by the k3 estimator (Schulman 2020).
    """
    chex.assert_equal_shape([log_prob_BT, entropy_BT, behaviour_log_prob_BT, mask_BT])
    chex.assert_shape(advantage_B, log_prob_BT.shape[:1])
    # Masked slots hold arbitrary finite values; zeroing the difference keeps exp from overflowing to inf * 0.
    log_ratio_BT = jnp.where(mask_BT, log_prob_BT - behaviour_log_prob_BT, 0.0)
    ratio_BT = jnp.exp(log_ratio_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - config.clip_low, 1 + config.clip_high)
    gain_BT, clipped_gain_BT = ratio_BT * advantage_B[:, None], clipped_BT * advantage_B[:, None]
    loss_BT = -jnp.minimum(gain_BT, clipped_gain_BT)
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
        gap=total(jnp.abs(log_ratio_BT)),
    )
