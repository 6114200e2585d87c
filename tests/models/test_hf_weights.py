"""Weights of a Hugging Face directory: read back bit for bit, bad ones refused."""

import dataclasses
import json
import pathlib
import re
import shutil
import tracemalloc
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_files import BASE, edit_json, one_line, random_params
from safetensors.numpy import load_file, save_file

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.params import LEARNER_RULES, make_mesh, param_shardings

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"

CONFIGS = {
    "llama": BASE,
    "llama-untied": dataclasses.replace(BASE, tie_embeddings=False),
    "qwen2": dataclasses.replace(BASE, family="qwen2", qkv_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qk_norm=True),
}


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
        ({"model.layers.2.mlp.down_proj.weight": np.zeros(1, np.float32)}, "unexpected weight 'model.layers.2"),
        ({"a\nb": np.zeros(1, np.float32)}, r"unexpected weight 'a\\nb'"),
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


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "c:x", "a\\b", "a\0b", "a\nb", "é" * 128, 3, None]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_cannot_point_outside(file, sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": file})
    with pytest.raises(InputError, match=r"weight 'model.norm.weight' lies in .* not a plain file name") as error:
        hf_weights.load_params(sharded, hf_config.read_config(sharded))
    one_line(error)


def test_names_in_an_index_stay_on_one_line(sharded):
    index = sharded / "model.safetensors.index.json"
    edit_json(index, weight_map={"a\nb": "../x"})
    with pytest.raises(InputError, match=r"weight 'a\\nb' lies in '../x'") as error:
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


# --- shards onto devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(1, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_shards_hold_what_the_whole_holds(name, mesh_shape):
    """The oracle reads each tensor with safetensors' own reader, and lays it out as a whole."""
    config = hf_config.read_config(GOLDEN / name, param_dtype="bfloat16" if name == "qwen3" else "float32")
    shardings = param_shardings(config, make_mesh(*mesh_shape), LEARNER_RULES)
    placed = hf_weights.open_params(GOLDEN / name, config).load(shardings)
    tensors = {k: v for file in (GOLDEN / name).glob("*.safetensors") for k, v in load_file(file).items()}
    for slot in hf_weights.slots(config):
        leaf, sharding = placed, shardings
        for key in slot.path:
            leaf, sharding = leaf[key], sharding[key]
        want = jax.device_put(slot.from_hf(tensors[slot.hf_name]).astype(config.storage_dtype), sharding)
        assert leaf.sharding == sharding and leaf.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(want))
        for mine, theirs in zip(leaf.addressable_shards, want.addressable_shards, strict=True):
            assert mine.index == theirs.index and mine.device == theirs.device


def test_each_shard_is_read_once_and_one_at_a_time(monkeypatch):
    mesh = make_mesh(2, 2, 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    whole, seen, alive = np.arange(48.0, dtype=np.float32).reshape(8, 6), [], []

    class Part(np.ndarray):  # a plain array takes no weak reference to itself
        pass

    def read(index):
        assert not any(part() is not None for part in alive)
        seen.append(str(index))
        part = whole[index].copy().view(Part)
        alive.append(weakref.ref(part))
        return part

    def copied(part, device):
        return device_put(np.array(part, copy=True), device)

    device_put = jax.device_put
    monkeypatch.setattr(hf_weights.jax, "device_put", copied)  # as to another device: on CPUs it keeps the array
    array = hf_weights.place_shards(whole.shape, sharding, read)
    assert len(seen) == len(set(seen)) == 4  # eight devices, half of them with copies
    np.testing.assert_array_equal(np.asarray(array), whole)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (7, 3, 2), (1, 1)])
@pytest.mark.parametrize("block", [1, 4, 10**6])
def test_copies_in_blocks(shape, block):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    for view in (values, values.T, values[..., ::2]):
        copy = hf_weights._copied(view, np.dtype(np.float32), block)
        np.testing.assert_array_equal(copy, view.astype(np.float32))
        assert copy.flags.c_contiguous and copy.flags.owndata


def test_headers_are_checked_before_any_weight_is_read(saved, monkeypatch):
    stored = hf_weights.open_params(saved, BASE)
    (saved / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model.safetensors: has changed since its header was read"):
        stored.load()
    hf_weights.save_params(saved, random_params(BASE), BASE)
    monkeypatch.setattr(np, "memmap", lambda *_: pytest.fail("a weight was read"))
    replace_tensors(saved, **{DOWN: np.zeros((24, 16), np.float32)})
    with pytest.raises(InputError, match=rf"{DOWN} has shape"):
        hf_weights.open_params(saved, BASE)


def test_tensors_that_do_not_lie_at_a_multiple_of_their_size(saved):
    """Other writers may order them so; ours begins a new file."""
    tensors = load_file(saved / "model.safetensors")
    header, data = {}, b"\0"
    for name, value in tensors.items():
        entry = {"dtype": "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        header[name], data = entry, data + value.tobytes()
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps(header).encode()
    (saved / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    jax.tree.map(np.testing.assert_array_equal, hf_weights.load_params(saved, BASE), random_params(BASE))


# --- written in several files ---------------------------------------------------------------------------------


def stored(path) -> dict[str, np.ndarray]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def test_a_model_in_several_files(tmp_path):
    config, names = CONFIGS["qwen2"], set()
    params = random_params(config)
    hf_weights.save_params(tmp_path, params, config, shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3 and not list(tmp_path.glob("*.tmp"))
    for file in files:
        tensors = load_file(tmp_path / file)
        names |= set(tensors)
        assert sum(v.nbytes for v in tensors.values()) <= 4000
        assert all(index["weight_map"][name] == file for name in tensors)
        with hf_weights.safe_open(tmp_path / file, "numpy") as f:
            assert f.metadata() == {"format": "pt"}
    assert names == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in stored(tmp_path).values())
    jax.tree.map(np.testing.assert_array_equal, hf_weights.load_params(tmp_path, config), params)
    hf_weights.save_params(tmp_path, params, config)  # in one file again: nothing is left of the others
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, hf_weights.load_params(tmp_path, config), params)


def test_arrays_on_devices_are_gathered_one_by_one_and_not_kept(tmp_path):
    config = hf_config.read_config(GOLDEN / "qwen3")
    shardings = param_shardings(config, make_mesh(1, 4, 2), LEARNER_RULES)
    placed = hf_weights.open_params(GOLDEN / "qwen3", config).load(shardings)
    tracemalloc.start()
    try:
        hf_weights.save_params(tmp_path, placed, config)
        arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        kept = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)
    finally:
        tracemalloc.stop()
    assert kept < 0.1 * sum(x.nbytes for x in jax.tree.leaves(placed))
    original = stored(GOLDEN / "qwen3")
    assert stored(tmp_path).keys() == original.keys()
    for name, value in stored(tmp_path).items():
        np.testing.assert_array_equal(value, original[name])


def test_a_stream_is_written_as_it_comes(tmp_path):
    """Each tensor is let go before the next is asked for, and files end where bytes, header or alignment end."""
    alive = []

    def tensors():
        for i in range(700):
            assert not any(ref() is not None for ref in alive)
            dtype = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64][i % 4]
            value = np.full((i % 3, 3), i).astype(dtype)
            alive[:] = [weakref.ref(value)]
            yield f"layer.{i}" + "x" * 60, value
            del value

    hf_weights.write_tensors(tmp_path, tensors())
    files = stored(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and len(files) == 700
    for i, name in enumerate(f"layer.{i}" + "x" * 60 for i in range(700)):
        assert files[name].shape == (i % 3, 3) and (files[name] == i).all()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", np.zeros(2, np.float32)), ("a", np.zeros(2, np.float32))], "a comes twice"),
        ([("a", np.zeros(2, np.float32)), ("b", np.zeros(2, np.int32))], "b has dtype int32; supported: F64"),
        ([], "there are no tensors"),
    ],
)
def test_a_failed_stream_leaves_what_there_was(tensors, message, saved):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    with pytest.raises(ValueError, match=message):
        hf_weights.write_tensors(saved, iter(tensors))
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
