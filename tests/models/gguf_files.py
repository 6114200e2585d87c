"""Tiny GGUF files as llama.cpp's converter would write them, for the tests of reading them."""

import dataclasses

import gguf
import numpy as np

from rhyme_jax.models import hf_names
from rhyme_jax.models.config import DecoderConfig, RopeScaling

# GPT-2's spelling of the 256 bytes as printable characters, in the order of its vocabulary.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)} - {*PRINTABLE})
ALPHABET = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "( x", "e X"]
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
    "llama-linear": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("linear", 2.5)),
    "llama3-8": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0)),
    "llama3-32": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("llama3", 32.0), rope_theta=500_000.0),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, head_dim=8, rope_theta=1e6, norm_eps=1e-6),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, rope_theta=1e6),
    "smollm3": dataclasses.replace(LLAMA, family="smollm3", layers=5, rope_layers=(True, True, True, False, True)),
}
PERMUTED = ("llama", "smollm3")  # families whose q and k rows llama.cpp turns as neighbouring pairs
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
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


def llama3_factors(config):
    """What llama.cpp's converter makes of the rope scaling of Llama 3.1, line by line, in float32 as it does."""
    scaling, factors = config.rope_scaling, []
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    for frequency in np.float32(1) / np.float32(config.rope_theta) ** exponents:
        wavelength = np.float32(2 * np.pi) / frequency
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(scaling.factor)
        else:
            smooth = (np.float32(8192) / wavelength - np.float32(1)) / np.float32(3)
            factors.append(1 / ((1 - smooth) / np.float32(scaling.factor) + smooth))
    return np.array(factors, np.float32)


def write_gguf(path, config, params, encode=None, pre="smollm", skip=(), fields=(), tensors=()):
    """A GGUF file as llama.cpp's converter would write it; returns the values a reader should find.

    encode: from (GGUF name, value) to (bytes, type); default float32. skip: keys and tensors to leave out. fields:
    (writer method, arguments) to add. tensors: (name, array) or (name, bytes, type) to add.
    """
    arch, scaling = config.family, config.rope_scaling
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
        "tokenizer.ggml.bos_token_id": lambda: writer.add_bos_token_id(VOCAB["<|im_start|>"]),
        "tokenizer.ggml.eos_token_id": lambda: writer.add_eos_token_id(VOCAB["<|im_end|>"]),
        "tokenizer.ggml.padding_token_id": lambda: writer.add_pad_token_id(VOCAB["<pad>"]),
        "tokenizer.chat_template": lambda: writer.add_chat_template("<|im_start|>{{ messages[0]['content'] }}"),
    }
    if config.head_dim != config.width // config.q_heads:
        add["key_length"] = lambda: (writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim))
    if scaling is not None and scaling.kind == "linear":
        add["rope.scaling.type"] = lambda: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        add["rope.scaling.factor"] = lambda: writer.add_rope_scaling_factor(scaling.factor)
    if scaling is not None and scaling.kind == "llama3":
        tensors = [("rope_freqs.weight", llama3_factors(config)), *tensors]
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
        permuted = config.family in PERMUTED and heads is not None
        stored = np.ascontiguousarray(permute(value, heads) if permuted else value)
        raw, kind = encode(name, stored) if encode else (stored, gguf.GGMLQuantizationType.F32)
        read = gguf.dequantize(raw, kind)
        if permuted:  # quantisation works along a row, so whole rows change places
            read = read[np.argsort(permute(np.arange(len(value))[:, None], heads)[:, 0])]
        expected[slot.path] = slot.from_hf(read)
        if name not in skip:
            writer.add_tensor(name, raw, raw_dtype=kind)
    for name, value, *kind in tensors:
        writer.add_tensor(name, value, raw_dtype=kind[0] if kind else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
