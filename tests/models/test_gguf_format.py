"""GGUF files against the Hugging Face route to the same weights; and a file that lies is refused, at once."""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import struct
import weakref

import gguf
import jax
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import CONFIGS, LLAMA, TOKENS, llama3_factors, write_gguf
from hf_files import random_params
from safetensors import safe_open

from rhyme_jax.errors import InputError
from rhyme_jax.models import gguf_format, gguf_header, hf_config, hf_weights
from rhyme_jax.models.gguf_format import load_gguf

SENTENCEPIECE = pathlib.Path(__file__).parents[1] / "golden" / "sentencepiece.json"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA, random_params(LLAMA))
    return path


def refused(path, cache, match):
    with pytest.raises(InputError, match=match) as error:
        load_gguf(path, cache_dir=cache)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_hugging_face_route(name, tmp_path, cache):
    config = CONFIGS[name]
    params = random_params(config)
    write_gguf(tmp_path / "m.gguf", config, params)
    hf_weights.save_params(tmp_path / "hf", params, config)
    got_config, got, tokenizer = load_gguf(tmp_path / "m.gguf", cache_dir=cache)
    assert got_config == config == hf_config.read_config(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, got, hf_weights.load_params(tmp_path / "hf", config))
    assert tokenizer.vocab_size == config.vocab_size


def dequantizable(kind):
    try:
        gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def random_bytes(rng, shape, kind):
    """Bytes of a tensor of any type: random ones, drawn again where a block's values are not finite."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // block, size), np.uint8)
    with np.errstate(all="ignore"):
        while (bad := ~np.isfinite(gguf.dequantize(blocks, kind)).all(axis=1)).any():
            blocks[bad] = rng.integers(0, 256, (bad.sum(), size), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


KINDS = [kind for kind in GGMLQuantizationType if dequantizable(kind)]


def test_every_quantisation(tmp_path, cache, monkeypatch):
    """One layer of each type, rows of q and k that change places included, equals `gguf.dequantize` bit for bit."""
    assert len(KINDS) >= 25
    monkeypatch.setattr(gguf_header, "_CHUNK", 1000)  # some rows at a time, the last ones fewer
    rng, path = np.random.default_rng(0), tmp_path / "m.gguf"
    config = dataclasses.replace(LLAMA, layers=len(KINDS), width=256, mlp_width=6, kv_heads=1)
    counted = []

    def encode(name, value):
        kind = KINDS[int(name.split(".")[1])] if name.startswith("blk.") and value.ndim == 2 else KINDS[0]
        if value.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            return value, GGMLQuantizationType.F32
        counted.append(kind)
        return random_bytes(rng, value.shape, kind), kind

    expected = write_gguf(path, config, random_params(config), encode)
    assert all(counted.count(kind) >= 5 for kind in KINDS)  # q, k, v, gate and up
    _, params, _ = load_gguf(path, cache_dir=cache)
    for keys, value in expected.items():
        got = params
        for key in keys:
            got = got[key]
        np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(value).view(np.uint32), str(keys))
    (entry,) = cache.iterdir()
    with safe_open(entry / "model.safetensors", "numpy") as f:
        for i, kind in enumerate(KINDS):
            stored = f.get_slice(f"model.layers.{i}.self_attn.q_proj.weight").get_dtype()
            assert stored == (kind.name if kind.name in ("F16", "BF16") else "F32")


def test_other_types_are_refused(tmp_path, cache):
    """Integers, float64, and what llama.cpp has only between its kernels."""
    others = [kind for kind in GGMLQuantizationType if kind not in KINDS]
    assert {"I8", "I16", "I32", "I64", "F64"} <= {kind.name for kind in others}
    config = dataclasses.replace(LLAMA, width=256)
    params = random_params(config)
    for kind in others:
        block, size = GGML_QUANT_SIZES[kind]
        norm = ("output_norm.weight", np.zeros(256 // block * size, np.uint8), kind)
        write_gguf(tmp_path / "m.gguf", config, params, skip=["output_norm.weight"], tensors=[norm])
        refused(tmp_path / "m.gguf", cache, f"output_norm.weight has type {kind.name}, which is not supported")


def test_weights_are_converted_one_at_a_time(written, cache, monkeypatch):
    values, alive = gguf_format.GgufFile.values, []

    def watched(self, name, order=None):
        alive[:] = [ref for ref in alive if ref() is not None]
        assert len(alive) <= 1  # the one that was just written
        value = values(self, name, order)
        alive.append(weakref.ref(value.base if value.base is not None else value))
        return value

    monkeypatch.setattr(gguf_format.GgufFile, "values", watched)
    load_gguf(written, cache_dir=cache)
    assert alive


def test_header_equals_that_of_the_gguf_package(written):
    ours, theirs = gguf_header.read_header(written), gguf.GGUFReader(written)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.start, info.size, info.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))


def test_a_file_with_a_sentencepiece_tokenizer(tmp_path, cache):
    """Llama 2's and Mistral's kind; the tokenizer itself is the matter of test_gguf_tokenizer.py."""
    golden = json.loads(SENTENCEPIECE.read_text(encoding="utf-8"))
    config = dataclasses.replace(LLAMA, vocab_size=len(golden["tokens"]))
    keys = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "padding_token_id")
    fields = [
        ("add_tokenizer_model", "llama"),
        ("add_token_list", golden["tokens"]),
        ("add_token_scores", golden["scores"]),
        ("add_token_types", golden["types"]),
        ("add_bos_token_id", 1),
        ("add_eos_token_id", 2),
        ("add_add_bos_token", True),
    ]
    skip = [f"tokenizer.ggml.{key}" for key in keys]
    write_gguf(tmp_path / "m.gguf", config, random_params(config), skip=skip, fields=fields)
    for _ in range(2):  # fresh, then from the cache
        got, _, tokenizer = load_gguf(tmp_path / "m.gguf", cache_dir=cache)
        assert got == config
        assert hf_config.read_config(gguf_format.convert(tmp_path / "m.gguf", cache)) == config
        for text, expected, decoded in golden["encoded"]:
            assert tokenizer.encode_prompt(text) == [1, *expected]
            assert tokenizer.decode(expected) == decoded


# --- cache ----------------------------------------------------------------------------------------------------


def test_converted_once_for_all_dtypes(written, cache, monkeypatch):
    config, params, _ = load_gguf(written, cache_dir=cache)
    monkeypatch.setattr(gguf_format, "_write", lambda *_: pytest.fail("converted again"))
    moved = written.rename(written.with_name("other.gguf"))  # the key is the contents, not the path
    again, low, _ = load_gguf(moved, "bfloat16", "bfloat16", cache_dir=cache)
    assert again == dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), params, low)
    assert len(list(cache.iterdir())) == 1


def test_other_contents_are_another_entry(written, cache):
    load_gguf(written, cache_dir=cache)
    write_gguf(written, CONFIGS["qwen2"], random_params(CONFIGS["qwen2"]))
    assert load_gguf(written, cache_dir=cache)[0].family == "qwen2"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_a_damaged_entry_is_made_anew(file, damage, written, cache):
    _, params, _ = load_gguf(written, cache_dir=cache)
    (entry,) = cache.iterdir()
    if damage == "delete":
        (entry / file).unlink()
    else:
        (entry / file).write_bytes((entry / file).read_bytes()[:50])
    _, again, _ = load_gguf(written, cache_dir=cache)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert list(cache.iterdir()) == [entry]


def test_default_cache_from_the_environment(written, cache, monkeypatch):
    monkeypatch.setenv("RHYME_JAX_CACHE", str(cache))
    load_gguf(written)
    assert len(list(cache.iterdir())) == 1


def test_a_second_process_that_was_first(written, cache, monkeypatch):
    """Both found no entry; the other one's directory appears just before ours is renamed."""
    rename = pathlib.Path.rename

    def race(self, target):
        pathlib.Path(target).mkdir()
        (pathlib.Path(target) / "theirs").touch()
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", race)
    (cache / "x").mkdir(parents=True)
    gguf_format._write(written, cache / "x" / "entry")
    assert [p.name for p in (cache / "x").rglob("*")] == ["entry", "theirs"]


def test_several_that_convert_at_once(written, cache, monkeypatch):
    """One does the work and the others wait for it. (Locks of one process's files keep apart its threads too.)"""
    write, calls = gguf_format._write, []
    monkeypatch.setattr(gguf_format, "_write", lambda *args: (calls.append(args), write(*args)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load_gguf(written, cache_dir=cache)[1], range(4)))
    assert len(calls) == 1 and len(list(cache.iterdir())) == 1
    for params in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, params, results[0])


def test_what_a_killed_conversion_left_is_removed(written, cache):
    load_gguf(written, cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.rename(entry.with_name(f"{entry.name}.abc"))
    load_gguf(written, cache_dir=cache)
    assert list(cache.iterdir()) == [entry]


def test_a_file_system_without_locks(written, cache, monkeypatch):
    def flock(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(gguf_format.fcntl, "flock", flock)
    load_gguf(written, cache_dir=cache)
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written(written, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot keep converted weights .*; set RHYME_JAX_CACHE"):
        load_gguf(written, cache_dir=tmp_path / "file")


def test_an_unknown_dtype_is_refused_before_any_work(written, cache):
    with pytest.raises(InputError, match=r"model.dtype='int8'"):
        load_gguf(written, "int8", cache_dir=cache)
    assert not cache.exists()


# --- refusals -------------------------------------------------------------------------------------------------


FACTORS = llama3_factors(CONFIGS["llama3-8"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "gpt-4o"}, "tokenizer.ggml.pre='gpt-4o' is not supported; supported: smollm, llama-bpe, "),
        ({"skip": ["tokenizer.ggml.pre"]}, "tokenizer.ggml.pre=None"),
        ({"skip": ["tokenizer.ggml.merges"]}, "tokenizer.ggml.merges=missing"),
        ({"skip": ["tokenizer.ggml.eos_token_id"]}, "tokenizer.ggml.eos_token_id=missing"),
        ({"skip": ["llama.block_count"]}, "llama.block_count=missing"),
        ({"skip": ["llama.attention.layer_norm_rms_epsilon"]}, "layer_norm_rms_epsilon=missing"),
        ({"skip": ["blk.1.ffn_up.weight"]}, r"blk.1.ffn_up.weight is missing \(expected shape \(64, 32\)\)"),
        ({"skip": ["blk.1.attn_norm.weight"]}, "blk.1.attn_norm.weight is missing"),
        ({"skip": ["token_embd.weight"]}, "token_embd.weight is missing"),
        ({"tensors": [("blk.0.attn_q.bias", np.zeros(64, np.float32))]}, "unexpected weight blk.0.attn_q.bias"),
        ({"tensors": [("rope_freqs.weight", np.zeros(8, np.float32))]}, "rope_freqs.weight .*not supported"),
        ({"tensors": [("rope_freqs.weight", np.full(7, 8, np.float32))]}, "rope_freqs.weight .*not supported"),
        ({"tensors": [("rope_freqs.weight", FACTORS * np.linspace(1, 1.0002, 8, dtype="f4"))]}, "Llama 3.1 to 3.3"),
        ({"fields": [("add_uint16", "split.count", 3)]}, "split.count=3: is one part of a model; join them"),
        ({"fields": [("add_array", "split.count", [1, 1])]}, "split.count="),
        ({"fields": [("add_array", "llama.expert_count", [8, 8])]}, "llama.expert_count="),
        ({"fields": [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]}, "rope.scaling.type='yarn'"),
        ({"fields": [("add_expert_count", 8)]}, "llama.expert_count=8"),
        ({"fields": [("add_sliding_window", 4096)]}, "llama.attention.sliding_window=4096"),
        ({"fields": [("add_rope_dimension_count", 4)]}, "llama.rope.dimension_count=4: only 16"),
        (
            {"skip": ["llama.block_count"], "fields": [("add_uint32", "llama.block_count", 2**32 - 1)]},
            "llama.block_count=4294967295: the file has only 20 weights",
        ),
        (
            {"skip": ["llama.attention.head_count"], "fields": [("add_head_count", [4, 4])]},
            "llama.attention.head_count=.*the same for all layers",
        ),
        (
            {"skip": ["tokenizer.ggml.model"], "fields": [("add_tokenizer_model", "bert")]},
            "tokenizer.ggml.model='bert' is not supported; supported: gpt2, llama",
        ),
        (
            {"skip": ["tokenizer.ggml.eos_token_id"], "fields": [("add_eos_token_id", 9999)]},
            f"eos_token_id=9999: there are {len(TOKENS)} tokens",
        ),
        (
            {"skip": ["tokenizer.ggml.merges"], "fields": [("add_token_merges", ["x y"])]},
            "its merges make no tokenizer",
        ),
        ({"skip": ["tokenizer.ggml.token_type"], "fields": [("add_token_types", [1])]}, "do not fit together"),
        (
            {"skip": ["output_norm.weight"], "tensors": [("output_norm.weight", np.full(32, np.nan, np.float32))]},
            "output_norm.weight holds values that are not finite",
        ),
        (
            {"skip": ["output_norm.weight"], "tensors": [("output_norm.weight", np.ones(31, np.float32))]},
            r"output_norm.weight has shape \(31,\), expected \(32,\)",
        ),
        (
            {"skip": ["output_norm.weight"], "tensors": [("output_norm.weight", np.ones(32, np.int32))]},
            "output_norm.weight has type I32, which is not supported",
        ),
    ],
)
def test_files_that_are_refused(change, message, tmp_path, cache):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, random_params(LLAMA), **change)
    refused(path, cache, message)


def test_another_architecture(tmp_path, cache):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(
        tmp_path / "m.gguf",
        cache,
        "'gemma' is not supported; supported: llama, qwen2, qwen3, smollm3",
    )


@pytest.mark.parametrize("make", ["nothing", "folder", "pipe"])
def test_not_a_file(make, tmp_path, cache):
    path = tmp_path / "m.gguf"
    {"nothing": lambda _: None, "folder": os.mkdir, "pipe": os.mkfifo}[make](path)
    refused(path, cache, "does not exist, or is not a file")


def header(keys=0, tensors=0, body=b"", magic=b"GGUF", version=3):
    return magic + struct.pack("<IQQ", version, tensors, keys) + body


KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"GGUF", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "begins with b'PK"),
        (header(version=1), "GGUF version 1; supported: 2, 3"),
        (header(version=0x03000000), "is big-endian"),
        (header(version=0x01000000), "GGUF version 16777216; supported: 2, 3"),
        (header(keys=2**63), "counts more than the file holds"),
        (header(tensors=2**63), "counts more than the file holds"),
        (header(1, body=struct.pack("<Q", 2**63)), "counts more|runs past the end"),
        (header(1, body=KEY + struct.pack("<IIQ", 9, 8, 2**60)), "counts more than the file holds"),
        (header(1, body=KEY + struct.pack("<IIQ", 9, 0, 2**60)), "runs past the end"),
        (header(1, body=KEY + struct.pack("<IIQ", 9, 9, 2**60)), "unknown type 9"),
        (header(1, body=KEY + struct.pack("<I", 77) + bytes(9)), "unknown type 77"),
        (header(1, body=struct.pack("<Q", 1) + b"\xff" + struct.pack("<IQ", 4, 0)), "not UTF-8"),
        (header(2, body=(KEY + struct.pack("<II", 4, 0)) * 2), "key 'k' comes twice"),
        (header(0, 1, KEY + struct.pack("<IQ", 2**31, 1) + bytes(20)), "dimensions"),
        (header(0, 1, KEY + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0)), "is truncated: weight k ends at byte"),
        (header(0, 1, KEY + struct.pack("<IQIQ", 1, 0, 0, 0)), "has shape"),
        (header(0, 1, KEY + struct.pack("<IQIQ", 1, 33, 2, 0)), "has shape"),  # no whole number of blocks
        (header(0, 1, KEY + struct.pack("<IQIQ", 1, 1, 99, 0)), "unknown type 99"),
        (header(0, 1, KEY + struct.pack("<IQIQ", 1, 1, 0, 2**63)), "is truncated"),
    ],
)
def test_headers_that_lie(data, message, tmp_path, cache):
    (tmp_path / "m.gguf").write_bytes(data)
    refused(tmp_path / "m.gguf", cache, message)


def test_every_truncation_is_refused(written, cache):
    data = written.read_bytes()
    for size in [*range(0, 2000, 97), *range(2000, len(data), 4999), len(data) - 32]:
        written.write_bytes(data[:size])
        refused(written, cache, "truncated|damaged|not a GGUF")


def test_flipped_bytes_load_or_are_refused(written, tmp_path):
    """Nothing but InputError comes out of a damaged file."""
    data, rng, messages = written.read_bytes(), np.random.default_rng(0), []
    for trial in range(60):
        damaged = bytearray(data)
        for at in rng.integers(0, 9000, 1 + trial % 4):
            damaged[at] = rng.integers(256)
        written.write_bytes(damaged)
        try:
            load_gguf(written, cache_dir=tmp_path / "cache")
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 20 and not any("\n" in message for message in messages)
