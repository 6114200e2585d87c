"""What a step rolls out and learns from, on the host: prompts, rollouts under way, and graded groups.

Suffix letters: N rollouts, G groups of C samples, S positions, T response positions. Rollouts of a group are adjacent.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.advantages import AdvantageConfig, group_advantages, informative_groups, overlong_penalty
from rhyme_jax.grpo.learner import Batch
from rhyme_jax.histopipe.dispatch import Flight, Span
from rhyme_jax.history.lengths import Forecast
from rhyme_jax.history.store import Response, prompt_id
from rhyme_jax.histospec.budget import Tally
from rhyme_jax.histospec.rollouts import Request, Rollouts
from rhyme_jax.models.tokenizer import Tokenizer
from rhyme_jax.tasks.problems import Problem


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as the model sees it."""

    problem: Problem
    tokens: np.ndarray  # int32
    id: int

    @classmethod
    def of(
        cls, problem: Problem, tokenizer: Tokenizer, system_prompt: str, today: datetime.date, max_tokens: int
    ) -> "Prompt":
        """The prompt of a problem.

        Args:
          system_prompt: "" for none.
          today: what chat templates take for it.

        Raises:
          InputError: it has more than max_tokens tokens, or the tokenizer does not know all of its characters.
        """
        if problem.chat:
            tokens = tokenizer.encode_chat(problem.question, system_prompt or None, today)
        else:
            tokens = tokenizer.encode_prompt(problem.question)
        if unknown := _unknown(tokenizer, problem.question, tokens):
            raise InputError(
                f"init.weights: its tokenizer does not know {unknown!r}, as in {problem.question[:40]!r} of the task "
                f"{problem.task!r}; that task needs a model with a larger alphabet"
            )
        tokens = np.array(tokens, np.int32)
        if len(tokens) > max_tokens:
            raise InputError(
                f"rollout.max_prompt_tokens={max_tokens}: the prompt {problem.question[:40]!r}... has {len(tokens)} "
                f"tokens; raise it to at least that"
            )
        return cls(problem, tokens, prompt_id(tokens))


def _unknown(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> str:
    """The characters of a text that a model would see as its token for the unknown, the first few. "" where the
    prompt's tokens hold none.
    """
    name = getattr(tokenizer.backend.model, "unk_token", None) or (tokenizer.special_tokens or {}).get("unk_token")
    unknown = None if name is None else tokenizer.backend.token_to_id(name)
    if unknown is None or unknown not in tokens:
        return ""
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    spans = [text[a:b] for i, (a, b) in zip(encoded.ids, encoded.offsets, strict=True) if i == unknown]
    return "".join(dict.fromkeys("".join(spans)))[:20]


def make_requests(
    prompts: Sequence[Prompt],
    words_G: Sequence[Sequence[int]],
    budget: int,
    expected_G: Sequence[float] | None = None,
) -> list[Request]:
    """A rollout of each prompt under each of its noise words.

    Args:
      expected_G: predicted tokens of a response to each prompt; 0 is unknown, None: so are all.
    """
    expected_G = [0.0] * len(prompts) if expected_G is None else expected_G
    return [
        Request(p.tokens, p.id, sample, word, g, budget, float(expected_G[g]))
        for g, p in enumerate(prompts)
        for sample, word in enumerate(words_G[g])
    ]


class StepRollouts:
    """The rollouts of a step, with what is kept of the moment at which they were planned."""

    def __init__(self, prompts: list[Prompt], flight: Flight, epoch: float, ends_epoch: bool):
        self.prompts, self.flight = prompts, flight
        self.epoch, self.ends_epoch = epoch, ends_epoch
        # By group, in the order in which they were finished: its rollouts on this process, and their rewards to come.
        self.grades: dict[int, tuple[np.ndarray, Future]] = {}
        self.reward_N = np.full(len(flight.group_N), np.nan)

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.flight.job.requests

    def rollouts_of(self, groups) -> np.ndarray:
        """The numbers of all rollouts of some groups, in order."""
        return np.flatnonzero(np.isin(self.flight.group_N, list(groups)))

    def grade_finished(self, numbers: Sequence[int], grade: Callable[[Problem, list[np.ndarray]], Future]) -> None:
        """Has the groups graded that these rollouts were the last of, on this process."""
        flight = self.flight
        unfinished = set(flight.group_N[flight.unfinished_N].tolist())
        for g in sorted({int(flight.group_N[n]) for n in numbers} - unfinished):
            of_group = np.flatnonzero((flight.group_N == g) & flight.here_N)
            responses = [flight.job.rows.response(n) for n in of_group]
            self.grades[g] = of_group, grade(self.prompts[g].problem, responses)

    def await_grades(self) -> None:
        """Fills in the rewards of this process's rollouts."""
        for numbers, rewards in self.grades.values():
            self.reward_N[numbers] = rewards.result()


@dataclasses.dataclass(frozen=True)
class Graded:
    """Finished and graded groups."""

    prompts: list[Prompt]  # of each rollout
    requests: list[Request]
    rollouts: Rollouts
    rewards_N: np.ndarray  # float64, NaN where the grade failed
    version_N: np.ndarray  # of the policy that made each rollout: training steps it had learned from
    step_N: np.ndarray  # the step that it was rolled out for
    forecasts: tuple[Forecast, ...]  # of the groups' lengths

    def forecast(self) -> Forecast:
        """Of each group."""
        arrays = zip(*(dataclasses.astuple(f) for f in self.forecasts), strict=True)
        return Forecast(*map(np.concatenate, arrays))

    def batch(self, samples: int, config: AdvantageConfig, step: int) -> Batch:
        """What the learner learns from at a step, but for `batch_advantages`."""
        advantage_GC, _ = group_advantages(self._reward_GC(samples, config), config.baseline, config.normalize_std)
        return Batch(
            tokens=self.rollouts.tokens_NS,
            prompt_length=self.rollouts.prompt_length_N,
            response_length=self.rollouts.response_length_N,
            log_prob=self.rollouts.log_prob_NT,
            advantage=advantage_GC.reshape(-1),
            valid=self._counts_N(config),
            stale=self.version_N < step,
        )

    def informative(self, samples: int, config: AdvantageConfig) -> np.ndarray:
        """bool [G]: the group's rewards, as they are learned from, differ."""
        return informative_groups(self._reward_GC(samples, config), self._counts_N(config).reshape(-1, samples))

    def _reward_GC(self, samples: int, config: AdvantageConfig) -> np.ndarray:
        """As they are learned from; history, samples and metrics have what the grader said."""
        penalty_N = overlong_penalty(config, self.rollouts.response_length_N)
        return (self.rewards_N + penalty_N).reshape(-1, samples)

    def _counts_N(self, config: AdvantageConfig) -> np.ndarray:
        """bool: gets a gradient."""
        graded_N = ~np.isnan(self.rewards_N)
        return graded_N & self.rollouts.ended_N if config.mask_truncated else graded_N

    def length_GC(self, samples: int) -> np.ndarray:
        """Tokens of the responses."""
        return self.rollouts.response_length_N.reshape(-1, samples)

    def visits(self, samples: int) -> Iterator[tuple[Prompt, list[Response]]]:
        """What the history keeps, by group."""
        responses = [
            Response(
                self.rollouts.response(n),
                float(self.rewards_N[n]),
                int(self.version_N[n]),
                int(self.step_N[n]),
                r.sample,
                r.noise,
            )
            for n, r in enumerate(self.requests)
        ]
        for start in range(0, len(responses), samples):
            yield self.prompts[start], responses[start : start + samples]

    def records(self, step: int, decode: Callable[[np.ndarray], str]) -> Iterator[dict]:
        """What `samples/` keeps of each rollout, of a batch that was learned from at a step."""
        for n, r in enumerate(self.requests):
            yield {
                "task": self.prompts[n].problem.task,
                "prompt": self.prompts[n].problem.question,
                "sample": r.sample,
                "completion": decode(self.rollouts.response(n)),
                "reward": None if np.isnan(self.rewards_N[n]) else float(self.rewards_N[n]),
                "length": int(self.rollouts.response_length_N[n]),
                "accepted": int(self.rollouts.accepted_N[n]),
                "ended": bool(self.rollouts.ended_N[n]),
                "policy_version": int(self.version_N[n]),
                "deferred": bool(self.step_N[n] < step),
            }

    def metrics(self, samples: int) -> dict[str, float]:
        """Of rewards and rollouts."""
        rollouts, lengths = self.rollouts, self.rollouts.response_length_N
        rewards = self.rewards_N[~np.isnan(self.rewards_N)]
        best_G = np.nan_to_num(self.rewards_N).reshape(-1, samples).max(axis=1)
        return {
            "reward/mean": float(rewards.mean()) if rewards.size else math.nan,
            "reward/std": float(rewards.std()) if rewards.size else math.nan,
            "reward/any_correct": float((best_G >= 1).mean()),
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

    def task_metrics(self) -> dict[str, float]:
        """Of rewards and lengths, by task."""
        tasks_N = np.array([p.problem.task for p in self.prompts])
        metrics = {}
        for task in dict.fromkeys(tasks_N.tolist()):
            of_task_N = tasks_N == task
            rewards = self.rewards_N[of_task_N & ~np.isnan(self.rewards_N)]
            metrics |= {
                f"task/{task}/responses": int(of_task_N.sum()),
                f"task/{task}/reward_mean": float(rewards.mean()) if rewards.size else math.nan,
                f"task/{task}/accuracy": float((rewards >= 1).mean()) if rewards.size else math.nan,
                f"task/{task}/length_mean": float(self.rollouts.response_length_N[of_task_N].mean()),
                f"task/{task}/failed_grades": int(np.isnan(self.rewards_N[of_task_N]).sum()),
            }
        return metrics


def graded(step: StepRollouts, groups) -> Graded:
    """Some groups of a step, all of whose rollouts are finished and graded."""
    numbers = step.rollouts_of(groups)
    requests = [step.requests[n] for n in numbers]
    return Graded(
        prompts=[step.prompts[r.group] for r in requests],
        requests=requests,
        rollouts=step.flight.job.rows.rollouts(numbers, None, (), 0.0),
        rewards_N=step.reward_N[numbers],
        version_N=step.flight.version_N[numbers],
        step_N=np.full(len(numbers), step.flight.step),
        forecasts=(Forecast(*(x[sorted(groups)] for x in dataclasses.astuple(step.flight.forecast))),),
    )


def of_informative_groups(batch: Batch, informative_G: np.ndarray, count: int) -> tuple[Batch, np.ndarray]:
    """So many groups of a batch: those that can be learned from first, in order. Where they are too few, others fill
    up its shape and are masked.

    Returns:
      (batch, numbers of its groups)
    """
    groups = np.argsort(~informative_G, kind="stable")[:count]
    samples = len(batch.valid) // len(informative_G)
    rows = (groups[:, None] * samples + np.arange(samples)).reshape(-1)
    batch = jax.tree.map(lambda x: x[rows], batch)
    return batch.replace(valid=batch.valid & np.repeat(informative_G[groups], samples)), groups


def joined(parts: Sequence[Graded], spans: Sequence[Span], tally: Tally | None, seconds: float) -> Graded:
    """The groups of all parts, in order, with what the slices did in these seconds. Their arrays must be as wide.

    Args:
      tally: an empty one, to which the drafts of the spans are added; None where drafting is off.
    """

    def arrays(values: Sequence, names) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(v, name) for v in values]) for name in names}

    names = [f.name for f in dataclasses.fields(Rollouts) if f.name.endswith(("_N", "_NS", "_NT"))]
    if tally is not None:
        tally = sum((s.evidence for s in spans if s.chunk.k > 1), tally)
    rollouts = Rollouts(
        **arrays([p.rollouts for p in parts], names),
        tally=tally,
        chunks=tuple(s.chunk for s in spans),
        seconds=seconds,
    )
    return Graded(
        prompts=[x for p in parts for x in p.prompts],
        requests=[x for p in parts for x in p.requests],
        rollouts=rollouts,
        forecasts=tuple(f for p in parts for f in p.forecasts),
        **arrays(parts, ("rewards_N", "version_N", "step_N")),
    )
