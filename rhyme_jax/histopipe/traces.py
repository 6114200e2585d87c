"""Response lengths of every prompt in every epoch: drawn from a distribution, or recorded by a run.

A drawn trace is what the scheduling problem needs and no more. Each prompt has a rank u in [0, 1), its difficulty among
all prompts; its typical length is the u-quantile of a log-normal body with a Pareto tail for the hardest few per cent;
its samples scatter around that. From one epoch to the next most ranks move a little and a few anywhere: the RhymeRL
paper (arXiv 2508.18588) finds that for 2 to 4 % of prompts the rank moves by more than a tenth of the batch, which here
is called a major shift.

Shapes: E epochs, P prompts, C samples of a prompt.
"""

import collections
import dataclasses
import json
import math
import pathlib
import re

import numpy as np

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks.stream import PromptStream

MAJOR = 0.1  # a rank that moves by more than this share of the prompts has made a major shift
INDEPENDENT = (1 - MAJOR) ** 2  # share of major shifts between two independent epochs: P(|u - v| > 0.1)
SHORTEST = 16  # tokens


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a run would generate: lengths in tokens, known to the simulator and hidden from the planner."""

    lengths_EPC: np.ndarray  # int
    prompt_P: np.ndarray  # int: tokens of each prompt

    @property
    def epochs(self) -> int:
        return self.lengths_EPC.shape[0]

    @property
    def prompts(self) -> int:
        return self.lengths_EPC.shape[1]

    @property
    def samples(self) -> int:
        return self.lengths_EPC.shape[2]

    def batches(self, batch: int, seed: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Prompts and lengths (prompts_G, lengths_GC) of the first steps, in the order a run would train on them.

        Raises:
          InputError: the trace has less epochs than the steps need, or a batch is larger than an epoch.
        """
        stream = PromptStream(self.prompts, batch, seed)
        if steps > self.epochs * stream.batches_per_epoch:
            raise InputError(
                f"steps: {steps} batches of {batch} prompts (one more than the steps measured) need more than the "
                f"{self.epochs} epochs of {stream.batches_per_epoch} batches that the trace holds"
            )
        made = []
        for _ in range(steps):
            epoch = stream.epoch
            prompts_G = stream.next()
            made.append((prompts_G, self.lengths_EPC[epoch, prompts_G]))
        return made

    def major_shifts(self) -> float:
        """Share of prompts, between adjacent epochs, whose rank by mean length moves by more than a tenth of all
        prompts. It counts the scatter of the samples too. NaN for a single epoch.
        """
        if self.epochs < 2:
            return math.nan
        rank_EP = self.lengths_EPC.mean(axis=2).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        return float((np.abs(np.diff(rank_EP, axis=0)) > MAJOR * self.prompts).mean())


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The distribution of a drawn trace. Lengths are in tokens."""

    median: float  # of the prompts' typical lengths
    sigma: float  # of their logarithm, in the body
    hard_share: float  # of prompts, the hardest, whose typical length has a Pareto tail instead
    hard_exponent: float  # of that tail; the smaller, the heavier
    within: float  # standard deviation of the logarithm of a prompt's samples
    jitter: float  # most that a rank moves between epochs where it makes no major shift
    major_shifts: float  # share of prompts with a major shift between epochs; 0.81 and more: independent epochs
    max_tokens: int  # a longer response is cut

    def __post_init__(self):
        for name in ("median", "hard_exponent"):
            if not getattr(self, name) > 0:
                raise InputError(f"trace.{name}={getattr(self, name)}: must be above 0")
        for name in ("sigma", "within"):
            if not 0 <= getattr(self, name) <= 5:
                raise InputError(f"trace.{name}={getattr(self, name)}: must lie in [0, 5]")
        for name in ("hard_share", "jitter", "major_shifts"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"trace.{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.max_tokens < SHORTEST:
            raise InputError(f"trace.max_tokens={self.max_tokens}: must be at least {SHORTEST}")

    def quantile(self, u) -> np.ndarray:
        """Typical length of prompts of rank u, not cut."""
        u = np.asarray(u, float)
        edge = 1 - self.hard_share  # ranks from here on are in the tail, which starts where the body is cut off
        body = self.median * np.exp(self.sigma * _normal_quantile(np.minimum(u, edge) if self.hard_share else u))
        left = np.maximum(1 - u, 1e-6)  # 1e-6: no rank of a trace is nearer to the top, and infinity is none
        return np.where(u > edge, body * (self.hard_share / left) ** (1 / self.hard_exponent), body)


def draw(lengths: Lengths, epochs: int, prompts: int, samples: int, prompt_tokens: int, seed: int) -> Trace:
    """A trace from a distribution; the same for the same arguments."""
    rng = np.random.default_rng([seed, 0x7AC3])
    # Stratified, so that each trace has its share of hard prompts: with a few hundred prompts, independent ranks would
    # make the tail, and with it every ratio, depend on the seed.
    rank_P = rng.permutation((np.arange(prompts) + rng.random(prompts)) / prompts)
    lengths_EPC = np.empty((epochs, prompts, samples), np.int64)
    for epoch in range(epochs):
        if epoch:
            moved_P = rank_P + rng.uniform(-lengths.jitter, lengths.jitter, prompts)
            moved_P = 1 - np.abs(1 - np.abs(moved_P))  # reflected at both ends, so ranks stay uniform
            anywhere_P = rng.random(prompts) < lengths.major_shifts / INDEPENDENT
            rank_P = np.where(anywhere_P, rng.random(prompts), np.clip(moved_P, 0, 1 - 1e-9))
        scatter_PC = np.exp(lengths.within * rng.standard_normal((prompts, samples)))
        drawn_PC = lengths.quantile(rank_P)[:, None] * scatter_PC
        lengths_EPC[epoch] = np.clip(np.rint(drawn_PC), SHORTEST, lengths.max_tokens)
    return Trace(lengths_EPC, np.full(prompts, prompt_tokens))


def recorded(workdir, prompt_tokens: int) -> Trace:
    """The lengths that a run wrote to samples/step_*.jsonl of its workdir.

    A prompt's first visit is its epoch 0 and so on. Only epochs in which every prompt was visited are kept, or, of a
    run shorter than that, the first visit of the prompts it got to. Prompts are known by their text; their lengths are
    not in the files, so prompt_tokens stands in for all of them.

    Raises:
      InputError: there are no samples, a line is damaged, or groups differ in size.
    """
    paths = [(int(m[1]), p) for p in pathlib.Path(workdir, "samples").glob("step_*.jsonl") if (m := _step(p))]
    if not paths:
        raise InputError(f"trace.path={str(workdir)!r}: holds no samples/step_*.jsonl")
    visits = collections.defaultdict(list)  # by prompt: the lengths of each visit, by sample
    for _, path in sorted(paths):
        here = collections.defaultdict(list)  # by prompt; a prompt may come twice in a step
        for number, line in enumerate(_lines(path), 1):
            prompt, sample, length = _rollout(line, f"{path}, line {number}")
            group = next((g for g in here[prompt] if sample not in g), None)
            if group is None:
                here[prompt].append(group := {})
            group[sample] = length
        for prompt, groups in here.items():
            visits[prompt] += groups
    sizes = {len(group) for groups in visits.values() for group in groups}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes)))
        raise InputError(f"trace.path={str(workdir)!r}: its groups differ in size ({found})")
    epochs = min(map(len, visits.values()))
    lengths_EPC = np.array(
        [[[x for _, x in sorted(groups[e].items())] for groups in visits.values()] for e in range(epochs)], np.int64
    )
    return Trace(lengths_EPC, np.full(len(visits), prompt_tokens))


def _step(path: pathlib.Path) -> re.Match | None:
    return re.fullmatch(r"step_(\d+)\.jsonl", path.name)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: cannot be read ({one_line(e)})") from e


def _rollout(line: str, where: str) -> tuple[str, int, int]:
    try:
        record = json.loads(line)
        prompt, sample, length = record["prompt"], record["sample"], record["length"]
        if not isinstance(prompt, str) or type(sample) is not int or type(length) is not int or length < 1:
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise InputError(f"{where}: expected an object with 'prompt', 'sample' and a 'length' of at least 1") from e
    return prompt, sample, length


def _normal_quantile(p) -> np.ndarray:
    """Inverse of the normal distribution function by Acklam's rational approximation, within 1.2e-9 (relative).

    numpy has none, and scipy is no requirement of this project.
    """
    a = (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02, 1.383577518672690e02,
         -3.066479806614716e01, 2.506628277459239e00)  # fmt: skip
    b = (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01,
         -1.328068155288572e01, 1.0)  # fmt: skip
    c = (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00, -2.549732539343734e00,
         4.374664141464968e00, 2.938163982698783e00)  # fmt: skip
    d = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0)
    p = np.clip(p, 1e-9, 1 - 1e-9)
    side = np.minimum(p, 1 - p)
    tail = np.sqrt(-2 * np.log(side))
    outer = np.polyval(c, tail) / np.polyval(d, tail) * np.where(p < 0.5, 1, -1)
    middle = p - 0.5
    inner = middle * np.polyval(a, middle**2) / np.polyval(b, middle**2)
    return np.where(side < 0.02425, outer, inner)
