"""A slow, independent decoder to compare the engine with: no cache, no drafts, no batch, one token at a time.

It shares with the engine only the forward pass over a whole sequence and the uniform numbers of `noise`; the
distribution and the draw are plain float64 NumPy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rhyme_jax.histospec import noise
from rhyme_jax.histospec.engine import Request
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models import decoder

PAD = 128  # sequences are padded to a multiple of this, so that the forward pass compiles once or twice


@functools.partial(jax.jit, static_argnames="model")
def sequence_logits(params, model, tokens_BS):
    """Logits [B, S, V] that follow each token, by one forward pass without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    return decoder.logits(params, model, decoder.forward(params, model, tokens_BS, positions)[0])


def next_logits(params, model, tokens) -> np.ndarray:
    """Logits [V] of the token after `tokens`. What follows in the padding cannot matter: attention is causal."""
    padded = np.zeros((1, -(-len(tokens) // PAD) * PAD), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(sequence_logits(params, model, padded))[0, len(tokens) - 1]


def filtered_probabilities(logits, sampling: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p by sorting, in float64. Ties at a boundary stay together."""
    x = np.asarray(logits, np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if sampling.top_k and sampling.top_k < len(p):
        p = np.where(p >= np.sort(p)[-sampling.top_k], p, 0)
        p /= p.sum()
    if sampling.top_p < 1:
        order = np.sort(p)[::-1]
        kept = np.searchsorted(np.cumsum(order), sampling.top_p * (1 - 1e-12)) + 1
        p = np.where(p >= order[min(kept, len(p)) - 1], p, 0)
        p /= p.sum()
    return p


def draw(logits, u: float, sampling: SamplingParams) -> int:
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    ends = np.cumsum(filtered_probabilities(logits, sampling))
    return int(np.argmax(ends > u * ends[-1]))


def near_draws(logits, u: float, sampling: SamplingParams, tolerance: float = 1e-5) -> set[int]:
    """The tokens that a rounding error of `tolerance` may choose between: one, except on a knife's edge."""
    if sampling.temperature == 0:
        return set(np.flatnonzero(logits >= np.max(logits) - tolerance).tolist())
    shifts = (-tolerance, 0.0, tolerance)
    masses = {min(1.0, max(tolerance, sampling.top_p + e)) for e in shifts} if sampling.top_p < 1 else {1.0}
    return {
        draw(logits, min(max(u + d, 0.0), 1 - 1e-9), dataclasses.replace(sampling, top_p=p))
        for d in shifts
        for p in masses
    }


def uniforms(seed: int, request: Request) -> np.ndarray:
    """The uniform numbers [budget] of a request's response positions."""
    key = noise.row_keys(
        seed,
        np.array([request.step], np.int32),
        noise.prompt_words([request.prompt_id]),
        np.array([request.sample], np.int32),
    )
    slots = -(-request.budget // PAD) * PAD
    return np.asarray(noise.position_uniforms(key, jnp.arange(slots)[None]))[0, : request.budget]


def roll_out(params, model, sampling: SamplingParams, eos_ids, seed: int, request: Request) -> list[int]:
    """The response to one request."""
    tokens, response = [int(t) for t in request.prompt], []
    for u in uniforms(seed, request):
        token = draw(next_logits(params, model, tokens + response), float(u), sampling)
        response.append(token)
        if token in eos_ids:
            break
    return response
