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

from rhyme_jax.errors import InputError

ALPHABET = "0123456789+-=?#\n "
MAX_VALUE = 99


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
    count: int, difficulties: tuple[int, ...], seed: int, exclude: frozenset[Chain] = frozenset()
) -> list[Chain]:
    """`count` distinct chains, none in `exclude`, with difficulties in equal shares and in random order.

    Raises:
      InputError: the difficulties do not hold that many different chains.
    """
    rng = np.random.default_rng([seed, 0xA817])
    seen, chains = set(exclude), []
    for i in range(count):
        for _ in range(1000):
            chain = sample_chain(rng, difficulties[i % len(difficulties)])
            if chain not in seen:
                break
        else:
            raise InputError(
                f"task.train_size/eval_size: too few different problems of difficulty "
                f"{difficulties[i % len(difficulties)]}; ask for fewer or add difficulties"
            )
        seen.add(chain)
        chains.append(chain)
    order = rng.permutation(len(chains))
    return [chains[i] for i in order]


def split(train_size: int, eval_size: int, difficulties: tuple[int, ...], seed: int) -> tuple[list[Chain], list[Chain]]:
    """Disjoint train and eval chains. The eval set depends on the seed, not on the size of the train set."""
    evaluation = generate(eval_size, difficulties, seed + 1)
    return generate(train_size, difficulties, seed, exclude=frozenset(evaluation)), evaluation
