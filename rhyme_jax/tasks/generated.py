"""What the generated tasks share: distinct problems of given difficulties, in disjoint train and eval sets."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.tasks.problems import Source

TRIES = 1000  # at a problem that is not among those drawn before

Item = TypeVar("Item", bound=Hashable)


def draw_distinct(
    sample: Callable[[np.random.Generator, int], Item],
    count: int,
    difficulties: Sequence[int],
    stream: Sequence[int],
    exclude: Collection[Item] = (),
    section: str = "task",
) -> list[Item]:
    """`count` distinct items, none in `exclude`, with difficulties in equal shares and in random order.

    Args:
      sample: draws one of a difficulty.
      stream: seeds the randomness.
      section: of the config, for the error.

    Raises:
      InputError: the difficulties do not hold that many different ones.
    """
    rng = np.random.default_rng(list(stream))
    seen, items = set(exclude), []
    for i in range(count):
        difficulty = difficulties[i % len(difficulties)]
        for _ in range(TRIES):
            item = sample(rng, difficulty)
            if item not in seen:
                break
        else:
            raise InputError(
                f"{section}.train_size/eval_size: too few different problems of difficulty {difficulty}; ask for "
                "fewer or add difficulties"
            )
        seen.add(item)
        items.append(item)
    order = rng.permutation(len(items))
    return [items[i] for i in order]


def train_and_eval(
    sample: Callable[[np.random.Generator, int], Item], source: Source, constant: int
) -> tuple[list[Item], list[Item]]:
    """Disjoint train and eval items of a task. The eval set depends on the seed, not on the size of the train set.

    Args:
      constant: the task's own, so that no two tasks share their random numbers.
    """
    options = source.options
    seeds = (options.seed, constant)
    evaluation = draw_distinct(sample, options.eval_size, options.difficulties, (*seeds, 1), section=source.section)
    train = draw_distinct(
        sample, options.train_size, options.difficulties, (*seeds, 0), frozenset(evaluation), source.section
    )
    return train, evaluation


def check_difficulties(source: Source, lowest: int, highest: int, what: str) -> None:
    """Raises InputError unless a task's difficulties lie in a range. `what`: they are."""
    difficulties = source.options.difficulties
    if not difficulties or any(type(d) is not int or not lowest <= d <= highest for d in difficulties):
        raise source.error("difficulties", f"must hold whole numbers of {what} from {lowest} to {highest}")
