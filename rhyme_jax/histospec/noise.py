"""The randomness of a rollout: a function of where a token stands, and of nothing else.

The token at response position t of sample i of prompt p in step s is drawn with noise keyed by
(seed, s, p, i, t). Batch packing, slots, devices, chunking, draft length and draft content, migration and resume
therefore cannot change a rollout. Each key is folded in, never carried.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

IMPL = "threefry2x32"  # named, so that a changed jax default cannot change a rollout; equal on every backend


@functools.partial(jax.jit, static_argnames="seed")
def row_keys(seed: int, step_B: jax.Array, prompt_B2: jax.Array, sample_B: jax.Array) -> jax.Array:
    """Key data [B, 2] (uint32) of each row.

    Args:
      seed: the run's rollout seed.
      step_B: int32 step in which the row is sampled.
      prompt_B2: uint32, low and high word of the 64-bit prompt id (see `prompt_words`).
      sample_B: int32 index of the row within its prompt's group.
    """
    root = jax.random.key(seed, impl=IMPL)

    def key(step, words, sample):
        k = root
        for word in (step, words[0], words[1], sample):
            k = jax.random.fold_in(k, word)
        return jax.random.key_data(k)

    return jax.vmap(key)(step_B, prompt_B2, sample_B)


def prompt_words(prompt_ids) -> np.ndarray:
    """64-bit prompt ids as uint32 words [B, 2], low word first."""
    ids = np.asarray(prompt_ids, np.uint64)
    return np.stack([ids & np.uint64(0xFFFFFFFF), ids >> np.uint64(32)], axis=-1).astype(np.uint32)


def position_keys(key_B2: jax.Array, position_BK: jax.Array) -> jax.Array:
    """Two words (uint32 [B, K, 2]) for each response position: the row's key with the position folded in."""

    def words(key_data, position):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=IMPL), position))

    return jax.vmap(jax.vmap(words, in_axes=(None, 0)))(key_B2, position_BK.astype(jnp.uint32))


def exponentials(keys: jax.Array, size: int) -> jax.Array:
    """Independent standard exponential noise for each entry of a vocabulary: float32 [..., size], all positive.

    A counter-based hash of (key words, index): MurmurHash3's 32-bit finalizer, once for each word. Threefry over a
    vocabulary of 49,152 costs about eight times as much, a good part of a forward pass on CPU; the keys themselves
    are still threefry's.

    -log1p(-u) rather than -log(u): the smallest values decide a race, and float32 is finest there. They reach down
    to 1e-10, so tokens of any probability that matters keep their exact share.

    Args:
      keys: uint32 [..., 2].
    """
    index = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits = _finalize(_finalize(index + keys[..., :1]) + keys[..., 1:])
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2**-24))  # the largest bits round to 1, whose noise would be infinite


def _finalize(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
