"""Hugging Face directories in and out: config.json and safetensors, for the llama, qwen2 and qwen3 families.

Hugging Face stores a linear layer as [out, in] and gives heads no axis of their own; we store [in..., out...]
with heads apart (`params.declare`). `_LAYER` and `_TOP` name both sides once, and reading and writing derive from
them.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import check_params, declare


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` implies. Defaults are those of transformers, for fields that config.json leaves out."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_positions: int


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", False, False, None, None, 2048),
    "qwen2": _Family("Qwen2ForCausalLM", True, False, 32, None, 32768),
    "qwen3": _Family("Qwen3ForCausalLM", False, True, 32, 128, 32768),
}

# Our name -> (Hugging Face's, how many of our leading axes are inputs of a linear layer). Inputs and outputs are
# each flattened and then swapped. None: the same numbers in the same order, heads flattened.
_LAYER = {
    "attn_norm": ("input_layernorm.weight", None),
    "q": ("self_attn.q_proj.weight", 1),
    "k": ("self_attn.k_proj.weight", 1),
    "v": ("self_attn.v_proj.weight", 1),
    "o": ("self_attn.o_proj.weight", 2),
    "q_bias": ("self_attn.q_proj.bias", None),
    "k_bias": ("self_attn.k_proj.bias", None),
    "v_bias": ("self_attn.v_proj.bias", None),
    "q_norm": ("self_attn.q_norm.weight", None),
    "k_norm": ("self_attn.k_norm.weight", None),
    "mlp_norm": ("post_attention_layernorm.weight", None),
    "gate": ("mlp.gate_proj.weight", 1),
    "up": ("mlp.up_proj.weight", 1),
    "down": ("mlp.down_proj.weight", 1),
}
_TOP = {
    "embed": ("model.embed_tokens.weight", None),
    "final_norm": ("model.norm.weight", None),
    "head": ("lm_head.weight", 1),
}

_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that are read


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one parameter lies in our tree, and its shape on either side."""

    path: tuple[str, ...]  # in our tree
    shape: tuple[int, ...]  # of our array
    hf_name: str
    inputs: int | None  # of our leading axes; see `_LAYER`

    @property
    def hf_shape(self) -> tuple[int, ...]:
        if self.inputs is None:
            return self.shape if self.path == ("embed",) else (math.prod(self.shape),)
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        if self.inputs is None:
            return value.reshape(self.hf_shape)
        return value.reshape(self.hf_shape[::-1]).T

    def from_hf(self, value: np.ndarray) -> np.ndarray:
        return (value if self.inputs is None else value.T).reshape(self.shape)


def slots(config: DecoderConfig) -> Iterator[Slot]:
    """Every parameter of `config`, layer by layer.

    A generator, so that a file that claims a billion layers is refused at its first missing weight.
    """
    one_layer = declare(dataclasses.replace(config, layers=1))
    for name, (hf_name, inputs) in _TOP.items():
        if name in one_layer:
            yield Slot((name,), one_layer[name].shape, hf_name, inputs)
    for i in range(config.layers):
        for name, param in one_layer["layers"]["0"].items():
            hf_name, inputs = _LAYER[name]
            yield Slot(("layers", str(i), name), param.shape, f"model.layers.{i}.{hf_name}", inputs)


# --- config.json ----------------------------------------------------------------------------------------------


def read_config(path, dtype: str = "float32", param_dtype: str = "float32") -> DecoderConfig:
    """The config of a Hugging Face directory.

    Args:
      path: the directory.
      dtype: of activations, "float32" | "bfloat16". The file's own dtype is that of its weights, and is ignored.
      param_dtype: of the parameters once loaded.

    Raises:
      InputError: config.json is missing or malformed, or asks for something the decoder does not do (another
        model_type or activation, rotary scaling, sliding windows, biases elsewhere than on q, k and v).
    """
    path = pathlib.Path(path) / "config.json"
    raw = read_json(path)

    def whole(name: str, default: int | None = None) -> int:
        value = default if raw.get(name) is None else raw[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            shown = "missing" if value is None else repr(value)[:80]
            raise InputError(f"{path}: {name}={shown}: must be a positive integer")
        return value

    def number(name: str, values: Mapping, default: float) -> float:
        value = default if values.get(name) is None else values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"{path}: {name}={value!r}: must be a positive number")
        return float(value)

    def only(name: str, value, *supported) -> None:
        if value not in supported:
            shown = ", ".join(json.dumps(v) for v in supported)
            raise InputError(f"{path}: {name}={repr(value)[:80]} is not supported; supported: {shown}")

    only("model_type", raw.get("model_type"), *_FAMILIES)
    family = _FAMILIES[raw["model_type"]]
    only("hidden_act", raw.get("hidden_act", "silu"), "silu")
    only("attention_bias", raw.get("attention_bias", family.qkv_bias), family.qkv_bias)  # would bias o as well
    only("mlp_bias", raw.get("mlp_bias", False), False)
    only("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0), 1.0, None)
    only("quantization_config", raw.get("quantization_config"), None)
    # transformers 5 keeps all of the rotation in rope_parameters; 4 had rope_theta beside rope_scaling.
    rope = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(name) or {}
        if not isinstance(scaling, dict):
            raise InputError(f"{path}: {name}={repr(scaling)[:80]}: must be an object or null")
        only(f"{name}.rope_type", scaling.get("rope_type", scaling.get("type", "default")), "default", "none")
        only(f"{name}.partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0), 1.0)
        rope |= {k: v for k, v in scaling.items() if v is not None}
    layers, heads, width = whole("num_hidden_layers"), whole("num_attention_heads"), whole("hidden_size")
    _refuse_sliding_window(path, raw, layers)
    tied = raw.get("tie_word_embeddings", False)
    only("tie_word_embeddings", tied, False, True)
    return DecoderConfig(
        vocab_size=whole("vocab_size"),
        width=width,
        layers=layers,
        q_heads=heads,
        kv_heads=whole("num_key_value_heads", heads if "num_key_value_heads" in raw else family.kv_heads or heads),
        head_dim=whole("head_dim", family.head_dim or width // heads),
        mlp_width=whole("intermediate_size"),
        rope_theta=number("rope_theta", rope, 10_000.0),
        norm_eps=number("rms_norm_eps", raw, 1e-6),
        tie_embeddings=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=whole("max_position_embeddings", family.max_positions),
        family=raw["model_type"],
        dtype=dtype,
        param_dtype=param_dtype,
    )


def _refuse_sliding_window(path, raw: dict, layers: int) -> None:
    """Qwen's configs name a window even where no layer uses it, so the field alone says nothing."""
    types = raw.get("layer_types")
    if isinstance(types, list):
        sliding = any(t != "full_attention" for t in types)
    else:
        first = raw.get("max_window_layers", 28)
        sliding = bool(raw.get("use_sliding_window")) and not (isinstance(first, int) and first >= layers)
    if sliding or (raw["model_type"] == "llama" and raw.get("sliding_window")):
        raise InputError(f"{path}: sliding_window={raw.get('sliding_window')!r} is in use; only full attention is")


def config_json(config: DecoderConfig, eos_ids: tuple[int, ...] = ()) -> dict:
    """The config.json that transformers (4 and 5) and `read_config` turn back into `config`.

    Raises:
      InputError: the switches of `config` are not those of its family, so that no file could say them.
    """
    family = _FAMILIES.get(config.family)
    if family is None:
        raise InputError(f"model.family={config.family!r}: must be one of {', '.join(_FAMILIES)}")
    for name in ("qkv_bias", "qk_norm"):
        if getattr(config, name) != getattr(family, name):
            raise InputError(
                f"model.{name}={getattr(config, name)}: family {config.family!r} always has {getattr(family, name)}"
            )
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # transformers would otherwise put Llama 2's ids here
        "eos_token_id": list(eos_ids) or None,
        "torch_dtype": config.param_dtype,
    }


# --- weights --------------------------------------------------------------------------------------------------


def load_params(path, config: DecoderConfig) -> dict:
    """The parameters of a Hugging Face directory, read tensor by tensor.

    Args:
      path: directory with model.safetensors, or with model.safetensors.index.json and its shards.

    Returns:
      The tree of `params.declare` with numpy arrays in config.param_dtype. They lie in host memory: the caller
      puts them on devices, whole or sharded.

    Raises:
      InputError: a file is missing or damaged, a weight is missing, unexpected, of the wrong shape or of an
        integer dtype, or the index names a file outside the directory.
    """
    path = pathlib.Path(path)
    files = _weight_files(path)
    wanted = {}
    for slot in slots(config):
        if slot.hf_name not in files:
            raise InputError(f"{path}: weight {slot.hf_name} is missing (expected shape {slot.hf_shape})")
        wanted[slot.hf_name] = slot
    for name in files:
        # Old Llama files hold the rotary frequencies; tied ones may hold the head twice.
        ignored = name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")
        if name not in wanted and not ignored:
            raise InputError(f"{files[name]}: unexpected weight {name[:200]}")
    params: dict = {"layers": {str(i): {} for i in range(config.layers)}}
    for file in sorted(set(files.values())):
        for slot, value in _read_file(file, [s for n, s in wanted.items() if files[n] == file]):
            parent = params
            for key in slot.path[:-1]:
                parent = parent[key]
            parent[slot.path[-1]] = np.ascontiguousarray(slot.from_hf(value), np.dtype(config.storage_dtype))
    check_params(params, config, str(path))
    return params


def save_params(path, params: dict, config: DecoderConfig, eos_ids: tuple[int, ...] = ()) -> None:
    """Writes config.json and model.safetensors into the directory `path`, made where absent.

    transformers loads the result as it is. Parameters are written in the dtype they have; `eos_ids` only tells
    transformers where generation stops.
    """
    check_params(params, config, "save_params")
    tensors = {}
    for slot in slots(config):
        value = params
        for key in slot.path:
            value = value[key]
        tensors[slot.hf_name] = slot.to_hf(np.asarray(value))
    save_tensors(path, tensors, config, eos_ids)


def save_tensors(path, tensors: dict[str, np.ndarray], config: DecoderConfig, eos_ids: tuple[int, ...] = ()) -> None:
    """`save_params` for tensors that already have Hugging Face's names and layout."""
    path = pathlib.Path(path)
    text = json.dumps(config_json(config, eos_ids), indent=2) + "\n"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(text)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},  # transformers 4 refuses a file that does not name its framework
    )


def _weight_files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file that holds each Hugging Face weight name."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        with _open(single) as f:
            return dict.fromkeys(f.keys(), single)
    if not index.is_file():
        raise InputError(f"{path}: holds neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map")
    for name, file in weight_map.items():
        # An index comes with a download; it must not point the reader at other files of this machine.
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\:\0"):
            raise InputError(f"{index}: weight {name[:200]} lies in {repr(file)[:200]}, which is not a plain file name")
    return {name: path / file for name, file in weight_map.items()}


def _open(file: pathlib.Path):
    if not file.is_file():
        raise InputError(f"{file}: does not exist")
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError, ValueError) as e:
        raise InputError(f"{file}: not a complete safetensors file ({' '.join(str(e).split())[:200]})") from e


def _read_file(file: pathlib.Path, wanted: list[Slot]) -> Iterator[tuple[Slot, np.ndarray]]:
    with _open(file) as f:
        present = set(f.keys())
        for slot in wanted:
            if slot.hf_name not in present:
                raise InputError(f"{file}: weight {slot.hf_name} is missing, though the index lists it here")
            head = f.get_slice(slot.hf_name)
            if tuple(head.get_shape()) != slot.hf_shape:
                shape = tuple(head.get_shape())
                raise InputError(f"{file}: weight {slot.hf_name} has shape {shape}, expected {slot.hf_shape}")
            if head.get_dtype() not in _DTYPES:
                raise InputError(
                    f"{file}: weight {slot.hf_name} has dtype {head.get_dtype()}; supported: {', '.join(_DTYPES)}"
                )
            yield slot, f.get_tensor(slot.hf_name)
