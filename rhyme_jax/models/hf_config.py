"""config.json of a Hugging Face directory in and out, for the families of `_FAMILIES`.

Read are both spellings of the rotation: transformers 4 had rope_theta beside rope_scaling, 5 keeps all of it in
rope_parameters. Written is the older one, which transformers 4, 5 and vLLM understand.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json
from rhyme_jax.models.config import DecoderConfig, RopeScaling
from rhyme_jax.models.tokenizer import Tokenizer

# All that belongs to a model beside its weights.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` implies. Defaults are those of transformers, for fields that config.json leaves out."""

    architecture: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    tied: bool = False
    sliding: str | None = None  # whose rules say which layers are local; None: no layer may be
    switches: Mapping = dataclasses.field(default_factory=dict)  # of DecoderConfig, the same for each model


_GEMMA = {"activation": "gelu_tanh", "embed_scale": True, "norm_plus_one": True, "post_norms": True}
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048),
    "mistral": _Family("MistralForCausalLM", 131_072, kv_heads=8, sliding="mistral"),
    "qwen2": _Family("Qwen2ForCausalLM", 32_768, kv_heads=32, sliding="qwen", switches={"qkv_bias": True}),
    "qwen3": _Family("Qwen3ForCausalLM", 32_768, kv_heads=32, head_dim=128, sliding="qwen", switches={"qk_norm": True}),
    "smollm3": _Family("SmolLM3ForCausalLM", 32_768, kv_heads=4, rope_theta=2_000_000.0, tied=True, sliding="smollm3"),
    "gemma2": _Family("Gemma2ForCausalLM", 8192, kv_heads=4, head_dim=256, tied=True, sliding="gemma", switches=_GEMMA),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        131_072,
        kv_heads=4,
        head_dim=256,
        rope_theta=1_000_000.0,
        tied=True,
        sliding="gemma",
        switches=_GEMMA | {"qk_norm": True},
    ),
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # our name -> Hugging Face's
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

# The most layers of a model whose layers differ: each is an entry of a tuple, so that a file cannot ask for a billion.
_MOST_DIFFERING = 10_000


class _Fields:
    """Checked access to the fields of a JSON object. Null is as good as absent."""

    def __init__(self, source, values: Mapping, prefix: str = ""):
        self.source, self.values, self.prefix = source, values, prefix

    def refuse(self, name: str, value, reason: str) -> InputError:
        shown = "missing" if value is None else repr(value)[:80]
        return InputError(f"{self.source}: {self.prefix}{name}={shown}{reason}")

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = default if self.values.get(name) is None else self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(name, value, f": must be {'a positive integer' if least else 'an integer, 0 or more'}")
        if value >= 2**31:
            raise self.refuse(name, value, ": must be below 2**31")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.values.get(name) is None else self.values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not in_float32(value):
            raise self.refuse(name, value, ": must be a positive number that float32 can hold")
        return float(value)

    def only(self, name: str, default, *supported):
        value = self.values.get(name, default)
        if value not in supported:
            shown = ", ".join(json.dumps(v) for v in supported)
            raise InputError(
                f"{self.source}: {self.prefix}{name}={repr(value)[:80]} is not supported; supported: {shown}"
            )
        return value

    def objects(self, name: str) -> "_Fields":
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.refuse(name, value, ": must be an object or null")
        return _Fields(self.source, value, f"{self.prefix}{name}.")


def in_float32(value: float) -> bool:
    """Whether a number is still positive and finite in float32; it may be an int of any length."""
    return 0 < value < 3e38 and bool(np.float32(value) > 0)


def check_vocabulary(tokenizer: Tokenizer, rows: int, source) -> None:
    """That every token which can come up has a row of the embedding.

    It is ids that count, not tokens: a vocabulary may have gaps. Special tokens may lie beyond the rows, as that of
    Gemma 3's images does in its text-only models; but not those that begin or end a text.

    Raises:
      InputError: a token lies beyond the rows. The message begins with `source`.
    """
    beyond = {token: i for token, i in tokenizer.backend.get_vocab(True).items() if i >= rows}
    special = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    used = {*tokenizer.eos_ids, tokenizer.bos_id}
    for token, i in sorted(beyond.items(), key=lambda item: item[1]):
        if i not in special or i in used:
            raise InputError(
                f"{source}: the tokenizer has token {repr(token)[:80]} of id {i}, the embedding only {rows} rows"
            )


def read_config(path, dtype: str = "float32", param_dtype: str = "float32") -> DecoderConfig:
    """The config of a Hugging Face directory.

    Args:
      path: the directory.
      dtype: of activations, "float32" | "bfloat16". The file's own dtype is that of its weights, and is ignored.
      param_dtype: of the parameters once loaded.

    Raises:
      InputError: config.json is missing or malformed, or asks for something the decoder does not do (another
        model_type, architecture or activation, other rotary scaling than "linear" and "llama3", biases elsewhere
        than on q, k and v, attention in both directions, quantized weights).
    """
    path = pathlib.Path(path) / "config.json"
    return _parse(_Fields(path, read_json(path)), dtype, param_dtype)


def _parse(raw: _Fields, dtype: str, param_dtype: str) -> DecoderConfig:
    name = _model_type(raw)
    family = _FAMILIES[name]
    activation = _ACTIVATIONS[family.switches.get("activation", "silu")]
    raw.only("hidden_activation" if family.sliding == "gemma" else "hidden_act", activation, activation)
    bias = family.switches.get("qkv_bias", False)
    raw.only("attention_bias", bias, bias)  # would bias o as well
    raw.only("mlp_bias", False, False)
    raw.only("partial_rotary_factor", 1.0, 1.0, None)
    raw.only("quantization_config", None, None)
    raw.only("use_bidirectional_attention", None, None, False)
    layers, heads, width = (raw.whole(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    max_positions = raw.whole("max_position_embeddings", family.max_positions)
    # Grouped heads are the default of some families, but an explicit null has always meant one each.
    kv_heads = heads if "num_key_value_heads" in raw.values else family.kv_heads or heads
    rope_layers = _rope_layers(raw, layers) if name == "smollm3" else ()
    window, local_layers = _local_layers(raw, family, layers, rope_layers)
    own = {"rope_layers": rope_layers, "window": window, "local_layers": local_layers}
    if name == "gemma3_text":
        rope = _rope_by_layer_type(raw, family, max_positions, window)
        # transformers has the field, and its attention ignores it.
        raw.only("attn_logit_softcapping", None, None)
    else:
        rope = _rope(raw, family, max_positions)
    if family.sliding == "gemma":
        own["query_scalar"] = raw.whole("query_pre_attn_scalar", 256)
        for field, ours, default in (
            ("attn_logit_softcapping", "attn_softcap", 50.0),
            ("final_logit_softcapping", "logit_softcap", 30.0),
        ):
            absent = default if name == "gemma2" and field not in raw.values else 0.0
            own[ours] = raw.number(field) if raw.values.get(field) is not None else absent
    return DecoderConfig(
        vocab_size=raw.whole("vocab_size"),
        width=width,
        layers=layers,
        q_heads=heads,
        kv_heads=raw.whole("num_key_value_heads", kv_heads),
        head_dim=raw.whole("head_dim", family.head_dim or width // heads),
        mlp_width=raw.whole("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        tie_embeddings=raw.only("tie_word_embeddings", family.tied, False, True),
        max_positions=max_positions,
        family=name,
        dtype=dtype,
        param_dtype=param_dtype,
        **rope,
        **own,
        **family.switches,
    )


def _model_type(raw: _Fields) -> str:
    """The name of a supported family, or one line that says what the file holds instead."""
    name, architectures = raw.values.get("model_type"), raw.values.get("architectures")
    also = f" (architectures={repr(architectures)[:80]})" if architectures else ""
    known = ", ".join(f'"{family}"' for family in _FAMILIES)
    if not isinstance(name, str) or name not in _FAMILIES:
        hint = ""
        if isinstance(raw.values.get("text_config"), dict) or "vision_config" in raw.values or name == "gemma3":
            hint = "; this is a multimodal model, of which only text configs are read"
            hint += ' ("gemma3_text", saved from the language model alone)' if name == "gemma3" else ""
        raise InputError(f"{raw.source}: model_type={repr(name)[:80]}{also} is not supported; supported: {known}{hint}")
    want = _FAMILIES[name].architecture
    named = architectures if isinstance(architectures, list) else [want]
    if named and want.lower() not in [str(a).lower() for a in named]:
        raise raw.refuse("architectures", architectures, f" is not supported; of model_type {name!r} only {want} is")
    return name


def _rope(raw: _Fields, family: _Family, max_positions: int) -> dict:
    """The fields of one rotation for all layers."""
    old, new = raw.objects("rope_scaling"), raw.objects("rope_parameters")
    rope = old if old.values else new
    theta = rope.number("rope_theta", raw.number("rope_theta", family.rope_theta))
    return {"rope_theta": theta, "rope_scaling": _rope_scaling(rope, max_positions)}


def _rope_by_layer_type(raw: _Fields, family: _Family, max_positions: int, window: int) -> dict:
    """The fields of Gemma 3's two rotations: of global layers, and of local ones."""
    old, new = raw.objects("rope_scaling"), raw.objects("rope_parameters")
    if new.values and not {_LOCAL, _GLOBAL} & set(new.values):
        raise raw.refuse("rope_parameters", new.values, f": must hold {_GLOBAL} and {_LOCAL}")
    full, local = new.objects(_GLOBAL), new.objects(_LOCAL)
    full = _Fields(raw.source, full.values | old.values, old.prefix if old.values else full.prefix)
    local.only("rope_type", local.values.get("type", "default"), "default")
    local_theta = local.number("rope_theta", raw.number("rope_local_base_freq", 10_000.0))
    return {
        "rope_theta": full.number("rope_theta", raw.number("rope_theta", family.rope_theta)),
        "rope_scaling": _rope_scaling(full, max_positions),
        "rope_theta_local": local_theta if window else 0.0,
    }


def _rope_scaling(rope: _Fields, max_positions: int) -> RopeScaling | None:
    rope.only("partial_rotary_factor", 1.0, 1.0, None)
    kind = rope.only("rope_type", rope.values.get("type", "default"), "default", "none", "linear", "llama3")
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.whole("original_max_position_embeddings", max_positions),
        )
    return None


def _differing(raw: _Fields, layers: int) -> range:
    if layers > _MOST_DIFFERING:
        raise raw.refuse("num_hidden_layers", layers, f": at most {_MOST_DIFFERING} where layers differ")
    return range(layers)


def _rope_layers(raw: _Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3: 1 in no_rope_layers means that a layer has rotary positions."""
    flags = raw.values.get("no_rope_layers")
    if flags is None:
        interval = raw.whole("no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in _differing(raw, layers))
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise raw.refuse("no_rope_layers", flags, f": must be a list of 0 and 1, one for each of {layers} layers")
    return tuple(flag == 1 for flag in flags[:layers])


def _local_layers(
    raw: _Fields, family: _Family, layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int, tuple[bool, ...]]:
    """(window, which layers are local) as DecoderConfig means them; (0, ()) where no layer is."""
    types, given = raw.values.get("layer_types"), raw.values.get("sliding_window")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or any(t not in (_LOCAL, _GLOBAL) for t in types):
            raise raw.refuse("layer_types", types, f": must be {layers} times {_GLOBAL!r} or {_LOCAL!r}")
        if _LOCAL in types and family.sliding is None:
            raise raw.refuse("layer_types", types, ": this model_type has no local layers")
    if family.sliding is None:
        if given:
            raise raw.refuse("sliding_window", given, ": this model_type has no local layers")
        return 0, ()

    # What the file means by its window, where it has one, before layer_types has its say.
    default = None if family.sliding == "smollm3" or "sliding_window" in raw.values else 4096
    window = 0 if given is None and default is None else raw.whole("sliding_window", default)
    if family.sliding in ("qwen", "smollm3") and not raw.only("use_sliding_window", False, False, True, None):
        window = 0  # Qwen's configs name a window even where no layer uses it
    if family.sliding == "mistral":
        # transformers ignores Mistral's layer_types, so a file that says two things would mean one here, one there.
        if types is not None and set(types) != {_LOCAL if window else _GLOBAL}:
            raise raw.refuse(
                "layer_types", types, f": contradicts sliding_window={given!r}, which holds for all layers"
            )
        return window, ()
    if types is not None:
        flags = tuple(t == _LOCAL for t in types)
    elif family.sliding == "gemma":
        period = raw.whole("sliding_window_pattern", 6) if raw.values["model_type"] == "gemma3_text" else 2
        flags = tuple((i + 1) % period != 0 for i in _differing(raw, layers))
    elif not window:
        return 0, ()
    elif family.sliding == "smollm3":
        flags = tuple(not rope for rope in rope_layers)
    else:
        first = raw.whole("max_window_layers", 28, least=0)
        flags = tuple(i >= first for i in _differing(raw, layers)) if first < layers else ()
    if not any(flags):
        return 0, ()
    if not window:
        raise raw.refuse("sliding_window", given, ": layers that are local need one that is in use")
    return window, flags


def config_json(config: DecoderConfig, eos_ids: tuple[int, ...] = ()) -> dict:
    """The config.json that transformers (4 and 5), vLLM and `read_config` turn back into `config`.

    Raises:
      InputError: `config` is not a model of its family, so that no file could say it.
    """
    family = _FAMILIES.get(config.family)
    if family is None:
        raise InputError(f"model.family={config.family!r}: must be one of {', '.join(_FAMILIES)}")
    out = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS[family.switches.get("activation", "silu")],
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        **_rope_json(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **_layers_json(config, family),
        # transformers would otherwise put the ids of Llama 2, Gemma or SmolLM3 here; a padding id beyond the
        # vocabulary ends in an error, and one within it gets no gradient.
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": list(eos_ids) or None,
        "torch_dtype": config.param_dtype,
    }
    back = _parse(_Fields(f"model.family={config.family!r}", out), config.dtype, config.param_dtype)
    for field in dataclasses.fields(DecoderConfig):
        mine, theirs = getattr(config, field.name), getattr(back, field.name)
        if mine != theirs:
            raise InputError(f"model.{field.name}={mine}: family {config.family!r} always has {theirs}")
    return out


def _rope_json(config: DecoderConfig) -> dict:
    scaling, out = config.rope_scaling, {}
    if scaling is not None:
        out["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            out["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq,
                "high_freq_factor": scaling.high_freq,
                "original_max_position_embeddings": scaling.original_positions,
            }
    if config.family == "gemma3_text":
        out["rope_local_base_freq"] = config.rope_theta_local or config.rope_theta
    return out


def _layers_json(config: DecoderConfig, family: _Family) -> dict:
    """What tells layers apart, and Gemma's own numbers."""
    local = [config.is_local(i) for i in range(config.layers)] if family.sliding else []
    window, types = config.window or None, [_LOCAL if flag else _GLOBAL for flag in local]
    if family.sliding == "mistral":
        return {"sliding_window": window}
    if family.sliding == "qwen" and window:
        # max_window_layers for readers that do not know layer_types; where local layers come last, it says the same.
        first = local.index(True) if True in local else config.layers
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": types,
        }
    if family.sliding == "smollm3":
        return {
            "no_rope_layers": [int(config.has_rope(i)) for i in range(config.layers)],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": types,
        }
    if family.sliding == "gemma":
        return {
            "hidden_activation": _ACTIVATIONS["gelu_tanh"],
            "query_pre_attn_scalar": config.query_scalar or config.head_dim,
            "attn_logit_softcapping": config.attn_softcap or None,
            "final_logit_softcapping": config.logit_softcap or None,
            "sliding_window": window,
            "layer_types": types,
        }
    return {}
