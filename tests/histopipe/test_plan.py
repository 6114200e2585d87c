"""The even layout: every group once, shares as equal as they can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe.plan import equal_split


@pytest.mark.parametrize(
    ("groups", "slices", "layout"),
    [
        (1, 1, ((0,),)),
        (4, 1, ((0, 1, 2, 3),)),
        (4, 2, ((0, 1), (2, 3))),
        (3, 3, ((0,), (1,), (2,))),
        (5, 2, ((0, 1), (2, 3, 4))),
        (8, 3, ((0, 1), (2, 3, 4), (5, 6, 7))),
    ],
)
def test_by_hand(groups, slices, layout):
    assert equal_split(groups, slices).groups_by_slice == layout


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_each_group_once_in_order_and_evenly(sizes):
    groups, slices = sizes
    plan = equal_split(groups, slices)
    assert plan.slices == len(plan.groups_by_slice) == slices
    assert [g for share in plan.groups_by_slice for g in share] == list(range(groups))
    lengths = {len(share) for share in plan.groups_by_slice}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("groups", "slices"), [(4, 0), (4, -1), (4, 5), (0, 1), (0, 0)])
def test_impossible_slices_are_refused(groups, slices):
    message = rf"^slices={slices}: must be from 1 to the {groups} prompts of a step$"
    with pytest.raises(InputError, match=message):
        equal_split(groups, slices)
