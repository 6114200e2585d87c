"""Plans: which rollout slice decodes which prompt groups, in which order.

A plan is data; it names groups and slices by index and touches no device. This is the `sync` layout, the
baseline that length-aware layouts are compared with: one batch, split evenly.
"""

import dataclasses
import itertools

from rhyme_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Plan:
    groups_by_slice: tuple[tuple[int, ...], ...]  # for each slice, its prompt groups in decoding order

    @property
    def slices(self) -> int:
        return len(self.groups_by_slice)


def equal_split(groups: int, slices: int) -> Plan:
    """Contiguous shares of the batch, as equal as they can be, in the order of the data.

    Raises:
      InputError: there is less than one group for each slice.
    """
    if slices < 1 or groups < slices:
        raise InputError(f"slices={slices}: must be from 1 to the {groups} prompts of a step")
    bounds = [i * groups // slices for i in range(slices + 1)]
    return Plan(tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds)))
