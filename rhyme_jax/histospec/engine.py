"""The rollout engine: a decoding loop on the device that verifies drafts, and a host loop over its chunks.

One iteration, for all rows at once:

1. *draft* up to K - 1 tokens from history (`drafts`);
2. *forward* over `[last token, drafts]`, K positions per row, writing their keys and values into the cache;
3. *sample* all K positions with the noise of their response positions (`noise`, `sampling`);
4. *commit* the accepted prefix and one more token, cut at EOS and budget (`verify`).

K = 1 is plain decoding, by the same code. A chunk runs up to `chunk` iterations in a `lax.while_loop`; between
chunks the host reports progress, shrinks the batch when few rows are left, and goes to a smaller K where the present
one does not pay (after a first, short chunk at the earliest). A rejected draft leaves stale keys and values beyond the
row's length; nothing attends to them, and the next iteration overwrites them.

Suffix letters: B rows, S positions (cache and token buffer), T response positions, K verified positions,
J = K - 1 drafted positions, V vocabulary, U different prompts of P slots, N finished rollouts (in a cache: key/value
heads).
"""

import dataclasses
import operator
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.buckets import bucket
from rhyme_jax.errors import InputError
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.drafts import MAX_MATCH, Draft, HistoryBlock, draft_from_history
from rhyme_jax.histospec.sampling import SamplingParams, draw
from rhyme_jax.histospec.verify import verify
from rhyme_jax.models import decoder
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import BATCH_AXES

PROBE = 4  # iterations of the first chunk with drafts, after which they may be given up
COMPACT = 4  # a batch shrinks to 1/4 when so few rows are left; finer steps would compile more programs
FEWEST_ROWS = 8  # smallest batch that is shrunk to


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static choices of the engine. None of them changes a rollout's tokens but `sampling` and `eos_ids`."""

    sampling: SamplingParams
    eos_ids: tuple[int, ...]
    draft_buckets: tuple[int, ...] = (1, 8)  # values of K: the largest first, a smaller one where it does not pay
    min_match: int = 3  # tokens of context that a draft must match
    min_prob: float = 0.1  # share of the votes below which a drafted path stops
    verify_cost: float = 0.0  # time of each further verified position, as a share of a K = 1 iteration
    chunk: int = 32  # iterations between two looks of the host
    max_rows: int = 256  # rows decoded together (rounded up to a power of two); more are taken in turns
    prompt_slots: int = 8  # shortest padded prompt; set to the longest of a data set, every batch has one shape

    def __post_init__(self):
        if not self.draft_buckets or any(k < 1 for k in self.draft_buckets) or 1 not in self.draft_buckets:
            raise InputError(f"draft.buckets={self.draft_buckets}: must hold 1 and otherwise sizes above 1")
        if not self.eos_ids:
            raise InputError("rollout.eos_ids=(): at least one end-of-sequence id is needed")
        for name in ("chunk", "max_rows", "prompt_slots"):
            if getattr(self, name) < 1:
                raise InputError(f"rollout.{name}={getattr(self, name)}: must be at least 1")
        if self.min_match < 1:
            raise InputError(f"draft.min_match={self.min_match}: must be at least 1")
        if self.min_match > MAX_MATCH:
            raise InputError(f"draft.min_match={self.min_match}: must be at most {MAX_MATCH}, the longest match tried")
        if not self.verify_cost >= 0:
            raise InputError(f"draft.verify_cost={self.verify_cost}: must not be negative")

    def worth_drafting(self, k: int, tokens_per_row_forward: float) -> bool:
        """Whether K = k gave enough tokens for its cost: more per unit of time than K = 1 would have."""
        return tokens_per_row_forward >= 1 + self.verify_cost * (k - 1)


@dataclasses.dataclass(frozen=True)
class Request:
    """One rollout to make. (step, prompt_id, sample) keys its noise."""

    prompt: np.ndarray  # int32 token ids, at least one
    prompt_id: int  # 64-bit, `history.store.prompt_id`
    sample: int  # index within the prompt's group
    step: int  # training step
    group: int  # row of the history block to draft from
    budget: int  # most tokens of the response


@struct.dataclass
class RolloutState:
    """A batch of rows being decoded. Leaves are indexed by row first; a response position t of row b stands at
    `tokens_BS[b, prompt_length_B[b] + t]`.
    """

    tokens_BS: jax.Array  # int32: prompt, then response, then padding
    length_B: jax.Array  # int32: prompt and response so far
    prompt_length_B: jax.Array  # int32
    budget_B: jax.Array  # int32: most response tokens
    active_B: jax.Array  # bool: still decoding; padding rows never are
    ended_B: jax.Array  # bool: an EOS was emitted
    key_B2: jax.Array  # uint32: noise key data of the row
    group_B: jax.Array  # int32: row of the history block
    log_prob_BT: jax.Array  # float32: of each response token at the sampling temperature
    behaviour_log_prob_BT: jax.Array  # float32: the same after top-k and top-p
    drafted_BT: jax.Array  # bool: the token came from an accepted draft
    forwards_B: jax.Array  # int32: iterations in which the row was active
    proposed_B: jax.Array  # int32: drafted tokens
    accepted_B: jax.Array  # int32: drafted tokens that were committed
    cache: decoder.Cache


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Finished rollouts, on the host, in the order of the requests. N rollouts."""

    tokens_NS: np.ndarray  # int32
    prompt_length_N: np.ndarray  # int32
    response_length_N: np.ndarray  # int32, the EOS included
    ended_N: np.ndarray  # bool: by EOS; otherwise cut off by the budget
    log_prob_NT: np.ndarray  # float32, 0 past the response
    behaviour_log_prob_NT: np.ndarray
    drafted_NT: np.ndarray  # bool
    forwards_N: np.ndarray  # int32 row-forwards
    proposed_N: np.ndarray
    accepted_N: np.ndarray
    iterations: int  # of the device loop, over all turns
    seconds: float  # wall time, compilation excluded where shapes were already compiled

    def response(self, n: int) -> np.ndarray:
        start = self.prompt_length_N[n]
        return self.tokens_NS[n, start : start + self.response_length_N[n]]

    @property
    def generated(self) -> int:
        """Response tokens over all rollouts."""
        return int(self.response_length_N.sum())

    @property
    def tokens_per_row_forward(self) -> float:
        return self.generated / max(1, int(self.forwards_N.sum()))

    @property
    def acceptance(self) -> float:
        """Share of the proposed draft tokens that were committed; 0 where none were proposed."""
        return float(self.accepted_N.sum() / max(1, self.proposed_N.sum()))


def iterate(
    params: dict,
    model: DecoderConfig,
    config: EngineConfig,
    k: int,
    history: HistoryBlock | None,
    state: RolloutState,
) -> RolloutState:
    """One iteration: draft, forward, sample, commit. Finished rows are left as they are."""
    remaining_B = state.budget_B - (state.length_B - state.prompt_length_B)
    with jax.named_scope("draft"):
        draft = _draft(config, k, history, state, remaining_B)
    last_B1 = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None] - 1, axis=1)
    with jax.named_scope("forward"):
        fed_BK = jnp.concatenate([last_B1, jnp.maximum(draft.tokens_BJ, 0)], axis=1)
        positions_BK = state.length_B[:, None] - 1 + jnp.arange(k)
        hidden_BKD, cache = decoder.forward(params, model, fed_BK, positions_BK, state.cache)
        logits_BKV = decoder.logits(params, model, hidden_BKD)
    with jax.named_scope("sample"):
        slot_BK = (state.length_B - state.prompt_length_B)[:, None] + jnp.arange(k)
        keys_BK2 = noise.position_keys(state.key_B2, slot_BK)
        sampled_BK, log_prob_BK, behaviour_log_prob_BK = draw(logits_BKV, keys_BK2, config.sampling)
    with jax.named_scope("commit"):
        verdict = verify(draft.tokens_BJ, draft.length_B, sampled_BK, remaining_B, state.active_B, config.eos_ids)
        committed_BK = jnp.arange(k) < verdict.commit_B[:, None]

        def write(buffer, index_BK, values_BK):
            # What is not committed is sent past the end of the buffer and dropped there.
            rows_B1 = jnp.arange(buffer.shape[0])[:, None]
            index_BK = jnp.where(committed_BK, index_BK, buffer.shape[1])
            return buffer.at[rows_B1, index_BK].set(values_BK, mode="drop")

        return state.replace(
            tokens_BS=write(state.tokens_BS, positions_BK + 1, sampled_BK),
            length_B=state.length_B + verdict.commit_B,
            active_B=state.active_B & ~verdict.ended_B & ~verdict.exhausted_B,
            ended_B=state.ended_B | verdict.ended_B,
            log_prob_BT=write(state.log_prob_BT, slot_BK, log_prob_BK),
            behaviour_log_prob_BT=write(state.behaviour_log_prob_BT, slot_BK, behaviour_log_prob_BK),
            drafted_BT=write(state.drafted_BT, slot_BK, jnp.arange(k) < verdict.accepted_B[:, None]),
            forwards_B=state.forwards_B + state.active_B,
            proposed_B=state.proposed_B + jnp.where(state.active_B, draft.length_B, 0),
            accepted_B=state.accepted_B + verdict.accepted_B,
            cache=cache,
        )


def _draft(config: EngineConfig, k: int, history: HistoryBlock | None, state: RolloutState, remaining_B) -> Draft:
    if k == 1 or history is None:
        zeros_B = jnp.zeros_like(state.length_B)
        return Draft(jnp.zeros((zeros_B.shape[0], k - 1), jnp.int32), zeros_B, zeros_B)
    draft = draft_from_history(
        history,
        state.group_B,
        state.tokens_BS,
        state.length_B,
        state.prompt_length_B,
        k - 1,
        min_match=config.min_match,
        min_prob=config.min_prob,
    )
    # The last token of the budget is the sampled one, so at most remaining - 1 drafts can be used.
    return draft.replace(length_B=jnp.minimum(draft.length_B, remaining_B - 1))


def prefill(
    params: dict, model: DecoderConfig, prompt_UP: jax.Array, prompt_of_row_B: jax.Array, positions: int
) -> decoder.Cache:
    """The cache of a batch at its start: each of U prompts is run once, and its rows get copies.

    Slots at or past a prompt's last token hold whatever its padding gave: the first iteration feeds the last prompt
    token again, and later ones overwrite the rest before anything attends to it.

    Args:
      prompt_UP: int32 padded prompts.
      prompt_of_row_B: int32, which of them each row continues.
      positions: S, slots of the cache.
    """
    prompts, slots = prompt_UP.shape
    positions_UP = jnp.broadcast_to(jnp.arange(slots), (prompts, slots))
    _, cache = decoder.forward(params, model, prompt_UP, positions_UP, decoder.init_cache(model, prompts, slots))
    grow = ((0, 0), (0, 0), (0, positions - slots), (0, 0))
    return jax.tree.map(lambda x_UNPh: jnp.pad(x_UNPh[prompt_of_row_B], grow), cache)


class RolloutEngine:
    """Makes rollouts on one mesh.

    `compiled` lists the programs that were traced, in order. Their number is bounded: rows are powers of two (rounded
    up to fill the mesh) and what those shrink to, prompt and response slots double from a minimum, K is one of
    `draft_buckets`, history blocks are padded by the store.
    """

    def __init__(self, model: DecoderConfig, config: EngineConfig, mesh: Mesh, seed: int):
        self.model, self.config, self.mesh, self.seed = model, config, mesh, seed
        self.compiled: list[str] = []
        self._row_multiple = int(np.prod([mesh.shape[a] for a in BATCH_AXES]))
        self._by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        heads = "tensor" if model.kv_heads % mesh.shape["tensor"] == 0 else None
        cache = NamedSharding(mesh, PartitionSpec(BATCH_AXES, heads))
        self._prefill = jax.jit(self._traced_prefill, static_argnames="positions", out_shardings=cache)
        self._chunk = jax.jit(self._traced_chunk, static_argnames="k", donate_argnames="state")
        by_row = {f.name: self._by_row for f in dataclasses.fields(RolloutState)}
        self._gather = jax.jit(
            self._traced_gather,
            out_shardings=RolloutState(**{**by_row, "cache": cache}),
        )

    def generate(
        self,
        params: dict,
        requests: Sequence[Request],
        history: HistoryBlock | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollouts:
        """Rolls out all requests, `max_rows` at a time.

        Args:
          params: weights in the compute dtype, placed on the engine's mesh.
          history: earlier responses to draft from; None decodes plainly.
          progress: called between chunks with (rows finished, rows in all).

        Raises:
          InputError: a prompt is empty, a budget is below 1, or the two exceed the model's positions.
        """
        self._check(requests, history)
        # One set of shapes for all turns, so that a last, smaller turn compiles nothing new.
        rows = self.row_bucket(min(len(requests), self.config.max_rows))
        prompt_slots = bucket(max(len(r.prompt) for r in requests), self.config.prompt_slots)
        response_slots = bucket(max(r.budget for r in requests))
        turns = [requests[first : first + rows] for first in range(0, len(requests), rows)]
        prompt_rows = self.row_bucket(max(len(_distinct_prompts(batch)) for batch in turns))
        if history is not None:
            history = jax.device_put(history, self._replicated)
        start, parts, iterations = time.monotonic(), [], 0
        for turn, batch in enumerate(turns):
            state = self._place(params, batch, rows, prompt_rows, prompt_slots, response_slots)
            before = turn * rows
            report = None if progress is None else lambda done, before=before: progress(before + done, len(requests))
            state, steps = self._decode(params, history, state, report)
            iterations += steps
            parts.append(jax.tree.map(operator.itemgetter(slice(len(batch))), state))
        done = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        return Rollouts(
            tokens_NS=done.tokens_BS,
            prompt_length_N=done.prompt_length_B,
            response_length_N=done.length_B - done.prompt_length_B,
            ended_N=done.ended_B,
            log_prob_NT=done.log_prob_BT,
            behaviour_log_prob_NT=done.behaviour_log_prob_BT,
            drafted_NT=done.drafted_BT,
            forwards_N=done.forwards_B,
            proposed_N=done.proposed_B,
            accepted_N=done.accepted_B,
            iterations=iterations,
            seconds=time.monotonic() - start,
        )

    def _decode(
        self, params: dict, history: HistoryBlock | None, state: RolloutState, report: Callable[[int], None] | None
    ) -> tuple[RolloutState, int]:
        """Runs chunks until every row is done.

        When a quarter of the rows is left, those are gathered into a smaller batch: the last, long responses then
        do not pay for rows that are done.

        Returns:
          (the final state on the host, without cache, rows in their first order; the number of iterations)
        """
        waiting, iterations = int(state.active_B.sum()), 0
        buckets, limit = [1], self.config.chunk
        if history is not None:
            buckets, limit = sorted(self.config.draft_buckets), min(PROBE, limit)
        origin_B = np.arange(len(state.active_B))  # where each row of the current batch stood at first
        finished = None
        while True:
            smaller = self._smaller_batch(len(origin_B))
            k = buckets[-1]
            before = _totals(state) if k > 1 else None  # K = 1 has nothing to decide
            state, steps = self._chunk(params, history if k > 1 else None, state, limit, smaller, k=k)
            iterations += int(steps)
            active_B = np.asarray(state.active_B)
            active = int(active_B.sum())
            if report is not None:
                report(waiting - active)
            # Decided by the tokens alone, never by a clock, so that a repeated run decides alike.
            if k > 1 and not self.config.worth_drafting(k, float(np.divide(*(_totals(state) - before)))):
                buckets.pop()
            limit = self.config.chunk
            if active > smaller:
                continue
            fetched = jax.device_get(state.replace(cache=()))
            if finished is None:
                finished = jax.tree.map(np.array, fetched)
            else:
                jax.tree.map(lambda whole, part, to=origin_B: whole.__setitem__(to, part), finished, fetched)
            if active == 0:
                return finished, iterations
            while active <= self._smaller_batch(smaller):
                smaller = self._smaller_batch(smaller)
            # Active rows first, then as many others as fill the batch.
            index_B = np.argsort(~active_B, kind="stable")[:smaller]
            state, origin_B = self._gather(state, index_B), origin_B[index_B]

    def _smaller_batch(self, rows: int) -> int:
        """The number of rows to go on with once no more are active; 0 where the batch is not shrunk."""
        smaller = -(-rows // (COMPACT * self._row_multiple)) * self._row_multiple
        return smaller if FEWEST_ROWS <= smaller < rows else 0

    def row_bucket(self, rows: int) -> int:
        """The padded number of rows: a power of two, rounded up to fill the mesh."""
        return -(-bucket(rows, minimum=1) // self._row_multiple) * self._row_multiple

    def _check(self, requests: Sequence[Request], history: HistoryBlock | None) -> None:
        if not requests:
            raise InputError("rollout: no requests")
        groups = None if history is None else history.weight_GR.shape[0]
        for r in requests:
            if groups is not None and not 0 <= r.group < groups:
                raise ValueError(f"rollout: a request draws from group {r.group}, the history has {groups}")
            if len(r.prompt) == 0:
                raise InputError(f"rollout: prompt {r.prompt_id:#x} is empty; it needs at least one token")
            if r.budget < 1:
                raise InputError(f"rollout.max_new_tokens={r.budget}: must be at least 1")
            if len(r.prompt) + r.budget > self.model.max_positions:
                raise InputError(
                    f"rollout: a prompt of {len(r.prompt)} tokens and max_new_tokens={r.budget} exceed the model's "
                    f"{self.model.max_positions} positions"
                )

    def _place(
        self,
        params: dict,
        requests: Sequence[Request],
        rows: int,
        prompt_rows: int,
        prompt_slots: int,
        response_slots: int,
    ) -> RolloutState:
        """The initial state of a batch, prompts prefilled, padded with rows that are never active."""
        n, positions = len(requests), prompt_slots + response_slots
        tokens_BS = np.zeros((rows, positions), np.int32)
        prompt_length_B = np.ones(rows, np.int32)
        budget_B, sample_B, step_B, group_B = (np.ones(rows, np.int32), *np.zeros((3, rows), np.int32))
        for b, r in enumerate(requests):
            tokens_BS[b, : len(r.prompt)] = r.prompt
            prompt_length_B[b], budget_B[b] = len(r.prompt), r.budget
            sample_B[b], step_B[b], group_B[b] = r.sample, r.step, r.group
        words_B2 = np.zeros((rows, 2), np.uint32)
        words_B2[:n] = noise.prompt_words([r.prompt_id for r in requests])
        zeros_B, zeros_BT = np.zeros(rows, np.int32), np.zeros((rows, response_slots), np.float32)
        state = RolloutState(
            tokens_BS=tokens_BS,
            length_B=prompt_length_B,
            prompt_length_B=prompt_length_B,
            budget_B=budget_B,
            active_B=np.arange(rows) < n,
            ended_B=np.zeros(rows, bool),
            key_B2=np.asarray(noise.row_keys(self.seed, step_B, words_B2, sample_B)),
            group_B=group_B,
            log_prob_BT=zeros_BT,
            behaviour_log_prob_BT=zeros_BT,
            drafted_BT=zeros_BT.astype(bool),
            forwards_B=zeros_B,
            proposed_B=zeros_B,
            accepted_B=zeros_B,
            cache=(),
        )
        state = jax.device_put(state, self._by_row)
        return state.replace(
            cache=self._prefill(
                params, *self._prompts(requests, rows, (prompt_rows, prompt_slots)), positions=positions
            )
        )

    def _prompts(self, requests: Sequence[Request], rows: int, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """The distinct prompts of a batch, padded to a shape, and which of them each row continues."""
        index = _distinct_prompts(requests)
        prompt_UP, prompt_of_row_B = np.zeros(shape, np.int32), np.zeros(rows, np.int32)
        for b, r in enumerate(requests):
            u = prompt_of_row_B[b] = index[_prompt_bytes(r)]
            prompt_UP[u, : len(r.prompt)] = r.prompt
        return jax.device_put((prompt_UP, prompt_of_row_B), self._by_row)

    def _traced_prefill(self, params, prompt_UP, prompt_of_row_B, positions: int) -> decoder.Cache:
        self.compiled.append(f"prefill {'x'.join(map(str, prompt_UP.shape))} for {len(prompt_of_row_B)} rows")
        return prefill(params, self.model, prompt_UP, prompt_of_row_B, positions)

    def _traced_gather(self, state: RolloutState, index_B) -> RolloutState:
        self.compiled.append(f"shrink {len(state.active_B)} to {len(index_B)} rows")
        return jax.tree.map(lambda x: x[index_B], state)

    def _traced_chunk(
        self, params, history, state: RolloutState, limit, smaller, k: int
    ) -> tuple[RolloutState, jax.Array]:
        """Iterates until `limit` iterations are done or at most `smaller` rows are active."""
        shape = "" if history is None else f" history {'x'.join(map(str, history.tokens_GRP.shape))}"
        self.compiled.append(f"decode {'x'.join(map(str, state.tokens_BS.shape))} K={k}{shape}")

        def keep_going(carry):
            state, steps = carry
            return (steps < limit) & (jnp.sum(state.active_B) > smaller)

        def step(carry):
            state, steps = carry
            return iterate(params, self.model, self.config, k, history, state), steps + 1

        return jax.lax.while_loop(keep_going, step, (state, jnp.int32(0)))


def _totals(state: RolloutState) -> np.ndarray:
    """[response tokens, row-forwards] so far, over all rows."""
    length_B, prompt_B, forwards_B = jax.device_get((state.length_B, state.prompt_length_B, state.forwards_B))
    return np.array([(length_B - prompt_B).sum(), forwards_B.sum()], np.int64)


def _prompt_bytes(request: Request) -> bytes:
    return np.asarray(request.prompt, np.int32).tobytes()


def _distinct_prompts(requests: Sequence[Request]) -> dict[bytes, int]:
    """Numbers the different prompts of some requests, in order."""
    return {prompt: u for u, prompt in enumerate(dict.fromkeys(map(_prompt_bytes, requests)))}
