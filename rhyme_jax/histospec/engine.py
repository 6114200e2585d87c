"""The rollout engine of one mesh: its compiled programs, what drafts have yielded so far, and what verifying costs.

`generate` rolls out a batch on this mesh alone. `histopipe.dispatch` lays a job over the engines of several slices,
with the same sessions (`session`).
"""

import copy
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jax.sharding import Mesh

from rhyme_jax.errors import InputError
from rhyme_jax.histospec.budget import Acceptance, CostTable, Tally
from rhyme_jax.histospec.drafts import HistoryBlock
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.programs import Programs, Shapes
from rhyme_jax.histospec.rollouts import Job, Request, Rollouts
from rhyme_jax.histospec.session import Session
from rhyme_jax.models.config import DecoderConfig


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
        start = time.monotonic()
        job = self.job(requests, history)
        session = self.session(params, job, range(len(requests)))
        session.run(progress)
        self.acceptance = learned(self.acceptance, [session.evidence])
        return job.rows.rollouts(slice(None), session.tally, session.chunks, time.monotonic() - start)

    def job(
        self, requests: Sequence[Request], history: HistoryBlock | None, slices: int = 1, migration: bool = False
    ) -> Job:
        """Requests as a job for sessions on so many slices of this engine's shape.

        Args:
          migration: whether requests may go on in a session that did not begin them.

        Raises: as `generate`.
        """
        self._check(requests, history)
        return Job(requests, history, self._shapes(requests, slices, migration))

    def session(self, params: dict, job: Job, numbers: Sequence[int]) -> Session:
        """A session of this mesh for some of a job's requests."""
        return Session(self.programs, self.config, params, job, numbers, self.seed, self.acceptance, self.costs)

    def prepare(
        self,
        params: dict,
        requests: Sequence[Request],
        history: HistoryBlock | None,
        progress: Callable[[int, int], None] | None = None,
        slices: int = 1,
        migration: bool = False,
    ) -> None:
        """Compiles the programs that a job of such requests may need here, and measures what an iteration of each
        shape costs where `costs` does not know it.

        Args:
          history: None for batches that are decoded plainly: there is nothing to choose, so nothing is measured.
          progress: called with (shapes done, shapes in all).
        """
        job = self.job(requests, history, slices, migration)
        shapes = job.shapes
        session = self.session(params, job, range(len(requests)))
        costs = self.costs if len(self.costs) else CostTable()
        session.refill()
        for number, (rows, slots) in enumerate(shapes.batches):
            if rows < shapes.rows[0]:
                session.shrink(rows)
                if slices > 1:  # a session may begin with any number of rows
                    self.programs.empty(rows, slots)
            session.grow(slots)
            if migration:
                self.programs.grow(session.state.cache, shapes.positions)
            if slices > 1 or (session.waiting and rows == shapes.rows[0]):
                session.compile_refills()
            for smaller in (r for r in shapes.rows if r < rows):  # all ways to shrink are compiled, one is gone
                self.programs.gather(session.state, np.arange(smaller), shapes.positions)
            session.measure(costs)
            if progress is not None:
                progress(number + 1, len(shapes.batches))
        if len(costs):
            self.costs = costs

    def _shapes(self, requests: Sequence[Request], slices: int = 1, migration: bool = False) -> Shapes:
        return self.programs.shapes(
            [r.prompt_bytes for r in requests],
            longest_prompt=max(len(r.prompt) for r in requests),
            longest_response=max(r.budget for r in requests),
            slices=slices,
            migration=migration,
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


def learned(acceptance: Acceptance, evidence: Iterable[Iterable[Tally | None]]) -> Acceptance:
    """Acceptance with what sessions saw side by side, each chunk by chunk. Chunks of the same place count as one, so
    that older counts fade with time and not with the number of sessions.
    """
    acceptance = copy.deepcopy(acceptance)
    for tallies in itertools.zip_longest(*evidence):
        seen = [t for t in tallies if t is not None]
        if seen:
            acceptance.add(functools.reduce(operator.add, seen))
    return acceptance
