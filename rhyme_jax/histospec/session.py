"""A session decodes rollouts of a job on one mesh: the batch on the device, and what the host knows of it.

A chunk runs up to `chunk` iterations in a `lax.while_loop`. `dispatch` starts one and does not wait for it, so that
one controller keeps sessions on several meshes busy; `finish` waits for it. In between two chunks the host chooses K
(`budget`), gives rows that are done to requests that wait, shrinks the batch when none waits and few are left, and
gives the cache more slots. Requests may be added and taken away, also half decoded. None of that changes a token.

K is chosen between chunks rather than by `lax.switch` inside the loop: that would carry the cache through a branch,
which on CPU costs 1.57, 1.42, 1.21, 1.14 times the iteration at K = 1, 4, 8, 16 (1.1M parameters, 256 rows) and 1.28,
1.18, 1.10, 1.01 times (135M, 8 rows), and puts a program of each K into one compilation.

Suffix letters: B rows, S positions (cache and token buffer), T response positions, K verified positions,
V vocabulary, U different prompts of P slots, N requests of the job.
"""

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import FIRST_WINDOW, Acceptance, Cost, CostTable, Mix, Tally, choose_bucket
from rhyme_jax.histospec.drafts import Beliefs, Draft, Reader, make_corpus
from rhyme_jax.histospec.iteration import EngineConfig, RowState
from rhyme_jax.histospec.programs import Programs
from rhyme_jax.histospec.rollouts import FIELDS, Chunk, Job

FIRST_CHUNK = 4  # iterations after a change of K; then twice as many each time, up to `chunk`
FIRST_QUIET = 32  # the same where nothing is drafted: a look at the drafts there would be costs as much as drafting
# A draft of the marginal window ends where a token all but never comes. Less would cost tokens: once K is chosen, and
# that is where the estimates pay or do not, the positions of a row are computed whether they are used or not.
LEAST_CHANCE = 0.02
TIMED_SECONDS = 0.05  # of iterations, to time one
REFILL = 8  # rows are given to waiting requests when 1/8 of the batch is done


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A chunk that the device is working on."""

    k: int
    drafted: Draft | None  # drafts that are not verified, to compare with what is decoded
    tally: Tally | None
    steps: jax.Array


class Session:
    """Rolls out some requests of a job.

    Args:
      params: weights in the compute dtype, placed on the mesh of `programs`.
      numbers: the requests of the job to roll out, in the order in which they get rows. A request that the job holds
        an unfinished row of goes on from there.
      acceptance: what drafts have yielded so far; the session goes on counting on a copy.

    `tally` counts what became of its drafts (None where drafting was off). `evidence` holds, for each chunk, what there
    is to learn from: that, or the fate of drafts that were made and not verified, or None.
    """

    def __init__(
        self,
        programs: Programs,
        config: EngineConfig,
        params: dict,
        job: Job,
        numbers: Sequence[int],
        seed: int,
        acceptance: Acceptance,
        costs: CostTable,
    ):
        self.programs, self.config, self.params = programs, config, params
        self.job, self.seed = job, seed
        self.acceptance, self.costs = copy.deepcopy(acceptance), costs
        self.shapes = shapes = job.shapes
        self.waiting = collections.deque(int(n) for n in numbers)
        rows = min(r for r in shapes.rows if r >= min(len(self.waiting), shapes.rows[0]))
        slots = shapes.slots[0] if rows == shapes.rows[0] else shapes.positions
        self.owner_B = np.full(rows, -1)  # the request that each row decodes; -1: none, or it was collected
        # Copies of what the device holds, as of the last look.
        self.active_B = np.zeros(rows, bool)
        self.length_B, self.forwards_B = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        self.chunks: list[Chunk] = []
        self.evidence: list[Tally | None] = []
        self._mix: Mix | None = None  # of drafts, as of the last chunk that verified some
        self._k, self._limit = 0, 0
        self._flight: _Flight | None = None
        self.corpus = self._placed_corpus() if job.history is not None and self.config.drafts else None
        self.tally = None if self.corpus is None else Tally.zeros(config.depths)
        self.state = jax.device_put(self._rows({}), programs.by_row).replace(cache=programs.empty(rows, slots))

    @property
    def busy(self) -> bool:
        """Whether there is anything left to decode."""
        return bool(self.waiting) or bool(self.active_B.any())

    @property
    def running(self) -> np.ndarray:
        """The requests that have a row and are not finished, as of the last look."""
        return self.owner_B[self.active_B]

    def elapsed(self, numbers: Iterable[int]) -> np.ndarray:
        """Response tokens of running requests, as of the last look."""
        row_of = {int(n): b for b, n in enumerate(self.owner_B)}
        rows = [row_of[int(n)] for n in numbers]
        prompts = [len(self.job.requests[self.owner_B[b]].prompt) for b in rows]
        return self.length_B[rows] - np.array(prompts, np.int32)

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Decodes until nothing is left. `progress` is called between chunks with (finished, requests in all)."""
        requests = len(self.waiting)
        while self.busy:
            self.dispatch()
            self.finish()
            if progress is not None:
                progress(requests - len(self.waiting) - int(self.active_B.sum()), requests)

    # --- one chunk ----------------------------------------------------------------------------------------------

    def dispatch(self) -> tuple[int, int, int, int]:
        """Starts a chunk, and does not wait for it; returns its rows, cache slots, K and most iterations."""
        self.refill()
        self.compact()
        drafted = None
        if self.corpus is None:
            self._k, self._limit = 1, self.config.chunk
        else:
            if self._mix is None:
                self._mix, drafted = self.peek()
            before, self._k = self._k, self.choose(self._mix)
            limit = 2 * self._limit if self._k == before else FIRST_CHUNK if self._k > 1 else FIRST_QUIET
            self._limit = min(limit, self.config.chunk)
        self.make_room(self._k)
        rows = len(self.active_B)
        smaller = [r for r in self.shapes.rows if r < rows]
        stop_at = rows - self._refill_rows() if self.waiting else max(smaller, default=0)
        if int(self.active_B.sum()) <= stop_at:  # a refill was cut short: go on with what there is
            stop_at = 0
        tally, steps = self._chunk(self._k, self._limit, stop_at, self._longest(self.slots, self._k))
        self._flight = _Flight(self._k, drafted, tally, steps)
        return rows, self.slots, self._k, self._limit

    @property
    def ready(self) -> bool:
        """Whether `finish` would not wait."""
        return self._flight is not None and self._flight.steps.is_ready()

    def finish(self) -> list[int]:
        """Waits for the chunk; returns the requests that it finished."""
        flight, self._flight = self._flight, None
        from_B, before = self.length_B, (self.length_B, self.forwards_B)
        fetched = (self.state.active_B, self.state.length_B, self.state.forwards_B, flight.steps, flight.tally)
        # Copies: what device_get gives may be a view of a buffer that the next chunk overwrites.
        fetched = jax.tree.map(np.array, jax.device_get(fetched))
        self.active_B, self.length_B, self.forwards_B, steps, tally = fetched
        tokens, forwards = (int((x - y).sum()) for x, y in zip((self.length_B, self.forwards_B), before, strict=True))
        self.chunks.append(Chunk(len(self.active_B), self.slots, flight.k, int(steps), forwards, tokens))
        self._mix = None
        if tally is not None:
            self._mix, self.tally = tally.mix, self.tally + tally
        elif flight.drafted is not None:
            # The drafts that were not verified are compared with what was decoded, which tells as much.
            tally = jax.device_get(self.programs.judge(flight.drafted, from_B, self.state.replace(cache=())))
        if tally is not None:
            tally = jax.tree.map(np.array, tally)
            self.acceptance.add(tally)
        self.evidence.append(tally)
        return self.collect()

    def _chunk(self, k: int, limit: int, stop_at: int, longest: int) -> tuple[Tally | None, jax.Array]:
        """Runs the device's loop on the batch: (what became of the drafts, iterations), not waited for."""
        beliefs, corpus = (self.beliefs(), self.corpus) if k > 1 else (None, None)
        corpus, self.state, tally, steps = self.programs.chunk(
            self.params, beliefs, corpus, self.state, limit, stop_at, longest, k=k
        )
        if k > 1:
            self.corpus = corpus
        return tally, steps

    # --- requests come and go; not while a chunk is under way -----------------------------------------------------

    def collect(self) -> list[int]:
        """Fetches the rows that are done; returns their requests."""
        return self._fetch(np.flatnonzero((self.owner_B >= 0) & ~self.active_B), finished=True)

    def add(self, numbers: Iterable[int]) -> None:
        """More requests of the job; they wait for rows."""
        self.waiting.extend(int(n) for n in numbers)

    def give_up(self, numbers: Sequence[int]) -> None:
        """Stops decoding these requests. A session that is given them later, here or elsewhere, goes on from there."""
        rows_B = np.flatnonzero(np.isin(self.owner_B, numbers) & self.active_B)
        self.waiting = collections.deque(n for n in self.waiting if n not in set(numbers))
        if rows_B.size:
            self.active_B[rows_B] = False
            self.state = self.state.replace(active_B=jax.device_put(self.active_B, self.programs.by_row))
            self._fetch(rows_B, finished=False)

    def _fetch(self, rows_B: np.ndarray, finished: bool) -> list[int]:
        if rows_B.size == 0:
            return []
        fetched = jax.device_get({name: getattr(self.state, name) for name in FIELDS})
        numbers = self.owner_B[rows_B]
        self.job.rows.put(numbers, {name: x[rows_B] for name, x in fetched.items()}, finished)
        self.owner_B[rows_B] = -1
        return numbers.tolist()

    def refill(self) -> None:
        """Gives free rows to waiting requests, if there are enough of both to be worth a prefill."""
        free = len(self.active_B) - int(self.active_B.sum())
        if not self.waiting or free < self._refill_rows():
            return
        begun_N = self.job.rows.begun_N
        rows = [int(b) for b in np.flatnonzero(~self.active_B)]
        taken: dict[int, int] = {}
        prompts: dict[bytes, int] = {}
        # One kind of prefill at a time: of prompts, or of what was decoded elsewhere.
        resumed = bool(begun_N[self.waiting[0]])
        most = self.shapes.resumed if resumed else self.shapes.prompts[-1]
        while rows and self.waiting and begun_N[self.waiting[0]] == resumed:
            n = self.waiting[0]
            key = n.to_bytes(8) if resumed else self.job.requests[n].prompt_bytes
            if key not in prompts and len(prompts) == most:
                break
            prompts.setdefault(key, len(prompts))
            taken[rows.pop(0)] = self.waiting.popleft()
        padded = most if resumed else min(u for u in self.shapes.prompts if u >= len(prompts))
        slots = self.shapes.positions if resumed else self.shapes.prompt_slots
        prompt_UP = np.zeros((padded, slots), np.int32)
        prompt_of_row_B = np.full(len(self.active_B), -1, np.int32)
        new = self._rows(taken)
        for row, n in taken.items():
            key = n.to_bytes(8) if resumed else self.job.requests[n].prompt_bytes
            u = prompt_of_row_B[row] = prompts[key]
            prompt_UP[u] = new.tokens_BS[row, :slots]
            self.owner_B[row], self.active_B[row] = n, True
            self.length_B[row], self.forwards_B[row] = new.length_B[row], new.forwards_B[row]
        if resumed:
            self.grow(slots)
        self._insert(prompt_UP, new, prompt_of_row_B)
        if resumed:  # there may be more of them, or others
            self.refill()

    def _insert(self, prompt_UP: np.ndarray, new: RowState, prompt_of_row_B: np.ndarray) -> None:
        place = functools.partial(jax.device_put, device=self.programs.by_row)
        cache = self.programs.prefill(self.params, place(prompt_UP))
        self.state = self.programs.insert(self.state, place(new), place(prompt_of_row_B), cache)

    def compile_refills(self) -> None:
        """Compiles what a refill needs, for any number of prompts; gives no row away."""
        nowhere_B = np.full(len(self.active_B), -1, np.int32)
        sizes = [(prompts, self.shapes.prompt_slots) for prompts in self.shapes.prompts]
        if self.shapes.resumed and self.slots == self.shapes.positions:
            sizes.append((self.shapes.resumed, self.shapes.positions))
        for size in sizes:
            self._insert(np.zeros(size, np.int32), self._rows({}), nowhere_B)

    def _refill_rows(self) -> int:
        """How many rows must be free before they are given away."""
        return max(1, len(self.active_B) // REFILL)

    # --- the batch on the device --------------------------------------------------------------------------------

    def _rows(self, taken: dict[int, int]) -> RowState:
        """The first state of the rows that are given to requests (by number), without cache, on the host; other rows
        are padding, never active.
        """
        rows, shapes, job = len(self.active_B), self.shapes, self.job
        tokens_BS = np.zeros((rows, shapes.positions), np.int32)
        prompt_length_B, length_B, budget_B = np.ones((3, rows), np.int32)
        sample_B, group_B, live_B, forwards_B, proposed_B, accepted_B = np.zeros((6, rows), np.int32)
        own_B, expected_B = np.full(rows, -1, np.int32), np.zeros(rows, np.float32)
        word_B, prompt_B2 = np.zeros(rows, np.uint32), np.zeros((rows, 2), np.uint32)
        log_prob_BT, behaviour_log_prob_BT = np.zeros((2, rows, shapes.response_slots), np.float32)
        source_BT = np.zeros((rows, shapes.response_slots), np.int8)
        for b, n in taken.items():
            r = job.requests[n]
            tokens_BS[b, : len(r.prompt)] = r.prompt
            prompt_length_B[b] = length_B[b] = len(r.prompt)
            budget_B[b], expected_B[b], sample_B[b], word_B[b] = r.budget, r.expected_length, r.sample, r.noise
            if self.corpus is not None:
                group_B[b], live_B[b] = r.group, job.live_texts[n]
            if job.rows.begun_N[n]:
                kept = job.rows.of(n)
                tokens_BS[b], length_B[b] = kept["tokens_BS"], kept["length_B"]
                log_prob_BT[b], behaviour_log_prob_BT[b] = kept["log_prob_BT"], kept["behaviour_log_prob_BT"]
                source_BT[b], forwards_B[b] = kept["source_BT"], kept["forwards_B"]
                proposed_B[b], accepted_B[b] = kept["proposed_B"], kept["accepted_B"]
        if self.corpus is not None and "history" in self.config.rules.sources:
            own_B = job.history.own_responses(group_B, sample_B, word_B.astype(np.int64))
        if taken:
            prompt_B2[list(taken)] = noise.prompt_words([job.requests[n].prompt_id for n in taken.values()])
        return RowState(
            tokens_BS=tokens_BS,
            length_B=length_B,
            prompt_length_B=prompt_length_B,
            budget_B=budget_B,
            expected_B=expected_B,
            active_B=np.isin(np.arange(rows), list(taken)),
            ended_B=np.zeros(rows, bool),
            key_B2=np.asarray(noise.row_keys(self.seed, word_B, prompt_B2, sample_B)),
            reader=Reader(group_B, live_B, own_B, np.zeros(rows, np.int32)),
            window_B=np.full(rows, FIRST_WINDOW, np.int32),
            log_prob_BT=log_prob_BT,
            behaviour_log_prob_BT=behaviour_log_prob_BT,
            source_BT=source_BT,
            forwards_B=forwards_B,
            proposed_B=proposed_B,
            accepted_B=accepted_B,
            cache=(),
        )

    def _placed_corpus(self):
        """The corpus of the whole job on the device, so that it has one shape on every slice."""
        prompts = [np.zeros(0, np.int32)] * len(self.job.history.tokens_GRP)
        for r in self.job.requests:
            prompts[r.group] = r.prompt
        corpus = make_corpus(self.job.history, prompts, self.job.siblings, self.config.rules)
        return jax.device_put(corpus, self.programs.everywhere)

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
            self.shrink(fitting[-1])

    def shrink(self, rows: int) -> None:
        """Goes on with so many rows. They get the whole cache, so that a smaller batch has one shape."""
        index_B = np.argsort(~self.active_B, kind="stable")[:rows]  # active rows first
        self.state = self.programs.gather(self.state, index_B, self.shapes.positions)
        for name in ("owner_B", "active_B", "length_B", "forwards_B"):
            setattr(self, name, getattr(self, name)[index_B])

    # --- how much to draft --------------------------------------------------------------------------------------

    def peek(self) -> tuple[Mix, Draft]:
        """Which drafts there would be now."""
        self.corpus, mix, drafted = self.programs.peek(self.beliefs(), self.corpus, self.state.replace(cache=()))
        return jax.device_get(mix), drafted

    def beliefs(self) -> Beliefs:
        return self.acceptance.beliefs(LEAST_CHANCE, windows=self.config.window == "marginal")

    def choose(self, mix: Mix) -> int:
        rows = len(self.active_B)
        return choose_bucket(self.acceptance, self.costs, mix, rows, self.slots, self.config.draft_buckets)

    def measure(self, costs: CostTable) -> None:
        """Compiles an iteration of the present shape for each K, and times it where the cost is not known.

        The rows go on decoding whatever comes, also when they are done: the arithmetic is the same. Only a session
        that makes no rollouts may do this.
        """
        rows = len(self.active_B)
        known = all((rows, self.slots, k) in costs.costs for k in self.config.draft_buckets)
        draft_seconds = self._time_drafting(known) if self.corpus is not None else 0.0
        for k in sorted(self.config.draft_buckets) if self.corpus is not None else (1,):
            self._iterations(1, k)  # compiles
            if self.job.history is not None and (rows, self.slots, k) not in costs.costs:
                first = _time(lambda k=k: self._iterations(1, k), repeats=1)
                n = int(np.clip(TIMED_SECONDS / first, 1, self.config.chunk))
                seconds = _time(lambda k=k, n=n: self._iterations(n, k)) / n
                draft = draft_seconds if k > 1 else 0.0
                costs.add(Cost(rows, self.slots, k, seconds, draft, self._time_sampling(k)))

    def _iterations(self, count: int, k: int) -> None:
        _, steps = self._chunk(k, count, stop_at=-1, longest=2**30)
        steps.block_until_ready()

    def _time_drafting(self, known: bool) -> float:
        """Seconds of drafting; where they are known, only compiles it."""

        def look() -> None:
            mix, drafted = self.peek()
            jax.block_until_ready((mix, drafted))

        _, drafted = self.peek()  # compiles
        self.programs.judge(drafted, self.length_B, self.state.replace(cache=()))
        return 0.0 if known else _time(look)

    def _time_sampling(self, k: int) -> float:
        rows = len(self.active_B)
        logits_BKV = jnp.zeros((rows, k, self.programs.model.vocab_size), jnp.float32)
        keys_BK2 = jnp.zeros((rows, k, 2), jnp.uint32)
        jax.block_until_ready(self.programs.draw(logits_BKV, keys_BK2))  # compiles
        return _time(lambda: jax.block_until_ready(self.programs.draw(logits_BKV, keys_BK2)))


def _time(work: Callable[[], object], repeats: int = 5) -> float:
    """Least seconds of a few calls: what disturbs a machine only ever adds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
