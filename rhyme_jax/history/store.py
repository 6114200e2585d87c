"""HistoryStore: the responses that each prompt received in its last visits, as token ids.

Responses are kept with their reward, behaviour policy version and step; they are queried as padded arrays for
drafting, and saved as flat arrays (tokens plus offsets: Orbax refuses ragged and zero-size arrays).
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from rhyme_jax.buckets import bucket
from rhyme_jax.errors import InputError
from rhyme_jax.histospec.drafts import MAX_MATCH, NO_TOKEN, SEPARATOR, HistoryBlock


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


VOTE_WEIGHTS = ("reward", "count", "recency")
UNREWARDED = 0.1  # weight of a response without reward: where none has any, they still vote


def vote_weight(response: Response, weight: str, newest: int) -> float:
    """How much a response's vote on the next drafted token counts.

    "count": all alike (RhymeRL's released code). "reward": by reward, since a policy moves towards what was
    rewarded. "recency": halved with each training step before the prompt's `newest`.
    """
    if weight == "count":
        return 1.0
    if weight == "reward":
        return UNREWARDED + (max(response.reward, 0.0) if np.isfinite(response.reward) else 0.0)
    if weight == "recency":
        return 0.5 ** min(newest - response.step, 60)  # bounded: a weight of 0 would mean an empty row
    raise ValueError(f"vote_weight: unknown weight {weight!r}; there are {', '.join(VOTE_WEIGHTS)}")


class HistoryStore:
    """Responses by prompt, bounded in visits per prompt and in tokens overall.

    A *visit* is a step in which a prompt was rolled out; the last `depth` visits of each prompt are kept. When
    the total passes `max_tokens`, the least recently visited prompts go first; the newest always stays.
    """

    def __init__(self, depth: int, max_tokens: int):
        if depth < 1:
            raise InputError(f"history.depth={depth}: must be at least 1 epoch")
        if max_tokens < 1:
            raise InputError(f"history.max_tokens={max_tokens}: must be at least 1")
        self.depth, self.max_tokens = depth, max_tokens
        self.evicted_prompts = 0  # dropped for memory since the store was made
        self._tokens = 0
        self._responses: collections.OrderedDict[int, list[Response]] = collections.OrderedDict()  # oldest visit first
        self._prompts: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Number of prompts with a history."""
        return len(self._responses)

    @property
    def tokens(self) -> int:
        """Response tokens held."""
        return self._tokens

    def responses(self, prompt: Sequence[int]) -> list[Response]:
        """The kept responses to a prompt, oldest first; empty for an unseen one."""
        return list(self._responses.get(self._id(prompt), ()))

    def add(self, prompt: Sequence[int], responses: Iterable[Response]) -> None:
        """Adds one visit's responses to a prompt."""
        new = list(responses)
        if not new:
            return
        key = self._id(prompt)
        self._prompts.setdefault(key, np.array(prompt, np.int32))
        kept = self._responses.pop(key, [])
        steps = sorted({r.step for r in [*kept, *new]})[-self.depth :]
        # Sorted, because a deferred rollout may arrive after those of a later step.
        merged = sorted((r for r in [*kept, *new] if r.step in steps), key=lambda r: r.step)
        self._tokens += sum(len(r.tokens) for r in merged) - sum(len(r.tokens) for r in kept)
        self._responses[key] = merged
        while self._tokens > self.max_tokens and len(self._responses) > 1:
            oldest, dropped = self._responses.popitem(last=False)
            del self._prompts[oldest]
            self._tokens -= sum(len(r.tokens) for r in dropped)
            self.evicted_prompts += 1

    def query(self, prompts: Sequence[Sequence[int]], group_slots: int, weight: str = "count") -> HistoryBlock | None:
        """The histories of a batch's prompts for drafting, or None where none of them has any.

        Responses come most recent visit first. Their number is padded to a power of two and their length to 64,
        256, 1024, ..., so that the shapes that the engine compiles for are few. `weight` says how their votes count:
        see `vote_weight`.
        """
        found = [self._responses.get(self._id(p), []) for p in prompts]
        most = max((len(rs) for rs in found), default=0)
        if most == 0:
            return None
        longest = max(len(r.tokens) for rs in found for r in rs)
        shape = (group_slots, bucket(most, 1), MAX_MATCH + bucket(longest, 64, base=4))
        tokens_GRP = np.full(shape, SEPARATOR, np.int32)
        weight_GR = np.zeros(tokens_GRP.shape[:2], np.float32)
        for g, (prompt, rs) in enumerate(zip(prompts, found, strict=True)):
            tail = np.asarray(prompt, np.int32)[-MAX_MATCH:]
            for i, response in enumerate(reversed(rs)):
                tokens_GRP[g, i, MAX_MATCH - len(tail) : MAX_MATCH] = tail
                tokens_GRP[g, i, MAX_MATCH : MAX_MATCH + len(response.tokens)] = response.tokens
                weight_GR[g, i] = vote_weight(response, weight, newest=rs[-1].step)
        return HistoryBlock(tokens_GRP=tokens_GRP, weight_GR=weight_GR)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """A snapshot as flat arrays; empty when the store is."""
        if not self._responses:
            return {}
        items = [(key, r) for key, rs in self._responses.items() for r in rs]
        prompts = [self._prompts[key] for key in self._responses]
        return {
            "prompt_tokens": np.concatenate(prompts),
            "prompt_lengths": np.array([len(p) for p in prompts], np.int64),
            "responses_per_prompt": np.array([len(rs) for rs in self._responses.values()], np.int64),
            # A leading token keeps the array from ever being empty.
            "tokens": np.concatenate([np.array([NO_TOKEN], np.int32), *(r.tokens for _, r in items)]),
            "lengths": np.array([len(r.tokens) for _, r in items], np.int64),
            "rewards": np.array([r.reward for _, r in items], np.float64),
            "policy_versions": np.array([r.policy_version for _, r in items], np.int64),
            "steps": np.array([r.step for _, r in items], np.int64),
        }

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the contents by a snapshot of `to_arrays`, order included."""
        self._responses.clear()
        self._prompts.clear()
        self._tokens = 0
        if not arrays:
            return
        prompts = np.split(arrays["prompt_tokens"], np.cumsum(arrays["prompt_lengths"])[:-1])
        tokens = np.split(arrays["tokens"][1:], np.cumsum(arrays["lengths"])[:-1])
        responses = [
            Response(np.array(t, np.int32), float(reward), int(version), int(step))
            for t, reward, version, step in zip(
                tokens, arrays["rewards"], arrays["policy_versions"], arrays["steps"], strict=True
            )
        ]
        start = 0
        for prompt, count in zip(prompts, arrays["responses_per_prompt"], strict=True):
            key = prompt_id(prompt)
            self._prompts[key] = np.array(prompt, np.int32)
            self._responses[key] = responses[start : start + int(count)]
            start += int(count)
        self._tokens = sum(len(r.tokens) for r in responses)

    def _id(self, prompt: Sequence[int]) -> int:
        key = prompt_id(prompt)
        known = self._prompts.get(key)
        if known is not None and not np.array_equal(known, prompt):
            raise RuntimeError(f"history: two different prompts share the 64-bit id {key:#x}")
        return key
