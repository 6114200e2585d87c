"""From logits to a token: temperature, then top-k, then top-p, in float32, in one function for every path.

Suffix letters: V vocabulary; `...` any leading axes (rows, positions).
"""

import dataclasses

import jax
import jax.numpy as jnp

from rhyme_jax.errors import InputError

BLOCK = 256  # vocabulary entries summed together before the inverse-CDF search


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Static: a change compiles anew."""

    temperature: float = 1.0  # 0 is greedy decoding
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # then keep the smallest set of most likely tokens with at least this mass

    def __post_init__(self):
        if not self.temperature >= 0:
            raise InputError(f"rollout.temperature={self.temperature}: must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise InputError(f"rollout.top_k={self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise InputError(f"rollout.top_p={self.top_p}: must lie in (0, 1]; 1 is off")

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


GREEDY = SamplingParams(temperature=0.0)


def draw(logits: jax.Array, uniform: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples one token per position by the inverse CDF.

    Args:
      logits: float32 [..., V].
      uniform: float32 [...] in [0, 1).

    Returns:
      token: int32 [...]; never one of probability zero.
      log_prob: float32 [...], of the token under softmax(logits / temperature), which is what a learner
        recomputes. 0 when greedy: a certain choice.
      behaviour_log_prob: float32 [...], of the token under the distribution it was drawn from, top-k and top-p
        included. Equal to log_prob when neither is on.
    """
    if params.temperature == 0:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32), jnp.zeros(token.shape, jnp.float32)
    scaled = logits.astype(jnp.float32) / params.temperature
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    kept = _filter(weights, params)
    token, kept_total = _inverse_cdf(kept, uniform)
    log_weight = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0] - jnp.max(scaled, axis=-1)
    behaviour_log_prob = log_weight - jnp.log(kept_total)
    log_prob = log_weight - jnp.log(jnp.sum(weights, axis=-1)) if params.filters else behaviour_log_prob
    return token, log_prob, behaviour_log_prob


def _filter(weights: jax.Array, params: SamplingParams) -> jax.Array:
    """Zeroes the weights outside top-k, then outside top-p of what is left. Equal weights stay together, so the
    kept set is a function of the distribution alone and not of token order.
    """
    if params.top_k and params.top_k < weights.shape[-1]:
        target = jnp.full(weights.shape[:-1], params.top_k, jnp.float32)
        weights = jnp.where(weights >= _threshold(weights, jnp.ones_like(weights), target), weights, 0.0)
    if params.top_p < 1:
        target = params.top_p * jnp.sum(weights, axis=-1)
        weights = jnp.where(weights >= _threshold(weights, weights, target), weights, 0.0)
    return weights


def _threshold(weights: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """The largest threshold [..., 1] for which the mass at or above it is at least target.

    Bisects the bit patterns of the weights, which order non-negative floats as integers: exact in 31 masked sums,
    without sorting the vocabulary. The most likely token always stays (its weight is 1, the upper end).
    """

    def halve(_, bounds):
        low, high = bounds  # mass at low reaches the target; above high it is not known to
        middle = low + (high - low + 1) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(weights >= threshold[..., None], mass, 0.0), axis=-1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    top = jax.lax.bitcast_convert_type(jnp.ones(target.shape, jnp.float32), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(top), top))
    return jax.lax.bitcast_convert_type(low, jnp.float32)[..., None]


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index whose cumulative weight exceeds uniform * total, and the total.

    Two levels: sums of blocks, then the cumulative sum of one block, so that no cumulative sum over the whole
    vocabulary is formed. A strict comparison passes over zero weights, also at uniform = 0. Where rounding
    leaves no index (the sums were added in another order), the last positive weight is taken.
    """
    size = weights.shape[-1]
    block = min(BLOCK, size)
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -size % block)])
    blocks = padded.reshape(*weights.shape[:-1], -1, block)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    total = ends[..., -1]
    target = uniform * total
    which = _first_above(ends, target, sums)
    start = jnp.take_along_axis(ends - sums, which[..., None], axis=-1)[..., 0]
    inside = jnp.take_along_axis(blocks, which[..., None, None], axis=-2)[..., 0, :]
    within = _first_above(jnp.cumsum(inside, axis=-1), target - start, inside)
    return (which * block + within).astype(jnp.int32), total


def _first_above(ends: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """First index with weight > 0 and ends > target; the last with weight > 0 where there is none."""
    hit = (ends > target[..., None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last)
