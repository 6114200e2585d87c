"""One iteration of decoding, for all rows at once, as a pure function of arrays:

1. *draft* up to K - 1 tokens from the corpus of the row's prompt group (`drafts`);
2. *forward* over `[last token, drafts]`, K positions per row, writing their keys and values into the cache;
3. *sample* all K positions with the noise of their response positions (`noise`, `sampling`);
4. *commit* the accepted prefix and one more token, cut at EOS and budget (`verify`), and tell the corpus.

K = 1 is plain decoding, by the same code. A rejected draft leaves stale keys and values beyond the row's length;
nothing attends to them, and the next iteration overwrites them.

Suffix letters: B rows, S positions (cache and token buffer), T response positions, K verified positions,
J = K - 1 drafted positions, V vocabulary, X sources and M match lengths of drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from rhyme_jax.errors import InputError
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import WINDOWS, Tally, next_window
from rhyme_jax.histospec.drafts import (
    MAX_MATCH,
    SOURCES,
    Beliefs,
    Corpus,
    Draft,
    DraftRules,
    Reader,
    draft,
    write_live,
)
from rhyme_jax.histospec.sampling import SamplingParams, draw
from rhyme_jax.histospec.verify import verify
from rhyme_jax.models import decoder
from rhyme_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static choices of the engine. None of them changes a rollout's tokens but `sampling` and `eos_ids`."""

    sampling: SamplingParams
    eos_ids: tuple[int, ...]
    draft_buckets: tuple[int, ...] = (1, 8)  # values of K; 1 is among them
    rules: DraftRules = dataclasses.field(default_factory=DraftRules)
    window: str = "marginal"  # how long a row's draft may be: one of budget.WINDOWS
    by_length: bool = False  # while most rows decode, only those that are expected to be long draft
    chunk: int = 32  # iterations between two looks of the host
    max_rows: int = 256  # rows decoded together (rounded up to a power of two); more requests wait
    prompt_slots: int = 8  # shortest padded prompt; set to the longest of a data set, every batch has one shape

    def __post_init__(self):
        if not self.draft_buckets or any(k < 1 for k in self.draft_buckets) or 1 not in self.draft_buckets:
            raise InputError(f"draft.buckets={self.draft_buckets}: must hold 1 and otherwise sizes above 1")
        if not self.eos_ids:
            raise InputError("rollout.eos_ids=(): at least one end-of-sequence id is needed")
        for name in ("chunk", "max_rows", "prompt_slots"):
            if getattr(self, name) < 1:
                raise InputError(f"rollout.{name}={getattr(self, name)}: must be at least 1")
        if not 1 <= self.rules.min_match <= MAX_MATCH:
            raise InputError(
                f"draft.min_match={self.rules.min_match}: must be from 1 to {MAX_MATCH}, the longest match tried"
            )
        if not 0 <= self.rules.min_prob <= 1:
            raise InputError(f"draft.min_prob={self.rules.min_prob}: must lie in [0, 1]")
        for source in self.rules.sources:
            if source not in SOURCES[:3]:
                raise InputError(f"draft.sources: no source {source!r}; there are {', '.join(SOURCES[:3])}")
        if self.window not in WINDOWS:
            raise InputError(f"draft.window={self.window!r}: must be one of {', '.join(WINDOWS)}")

    @property
    def drafts(self) -> bool:
        return max(self.draft_buckets) > 1 and bool(self.rules.sources)

    @property
    def depths(self) -> int:
        """Longest draft."""
        return max(self.draft_buckets) - 1


@struct.dataclass
class RowState:
    """The rows being decoded. Leaves are indexed by row first; response position t of row b stands at
    `tokens_BS[b, prompt_length_B[b] + t]`.
    """

    tokens_BS: jax.Array  # int32: prompt, then response, then padding
    length_B: jax.Array  # int32: prompt and response so far
    prompt_length_B: jax.Array  # int32
    budget_B: jax.Array  # int32: most response tokens
    expected_B: jax.Array  # float32: predicted response tokens; 0 is unknown
    active_B: jax.Array  # bool: still decoding; padding rows never are
    ended_B: jax.Array  # bool: an EOS was emitted
    key_B2: jax.Array  # uint32: noise key data of the row
    reader: Reader  # where the row drafts from
    window_B: jax.Array  # int32: longest draft, where windows are the row's own
    log_prob_BT: jax.Array  # float32: of each response token at the sampling temperature
    behaviour_log_prob_BT: jax.Array  # float32: the same after top-k and top-p
    source_BT: jax.Array  # int8: 1 + source of the accepted draft that the token came from; 0: sampled
    forwards_B: jax.Array  # int32: iterations in which the row was active
    proposed_B: jax.Array  # int32: drafted tokens
    accepted_B: jax.Array  # int32: drafted tokens that were committed
    cache: decoder.Cache


def iterate(
    params: dict,
    model: DecoderConfig,
    config: EngineConfig,
    k: int,
    beliefs: Beliefs | None,
    corpus: Corpus | None,
    state: RowState,
    tally: Tally | None,
) -> tuple[Corpus | None, RowState, Tally | None]:
    """One iteration: draft, forward, sample, commit. Finished rows are left as they are. At k = 1 nothing is drafted,
    and beliefs, corpus and tally are None.
    """
    position_B = state.length_B - state.prompt_length_B
    remaining_B = state.budget_B - position_B
    with jax.named_scope("draft"):
        if k > 1:
            drafted, allowance_B = propose(config, k, beliefs, corpus, state)
            draft_BJ, draft_length_B = drafted.tokens_BJ, drafted.length_B
        else:
            draft_BJ, draft_length_B = jnp.zeros((len(position_B), 0), jnp.int32), jnp.zeros_like(position_B)
    last_B1 = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None] - 1, axis=1)
    with jax.named_scope("forward"):
        fed_BK = jnp.concatenate([last_B1, jnp.maximum(draft_BJ, 0)], axis=1)
        positions_BK = state.length_B[:, None] - 1 + jnp.arange(k)
        hidden_BKD, cache = decoder.forward(params, model, fed_BK, positions_BK, state.cache)
        logits_BKV = decoder.logits(params, model, hidden_BKD)
    with jax.named_scope("sample"):
        slot_BK = position_B[:, None] + jnp.arange(k)
        keys_BK2 = noise.position_keys(state.key_B2, slot_BK)
        sampled_BK, log_prob_BK, behaviour_log_prob_BK = draw(logits_BKV, keys_BK2, config.sampling)
    with jax.named_scope("commit"):
        verdict = verify(draft_BJ, draft_length_B, sampled_BK, remaining_B, state.active_B, config.eos_ids)
        committed_BK = jnp.arange(k) < verdict.commit_B[:, None]

        def write(buffer, index_BK, values_BK):
            # What is not committed is sent past the end of the buffer and dropped there.
            rows_B1 = jnp.arange(buffer.shape[0])[:, None]
            index_BK = jnp.where(committed_BK, index_BK, buffer.shape[1])
            return buffer.at[rows_B1, index_BK].set(values_BK, mode="drop")

        if k > 1:
            is_drafted_BK = jnp.arange(k) < verdict.accepted_B[:, None]
            source_BK = jnp.where(is_drafted_BK, 1 + drafted.source_B[:, None], 0).astype(jnp.int8)
            tally = tally.count(
                drafted.source_B, drafted.match_B, draft_length_B, verdict.accepted_B, allowance_B, state.active_B
            )
            corpus = write_live(corpus, state.reader, slot_BK, sampled_BK, committed_BK)
            window_B = state.window_B
            if config.window != "marginal":
                window_B = next_window(config.window, window_B, draft_length_B, verdict.accepted_B)
            state = state.replace(
                source_BT=write(state.source_BT, slot_BK, source_BK),
                proposed_B=state.proposed_B + jnp.where(state.active_B, draft_length_B, 0),
                accepted_B=state.accepted_B + verdict.accepted_B,
                reader=state.reader.replace(shift_B=drafted.shift_B),
                window_B=window_B,
            )
        state = state.replace(
            tokens_BS=write(state.tokens_BS, positions_BK + 1, sampled_BK),
            length_B=state.length_B + verdict.commit_B,
            active_B=state.active_B & ~verdict.ended_B & ~verdict.exhausted_B,
            ended_B=state.ended_B | verdict.ended_B,
            log_prob_BT=write(state.log_prob_BT, slot_BK, log_prob_BK),
            behaviour_log_prob_BT=write(state.behaviour_log_prob_BT, slot_BK, behaviour_log_prob_BK),
            forwards_B=state.forwards_B + state.active_B,
            cache=cache,
        )
    return corpus, state, tally


def propose(
    config: EngineConfig, k: int, beliefs: Beliefs, corpus: Corpus, state: RowState, windows: bool = True
) -> tuple[Draft, jax.Array]:
    """The drafts of all rows, cut to what they may use, and that allowance_B (int32).

    Args:
      windows: whether drafts are cut to their windows too.
    """
    position_B = state.length_B - state.prompt_length_B
    drafted = draft(
        corpus, state.reader, beliefs, config.rules, state.tokens_BS, state.length_B, state.prompt_length_B, k - 1
    )
    # The last token of the budget is the sampled one, so at most remaining - 1 drafts can be used.
    allowance_B = jnp.clip(state.budget_B - position_B - 1, 0, k - 1)
    if config.by_length:
        allowance_B = jnp.where(_expected_short(state), 0, allowance_B)
    if windows and config.window == "marginal":
        allowance_B = jnp.minimum(allowance_B, beliefs.window_XM[drafted.source_B, drafted.match_B])
    elif windows:
        allowance_B = jnp.minimum(allowance_B, state.window_B)
    return drafted.replace(length_B=jnp.minimum(drafted.length_B, allowance_B)), allowance_B


def _expected_short(state: RowState) -> jax.Array:
    """bool [B]: the row is expected to be done before half of what the longest still needs, while more than half of
    the batch decodes. The longest rows decide when a batch is done: K is chosen for their drafts alone.
    """
    left_B = jnp.where(state.active_B, state.expected_B - (state.length_B - state.prompt_length_B), 0)
    crowded = 2 * jnp.sum(state.active_B) > len(left_B)
    return (state.expected_B > 0) & (left_B < 0.5 * jnp.max(left_B)) & crowded
