"""The engine's compiled programs, and the few sizes that they are compiled for.

Everything on the device has a declared size: rows of the batch and what those shrink to, slots of the cache as it
grows, K, prompts of a prefill. So the number of programs is bounded, and known beforehand.

Suffix letters: B rows, S positions, T response positions, U different prompts of P slots, N key/value heads.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.buckets import bucket
from rhyme_jax.histospec.budget import Mix, Tally
from rhyme_jax.histospec.drafts import Beliefs, Corpus, Draft, write_live
from rhyme_jax.histospec.iteration import EngineConfig, RowState, iterate, propose
from rhyme_jax.histospec.sampling import draw
from rhyme_jax.models import decoder
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import BATCH_AXES

ROW_STEP, ROW_SIZES, FEWEST_ROWS = 4, 3, 2  # a batch shrinks to 1/4 and 1/16 of its rows, not below 2
RESUMED = 2  # rollouts that are taken over from another slice are prefilled by so many at a time
SLOT_STEP, SLOT_SIZES, SLOT_START = 1.5, 3, 32  # a cache starts with room for 32 tokens of a response, grows twice


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The padded sizes of a batch."""

    rows: tuple[int, ...]  # as it shrinks
    slots: tuple[int, ...]  # of the cache, as it grows
    prompts: tuple[int, ...]  # of a prefill: of a whole batch, of a refill
    prompt_slots: int
    response_slots: int
    resumed: int = 0  # rows of a prefill of rollouts that go on from another session; 0 where none does

    @property
    def positions(self) -> int:
        return self.prompt_slots + self.response_slots

    @property
    def batches(self) -> list[tuple[int, int]]:
        """(rows, slots) that an iteration is compiled for, for each K: a batch has the whole cache once it shrinks."""
        return [(self.rows[0], slots) for slots in self.slots] + [(rows, self.positions) for rows in self.rows[1:]]


class Programs:
    """Compiles on first use; `compiled` lists what was traced, in order."""

    def __init__(self, model: DecoderConfig, config: EngineConfig, mesh: Mesh):
        self.model, self.config = model, config
        self.compiled: list[str] = []
        self._row_multiple = int(np.prod([mesh.shape[a] for a in BATCH_AXES]))
        self.by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        heads = "tensor" if model.kv_heads % mesh.shape["tensor"] == 0 else None
        cache = NamedSharding(mesh, PartitionSpec(BATCH_AXES, heads))
        by_row = {f.name: self.by_row for f in dataclasses.fields(RowState)}
        state = RowState(**{**by_row, "cache": cache})
        self.prefill = jax.jit(self._prefill, out_shardings=cache)
        self.empty = jax.jit(self._empty, static_argnums=(0, 1), out_shardings=cache)
        self.insert = jax.jit(self._insert, donate_argnums=0, out_shardings=state)
        self.grow = jax.jit(self._grow, static_argnums=1, out_shardings=cache)
        self.gather = jax.jit(self._gather, static_argnums=2, out_shardings=state)
        self.draw = jax.jit(lambda logits, keys: draw(logits, keys, config.sampling))
        self.judge = jax.jit(self._judge, out_shardings=self.everywhere)
        self.peek = jax.jit(self._peek, donate_argnums=1, out_shardings=(self.everywhere, self.everywhere, self.by_row))
        self.chunk = jax.jit(
            self._chunk,
            static_argnames="k",
            donate_argnames=("corpus", "state"),
            out_shardings=(self.everywhere, state, self.everywhere, self.everywhere),
        )

    def row_bucket(self, rows: int) -> int:
        """The padded number of rows: a power of two, rounded up to fill the mesh."""
        return self._fill_mesh(bucket(rows, minimum=1))

    def shapes(
        self,
        prompts: Sequence[bytes],
        longest_prompt: int,
        longest_response: int,
        slices: int = 1,
        migration: bool = False,
    ) -> Shapes:
        """The sizes for requests with these prompts (of each request, in order), over so many slices: an equal share
        of them fits a batch, and what a slice gets beyond that waits.
        """
        rows = [self.row_bucket(min(-(-len(prompts) // slices), self.config.max_rows))]
        while len(rows) < ROW_SIZES and FEWEST_ROWS <= self._fill_mesh(rows[-1] // ROW_STEP) < rows[-1]:
            rows.append(self._fill_mesh(rows[-1] // ROW_STEP))
        prompt_slots = bucket(longest_prompt, self.config.prompt_slots)
        positions = prompt_slots + (response_slots := bucket(longest_response))
        first = min(positions, prompt_slots + SLOT_START)
        step = max(SLOT_STEP, (positions / first) ** (1 / (SLOT_SIZES - 1)))
        slots = [positions]
        while len(slots) < SLOT_SIZES and round(slots[0] / step) >= first:
            slots.insert(0, round(slots[0] / step))
        # A slice may get its rows from any of the prompts.
        first = prompts[: rows[0]] if slices == 1 else prompts
        together = [self.row_bucket(min(len(set(first)), rows[0]))]
        if len(prompts) > rows[0] and self._fill_mesh(together[0] // ROW_STEP) < together[0]:
            together.insert(0, self._fill_mesh(max(1, together[0] // ROW_STEP)))
        resumed = self._fill_mesh(min(RESUMED, rows[0])) if migration else 0
        return Shapes(tuple(rows), tuple(slots), tuple(together), prompt_slots, response_slots, resumed)

    def _fill_mesh(self, rows: int) -> int:
        return -(-rows // self._row_multiple) * self._row_multiple

    def _prefill(self, params, prompt_UP) -> decoder.Cache:
        """The cache of some prompts.

        Slots at or past a prompt's last token hold whatever its padding gave: the first iteration feeds the last
        prompt token again, and later ones overwrite the rest before anything attends to it.
        """
        prompts, slots = prompt_UP.shape
        self.compiled.append(f"prefill {prompts}x{slots}")
        positions_UP = jnp.broadcast_to(jnp.arange(slots), (prompts, slots))
        empty = decoder.init_cache(self.model, prompts, slots)
        return decoder.forward(params, self.model, prompt_UP, positions_UP, empty)[1]

    def _empty(self, rows: int, slots: int) -> decoder.Cache:
        self.compiled.append(f"empty cache {rows}x{slots}")
        return decoder.init_cache(self.model, rows, slots)

    def _insert(self, state: RowState, new: RowState, prompt_of_row_B, prompt_cache) -> RowState:
        """Replaces the rows with a prompt (an index of prompt_cache; -1 keeps the row). A prompt is run once; all of
        its samples get copies of its keys and values.
        """
        rows, slots = len(prompt_of_row_B), state.cache[0][0].shape[2]
        self.compiled.append(f"insert into {rows}x{slots} from {prompt_cache[0][0].shape[0]} prompts")

        def replaced(old, fresh):
            return jnp.where((prompt_of_row_B >= 0).reshape(-1, *(1,) * (old.ndim - 1)), fresh, old)

        def with_prompts(old_BNSh, prompt_UNPh):
            here = (slice(None), slice(None), slice(prompt_UNPh.shape[2]))
            copies = prompt_UNPh[jnp.maximum(prompt_of_row_B, 0)]
            return old_BNSh.at[here].set(replaced(old_BNSh[here], copies))

        cache = jax.tree.map(with_prompts, state.cache, prompt_cache)
        return jax.tree.map(replaced, state.replace(cache=()), new).replace(cache=cache)

    def _grow(self, cache: decoder.Cache, slots: int) -> decoder.Cache:
        rows, _, before, _ = cache[0][0].shape
        self.compiled.append(f"grow {rows}x{before} to {slots} slots")
        return _padded(cache, slots)

    def _gather(self, state: RowState, index_B, slots: int) -> RowState:
        """Some rows of a batch, with a cache of `slots`."""
        rows, before = state.cache[0][0].shape[0], state.cache[0][0].shape[2]
        self.compiled.append(f"shrink {rows}x{before} to {len(index_B)}x{slots}")
        gathered = jax.tree.map(lambda x: x[index_B], state)
        return gathered.replace(cache=_padded(gathered.cache, slots))

    def _peek(self, beliefs: Beliefs, corpus: Corpus, state: RowState) -> tuple[Corpus, Mix, Draft]:
        """Tells the corpus what was decoded without drafts, and which drafts there would be now."""
        rows, response_slots = state.source_BT.shape
        self.compiled.append(f"peek {rows} rows{_corpus_text(corpus)}")
        slot_BT = jnp.broadcast_to(jnp.arange(response_slots), (rows, response_slots))
        said_BT = (slot_BT < (state.length_B - state.prompt_length_B)[:, None]) & (state.forwards_B > 0)[:, None]
        corpus = write_live(corpus, state.reader, slot_BT, _responses(state, slot_BT), said_BT)
        drafted, allowance_B = propose(self.config, self.config.depths + 1, beliefs, corpus, state, windows=False)
        none = Tally.zeros(self.config.depths)
        tally = none.count(
            drafted.source_B, drafted.match_B, drafted.length_B, drafted.length_B, allowance_B, state.active_B
        )
        return corpus, Mix(jnp.sum(tally.proposed_XML, axis=-1), tally.without), drafted

    def _judge(self, drafted: Draft, from_B, state: RowState) -> Tally:
        """What drafts would have yielded, that were made when the rows had from_B tokens and not verified."""
        self.compiled.append(f"judge {len(from_B)} rows")
        depths = drafted.tokens_BJ.shape[1]
        position_B = from_B - state.prompt_length_B
        since_B = jnp.minimum(state.length_B - from_B, depths)
        # A draft that was decoded past was held by its allowance alone; of another, what came later is not known.
        allowance_B = jnp.clip(state.budget_B - position_B - 1, 0, depths)
        allowance_B = jnp.where(since_B < drafted.length_B, since_B, allowance_B)
        said_BJ = _responses(state, position_B[:, None] + jnp.arange(depths))
        proposed_B = jnp.minimum(drafted.length_B, since_B)
        right_BJ = (drafted.tokens_BJ == said_BJ) & (jnp.arange(depths) < proposed_B[:, None])
        accepted_B = jnp.sum(jnp.cumprod(right_BJ, axis=1, dtype=jnp.int32), axis=1)
        none = Tally.zeros(self.config.depths)
        return none.count(drafted.source_B, drafted.match_B, proposed_B, accepted_B, allowance_B, since_B > 0)

    def _chunk(
        self, params, beliefs, corpus, state: RowState, limit, stop_at, longest, k: int
    ) -> tuple[Corpus | None, RowState, Tally | None, jax.Array]:
        """Iterates until `limit` iterations are done, at most `stop_at` rows are active, or an active row is longer
        than `longest`.
        """
        rows, slots = len(state.active_B), state.cache[0][0].shape[2]
        self.compiled.append(f"decode {rows}x{slots} K={k}{_corpus_text(corpus)}")

        def keep_going(carry):
            _, state, _, steps = carry
            fits = jnp.max(jnp.where(state.active_B, state.length_B, 0)) <= longest
            return (steps < limit) & (jnp.sum(state.active_B) > stop_at) & fits

        def step(carry):
            corpus, state, tally, steps = carry
            return (*iterate(params, self.model, self.config, k, beliefs, corpus, state, tally), steps + 1)

        tally = jax.tree.map(jnp.asarray, Tally.zeros(self.config.depths)) if k > 1 else None
        return jax.lax.while_loop(keep_going, step, (corpus, state, tally, jnp.int32(0)))


def _padded(cache: decoder.Cache, slots: int) -> decoder.Cache:
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0))), cache)


def _responses(state: RowState, slot_BT: jax.Array) -> jax.Array:
    """Tokens at response positions, [B, T]; any within the buffer where a position is not decoded yet."""
    last = state.tokens_BS.shape[1] - 1
    return jnp.take_along_axis(state.tokens_BS, jnp.minimum(state.prompt_length_B[:, None] + slot_BT, last), axis=1)


def _corpus_text(corpus: Corpus | None) -> str:
    return "" if corpus is None else f" corpus {'x'.join(map(str, corpus.tokens_GRP.shape))}"
