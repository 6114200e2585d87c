"""What a rollout is asked for, and what comes out: requests, the jobs that they form, and finished rollouts.

Suffix letters: N requests or rollouts, S positions (prompt and response), T response positions.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from rhyme_jax.histospec.budget import Tally
from rhyme_jax.histospec.drafts import HistoryBlock
from rhyme_jax.histospec.programs import Shapes


@dataclasses.dataclass(frozen=True)
class Request:
    """One rollout to make. (noise, prompt_id, sample) keys its noise."""

    prompt: np.ndarray  # int32 token ids, at least one
    prompt_id: int  # 64-bit, `history.store.prompt_id`
    sample: int  # index within the prompt's group
    noise: int  # noise word: `noise.fresh_word` or `noise.coupled_word`
    group: int  # row of the history block to draft from
    budget: int  # most tokens of the response
    expected_length: float = 0.0  # tokens of the response that history predicts; 0 is unknown

    @property
    def prompt_bytes(self) -> bytes:
        return np.asarray(self.prompt, np.int32).tobytes()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the device did between two looks of the host."""

    rows: int
    slots: int
    k: int
    iterations: int
    forwards: int  # row-forwards: iterations of active rows
    tokens: int


# What is kept of a row, by the name of its field in `iteration.RowState` (of shape [B, ...]).
FIELDS = {
    "tokens_BS": np.int32,
    "prompt_length_B": np.int32,
    "length_B": np.int32,
    "ended_B": np.bool_,
    "log_prob_BT": np.float32,
    "behaviour_log_prob_BT": np.float32,
    "source_BT": np.int8,
    "forwards_B": np.int32,
    "proposed_B": np.int32,
    "accepted_B": np.int32,
}


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Finished rollouts, on the host, in the order of the requests. N rollouts."""

    tokens_NS: np.ndarray  # int32
    prompt_length_N: np.ndarray  # int32
    response_length_N: np.ndarray  # int32, the EOS included
    ended_N: np.ndarray  # bool: by EOS; otherwise cut off by the budget
    log_prob_NT: np.ndarray  # float32, 0 past the response
    behaviour_log_prob_NT: np.ndarray
    source_NT: np.ndarray  # int8: 1 + index of drafts.SOURCES where the token was drafted; else 0
    forwards_N: np.ndarray  # int32 row-forwards
    proposed_N: np.ndarray
    accepted_N: np.ndarray
    tally: Tally | None  # of the drafts; None where drafting was off
    chunks: tuple[Chunk, ...]
    seconds: float  # wall time, compilation excluded where shapes were already compiled

    def response(self, n: int) -> np.ndarray:
        start = self.prompt_length_N[n]
        return self.tokens_NS[n, start : start + self.response_length_N[n]]

    @property
    def drafted_NT(self) -> np.ndarray:
        """bool: the token came from an accepted draft."""
        return self.source_NT > 0

    @property
    def iterations(self) -> int:
        return sum(c.iterations for c in self.chunks)

    @property
    def generated(self) -> int:
        """Response tokens over all rollouts."""
        return int(self.response_length_N.sum())

    @property
    def tokens_per_row_forward(self) -> float:
        return self.generated / max(1, int(self.forwards_N.sum()))

    @property
    def acceptance(self) -> float:
        """Share of the proposed draft tokens that were committed; 0 where none were proposed."""
        return float(self.accepted_N.sum() / max(1, self.proposed_N.sum()))


class Rows:
    """Rows of the device's batch as they were collected, one for each of N requests: of finished rollouts, and of
    rollouts that are to go on elsewhere.
    """

    def __init__(self, requests: int, shapes: Shapes):
        sizes = {"S": (shapes.positions,), "T": (shapes.response_slots,)}
        self.by_field = {name: np.zeros((requests, *sizes.get(name[-1], ())), t) for name, t in FIELDS.items()}
        self.finished_N = np.zeros(requests, bool)
        self.begun_N = np.zeros(requests, bool)  # has a row here, finished or to be continued

    def put(self, numbers: np.ndarray, rows: dict[str, np.ndarray], finished: bool) -> None:
        """Keeps the rows of some requests; `rows` is indexed like `numbers`."""
        for name, kept in self.by_field.items():
            kept[numbers] = rows[name]
        self.begun_N[numbers] = True
        self.finished_N[numbers] = finished

    def of(self, n: int) -> dict[str, np.ndarray]:
        return {name: kept[n] for name, kept in self.by_field.items()}

    def response(self, n: int) -> np.ndarray:
        """The response's tokens so far."""
        return self.by_field["tokens_BS"][n, self.by_field["prompt_length_B"][n] : self.by_field["length_B"][n]]

    def rollouts(self, numbers, tally: Tally | None, chunks: Sequence[Chunk], seconds: float) -> Rollouts:
        """The finished rollouts of some requests.

        Raises:
          RuntimeError: one of them is not finished.
        """
        missing = np.flatnonzero(~self.finished_N[numbers])
        if missing.size:
            raise RuntimeError(f"rollout: {missing.size} of {len(self.finished_N)} rollouts are not finished")
        d = {name: kept[numbers] for name, kept in self.by_field.items()}
        return Rollouts(
            tokens_NS=d["tokens_BS"],
            prompt_length_N=d["prompt_length_B"],
            response_length_N=d["length_B"] - d["prompt_length_B"],
            ended_N=d["ended_B"],
            log_prob_NT=d["log_prob_BT"],
            behaviour_log_prob_NT=d["behaviour_log_prob_BT"],
            source_NT=d["source_BT"],
            forwards_N=d["forwards_B"],
            proposed_N=d["proposed_B"],
            accepted_N=d["accepted_B"],
            tally=tally,
            chunks=tuple(chunks),
            seconds=seconds,
        )


class Job:
    """Requests that are rolled out together, by one session or by several on different slices. They share the padded
    sizes and the history, and each has a live text of its own in the corpus, wherever it is decoded.
    """

    def __init__(self, requests: Sequence[Request], history: HistoryBlock | None, shapes: Shapes):
        self.requests, self.history, self.shapes = tuple(requests), history, shapes
        self.rows = Rows(len(self.requests), shapes)
        self.live_texts: list[int] = []  # of each request: text of the corpus
        if history is not None:
            samples = collections.Counter()
            for r in self.requests:
                self.live_texts.append(history.tokens_GRP.shape[1] + samples[r.group])
                samples[r.group] += 1
            self.siblings = max(samples.values())
