"""Is every token of a rollout the one that plain decoding draws? An independent answer.

The oracle knows nothing of caches, batches, drafts or chunks: it runs the model over a whole sequence, and draws the
token after each prefix in NumPy, in float64, from the definition: temperature, top-k, top-p by sorting, and the race
of the position's noise. That each token follows from its prefix is, by induction, that the sequence is the one which
decoding one token at a time gives.

Suffix letters: N rollouts, S positions, T response positions, V vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rhyme_jax.history.store import HistoryStore, Response, prompt_id
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.budget import WINDOWS, CostTable
from rhyme_jax.histospec.drafts import SOURCES, DraftRules
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.rollouts import Request, Rollouts
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models import decoder
from rhyme_jax.models.config import DecoderConfig

NEAR_TIE = 1e-5  # relative gap of the two fastest tokens, below which rounding may choose either
ROWS = 32  # sequences scored together


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token that is not the oracle's."""

    case: str
    rollout: int
    position: int
    token: int
    oracle: int
    gap: float  # by how much the oracle's token was ahead, relative; for greedy decoding, in logits

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@functools.partial(jax.jit, static_argnames="model")
def sequence_logits(params: dict, model: DecoderConfig, tokens_NS: jax.Array) -> jax.Array:
    """Logits [N, S, V] that follow each token, by one forward pass without a cache."""
    positions_NS = jnp.broadcast_to(jnp.arange(tokens_NS.shape[1]), tokens_NS.shape)
    return decoder.logits(params, model, decoder.forward(params, model, tokens_NS, positions_NS)[0])


def probabilities(logits_TV: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, in float64. Ties at a boundary stay together. Not normalized: only ratios matter."""
    x_TV = np.asarray(logits_TV, np.float64) / sampling.temperature
    p_TV = np.exp(x_TV - x_TV.max(-1, keepdims=True))
    if 0 < sampling.top_k < p_TV.shape[-1]:
        p_TV = np.where(p_TV >= np.sort(p_TV, axis=-1)[:, -sampling.top_k, None], p_TV, 0)
    if sampling.top_p < 1:
        order_TV = np.sort(p_TV, axis=-1)[:, ::-1]
        mass_TV = np.cumsum(order_TV, axis=-1)
        kept_T = (mass_TV < sampling.top_p * mass_TV[:, -1:] * (1 - 1e-12)).sum(-1)
        p_TV = np.where(p_TV >= order_TV[np.arange(len(order_TV)), kept_T, None], p_TV, 0)
    return p_TV


def exponentials(keys_T2: np.ndarray, size: int) -> np.ndarray:
    """The noise of each vocabulary entry, from the definition: MurmurHash3's finalizer once for each key word."""

    def finalize(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(16))

    keys_T2 = np.asarray(keys_T2, np.uint32)
    index_V = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits_TV = finalize(finalize(index_V + keys_T2[:, :1]) + keys_T2[:, 1:])
    uniform_TV = (bits_TV.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log1p(-np.minimum(uniform_TV.astype(np.float64), 1 - 2**-24))


def check(
    params: dict,
    model: DecoderConfig,
    sampling: SamplingParams,
    seed: int,
    requests: list[Request],
    rollouts: Rollouts,
    case: str = "",
) -> list[Difference]:
    """The tokens of some rollouts that are not the oracle's."""
    words = np.array([r.noise for r in requests], np.uint32)
    prompts = noise.prompt_words([r.prompt_id for r in requests])
    keys_N2 = noise.row_keys(seed, words, prompts, np.array([r.sample for r in requests], np.int32))
    slots = rollouts.log_prob_NT.shape[1]
    keys_NT2 = np.asarray(noise.position_keys(keys_N2, jnp.broadcast_to(jnp.arange(slots), (len(requests), slots))))
    differences = []
    for first in range(0, len(requests), ROWS):
        chunk_NS = rollouts.tokens_NS[first : first + ROWS]
        padded_NS = np.zeros((ROWS, chunk_NS.shape[1]), np.int32)
        padded_NS[: len(chunk_NS)] = chunk_NS
        logits_NSV = np.asarray(sequence_logits(params, model, padded_NS))
        for n in range(first, min(first + ROWS, len(requests))):
            start, tokens_T = rollouts.prompt_length_N[n], rollouts.response(n)
            logits_TV = logits_NSV[n - first, start - 1 : start - 1 + len(tokens_T)]
            if sampling.temperature == 0:
                scores_TV, relative = logits_TV.astype(np.float64), False
            else:
                scores_TV = probabilities(logits_TV, sampling)
                scores_TV, relative = scores_TV / exponentials(keys_NT2[n, : len(tokens_T)], model.vocab_size), True
            oracle_T = scores_TV.argmax(-1)
            for t in np.flatnonzero(oracle_T != tokens_T):
                best, have = scores_TV[t, oracle_T[t]], scores_TV[t, tokens_T[t]]
                gap = float((best - have) / best if relative else best - have)
                differences.append(Difference(case, n, int(t), int(tokens_T[t]), int(oracle_T[t]), gap))
    return differences


SAMPLINGS = tuple(
    SamplingParams(temperature, top_k, top_p)
    for temperature in (1.0, 0.7, 1.3, 0.0)
    for top_k, top_p in ((0, 1.0), (8, 1.0), (0, 0.9), (8, 0.9))
    if temperature > 0 or (top_k, top_p) == (0, 1.0)
)


@dataclasses.dataclass(frozen=True)
class Report:
    compared: int
    drafted: int  # tokens that came from accepted drafts
    differences: list[Difference]
    cases: int

    @property
    def near_ties(self) -> list[Difference]:
        return [d for d in self.differences if d.near_tie]

    @property
    def wrong(self) -> list[Difference]:
        return [d for d in self.differences if not d.near_tie]


def campaign(
    params: dict,
    model: DecoderConfig,
    eos_ids: tuple[int, ...],
    prompts: list[np.ndarray],
    mesh: Mesh,
    tokens: int,
    *,
    samples: int = 4,
    budget: int = 48,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compares at least `tokens` tokens of drafted rollouts with the oracle.

    Each sampling has an engine whose other choices change from one to the next, so that together they go through
    sources, windows, draft buckets, refill and compaction; within one, noise modes and K. The history of each
    rollout is made of the rollout before, whole and spoiled, so that drafts are right, wrong and in between.
    """
    compared = drafted = cases = 0
    differences: list[Difference] = []
    sources = [s for n in (3, 2, 1) for s in itertools.combinations(SOURCES[:3], n)]
    engines = []
    for number, sampling in enumerate(SAMPLINGS):
        config = EngineConfig(
            sampling,
            eos_ids,
            draft_buckets=((1, 4), (1, 8), (1, 2, 16), (1, 3, 5))[number % 4],
            rules=DraftRules(
                sources[number % len(sources)], min_match=1 + number % 4, min_prob=(0.0, 0.1, 0.5)[number % 3]
            ),
            window=WINDOWS[number % len(WINDOWS)],
            by_length=number % 2 == 1,
            chunk=(32, 7, 16)[number % 3],
            max_rows=(256, 16)[number % 2],  # 16: most requests wait for a row
            prompt_slots=max(map(len, prompts)),
        )
        # Drafts look cheap, so that they are verified whether or not they pay.
        engines.append(RolloutEngine(model, config, mesh, seed, CostTable(assumed=0.02)))
    turn = 0
    while compared < tokens:
        for engine in engines:
            for name, requests, history in _rounds(engine, params, prompts, samples, budget, turn):
                rollouts = engine.generate(params, requests, history)
                case = f"{engine.config.sampling}, {'+'.join(engine.config.rules.sources)}, {name}"
                differences += check(params, model, engine.config.sampling, seed, requests, rollouts, case)
                compared += rollouts.generated
                drafted += int(rollouts.drafted_NT.sum())
                cases += 1
            progress(f"{compared} tokens compared, {drafted} of them drafted, {len(differences)} differ")
        turn += 1
    return Report(compared, drafted, differences, cases)


def _rounds(engine: RolloutEngine, params, prompts, samples: int, budget: int, turn: int) -> Iterator[tuple]:
    """(name, requests, history) of drafted rollouts under fresh and under coupled noise."""
    rng = np.random.default_rng(turn)
    for kind in noise.KINDS:
        coupled = noise.coupled_word(0, turn, 1)
        store = HistoryStore(2, 10**9)
        for step in (2 * turn, 2 * turn + 1):
            word = coupled if kind == "coupled" else noise.fresh_word(step)
            requests = [
                Request(p, prompt_id(p), i, word, g, budget - (g + i) % 5, expected_length=float(5 * g))
                for g, p in enumerate(prompts)
                for i in range(samples)
            ]
            if step % 2:
                yield kind, requests, store.query(prompts, len(prompts), 2 * samples, budget, "reward")
                continue
            earlier = engine.generate(params, requests)
            for g, prompt in enumerate(prompts):
                group = range(g * samples, (g + 1) * samples)
                responses = [(n, _spoiled(earlier.response(n), rng, g % 4 / 20)) for n in group]
                store.add(
                    prompt,
                    [Response(r, rng.random(), 0, step, requests[n].sample, word) for n, r in responses if g % 5],
                )


def _spoiled(tokens: np.ndarray, rng, share: float) -> np.ndarray:
    """The tokens, some of them replaced, some left out, some twice."""
    out = []
    for token in tokens:
        what = rng.random()
        out += [token, token] if what < share / 3 else [] if what < share / 1.5 else [token]
        if what > 1 - share / 3:
            out[-1] = rng.choice(tokens)
    return np.array(out, np.int32)
