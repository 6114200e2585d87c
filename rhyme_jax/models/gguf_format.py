"""GGUF files (llama.cpp's format) in: weights of any quantisation that the `gguf` package can undo, and tokenizer.

A file is converted once to a Hugging Face directory in a cache, and read from there like any other.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_names, hf_weights
from rhyme_jax.models.config import DecoderConfig, RopeScaling
from rhyme_jax.models.gguf_header import GgufFile, read_header
from rhyme_jax.models.gguf_tokenizer import build_tokenizer
from rhyme_jax.models.tokenizer import Tokenizer

CACHE_FORMAT = 2  # part of a converted model's name: raise it when the conversion changes


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What a value of `general.architecture` implies."""

    interleaved: bool  # the rows of q and k stand as rotary pairs (2j, 2j + 1); see `_apart`
    qkv_bias: bool = False
    qk_norm: bool = False
    nope_interval: int = 0  # every so many layers, one does not rotate queries and keys; 0: all do


_ARCHITECTURES = {
    "llama": _Architecture(interleaved=True),  # Mistral's files as well, and most others of that shape
    "qwen2": _Architecture(interleaved=False, qkv_bias=True),
    "qwen3": _Architecture(interleaved=False, qk_norm=True),
    "smollm3": _Architecture(interleaved=True, nope_interval=4),
}

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
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(
    path, dtype: str = "float32", param_dtype: str = "float32", cache_dir=None
) -> tuple[DecoderConfig, dict, Tokenizer]:
    """A model from a GGUF file, in host memory: `convert`, and then what any Hugging Face directory goes through.

    Args:
      path, cache_dir: see `convert`.
      dtype, param_dtype: see `DecoderConfig`.

    Returns:
      (config, parameters as of `hf_weights.load_params`, tokenizer)

    Raises:
      InputError: as `convert`.
    """
    DecoderConfig(1, 1, 1, 1, 1, 2, 1, dtype=dtype, param_dtype=param_dtype)  # refuses a dtype before any work
    folder = convert(path, cache_dir)
    config = hf_config.read_config(folder, dtype, param_dtype)
    return config, hf_weights.load_params(folder, config), Tokenizer.load(folder)


def convert(path, cache_dir=None) -> pathlib.Path:
    """The Hugging Face directory of a GGUF file of architecture llama (Llama, Mistral), qwen2, qwen3 or smollm3.

    The first call makes it under `cache_dir`, keyed by the file's contents, and later calls find it there. Float32,
    float16 and bfloat16 tensors keep their dtype; quantised ones become float32 (4 bytes a parameter), which alone
    holds their values exactly. The conversion needs memory for one tensor, not for the model: for SmolLM2-135M, whose
    embedding has 113 MB in float32, some 155 MB. A damaged entry is made anew. Processes that want the same file wait
    for the one that converts it.

    Args:
      path: the .gguf file.
      cache_dir: default $RHYME_JAX_CACHE, or else ~/.cache/rhyme_jax.

    Raises:
      InputError: the file is missing, damaged, or of a kind that is not supported; or the cache cannot be written.
    """
    path = pathlib.Path(path)
    if not path.is_file():  # nor a pipe, which would never end
        raise InputError(f"{path}: does not exist, or is not a file")
    cache_dir = pathlib.Path(cache_dir or os.environ.get("RHYME_JAX_CACHE") or "~/.cache/rhyme_jax").expanduser()
    try:
        target = cache_dir / f"gguf-{CACHE_FORMAT}-{_fingerprint(path)}"
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror})") from e
    if _is_whole(target):
        return target
    with _lock(cache_dir) as locked:
        if _is_whole(target):  # another process has made it meanwhile
            return target
        if locked:  # then nobody is at work on what a killed conversion left
            for rest in cache_dir.glob(f"{target.name}.*"):
                shutil.rmtree(rest, ignore_errors=True)
        _write(path, target)
    return target


def _is_whole(folder: pathlib.Path) -> bool:
    try:
        hf_weights.open_params(folder, hf_config.read_config(folder))
        Tokenizer.load(folder)
    except InputError:
        return False
    return True


def _fingerprint(path: pathlib.Path) -> str:
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16))
        return f"{f.tell()}-{digest.hexdigest()}"


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[bool]:
    """Makes the folder and keeps other processes that convert out of it; False where its file system has no locks.

    The folder itself is locked, so that no lock files lie about. Without a lock two processes may do the same work,
    but `_write` keeps what the first one made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise _unusable(folder, e) from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _unusable(folder: pathlib.Path, e: OSError) -> InputError:
    return InputError(
        f"{folder}: cannot keep converted weights ({e.strerror}); set RHYME_JAX_CACHE to a usable directory"
    )


def _write(path: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the Hugging Face directory `target`, whole or not at all, whoever else is doing the same."""
    file = read_header(path)
    config = _config(file)
    tokenizer = build_tokenizer(file.metadata, file.source)
    hf_config.check_vocabulary(tokenizer, config.vocab_size, path)
    sources = _sources(file, config)
    tensors = ((hf_name, file.values(name, order)) for hf_name, name, order in sources)
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
        raise _unusable(target.parent, e) from e
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _config(file: GgufFile) -> DecoderConfig:
    meta, source = file.metadata, file.source
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise InputError(
            f"{source}: general.architecture={repr(arch)[:80]} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def get(key: str, types, default):
        value = meta.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, types) or not hf_config.in_float32(value):
            shown = "missing" if value is None else repr(value)[:80]
            raise InputError(f"{source}: {arch}.{key}={shown}: must be a positive number, the same for all layers")
        return value

    def whole(key: str, default: int | None = None) -> int:
        return get(key, int, default)

    def decimal(key: str, default: float | None = None) -> float:
        return _shortest(get(key, int | float, default))

    def only(key: str, *supported):
        value = meta.get(key, supported[0])
        if isinstance(value, np.ndarray | list) or value not in supported:
            raise InputError(
                f"{source}: {key}={repr(value)[:80]} is not supported; supported: {', '.join(map(repr, supported))}"
            )
        return value

    parts = meta.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        shown = repr(parts)[:80]
        raise InputError(f"{source}: split.count={shown}: is one part of a model; join them: llama-gguf-split --merge")
    only(f"{arch}.expert_count", 0)
    only(f"{arch}.attention.sliding_window", 0)
    width, heads, layers = whole("embedding_length"), whole("attention.head_count"), whole("block_count")
    head_dim = whole("attention.key_length", width // heads)
    for key, want in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        if whole(key, want) != want:
            raise InputError(f"{source}: {arch}.{key}={whole(key)}: only {want}, the width of a head, is supported")
    theta = decimal("rope.freq_base", 10_000.0)
    scaling = _llama3_scaling(file, head_dim, theta)
    if only(f"{arch}.rope.scaling.type", "none", "linear") == "linear" and decimal("rope.scaling.factor", 1.0) != 1.0:
        if scaling is not None:
            raise InputError(f"{source}: {arch}.rope.scaling.type='linear' beside {_ROPE_FACTORS} is not supported")
        scaling = RopeScaling("linear", decimal("rope.scaling.factor"))
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{source}: weight token_embd.weight is missing")
    implied = _ARCHITECTURES[arch]
    if layers > len(file.tensors):  # before anything is made for each layer
        raise InputError(f"{source}: {arch}.block_count={layers}: the file has only {len(file.tensors)} weights")
    return DecoderConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        width=width,
        layers=layers,
        q_heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=whole("feed_forward_length"),
        rope_theta=theta,
        norm_eps=decimal("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=implied.qkv_bias,
        qk_norm=implied.qk_norm,
        max_positions=whole("context_length"),
        family=arch,
        rope_scaling=scaling,
        rope_layers=tuple((i + 1) % n != 0 for i in range(layers)) if (n := implied.nope_interval) else (),
    )


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, which was stored as 9.9999997e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling that the tensor of rotary factors was made from; None where there is none.

    llama.cpp's converter (LlamaModel.generate_extra_tensors in convert_hf_to_gguf.py) turns the `llama3` parameters
    of Llama 3.1, 3.2 and 3.3 into one divisor for each frequency. These models differ only in `factor`, the largest
    divisor; whether the others are what they all have is checked.
    """
    if _ROPE_FACTORS not in file.tensors:
        return None
    if file.tensors[_ROPE_FACTORS].shape == (head_dim // 2,):
        found_h = file.values(_ROPE_FACTORS).astype(np.float64)
        if (found_h == 1).all():
            return None
        if (found_h > 0).all():
            scaling = RopeScaling("llama3", _shortest(found_h.max()))
            turns_h = scaling.original_positions * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
            smooth_h = (turns_h - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
            kept_h = np.clip(smooth_h, 0, 1)  # the share of a frequency that is not divided
            if np.allclose(found_h, 1 / ((1 - kept_h) / scaling.factor + kept_h), rtol=1e-5, atol=0):
                return scaling
    raise InputError(
        f"{file.source}: {_ROPE_FACTORS} does not hold the rotary factors of Llama 3.1 to 3.3; others are not supported"
    )


def _sources(file: GgufFile, config: DecoderConfig) -> list[tuple[str, str, np.ndarray | None]]:
    """(Hugging Face's name, GGUF's name, order of its rows as of `GgufFile.values`) of every weight."""
    sources, used = [], {_ROPE_FACTORS}
    for slot in hf_names.slots(config):
        *layer, ours = slot.path
        name = f"blk.{layer[1]}.{_NAMES[ours]}" if layer else _NAMES[ours]
        if name not in file.tensors:
            raise InputError(f"{file.source}: weight {name} is missing (expected shape {slot.hf_shape})")
        if file.tensors[name].shape != slot.hf_shape:
            shape = file.tensors[name].shape
            raise InputError(f"{file.source}: weight {name} has shape {shape}, expected {slot.hf_shape}")
        file.check_kind(name)
        used.add(name)
        interleaved = ours in ("q", "k") and _ARCHITECTURES[config.family].interleaved
        sources.append((slot.hf_name, name, _apart(slot.hf_shape[0], config.head_dim) if interleaved else None))
    for name in file.tensors:
        if name not in used:
            raise InputError(f"{file.source}: unexpected weight {repr(name)[1:-1][:200]}")
    return sources


def _apart(rows: int, head_dim: int) -> np.ndarray:
    """Row order from rotary pairs (2j, 2j + 1), as llama.cpp turns them, to (j, j + head_dim / 2)."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
