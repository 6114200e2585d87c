"""config.json of a Hugging Face directory in and out, for the llama, qwen2 and qwen3 families."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json
from rhyme_jax.models.config import DecoderConfig


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
