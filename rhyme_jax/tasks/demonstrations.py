"""Demonstrations that the embedded models are pretrained on: three styles of answering a problem.

Reward teaches a small model new skills slowly, but chooses quickly among behaviours that the model has. So the mixture
shows a behaviour worth choosing, worked solutions, less often than answers given straight away or after skipping steps,
most of which are wrong. GRPO then has something to find.
"""

import dataclasses
import functools

import numpy as np

from rhyme_jax.tasks.arithmetic import MAX_VALUE, Chain, final_line
from rhyme_jax.tasks.functions import Function, slips

GUESS_IS_RIGHT = 0.2  # share of unworked answers to arithmetic chains that happen to be right
GUESS_ERROR = 9  # the others are off by 1..9
HASTE_IS_RIGHT = 0.1  # share of functions written in haste that are right all the same
# Of the others, those that leave out the last step; the rest has some other slip. Greedy decoding follows the most
# frequent token each time, and would be right if no slip were more frequent than what is right.
HASTE_FORGETS = 0.75


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Shares of the styles; what remains is `direct`, which must stay the most frequent opening."""

    worked: float  # every step, then the answer
    sloppy: float  # the first half of the steps, then a hasty answer

    def response(self, problem: Chain | Function, rng: np.random.Generator) -> str:
        u = rng.random()
        if u < self.worked:
            return problem.worked_solution()
        return hasty(problem, problem.difficulty // 2 if u < self.worked + self.sloppy else 0, rng)


WORKED_ONLY = Mixture(worked=1.0, sloppy=0.0)


@functools.singledispatch
def hasty(problem: Chain | Function, shown: int, rng: np.random.Generator) -> str:
    """An answer that works out only the first `shown` steps of a problem, and so is mostly wrong."""
    raise TypeError(f"no demonstrations for {type(problem).__name__}")


@hasty.register
def _(chain: Chain, shown: int, rng: np.random.Generator) -> str:
    return "".join(chain.steps()[:shown]) + final_line(_guess(chain.values[-1], rng))


def _guess(answer: int, rng: np.random.Generator) -> int:
    if rng.random() < GUESS_IS_RIGHT:
        return answer
    near = [v for v in range(max(0, answer - GUESS_ERROR), min(MAX_VALUE, answer + GUESS_ERROR) + 1) if v != answer]
    return int(rng.choice(near))


@hasty.register
def _(function: Function, shown: int, rng: np.random.Generator) -> str:
    if rng.random() < HASTE_IS_RIGHT:
        return function.body(shown)
    shorter = Function(function.kind, function.steps[:-1])
    if shorter.fits and rng.random() < HASTE_FORGETS:
        return shorter.body(shown)
    return slips(function, rng, first=shown).body(shown)
