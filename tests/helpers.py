"""Small models and requests that several tests share."""

import jax
import numpy as np

from rhyme_jax.history.store import prompt_id
from rhyme_jax.histospec.rollouts import Request
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import make_mesh

SMALL = DecoderConfig(
    vocab_size=40, width=32, layers=2, q_heads=4, kv_heads=2, head_dim=8, mlp_width=64, max_positions=256
)


def one_device():
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


def random_prompts(count: int, vocab_size: int, seed: int, low: int = 3, high: int = 14) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


def group_requests(prompts, samples: int, word, budget, expected_length=0.0) -> list[Request]:
    """`samples` requests for each prompt. `word` is a noise word or a function of the sample's index; `budget` and
    `expected_length` are numbers or functions of the request's index.
    """

    def value(option, index):
        return option(index) if callable(option) else option

    return [
        Request(
            prompt=p,
            prompt_id=prompt_id(p),
            sample=i,
            noise=value(word, i),
            group=g,
            budget=value(budget, g * samples + i),
            expected_length=value(expected_length, g * samples + i),
        )
        for g, p in enumerate(prompts)
        for i in range(samples)
    ]
