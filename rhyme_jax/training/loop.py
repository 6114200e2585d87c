"""The single-controller loop. One step:

1. *plan*: the next batch of prompts, laid out over the rollout slices by the length that history predicts for them
   (`tasks.stream`, `history.lengths`, `histopipe.plan`);
2. *rollout*: a group of responses to each prompt, drafted from its history (`histopipe.dispatch`, `histospec`); groups
   are graded as they are finished (`tasks.graders`), and where the learner has devices of its own it learns from them
   while others are still decoded;
3. *update*: advantages within each group (`grpo.advantages`), the sharded learner (`grpo.learner`);
4. *record*: history, lengths, metrics, samples, timeline, and every few steps evaluation and a checkpoint.

With `pipeline.mode=cross_step` the rollouts of the next step begin before this one's are finished; nothing is under
way when a run evaluates or saves, so that a checkpoint holds no half-made rollout.

A run starts from the first of these that exists: (1) the newest checkpoint of its own workdir; (2) `init.weights`.
"""

import concurrent.futures
import dataclasses
import functools
import io
import math
import operator
import os
import pathlib
import time

import jax
import ml_collections
import numpy as np

from rhyme_jax.errors import InputError, RunError, one_line
from rhyme_jax.files import read_json
from rhyme_jax.grpo.learner import Accumulated, Batch, Learner, LearnerState
from rhyme_jax.histopipe import timeline
from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.dispatch import Dispatcher, Flight, Span, Weights
from rhyme_jax.histopipe.plan import Plan, Work, make_plan
from rhyme_jax.histopipe.slices import cut_slices
from rhyme_jax.history.lengths import LengthPredictor, forecast_metrics
from rhyme_jax.history.store import HistoryStore, Response, prompt_id
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import CostTable, Mix, Tally
from rhyme_jax.histospec.drafts import SOURCES, HistoryBlock
from rhyme_jax.histospec.engine import RolloutEngine, learned
from rhyme_jax.histospec.programs import Shapes
from rhyme_jax.histospec.rollouts import FIELDS, Request, Rollouts
from rhyme_jax.histospec.sampling import GREEDY
from rhyme_jax.histospec.telemetry import EpochCounts, draft_metrics, predicted
from rhyme_jax.models.load import load_model
from rhyme_jax.tasks.graders import Graders
from rhyme_jax.tasks.problems import Problem, load_problems
from rhyme_jax.tasks.stream import PromptStream
from rhyme_jax.training import distributed
from rhyme_jax.training.batches import Graded, Prompt, StepRollouts, graded, joined
from rhyme_jax.training.checkpoints import Checkpoints
from rhyme_jax.training.console import Console, Stopwatch, duration
from rhyme_jax.training.settings import Settings
from rhyme_jax.training.workdir import Workdir, read_metrics

PROGRESS_SECONDS = 20.0  # a rollout that takes longer says how far it is
COMPARISONS = 3  # timed pairs of the closing comparison with plain decoding


@dataclasses.dataclass
class Progress:
    """What the loop carries from step to step beside arrays; saved with each checkpoint, never derived."""

    steps: int = 0  # done
    stream: dict = dataclasses.field(default_factory=lambda: {"epoch": 0, "index": 0})
    seconds: float = 0.0  # of training, over all starts
    evicted_prompts: int = 0
    first_eval: dict = dataclasses.field(default_factory=dict)  # accuracies of the initial weights
    last_eval: dict = dataclasses.field(default_factory=dict)  # the newest, with its `step`
    comparison: dict = dataclasses.field(default_factory=dict)  # of the last step with plain decoding
    costs: dict = dataclasses.field(default_factory=dict)  # the cost table: a resumed run chooses K alike
    acceptance: dict = dataclasses.field(default_factory=dict)  # what drafts have yielded so far
    mix: dict = dataclasses.field(default_factory=dict)  # of drafts in the last step: what the planner expects
    siblings_share: float = 0.0  # of the last step's tokens that siblings drafted
    epoch_counts: dict = dataclasses.field(default_factory=lambda: dataclasses.asdict(EpochCounts()))


class Trainer:
    """Everything a run holds. Construction checks the input and loads the weights; `run` does the work."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: str, console: Console, devices=None):
        self.settings = s = Settings.from_config(config)
        self.console = console
        pipe = s.pipeline
        if pipe.runs_ahead and jax.process_count() > 1:
            raise InputError("pipeline.mode='cross_step': takes one process; use 'balanced' with several")
        self.slices = cut_slices(
            (s.mesh.data, s.mesh.fsdp, s.mesh.tensor), pipe.slices, pipe.learner_devices, pipe.tensor, devices
        )
        self.mesh = mesh = self.slices.learner
        train, evaluation = load_problems(s.task)
        self.stream = PromptStream(len(train), s.rollout.prompts_per_step, s.seed)
        self.history = HistoryStore(s.history.depth, s.history.max_tokens)
        self.lengths = LengthPredictor(first=s.rollout.max_new_tokens / 2)

        loaded = load_model(s.init.weights, s.model.dtype, s.model.param_dtype)
        self.model, self.tokenizer = loaded.config, loaded.tokenizer
        self.train_prompts = [self._prompt(p) for p in train]
        self.eval_prompts = [self._prompt(p) for p in evaluation]
        self.learner = Learner(
            self.model, s.grpo.loss(), s.optimizer.config(s.total_updates), mesh, s.rollout.temperature, s.rollout.rows
        )
        longest = max(len(p.tokens) for p in [*self.train_prompts, *self.eval_prompts])
        if longest + s.rollout.max_new_tokens > self.model.max_positions:
            raise InputError(
                f"rollout.max_new_tokens={s.rollout.max_new_tokens}: with a prompt of {longest} tokens it exceeds "
                f"the model's {self.model.max_positions} positions"
            )
        eos = self.tokenizer.eos_ids

        def dispatcher(sampling, **options) -> Dispatcher:
            config = s.engine(sampling, eos, prompt_slots=longest)
            engines = [RolloutEngine(self.model, config, mesh, s.seed) for mesh in self.slices.meshes]
            return Dispatcher(engines, self.slices.first, describe=self._describe, **options)

        defer = pipe.defer if pipe.runs_ahead else 0.0
        self.sampler = dispatcher(s.rollout.sampling(), migrate=pipe.migrates, defer=defer)
        self.greedy = dispatcher(GREEDY)
        self.graders = Graders(s.grading.workers, s.grading.timeout)
        self.under_way: list[StepRollouts] = []  # not learned from, or not all of it: the oldest first

        costs = None if s.draft.costs == "measured" else _read_costs("draft.costs", s.draft.costs)

        # Last, so that refused input leaves nothing behind.
        self.workdir = Workdir(workdir, writes=distributed.is_primary())
        self.workdir.prepare(config)
        distributed.check_shared("--workdir", self.workdir.config)
        self.checkpoints = Checkpoints(self.workdir.checkpoints, s.checkpoint.keep)
        self.progress = Progress()
        self.state = self._start(loaded.params)
        if self.progress.costs:
            costs = CostTable.from_json(self.progress.costs)
        elif costs is None and distributed.from_primary(self.workdir.cost_table.exists()):
            costs = _read_costs("--workdir", self.workdir.cost_table)
        self.costs_known = costs is not None
        if costs is not None:
            self._share_costs(costs)
        self.reference = None
        if s.grpo.kl_coef > 0:
            self.reference = self.learner.place_params(loaded.params)
        self.metrics = self.workdir.step_file(self.workdir.metrics, self.progress.steps)
        self.timeline = self.workdir.step_file(self.workdir.timeline, self.progress.steps)
        self.started = time.monotonic() - self.progress.seconds

    @property
    def engine(self) -> RolloutEngine:
        """That of this process's first slice."""
        return self.sampler.slices[0].engine

    def run(self) -> dict:
        """Trains to the last step; returns what it writes to result.json."""
        start, first = time.monotonic(), self.progress.steps
        self.started = start - self.progress.seconds
        if first < self.settings.steps:
            self.workdir.remove_result()  # of a run that is being prolonged
        if first == 0:
            if not self.costs_known:
                self.measure_costs()
            self.workdir.write_json(self.workdir.cost_table, self.engine.costs.to_json())
            self._first_evaluation()
        while self.progress.steps < self.settings.steps:
            metrics = self.step()
            self.progress.seconds = time.monotonic() - self.started
            self._checkpoint_if_due()
            done = self.progress.steps - first
            left = (time.monotonic() - start) / done * (self.settings.steps - self.progress.steps)
            self.console.line(_step_line(metrics, self.settings.steps, left))
        self.checkpoints.wait()
        if self.progress.last_eval["step"] != self.progress.steps:  # resumed with fewer steps than were done
            self._evaluate()
        result = self._result()
        self.workdir.write_json(self.workdir.result, result)
        return result

    def close(self) -> None:
        self.graders.close()
        self.metrics.close()
        self.timeline.close()
        self.checkpoints.close()
        self.workdir.release()

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> dict:
        """One training step; returns its metrics."""
        s, watch, step = self.settings, Stopwatch(), self.progress.steps
        with watch("weights"):
            self._weights()
        with watch("plan"):
            current = self._of_step(step) or self._begin(step)
        before = self._of_step(step - 1)
        gradients = None if self.slices.colocated else _GradientStream(self, step, [before, current])
        with watch("rollout"):
            self._roll_out(current, before, gradients)
        if step == s.steps - 1:
            with watch("compare"):
                self.progress.comparison = self._compare_with_plain(current)
        with watch("grade"):
            spans = self._settle(current)
            parts = [graded(current, set(current.flight.group_N) - current.flight.deferred)]
            if before is not None:
                self._settle(before)
                parts.insert(0, graded(before, before.flight.deferred))
            config = self.engine.config
            tally = Tally.zeros(config.depths) if config.drafts else None
            batch = joined(parts, spans, tally, watch.seconds["rollout"])
        with watch("update"):
            learned_metrics = self._update(batch, gradients)
        with watch("record"):
            forecast_error = self._remember(batch)
            self._learn_from(spans, batch.rollouts)
            self.under_way = [w for w in self.under_way if w.flight.step > step or (w.flight.deferred and w is current)]
            self.progress.steps = step + 1
            self.progress.stream = self.stream.position()
            self._write_samples(batch)
            self.timeline.write(timeline.plan_record(step, current.flight.plan), *timeline.span_records(spans))
        staleness_N = step - batch.version_N
        metrics = {
            "step": step + 1,
            "epoch": current.epoch,
            **self._rollout_metrics(batch.rollouts, batch.rewards_N),
            **draft_metrics(batch.rollouts),
            **predicted(batch.rollouts.chunks, self.engine.costs),
            **self._epoch_metrics(batch.rollouts, current.ends_epoch),
            **forecast_error,
            **timeline.bubble_ratios(spans, self.slices.total),
            "pipeline/migrations": current.flight.migrations,
            "pipeline/deferred": len(current.flight.deferred),
            **{f"learner/{k}": v for k, v in learned_metrics.items()},
            "learner/staleness": float(staleness_N.mean()),
            "learner/staleness_max": int(staleness_N.max()),
            "history/prompts": len(self.history),
            "history/tokens": self.history.tokens,
            "history/evicted_prompts": self.history.evicted_prompts,
        }
        if self.progress.steps % s.eval.every == 0 or self.progress.steps == s.steps:
            with watch("eval"):
                metrics |= self._evaluate()
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in watch.seconds.items()}
        metrics["seconds/step"] = sum(watch.seconds.values())
        metrics["seconds/rollout_tokens_per_s"] = batch.rollouts.generated / watch.seconds["rollout"]
        self.metrics.write(metrics)
        return metrics

    def _weights(self) -> Weights:
        """The policy on the slices; moved there once for each version."""
        if self.sampler.weights is None or self.sampler.weights.version != self.progress.steps:
            if self.sampler.idle:  # the old ones make room
                self.sampler.weights = self.greedy.weights = None
            params = distributed.to_local(self.learner.rollout_params(self.state))
            placed = jax.block_until_ready(self.slices.place(params, self.model))
            self.sampler.weights = self.greedy.weights = Weights(self.progress.steps, placed)
        return self.sampler.weights

    # --- plan ---------------------------------------------------------------------------------------------------

    def _of_step(self, step: int) -> StepRollouts | None:
        return next((w for w in self.under_way if w.flight.step == step), None)

    def plan(self, step: int | None = None) -> tuple[list[Prompt], list[Request], HistoryBlock]:
        """The next batch of prompts, the rollouts to make of them, and what those may draft from."""
        step, visit = self.progress.steps if step is None else step, self.stream.epoch
        prompts = [self.train_prompts[i] for i in self.stream.next()]
        forecast = self.lengths.predict([p.id for p in prompts])
        expected_G = np.where(forecast.seen_G, forecast.mean_G, 0.0)
        requests = [
            self._request(p, sample, self._noise_word(step, visit, sample), g, float(expected_G[g]))
            for g, p in enumerate(prompts)
            for sample in range(self.settings.rollout.samples_per_prompt)
        ]
        return prompts, requests, self._history(prompts)

    def _begin(self, step: int, launch: bool = True) -> StepRollouts:
        """Plans a step and hands it out to the slices."""
        s, epoch, visit = self.settings, self.stream.progress, self.stream.epoch
        prompts, requests, history = self.plan(step)
        job = self.engine.job(requests, history, self.slices.total, s.pipeline.migrates)
        forecast = self.lengths.predict([p.id for p in prompts])
        self.sampler.cost = cost = self._slice_cost(job.shapes)
        work = Work(
            mean_G=forecast.mean_G,
            upper_G=forecast.upper_G,
            prompt_G=np.array([len(p.tokens) for p in prompts]),
            samples=s.rollout.samples_per_prompt,
            split_cost=self.progress.siblings_share,
            longest=s.rollout.max_new_tokens,
        )
        mode, busy_S = s.pipeline.mode, None
        if s.pipeline.runs_ahead:
            busy_S = self.sampler.busy_seconds
            mode = "cross_step" if self._ahead(step) else "balanced"  # where all is waited for, none may lag
        plan = make_plan(work, self.slices.total, cost, mode, s.pipeline.layout, step, busy_S)
        flight = Flight(step, job, plan, forecast)
        begun = StepRollouts(prompts, flight, epoch, ends_epoch=self.stream.epoch > visit)
        self.under_way.append(begun)
        if launch:
            self.sampler.launch(flight)
        return begun

    def _slice_cost(self, shapes: Shapes) -> SliceCost:
        """What the planner goes by: measured costs, and drafts that yield what those of the last step did."""
        yields = {1: 1.0}
        if self.progress.mix:
            mix = Mix(np.array(self.progress.mix["drafts"]), self.progress.mix["without"])
            for k in self.settings.draft.buckets:
                yields[k] = self.engine.acceptance.tokens_per_iteration(mix, k)
        costs, k = self.engine.costs, max(self.settings.draft.buckets)
        cost = SliceCost.from_table(costs, shapes.rows, shapes.positions, yields)
        # A prompt's tokens take about what as many verified ones do.
        prefill = costs.seconds(shapes.rows[0], shapes.positions, k) / (shapes.rows[0] * k)
        return dataclasses.replace(cost, prefill=prefill)

    def _ahead(self, step: int):
        """What gives the dispatcher the next step's rollouts, or None: nothing may be under way when the run evaluates,
        saves, or compares its last step with plain decoding.
        """
        s, done = self.settings, step + 1
        if not s.pipeline.runs_ahead or done % s.eval.every == 0 or done % s.checkpoint.every == 0:
            return None
        return (lambda: self._begin(done, launch=False).flight) if done < s.steps - 1 else None

    # --- rollout and grades -------------------------------------------------------------------------------------

    def _roll_out(self, current: StepRollouts, before: StepRollouts | None, gradients) -> None:
        """Until all that the step learns from is finished; says how far it is, and what was compiled."""
        compiled, said = [len(s.engine.compiled) for s in self.sampler.slices], time.monotonic()

        def each(flight: Flight, numbers: list[int]) -> None:
            nonlocal said
            self._grade_finished(flight, numbers)
            if gradients is not None:
                gradients.flow()
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done_N = current.flight.job.rows.finished_N[current.flight.here_N]
                self.console.line(f"rollout: {done_N.sum()} of {done_N.size} responses done")

        ahead = self._ahead(current.flight.step)
        self.sampler.run(current.flight, before and before.flight, ahead, each)
        self._say_compiled(self.sampler, compiled)

    def _say_compiled(self, dispatcher: Dispatcher, before: list[int]) -> None:
        for s, count in zip(dispatcher.slices, before, strict=True):
            if len(s.engine.compiled) > count:
                where = f" for slice {s.number}" if self.slices.total > 1 else ""
                self.console.line(f"compiled{where}: {', '.join(s.engine.compiled[count:])}")

    def _grade_finished(self, flight: Flight, numbers: list[int]) -> None:
        """Has the groups graded that these rollouts were the last of, on this process."""
        step = next(w for w in self.under_way if w.flight is flight)
        unfinished = set(flight.group_N[flight.unfinished_N].tolist())
        for g in sorted({int(flight.group_N[n]) for n in numbers} - unfinished):
            of_group = np.flatnonzero((flight.group_N == g) & flight.here_N)
            step.grades[g] = (
                of_group,
                self.grade(step.prompts[g].problem, [flight.job.rows.response(n) for n in of_group]),
            )

    def grade(self, problem: Problem, responses: list[np.ndarray]):
        """Rewards of responses (token ids) to one prompt: a future of a list of floats, NaN where a grade failed."""
        return self.graders.submit(problem, [self.tokenizer.decode(r) for r in responses])

    def _settle(self, step: StepRollouts) -> list[Span]:
        """Waits for grades; with several processes, brings together what each of them rolled out. Returns what the
        slices did since this was last asked.
        """
        flight, rows = step.flight, step.flight.job.rows
        for numbers, rewards in step.grades.values():
            step.reward_N[numbers] = rewards.result()
        spans = [
            dataclasses.replace(s, start=s.start - self.started, end=s.end - self.started)
            for s in self.sampler.take_spans()
        ]
        here = np.flatnonzero(flight.here_N)
        of_rows = {name: rows.by_field[name][here] for name in FIELDS}
        together = distributed.gather((here, of_rows, flight.version_N[here], step.reward_N[here], spans))
        if len(together) == 1:
            return spans
        for numbers, of_rows, versions, rewards, _ in together:
            rows.put(numbers, of_rows, finished=True)
            flight.version_N[numbers], step.reward_N[numbers] = versions, rewards
        return sorted((s for _, _, _, _, spans in together for s in spans), key=lambda s: s.end)

    # --- update and record --------------------------------------------------------------------------------------

    def _update(self, graded: Graded, gradients: "_GradientStream | None") -> dict[str, float]:
        grpo = self.settings.grpo
        batch = self.batch(graded, self.progress.steps)
        reference = proximal = None
        if self.reference is not None and (gradients is None or grpo.updates_per_batch > 1):
            reference = self.learner.score(self.reference, batch)
        if self.settings.pipeline.runs_ahead and grpo.updates_per_batch > 1:
            # Always an array, so that one program is compiled; fresh rows do not look at it.
            proximal = np.zeros_like(batch.log_prob)
            if batch.stale.any():
                proximal = self.learner.score(self.state.params, batch)
        metrics: dict[str, float] = {}
        for number in range(grpo.updates_per_batch):
            if number == 0 and gradients is not None:
                self.state, new = self.learner.apply(self.state, gradients.finish(len(batch.valid)))
                gradients.sums = None  # as large as the parameters
            else:
                self.state, new = self.learner.update(self.state, batch, reference, proximal)
            # The gap between rollout and learner means something before the batch's first update only.
            metrics = new if number == 0 else {**new, "rollout_gap": metrics["rollout_gap"]}
        advantage_GC = batch.advantage.reshape(-1, self.settings.rollout.samples_per_prompt)
        return {
            **metrics,
            "zero_advantage_share": float(1 - (advantage_GC != 0).any(axis=1).mean()),
            "failed_grades": int((~batch.valid).sum()),
        }

    def batch(self, graded: Graded, step: int) -> Batch:
        """What the learner gets at a step."""
        s = self.settings
        return graded.batch(s.rollout.samples_per_prompt, s.grpo.normalize_std, step)

    def _remember(self, batch: Graded) -> dict[str, float | None]:
        """Adds to the history; returns how well the lengths were foretold."""
        group = self.settings.rollout.samples_per_prompt
        lengths, ids = [], []
        for start in range(0, len(batch.requests), group):
            members = range(start, start + group)
            prompt = batch.prompts[start]
            self.history.add(
                prompt.tokens,
                [
                    Response(
                        batch.rollouts.response(n),
                        float(batch.rewards_N[n]),
                        int(batch.version_N[n]),
                        int(batch.step_N[n]),
                        batch.requests[n].sample,
                        batch.requests[n].noise,
                    )
                    for n in members
                ],
            )
            ids.append(prompt.id)
            lengths.append(batch.rollouts.response_length_N[start : start + group])
        metrics = forecast_metrics(batch.forecast(), lengths)
        self.lengths.observe(ids, lengths)
        return metrics

    def _learn_from(self, spans: list[Span], rollouts: Rollouts) -> None:
        """What drafts yielded, for the next step's choices."""
        by_slice = [[s.evidence for s in spans if s.slice == i] for i in range(self.slices.total)]
        acceptance = learned(self.engine.acceptance, by_slice)
        for s in self.sampler.slices:
            s.engine.acceptance = acceptance
        seen = [e for evidence in by_slice for e in evidence if e is not None]
        if seen:
            mix = functools.reduce(operator.add, seen).mix
            self.progress.mix = {"drafts": np.asarray(mix.drafts_XM).tolist(), "without": int(mix.without)}
        siblings_NT = rollouts.source_NT == 1 + SOURCES.index("siblings")
        self.progress.siblings_share = float(siblings_NT.sum() / max(1, rollouts.generated))

    def _rollout_metrics(self, rollouts: Rollouts, rewards: np.ndarray) -> dict:
        lengths = rollouts.response_length_N
        group = self.settings.rollout.samples_per_prompt
        graded = rewards[~np.isnan(rewards)]
        return {
            "reward/mean": float(graded.mean()) if graded.size else math.nan,
            "reward/std": float(graded.std()) if graded.size else math.nan,
            "reward/any_correct": float((np.nan_to_num(rewards).reshape(-1, group).max(axis=1) >= 1).mean()),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": int(lengths.max()),
            "response/truncated_share": float((~rollouts.ended_N).mean()),
            "rollout/tokens": rollouts.generated,
            "rollout/iterations": rollouts.iterations,
            "rollout/tokens_per_row_forward": rollouts.tokens_per_row_forward,
            "rollout/proposed": int(rollouts.proposed_N.sum()),
            "rollout/accepted": int(rollouts.accepted_N.sum()),
            "rollout/acceptance": rollouts.acceptance,
        }

    def _epoch_metrics(self, rollouts: Rollouts, ends: bool) -> dict:
        """Sums over the epoch, at the step that ends it."""
        counts = EpochCounts(**self.progress.epoch_counts)
        counts.add(rollouts)
        self.progress.epoch_counts = dataclasses.asdict(EpochCounts() if ends else counts)
        return counts.metrics() if ends else {}

    def _write_samples(self, batch: Graded) -> None:
        self.workdir.write_samples(
            self.progress.steps,
            (
                {
                    "prompt": batch.prompts[n].problem.question,
                    "sample": r.sample,
                    "completion": self.tokenizer.decode(batch.rollouts.response(n)),
                    "reward": None if np.isnan(batch.rewards_N[n]) else float(batch.rewards_N[n]),
                    "length": int(batch.rollouts.response_length_N[n]),
                    "accepted": int(batch.rollouts.accepted_N[n]),
                    "ended": bool(batch.rollouts.ended_N[n]),
                    "policy_version": int(batch.version_N[n]),
                    "deferred": bool(batch.step_N[n] < self.progress.steps - 1),
                }
                for n, r in enumerate(batch.requests)
            ),
        )

    # --- evaluation and the closing comparison ------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy, greedy and with one sample at the training temperature."""
        self._weights()
        requests = self._eval_requests()
        metrics = {}
        for name, dispatcher in (("greedy", self.greedy), ("sampled", self.sampler)):
            compiled = [len(s.engine.compiled) for s in dispatcher.slices]
            job = dispatcher.slices[0].engine.job(requests, None, self.slices.total)
            flight = Flight(self.progress.steps, job, self._even_plan(len(requests)))
            grades = []

            def each(flight: Flight, numbers: list[int], grades=grades) -> None:
                for n in numbers:
                    response = flight.job.rows.response(n)
                    grades.append((len(response), self.grade(self.eval_prompts[n].problem, [response])))

            dispatcher.launch(flight)
            dispatcher.run(flight, each=each)
            dispatcher.take_spans()
            self._say_compiled(dispatcher, compiled)
            together = distributed.gather([(length, *rewards.result()) for length, rewards in grades])
            results = np.array([r for results in together for r in results])
            metrics[f"eval/accuracy_{name}"] = float(np.nan_to_num(results[:, 1]).mean())
            metrics[f"eval/length_{name}"] = float(results[:, 0].mean())
        self.progress.last_eval = {"step": self.progress.steps, **metrics}
        return metrics

    def _even_plan(self, groups: int) -> Plan:
        """Equal shares, for groups of one of which nothing is foretold."""
        ones = np.ones(groups)
        work = Work(ones, ones, ones.astype(int), samples=1)
        return make_plan(work, self.slices.total, SliceCost(np.array([0.0, 1.0])), "sync")

    def _eval_requests(self) -> list[Request]:
        word = noise.fresh_word(self.progress.steps)
        return [self._request(p, 0, word, g) for g, p in enumerate(self.eval_prompts)]

    def measure_costs(self) -> None:
        """What a decoding iteration costs, for each shape that the run may need; compiles them all."""
        s = self.settings
        self.console.line("compiling the decoder and measuring its iterations (kept in cost_table.json)")
        prompts = self.train_prompts[: s.rollout.prompts_per_step]
        requests = [
            self._request(p, i, 0, g) for g, p in enumerate(prompts) for i in range(s.rollout.samples_per_prompt)
        ]
        history, weights = self._history(prompts), self._weights()

        def progress(done: int, shapes: int) -> None:
            self.console.line(f"measured {done} of {shapes} batch shapes, K = {', '.join(map(str, s.draft.buckets))}")

        def compile_slice(index: int, progress=None) -> None:
            sampler, greedy = (d.slices[index].engine for d in (self.sampler, self.greedy))
            params = weights.by_slice[index]
            sampler.prepare(params, requests, history, progress, self.slices.total, s.pipeline.migrates)
            for engine in (greedy, sampler):  # the shapes of evaluation too, so that no later step compiles
                engine.prepare(params, self._eval_requests(), None, slices=self.slices.total)

        compile_slice(0, progress)
        self._share_costs(CostTable.from_json(distributed.from_primary(self.engine.costs.to_json())))
        others = range(1, len(self.sampler.slices))
        if others:
            self.console.line(f"compiling for {len(others)} more slices")
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles without Python's lock
                list(pool.map(compile_slice, others))

    def _share_costs(self, costs: CostTable) -> None:
        for s in self.sampler.slices:
            s.engine.costs = costs

    def _first_evaluation(self) -> None:
        watch = Stopwatch()
        self.console.line("step 0: evaluating the initial weights (the first calls compile)")
        with watch("eval"):
            self.progress.first_eval = self._evaluate()
        metrics = {"step": 0, "epoch": 0.0, **self.progress.first_eval, "seconds/eval": watch.seconds["eval"]}
        self.metrics.write(metrics)
        self.console.line(f"step 0/{self.settings.steps} | {_eval_text(metrics)} | {duration(watch.seconds['eval'])}")

    def _compare_with_plain(self, step: StepRollouts) -> dict:
        """Repeats a step's rollouts with K = 1 on the same noise: counts equal tokens and compares speed.

        Timed in alternating pairs after both programs are compiled; the ratio is that of the medians.
        """
        self.console.line("repeating the last step's rollouts without drafts, to compare")
        flight, history = step.flight, step.flight.job.history
        here = np.flatnonzero(flight.here_N)
        rollouts = flight.job.rows.rollouts(here, None, (), 0.0)
        kept = self.sampler.take_spans()
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
        self.sampler.spans = kept  # repeats are no part of the step
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
        again = Flight(flight.step, job, flight.plan, flight.forecast)
        start = time.monotonic()
        self.sampler.launch(again)
        self.sampler.run(again)
        seconds = time.monotonic() - start
        return job.rows.rollouts(np.flatnonzero(again.here_N), None, (), seconds), seconds

    def _result(self) -> dict:
        evaluation = self.progress.last_eval
        return {
            "steps": self.progress.steps,
            "eval_accuracy_start": self.progress.first_eval["eval/accuracy_greedy"],
            "eval_accuracy_end": evaluation["eval/accuracy_greedy"],
            "eval_sampled_accuracy_start": self.progress.first_eval["eval/accuracy_sampled"],
            "eval_sampled_accuracy_end": evaluation["eval/accuracy_sampled"],
            **self.progress.comparison,
            "seconds": self.progress.seconds,
            "workdir": str(self.workdir.path),
        }

    # --- start and checkpoints ----------------------------------------------------------------------------------

    def _start(self, initial_params) -> LearnerState:
        step = self.checkpoints.latest
        if step is None:
            if read_metrics(self.workdir.metrics):
                self.console.line(f"{self.workdir.path} holds metrics but no checkpoint: starting over")
            return self.learner.init(initial_params)
        state, arrays, loop = self.checkpoints.restore(step, self.learner.abstract_state())
        self.history.load_arrays(arrays["history"])
        self.lengths.load_arrays(arrays["lengths"])
        self.progress = Progress(**loop)
        for s in self.sampler.slices:
            s.engine.acceptance.load(self.progress.acceptance)
        self.history.evicted_prompts = self.progress.evicted_prompts
        self.stream.seek(self.progress.stream)
        self.console.line(f"resuming {self.workdir.path} after step {step}")
        return state

    def _checkpoint_if_due(self) -> None:
        done = self.progress.steps
        if done % self.settings.checkpoint.every == 0 or done == self.settings.steps:
            self.progress.evicted_prompts = self.history.evicted_prompts
            self.progress.costs = self.engine.costs.to_json()
            self.progress.acceptance = self.engine.acceptance.state()
            arrays = {"history": self.history.to_arrays(), "lengths": self.lengths.to_arrays()}
            self.checkpoints.save(done, self.state, arrays, dataclasses.asdict(self.progress))

    def _prompt(self, problem: Problem) -> Prompt:
        text = problem.question
        if problem.chat:
            text = self.tokenizer.render_chat(text, self.settings.task.system_prompt or None)
        tokens = np.array(self.tokenizer.encode(text), np.int32)
        if len(tokens) > self.settings.rollout.max_prompt_tokens:
            raise InputError(
                f"rollout.max_prompt_tokens={self.settings.rollout.max_prompt_tokens}: the prompt "
                f"{problem.question[:40]!r}... has {len(tokens)} tokens; raise it to at least that"
            )
        return Prompt(problem, tokens, prompt_id(tokens))

    def _request(self, prompt: Prompt, sample: int, word: int, group: int, expected: float = 0.0) -> Request:
        budget = self.settings.rollout.max_new_tokens
        return Request(prompt.tokens, prompt.id, sample, word, group, budget, expected)

    def _describe(self, flight: Flight, group: int) -> str:
        """What an error calls a prompt."""
        prompts = next((w.prompts for w in self.under_way if w.flight is flight), self.eval_prompts)
        return f"{prompts[group].problem.question[:60]!r}"

    def _noise_word(self, step: int, epoch: int, sample: int) -> int:
        if self.settings.rollout.noise == "coupled":
            return noise.coupled_word(epoch, sample, self.settings.noise.refresh_epochs)
        return noise.fresh_word(step)

    def _history(self, prompts: list[Prompt]) -> HistoryBlock:
        """Always of the same shape, so that the decoder is compiled for one."""
        s = self.settings
        responses = s.history.depth * s.rollout.samples_per_prompt
        tokens = [p.tokens for p in prompts]
        return self.history.query(tokens, len(tokens), responses, s.rollout.max_new_tokens, s.draft.vote_weight)


class _GradientStream:
    """Gradients of a step's groups, accumulated on the learner's own devices while other groups are decoded.

    Groups are taken in the order in which they were finished, so that a repeated run adds them up alike.
    """

    def __init__(self, trainer: Trainer, step: int, sources: list[StepRollouts | None]):
        self.trainer, self.step = trainer, step
        self.sources = [s for s in sources if s is not None]
        self.taken = {id(s): set() for s in self.sources}
        self.rows: list[Batch] = []  # of finished groups, less than a micro-batch
        self.count = 0
        self.sums: Accumulated | None = None

    def flow(self, wait: bool = False) -> None:
        """Takes the groups that are graded; with `wait`, all that belong to the step."""
        for source in self.sources:
            belong = source.flight.deferred if source.flight.step < self.step else None
            for group, (numbers, rewards) in source.grades.items():
                if group in self.taken[id(source)] or (belong is not None and group not in belong):
                    continue
                if not wait and not rewards.done():
                    break
                source.reward_N[numbers] = rewards.result()
                self.taken[id(source)].add(group)
                self._add(self.trainer.batch(graded(source, [group]), self.step))

    def finish(self, rows: int) -> Accumulated:
        """The sums over the whole batch of so many rows."""
        self.flow(wait=True)
        if self.rows:
            self._accumulate(jax.tree.map(lambda *x: np.concatenate(x), *self.rows))
        if self.count != rows:
            raise RuntimeError(f"learner: {self.count} rows were accumulated of a batch of {rows}")
        return self.sums

    def _add(self, batch: Batch) -> None:
        self.rows.append(batch)
        rows, size = jax.tree.map(lambda *x: np.concatenate(x), *self.rows), self.trainer.learner.micro_rows
        while len(rows.valid) >= size:
            self._accumulate(jax.tree.map(lambda x: x[:size], rows))
            rows = jax.tree.map(lambda x: x[size:], rows)
        self.rows = [rows] if len(rows.valid) else []

    def _accumulate(self, rows: Batch) -> None:
        learner, reference = self.trainer.learner, self.trainer.reference
        log_prob = None if reference is None else learner.score(reference, rows)
        self.sums = learner.accumulate(self.trainer.state, self.sums, rows, log_prob)
        self.count += len(rows.valid)


def _read_costs(name: str, path) -> CostTable:
    """The cost table of a file. Raises InputError, with the field's name, where it holds none."""
    try:
        return CostTable.from_json(read_json(pathlib.Path(path)))
    except (InputError, OSError) as e:
        raise InputError(f"{name}={path}: {one_line(e)}") from e


def _eval_text(metrics: dict) -> str:
    return (
        f"held-out accuracy {metrics['eval/accuracy_greedy']:.3f} greedy, "
        f"{metrics['eval/accuracy_sampled']:.3f} sampled"
    )


def _step_line(metrics: dict, steps: int, left: float) -> str:
    m = metrics
    phases = ", ".join(f"{name} {m[f'seconds/{name}']:.1f}" for name in ("rollout", "update"))
    parts = [
        f"step {m['step']}/{steps}",
        f"epoch {m['epoch']:.2f}",
        f"reward {m['reward/mean']:.3f}",
        f"length {m['response/length_mean']:.1f}",
        f"tokens/forward {m['rollout/tokens_per_row_forward']:.2f}",
        f"acceptance {m['rollout/acceptance']:.2f}",
        f"{phases}, all {m['seconds/step']:.1f} s",
        f"ETA {duration(left)}",
    ]
    if "eval/accuracy_greedy" in m:
        parts.append(_eval_text(m))
    return " | ".join(parts)


def train(config: ml_collections.ConfigDict, workdir: str, devices=None) -> dict:
    """Runs an experiment to its end, or from its last checkpoint, and says how it went.

    Raises:
      InputError: what was asked for is impossible.
      RunError: a device or a grader failed; says from which step the run can go on.
    """
    console = Console() if distributed.is_primary() else Console(io.StringIO())
    trainer = Trainer(config, workdir, console, devices)
    try:
        result = trainer.run()
    except RunError as e:
        trainer.checkpoints.wait()
        saved = trainer.checkpoints.latest
        goes_on = f"the same command with --workdir={workdir} goes on after step {saved}"
        raise RunError(f"{e}; {goes_on if saved else 'no step was saved yet'}") from e
    finally:
        trainer.close()
    if "compared_tokens" in result:
        console.line(f"identical: {result['identical_tokens']}/{result['compared_tokens']} tokens")
        if result["drafted_tokens"] == 0:
            console.line("(no draft was accepted: there was no history yet, or drafts did not pay)")
        console.line(
            f"rollout speed-up: {result['rollout_speedup']:.2f}x ({result['tokens_per_s']:.0f} against "
            f"{result['plain_tokens_per_s']:.0f} tokens/s without drafts; "
            f"{result['tokens_per_row_forward']:.2f} tokens per row-forward)"
        )
    console.line(
        f"result: held-out accuracy {result['eval_accuracy_start']:.3f} -> {result['eval_accuracy_end']:.3f} greedy, "
        f"{result['eval_sampled_accuracy_start']:.3f} -> {result['eval_sampled_accuracy_end']:.3f} sampled, "
        f"{result['steps']} steps in {duration(result['seconds'])}"
    )
    console.line(f"workdir: {result['workdir']}")
    return result
