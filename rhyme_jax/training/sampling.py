"""Rollouts on the slices: everything from a policy, requests and a forecast of their lengths to finished rows.

What is asked of the slices, and what becomes of the responses, is the loop's business: nothing here knows of tasks,
rewards or checkpoints.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import operator
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.files import read_json
from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.dispatch import Dispatcher, Flight, Span, Weights
from rhyme_jax.histopipe.plan import Work, make_plan
from rhyme_jax.histopipe.slices import Slices, cut_slices
from rhyme_jax.history.lengths import Forecast
from rhyme_jax.histospec.budget import Acceptance, CostTable, Mix
from rhyme_jax.histospec.drafts import SOURCES, HistoryBlock
from rhyme_jax.histospec.engine import RolloutEngine, learned
from rhyme_jax.histospec.programs import Shapes
from rhyme_jax.histospec.rollouts import FIELDS, Request, Rollouts
from rhyme_jax.histospec.sampling import GREEDY, SamplingParams
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.training import distributed
from rhyme_jax.training.settings import Settings

PROGRESS_SECONDS = 20.0  # a rollout that takes longer says how far it is
COMPARISONS = 3  # timed pairs of the closing comparison with plain decoding


def slices_of(settings: Settings, devices: Sequence[jax.Device] | None = None) -> Slices:
    """The devices as the settings cut them.

    Raises:
      InputError: they cannot be cut so.
    """
    mesh, pipe = settings.mesh, settings.pipeline
    if pipe.runs_ahead and jax.process_count() > 1:
        raise InputError("pipeline.mode='cross_step': takes one process; use 'balanced' with several")
    return cut_slices((mesh.data, mesh.fsdp, mesh.tensor), pipe.slices, pipe.learner_devices, pipe.tensor, devices)


def read_costs(name: str, path) -> CostTable:
    """The cost table of a file. Raises InputError, with the field's name, where it holds none."""
    try:
        return CostTable.from_json(read_json(pathlib.Path(path)))
    except (InputError, OSError) as e:
        raise InputError(f"{name}={path}: {one_line(e)}") from e


class Sampler:
    """Makes rollouts on this process's slices, as planned for those of all processes.

    `sampled` rolls out at the training temperature, `greedy` for evaluation; they share the slices and the weights.

    Args:
      longest_prompt: tokens of the longest prompt there is.
      say: called with lines for the user.
    """

    def __init__(
        self,
        settings: Settings,
        slices: Slices,
        model: DecoderConfig,
        eos_ids: tuple[int, ...],
        longest_prompt: int,
        say: Callable[[str], None],
    ):
        self.settings, self.slices, self.model, self.say = settings, slices, model, say

        def dispatcher(sampling: SamplingParams, **options) -> Dispatcher:
            config = settings.engine(sampling, eos_ids, longest_prompt)
            engines = [RolloutEngine(model, config, mesh, settings.seed) for mesh in slices.meshes]
            return Dispatcher(engines, slices.first, **options)

        pipe = settings.pipeline
        defer = pipe.defer if pipe.runs_ahead else 0.0
        self.sampled = dispatcher(
            settings.rollout.sampling(),
            migrate=pipe.migrates,
            defer=defer,
            ordered=pipe.runs_ahead or pipe.migrates or not slices.colocated,
        )
        self.greedy = dispatcher(GREEDY, ordered=False)
        self.mix: Mix | None = None  # of drafts in the last step: what the planner expects
        self.siblings_share = 0.0  # of the last step's tokens that siblings drafted

    @property
    def engine(self) -> RolloutEngine:
        """That of this process's first slice; what it knows of costs and drafts, all slices know."""
        return self.sampled.slices[0].engine

    # --- what is learned from drafts, and costs -----------------------------------------------------------------

    def state(self) -> dict:
        """What was learned, as JSON for `load`: with it and the costs a resumed run plans and drafts alike."""
        mix = {} if self.mix is None else {"drafts": self.mix.drafts_XM.tolist(), "without": self.mix.without}
        return {"acceptance": self.engine.acceptance.state(), "mix": mix, "siblings_share": self.siblings_share}

    def load(self, acceptance: dict, mix: dict, siblings_share: float) -> None:
        for s in self.sampled.slices:
            s.engine.acceptance.load(acceptance)
        self.mix = Mix(np.array(mix["drafts"]), mix["without"]) if mix else None
        self.siblings_share = siblings_share

    def forget(self) -> None:
        """Makes room for another run on these slices: only costs and compiled programs stay."""
        self._accept(Acceptance(self.engine.config.depths))
        self.mix, self.siblings_share = None, 0.0
        self.sampled.weights = self.greedy.weights = None

    def learn(self, spans: Sequence[Span], rollouts: Rollouts) -> None:
        """What a step's drafts yielded, for the choices of the next."""
        by_slice = [[s.evidence for s in spans if s.slice == i] for i in range(self.slices.total)]
        self._accept(learned(self.engine.acceptance, by_slice))
        seen = [e for evidence in by_slice for e in evidence if e is not None]
        if seen:
            self.mix = functools.reduce(operator.add, seen).mix
        siblings_NT = rollouts.source_NT == 1 + SOURCES.index("siblings")
        self.siblings_share = float(siblings_NT.sum() / max(1, rollouts.generated))

    def share_costs(self, costs: CostTable) -> None:
        for s in self.sampled.slices:
            s.engine.costs = costs

    def _accept(self, acceptance: Acceptance) -> None:
        for s in self.sampled.slices:
            s.engine.acceptance = acceptance

    # --- weights and programs -----------------------------------------------------------------------------------

    def hold(self, version: int, params: Callable[[], dict]) -> None:
        """Has the slices decode with a policy; moves it there once for each version.

        Args:
          version: training steps that the policy has learned from.
          params: makes its `Learner.rollout_params`, if they are needed.
        """
        if self.sampled.weights is not None and self.sampled.weights.version == version:
            return
        if self.sampled.idle:  # the old ones make room
            self.sampled.weights = self.greedy.weights = None
        local = distributed.to_local(params())
        placed = jax.block_until_ready(self.slices.place(local, self.model))
        self.sampled.weights = self.greedy.weights = Weights(version, placed)

    def measure_costs(self, requests: Sequence[Request], history: HistoryBlock, evaluation: Sequence[Request]) -> None:
        """What a decoding iteration costs, for each shape that the run may need; compiles them all.

        Args:
          requests: as many as those of a step, with a history of its shape.
          evaluation: those of an evaluation.
        """
        total, migrates = self.slices.total, self.settings.pipeline.migrates
        buckets = ", ".join(map(str, self.settings.draft.buckets))

        def progress(done: int, shapes: int) -> None:
            self.say(f"measured {done} of {shapes} batch shapes, K = {buckets}")

        def compile_slice(index: int, progress=None) -> None:
            sampled, greedy = (d.slices[index].engine for d in (self.sampled, self.greedy))
            params = self.sampled.weights.by_slice[index]
            sampled.prepare(params, requests, history, progress, total, migrates)
            for engine in (greedy, sampled):  # the shapes of evaluation too, so that no later step compiles
                engine.prepare(params, evaluation, None, slices=total)

        self.say("compiling the decoder and measuring its iterations (kept in cost_table.json)")
        compile_slice(0, progress)
        self.share_costs(CostTable.from_json(distributed.from_primary(self.engine.costs.to_json())))
        others = range(1, len(self.sampled.slices))
        if others:
            self.say(f"compiling for {len(others)} more slices")
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles without Python's lock
                list(pool.map(compile_slice, others))

    @contextlib.contextmanager
    def _says_compiled(self, dispatcher: Dispatcher) -> Iterator[None]:
        before = [len(s.engine.compiled) for s in dispatcher.slices]
        yield
        for s, count in zip(dispatcher.slices, before, strict=True):
            if len(s.engine.compiled) > count:
                where = f" for slice {s.number}" if self.slices.total > 1 else ""
                self.say(f"compiled{where}: {', '.join(s.engine.compiled[count:])}")

    # --- a step -------------------------------------------------------------------------------------------------

    def plan(
        self,
        step: int,
        requests: Sequence[Request],
        history: HistoryBlock,
        forecast: Forecast,
        describe: Callable[[int], str],
        goes_on: bool,
        round: int = 0,
    ) -> Flight:
        """Lays a step's rollouts out over the slices, ready for `sampled.launch`.

        Args:
          requests: group by group.
          forecast: of the responses to each prompt.
          describe: what an error calls a group.
          goes_on: whether slices may go on to the next step while others still do this one.
          round: of sampling within the step.
        """
        s = self.settings
        job = self.engine.job(requests, history, self.slices.total, s.pipeline.migrates)
        self.sampled.cost = cost = self._cost(job.shapes)
        work = Work(
            mean_G=forecast.mean_G,
            upper_G=forecast.upper_G,
            prompt_G=np.array([len(r.prompt) for r in requests[:: s.rollout.samples_per_prompt]]),
            samples=s.rollout.samples_per_prompt,
            split_cost=self.siblings_share,
            longest=s.rollout.max_new_tokens,
        )
        mode, busy_S = s.pipeline.mode, None
        if s.pipeline.runs_ahead:
            busy_S = self.sampled.busy_seconds
            mode = "cross_step" if goes_on else "balanced"  # where all is waited for, none may lag
        plan = make_plan(work, self.slices.total, cost, mode, s.pipeline.layout, step, busy_S)
        return Flight(step, job, plan, forecast, describe, round)

    def _cost(self, shapes: Shapes) -> SliceCost:
        """What the planner goes by: measured costs, and drafts that yield what those of the last step did."""
        buckets, costs = self.settings.draft.buckets, self.engine.costs
        yields = {1: 1.0}
        if self.mix is not None:
            yields |= {k: self.engine.acceptance.tokens_per_iteration(self.mix, k) for k in buckets}
        cost = SliceCost.from_table(costs, shapes.rows, shapes.positions, yields)
        # A prompt's tokens take about what as many verified ones do.
        k = max(buckets)
        prefill = costs.seconds(shapes.rows[0], shapes.positions, k) / (shapes.rows[0] * k)
        return dataclasses.replace(cost, prefill=prefill)

    def roll_out(
        self,
        flight: Flight,
        before: Flight | None,
        ahead: Callable[[], Flight] | None,
        each: Callable[[Flight, list[int]], None],
    ) -> None:
        """Decodes until the flight can be closed, see `Dispatcher.run`; says how far it is, and what was compiled."""
        said = time.monotonic()

        def each_and_say(finished: Flight, numbers: list[int]) -> None:
            nonlocal said
            each(finished, numbers)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done_N = flight.job.rows.finished_N[flight.here_N]
                self.say(f"rollout: {done_N.sum()} of {done_N.size} responses done")

        with self._says_compiled(self.sampled):
            self.sampled.run(flight, before, ahead, each_and_say)

    def collect(self, flight: Flight, since: float, known_N: np.ndarray) -> list[Span]:
        """Brings together what the processes rolled out, so that each of them has all of the flight.

        Args:
          since: time, on this process's clock, that the times of spans count from.
          known_N: a value of each rollout, of which this process knows those of its own; the others are filled in.

        Returns:
          What the slices of all processes did since this was last asked, slice by slice.
        """
        spans = [dataclasses.replace(s, start=s.start - since, end=s.end - since) for s in self.sampled.take_spans()]
        here, rows = np.flatnonzero(flight.here_N), flight.job.rows
        of_rows = {name: rows.by_field[name][here] for name in FIELDS}
        mine = (here, of_rows, flight.version_N[here], known_N[here], flight.migrations, spans)
        together = distributed.gather(mine)
        if len(together) > 1:
            for numbers, of_rows, versions, known, *_ in together:
                rows.put(numbers, of_rows, finished=True)
                flight.version_N[numbers], known_N[numbers] = versions, known
            flight.migrations = sum(migrations for *_, migrations, _ in together)
        # In an order that no clock has a say in.
        return sorted((s for *_, spans in together for s in spans), key=lambda s: s.slice)

    # --- evaluation and the closing comparison ------------------------------------------------------------------

    def roll_out_apart(
        self,
        dispatcher: Dispatcher,
        step: int,
        requests: Sequence[Request],
        describe: Callable[[int], str],
        each: Callable[[Flight, list[int]], None],
    ) -> None:
        """Decodes groups of one, of which nothing is foretold, in equal shares: no part of the step."""
        with self._says_compiled(dispatcher):
            ones = np.ones(len(requests))
            work = Work(ones, ones, ones.astype(int), samples=1)
            plan = make_plan(work, self.slices.total, SliceCost(np.array([0.0, 1.0])), "sync")
            job = dispatcher.slices[0].engine.job(requests, None, self.slices.total)
            flight = Flight(step, job, plan, describe=describe)
            dispatcher.launch(flight)
            dispatcher.run(flight, each=each)
            dispatcher.take_spans()

    def compare_with_plain(self, flight: Flight) -> dict:
        """Repeats a flight with K = 1 on the same noise: counts equal tokens and compares speed.

        Timed in alternating pairs after both programs are compiled; the ratio is that of the medians.
        """
        self.say("repeating the last step's rollouts without drafts, to compare")
        history, here = flight.job.history, np.flatnonzero(flight.here_N)
        rollouts = flight.job.rows.rollouts(here, None, (), 0.0)
        kept = self.sampled.take_spans()
        plain = self._repeat(flight, None)[0]
        identical = compared = 0
        for n in range(len(here)):
            drafted, undrafted = rollouts.response(n), plain.response(n)
            shorter = min(len(drafted), len(undrafted))
            compared += max(len(drafted), len(undrafted))
            identical += int((drafted[:shorter] == undrafted[:shorter]).sum())
        drafted_s, plain_s = [], []
        for _ in range(COMPARISONS):
            drafted_s.append(self._repeat(flight, history)[1])
            plain_s.append(self._repeat(flight, None)[1])
        self.sampled.spans = kept  # repeats are no part of the step
        counts = identical, compared, int(rollouts.accepted_N.sum()), rollouts.generated, int(rollouts.forwards_N.sum())
        together = distributed.gather((counts, float(np.median(drafted_s)), float(np.median(plain_s))))
        identical, compared, accepted, generated, forwards = np.sum([c for c, _, _ in together], axis=0).tolist()
        drafted_s, plain_s = max(t for _, t, _ in together), max(t for _, _, t in together)
        return {
            "identical_tokens": identical,
            "compared_tokens": compared,
            "drafted_tokens": accepted,
            "tokens_per_row_forward": generated / forwards,
            "rollout_speedup": plain_s / drafted_s,
            "tokens_per_s": generated / drafted_s,
            "plain_tokens_per_s": generated / plain_s,
        }

    def _repeat(self, flight: Flight, history: HistoryBlock | None) -> tuple[Rollouts, float]:
        """This process's rollouts of a flight, made again, and the seconds that took."""
        job = self.engine.job(flight.job.requests, history, self.slices.total, self.settings.pipeline.migrates)
        again = Flight(flight.step, job, flight.plan, flight.forecast, flight.describe)
        start = time.monotonic()
        self.sampled.launch(again)
        self.sampled.run(again)
        seconds = time.monotonic() - start
        return job.rows.rollouts(np.flatnonzero(again.here_N), None, (), seconds), seconds
