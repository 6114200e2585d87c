"""Completion times against a slice that is played one token at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.histopipe.costs import SliceCost, completion
from rhyme_jax.histospec.budget import Cost, CostTable


def played(cost, lengths, prompts, prefill=0):
    """Seconds of one slice: every tick each live row gains a token; then freed rows take what waits."""
    waiting = [[length, prompt, 0] for length, prompt in zip(lengths, prompts, strict=True) if length > 0]
    live, seconds = [], cost.prefill * prefill
    while waiting or live:
        while waiting and len(live) < cost.max_rows:
            live.append(waiting.pop(0))
        seconds += cost.seconds_B[len(live)]
        for row in live:
            seconds += cost.context * (row[1] + row[2] + 0.5)  # the token itself counts for half: l^2 / 2 in all
            row[2] += 1
        live = [row for row in live if row[2] < row[0]]
    return seconds


@st.composite
def tasks(draw):
    step = st.floats(0, 2)
    rows = draw(st.integers(1, 4))
    seconds = np.cumsum([0.0, 1.0, *draw(st.lists(step, min_size=rows - 1, max_size=rows - 1))])
    cost = SliceCost(seconds, context=draw(st.floats(0, 0.1)), prefill=draw(st.floats(0, 0.1)))
    queue = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=9)
    return cost, draw(st.lists(queue, min_size=1, max_size=5))


@settings(max_examples=100, deadline=None)
@given(tasks())
def test_as_played_token_by_token(task):
    cost, queues = task
    length = np.array([x for queue in queues for x, _ in queue], float)
    prompt = np.array([p for queue in queues for _, p in queue], float)
    start = np.concatenate([[0], np.cumsum([len(queue) for queue in queues])])
    prefill = np.arange(len(queues))
    want = [
        played(cost, [x for x, _ in queue], [p for _, p in queue], n) for n, queue in zip(prefill, queues, strict=True)
    ]
    assert completion(cost, length, start, prompt, prefill) == pytest.approx(want)


def test_by_hand():
    cost = SliceCost(np.array([0.0, 1.0, 1.5]))
    start = np.array([0, 2, 2, 5])
    # 3 ticks of two rows and 2 of one; nothing; rows end at 4 and at 1 + 2.
    assert completion(cost, [3, 5, 4, 1, 2], start).tolist() == [3 * 1.5 + 2, 0.0, 3 * 1.5 + 1]
    assert completion(SliceCost(cost.seconds_B, prefill=2.0), [3, 5], [0, 2], prefill_S=[7]).tolist() == [6.5 + 14]


def test_from_table_takes_the_smallest_batch_that_holds_the_rows_and_the_best_k():
    table = CostTable((Cost(2, 64, 1, 1.0), Cost(2, 64, 4, 2.0), Cost(8, 64, 1, 3.0), Cost(8, 64, 4, 12.0)))
    cost = SliceCost.from_table(table, (8, 2), 64, {1: 1.0, 4: 3.0})
    assert cost.max_rows == 8
    assert cost.seconds_B.tolist() == pytest.approx([0.0] + [2 / 3] * 2 + [3.0] * 6)
    assert cost.context == cost.prefill == 0


def test_roofline_reads_weights_until_it_computes():
    cost = SliceCost.roofline(
        weight_bytes=1000, kv_bytes_per_token=5, bandwidth=100, flops_per_token=2000, flops=400, overhead=1, max_rows=4
    )
    assert cost.seconds_B.tolist() == [0.0, 11.0, 11.0, 16.0, 21.0]  # 10 s of reading; 5 s of computing a row
    assert (cost.context, cost.prefill) == (0.05, 5.0)
    drafted = SliceCost.roofline(1000, 5, 100, 2000, 400, 1, 1, tokens_per_iteration=2.0)
    assert drafted.seconds_B.tolist() == [0.0, 5.5] and drafted.context == 0.025
