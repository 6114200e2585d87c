"""From logits to a token: temperature, then top-k, then top-p, in float32, in one function for every path.

The draw is an exponential race: each token waits an exponential time at a rate of its probability, and the first
to arrive is the sample. (It is the Gumbel-max trick, Gumbel 1954, before taking logarithms.) Each token's time
depends on its own probability alone, so rounding differences between two ways of computing the same logits matter
only where the two fastest tokens all but tie. An inverse-CDF draw is cheaper, but shifts every later boundary with
every earlier error: with logits over 49,152 tokens disturbed by 1e-4 (1e-5), 396 (95) of 10,000 draws changed, and
1 (0) of the races.

Suffix letters: V vocabulary; `...` any leading axes (rows, positions).
"""

import dataclasses

import jax
import jax.numpy as jnp

from rhyme_jax.errors import InputError
from rhyme_jax.histospec.noise import exponentials

BLOCK = 256  # vocabulary entries among which a maximum is taken first


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


def draw(logits: jax.Array, keys: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples one token per position.

    Args:
      logits: float32 [..., V].
      keys: uint32 [..., 2], see `noise.position_keys`; unused when greedy.

    Returns:
      token: int32 [...]; never one of probability zero.
      log_prob: float32 [...], of the token under softmax(logits / temperature), which is what a learner
        recomputes. 0 when greedy: a certain choice.
      behaviour_log_prob: float32 [...], of the token under the distribution it was drawn from, top-k and top-p
        included. Equal to log_prob when neither is on.
    """
    if params.temperature == 0:
        token = _argmax(logits)
        return token, jnp.zeros(token.shape, jnp.float32), jnp.zeros(token.shape, jnp.float32)
    scaled = logits.astype(jnp.float32) / params.temperature
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    kept = _filter(weights, params)
    # The most likely token has weight 1, so the winner's speed is positive, and no token of weight 0 ever wins.
    token = _argmax(kept / exponentials(keys, kept.shape[-1]))
    log_weight = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0] - jnp.max(scaled, axis=-1)
    log_weight = jnp.minimum(log_weight, 0.0)  # the two terms are computed apart, and large logits may round apart
    behaviour_log_prob = log_weight - jnp.log(jnp.sum(kept, axis=-1))
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


def _argmax(scores: jax.Array) -> jax.Array:
    """`jnp.argmax` over the last axis, int32; ties go to the lowest index.

    The maximum of each block first, then the position inside the first best block: XLA's CPU backend vectorizes a
    maximum, but not an argmax (5 ms against 1.6 ms for a draw of 16 rows at 49,152 tokens).
    """
    size = scores.shape[-1]
    block = min(BLOCK, size)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, -size % block)]
    blocks = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], -1, block)
    best = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, best[..., None, None], axis=-2)[..., 0, :]
    return (best * block + jnp.argmax(inside, axis=-1)).astype(jnp.int32)
