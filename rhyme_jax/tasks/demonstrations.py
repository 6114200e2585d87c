"""Demonstrations that the embedded tiny model is pretrained on: three styles of answering an arithmetic chain.

Reward teaches a small model new arithmetic slowly, but chooses quickly among behaviours that the model has. So
the mixture shows a behaviour worth choosing, worked solutions, less often than answers given straight away or
after skipping steps, most of which are wrong. GRPO then has something to find.
"""

import dataclasses

import numpy as np

from rhyme_jax.tasks.arithmetic import MAX_VALUE, Chain, final_line

GUESS_IS_RIGHT = 0.2  # share of unworked answers that happen to be right
GUESS_ERROR = 9  # the others are off by 1..9


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Shares of the styles; what remains is `direct`, which must stay the most frequent opening."""

    worked: float  # every step, then the answer
    sloppy: float  # the first half of the steps, then a guess

    def response(self, chain: Chain, rng: np.random.Generator) -> str:
        u = rng.random()
        if u < self.worked:
            return chain.worked_solution()
        shown = chain.steps()[: chain.difficulty // 2] if u < self.worked + self.sloppy else []
        return "".join(shown) + final_line(_guess(chain.values[-1], rng))


WORKED_ONLY = Mixture(worked=1.0, sloppy=0.0)


def _guess(answer: int, rng: np.random.Generator) -> int:
    if rng.random() < GUESS_IS_RIGHT:
        return answer
    near = [v for v in range(max(0, answer - GUESS_ERROR), min(MAX_VALUE, answer + GUESS_ERROR) + 1) if v != answer]
    return int(rng.choice(near))
