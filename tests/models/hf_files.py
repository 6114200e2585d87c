"""A small model in the files of Hugging Face, for tests that read, write and break them."""

import json

import jax
import numpy as np

from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import abstract_params

BASE = DecoderConfig(
    vocab_size=40,
    width=16,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope_theta=500.0,
    norm_eps=1e-6,
    max_positions=64,
)


def random_params(config):
    """Every parameter random, biases and norms too, so that no two can be swapped unnoticed."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), abstract_params(config))


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**value, **changes}.items() if v != "DELETE"}))


def one_line(error):
    assert "\n" not in str(error.value)
