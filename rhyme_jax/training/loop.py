"""The single-controller loop. One step:

1. *plan*: the next batch of prompts, laid out over the rollout slices by the length that history predicts for them
   (`tasks.stream`, `history.lengths`, `histopipe.plan`);
2. *rollout*: a group of responses to each prompt, drafted from its history (`training.sampling`, `histopipe.dispatch`,
   `histospec`); groups are graded as they are finished (`tasks.graders`), and where the learner has devices of its own
   it learns from them while others are still decoded (`training.gradients`);
   with `grpo.sampling_rounds` more prompts are rolled out until enough groups can be learned from (DAPO's dynamic
   sampling);
3. *update*: advantages within each group (`grpo.advantages`), the sharded learner (`grpo.learner`);
4. *record*: history, lengths, metrics, samples, timeline, and every few steps evaluation and a checkpoint.

With `pipeline.mode=cross_step` the rollouts of the next step begin before this one's are finished; nothing is under
way when a run evaluates or saves, so that a checkpoint holds no half-made rollout.

A run starts from the first of these that exists: (1) the newest checkpoint of its own workdir; (2) `init.weights`.
"""

import contextlib
import dataclasses
import datetime
import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import ml_collections
import numpy as np

from rhyme_jax.errors import InputError, RunError
from rhyme_jax.grpo.advantages import overlong_penalty
from rhyme_jax.grpo.learner import Batch, Learner, LearnerState
from rhyme_jax.histopipe import timeline
from rhyme_jax.histopipe.dispatch import Flight, Span
from rhyme_jax.history.lengths import Forecast, LengthPredictor, forecast_metrics
from rhyme_jax.history.store import HistoryStore
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import CostTable, Tally
from rhyme_jax.histospec.drafts import HistoryBlock
from rhyme_jax.histospec.rollouts import Request, Rollouts
from rhyme_jax.histospec.telemetry import EpochCounts, draft_metrics, predicted
from rhyme_jax.models.export import check_model_files, keep_model_files
from rhyme_jax.models.load import Model, open_model
from rhyme_jax.tasks.graders import Graders
from rhyme_jax.tasks.problems import Problem, Split, load_mixture, load_problems
from rhyme_jax.tasks.stream import MixtureStream, PromptStream
from rhyme_jax.training import distributed
from rhyme_jax.training.batches import (
    Graded,
    Prompt,
    StepRollouts,
    graded,
    joined,
    make_requests,
    of_informative_groups,
)
from rhyme_jax.training.checkpoints import Checkpoints
from rhyme_jax.training.console import Console, Stopwatch, duration
from rhyme_jax.training.gradients import GradientStream, rows_of_updates, update_policy
from rhyme_jax.training.sampling import Sampler, read_costs, slices_of
from rhyme_jax.training.settings import ROUND_BITS, Settings, Task
from rhyme_jax.training.workdir import Workdir, read_metrics


@dataclasses.dataclass
class Progress:
    """What the loop carries from step to step beside arrays; saved with each checkpoint, never derived."""

    steps: int = 0  # done
    stream: dict = dataclasses.field(default_factory=dict)  # the position in the data, of each task
    seconds: float = 0.0  # of training, over all starts
    evicted_prompts: int = 0
    first_eval: dict = dataclasses.field(default_factory=dict)  # accuracies of the initial weights
    last_eval: dict = dataclasses.field(default_factory=dict)  # the newest, with its `step`
    comparison: dict = dataclasses.field(default_factory=dict)  # of the last step with plain decoding
    costs: dict = dataclasses.field(default_factory=dict)  # the cost table: a resumed run chooses K alike
    acceptance: dict = dataclasses.field(default_factory=dict)  # this and the next two: `Sampler.state`
    mix: dict = dataclasses.field(default_factory=dict)
    siblings_share: float = 0.0
    epoch_counts: dict = dataclasses.field(default_factory=lambda: dataclasses.asdict(EpochCounts()))


class Trainer:
    """Everything a run holds. Construction checks the input and loads the weights; `run` does the work."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: str, console: Console, devices=None):
        self.settings = s = Settings.from_config(config)
        self.console = console
        slices = slices_of(s, devices)
        loaded_tasks, self.stream = self._load_tasks()
        self.history = HistoryStore(s.history.depth, s.history.max_tokens)
        self.lengths = LengthPredictor(first=s.rollout.max_new_tokens / 2)

        loaded = open_model(s.init.weights, s.model.dtype, s.model.param_dtype)
        self.model = dataclasses.replace(loaded.config, head_dtype=s.model.head_dtype)
        self.tokenizer = loaded.tokenizer
        self.train_prompts, self.eval_prompts = (  # one task after the other
            [
                Prompt.of(p, self.tokenizer, task.system_prompt, task.today, s.rollout.max_prompt_tokens)
                for task, problems in loaded_tasks
                for p in problems[part]
            ]
            for part in (0, 1)
        )
        rollout, optimizer = s.rollout, s.optimizer.config(s.total_updates)
        loss, self.advantages = (make(rollout.max_new_tokens) for make in (s.grpo.loss, s.grpo.advantages))
        rows = rollout.rows // s.grpo.minibatches
        learned = dataclasses.replace(self.model, lora=s.lora.config())
        self.learner = Learner(learned, loss, optimizer, slices.learner, rollout.temperature, rows)
        for p in [*self.train_prompts, *self.eval_prompts]:
            if p.tokens.max() >= self.model.vocab_size:  # special tokens may lie beyond the embedding's rows
                raise InputError(
                    f"init.weights={loaded.source}: the prompt {p.problem.question[:40]!r}... has token "
                    f"{p.tokens.max()}; the embedding has {self.model.vocab_size} rows"
                )
        longest = max(len(p.tokens) for p in [*self.train_prompts, *self.eval_prompts])
        if longest + s.rollout.max_new_tokens > self.model.max_positions:
            raise InputError(
                f"rollout.max_new_tokens={s.rollout.max_new_tokens}: with a prompt of {longest} tokens it exceeds "
                f"the model's {self.model.max_positions} positions"
            )
        self.sampler = Sampler(s, slices, self.model, self.tokenizer.eos_ids, longest, say=console.line)
        self.under_way: list[StepRollouts] = []  # not learned from, or not all of it: the oldest first

        costs = None if s.draft.costs == "measured" else read_costs("draft.costs", s.draft.costs)

        # Last, so that refused input leaves nothing behind.
        self.workdir = Workdir(workdir, writes=distributed.is_primary())
        if self.workdir.writes:
            check_model_files(loaded, self.workdir.model)
        self.workdir.prepare(config)
        try:
            if self.workdir.writes:
                keep_model_files(loaded, self.workdir.model)
            self._open(loaded, costs)
        except BaseException:
            self.workdir.abandon()
            raise

    def _load_tasks(self) -> tuple[list[tuple[Task, Split]], PromptStream | MixtureStream]:
        """The run's tasks with their problems, and the order of the train problems."""
        s = self.settings
        if not s.tasks:
            problems = load_problems(s.task, say=self.console.line, sandbox=s.sandbox.sandbox())
            return [(s.task, problems)], PromptStream(len(problems[0]), s.rollout.prompts_per_step, s.seed)
        loaded = load_mixture(s.tasks, self.console.line, s.sandbox.sandbox())
        sizes = {label: len(train) for label, (train, _) in loaded.items()}
        weights = {label: task.weight for label, task in s.tasks.items()}
        stream = MixtureStream(sizes, weights, s.rollout.prompts_per_step, s.seed)
        return [(s.tasks[label], problems) for label, problems in loaded.items()], stream

    def _open(self, initial: Model, costs: CostTable | None) -> None:
        """Takes up the run where its workdir has it."""
        s = self.settings
        distributed.check_shared("--workdir", self.workdir.config)
        self.checkpoints = Checkpoints(self.workdir.checkpoints, s.checkpoint.keep)
        self.progress = Progress()
        self.state = self._start(initial)
        if self.progress.costs:
            costs = CostTable.from_json(self.progress.costs)
        elif costs is None and distributed.from_primary(self.workdir.cost_table.exists()):
            costs = read_costs("--workdir", self.workdir.cost_table)
        self.costs_known = costs is not None
        if costs is not None:
            self.sampler.share_costs(costs)
        self.reference = None
        if s.grpo.kl_coef > 0 and self.learner.model.lora is not None:
            self.reference = self.learner.base(self.state)  # shared: what stays as it was
        elif s.grpo.kl_coef > 0:
            self.reference = initial.load(self.learner.base_shardings)
        self.metrics = self.workdir.step_file(self.workdir.metrics, self.progress.steps)
        self.timeline = self.workdir.step_file(self.workdir.timeline, self.progress.steps)
        self.started = time.monotonic() - self.progress.seconds
        self.graders = Graders(s.grading.workers, s.grading.timeout)

    def run(self) -> dict:
        """Trains to the last step; returns what it writes to result.json."""
        start, first = time.monotonic(), self.progress.steps
        self.started = start - self.progress.seconds
        if first < self.settings.steps:
            self.workdir.remove_result()  # of a run that is being prolonged
        if first == 0:
            if not self.costs_known:
                self.measure_costs()
            self.workdir.write_json(self.workdir.cost_table, self.sampler.engine.costs.to_json())
            self._first_evaluation()
        while self.progress.steps < self.settings.steps:
            metrics = self.step()
            self.progress.seconds = self._seconds()
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
        try:
            self.graders.close()
            self.metrics.close()
            self.timeline.close()
            self.checkpoints.close()
        finally:
            self.workdir.release()

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> dict:
        """One training step; returns its metrics."""
        s, watch, step = self.settings, Stopwatch(), self.progress.steps
        with watch("weights"):
            self._weights()
        with watch("plan"):
            current = self._of_step(step)
            begins = current is None
            if begins:
                current = self._begin(step)
        before = self._of_step(step - 1)
        gradients = None
        if not self.sampler.slices.colocated:
            sources = [w for w in (before, current) if w is not None]
            gradients = GradientStream(self.learner, self.state, self.reference, self.batch, step, sources)
        rollouts = []
        with watch("rollout"), self._interval(rollouts):
            if begins:
                self.sampler.sampled.launch(current.flight)
            self._roll_out(current, before, gradients)
        if step == s.steps - 1:
            with watch("compare"):
                self.progress.comparison = self.sampler.compare_with_plain(current.flight)
        with watch("grade"):
            batch, spans = self._settle(current, before, watch.seconds["rollout"])
        rounds = [current]
        while len(rounds) < s.grpo.rounds and self._informative(batch).sum() < s.rollout.prompts_per_step:
            with watch("plan"):
                rounds.append(self._begin(step, len(rounds)))
            with watch("rollout"), self._interval(rollouts):
                self.sampler.sampled.launch(rounds[-1].flight)
                self._roll_out(rounds[-1], None, None)
            with watch("grade"):
                more, more_spans = self._settle(rounds[-1], None, 0.0)
                spans += more_spans
                batch = self._joined([batch, more], spans, watch.seconds["rollout"])
        with watch("update"):
            learned = self._update(batch, gradients)
        with watch("record"):
            self._record(batch, spans, rounds)
        metrics = self._metrics(batch, rounds, learned)
        metrics |= timeline.bubble_ratios(spans, self.sampler.slices.total, rollouts)
        if self.progress.steps % s.eval.every == 0 or self.progress.steps == s.steps:
            with watch("eval"):
                metrics |= self._evaluate()
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in watch.seconds.items()}
        metrics["seconds/step"] = sum(watch.seconds.values())
        decoded = sum(c.tokens for c in batch.rollouts.chunks)
        metrics["seconds/rollout_tokens_per_s"] = decoded / watch.seconds["rollout"]
        self.metrics.write(metrics)
        return metrics

    def _seconds(self) -> float:
        """Of training so far, over all starts of the run."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def _interval(self, intervals: list[tuple[float, float]]) -> Iterator[None]:
        """Adds when, in seconds of training, the block began and ended."""
        began = self._seconds()
        yield
        intervals.append((began, self._seconds()))

    def _weights(self) -> None:
        """Has the slices hold the newest policy."""
        self.sampler.hold(self.progress.steps, lambda: self.learner.rollout_params(self.state))

    # --- plan ---------------------------------------------------------------------------------------------------

    def _of_step(self, step: int) -> StepRollouts | None:
        return next((w for w in self.under_way if w.flight.step == step), None)

    def plan(self, step: int, number: int = 0) -> tuple[list[Prompt], list[Request], HistoryBlock, Forecast]:
        """The next batch of prompts, for a step and a round of sampling within it: with the rollouts to make, what
        these may draft from, and how long they are expected to be.
        """
        s = self.settings.rollout
        indices_G, visits_G = self.stream.visit()
        prompts = [self.train_prompts[i] for i in indices_G]
        forecast = self.lengths.predict([p.id for p in prompts])
        expected_G = np.where(forecast.seen_G, forecast.mean_G, 0.0)
        words_G = [
            [self._noise_word(step, number, visit, sample) for sample in range(s.samples_per_prompt)]
            for visit in visits_G.tolist()
        ]
        requests = make_requests(prompts, words_G, s.max_new_tokens, expected_G)
        return prompts, requests, self._history(prompts), forecast

    def _noise_word(self, step: int, number: int, epoch: int, sample: int) -> int:
        if self.settings.rollout.noise == "coupled":
            return noise.coupled_word(epoch, sample, self.settings.noise.refresh_epochs)
        # A prompt may come again in a later round, and must not meet the same noise.
        return noise.fresh_word(step + (number << ROUND_BITS))

    def _history(self, prompts: list[Prompt]) -> HistoryBlock:
        """Always of the same shape, so that the decoder is compiled for one."""
        s = self.settings
        responses = s.history.depth * s.rollout.samples_per_prompt
        tokens = [p.tokens for p in prompts]
        return self.history.query(tokens, len(tokens), responses, s.rollout.max_new_tokens, s.draft.vote_weight)

    def _begin(self, step: int, number: int = 0) -> StepRollouts:
        """Plans a step, or one of its later rounds of sampling; its rollouts are then under way."""
        epoch, visit = self.stream.progress, self.stream.epoch
        prompts, requests, history, forecast = self.plan(step, number)
        flight = self.sampler.plan(step, requests, history, forecast, _namer(prompts), self._goes_on(step), number)
        begun = StepRollouts(prompts, flight, epoch, ends_epoch=self.stream.epoch > visit)
        self.under_way.append(begun)
        return begun

    def _goes_on(self, step: int) -> bool:
        """Whether the next step may begin before this one is done: nothing may be under way when the run evaluates,
        saves, or compares its last step with plain decoding.
        """
        s, done = self.settings, step + 1
        due = done % s.eval.every == 0 or done % s.checkpoint.every == 0
        return s.pipeline.runs_ahead and not due and done < s.steps - 1

    # --- rollout and grades -------------------------------------------------------------------------------------

    def _roll_out(self, current: StepRollouts, before: StepRollouts | None, gradients: GradientStream | None) -> None:
        """Until all that the step learns from is finished; has groups graded, and learned from, on the way."""
        step = current.flight.step

        def each(flight: Flight, numbers: list[int]) -> None:
            next(w for w in self.under_way if w.flight is flight).grade_finished(numbers, self.grade)
            if gradients is not None:
                gradients.flow()

        ahead = (lambda: self._begin(step + 1).flight) if self._goes_on(step) else None
        self.sampler.roll_out(current.flight, before and before.flight, ahead, each)

    def grade(self, problem: Problem, responses: list[np.ndarray]) -> Future:
        """Rewards of responses (token ids) to one prompt: a future of a list of floats, NaN where a grade failed."""
        return self.graders.submit(problem, [self.tokenizer.decode(r) for r in responses])

    def _settle(self, current: StepRollouts, before: StepRollouts | None, seconds: float) -> tuple[Graded, list[Span]]:
        """What the step learns from, once all of it is graded and in every process; and what the slices did in these
        seconds.
        """
        spans = self._collect(current)
        parts = [graded(current, set(current.flight.group_N) - current.flight.deferred)]
        if before is not None:
            spans += self._collect(before)
            parts.insert(0, graded(before, before.flight.deferred))
        return self._joined(parts, spans, seconds), spans

    def _joined(self, parts: list[Graded], spans: list[Span], seconds: float) -> Graded:
        config = self.sampler.engine.config
        return joined(parts, spans, Tally.zeros(config.depths) if config.drafts else None, seconds)

    def _informative(self, graded: Graded) -> np.ndarray:
        """bool [G]: groups that can be learned from."""
        return graded.informative(self.settings.rollout.samples_per_prompt, self.advantages)

    def _collect(self, step: StepRollouts) -> list[Span]:
        step.await_grades()
        return self.sampler.collect(step.flight, self.started, step.reward_N)

    # --- update and record --------------------------------------------------------------------------------------

    def _update(self, graded: Graded, gradients: GradientStream | None) -> dict[str, float]:
        s, step = self.settings, self.progress.steps
        batch, informative_G = self.batch(graded, step), self._informative(graded)
        if s.grpo.rounds > 1:
            batch, groups = of_informative_groups(batch, informative_G, s.rollout.prompts_per_step)
            informative_G = informative_G[groups]
        self.state, metrics = update_policy(
            self.learner,
            self.state,
            batch,
            rows_of_updates(len(batch.valid), s.grpo.updates_per_batch, s.grpo.minibatches, (s.seed, step)),
            self.advantages,
            self.reference,
            s.pipeline.runs_ahead,
            gradients,
        )
        distributed.check_same(f"learner/loss of step {step + 1}", metrics["loss"])
        return {
            **metrics,
            "zero_advantage_share": float(1 - informative_G.mean()),
            "masked_samples": int((~batch.valid).sum()),
        }

    def batch(self, graded: Graded, step: int) -> Batch:
        """What the learner gets at a step."""
        return graded.batch(self.settings.rollout.samples_per_prompt, self.advantages, step)

    def _record(self, batch: Graded, spans: list[Span], rounds: list[StepRollouts]) -> None:
        """Everything that a step leaves behind, but for its metrics."""
        current, samples = rounds[0], self.settings.rollout.samples_per_prompt
        step = current.flight.step
        visits = list(batch.visits(samples))
        for prompt, responses in visits:
            self.history.add(prompt.tokens, responses)
        self.lengths.observe([prompt.id for prompt, _ in visits], batch.length_GC(samples))
        self.sampler.learn(spans, batch.rollouts)
        self.under_way = [w for w in self.under_way if w.flight.step > step or (w.flight.deferred and w is current)]
        self.progress.steps = step + 1
        self.progress.stream = self.stream.position()
        self.workdir.write_samples(step + 1, batch.records(step, self.tokenizer.decode))
        plans = [timeline.plan_record(step, r.flight.round, r.flight.plan) for r in rounds]
        self.timeline.write(*plans, *timeline.span_records(spans))

    def _metrics(self, batch: Graded, rounds: list[StepRollouts], learned: dict[str, float]) -> dict:
        flight, rollouts = rounds[0].flight, batch.rollouts
        samples = self.settings.rollout.samples_per_prompt
        staleness_N = flight.step - batch.version_N
        return {
            "step": flight.step + 1,
            "epoch": rounds[0].epoch,
            **batch.metrics(samples),
            **self._task_metrics(batch),
            "reward/overlong_penalty": float(overlong_penalty(self.advantages, rollouts.response_length_N).mean()),
            "rollout/rounds": len(rounds),
            "rollout/uninformative_groups": int((~self._informative(batch)).sum()),
            **draft_metrics(rollouts),
            **predicted(rollouts.chunks, self.sampler.engine.costs),
            **self._epoch_metrics(rollouts, any(r.ends_epoch for r in rounds)),
            **forecast_metrics(batch.forecast(), batch.length_GC(samples)),
            "pipeline/migrations": sum(r.flight.migrations for r in rounds),
            "pipeline/deferred": len(flight.deferred),
            **{f"learner/{k}": v for k, v in learned.items()},
            "learner/failed_grades": int(np.isnan(batch.rewards_N).sum()),
            "learner/staleness": float(staleness_N.mean()),
            "learner/staleness_max": int(staleness_N.max()),
            "history/prompts": len(self.history),
            "history/tokens": self.history.tokens,
            "history/evicted_prompts": self.history.evicted_prompts,
        }

    def _task_metrics(self, batch: Graded) -> dict:
        """By task, of a mixture."""
        if not isinstance(self.stream, MixtureStream):
            return {}
        epochs = {f"task/{label}/epoch": epoch for label, epoch in self.stream.epochs().items()}
        return batch.task_metrics() | epochs

    def _epoch_metrics(self, rollouts: Rollouts, ends: bool) -> dict:
        """Sums over the epoch, at the step that ends it."""
        counts = EpochCounts(**self.progress.epoch_counts)
        counts.add(rollouts)
        self.progress.epoch_counts = dataclasses.asdict(EpochCounts() if ends else counts)
        return counts.metrics() if ends else {}

    # --- evaluation and results ---------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy, greedy and with one sample at the training temperature."""
        self._weights()
        requests, metrics = self._eval_requests(), {}
        for name, dispatcher in (("greedy", self.sampler.greedy), ("sampled", self.sampler.sampled)):
            grades = []

            def each(flight: Flight, numbers: list[int], grades=grades) -> None:
                for n in numbers:
                    response = flight.job.rows.response(n)
                    grades.append((n, len(response), self.grade(self.eval_prompts[n].problem, [response])))

            name_of = _namer(self.eval_prompts)
            self.sampler.roll_out_apart(dispatcher, self.progress.steps, requests, name_of, each)
            together = distributed.gather([(n, length, *rewards.result()) for n, length, rewards in grades])
            number_N, length_N, reward_N = np.array([r for results in together for r in results]).T
            metrics[f"eval/accuracy_{name}"] = _mean_grade(reward_N)
            metrics[f"eval/length_{name}"] = float(length_N.mean())
            metrics[f"eval/failed_grades_{name}"] = int(np.isnan(reward_N).sum())
            tasks_N = np.array([self.eval_prompts[int(n)].problem.task for n in number_N])
            for label in self.settings.tasks:
                metrics[f"task/{label}/eval_accuracy_{name}"] = _mean_grade(reward_N[tasks_N == label])
        self.progress.last_eval = {"step": self.progress.steps, **metrics}
        return metrics

    def _eval_requests(self) -> list[Request]:
        word = noise.fresh_word(self.progress.steps)
        return make_requests(self.eval_prompts, [[word]] * len(self.eval_prompts), self.settings.rollout.max_new_tokens)

    def measure_costs(self) -> None:
        """`Sampler.measure_costs`, on requests like those of the run."""
        s = self.settings.rollout
        # Of all tasks alike.
        prompts = self.train_prompts[:: len(self.train_prompts) // s.prompts_per_step][: s.prompts_per_step]
        requests = make_requests(prompts, [[0] * s.samples_per_prompt] * len(prompts), s.max_new_tokens)
        self._weights()
        self.sampler.measure_costs(requests, self._history(prompts), self._eval_requests())

    def _first_evaluation(self) -> None:
        watch = Stopwatch()
        self.console.line("step 0: evaluating the initial weights (the first calls compile)")
        with watch("eval"):
            self.progress.first_eval = self._evaluate()
        metrics = {"step": 0, "epoch": 0.0, **self.progress.first_eval, "seconds/eval": watch.seconds["eval"]}
        self.metrics.write(metrics)
        self.console.line(f"step 0/{self.settings.steps} | {_eval_text(metrics)} | {duration(watch.seconds['eval'])}")

    def _result(self) -> dict:
        first, evaluation = self.progress.first_eval, self.progress.last_eval
        of_tasks = {
            label: {
                f"eval_accuracy_{when}": values[f"task/{label}/eval_accuracy_greedy"]
                for when, values in (("start", first), ("end", evaluation))
            }
            for label in self.settings.tasks
        }
        return {
            "steps": self.progress.steps,
            "eval_accuracy_start": first["eval/accuracy_greedy"],
            "eval_accuracy_end": evaluation["eval/accuracy_greedy"],
            "eval_sampled_accuracy_start": first["eval/accuracy_sampled"],
            "eval_sampled_accuracy_end": evaluation["eval/accuracy_sampled"],
            **({"tasks": of_tasks} if of_tasks else {}),
            **self.progress.comparison,
            "seconds": self.progress.seconds,
            "workdir": str(self.workdir.path),
        }

    # --- start and checkpoints ----------------------------------------------------------------------------------

    def _start(self, initial: Model) -> LearnerState:
        step = self.checkpoints.latest
        if step is None:
            if read_metrics(self.workdir.metrics):
                self.console.line(f"{self.workdir.path} holds metrics but no checkpoint: starting over")
            return self.learner.init(initial.load(self.learner.base_shardings), self.settings.seed, own=True)
        state, arrays, loop = self.checkpoints.restore(step, self.learner.abstract_state())
        self.history.load_arrays(arrays["history"])
        self.lengths.load_arrays(arrays["lengths"])
        self.progress = Progress(**loop)
        self.sampler.load(self.progress.acceptance, self.progress.mix, self.progress.siblings_share)
        self.history.evicted_prompts = self.progress.evicted_prompts
        self.stream.seek(self.progress.stream)
        self.console.line(f"resuming {self.workdir.path} after step {step}")
        return state

    def _checkpoint_if_due(self) -> None:
        done = self.progress.steps
        if done % self.settings.checkpoint.every == 0 or done == self.settings.steps:
            self.progress = dataclasses.replace(
                self.progress,
                evicted_prompts=self.history.evicted_prompts,
                costs=self.sampler.engine.costs.to_json(),
                **self.sampler.state(),
            )
            arrays = {"history": self.history.to_arrays(), "lengths": self.lengths.to_arrays()}
            self.checkpoints.save(done, self.state, arrays, dataclasses.asdict(self.progress))


def _namer(prompts: list[Prompt]) -> Callable[[int], str]:
    """What an error calls each of them."""
    return lambda group: f"{prompts[group].problem.question[:60]!r}"


def _mean_grade(reward_N: np.ndarray) -> float:
    """Of responses that could be graded; 0 where none could."""
    graded_N = reward_N[~np.isnan(reward_N)]
    return float(graded_N.mean()) if graded_N.size else 0.0


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


def experiment(name: str) -> Callable[[ml_collections.ConfigDict, str, str | None], None]:
    """What an entry point of that name does with its config, variant and workdir; without one it makes a new one."""

    def run(config: ml_collections.ConfigDict, variant: str, workdir: str | None) -> None:
        if workdir is None:
            workdir = f"runs/{name}-{variant}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"
        # One name, though the clocks of several processes differ.
        train(config, distributed.from_primary(workdir))

    return run


def train(config: ml_collections.ConfigDict, workdir: str, devices=None) -> dict:
    """Runs an experiment to its end, or from its last checkpoint, and says how it went.

    Raises:
      InputError: what was asked for is impossible.
      RunError: a device or a grader failed, or the loss is not finite; says from which step the run can go on.
    """
    console = Console() if distributed.is_primary() else Console(io.StringIO())
    trainer = Trainer(config, workdir, console, devices)
    try:
        result = trainer.run()
    except (RunError, FloatingPointError) as e:
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
