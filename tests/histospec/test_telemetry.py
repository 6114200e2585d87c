"""Metrics of drafts by hand: a few rollouts and a tally, whose numbers are written out."""

import dataclasses
import json

import numpy as np
import pytest

from rhyme_jax.histospec import telemetry
from rhyme_jax.histospec.budget import SHAPE_XM, Cost, CostTable, Tally
from rhyme_jax.histospec.drafts import HISTORY, MAX_MATCH, OWN, SELF, SIBLINGS
from rhyme_jax.histospec.rollouts import Chunk, Rollouts
from rhyme_jax.histospec.telemetry import EpochCounts, draft_metrics, predicted, share

CHUNKS = (
    Chunk(rows=8, slots=64, k=8, iterations=4, forwards=30, tokens=60),
    Chunk(rows=8, slots=64, k=1, iterations=10, forwards=50, tokens=50),
    Chunk(rows=2, slots=96, k=8, iterations=6, forwards=12, tokens=30),
)

# (source, match, proposed, accepted, whether cut)
DRAFTS = [
    (HISTORY, 3, 3, 0, False),
    (HISTORY, 3, 3, 3, True),
    (HISTORY, 5, 2, 1, False),
    (SELF, 5, 1, 1, True),
    (OWN, 0, 3, 2, False),
    (OWN, 0, 3, 3, True),
]


def tally_of(drafts, without, depths=3) -> Tally:
    proposed_XML, stopped_XML, cut_XML = np.zeros((3, *SHAPE_XM, depths + 1), np.int32)
    for source, match, proposed, accepted, cut in drafts:
        proposed_XML[source, match, proposed] += 1
        (cut_XML if cut else stopped_XML)[source, match, accepted] += 1
    return Tally(proposed_XML, stopped_XML, cut_XML, np.int32(without))


def rollouts(tally, lengths=(7, 4, 9), forwards=(5, 4, 1), chunks=CHUNKS) -> Rollouts:
    """With what the metrics read; the rest is as empty as it can be."""
    n = len(lengths)
    return Rollouts(
        tokens_NS=np.zeros((n, 16), np.int32),
        prompt_length_N=np.ones(n, np.int32),
        response_length_N=np.array(lengths, np.int32),
        ended_N=np.ones(n, bool),
        log_prob_NT=np.zeros((n, 16), np.float32),
        behaviour_log_prob_NT=np.zeros((n, 16), np.float32),
        source_NT=np.zeros((n, 16), np.int8),
        forwards_N=np.array(forwards, np.int32),
        proposed_N=np.zeros(n, np.int32),
        accepted_N=np.zeros(n, np.int32),
        tally=tally,
        chunks=chunks,
        seconds=1.0,
    )


# --- drafts ---------------------------------------------------------------------------------------------------


def test_draft_metrics():
    metrics = draft_metrics(rollouts(tally_of(DRAFTS, without=5)))
    assert metrics == {
        "draft/iterations_by_k": {"1": 10, "8": 10},
        "draft/history_proposed": 3 + 3 + 2,
        "draft/history_accepted": 0 + 3 + 1,
        "draft/siblings_proposed": 0,
        "draft/siblings_accepted": 0,
        "draft/self_proposed": 1,
        "draft/self_accepted": 1,
        "draft/own_proposed": 3 + 3,
        "draft/own_accepted": 2 + 3,
        # 2 + 3 of 6 tokens without a match; 3 of 6 after three tokens; 1 + 1 of 3 after five.
        "draft/acceptance_by_match": [5 / 6, None, None, 3 / 6, None, 2 / 3, None, None],
        # Of six first tokens five were right, of five second ones three, of four third ones two.
        "draft/acceptance_by_depth": [5 / 6, 3 / 5, 2 / 4],
        "draft/lengths": [5, 1, 1, 4],
    }
    assert json.loads(json.dumps(metrics)) == metrics  # plain numbers, no NaN


def test_draft_metrics_without_a_draft():
    """Drafting was on, and nothing matched."""
    metrics = draft_metrics(rollouts(tally_of([], without=7)))
    assert metrics["draft/lengths"] == [7, 0, 0, 0]
    assert metrics["draft/acceptance_by_depth"] == [None] * 3
    assert metrics["draft/acceptance_by_match"] == [None] * (MAX_MATCH + 1)
    assert metrics["draft/own_proposed"] == metrics["draft/own_accepted"] == 0
    json.dumps(metrics, allow_nan=False)


def test_draft_metrics_of_plain_decoding():
    """Drafting was off: there is nothing to say of it but that."""
    assert draft_metrics(rollouts(None)) == {"draft/iterations_by_k": {"1": 10, "8": 10}}


def test_metrics_leave_the_tally_alone():
    tally = tally_of(DRAFTS, without=5)
    draft_metrics(rollouts(tally))
    np.testing.assert_array_equal(tally.proposed_XML, tally_of(DRAFTS, 5).proposed_XML)
    assert tally.without == 5


def test_iterations_by_k_are_sorted_as_numbers():
    chunks = [dataclasses.replace(CHUNKS[0], k=k, iterations=n) for k, n in ((16, 1), (2, 2), (128, 3), (1, 4), (2, 5))]
    metrics = draft_metrics(rollouts(None, chunks=tuple(chunks)))
    assert list(metrics["draft/iterations_by_k"].items()) == [("1", 4), ("2", 7), ("16", 1), ("128", 3)]


@pytest.mark.parametrize(("part", "whole", "want"), [(1, 4, 0.25), (0, 3, 0.0), (0, 0, None), (np.int32(3), 2, 1.5)])
def test_share(part, whole, want):
    assert share(part, whole) == want
    assert want is None or type(share(part, whole)) is float


# --- time -----------------------------------------------------------------------------------------------------

COSTS = CostTable(
    (
        Cost(8, 64, 1, 1.0, 0.0, 0.25),
        Cost(8, 64, 8, 2.0, 0.5, 0.25),
        Cost(2, 96, 1, 0.5, 0.0, 0.125),
        Cost(2, 96, 8, 0.75, 0.25, 0.125),
    )
)


def test_predicted():
    """4 iterations of 2 s, 10 of 1 s, 6 of 0.75 s. With K = 1 a row's tokens would have taken as many iterations:
    4 x 60/30 and 10 of 1 s, 6 x 30/12 of 0.5 s.
    """
    have = predicted(CHUNKS, COSTS)
    assert have["seconds/rollout_draft"] == 4 * 0.5 + 6 * 0.25
    assert have["seconds/rollout_sample"] == 4 * 0.25 + 10 * 0.25 + 6 * 0.125
    assert have["seconds/rollout_forward"] == 4 * 1.25 + 10 * 0.75 + 6 * 0.375
    parts = ("draft", "sample", "forward")
    assert sum(have[f"seconds/rollout_{part}"] for part in parts) == 4 * 2 + 10 + 6 * 0.75
    assert have["rollout/predicted_speedup"] == (8 + 10 + 7.5) / 22.5
    assert len(have) == 4


def test_plain_decoding_is_as_fast_as_itself():
    assert predicted(CHUNKS[1:2], COSTS)["rollout/predicted_speedup"] == 1.0
    assert predicted(CHUNKS[1:2], CostTable(assumed=0.1))["rollout/predicted_speedup"] == 1.0


def test_drafts_that_yield_nothing_show_as_a_slowdown():
    useless = dataclasses.replace(CHUNKS[0], tokens=30)
    assert predicted((useless,), COSTS)["rollout/predicted_speedup"] == 0.5


def test_predicted_by_an_assumed_cost():
    """1 + 7 x 0.25 iterations each; nothing is known of the parts."""
    have = predicted(CHUNKS[:1], CostTable(assumed=0.25))
    assert have == {
        "seconds/rollout_draft": 0.0,
        "seconds/rollout_sample": 0.0,
        "seconds/rollout_forward": 4 * 2.75,
        "rollout/predicted_speedup": 2 / 2.75,
    }


def test_a_chunk_in_which_nothing_was_active():
    have = predicted((dataclasses.replace(CHUNKS[0], forwards=0, tokens=0),), COSTS)
    assert have["rollout/predicted_speedup"] == 0.0


# --- an epoch -------------------------------------------------------------------------------------------------


def test_epoch_counts():
    """Two steps with drafts and one without."""
    counts = EpochCounts()
    counts.add(rollouts(tally_of(DRAFTS, 5)))  # 20 tokens in 10 row-forwards
    counts.add(rollouts(tally_of([(SIBLINGS, 4, 2, 1, False), (HISTORY, 7, 2, 2, True)], 1), (3, 3), (2, 4)))
    counts.add(rollouts(None, (4,), (4,)))
    assert counts.metrics() == {
        "epoch/tokens_per_row_forward": 30 / 20,
        "epoch/proposed": 15 + 4,
        "epoch/accepted": 10 + 3,
        "epoch/acceptance": 13 / 19,
        "epoch/history_acceptance": 6 / 10,
        "epoch/siblings_acceptance": 1 / 2,
        "epoch/self_acceptance": 1.0,
        "epoch/own_acceptance": 5 / 6,
    }


def test_an_epoch_of_nothing():
    metrics = EpochCounts().metrics()
    assert metrics["epoch/proposed"] == metrics["epoch/accepted"] == 0
    assert {value for name, value in metrics.items() if name not in ("epoch/proposed", "epoch/accepted")} == {None}


def test_epoch_counts_are_saved_as_they_are():
    """In a checkpoint's JSON, and added to after a resume."""
    counts = EpochCounts()
    counts.add(rollouts(tally_of(DRAFTS, 5)))
    other = EpochCounts(**json.loads(json.dumps(dataclasses.asdict(counts))))
    assert other == counts
    other.add(rollouts(tally_of(DRAFTS, 5)))
    assert other != counts and other.metrics() == {
        **counts.metrics(),
        "epoch/proposed": 2 * 15,
        "epoch/accepted": 2 * 10,
    }


def test_epochs_do_not_share_their_counts():
    first, second = EpochCounts(), EpochCounts()
    first.add(rollouts(tally_of(DRAFTS, 5)))
    assert second == EpochCounts()


def test_depths_are_counted_once_for_each_draft_that_got_there():
    counts_XML = np.zeros((*SHAPE_XM, 4), np.int32)
    counts_XML[0, 3], counts_XML[2, 5] = [4, 1, 0, 2], [0, 0, 3, 0]
    assert telemetry._deeper(counts_XML).tolist() == [6, 5, 2]
