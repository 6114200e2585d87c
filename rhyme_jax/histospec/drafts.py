"""Drafts from history: a suffix match over earlier responses, and a vote on what came next.

The last tokens of a row are looked up in each earlier response to its prompt. In each response the longest match
counts (up to `MAX_MATCH` tokens, the occurrence nearest to the row's own position where several are as long);
the responses with the longest match of all then vote, token by token, on the continuation. All of it is shifted
compares over a padded array, on the device, inside the decoding loop.

Suffix letters: B rows, G prompt groups, R earlier responses of a group, P positions of a history row,
M = MAX_MATCH context tokens, J drafted positions.
"""

import jax
import jax.numpy as jnp
from flax import struct

MAX_MATCH = 7  # longest suffix compared (RhymeRL's released code and SuffixDecoding use similar depths)
SEPARATOR = -1  # pads history rows; equal to no token, so it is neither matched nor drafted
NO_TOKEN = -2  # context before the start of a sequence; equal to nothing in the history


@struct.dataclass
class HistoryBlock:
    """Earlier responses of the prompts in a batch, padded. Shared by the rows of a group.

    Each row of `tokens_GRP` is the last MAX_MATCH prompt tokens (left-padded), the response, then padding: index
    MAX_MATCH + t holds response position t, and the first response token can be drafted from the prompt alone.
    """

    tokens_GRP: jax.Array  # int32, SEPARATOR where empty
    weight_GR: jax.Array  # float32 vote of each response; 0 where empty


@struct.dataclass
class Draft:
    tokens_BJ: jax.Array  # int32; meaningless at or past length_B
    length_B: jax.Array  # int32, 0..J
    match_B: jax.Array  # int32, tokens of context matched by the voters; 0 without a draft


def last_tokens(tokens_BS: jax.Array, length_B: jax.Array) -> jax.Array:
    """The last MAX_MATCH tokens of each row, most recent first, [B, M]; NO_TOKEN before the start."""
    index_BM = length_B[:, None] - 1 - jnp.arange(MAX_MATCH)
    # A negative index would wrap around, so it is clipped and then masked.
    tokens_BM = jnp.take_along_axis(tokens_BS, jnp.maximum(index_BM, 0), axis=1)
    return jnp.where(index_BM >= 0, tokens_BM, NO_TOKEN)


def suffix_match(history_BRP: jax.Array, context_BM: jax.Array, position_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each earlier response continues the row's context.

    Returns:
      (next_BR: index of the token after the best match; match_BR: its length, 0..M)
    """
    positions = history_BRP.shape[-1]
    match_BRP = jnp.zeros(history_BRP.shape, jnp.int32)
    alive_BRP = history_BRP >= 0  # there is a next token to propose
    for m in range(MAX_MATCH):
        before_BRP = jnp.pad(history_BRP, ((0, 0), (0, 0), (m + 1, 0)), constant_values=SEPARATOR)[..., :positions]
        alive_BRP &= before_BRP == context_BM[:, None, m, None]
        match_BRP += alive_BRP
    # Beyond the end of the history the nearest is the last: clipping the position there keeps every distance below
    # a token's worth, so that length goes before nearness.
    here_B1 = jnp.minimum(MAX_MATCH + position_B, positions)[:, None]
    score_BRP = match_BRP * (positions + 1) - jnp.abs(jnp.arange(positions) - here_B1)[:, None, :]
    next_BR = jnp.argmax(score_BRP, axis=-1)
    return next_BR, jnp.take_along_axis(match_BRP, next_BR[..., None], axis=-1)[..., 0]


def vote(continuation_BRJ: jax.Array, weight_BR: jax.Array, min_prob: float) -> tuple[jax.Array, jax.Array]:
    """The path of tokens with the most votes, (tokens_BJ, length_B).

    At each position the token with the largest summed weight wins, and only the responses that proposed it vote
    on. The path ends where its share of the initial weight falls under min_prob or where its responses end.
    Ties go to the earlier response in the block, which is the more recent one.
    """
    total_B = jnp.sum(weight_BR, axis=1)

    def step(carry, token_BR):
        alive_BR, going_B = carry
        live_BR = jnp.where(token_BR >= 0, alive_BR, 0.0)
        same_BRR = token_BR[:, :, None] == token_BR[:, None, :]
        votes_BR = jnp.where(live_BR > 0, jnp.sum(same_BRR * live_BR[:, None, :], axis=-1), 0.0)
        winner_B1 = jnp.argmax(votes_BR, axis=1)[:, None]
        token_B1 = jnp.take_along_axis(token_BR, winner_B1, axis=1)
        votes_B = jnp.take_along_axis(votes_BR, winner_B1, axis=1)[:, 0]
        going_B &= (votes_B > 0) & (votes_B >= min_prob * total_B)
        return (jnp.where(token_BR == token_B1, live_BR, 0.0), going_B), (token_B1[:, 0], going_B)

    start = (weight_BR, total_B > 0)
    _, (tokens_JB, going_JB) = jax.lax.scan(step, start, jnp.moveaxis(continuation_BRJ, -1, 0))
    return tokens_JB.T, jnp.sum(going_JB, axis=0, dtype=jnp.int32)


def draft_from_history(
    history: HistoryBlock,
    group_B: jax.Array,
    tokens_BS: jax.Array,
    length_B: jax.Array,
    prompt_length_B: jax.Array,
    max_drafts: int,
    *,
    min_match: int,
    min_prob: float,
) -> Draft:
    """Up to `max_drafts` tokens (J) for each row, from the earlier responses to its prompt.

    Args:
      group_B: int32 row of the history block that each row draws from.
      min_match: shortest context that may vote; shorter matches draft nothing.
    """
    history_BRP, weight_BR = history.tokens_GRP[group_B], history.weight_GR[group_B]
    context_BM = last_tokens(tokens_BS, length_B)
    next_BR, match_BR = suffix_match(history_BRP, context_BM, length_B - prompt_length_B)
    match_BR = jnp.where(weight_BR > 0, match_BR, 0)
    longest_B = jnp.max(match_BR, axis=1)
    voters_BR = (match_BR == longest_B[:, None]) & (longest_B >= min_match)[:, None]
    index_BRJ = next_BR[..., None] + jnp.arange(max_drafts)
    last = history_BRP.shape[-1] - 1
    continuation_BRJ = jnp.take_along_axis(history_BRP, jnp.minimum(index_BRJ, last), axis=-1)
    continuation_BRJ = jnp.where(index_BRJ <= last, continuation_BRJ, SEPARATOR)
    tokens_BJ, draft_length_B = vote(continuation_BRJ, jnp.where(voters_BR, weight_BR, 0.0), min_prob)
    return Draft(tokens_BJ, draft_length_B, jnp.where(draft_length_B > 0, longest_B, 0))
