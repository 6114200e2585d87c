"""Log-probabilities of given responses: the decoder without a cache, as the learner and pretraining use it.

Suffix letters: B rows, S sequence positions, T response positions, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rhyme_jax.models import decoder
from rhyme_jax.models.blocked_head import blocked_log_probs
from rhyme_jax.models.config import DecoderConfig


def score_responses(
    params: dict,
    config: DecoderConfig,
    tokens_BS: jax.Array,
    prompt_length_B: jax.Array,
    response_slots: int,
    *,
    temperature: float = 1.0,
    remat: str = "none",
    vocab_block: int = 0,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores the T = response_slots tokens that follow each row's prompt.

    Only the hidden states that predict response tokens reach the head, so logits are [B, T, V], not [B, S, V]; with
    `vocab_block` there is never more than a block of them (`blocked_head`).
    Values at slots past a row's response are finite and meaningless; the caller masks by length.

    Args:
      tokens_BS: int32, each row `prompt, response, padding`, from position 0.
      prompt_length_B: int32, at least 1.
      temperature: divides the logits, as in sampling: a ratio of policies is only right at equal temperature.
      remat: what the backward pass computes again, one of `remat.REMAT_POLICIES`.
      vocab_block: entries of the vocabulary whose logits exist at a time, on each device. 0, or as many as there are
        on a device, computes all at once. Else `temperature` must be a Python number.

    Returns:
      (log_prob_BT of the row's own response tokens, entropy_BT of each predicted distribution in nats), float32
    """
    positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    hidden_BSD, _ = decoder.forward(params, config, tokens_BS, positions_BS, remat=remat, mesh=mesh)
    target_BT = prompt_length_B[:, None] + jnp.arange(response_slots)
    last = tokens_BS.shape[1] - 1
    hidden_BTD = jnp.take_along_axis(hidden_BSD, jnp.minimum(target_BT - 1, last)[:, :, None], axis=1)
    labels_BT = jnp.take_along_axis(tokens_BS, jnp.minimum(target_BT, last), axis=1)
    if 0 < vocab_block < config.vocab_size // (1 if mesh is None else mesh.shape["tensor"]):
        return blocked_log_probs(
            hidden_BTD.astype(config.logits_dtype),
            params["embed" if config.tie_embeddings else "head"],
            labels_BT,
            block=vocab_block,
            tied=config.tie_embeddings,
            temperature=temperature,
            softcap=config.logit_softcap,
            mesh=mesh,
        )
    logits_BTV = decoder.logits(params, config, hidden_BTD) / temperature
    log_probs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    log_prob_BT = jnp.take_along_axis(log_probs_BTV, labels_BT[:, :, None], axis=-1)[:, :, 0]
    entropy_BT = -jnp.sum(jnp.exp(log_probs_BTV) * log_probs_BTV, axis=-1)
    return log_prob_BT, entropy_BT
