"""GGUF files (llama.cpp's format) in: weights of any quantisation that the `gguf` package can undo, and tokenizer.

A file is converted once to a Hugging Face directory in a cache, and read from there like any other. The header is
walked here rather than by `gguf.GGUFReader`, which believes every count it reads: an array said to have 2**60
elements keeps it busy for ever.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import shutil
import struct
import tempfile

import numpy as np
import tokenizers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.models import hf_config, hf_names, hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.tokenizer import Tokenizer

CACHE_FORMAT = 1  # part of a converted model's name: raise it when the conversion changes

# Architecture -> whether the rows of q and k stand as interleaved rotary pairs (see `_uninterleave`).
_ARCHITECTURES = {"llama": True, "qwen2": False}

# Our name -> GGUF's. GGUF has Hugging Face's layout, [out, in], row-major.
_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}

# What ends a turn or a text in these families. A file names one eos id, but a chat model may emit any of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")


def load_gguf(
    path, dtype: str = "float32", param_dtype: str = "float32", cache_dir=None
) -> tuple[DecoderConfig, dict, Tokenizer]:
    """A model from a GGUF file of architecture llama or qwen2.

    The first call writes the dequantised float32 weights (4 bytes a parameter) under `cache_dir`, keyed by the
    file's contents; later calls read those, in any dtype. A damaged cache entry is made anew.

    Args:
      path: the .gguf file.
      dtype, param_dtype: see `DecoderConfig`.
      cache_dir: default $RHYME_JAX_CACHE, or else ~/.cache/rhyme_jax.

    Returns:
      (config, parameters as of `hf_weights.load_params`, tokenizer)

    Raises:
      InputError: the file is missing, damaged, or of a kind that is not supported; or the cache cannot be written.
    """
    DecoderConfig(1, 1, 1, 1, 1, 2, 1, dtype=dtype, param_dtype=param_dtype)  # refuses a dtype before any work
    path = pathlib.Path(path)
    if not path.is_file():  # nor a pipe, which would never end
        raise InputError(f"{path}: does not exist, or is not a file")
    cache_dir = pathlib.Path(cache_dir or os.environ.get("RHYME_JAX_CACHE") or "~/.cache/rhyme_jax").expanduser()
    try:
        target = cache_dir / f"gguf-{CACHE_FORMAT}-{_fingerprint(path)}"
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror})") from e

    def read():
        config = hf_config.read_config(target, dtype, param_dtype)
        return config, hf_weights.load_params(target, config), Tokenizer.load(target)

    if target.is_dir():
        with contextlib.suppress(InputError):
            return read()
    _convert(path, target)
    return read()


def _fingerprint(path: pathlib.Path) -> str:
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16))
        return f"{f.tell()}-{digest.hexdigest()}"


def _convert(path: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the Hugging Face directory `target`, whole or not at all, whoever else is doing the same."""
    file = read_header(path)
    config = _config(file)
    tokenizer = build_tokenizer(file.metadata, file.source)
    if tokenizer.vocab_size > config.vocab_size:
        rows = config.vocab_size
        raise InputError(f"{path}: has {tokenizer.vocab_size} tokens, but token_embd.weight has {rows} rows")
    tensors = _hf_tensors(file, config)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        hf_weights.save_tensors(temporary, tensors, config, tokenizer.eos_ids)
        tokenizer.save(temporary)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same contents
                raise
    except OSError as e:
        raise InputError(
            f"{target.parent}: cannot keep converted weights ({e.strerror}); set RHYME_JAX_CACHE to a usable directory"
        ) from e
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


# --- header ---------------------------------------------------------------------------------------------------

_MAGIC, _VERSIONS, _MAX_DIMS = b"GGUF", (2, 3), 4
_STRING, _ARRAY = 8, 9
# Type number -> numpy dtype.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes lie. `shape` is in numpy's order, slowest axis first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # byte offset in the file
    size: int  # bytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file with its header read; every offset has been found to lie inside the file."""

    source: str
    data: np.ndarray  # uint8, all of the file, mapped
    metadata: dict  # scalars as Python values, arrays as numpy arrays or lists of str
    tensors: dict[str, TensorInfo]

    def dequantized(self, name: str) -> np.ndarray:
        """A tensor's values in float32."""
        info = self.tensors[name]
        raw = self.data[info.start : info.start + info.size].reshape(*info.shape[:-1], -1)
        try:
            value = dequantize(raw, info.kind)
        except NotImplementedError as e:
            raise InputError(f"{self.source}: weight {name} has type {info.kind.name}, which is not supported") from e
        if not np.isfinite(value).all():
            raise InputError(f"{self.source}: weight {name} holds values that are not finite; the file is damaged")
        return value


class _Cursor:
    """Reads the header front to back and refuses to leave the file."""

    def __init__(self, data: np.ndarray, source: str):
        self.data, self.source, self.at = memoryview(data), source, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise InputError(f"{self.source}: is truncated or damaged: its header runs past the end of the file")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, fmt: str) -> int:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        try:
            return str(self.take(self.number("<Q")), "utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{self.source}: is damaged: its header has text that is not UTF-8") from e

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        return self.array(kind, 1)[0].item()

    def array(self, kind: int, count: int):
        if kind == _STRING:
            return [self.string() for _ in range(self.bounded(count, 8))]
        if kind not in _SCALARS:  # nor an array of arrays, which no key that we read has
            raise InputError(f"{self.source}: is damaged: its header has a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def bounded(self, count: int, least: int) -> int:
        """`count` things of at least `least` bytes each, if what is left of the file can hold them."""
        if count * least > len(self.data) - self.at:
            raise InputError(f"{self.source}: is truncated or damaged: its header counts more than the file holds")
        return count


def read_header(path: pathlib.Path) -> GgufFile:
    """Metadata and tensor offsets of a GGUF file, version 2 or 3, little-endian.

    Raises:
      InputError: it is not such a file, or anything in it points outside it.
    """
    source = str(path)
    try:
        if path.stat().st_size < 24:
            raise InputError(f"{source}: is not a GGUF file ({path.stat().st_size} bytes)")
        data = np.memmap(path, np.uint8, "r")
    except OSError as e:
        raise InputError(f"{source}: cannot be read ({e.strerror})") from e
    cursor = _Cursor(data, source)
    magic = bytes(cursor.take(4))
    if magic != _MAGIC:
        raise InputError(f"{source}: is not a GGUF file (begins with {magic!r}, expected {_MAGIC!r})")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise InputError(f"{source}: has GGUF version {version}; supported: 2, 3 (little-endian)")
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    metadata = {}
    for _ in range(cursor.bounded(key_count, 13)):
        key = cursor.string()
        if key in metadata:
            raise InputError(f"{source}: is damaged: key {key[:200]!r} comes twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    raw = [_tensor_info(cursor) for _ in range(cursor.bounded(tensor_count, 24))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise InputError(f"{source}: general.alignment={repr(alignment)[:80]}: must be a positive integer")
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, info in raw:
        start = base + info.start
        if name in tensors:
            raise InputError(f"{source}: is damaged: weight {name[:200]!r} comes twice")
        if start + info.size > len(data):
            raise InputError(
                f"{source}: is truncated: weight {name[:200]} ends at byte {start + info.size} of {len(data)}"
            )
        tensors[name] = dataclasses.replace(info, start=start)
    return GgufFile(source, data, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """A tensor's name and place; `start` is still relative to the data section."""
    name, dims = cursor.string(), cursor.number("<I")
    if not 1 <= dims <= _MAX_DIMS:
        raise InputError(f"{cursor.source}: is damaged: weight {name[:200]!r} has {dims} dimensions")
    shape = tuple(int(n) for n in reversed(cursor.array(10, dims)))
    kind, start = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError as e:
        raise InputError(f"{cursor.source}: weight {name[:200]!r} has unknown type {kind}") from e
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise InputError(f"{cursor.source}: is damaged: weight {name[:200]!r} has shape {shape} and type {kind.name}")
    return name, TensorInfo(shape, kind, start, math.prod(shape) // block * block_bytes)


# --- weights --------------------------------------------------------------------------------------------------


def _config(file: GgufFile) -> DecoderConfig:
    meta, source = file.metadata, file.source
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise InputError(
            f"{source}: general.architecture={repr(arch)[:80]} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def get(key: str, types, default):
        value = meta.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < math.inf:
            shown = "missing" if value is None else repr(value)[:80]
            raise InputError(f"{source}: {arch}.{key}={shown}: must be a positive number, the same for all layers")
        return value

    def whole(key: str, default: int | None = None) -> int:
        return get(key, int, default)

    def decimal(key: str, default: float | None = None) -> float:
        return float(str(np.float32(get(key, int | float, default))))  # 1e-05, which was stored as 9.9999997e-06

    width, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", width // heads)
    for key, want in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        if whole(key, want) != want:
            raise InputError(f"{source}: {arch}.{key}={whole(key)}: only {want}, the width of a head, is supported")
    for key, unused in (("rope.scaling.type", "none"), ("expert_count", 0), ("attention.sliding_window", 0)):
        if meta.get(f"{arch}.{key}", unused) != unused:
            shown = repr(meta[f"{arch}.{key}"])[:80]
            raise InputError(f"{source}: {arch}.{key}={shown} is not supported; supported: {unused!r}")
    if "rope_freqs.weight" in file.tensors:
        raise InputError(f"{source}: rope_freqs.weight (Llama 3's scaling of rotary positions) is not supported")
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{source}: weight token_embd.weight is missing")
    return DecoderConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        width=width,
        layers=whole("block_count"),
        q_heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=whole("feed_forward_length"),
        rope_theta=decimal("rope.freq_base", 10_000.0),
        norm_eps=decimal("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2",
        max_positions=whole("context_length"),
        family=arch,
    )


def _hf_tensors(file: GgufFile, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Every weight in float32, with Hugging Face's name and layout."""
    tensors, used = {}, set()
    for slot in hf_names.slots(config):
        *layer, ours = slot.path
        name = f"blk.{layer[1]}.{_NAMES[ours]}" if layer else _NAMES[ours]
        if name not in file.tensors:
            raise InputError(f"{file.source}: weight {name} is missing (expected shape {slot.hf_shape})")
        if file.tensors[name].shape != slot.hf_shape:
            shape = file.tensors[name].shape
            raise InputError(f"{file.source}: weight {name} has shape {shape}, expected {slot.hf_shape}")
        used.add(name)
        value = file.dequantized(name)
        if ours in ("q", "k") and _ARCHITECTURES[config.family]:
            value = _uninterleave(value, config.head_dim)
        tensors[slot.hf_name] = value
    for name in file.tensors:
        if name not in used:
            raise InputError(f"{file.source}: unexpected weight {name[:200]}")
    return tensors


def _uninterleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """From rotary pairs (2j, 2j + 1), as llama.cpp turns them, to (j, j + head_dim / 2); [heads * head_dim, D]."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# --- tokenizer ------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4  # of llama.cpp's token types, those that are matched whole in the text


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The published pattern of Llama 3 and Qwen2, which differ in how many digits go together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@dataclasses.dataclass(frozen=True)
class _Pre:
    """What a value of `tokenizer.ggml.pre` stands for, after the models' published tokenizer.json."""

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word of the vocabulary is taken whole, without merging its bytes


_PRE = {
    "smollm": _Pre(_digits_apart()),
    "llama-bpe": _Pre(_split(r"\p{N}{1,3}"), ignore_merges=True),
    "qwen2": _Pre(_split(r"\p{N}"), normalizers.NFC()),
}


def build_tokenizer(metadata: dict, source: str) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file's metadata describes.

    Its end-of-sequence set is the file's eos id and those of `END_TOKENS` that are control tokens here.

    Raises:
      InputError: it is of another kind, or its parts do not fit together.
    """

    def get(key: str, want: type, default=None):
        value = metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, want) or isinstance(value, bool):
            shown = "missing" if value is None else repr(value)[:80]
            raise InputError(f"{source}: tokenizer.{key}={shown}: must be of type {want.__name__}")
        return value

    for key, supported in (("ggml.model", ("gpt2",)), ("ggml.pre", tuple(_PRE))):
        value = metadata.get(f"tokenizer.{key}")
        if value not in supported:
            raise InputError(
                f"{source}: tokenizer.{key}={repr(value)[:80]} is not supported; supported: {', '.join(supported)}"
            )
    tokens, merges = get("ggml.tokens", list), get("ggml.merges", list)
    types = get("ggml.token_type", np.ndarray)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(vocab) < len(tokens) or len(types) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise InputError(f"{source}: is damaged: its tokens, token types and merges do not fit together")
    pre = _PRE[metadata["tokenizer.ggml.pre"]]
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges))
    except Exception as e:  # the library raises bare Exception
        raise InputError(f"{source}: is damaged: its merges make no tokenizer ({one_line(e)})") from e
    backend.pre_tokenizer = pre.split
    backend.decoder = decoders.ByteLevel()
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    control = [token for token, kind in zip(tokens, types) if kind == _CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in control])
    whole = [token for token, kind in zip(tokens, types) if kind == _USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in whole])

    eos = get("ggml.eos_token_id", int)
    ends = (vocab[token] for token in END_TOKENS if token in control)
    eos_ids = tuple(dict.fromkeys((eos, *ends)))
    pad = get("ggml.padding_token_id", int, eos)
    bos = get("ggml.bos_token_id", int) if "tokenizer.ggml.bos_token_id" in metadata else None
    for key, i in (("eos", eos), ("padding", pad), ("bos", eos if bos is None else bos)):
        if not 0 <= i < len(tokens):
            raise InputError(f"{source}: tokenizer.ggml.{key}_token_id={i}: there are {len(tokens)} tokens")
    template = get("chat_template", str) if "tokenizer.chat_template" in metadata else None
    return Tokenizer(backend, eos_ids, pad, bos, template)
