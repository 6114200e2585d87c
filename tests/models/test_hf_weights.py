"""Weights of a Hugging Face directory: read back bit for bit, bad ones refused."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.config import DecoderConfig
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


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, param_dtype, tmp_path):
    config = dataclasses.replace(CONFIGS[name], param_dtype=param_dtype, dtype="bfloat16")
    params = random_params(config)
    hf_weights.save_params(tmp_path, params, config)
    assert hf_config.read_config(tmp_path, "bfloat16", param_dtype) == config
    jax.tree.map(np.testing.assert_array_equal, hf_weights.load_params(tmp_path, config), params)


def test_read_weights_are_cast_and_owned(saved):
    config = dataclasses.replace(BASE, param_dtype="bfloat16")
    for leaf in jax.tree.leaves(hf_weights.load_params(saved, config)):
        assert leaf.dtype == ml_dtypes.bfloat16
    half = {k: v.astype(np.float16) for k, v in load_file(saved / "model.safetensors").items()}
    save_file(half, saved / "model.safetensors")
    params = hf_weights.load_params(saved, BASE)
    np.testing.assert_array_equal(params["embed"], half["model.embed_tokens.weight"].astype(np.float32))
    assert params["embed"].dtype == np.float32


def test_eos_ids_are_written_for_transformers(tmp_path):
    hf_weights.save_params(tmp_path, random_params(BASE), BASE, eos_ids=(3, 1))
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [3, 1]


def replace_tensors(path, **changes):
    tensors = load_file(path / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DOWN: None}, rf"{DOWN} is missing \(expected shape \(16, 24\)\)"),
        ({DOWN: np.zeros((24, 16), np.float32)}, rf"{DOWN} has shape \(24, 16\), expected \(16, 24\)"),
        ({DOWN: np.zeros((16, 24), np.int8)}, f"{DOWN} has dtype I8; supported: F64, F32, F16, BF16"),
        ({"model.layers.2.mlp.down_proj.weight": np.zeros(1, np.float32)}, "unexpected weight model.layers.2"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, "unexpected weight .*q_proj.bias"),
    ],
)
def test_weights_that_do_not_fit(changes, message, saved):
    replace_tensors(saved, **changes)
    with pytest.raises(InputError, match=message) as error:
        hf_weights.load_params(saved, BASE)
    one_line(error)


def test_weights_that_transformers_ignores_too(saved):
    zeros = np.zeros((40, 16), np.float32)
    replace_tensors(saved, **{"lm_head.weight": zeros, "model.layers.0.self_attn.rotary_emb.inv_freq": zeros[0]})
    params = hf_weights.load_params(saved, BASE)
    assert "head" not in params and params["embed"].any()


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_weights(keep, saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model.safetensors: not a complete safetensors file") as error:
        hf_weights.load_params(saved, BASE)
    one_line(error)


def test_no_weights(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(InputError, match=re.escape("neither model.safetensors nor model.safetensors.index.json")):
        hf_weights.load_params(saved, BASE)


def test_a_claim_of_a_billion_layers_is_refused_at_once(saved):
    edit_json(saved / "config.json", num_hidden_layers=10**9)
    config = hf_config.read_config(saved)
    with pytest.raises(InputError, match=r"model.layers.2.* is missing"):
        hf_weights.load_params(saved, config)


@pytest.fixture
def sharded(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN / "qwen3", tmp_path / "qwen3"))


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "c:x", "a\\b", "a\0b", 3, None]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_cannot_point_outside(file, sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": file})
    with pytest.raises(InputError, match=r"model.norm.weight lies in .* not a plain file name") as error:
        hf_weights.load_params(sharded, hf_config.read_config(sharded))
    one_line(error)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map(weight_map, sharded):
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(InputError, match="has no weight_map"):
        hf_weights.load_params(sharded, hf_config.read_config(sharded))


def test_a_missing_shard_and_a_wrong_one(sharded):
    config, index = hf_config.read_config(sharded), sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, *_, last = sorted(set(weight_map.values()))
    edit_json(index, weight_map=dict.fromkeys(weight_map, last))
    with pytest.raises(InputError, match="is missing, though the index lists it here"):
        hf_weights.load_params(sharded, config)
    edit_json(index, weight_map=weight_map)
    (sharded / first).unlink()
    with pytest.raises(InputError, match=f"{first}: does not exist"):
        hf_weights.load_params(sharded, config)
