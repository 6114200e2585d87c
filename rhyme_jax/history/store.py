"""HistoryStore: the responses that each prompt received in its last visits, as token ids.

Responses are kept with their reward, behaviour policy version, step, and the noise they were drawn with; they are
queried as padded arrays for drafting, and saved as flat arrays (tokens plus offsets: Orbax refuses ragged and
zero-size arrays).

Suffix letters: G prompt groups, R responses, P positions of a history row (as in `histospec.drafts`), T the tokens
of several responses back to back.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.histospec.drafts import MAX_MATCH, NO_TOKEN, SEPARATOR, HistoryBlock
from rhyme_jax.histospec.noise import UNKNOWN_NOISE


def prompt_id(tokens: Sequence[int]) -> int:
    """Stable 64-bit id of a prompt: BLAKE2b of its token ids as little-endian int32."""
    data = np.asarray(tokens, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Response:
    """One earlier rollout of a prompt."""

    tokens: np.ndarray  # int32 [length], the EOS included where there was one
    reward: float  # NaN where the grade failed
    policy_version: int  # of the policy that sampled it
    step: int  # training step of the visit
    sample: int = 0  # index within the prompt's group
    noise: int = UNKNOWN_NOISE  # noise word it was drawn with (uint32), see `histospec.noise`


VOTE_WEIGHTS = ("reward", "count", "recency")
UNREWARDED = 0.1  # weight of a response without reward: where none has any, they still vote


def vote_weight(reward: np.ndarray, age: np.ndarray, weight: str) -> np.ndarray:
    """How much a response's vote on the next drafted token counts, by its reward and its age; any shape.

    "count": all alike (RhymeRL's released code). "reward": by reward, since a policy moves towards what was
    rewarded. "recency": halved with each training step between its visit and the prompt's newest (its age).
    """
    if weight == "count":
        return np.ones(np.shape(reward))
    if weight == "reward":
        return UNREWARDED + np.where(np.isfinite(reward), np.maximum(reward, 0.0), 0.0)
    if weight == "recency":
        return 0.5 ** np.minimum(age, 60)  # bounded: a weight of 0 would mean an empty row
    raise ValueError(f"vote_weight: unknown weight {weight!r}; there are {', '.join(VOTE_WEIGHTS)}")


# What is kept of a response beside its tokens, 32 bytes. One array of these, because NumPy's own 112 bytes for each
# array would be most of the cost of five small ones.
_RECORD = np.dtype([("reward", "f8"), ("policy_version", "i8"), ("noise", "i8"), ("length", "i4"), ("sample", "i4")])


@dataclasses.dataclass(frozen=True, slots=True)
class _Visit:
    """The responses of one step to one prompt."""

    step: int
    tokens_T: np.ndarray  # uint16 where that holds every id, else int32; no other array's view
    records_R: np.ndarray  # _RECORD

    def joined(self, later: "_Visit") -> "_Visit":
        """This visit and more responses of its step."""
        tokens_T = np.concatenate([self.tokens_T, later.tokens_T])
        return _Visit(self.step, tokens_T, np.concatenate([self.records_R, later.records_R]))

    def newest(self, count: int) -> tuple[list[np.ndarray], np.ndarray]:
        """(tokens, records) of the last `count` responses or all there are, last first."""
        return self.split()[::-1][:count], self.records_R[::-1][:count]

    def split(self) -> list[np.ndarray]:
        """The tokens of each response, as views."""
        # By slices: np.split takes three times as long (16 us for 16), and a query does this for every visit.
        ends = np.cumsum(self.records_R["length"]).tolist()
        return [self.tokens_T[start:end] for start, end in zip([0, *ends], ends)]


class _History(NamedTuple):
    """What is known of one prompt."""

    prompt: np.ndarray  # int32
    visits: tuple[_Visit, ...]  # oldest first; none for an unseen prompt

    @property
    def tokens(self) -> int:
        return sum(v.tokens_T.size for v in self.visits)


def _narrowed(tokens_T: np.ndarray) -> np.ndarray:
    """A copy in the smaller type that holds every id; most vocabularies of small models fit 16 bits."""
    fits = tokens_T.size == 0 or (tokens_T.min() >= 0 and tokens_T.max() <= np.iinfo(np.uint16).max)
    return tokens_T.astype(np.uint16 if fits else np.int32)


def _visits(steps_R: np.ndarray, records_R: np.ndarray, tokens_T: np.ndarray) -> list[_Visit]:
    """Visits out of responses that lie in the order of their steps."""
    ends_R = np.cumsum(records_R["length"])
    visits, start, token_start = [], 0, 0
    for end in [*(np.flatnonzero(np.diff(steps_R)) + 1), len(steps_R)]:
        token_end = ends_R[end - 1]
        # Copies, so that an evicted visit frees its memory.
        tokens, records = _narrowed(tokens_T[token_start:token_end]), records_R[start:end].copy()
        visits.append(_Visit(int(steps_R[start]), tokens, records))
        start, token_start = end, token_end
    return visits


class HistoryStore:
    """Responses by prompt, bounded in visits per prompt and in tokens overall.

    A *visit* is a step in which a prompt was rolled out; the last `depth` visits of each prompt are kept. When
    the total passes `max_tokens`, the least recently visited prompts go first; the newest always stays.

    Memory, all counted, for groups of 16 responses of 200 to 800 tokens: 2.2 bytes a token where the ids fit
    16 bits, 4.2 where they do not.
    """

    def __init__(self, depth: int, max_tokens: int):
        if depth < 1:
            raise InputError(f"history.depth={depth}: must be at least 1 epoch")
        if max_tokens < 1:
            raise InputError(f"history.max_tokens={max_tokens}: must be at least 1")
        self.depth, self.max_tokens = depth, max_tokens
        self.evicted_prompts = 0  # dropped for memory since the store was made
        self._tokens = 0
        self._histories: collections.OrderedDict[int, _History] = collections.OrderedDict()  # oldest visit first

    def __len__(self) -> int:
        """Number of prompts with a history."""
        return len(self._histories)

    @property
    def tokens(self) -> int:
        """Response tokens held."""
        return self._tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of the response tokens held."""
        return sum(v.tokens_T.nbytes for h in self._histories.values() for v in h.visits)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held: response tokens, what is kept beside them, and prompts."""
        records = sum(v.records_R.nbytes for h in self._histories.values() for v in h.visits)
        return self.token_bytes + records + sum(h.prompt.nbytes for h in self._histories.values())

    def responses(self, prompt: Sequence[int]) -> list[Response]:
        """The kept responses to a prompt, oldest first; empty for an unseen one."""
        return [
            Response(
                tokens=tokens.astype(np.int32),
                reward=float(record["reward"]),
                policy_version=int(record["policy_version"]),
                step=visit.step,
                sample=int(record["sample"]),
                noise=int(record["noise"]),
            )
            for visit in self._find(prompt)[1].visits
            for tokens, record in zip(visit.split(), visit.records_R, strict=True)
        ]

    def add(self, prompt: Sequence[int], responses: Iterable[Response]) -> None:
        """Adds one visit's responses to a prompt."""
        # Sorted, because a deferred rollout may arrive after those of a later step.
        new = sorted(responses, key=lambda r: r.step)
        if not new:
            return
        key, known = self._find(prompt)
        visits = {v.step: v for v in known.visits}
        records = [(r.reward, r.policy_version, r.noise, len(r.tokens), r.sample) for r in new]
        tokens_T = np.concatenate([np.asarray(r.tokens, np.int32) for r in new])
        for visit in _visits(np.array([r.step for r in new]), np.array(records, _RECORD), tokens_T):
            visits[visit.step] = visits[visit.step].joined(visit) if visit.step in visits else visit
        kept = _History(known.prompt, tuple(visits[step] for step in sorted(visits)[-self.depth :]))
        self._tokens += kept.tokens - known.tokens
        self._histories[key] = kept
        self._histories.move_to_end(key)
        while self._tokens > self.max_tokens and len(self._histories) > 1:
            _, dropped = self._histories.popitem(last=False)
            self._tokens -= dropped.tokens
            self.evicted_prompts += 1

    def query(
        self,
        prompts: Sequence[Sequence[int]],
        group_slots: int,
        response_slots: int,
        token_slots: int,
        weight: str = "count",
    ) -> HistoryBlock:
        """The histories of a batch's prompts for drafting, one group each; all empty where nothing is known.

        The shape depends on the arguments alone, so that the engine compiles for one. Responses come most recent
        visit first; the oldest are left out where there are more than `response_slots`, and what is longer than
        `token_slots` is cut. `weight` says how their votes count: see `vote_weight`.

        Returns:
          tokens_GRP: [group_slots, response_slots, MAX_MATCH + token_slots], the others [group_slots, response_slots]

        Raises:
          ValueError: more prompts than group_slots, or an unknown weight.
        """
        if group_slots < len(prompts):
            raise ValueError(f"query: {len(prompts)} prompts do not fit {group_slots} group_slots")
        shape = (group_slots, response_slots)
        tokens_GRP = np.full((*shape, MAX_MATCH + token_slots), SEPARATOR, np.int32)
        records_GR = np.zeros(shape, _RECORD)
        records_GR["sample"], records_GR["noise"] = -1, UNKNOWN_NOISE
        age_GR = np.zeros(shape, np.int64)
        filled_GR = np.zeros(shape, bool)
        for g, prompt in enumerate(prompts):
            history = self._find(prompt)[1]
            filled = 0
            for visit in reversed(history.visits):
                texts, records = visit.newest(response_slots - filled)
                rows = slice(filled, filled + len(texts))
                records_GR[g, rows], age_GR[g, rows] = records, history.visits[-1].step - visit.step
                # Row by row is as fast as one masked scatter a visit (14 us for 16 rows), and cuts with ease.
                for row, text in zip(tokens_GRP[g, rows, MAX_MATCH:], texts, strict=True):
                    row[: len(text)] = text[:token_slots]
                filled += len(texts)
                if filled == response_slots:
                    break
            tail = history.prompt[-MAX_MATCH:]
            tokens_GRP[g, :filled, MAX_MATCH - len(tail) : MAX_MATCH] = tail
            filled_GR[g, :filled] = True
        weight_GR = np.where(filled_GR, vote_weight(records_GR["reward"], age_GR, weight), 0.0).astype(np.float32)
        # Copies out of the records: a strided field would keep all of them alive.
        return HistoryBlock(tokens_GRP, weight_GR, records_GR["sample"].copy(), records_GR["noise"].copy())

    def to_arrays(self) -> dict[str, np.ndarray]:
        """A snapshot as flat arrays; empty when the store is."""
        if not self._histories:
            return {}
        histories = self._histories.values()
        visits = [v for h in histories for v in h.visits]
        records_R = np.concatenate([v.records_R for v in visits])
        return {
            "prompt_tokens": np.concatenate([h.prompt for h in histories]),
            "prompt_lengths": np.array([len(h.prompt) for h in histories], np.int64),
            "responses_per_prompt": np.array([sum(len(v.records_R) for v in h.visits) for h in histories], np.int64),
            # A leading token keeps the array from ever being empty.
            "tokens": np.concatenate([np.array([NO_TOKEN], np.int32), *(v.tokens_T for v in visits)]),
            "lengths": records_R["length"].astype(np.int64),
            "rewards": records_R["reward"].copy(),
            "policy_versions": records_R["policy_version"].copy(),
            "steps": np.repeat(np.array([v.step for v in visits], np.int64), [len(v.records_R) for v in visits]),
            "samples": records_R["sample"].astype(np.int64),
            "noises": records_R["noise"].copy(),
        }

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the contents by a snapshot of `to_arrays`, order included."""
        self._histories.clear()
        self._tokens = 0
        if not arrays:
            return
        records_R = np.zeros(len(arrays["lengths"]), _RECORD)
        for field, name in (
            ("reward", "rewards"),
            ("policy_version", "policy_versions"),
            ("noise", "noises"),
            ("length", "lengths"),
            ("sample", "samples"),
        ):
            records_R[field] = arrays[name]
        ends = np.cumsum(arrays["responses_per_prompt"])
        token_ends = np.cumsum(arrays["lengths"])[ends - 1]
        for prompt, steps, records, tokens in zip(
            np.split(arrays["prompt_tokens"], np.cumsum(arrays["prompt_lengths"])[:-1]),
            np.split(arrays["steps"], ends[:-1]),
            np.split(records_R, ends[:-1]),
            np.split(arrays["tokens"][1:], token_ends[:-1]),
            strict=True,
        ):
            history = _History(np.array(prompt, np.int32), tuple(_visits(steps, records, tokens)))
            self._histories[prompt_id(prompt)] = history
            self._tokens += history.tokens

    def _find(self, prompt: Sequence[int]) -> tuple[int, _History]:
        """(id of a prompt, its history).

        Raises:
          RuntimeError: the id is another prompt's.
        """
        prompt = np.array(prompt, np.int32)
        key = prompt_id(prompt)
        known = self._histories.get(key)
        if known is None:
            return key, _History(prompt, ())
        if not np.array_equal(known.prompt, prompt):
            raise RuntimeError(f"history: two different prompts share the 64-bit id {key:#x}")
        return key, known
