"""A slow, independent decoder to compare the engine with: no cache, no drafts, no batch, one token at a time.

It shares with the engine only the forward pass over a whole sequence and the key words of `noise`; the noise made
of them, the distribution and the draw are plain NumPy, in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rhyme_jax.histospec import noise
from rhyme_jax.histospec.rollouts import Request
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


def finalize(x) -> np.ndarray:
    """MurmurHash3's fmix32, of uint32."""
    x = np.asarray(x, np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def noise_bits(keys, size: int) -> np.ndarray:
    """The hash of each vocabulary entry: uint32 [..., size]."""
    keys = np.asarray(keys, np.uint32)
    counter = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return finalize(finalize(counter + keys[..., :1]) + keys[..., 1:])


def exponentials(keys, size: int) -> np.ndarray:
    """Exponential times, float64 [..., size], of uniform numbers rounded to float32 as documented."""
    uniform = (noise_bits(keys, size).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log1p(-np.minimum(uniform.astype(np.float64), 1 - 2**-24))


def forced_key(index: int, bits: int) -> np.ndarray:
    """A key [2] under which the hash of the entry `index` is `bits`: fmix32, which is a bijection, undone."""
    mask = 0xFFFFFFFF
    x = bits ^ (bits >> 16)
    x = x * pow(0xC2B2AE35, -1, 2**32) & mask
    x ^= (x >> 13) ^ (x >> 26)
    x = x * pow(0x85EBCA6B, -1, 2**32) & mask
    x ^= x >> 16
    return np.array([-index * 0x9E3779B9 & mask, x], np.uint32)  # the inner hash is then fmix32(0) = 0


def draw(logits, key, sampling: SamplingParams) -> int:
    """The winner of the race. A token of probability 0 never wins."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    p = filtered_probabilities(logits, sampling)
    return int(np.argmax(np.where(p > 0, p / exponentials(key, len(p)), -1)))


def near_draws(logits, key, sampling: SamplingParams, tolerance: float = 1e-5) -> set[int]:
    """The tokens that a rounding error of `tolerance` may choose between: one, except where the two fastest all but
    tie, or top-p all but reaches its mass.
    """
    if sampling.temperature == 0:
        return set(np.flatnonzero(logits >= np.max(logits) - tolerance).tolist())
    near, times = set(), exponentials(key, len(logits))
    shifts = (-tolerance, 0.0, tolerance)
    for top_p in {min(1.0, max(tolerance, sampling.top_p + e)) for e in shifts} if sampling.top_p < 1 else {1.0}:
        scores = filtered_probabilities(logits, dataclasses.replace(sampling, top_p=top_p)) / times
        near |= set(np.flatnonzero(scores >= scores.max() * (1 - tolerance)).tolist())
    return near


def position_keys(seed: int, request: Request) -> np.ndarray:
    """The key words [budget, 2] of a request's response positions."""
    key = noise.row_keys(
        seed,
        np.array([request.noise], np.uint32),
        noise.prompt_words([request.prompt_id]),
        np.array([request.sample], np.int32),
    )
    slots = -(-request.budget // PAD) * PAD
    return np.asarray(noise.position_keys(key, jnp.arange(slots)[None]))[0, : request.budget]


def roll_out(params, model, sampling: SamplingParams, eos_ids, seed: int, request: Request) -> list[int]:
    """The response to one request."""
    tokens, response = [int(t) for t in request.prompt], []
    for key in position_keys(seed, request):
        token = draw(next_logits(params, model, tokens + response), key, sampling)
        response.append(token)
        if token in eos_ids:
            break
    return response
