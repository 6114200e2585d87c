"""GGUF files against the Hugging Face route to the same weights; and a file that lies is refused, at once."""

import dataclasses
import os
import pathlib
import struct

import gguf
import jax
import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.models import gguf_format, hf_config, hf_names, hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.gguf_format import load_gguf
from rhyme_jax.models.params import abstract_params

# GPT-2's spelling of the 256 bytes as printable characters, in the order of its vocabulary.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)} - {*PRINTABLE})
ALPHABET = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "( x"]
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *ALPHABET.values(),
    *(merge.replace(" ", "") for merge in MERGES),
    "xyz",  # no merge makes it
    "<tool>",
    "<pad>",
]
TYPES = [3] * 3 + [1] * (len(ALPHABET) + len(MERGES) + 1) + [4, 3]
VOCAB = {token: i for i, token in enumerate(TOKENS)}

LLAMA = DecoderConfig(
    vocab_size=len(TOKENS),
    width=32,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_width=64,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    max_positions=128,
)
CONFIGS = {
    "llama": LLAMA,
    "llama-untied": dataclasses.replace(LLAMA, tie_embeddings=False),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, head_dim=8, rope_theta=1e6, norm_eps=1e-6),
}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(rows, heads):
    """llama.cpp's order of q and k rows, as its converter from Hugging Face makes it."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(hf_name):
    stem, suffix = hf_name.rsplit(".", 1)
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER[rest]}.{suffix}"


def random_params(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), abstract_params(config))


def write_gguf(path, config, params, kind=gguf.GGMLQuantizationType.F32, pre="smollm", skip=(), fields=(), tensors=()):
    """A GGUF file as llama.cpp's converter would write it; returns the values a reader should find.

    skip: keys and tensors to leave out. fields: (writer method, arguments) to add. tensors: (name, array) to add.
    """
    arch = config.family
    writer = gguf.GGUFWriter(str(path), arch)
    add = {
        f"{arch}.block_count": lambda: writer.add_block_count(config.layers),
        f"{arch}.context_length": lambda: writer.add_context_length(config.max_positions),
        f"{arch}.embedding_length": lambda: writer.add_embedding_length(config.width),
        f"{arch}.feed_forward_length": lambda: writer.add_feed_forward_length(config.mlp_width),
        f"{arch}.attention.head_count": lambda: writer.add_head_count(config.q_heads),
        f"{arch}.attention.head_count_kv": lambda: writer.add_head_count_kv(config.kv_heads),
        f"{arch}.attention.layer_norm_rms_epsilon": lambda: writer.add_layer_norm_rms_eps(config.norm_eps),
        f"{arch}.rope.freq_base": lambda: writer.add_rope_freq_base(config.rope_theta),
        "tokenizer.ggml.model": lambda: writer.add_tokenizer_model("gpt2"),
        "tokenizer.ggml.pre": lambda: writer.add_tokenizer_pre(pre),
        "tokenizer.ggml.tokens": lambda: writer.add_token_list(TOKENS),
        "tokenizer.ggml.token_type": lambda: writer.add_token_types(TYPES),
        "tokenizer.ggml.merges": lambda: writer.add_token_merges(MERGES),
        "tokenizer.ggml.eos_token_id": lambda: writer.add_eos_token_id(VOCAB["<|im_end|>"]),
        "tokenizer.ggml.padding_token_id": lambda: writer.add_pad_token_id(VOCAB["<pad>"]),
        "tokenizer.chat_template": lambda: writer.add_chat_template("<|im_start|>{{ messages[0]['content'] }}"),
    }
    if config.head_dim != config.width // config.q_heads:
        add["key_length"] = lambda: (writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim))
    for key, write in add.items():
        if key not in skip:
            write()
    for method, *arguments in fields:
        getattr(writer, method)(*arguments)
    expected = {}
    for slot in hf_names.slots(config):
        value = params
        for key in slot.path:
            value = value[key]
        value, name = slot.to_hf(value), gguf_name(slot.hf_name)
        heads = {"q": config.q_heads, "k": config.kv_heads}.get(slot.path[-1])
        permuted = config.family == "llama" and heads is not None
        stored = permute(value, heads) if permuted else value
        raw_kind = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = gguf.quantize(np.ascontiguousarray(stored), raw_kind)
        read = gguf.dequantize(raw, raw_kind)
        if permuted:  # quantisation works along a row, so whole rows change places
            read = read[np.argsort(permute(np.arange(len(value))[:, None], heads)[:, 0])]
        expected[slot.path] = slot.from_hf(read)
        if name not in skip:
            writer.add_tensor(name, raw, raw_dtype=raw_kind)
    for name, value in tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


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


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantisations(kind, tmp_path, cache):
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, LLAMA, random_params(LLAMA), gguf.GGMLQuantizationType[kind])
    _, params, _ = load_gguf(path, cache_dir=cache)
    for keys, value in expected.items():
        got = params
        for key in keys:
            got = got[key]
        np.testing.assert_array_equal(got, value, err_msg=str(keys))


def test_header_equals_that_of_the_gguf_package(written):
    ours, theirs = gguf_format.read_header(written), gguf.GGUFReader(written)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.start, info.size, info.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))


# --- cache ----------------------------------------------------------------------------------------------------


def test_converted_once_for_all_dtypes(written, cache, monkeypatch):
    config, params, _ = load_gguf(written, cache_dir=cache)
    monkeypatch.setattr(gguf_format, "_convert", lambda *_: pytest.fail("converted again"))
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
    gguf_format._convert(written, cache / "x" / "entry")
    assert [p.name for p in (cache / "x").rglob("*")] == ["entry", "theirs"]


def test_a_cache_that_cannot_be_written(written, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot keep converted weights .*; set RHYME_JAX_CACHE"):
        load_gguf(written, cache_dir=tmp_path / "file")


def test_an_unknown_dtype_is_refused_before_any_work(written, cache):
    with pytest.raises(InputError, match=r"model.dtype='int8'"):
        load_gguf(written, "int8", cache_dir=cache)
    assert not cache.exists()


# --- tokenizer ------------------------------------------------------------------------------------------------


def ids(*tokens):
    return [VOCAB[token] for token in tokens]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello", ids("hello")),
        ("smollm", "12  5", ids("1", "2", "ĠĠ", "5")),  # digits apart, and the spaces before one together
        ("smollm", "a<|im_end|>b", ids("a", "<|im_end|>", "b")),
        ("smollm", "<tool>x<pad>", ids("<tool>", "x", "<pad>")),
        ("smollm", "é", ids("Ã", "©")),
        ("smollm", "e\u0301", ids("e", "Ì", "ģ")),  # no normalisation
        ("qwen2", "12  5", ids("1", "2", "Ġ", "Ġ", "5")),
        ("qwen2", "e\u0301", ids("Ã", "©")),  # NFC
        ("llama-bpe", "12  5", ids("12", "Ġ", "Ġ", "5")),
        ("llama-bpe", "hello", ids("hello")),
        ("llama-bpe", "xyz", ids("xyz")),  # a word of the vocabulary, whole
        ("smollm", "xyz", ids("x", "y", "z")),
        ("smollm", "(x", ids("(", "x")),
        ("qwen2", "(x", ids("(x")),  # a letter run takes the sign before it
    ],
)
def test_pre_tokenizers(pre, text, expected, tmp_path, cache):
    write_gguf(tmp_path / "m.gguf", LLAMA, random_params(LLAMA), pre=pre)
    for _ in range(2):  # fresh, then from the cache
        tokenizer = load_gguf(tmp_path / "m.gguf", cache_dir=cache)[2]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) in (text, "é")


def test_special_ids(written, cache, tmp_path):
    tokenizer = load_gguf(written, cache_dir=cache)[2]
    assert tokenizer.eos_ids == (VOCAB["<|im_end|>"], VOCAB["<|endoftext|>"])
    assert tokenizer.pad_id == VOCAB["<pad>"]
    assert tokenizer.decode(ids("<|im_start|>", "h", "<tool>", "<|im_end|>")) == "h<tool>"
    assert tokenizer.render_chat("hi") == "<|im_start|>hi"
    skip = ("tokenizer.ggml.padding_token_id", "tokenizer.chat_template")
    write_gguf(tmp_path / "m.gguf", LLAMA, random_params(LLAMA), skip=skip)
    tokenizer = load_gguf(tmp_path / "m.gguf", cache_dir=cache)[2]
    assert tokenizer.pad_id == VOCAB["<|im_end|>"] and tokenizer.chat_template is None


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "gpt-4o"}, "tokenizer.ggml.pre='gpt-4o' is not supported; supported: smollm, llama-bpe, qwen2"),
        ({"skip": ["tokenizer.ggml.pre"]}, "tokenizer.ggml.pre=None"),
        ({"skip": ["tokenizer.ggml.merges"]}, "tokenizer.ggml.merges=missing"),
        ({"skip": ["tokenizer.ggml.eos_token_id"]}, "tokenizer.ggml.eos_token_id=missing"),
        ({"skip": ["llama.block_count"]}, "llama.block_count=missing"),
        ({"skip": ["llama.attention.layer_norm_rms_epsilon"]}, "layer_norm_rms_epsilon=missing"),
        ({"skip": ["blk.1.ffn_up.weight"]}, r"blk.1.ffn_up.weight is missing \(expected shape \(64, 32\)\)"),
        ({"skip": ["token_embd.weight"]}, "token_embd.weight is missing"),
        ({"tensors": [("blk.0.attn_q.bias", np.zeros(64, np.float32))]}, "unexpected weight blk.0.attn_q.bias"),
        ({"tensors": [("rope_freqs.weight", np.zeros(8, np.float32))]}, "rope_freqs.weight .*not supported"),
        ({"fields": [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]}, "rope.scaling.type='yarn'"),
        ({"fields": [("add_expert_count", 8)]}, "llama.expert_count=8"),
        ({"fields": [("add_rope_dimension_count", 4)]}, "llama.rope.dimension_count=4: only 16"),
        (
            {"skip": ["llama.block_count"], "fields": [("add_uint32", "llama.block_count", 2**32 - 1)]},
            "blk.2.attn_norm.weight is missing",
        ),
        (
            {"skip": ["llama.attention.head_count"], "fields": [("add_head_count", [4, 4])]},
            "llama.attention.head_count=.*the same for all layers",
        ),
        (
            {"skip": ["tokenizer.ggml.model"], "fields": [("add_tokenizer_model", "llama")]},
            "tokenizer.ggml.model='llama' is not supported; supported: gpt2",
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
    refused(tmp_path / "m.gguf", cache, "general.architecture='gemma' is not supported; supported: llama, qwen2")


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
        (header(version=0x03000000), "GGUF version"),  # big-endian
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
