"""config.json: transformers' own files read right, bad ones refused."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.decoder import forward, logits
from rhyme_jax.models.params import abstract_params

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"

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
CONFIGS = {
    "llama": BASE,
    "llama-untied": dataclasses.replace(BASE, tie_embeddings=False),
    "qwen2": dataclasses.replace(BASE, family="qwen2", qkv_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qk_norm=True),
}


def random_params(config):
    """Every parameter random, biases and norms too, so that no two can be swapped unnoticed."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), abstract_params(config))


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**value, **changes}.items() if v != "DELETE"}))


def one_line(error):
    assert "\n" not in str(error.value)


@pytest.fixture
def saved(tmp_path):
    hf_weights.save_params(tmp_path, random_params(BASE), BASE)
    return tmp_path


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_of_transformers_own_files(name):
    """One file, two shards with an index, and bfloat16 weights, as tests/golden/make_families.py wrote them."""
    config = hf_config.read_config(GOLDEN / name)
    params = hf_weights.load_params(GOLDEN / name, config)
    golden = np.load(GOLDEN / name / "golden.npz")
    tokens = golden["tokens"]
    hidden, _ = forward(params, config, tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape))
    np.testing.assert_allclose(logits(params, config, hidden), golden["logits"], atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": "DELETE"}, {"kv_heads": 4}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"head_dim": "DELETE"}, {"head_dim": 4}),
        ({"rope_theta": "DELETE", "rms_norm_eps": "DELETE"}, {"rope_theta": 10_000.0, "norm_eps": 1e-6}),
        ({"tie_word_embeddings": "DELETE"}, {"tie_embeddings": False}),
        ({"max_position_embeddings": "DELETE"}, {"max_positions": 2048}),
        ({"rope_scaling": {"type": "default"}}, {}),
        ({"rope_theta": "DELETE", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, {"max_positions": 64}),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, {"qkv_bias": True}),
        ({"model_type": "qwen3", "head_dim": "DELETE"}, {"head_dim": 128, "qk_norm": True}),
    ],
)
def test_fields_left_out_take_transformers_defaults(changes, expected, saved):
    edit_json(saved / "config.json", **changes)
    config = hf_config.read_config(saved)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral' is not supported; supported: .*llama.*qwen2.*qwen3"),
        ({"model_type": "DELETE"}, "model_type=None"),
        ({"model_type": ["llama"]}, "model_type="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: \"silu\""),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type='llama3'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type='linear'"),
        ({"rope_parameters": 3}, "rope_parameters=3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"hidden_size": "DELETE"}, "hidden_size=missing"),
        ({"hidden_size": "16"}, "hidden_size='16': must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny'"),
        ({"num_key_value_heads": 3}, "kv_heads=3"),
        ({"head_dim": 3}, "head_dim=3"),
    ],
)
def test_configs_that_are_refused(changes, message, saved):
    edit_json(saved / "config.json", **changes)
    with pytest.raises(InputError, match=message) as error:
        hf_config.read_config(saved)
    one_line(error)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\udcff"])
def test_malformed_config_json(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"config.json") as error:
        hf_config.read_config(tmp_path)
    one_line(error)


def test_no_config_json(tmp_path):
    with pytest.raises(InputError, match=r"config.json: does not exist"):
        hf_config.read_config(tmp_path)


def test_a_config_its_family_cannot_say_is_not_written(tmp_path):
    config = dataclasses.replace(BASE, qkv_bias=True)
    with pytest.raises(InputError, match="qkv_bias=True: family 'llama' always has False"):
        hf_weights.save_params(tmp_path / "new", random_params(config), config)
    assert not (tmp_path / "new").exists()
