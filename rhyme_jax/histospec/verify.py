"""Verification of drafts, as a pure function of arrays.

The model scored `[last token, drafts]`, and a token was *sampled* at each of those K positions with the
position's own noise. A draft is accepted if and only if it equals the sampled token; the first sampled token
that differs is itself what plain decoding would have emitted there. So the committed tokens are exactly those of
plain decoding, and the choice of drafts cannot change their law. (The law is that of rejection sampling with a
one-hot proposal, Leviathan et al. 2023, without a residual distribution.)

Suffix letters: B rows, K verified positions, J = K - 1 drafted positions.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Verdict:
    """What each row commits."""

    commit_B: jax.Array  # int32, sampled tokens to append: 0 for an inactive row, else 1..K
    accepted_B: jax.Array  # int32, how many of those were drafted
    ended_B: jax.Array  # bool, the last committed token is an EOS
    exhausted_B: jax.Array  # bool, the budget is used up without an EOS


def verify(
    draft_BJ: jax.Array,
    draft_length_B: jax.Array,
    sampled_BK: jax.Array,
    remaining_B: jax.Array,
    active_B: jax.Array,
    eos_ids: tuple[int, ...],
) -> Verdict:
    """Commits the accepted prefix and the one token after it, cut at the first EOS and at the budget.

    Where an EOS and the end of the budget fall in one run, whichever comes first decides; on the same token the
    EOS wins.

    Args:
      draft_BJ: int32 drafted tokens; those at or past draft_length_B are ignored.
      draft_length_B: int32, 0..J.
      sampled_BK: int32; position 0 follows the row's last token, position k follows draft k - 1.
      remaining_B: int32 tokens that the row's budget still allows, at least 1 where active.
      active_B: bool; inactive rows commit nothing.
      eos_ids: static ids that end a response.

    Raises:
      ValueError: shapes do not fit (at trace time).
    """
    rows, k = sampled_BK.shape
    if draft_BJ.shape != (rows, k - 1):
        raise ValueError(
            f"verify: draft {draft_BJ.shape} does not fit sampled {sampled_BK.shape}; want {(rows, k - 1)}"
        )
    for name, x in (("draft_length", draft_length_B), ("remaining", remaining_B), ("active", active_B)):
        if x.shape != (rows,):
            raise ValueError(f"verify: {name} has shape {x.shape}, want {(rows,)}")

    matches_BJ = (draft_BJ == sampled_BK[:, :-1]) & (jnp.arange(k - 1) < draft_length_B[:, None])
    matched_B = jnp.sum(jnp.cumprod(matches_BJ, axis=1, dtype=jnp.int32), axis=1)
    limit_B = jnp.minimum(matched_B + 1, remaining_B)
    is_eos_BK = jnp.isin(sampled_BK, jnp.array(eos_ids, jnp.int32)) & (jnp.arange(k) < limit_B[:, None])
    ended_B = jnp.any(is_eos_BK, axis=1) & active_B
    commit_B = jnp.where(ended_B, jnp.argmax(is_eos_BK, axis=1) + 1, limit_B)
    commit_B = jnp.where(active_B, commit_B, 0).astype(jnp.int32)
    return Verdict(
        commit_B=commit_B,
        accepted_B=jnp.minimum(matched_B, commit_B).astype(jnp.int32),
        ended_B=ended_B,
        exhausted_B=active_B & ~ended_B & (commit_B == remaining_B),
    )
