"""The randomness of a rollout: a function of where a token stands, and of nothing else.

The token at response position t of sample i of prompt p is drawn with noise keyed by (seed, word, p, i, t). Batch
packing, slots, devices, chunking, draft length and draft content, migration and resume therefore cannot change a
rollout. Each key is folded in, never carried.

The *noise word* says which noise a rollout meets:

- fresh noise: the training step (and, above its bits, the round of dynamic sampling), so that no two share any;
- coupled noise: a round that the step is left out of, so that a prompt's i-th sample meets the same noise in every
  epoch of the round. The draw is a Gumbel-max race (`sampling`), so an unchanged policy repeats its response, and a
  slightly changed one mostly does: two policies at total variation distance d draw the same token with probability
  at least (1 - d) / (1 + d) (Daliri, Musco & Suresh 2024). Each rollout is still an exact sample of its own policy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

UNKNOWN_NOISE = -1  # a response whose noise is not on record; equal to no word
COUPLED = 1 << 31  # set in the words of coupled noise, and in no step's
KINDS = ("fresh", "coupled")

IMPL = "threefry2x32"  # named, so that a changed jax default cannot change a rollout; equal on every backend


@functools.partial(jax.jit, static_argnames="seed")
def row_keys(seed: int, word_B: jax.Array, prompt_B2: jax.Array, sample_B: jax.Array) -> jax.Array:
    """Key data [B, 2] (uint32) of each row.

    Args:
      seed: the run's rollout seed.
      word_B: uint32 noise words, `fresh_word` or `coupled_word`.
      prompt_B2: uint32, low and high word of the 64-bit prompt id (see `prompt_words`).
      sample_B: int32 index of the row within its prompt's group.
    """
    root = jax.random.key(seed, impl=IMPL)

    def key(noise_word, prompt, sample):
        k = root
        for word in (noise_word, prompt[0], prompt[1], sample):
            k = jax.random.fold_in(k, word)
        return jax.random.key_data(k)

    return jax.vmap(key)(word_B, prompt_B2, sample_B)


def fresh_word(step: int) -> int:
    """The noise word of a training step."""
    if not 0 <= step < COUPLED:
        raise ValueError(f"noise: step {step} is outside 0..2**31 - 1")
    return step


def coupled_word(epoch: int, sample: int, refresh_epochs: int) -> int:
    """The noise word of a prompt's sample in an epoch: the same for `refresh_epochs` epochs, then another.

    The samples of a group take turns: 1 / refresh_epochs of them meet new noise in each epoch. Which ones depends
    on their index alone; choosing by reward would bias the samples.

    Args:
      epoch: times the prompt was visited before.
      refresh_epochs: 0 never renews; 1 always does, which couples nothing.
    """
    if epoch < 0 or sample < 0 or refresh_epochs < 0:
        raise ValueError(
            f"noise: epoch={epoch}, sample={sample}, refresh_epochs={refresh_epochs}: none may be negative"
        )
    number = (epoch + sample) // refresh_epochs if refresh_epochs else 0
    if number >= COUPLED:
        raise ValueError(f"noise: round {number} is outside 0..2**31 - 1")
    return COUPLED | number


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
