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


def position_uniforms(key_B2: jax.Array, position_BK: jax.Array) -> jax.Array:
    """One uniform in [0, 1) for each response position, float32 [B, K].

    A single uniform and an inverse-CDF draw are enough for an exact sample; Gumbel noise over the vocabulary
    would cost about half a forward pass at 49k tokens and 64 positions.
    """

    def uniform(key_data, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=IMPL), position))

    return jax.vmap(jax.vmap(uniform, in_axes=(None, 0)))(key_B2, position_BK.astype(jnp.uint32))
