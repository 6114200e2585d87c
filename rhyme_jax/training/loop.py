"""The single-controller loop. One step:

1. *plan*: the next batch of prompts, laid out over the rollout slices (`tasks.stream`, `histopipe.plan`);
2. *rollout*: a group of responses to each prompt, drafted from its history (`histospec.engine`);
3. *grade*: rewards of the responses (`tasks`), advantages within each group (`grpo.advantages`);
4. *update*: the sharded learner (`grpo.learner`);
5. *record*: history, metrics, samples, and every few steps evaluation and a checkpoint.

A run starts from the first of these that exists: (1) the newest checkpoint of its own workdir; (2) `init.weights`.
"""

import dataclasses
import math
import pathlib
import time

import ml_collections
import numpy as np

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.files import read_json, write_json
from rhyme_jax.grpo.advantages import group_advantages
from rhyme_jax.grpo.learner import Batch, Learner, LearnerState
from rhyme_jax.histopipe.plan import equal_split
from rhyme_jax.history.store import HistoryStore, Response, prompt_id
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import CostTable
from rhyme_jax.histospec.drafts import HistoryBlock
from rhyme_jax.histospec.engine import Request, RolloutEngine, Rollouts
from rhyme_jax.histospec.sampling import GREEDY
from rhyme_jax.histospec.telemetry import EpochCounts, draft_metrics, predicted
from rhyme_jax.models.load import load_model
from rhyme_jax.models.params import make_mesh
from rhyme_jax.tasks.problems import Problem, load_problems
from rhyme_jax.tasks.stream import PromptStream
from rhyme_jax.training.checkpoints import Checkpoints
from rhyme_jax.training.console import Console, Stopwatch, duration
from rhyme_jax.training.settings import Settings
from rhyme_jax.training.workdir import MetricsFile, Workdir, read_metrics

PROGRESS_SECONDS = 20.0  # a rollout that takes longer says how far it is
COMPARISONS = 3  # timed pairs of the closing comparison with plain decoding


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as the model sees it."""

    problem: Problem
    tokens: np.ndarray  # int32
    id: int


@dataclasses.dataclass
class Progress:
    """What the loop carries from step to step beside arrays; saved with each checkpoint, never derived."""

    steps: int = 0  # done
    stream: dict = dataclasses.field(default_factory=lambda: {"epoch": 0, "index": 0})
    seconds: float = 0.0  # of training, over all starts
    evicted_prompts: int = 0
    updates: int = 0  # of the learner: the version of its policy
    first_eval: dict = dataclasses.field(default_factory=dict)  # accuracies of the initial weights
    last_eval: dict = dataclasses.field(default_factory=dict)  # the newest, with its `step`
    comparison: dict = dataclasses.field(default_factory=dict)  # of the last step with plain decoding
    costs: dict = dataclasses.field(default_factory=dict)  # the cost table: a resumed run chooses K alike
    acceptance: dict = dataclasses.field(default_factory=dict)  # what drafts have yielded so far
    epoch_counts: dict = dataclasses.field(default_factory=lambda: dataclasses.asdict(EpochCounts()))


class Trainer:
    """Everything a run holds. Construction checks the input and loads the weights; `run` does the work."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: str, console: Console, devices=None):
        self.settings = s = Settings.from_config(config)
        self.console = console
        self.mesh = mesh = make_mesh(s.mesh.data, s.mesh.fsdp, s.mesh.tensor, devices)
        train, evaluation = load_problems(s.task)
        self.stream = PromptStream(len(train), s.rollout.prompts_per_step, s.seed)
        self.history = HistoryStore(s.history.depth, s.history.max_tokens)

        loaded = load_model(s.init.weights, s.model.dtype, s.model.param_dtype)
        self.model, self.tokenizer = loaded.config, loaded.tokenizer
        self.train_prompts = [self._prompt(p) for p in train]
        self.eval_prompts = [self._prompt(p) for p in evaluation]
        self.learner = Learner(
            self.model, s.grpo.loss(), s.optimizer.config(s.total_updates), mesh, s.rollout.temperature
        )
        self.learner.check_batch_size(s.rollout.rows)
        longest = max(len(p.tokens) for p in [*self.train_prompts, *self.eval_prompts])
        if longest + s.rollout.max_new_tokens > self.model.max_positions:
            raise InputError(
                f"rollout.max_new_tokens={s.rollout.max_new_tokens}: with a prompt of {longest} tokens it exceeds "
                f"the model's {self.model.max_positions} positions"
            )
        eos = self.tokenizer.eos_ids
        self.engine = RolloutEngine(self.model, s.engine(s.rollout.sampling(), eos, prompt_slots=longest), mesh, s.seed)
        self.greedy = RolloutEngine(self.model, s.engine(GREEDY, eos, prompt_slots=longest), mesh, s.seed)

        costs = None if s.draft.costs == "measured" else _read_costs("draft.costs", s.draft.costs)

        # Last, so that refused input leaves nothing behind.
        self.workdir = Workdir(workdir)
        self.workdir.prepare(config)
        self.checkpoints = Checkpoints(self.workdir.checkpoints, s.checkpoint.keep)
        self.progress = Progress()
        self.state = self._start(loaded.params)
        if self.progress.costs:
            costs = CostTable.from_json(self.progress.costs)
        elif costs is None and self.workdir.cost_table.exists():
            costs = _read_costs("--workdir", self.workdir.cost_table)
        self.costs_known = costs is not None
        if costs is not None:
            self.engine.costs = costs
        self.reference = None
        if s.grpo.kl_coef > 0:
            self.reference = self.learner.place_params(loaded.params)
        self.metrics = MetricsFile(self.workdir.metrics, self.progress.steps)

    def run(self) -> dict:
        """Trains to the last step; returns what it writes to result.json."""
        start, first = time.monotonic(), self.progress.steps
        earlier = self.progress.seconds
        if first < self.settings.steps:
            self.workdir.result.unlink(missing_ok=True)  # of a run that is being prolonged
        if first == 0:
            if not self.costs_known:
                self.measure_costs()
            write_json(self.workdir.cost_table, self.engine.costs.to_json())
            self._first_evaluation()
        while self.progress.steps < self.settings.steps:
            metrics = self.step()
            self.progress.seconds = earlier + time.monotonic() - start
            self._checkpoint_if_due()
            done = self.progress.steps - first
            left = (time.monotonic() - start) / done * (self.settings.steps - self.progress.steps)
            self.console.line(_step_line(metrics, self.settings.steps, left))
        self.checkpoints.wait()
        if self.progress.last_eval["step"] != self.progress.steps:  # resumed with fewer steps than were done
            self._evaluate()
        result = self._result()
        write_json(self.workdir.result, result)
        return result

    def close(self) -> None:
        self.metrics.close()
        self.checkpoints.close()
        self.workdir.release()

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> dict:
        """One training step; returns its metrics."""
        s, watch = self.settings, Stopwatch()
        step, epoch, visit = self.progress.steps, self.stream.progress, self.stream.epoch
        with watch("plan"):
            prompts, requests, history = self.plan()
        with watch("weights"):
            weights = self.learner.rollout_params(self.state)
            version = self.progress.updates
        with watch("rollout"):
            rollouts = self._generate(self.engine, weights, requests, history)
        if step == s.steps - 1:
            with watch("compare"):
                self.progress.comparison = self._compare_with_plain(weights, requests, history, rollouts)
        del weights
        with watch("grade"):
            texts, rewards = self.grade([prompts[r.group].problem for r in requests], rollouts)
        staleness = self.progress.updates - version
        with watch("update"):
            learned = self._update(rollouts, rewards)
        with watch("record"):
            self._remember(prompts, requests, rollouts, rewards, version)
            self.progress.steps = step + 1
            self.progress.stream = self.stream.position()
            self._write_samples(prompts, requests, rollouts, texts, rewards, version)
        metrics = {
            "step": step + 1,
            "epoch": epoch,
            **self._rollout_metrics(rollouts, rewards),
            **draft_metrics(rollouts),
            **predicted(rollouts.chunks, self.engine.costs),
            **self._epoch_metrics(rollouts, ends=self.stream.epoch > visit),
            **{f"learner/{k}": v for k, v in learned.items()},
            "learner/staleness": staleness,
            "history/prompts": len(self.history),
            "history/tokens": self.history.tokens,
            "history/evicted_prompts": self.history.evicted_prompts,
        }
        if self.progress.steps % s.eval.every == 0 or self.progress.steps == s.steps:
            with watch("eval"):
                metrics |= self._evaluate()
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in watch.seconds.items()}
        metrics["seconds/step"] = sum(watch.seconds.values())
        metrics["seconds/rollout_tokens_per_s"] = rollouts.generated / watch.seconds["rollout"]
        self.metrics.write(metrics)
        return metrics

    def plan(self) -> tuple[list[Prompt], list[Request], HistoryBlock]:
        """The next batch of prompts, the rollouts to make of them, and what those may draft from."""
        step, visit = self.progress.steps, self.stream.epoch
        prompts = [self.train_prompts[i] for i in self.stream.next()]
        order = [g for groups in equal_split(len(prompts), slices=1).groups_by_slice for g in groups]
        requests = [
            self._request(prompts[g], sample, self._noise_word(step, visit, sample), g)
            for g in order
            for sample in range(self.settings.rollout.samples_per_prompt)
        ]
        return prompts, requests, self._history(prompts)

    def _update(self, rollouts: Rollouts, rewards: np.ndarray) -> dict[str, float]:
        group = self.settings.rollout.samples_per_prompt
        advantage_GC, valid_GC = group_advantages(rewards.reshape(-1, group), self.settings.grpo.normalize_std)
        batch = Batch(
            tokens=rollouts.tokens_NS,
            prompt_length=rollouts.prompt_length_N,
            response_length=rollouts.response_length_N,
            log_prob=rollouts.log_prob_NT,
            advantage=advantage_GC.reshape(-1),
            valid=valid_GC.reshape(-1),
        )
        reference = None
        if self.reference is not None:
            reference = self.learner.reference_log_probs(self.reference, batch)
        learned: dict[str, float] = {}
        for number in range(self.settings.grpo.updates_per_batch):
            self.state, metrics = self.learner.update(self.state, batch, reference)
            self.progress.updates += 1
            # The gap between rollout and learner means something before the batch's first update only.
            learned = metrics if number == 0 else {**metrics, "rollout_gap": learned["rollout_gap"]}
        unequal = (advantage_GC != 0).any(axis=1)
        return {
            **learned,
            "zero_advantage_share": float(1 - unequal.mean()),
            "failed_grades": int((~valid_GC).sum()),
        }

    def _remember(self, prompts, requests, rollouts: Rollouts, rewards, version: int) -> None:
        by_group: dict[int, list[Response]] = {}
        for n, request in enumerate(requests):
            response = Response(
                rollouts.response(n), float(rewards[n]), version, self.progress.steps, request.sample, request.noise
            )
            by_group.setdefault(request.group, []).append(response)
        for group, responses in by_group.items():
            self.history.add(prompts[group].tokens, responses)

    def _generate(self, engine: RolloutEngine, weights, requests, history: HistoryBlock | None = None) -> Rollouts:
        """Rolls out, and says what was compiled and, where it takes long, how far it is."""
        compiled, said = len(engine.compiled), time.monotonic()

        def progress(done: int, rows: int) -> None:
            nonlocal said
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                self.console.line(f"rollout: {done} of {rows} responses done")

        rollouts = engine.generate(weights, requests, history, progress)
        if len(engine.compiled) > compiled:
            self.console.line(f"compiled: {', '.join(engine.compiled[compiled:])}")
        return rollouts

    def grade(self, problems: list[Problem], rollouts: Rollouts) -> tuple[list[str], np.ndarray]:
        """The responses as text, and their rewards: float64, NaN where a grade failed."""
        texts = [self.tokenizer.decode(rollouts.response(n)) for n in range(len(problems))]
        return texts, np.array([p.reward(t) for p, t in zip(problems, texts, strict=True)], np.float64)

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

    def _write_samples(self, prompts, requests, rollouts: Rollouts, texts, rewards, version: int) -> None:
        self.workdir.write_samples(
            self.progress.steps,
            (
                {
                    "prompt": prompts[r.group].problem.question,
                    "sample": r.sample,
                    "completion": texts[n],
                    "reward": None if np.isnan(rewards[n]) else float(rewards[n]),
                    "length": int(rollouts.response_length_N[n]),
                    "accepted": int(rollouts.accepted_N[n]),
                    "ended": bool(rollouts.ended_N[n]),
                    "policy_version": version,
                }
                for n, r in enumerate(requests)
            ),
        )

    # --- evaluation and the closing comparison ------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy, greedy and with one sample at the training temperature."""
        weights = self.learner.rollout_params(self.state)
        requests = self._eval_requests()
        metrics = {}
        for name, engine in (("greedy", self.greedy), ("sampled", self.engine)):
            rollouts = self._generate(engine, weights, requests)
            _, rewards = self.grade([p.problem for p in self.eval_prompts], rollouts)
            metrics[f"eval/accuracy_{name}"] = float(np.nan_to_num(rewards).mean())
            metrics[f"eval/length_{name}"] = float(rollouts.response_length_N.mean())
        self.progress.last_eval = {"step": self.progress.steps, **metrics}
        return metrics

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

        def progress(done: int, shapes: int) -> None:
            self.console.line(f"measured {done} of {shapes} batch shapes, K = {', '.join(map(str, s.draft.buckets))}")

        weights = self.learner.rollout_params(self.state)
        self.engine.prepare(weights, requests, self._history(prompts), progress)
        for engine in (self.greedy, self.engine):  # the shapes of evaluation too, so that no later step compiles
            engine.prepare(weights, self._eval_requests(), None)

    def _first_evaluation(self) -> None:
        watch = Stopwatch()
        self.console.line("step 0: evaluating the initial weights (the first calls compile)")
        with watch("eval"):
            self.progress.first_eval = self._evaluate()
        metrics = {"step": 0, "epoch": 0.0, **self.progress.first_eval, "seconds/eval": watch.seconds["eval"]}
        self.metrics.write(metrics)
        self.console.line(f"step 0/{self.settings.steps} | {_eval_text(metrics)} | {duration(watch.seconds['eval'])}")

    def _compare_with_plain(self, weights, requests, history: HistoryBlock | None, rollouts: Rollouts) -> dict:
        """Repeats the rollouts with K = 1 on the same noise: counts equal tokens and compares speed.

        Timed in alternating pairs after both programs are compiled; the ratio is that of the medians.
        """
        self.console.line("repeating the last step's rollouts without drafts, to compare")
        acceptance = self.engine.acceptance.state()
        plain = self._generate(self.engine, weights, requests)
        identical = compared = 0
        for n in range(len(requests)):
            drafted, undrafted = rollouts.response(n), plain.response(n)
            shorter = min(len(drafted), len(undrafted))
            compared += max(len(drafted), len(undrafted))
            identical += int((drafted[:shorter] == undrafted[:shorter]).sum())
        seconds: dict[str, list[float]] = {"drafted": [], "plain": []}
        for _ in range(COMPARISONS):
            seconds["drafted"].append(self.engine.generate(weights, requests, history).seconds)
            seconds["plain"].append(self.engine.generate(weights, requests).seconds)
        self.engine.acceptance.load(acceptance)  # repeats are no new evidence, for a run that is prolonged
        drafted_s, plain_s = np.median(seconds["drafted"]), np.median(seconds["plain"])
        return {
            "identical_tokens": identical,
            "compared_tokens": compared,
            "drafted_tokens": int(rollouts.accepted_N.sum()),
            "tokens_per_row_forward": rollouts.tokens_per_row_forward,
            "rollout_speedup": float(plain_s / drafted_s),
            "tokens_per_s": float(rollouts.generated / drafted_s),
            "plain_tokens_per_s": float(rollouts.generated / plain_s),
        }

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
        state, history, loop = self.checkpoints.restore(step, self.learner.abstract_state())
        self.history.load_arrays(history)
        self.progress = Progress(**loop)
        self.engine.acceptance.load(self.progress.acceptance)
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
            self.checkpoints.save(done, self.state, self.history.to_arrays(), dataclasses.asdict(self.progress))

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

    def _request(self, prompt: Prompt, sample: int, word: int, group: int) -> Request:
        expected = self.history.mean_length(prompt.tokens) or 0.0
        budget = self.settings.rollout.max_new_tokens
        return Request(prompt.tokens, prompt.id, sample, word, group, budget, expected)

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
    """Runs an experiment to its end, or from its last checkpoint, and says how it went."""
    console = Console()
    trainer = Trainer(config, workdir, console, devices)
    try:
        result = trainer.run()
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
