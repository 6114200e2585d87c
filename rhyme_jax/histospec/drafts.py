"""Drafts: what a row is likely to say next, from what was said to the same prompt.

All texts of a prompt group stand side by side in one *corpus* on the device, shared by the rows of the group:

- *history*: earlier responses to the prompt, the most recent first;
- *siblings*: the responses that are being decoded, among them, as *self*, the row's own;
- the prompt, which belongs to *self* too.

The last tokens of a row are looked up in each text of its group. In each text the longest match counts (up to
`MAX_MATCH` tokens, the occurrence nearest to the row's own position where several are as long). The texts with the
longest match of all then vote on the continuation, and the path on which they agree most is the draft. All of it is
shifted compares over a padded array, inside the decoding loop: no tree, no copy per row, no round trip to the host.

With coupled noise a row has an *own* earlier response: drawn with the very noise that the row meets now. It is
followed at the row's own position, or where the row's last tokens say that it went on after a divergence.

Suffix letters: B rows, G prompt groups, R texts of a group, P positions of a text, M = MAX_MATCH context tokens,
J drafted positions, X sources, C samples of a group.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rhyme_jax.histospec.noise import UNKNOWN_NOISE

MAX_MATCH = 7  # longest suffix compared (RhymeRL's released code and SuffixDecoding use similar depths)
SEPARATOR = -1  # pads texts; equal to no token, so it is neither matched nor drafted
NO_TOKEN = -2  # context before the start of a sequence; equal to nothing in the corpus

SOURCES = ("history", "siblings", "self", "own")
HISTORY, SIBLINGS, SELF, OWN = range(len(SOURCES))
LIVE_WEIGHT = 0.5  # vote of a text whose reward is not known yet, between a wrong answer's and a right one's
PROXIMITY_BITS = 27  # of a score; below the match length, so positions go up to 2^26


@dataclasses.dataclass(frozen=True)
class HistoryBlock:
    """Earlier responses of the prompts in a batch, padded, on the host.

    Each row of `tokens_GRP` is the last MAX_MATCH prompt tokens (left-padded), the response, then padding: index
    MAX_MATCH + t holds response position t, and the first response token can be drafted from the prompt alone.
    """

    tokens_GRP: np.ndarray  # int32, SEPARATOR where empty
    weight_GR: np.ndarray  # float32 vote of each response; 0 where empty
    sample_GR: np.ndarray  # int32 index of the response within its group of samples; -1 where empty
    noise_GR: np.ndarray  # int64 noise word it was drawn with; UNKNOWN_NOISE where empty or not on record

    def own_responses(self, group_B: np.ndarray, sample_B: np.ndarray, word_B: np.ndarray) -> np.ndarray:
        """For each row, its group's most recent response of its sample under its noise word; -1 where none is."""
        same_BR = (self.sample_GR[group_B] == sample_B[:, None]) & (self.noise_GR[group_B] == word_B[:, None])
        same_BR &= (word_B != UNKNOWN_NOISE)[:, None]
        return np.where(same_BR.any(1), same_BR.argmax(1), -1).astype(np.int32)


@struct.dataclass
class Corpus:
    """The texts that a batch may draft from. Rows 0..history-1 of a group hold earlier responses, the last row the
    prompt, and those between the live responses, one for each of C samples. All are laid out as in HistoryBlock.
    """

    tokens_GRP: jax.Array  # int32, SEPARATOR where there is nothing (yet)
    weight_GR: jax.Array  # float32 vote of each text; 0 where empty or switched off
    history: int = struct.field(pytree_node=False)

    @property
    def source_R(self) -> np.ndarray:
        texts = self.tokens_GRP.shape[1]
        live = texts - self.history - 1
        return np.repeat([HISTORY, SIBLINGS, SELF], [self.history, live, 1])


@struct.dataclass
class Reader:
    """Where each row stands in the corpus."""

    group_B: jax.Array  # int32 group of the corpus
    live_B: jax.Array  # int32 text that holds the row's own live response
    own_B: jax.Array  # int32 text of the row's earlier response under the same noise; -1 where there is none
    shift_B: jax.Array  # int32 position in that response, less the row's own: what divergences added or left out


@struct.dataclass
class Beliefs:
    """What is believed of a draft of a source at a match length, see `budget.Acceptance`."""

    value_XM: jax.Array  # float32 expected number of accepted tokens, at match lengths 0..MAX_MATCH
    window_XM: jax.Array  # int32 longest draft that is worth proposing


@dataclasses.dataclass(frozen=True)
class DraftRules:
    """Static."""

    sources: tuple[str, ...] = ("history", "siblings", "self")
    min_match: int = 3  # tokens of context that the voters must match
    min_prob: float = 0.1  # share of the votes below which a drafted path stops


@struct.dataclass
class Draft:
    tokens_BJ: jax.Array  # int32; meaningless at or past length_B
    length_B: jax.Array  # int32, 0..J
    match_B: jax.Array  # int32, tokens of context matched; meaningless without a draft
    source_B: jax.Array  # int32 index of SOURCES; meaningless without a draft
    shift_B: jax.Array  # int32, the row's next `Reader.shift_B`


def make_corpus(history: HistoryBlock, prompts: list[np.ndarray], live_texts: int, rules: DraftRules) -> Corpus:
    """The corpus of a batch before its first token, on the host.

    Args:
      history: of the groups of the batch, in order.
      prompts: token ids of each group's prompt; of a longer one than P - MAX_MATCH tokens, the last are kept.
      live_texts: C, samples of a group.
    """
    groups, earlier, positions = history.tokens_GRP.shape
    tokens_GRP = np.full((groups, earlier + live_texts + 1, positions), SEPARATOR, np.int32)
    weight_GR = np.zeros(tokens_GRP.shape[:2], np.float32)
    if "history" in rules.sources:
        tokens_GRP[:, :earlier], weight_GR[:, :earlier] = history.tokens_GRP, history.weight_GR
    if "siblings" in rules.sources:
        weight_GR[:, earlier:-1] = LIVE_WEIGHT
    if "self" in rules.sources:
        weight_GR[:, -1] = LIVE_WEIGHT
    for g, prompt in enumerate(prompts):
        tail, whole = prompt[-MAX_MATCH:], prompt[max(0, len(prompt) - positions + MAX_MATCH) :]
        tokens_GRP[g, earlier:-1, MAX_MATCH - len(tail) : MAX_MATCH] = tail
        tokens_GRP[g, -1, MAX_MATCH : MAX_MATCH + len(whole)] = whole
    return Corpus(tokens_GRP, weight_GR, earlier)


def write_live(corpus: Corpus, reader: Reader, position_BK: jax.Array, tokens_BK: jax.Array, write_BK) -> Corpus:
    """The corpus with new tokens of the rows at response positions position_BK, where write_BK."""
    index_BK = jnp.where(write_BK, MAX_MATCH + position_BK, corpus.tokens_GRP.shape[-1])  # else dropped
    at = corpus.tokens_GRP.at[reader.group_B[:, None], reader.live_B[:, None], index_BK]
    return corpus.replace(tokens_GRP=at.set(tokens_BK, mode="drop"))


def last_tokens(tokens_BS: jax.Array, length_B: jax.Array) -> jax.Array:
    """The last MAX_MATCH tokens of each row, most recent first, [B, M]; NO_TOKEN before the start."""
    index_BM = length_B[:, None] - 1 - jnp.arange(MAX_MATCH)
    # A negative index would wrap around, so it is clipped and then masked.
    tokens_BM = jnp.take_along_axis(tokens_BS, jnp.maximum(index_BM, 0), axis=1)
    return jnp.where(index_BM >= 0, tokens_BM, NO_TOKEN)


def suffix_match(
    tokens_GRP: jax.Array, group_B: jax.Array, context_BM: jax.Array, here_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where each text of a row's group continues the row's context.

    Args:
      here_B: int32 index in the texts that the best match should be near to; the later one wins a tie.

    Returns:
      (next_BR: index of the token after the best match; match_BR: its length, 0..M; where that is 0, next_BR is any
      index that holds a token, or any at all)
    """
    positions = tokens_GRP.shape[-1]
    # Each slice is looked up by group on its own, so that the look-up is fused into the compare: 3.5 ms for 32 rows
    # over 33 texts of 4,100 tokens, without a copy of the texts for each row.
    alive_BRP = tokens_GRP[..., MAX_MATCH:][group_B] >= 0  # there is a next token to propose
    match_BRP = jnp.zeros(alive_BRP.shape, jnp.int32)
    for m in range(MAX_MATCH):
        before_BRP = tokens_GRP[..., MAX_MATCH - 1 - m : positions - 1 - m][group_B]
        alive_BRP &= before_BRP == context_BM[:, None, m, None]
        match_BRP += alive_BRP
    # One number orders by length, then by nearness; its maximum is vectorized where an argmax would not be, and the
    # position can be read back from it.
    index_P = jnp.arange(MAX_MATCH, positions)
    distance_BP = jnp.abs(index_P - here_B[:, None])
    nearness_BP = 2 * (2 ** (PROXIMITY_BITS - 1) - 1 - distance_BP) + (index_P >= here_B[:, None])
    best_BR = jnp.max((match_BRP << PROXIMITY_BITS) | nearness_BP[:, None], axis=-1)
    nearness_BR = best_BR & (2**PROXIMITY_BITS - 1)
    distance_BR = 2 ** (PROXIMITY_BITS - 1) - 1 - nearness_BR // 2
    next_BR = here_B[:, None] + jnp.where(nearness_BR % 2 == 1, distance_BR, -distance_BR)
    return next_BR, best_BR >> PROXIMITY_BITS


def vote(continuation_BRJ: jax.Array, weight_BR: jax.Array, min_prob: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The continuation on which the voters agree most: (tokens_BJ, length_B, winner_B: its text).

    If the future were one of the continuations, drawn by weight, this is the one that foretells the most tokens of
    it. It ends where the weight of those that agree so far falls under min_prob of all, or where it ends itself.
    (Voting token by token needs a step for each; this takes one reduction, a third of the time at J = 7 and a
    seventh at J = 127.) The first text wins a tie, which is the most recent one.
    """
    drafts = continuation_BRJ.shape[-1]
    same_BRRJ = (continuation_BRJ[:, :, None] == continuation_BRJ[:, None]) & (continuation_BRJ[:, :, None] >= 0)
    # Tokens on which two continuations agree before they first part.
    agree_BRR = jnp.min(jnp.where(same_BRRJ, drafts, jnp.arange(drafts)), axis=-1)
    foretold_BR = jnp.sum(agree_BRR * weight_BR[:, None], axis=-1)
    winner_B = jnp.argmax(jnp.where(weight_BR > 0, foretold_BR, -1.0), axis=1)
    agree_BR = jnp.take_along_axis(agree_BRR, winner_B[:, None, None], axis=1)[:, 0]
    votes_BJ = jnp.sum(jnp.where(agree_BR[:, :, None] > jnp.arange(drafts), weight_BR[:, :, None], 0.0), axis=1)
    enough_BJ = (votes_BJ > 0) & (votes_BJ >= min_prob * jnp.sum(weight_BR, axis=1)[:, None])
    tokens_BJ = jnp.take_along_axis(continuation_BRJ, winner_B[:, None, None], axis=1)[:, 0]
    return tokens_BJ, jnp.sum(enough_BJ, axis=1, dtype=jnp.int32), winner_B.astype(jnp.int32)


def draft(
    corpus: Corpus,
    reader: Reader,
    beliefs: Beliefs,
    rules: DraftRules,
    tokens_BS: jax.Array,
    length_B: jax.Array,
    prompt_length_B: jax.Array,
    max_drafts: int,
) -> Draft:
    """Up to `max_drafts` tokens (J) for each row."""
    context_BM = last_tokens(tokens_BS, length_B)
    here_B = MAX_MATCH + length_B - prompt_length_B
    next_BR, match_BR = suffix_match(corpus.tokens_GRP, reader.group_B, context_BM, here_B + reader.shift_B)

    is_self_BR = jnp.arange(next_BR.shape[1]) == reader.live_B[:, None]
    self_weight = LIVE_WEIGHT if "self" in rules.sources else 0.0
    weight_BR = jnp.where(is_self_BR, self_weight, corpus.weight_GR[reader.group_B])
    counted_BR = jnp.where(weight_BR > 0, match_BR, 0)
    longest_B = jnp.max(counted_BR, axis=1)
    voters_BR = (counted_BR == longest_B[:, None]) & (longest_B >= rules.min_match)[:, None]
    every_R = jnp.arange(next_BR.shape[1])
    continuation_BRJ = _read(corpus, reader.group_B[:, None], every_R[None], next_BR, max_drafts)
    voted_BJ, voted_length_B, winner_B = vote(continuation_BRJ, jnp.where(voters_BR, weight_BR, 0.0), rules.min_prob)
    source_B = jnp.where(winner_B == reader.live_B, SELF, jnp.asarray(corpus.source_R, jnp.int32)[winner_B])

    # The own earlier response: where a suffix of it matches, else where the row's position says.
    own_B = jnp.maximum(reader.own_B, 0)
    found_B = jnp.take_along_axis(match_BR, own_B[:, None], axis=1)[:, 0] >= rules.min_match
    pointer_B = jnp.where(found_B, jnp.take_along_axis(next_BR, own_B[:, None], axis=1)[:, 0], here_B + reader.shift_B)
    before_BM = jnp.flip(_read(corpus, reader.group_B, own_B, pointer_B - MAX_MATCH, MAX_MATCH), axis=1)
    own_match_B = jnp.sum(jnp.cumprod(before_BM == context_BM, axis=1, dtype=jnp.int32), axis=1)
    own_BJ = _read(corpus, reader.group_B, own_B, pointer_B, max_drafts)
    own_length_B = jnp.where(reader.own_B >= 0, jnp.sum(jnp.cumprod(own_BJ >= 0, axis=1, dtype=jnp.int32), axis=1), 0)
    better_B = beliefs.value_XM[OWN, own_match_B] >= beliefs.value_XM[source_B, longest_B]
    own_B = (own_length_B > 0) & (better_B | (voted_length_B == 0))

    source_B = jnp.where(own_B, OWN, source_B)
    match_B = jnp.where(own_B, own_match_B, longest_B)
    return Draft(
        tokens_BJ=jnp.where(own_B[:, None], own_BJ, voted_BJ),
        length_B=jnp.where(own_B, own_length_B, voted_length_B),
        match_B=match_B,
        source_B=source_B,
        shift_B=jnp.where(own_B, pointer_B - here_B, reader.shift_B),
    )


def _read(corpus: Corpus, group, text, start, count: int) -> jax.Array:
    """`count` tokens of a text from an index on, [..., count]; SEPARATOR outside it."""
    index = start[..., None] + jnp.arange(count)
    last = corpus.tokens_GRP.shape[-1] - 1
    # A negative index would wrap around, so it is clipped and then masked.
    tokens = corpus.tokens_GRP[group[..., None], text[..., None], jnp.clip(index, 0, last)]
    return jnp.where((index >= 0) & (index <= last), tokens, SEPARATOR)
