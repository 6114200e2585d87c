"""SliceCost: the seconds that a slice needs to decode a queue of rollouts of given lengths.

Suffix letters: S slices, N rollouts, in decoding order, slice after slice; B live rows of a slice, 0..max_rows.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rhyme_jax.histospec.budget import CostTable


@dataclass(frozen=True)
class SliceCost:
    """Seconds of decoding on one slice."""

    seconds_B: np.ndarray  # float64 [max_rows + 1]: seconds in which each live row gains one token; [0] = 0
    context: float = 0.0  # more seconds per decoded token and cached token of its row
    prefill: float = 0.0  # seconds per prompt token

    @property
    def max_rows(self) -> int:
        """Rows decoded together; more rollouts wait in the slice's queue and take the rows of finished ones."""
        return len(self.seconds_B) - 1

    @classmethod
    def from_table(
        cls, table: CostTable, rows: tuple[int, ...], slots: int, yields: Mapping[int, float]
    ) -> "SliceCost":
        """From measured iterations.

        Args:
          table: seconds of an iteration by rows, slots and K.
          rows: the batch buckets; j live rows are decoded in the smallest that holds them.
          slots: of the cache.
          yields: tokens per row and iteration, by K.
        """
        buckets = sorted(rows)
        best = [min(table.seconds(b, slots, k) / y for k, y in yields.items()) for b in buckets]
        live_B = np.arange(1, buckets[-1] + 1)
        seconds_B = np.array(best)[np.searchsorted(buckets, live_B)]
        return cls(np.concatenate([[0.0], seconds_B]))

    @classmethod
    def roofline(
        cls,
        weight_bytes: float,
        kv_bytes_per_token: float,
        bandwidth: float,
        flops_per_token: float,
        flops: float,
        overhead: float,
        max_rows: int,
        tokens_per_iteration: float = 1.0,
    ) -> "SliceCost":
        """Of an accelerator that reads its weights once an iteration, and each row's cache."""
        live_B = np.arange(max_rows + 1)
        read, compute = weight_bytes / bandwidth, live_B * flops_per_token * tokens_per_iteration / flops
        seconds_B = (np.maximum(read, compute) + overhead) / tokens_per_iteration
        seconds_B[0] = 0.0
        return cls(seconds_B, kv_bytes_per_token / bandwidth / tokens_per_iteration, flops_per_token / flops)


def completion(
    cost: SliceCost,
    length_N: np.ndarray,
    start_S: np.ndarray,
    prompt_N: np.ndarray | None = None,
    prefill_S: np.ndarray | None = None,
) -> np.ndarray:
    """Seconds in which each slice decodes its queue: float64 [S].

    The first `max_rows` of a queue start together, and each row that becomes free takes the next: list scheduling on
    lanes, where a lane is a row and its position counts tokens, since all live rows gain one at a time. With the
    lanes' last positions e_1 >= e_2 >= ..., j rows are live between e_(j+1) and e_j, so that decoding takes
    sum_j (e_j - e_(j+1)) seconds_B[j] = sum_j e_j (seconds_B[j] - seconds_B[j-1]). Reading the cache adds up over
    rollouts, whatever the schedule: a response of l tokens to a prompt of p reads p l + l^2 / 2 cached tokens.
    The rows are taken to be prefilled before anything is decoded.

    Args:
      length_N: tokens of each response, in decoding order, slice after slice.
      start_S: where each slice's queue starts in it, and last the number of rollouts: int [S + 1].
      prompt_N: prompt tokens of each rollout (cached before its first token); none: 0.
      prefill_S: prompt tokens that each slice has to prefill; none: 0.
    """
    length_N, start_S = np.asarray(length_N, np.float64), np.asarray(start_S)
    end_SL = lane_ends(length_N, start_S, cost.max_rows)
    end_SL.sort(axis=1)
    step_B = np.diff(cost.seconds_B)  # seconds of one more row
    seconds_S = end_SL @ step_B[: end_SL.shape[1]][::-1]
    if cost.context:
        read_N = length_N * (length_N / 2.0 if prompt_N is None else prompt_N + length_N / 2.0)
        read_N = np.concatenate([[0.0], np.cumsum(read_N)])
        seconds_S += cost.context * (read_N[start_S[1:]] - read_N[start_S[:-1]])
    if prefill_S is not None:
        seconds_S += cost.prefill * np.asarray(prefill_S)
    return seconds_S


def lane_ends(length_N: np.ndarray, start_S: np.ndarray, rows: int) -> np.ndarray:
    """Token position at which each row of each slice has nothing more to decode: float64 [S, L], in no order.

    L is `rows`, or the longest queue where that is shorter; lanes that never had a rollout end at 0.
    """
    count_S = np.diff(start_S)
    slices, longest = len(count_S), int(count_S.max(initial=0))
    if slices == 1:  # as migration asks, thousands of times a step: ten times as fast as below
        queue = length_N[start_S[0] : start_S[1]].tolist()
        lanes = queue[:rows]
        heapq.heapify(lanes)
        for length in queue[rows:]:
            heapq.heapreplace(lanes, lanes[0] + length)
        return np.array([lanes], np.float64)
    end_SL = np.zeros((slices, min(rows, longest)))
    lane_L = np.arange(end_SL.shape[1])
    first_SL = lane_L < count_S[:, None]
    end_SL[first_SL] = length_N[(start_S[:-1, None] + lane_L)[first_SL]]
    if longest <= rows:
        return end_SL
    # The slices whose queues are the longest come first, so that those that still refill are the first few.
    by_count_S = np.argsort(-count_S, kind="stable")
    waiting_S = np.sort(count_S - rows)
    end_SL, next_S = end_SL[by_count_S], start_S[:-1][by_count_S] + rows
    for refill in range(longest - rows):
        refilled = slices - int(np.searchsorted(waiting_S, refill, side="right"))
        lane_S = end_SL[:refilled].argmin(axis=1)
        end_SL[np.arange(refilled), lane_S] += length_N[next_S[:refilled] + refill]
    result_SL = np.empty_like(end_SL)
    result_SL[by_count_S] = end_SL
    return result_SL
