"""The rollout engine: the host's loop over chunks of iterations on the device (`iteration`).

A chunk runs up to `chunk` iterations in a `lax.while_loop`; between chunks the host chooses K (`budget`), gives rows
that are done to requests that wait, shrinks the batch when none waits and few are left, and gives the cache more
slots. None of that changes a token.

K is chosen between chunks rather than by `lax.switch` inside the loop: that would carry the cache through a branch,
which on CPU costs 1.57, 1.42, 1.21, 1.14 times the iteration at K = 1, 4, 8, 16 (1.1M parameters, 256 rows) and 1.28,
1.18, 1.10, 1.01 times (135M, 8 rows), and puts a program of each K into one compilation.

Suffix letters: B rows, S positions (cache and token buffer), T response positions, K verified positions,
V vocabulary, U different prompts, N requests.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rhyme_jax.errors import InputError
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import FIRST_WINDOW, Acceptance, Cost, CostTable, Mix, Tally, choose_bucket
from rhyme_jax.histospec.drafts import Beliefs, Draft, HistoryBlock, Reader, make_corpus
from rhyme_jax.histospec.iteration import EngineConfig, RowState
from rhyme_jax.histospec.programs import Programs, Shapes
from rhyme_jax.models.config import DecoderConfig

FIRST_CHUNK = 4  # iterations after a change of K; then twice as many each time, up to `chunk`
FIRST_QUIET = 32  # the same where nothing is drafted: a look at the drafts there would be costs as much as drafting
# A draft of the marginal window ends where a token all but never comes. Less would cost tokens: once K is chosen, and
# that is where the estimates pay or do not, the positions of a row are computed whether they are used or not.
LEAST_CHANCE = 0.02
TIMED_SECONDS = 0.05  # of iterations, to time one
REFILL = 8  # rows are given to waiting requests when 1/8 of the batch is done


@dataclasses.dataclass(frozen=True)
class Request:
    """One rollout to make. (noise, prompt_id, sample) keys its noise."""

    prompt: np.ndarray  # int32 token ids, at least one
    prompt_id: int  # 64-bit, `history.store.prompt_id`
    sample: int  # index within the prompt's group
    noise: int  # noise word: `noise.fresh_word` or `noise.coupled_word`
    group: int  # row of the history block to draft from
    budget: int  # most tokens of the response
    expected_length: float = 0.0  # tokens of the response that history predicts; 0 is unknown


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the device did between two looks of the host."""

    rows: int
    slots: int
    k: int
    iterations: int
    forwards: int  # row-forwards: iterations of active rows
    tokens: int


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Finished rollouts, on the host, in the order of the requests. N rollouts."""

    tokens_NS: np.ndarray  # int32
    prompt_length_N: np.ndarray  # int32
    response_length_N: np.ndarray  # int32, the EOS included
    ended_N: np.ndarray  # bool: by EOS; otherwise cut off by the budget
    log_prob_NT: np.ndarray  # float32, 0 past the response
    behaviour_log_prob_NT: np.ndarray
    source_NT: np.ndarray  # int8: 1 + index of drafts.SOURCES where the token was drafted; else 0
    forwards_N: np.ndarray  # int32 row-forwards
    proposed_N: np.ndarray
    accepted_N: np.ndarray
    tally: Tally | None  # of the drafts; None where drafting was off
    chunks: tuple[Chunk, ...]
    seconds: float  # wall time, compilation excluded where shapes were already compiled

    def response(self, n: int) -> np.ndarray:
        start = self.prompt_length_N[n]
        return self.tokens_NS[n, start : start + self.response_length_N[n]]

    @property
    def drafted_NT(self) -> np.ndarray:
        """bool: the token came from an accepted draft."""
        return self.source_NT > 0

    @property
    def iterations(self) -> int:
        return sum(c.iterations for c in self.chunks)

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


class RolloutEngine:
    """Makes rollouts on one mesh.

    `compiled` lists the programs that were traced, in order. Their number is bounded by the sizes that are declared:
    rows and what those shrink to, cache slots, K out of `draft_buckets`, prompts and response slots by powers of two,
    and the shape of the corpus, which is the caller's. `prepare` compiles all that a batch may need, and measures them.

    `acceptance` and `costs` are what K is chosen by. They grow and may be saved; they never change a token.
    """

    def __init__(
        self, model: DecoderConfig, config: EngineConfig, mesh: Mesh, seed: int, costs: CostTable | None = None
    ):
        self.model, self.config, self.seed = model, config, seed
        self.costs = CostTable(assumed=0.1) if costs is None else costs
        self.acceptance = Acceptance(config.depths)
        self.programs = Programs(model, config, mesh)

    @property
    def compiled(self) -> list[str]:
        """The programs that were traced, in order."""
        return self.programs.compiled

    def generate(
        self,
        params: dict,
        requests: Sequence[Request],
        history: HistoryBlock | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollouts:
        """Rolls out all requests, up to `max_rows` at a time.

        Args:
          params: weights in the compute dtype, placed on the engine's mesh.
          history: what to draft from beside the live responses; may be empty. None decodes plainly.
          progress: called between chunks with (requests finished, requests in all).

        Raises:
          InputError: a prompt is empty, a budget is below 1, or the two exceed the model's positions.
        """
        self._check(requests, history)
        start = time.monotonic()
        return _Session(self, params, requests, history, self._shapes(requests)).run(progress, start)

    def prepare(
        self,
        params: dict,
        requests: Sequence[Request],
        history: HistoryBlock | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles the programs that `generate` may need for such a batch, and measures what an iteration of each
        shape costs where `costs` does not know it.

        Args:
          history: None for batches that are decoded plainly: there is nothing to choose, so nothing is measured.
          progress: called with (shapes done, shapes in all).
        """
        self._check(requests, history)
        shapes = self._shapes(requests)
        session = _Session(self, params, requests, history, shapes)
        costs = self.costs if len(self.costs) else CostTable()
        session.refill()
        for number, (rows, slots) in enumerate(shapes.batches):
            if rows < shapes.rows[0]:
                session.shrink(rows)
            session.grow(slots)
            if session.waiting and rows == shapes.rows[0]:
                session.compile_refills()
            for smaller in (r for r in shapes.rows if r < rows):  # all ways to shrink are compiled, one is gone
                self.programs.gather(session.state, np.arange(smaller), shapes.positions)
            session.measure(costs)
            if progress is not None:
                progress(number + 1, len(shapes.batches))
        if len(costs):
            self.costs = costs

    def _shapes(self, requests: Sequence[Request]) -> Shapes:
        return self.programs.shapes(
            [_prompt_bytes(r) for r in requests],
            longest_prompt=max(len(r.prompt) for r in requests),
            longest_response=max(r.budget for r in requests),
        )

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


class _Session:
    """One call of `RolloutEngine.generate`: the batch on the device, and what the host knows of it."""

    def __init__(self, engine: RolloutEngine, params, requests, history: HistoryBlock | None, shapes: Shapes):
        self.engine, self.programs, self.config = engine, engine.programs, engine.config
        self.params, self.shapes = params, shapes
        self.requests, self.history = requests, history
        self.waiting = collections.deque(range(len(requests)))
        self.corpus, self.tally = None, None
        rows, slots = shapes.rows[0], shapes.slots[0]
        self.owner_B = np.full(rows, -1)  # the request that each row decodes, or decoded and was not yet collected
        # Copies of what the device holds, as of the last look.
        self.active_B = np.zeros(rows, bool)
        self.length_B, self.forwards_B = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        self.state = jax.device_put(self._rows({}), self.programs.by_row).replace(
            cache=self.programs.empty(rows, slots)
        )
        self.done: dict[str, np.ndarray] = {}
        self.chunks: list[Chunk] = []
        if history is not None and self.config.drafts:
            self._place_corpus()
            self.tally = Tally.zeros(self.config.depths)

    def run(self, progress: Callable[[int, int], None] | None, start: float) -> Rollouts:
        self.refill()
        k, limit, mix = 0, 0, None
        while self.active_B.any():
            drafted = None
            if self.corpus is None:
                k, limit = 1, self.config.chunk
            else:
                if mix is None:
                    mix, drafted = self.peek()
                before, k = k, self.choose(mix)
                limit = 2 * limit if k == before else FIRST_CHUNK if k > 1 else FIRST_QUIET
                limit = min(limit, self.config.chunk)
            self.make_room(k)
            from_B = self.length_B
            tally = self.decode(k, limit)
            mix = None
            if tally is not None:
                self.tally += tally
                self.engine.acceptance.add(tally)
                mix = tally.mix
            elif drafted is not None:
                # The drafts that were not verified are compared with what was decoded, which tells as much.
                self.engine.acceptance.add(
                    jax.device_get(self.programs.judge(drafted, from_B, self.state.replace(cache=())))
                )
            if progress is not None:
                left = len(self.waiting) + int(self.active_B.sum())
                progress(len(self.requests) - left, len(self.requests))
            self.refill()
            self.compact()
        self.collect()
        return self.result(time.monotonic() - start)

    # --- the batch on the device --------------------------------------------------------------------------------

    def refill(self) -> None:
        """Gives free rows to waiting requests, if there are enough of both to be worth a prefill."""
        free = len(self.active_B) - int(self.active_B.sum())
        if not self.waiting or free < self._refill_rows():
            return
        self.collect()
        taken, prompts = {}, {}
        for row in np.flatnonzero(~self.active_B):
            if not self.waiting:
                break
            key = _prompt_bytes(self.requests[self.waiting[0]])
            if key not in prompts and len(prompts) == self.shapes.prompts[-1]:
                break
            prompts.setdefault(key, len(prompts))
            taken[int(row)] = self.waiting.popleft()
        padded = min(u for u in self.shapes.prompts if u >= len(prompts))
        prompt_UP = np.zeros((padded, self.shapes.prompt_slots), np.int32)
        prompt_of_row_B = np.full(len(self.active_B), -1, np.int32)
        for row, n in taken.items():
            request = self.requests[n]
            u = prompt_of_row_B[row] = prompts[_prompt_bytes(request)]
            prompt_UP[u, : len(request.prompt)] = request.prompt
            self.owner_B[row], self.active_B[row] = n, True
            self.length_B[row], self.forwards_B[row] = len(request.prompt), 0
        place = functools.partial(jax.device_put, device=self.programs.by_row)
        cache = self.programs.prefill(self.params, place(prompt_UP))
        new = place(self._rows(taken))
        self.state = self.programs.insert(self.state, new, place(prompt_of_row_B), cache)

    def compile_refills(self) -> None:
        """Compiles what a refill needs, for any number of prompts; gives no row away."""
        place = functools.partial(jax.device_put, device=self.programs.by_row)
        nowhere_B = np.full(len(self.active_B), -1, np.int32)
        for prompts in self.shapes.prompts:
            cache = self.programs.prefill(self.params, place(np.zeros((prompts, self.shapes.prompt_slots), np.int32)))
            self.state = self.programs.insert(self.state, place(self._rows({})), place(nowhere_B), cache)

    def _refill_rows(self) -> int:
        """How many rows must be free before they are given away."""
        return max(1, len(self.active_B) // REFILL)

    def _rows(self, taken: dict[int, int]) -> RowState:
        """The first state of the rows that are given to requests (by number), without cache, on the host; other rows
        are padding, never active.
        """
        rows, shapes = len(self.active_B), self.shapes
        tokens_BS = np.zeros((rows, shapes.positions), np.int32)
        prompt_length_B, budget_B = np.ones((2, rows), np.int32)
        sample_B, group_B, live_B = np.zeros((3, rows), np.int32)
        own_B, expected_B = np.full(rows, -1, np.int32), np.zeros(rows, np.float32)
        word_B, prompt_B2 = np.zeros(rows, np.uint32), np.zeros((rows, 2), np.uint32)
        for b, n in taken.items():
            r = self.requests[n]
            tokens_BS[b, : len(r.prompt)] = r.prompt
            prompt_length_B[b], budget_B[b], expected_B[b] = len(r.prompt), r.budget, r.expected_length
            sample_B[b], word_B[b] = r.sample, r.noise
            if self.corpus is not None:
                group_B[b], live_B[b] = r.group, self.live_texts[n]
        if self.corpus is not None and "history" in self.config.rules.sources:
            own_B = self.history.own_responses(group_B, sample_B, word_B.astype(np.int64))
        if taken:
            prompt_B2[list(taken)] = noise.prompt_words([self.requests[n].prompt_id for n in taken.values()])
        zeros_B, zeros_BT = np.zeros(rows, np.int32), np.zeros((rows, shapes.response_slots), np.float32)
        return RowState(
            tokens_BS=tokens_BS,
            length_B=prompt_length_B,
            prompt_length_B=prompt_length_B,
            budget_B=budget_B,
            expected_B=expected_B,
            active_B=np.isin(np.arange(rows), list(taken)),
            ended_B=np.zeros(rows, bool),
            key_B2=np.asarray(noise.row_keys(self.engine.seed, word_B, prompt_B2, sample_B)),
            reader=Reader(group_B, live_B, own_B, zeros_B),
            window_B=np.full(rows, FIRST_WINDOW, np.int32),
            log_prob_BT=zeros_BT,
            behaviour_log_prob_BT=zeros_BT,
            source_BT=zeros_BT.astype(np.int8),
            forwards_B=zeros_B,
            proposed_B=zeros_B,
            accepted_B=zeros_B,
            cache=(),
        )

    def _place_corpus(self) -> None:
        """The corpus on the device. Each request has a live text of its own among those of its group."""
        prompts = [np.zeros(0, np.int32)] * len(self.history.tokens_GRP)
        samples = collections.Counter()
        self.live_texts: list[int] = []  # of each request
        for r in self.requests:
            prompts[r.group] = r.prompt
            self.live_texts.append(self.history.tokens_GRP.shape[1] + samples[r.group])
            samples[r.group] += 1
        corpus = make_corpus(self.history, prompts, max(samples.values()), self.config.rules)
        self.corpus = jax.device_put(corpus, self.programs.everywhere)

    def make_room(self, k: int) -> None:
        """Gives the cache slots for another iteration of all rows."""
        longest = self.length_B[self.active_B].max(initial=0)
        fitting = [s for s in self.shapes.slots if s >= self.slots and longest <= self._longest(s, k)]
        self.grow(fitting[0])

    def _longest(self, slots: int, k: int) -> int:
        """The longest that an active row may be for an iteration in a cache of this size. In the largest, writes past
        the end are of drafts that the budget cuts off; they are dropped.
        """
        return slots if slots == self.shapes.positions else slots - k + 1

    @property
    def slots(self) -> int:
        return self.state.cache[0][0].shape[2]

    def grow(self, slots: int) -> None:
        if slots > self.slots:
            self.state = self.state.replace(cache=self.programs.grow(self.state.cache, slots))

    def compact(self) -> None:
        """Shrinks the batch when few rows are left and no request waits: the last, long responses then do not pay for
        rows that are done.
        """
        active = int(self.active_B.sum())
        fitting = [rows for rows in self.shapes.rows if active <= rows < len(self.active_B)]
        if active and fitting and not self.waiting:
            self.collect()
            self.shrink(fitting[-1])

    def shrink(self, rows: int) -> None:
        """Goes on with so many rows. They get the whole cache, so that a smaller batch has one shape."""
        index_B = np.argsort(~self.active_B, kind="stable")[:rows]  # active rows first
        self.state = self.programs.gather(self.state, index_B, self.shapes.positions)
        for name in ("owner_B", "active_B", "length_B", "forwards_B"):
            setattr(self, name, getattr(self, name)[index_B])

    def decode(self, k: int, limit: int) -> Tally | None:
        """Runs a chunk."""
        rows = len(self.active_B)
        smaller = [r for r in self.shapes.rows if r < rows]
        stop_at = rows - self._refill_rows() if self.waiting else max(smaller, default=0)
        if int(self.active_B.sum()) <= stop_at:  # a refill was cut short: go on with what there is
            stop_at = 0
        before = self.length_B, self.forwards_B
        tally, steps = self._chunk(k, limit, stop_at, self._longest(self.slots, k))
        fetched = (self.state.active_B, self.state.length_B, self.state.forwards_B, steps, tally)
        # Copies: what device_get gives may be a view of a buffer that the next chunk overwrites.
        fetched = jax.tree.map(np.array, jax.device_get(fetched))
        self.active_B, self.length_B, self.forwards_B, steps, tally = fetched
        tokens, forwards = (int((x - y).sum()) for x, y in zip((self.length_B, self.forwards_B), before, strict=True))
        self.chunks.append(Chunk(rows, self.slots, k, int(steps), forwards, tokens))
        return tally

    def _chunk(self, k: int, limit: int, stop_at: int, longest: int) -> tuple[Tally | None, jax.Array]:
        """Runs the device's loop on the batch: (what became of the drafts, iterations), not waited for."""
        beliefs, corpus = (self.beliefs(), self.corpus) if k > 1 else (None, None)
        corpus, self.state, tally, steps = self.programs.chunk(
            self.params, beliefs, corpus, self.state, limit, stop_at, longest, k=k
        )
        if k > 1:
            self.corpus = corpus
        return tally, steps

    # --- how much to draft --------------------------------------------------------------------------------------

    def peek(self) -> tuple[Mix, Draft]:
        """Which drafts there would be now."""
        self.corpus, mix, drafted = self.programs.peek(self.beliefs(), self.corpus, self.state.replace(cache=()))
        return jax.device_get(mix), drafted

    def beliefs(self) -> Beliefs:
        return self.engine.acceptance.beliefs(LEAST_CHANCE, windows=self.config.window == "marginal")

    def choose(self, mix: Mix) -> int:
        engine, rows = self.engine, len(self.active_B)
        return choose_bucket(engine.acceptance, engine.costs, mix, rows, self.slots, self.config.draft_buckets)

    def measure(self, costs: CostTable) -> None:
        """Compiles an iteration of the present shape for each K, and times it where the cost is not known.

        The rows go on decoding whatever comes, also when they are done: the arithmetic is the same. Only a session
        that makes no rollouts may do this.
        """
        rows = len(self.active_B)
        draft_seconds = self._time_drafting() if self.corpus is not None else 0.0
        for k in sorted(self.config.draft_buckets) if self.corpus is not None else (1,):
            self._iterations(1, k)  # compiles
            if self.corpus is not None and (rows, self.slots, k) not in costs.costs:
                first = _time(lambda k=k: self._iterations(1, k), repeats=1)
                n = int(np.clip(TIMED_SECONDS / first, 1, self.config.chunk))
                seconds = _time(lambda k=k, n=n: self._iterations(n, k)) / n
                draft = draft_seconds if k > 1 else 0.0
                costs.add(Cost(rows, self.slots, k, seconds, draft, self._time_sampling(k)))

    def _iterations(self, count: int, k: int) -> None:
        _, steps = self._chunk(k, count, stop_at=-1, longest=2**30)
        steps.block_until_ready()

    def _time_drafting(self) -> float:
        def look() -> None:
            mix, drafted = self.peek()
            jax.block_until_ready((mix, drafted))

        _, drafted = self.peek()  # compiles
        self.programs.judge(drafted, self.length_B, self.state.replace(cache=()))
        return _time(look)

    def _time_sampling(self, k: int) -> float:
        rows = len(self.active_B)
        logits_BKV = jnp.zeros((rows, k, self.engine.model.vocab_size), jnp.float32)
        keys_BK2 = jnp.zeros((rows, k, 2), jnp.uint32)
        jax.block_until_ready(self.programs.draw(logits_BKV, keys_BK2))  # compiles
        return _time(lambda: jax.block_until_ready(self.programs.draw(logits_BKV, keys_BK2)))

    # --- what comes out -----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Fetches the rows that are done and were not collected yet."""
        rows_B = np.flatnonzero((self.owner_B >= 0) & ~self.active_B)
        if rows_B.size == 0:
            return
        s = self.state
        fetched = jax.device_get(
            {
                "tokens": s.tokens_BS,
                "prompt_length": s.prompt_length_B,
                "length": s.length_B,
                "ended": s.ended_B,
                "log_prob": s.log_prob_BT,
                "behaviour_log_prob": s.behaviour_log_prob_BT,
                "source": s.source_BT,
                "forwards": s.forwards_B,
                "proposed": s.proposed_B,
                "accepted": s.accepted_B,
            }
        )
        for name, x in fetched.items():
            if name not in self.done:
                self.done[name] = np.zeros((len(self.requests), *x.shape[1:]), x.dtype)
            self.done[name][self.owner_B[rows_B]] = x[rows_B]
        self.owner_B[rows_B] = -1

    def result(self, seconds: float) -> Rollouts:
        d = self.done
        return Rollouts(
            tokens_NS=d["tokens"],
            prompt_length_N=d["prompt_length"],
            response_length_N=d["length"] - d["prompt_length"],
            ended_N=d["ended"],
            log_prob_NT=d["log_prob"],
            behaviour_log_prob_NT=d["behaviour_log_prob"],
            source_NT=d["source"],
            forwards_N=d["forwards"],
            proposed_N=d["proposed"],
            accepted_N=d["accepted"],
            tally=self.tally,
            chunks=tuple(self.chunks),
            seconds=seconds,
        )


def _time(work: Callable[[], object], repeats: int = 5) -> float:
    """Least seconds of a few calls: what disturbs a machine only ever adds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _prompt_bytes(request: Request) -> bytes:
    return np.asarray(request.prompt, np.int32).tobytes()
