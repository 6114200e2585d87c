"""The embedded default task: chains of additions and subtractions, each with a worked solution.

A problem of difficulty d is a chain of d operations over numbers in 0..99 whose running value stays in 0..99::

    47+38-6=?
    47+38=85
    85-6=79
    #### 79

Difficulty also sets the size of the operands: up to 20 at d <= 2, up to 50 at d = 3, up to 99 above. The answer
follows "####", as in GSM8K, and the length of a worked solution grows with the problem, which gives a length
predictor something to predict.
"""

import dataclasses

import numpy as np

from rhyme_jax.tasks.generated import check_difficulties, draw_distinct
from rhyme_jax.tasks.problems import MathProblem, Source, Split

ALPHABET = "0123456789+-=?#\n "
MAX_VALUE = 99
MAX_DIFFICULTY = 8


@dataclasses.dataclass(frozen=True)
class Chain:
    """numbers[0] then signs[i] numbers[i+1]; every running value lies in 0..99."""

    numbers: tuple[int, ...]
    signs: tuple[int, ...]  # +1 or -1

    @property
    def difficulty(self) -> int:
        return len(self.signs)

    @property
    def values(self) -> list[int]:
        """The running values after each operation."""
        values, value = [], self.numbers[0]
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            value += sign * number
            values.append(value)
        return values

    @property
    def question(self) -> str:
        terms = "".join(f"{'+' if s > 0 else '-'}{n}" for s, n in zip(self.signs, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{terms}=?\n"

    def steps(self) -> list[str]:
        before = [self.numbers[0], *self.values[:-1]]
        return [
            f"{a}{'+' if s > 0 else '-'}{n}={v}\n"
            for a, s, n, v in zip(before, self.signs, self.numbers[1:], self.values, strict=True)
        ]

    def worked_solution(self) -> str:
        return "".join(self.steps()) + final_line(self.values[-1])


@dataclasses.dataclass(frozen=True)
class ChainProblem(MathProblem):
    """A chain to work out."""

    solution: str

    @classmethod
    def of(cls, chain: Chain, task: str) -> "ChainProblem":
        answer = str(chain.values[-1])
        return cls(chain.question, False, task, answer, ("hashes",), chain.worked_solution())

    def reference(self) -> str:
        return self.solution


def final_line(answer: int) -> str:
    return f"#### {answer}"


def operand_limit(difficulty: int) -> int:
    return 20 if difficulty <= 2 else 50 if difficulty == 3 else MAX_VALUE


def sample_chain(rng: np.random.Generator, difficulty: int) -> Chain:
    limit = operand_limit(difficulty)
    value = int(rng.integers(0, limit + 1))
    numbers, signs = [value], []
    for _ in range(difficulty):
        # Both directions stay possible at the ends because an operand may be as small as 1.
        can_add, can_subtract = value < MAX_VALUE, value > 0
        sign = 1 if can_add and (not can_subtract or rng.random() < 0.5) else -1
        room = MAX_VALUE - value if sign > 0 else value
        number = int(rng.integers(1, min(limit, room) + 1))
        value += sign * number
        numbers.append(number)
        signs.append(sign)
    return Chain(tuple(numbers), tuple(signs))


def generate(
    count: int,
    difficulties: tuple[int, ...],
    seed: int,
    exclude: frozenset[Chain] = frozenset(),
    section: str = "task",
    more: tuple[int, ...] = (),
) -> list[Chain]:
    """`count` distinct chains, none in `exclude`, with difficulties in equal shares and in random order.

    Args:
      section: of the config, for the error.
      more: goes into the seed, too.

    Raises:
      InputError: the difficulties do not hold that many different chains.
    """
    return draw_distinct(sample_chain, count, difficulties, (seed, 0xA817, *more), exclude, section)


def split(
    train_size: int, eval_size: int, difficulties: tuple[int, ...], seed: int, section: str = "task"
) -> tuple[list[Chain], list[Chain]]:
    """Disjoint train and eval chains. The eval set depends on the seed, not on the size of the train set."""
    evaluation = generate(eval_size, difficulties, seed + 1, section=section)
    # Train streams have a number more, or the one of seed 1 would be seed 0's eval stream. Seed 0 has no such neighbour
    # and keeps the stream of the recorded runs.
    more = (1,) if seed else ()
    return generate(train_size, difficulties, seed, frozenset(evaluation), section, more), evaluation


def load(source: Source) -> Split:
    """The task's problems. A base model goes on with the question as it is."""
    options = source.options
    check_difficulties(source, 1, MAX_DIFFICULTY, "operations")
    both = split(options.train_size, options.eval_size, tuple(options.difficulties), options.seed, source.section)
    return tuple([ChainProblem.of(c, source.task) for c in chains] for chains in both)
