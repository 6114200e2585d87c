"""config.json: transformers' own files read right, bad ones refused."""

import dataclasses
import json
import pathlib
import tempfile

import pytest
import tokenizers
from hf_files import BASE, edit_json, one_line, random_params
from tokenizers import models

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.config import RopeScaling
from rhyme_jax.models.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"

GEMMA = {"activation": "gelu_tanh", "embed_scale": True, "norm_plus_one": True, "post_norms": True, "query_scalar": 3}
WRITTEN = {
    "llama": BASE,
    "llama, untied": dataclasses.replace(BASE, tie_embeddings=False),
    "llama, scaled": dataclasses.replace(BASE, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "llama, longer": dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 2.0)),
    "mistral": dataclasses.replace(BASE, family="mistral", window=7),
    "mistral, no window": dataclasses.replace(BASE, family="mistral"),
    "qwen2": dataclasses.replace(BASE, family="qwen2", qkv_bias=True, tie_embeddings=False),
    "qwen2, local": dataclasses.replace(BASE, family="qwen2", qkv_bias=True, window=7),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qk_norm=True),
    "qwen3, mixed": dataclasses.replace(BASE, family="qwen3", qk_norm=True, window=3, local_layers=(True, False)),
    "smollm3": dataclasses.replace(BASE, family="smollm3", rope_layers=(True, False), window=5),
    "smollm3, rope everywhere": dataclasses.replace(BASE, family="smollm3"),
    "gemma2": dataclasses.replace(
        BASE, family="gemma2", **GEMMA, attn_softcap=5.0, logit_softcap=3.0, window=6, local_layers=(False, True)
    ),
    "gemma2, uncapped": dataclasses.replace(BASE, family="gemma2", **GEMMA),
    "gemma3_text": dataclasses.replace(
        BASE,
        family="gemma3_text",
        **GEMMA,
        qk_norm=True,
        window=6,
        local_layers=(True, False),
        rope_theta_local=10.0,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "gemma3_text, one rotation": dataclasses.replace(BASE, family="gemma3_text", **GEMMA, qk_norm=True, window=6),
}
# Changes that make another family's config of `saved`.
QWEN2, QWEN3, MISTRAL, SMOLLM3, GEMMA2, GEMMA3 = (
    {"model_type": name, "architectures": "DELETE"}
    for name in ("qwen2", "qwen3", "mistral", "smollm3", "gemma2", "gemma3_text")
)
GEMMA2["hidden_activation"] = "gelu_pytorch_tanh"
HUGE = 10**400  # more than a float holds
WHOLE = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "max_position_embeddings")


def parse(raw):
    """read_config of a file that holds `raw`."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(raw))
        return hf_config.read_config(folder)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_back(name):
    written = hf_config.config_json(WRITTEN[name], eos_ids=(3, 1))
    assert hf_config.config_json(WRITTEN[name])["eos_token_id"] is None and written["eos_token_id"] == [3, 1]
    assert parse(json.loads(json.dumps(written))) == WRITTEN[name]


def test_both_spellings_of_a_config_are_one():
    """transformers 5 wrote the golden files; the same in the words of transformers 4 is the same config."""
    for folder in sorted(p for p in GOLDEN.iterdir() if p.is_dir()):
        raw = json.loads((folder / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        if raw["model_type"] == "gemma3_text":
            local, rope = rope["sliding_attention"], rope["full_attention"]
            raw["rope_local_base_freq"] = local["rope_theta"]
        old = raw | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        assert parse(old) == hf_config.read_config(folder)


# Models as published: what tells their families apart, in the words of their config.json.
PUBLISHED = {
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
        },
        {"rope_theta": 500000.0, "rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), "tie_embeddings": True},
    ),
    "Mistral-7B-v0.1": ({"model_type": "mistral", "sliding_window": 4096}, {"window": 4096, "tie_embeddings": False}),
    "Mistral-7B-v0.3": ({"model_type": "mistral", "sliding_window": None}, {"window": 0}),
    "Qwen2.5-1.5B": (
        {"model_type": "qwen2", "max_window_layers": 2, "sliding_window": 32768, "use_sliding_window": False},
        {"window": 0, "qkv_bias": True},
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            "layer_types": ["full_attention"] * 6,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0, 1, 1],
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"rope_layers": (True, True, True, False, True, True), "window": 0, "rope_theta": 2e6, "tie_embeddings": True},
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 224,
            "sliding_window": 4096,
        },
        {
            "attn_softcap": 50.0,
            "logit_softcap": 30.0,
            "query_scalar": 224,
            "window": 4096,
            "local_layers": (True, False) * 3,
            "head_dim": 256,
            "norm_plus_one": True,
            "post_norms": True,
            "embed_scale": True,
            "qk_norm": False,
        },
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        {
            "attn_softcap": 0.0,
            "logit_softcap": 0.0,
            "query_scalar": 0,  # that of head_dim
            "window": 512,
            "local_layers": (True,) * 5 + (False,),
            "rope_theta": 1e6,
            "rope_theta_local": 1e4,
            "qk_norm": True,
        },
    ),
}
SIX_LAYERS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_as_published(name):
    raw, expected = PUBLISHED[name]
    config = parse(SIX_LAYERS | raw)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "mistral"}, {"window": 4096, "max_positions": 131_072}),
        ({"model_type": "smollm3"}, {"rope_layers": (True, True, True, False, True, True), "window": 0}),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 3},
            {"window": 9, "local_layers": (False, False, True) * 2, "rope_layers": (True, True, False) * 2},
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, {"window": 0}),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 4},
            {"window": 4096, "local_layers": (False,) * 4 + (True,) * 2},
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, {"local_layers": ()}),
        (
            {"model_type": "gemma2"},
            {
                "attn_softcap": 50.0,
                "logit_softcap": 30.0,
                "window": 4096,
                "rope_theta": 10_000.0,
                "max_positions": 8192,
            },
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, {"attn_softcap": 0.0, "logit_softcap": 30.0}),
        (
            {"model_type": "gemma3_text"},
            {"rope_theta": 1e6, "rope_theta_local": 1e4, "logit_softcap": 0.0, "local_layers": (True,) * 5 + (False,)},
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}},
            {"rope_theta": 1e6, "rope_theta_local": 7.0},
        ),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"] * 6}, {"window": 0, "rope_theta_local": 0.0}),
    ],
)
def test_layers_left_out_take_transformers_defaults(raw, expected):
    config = parse(SIX_LAYERS | raw)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": "DELETE"}, {"kv_heads": 4}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"head_dim": "DELETE"}, {"head_dim": 4}),
        ({"rope_theta": "DELETE", "rms_norm_eps": "DELETE"}, {"rope_theta": 10_000.0, "norm_eps": 1e-6}),
        ({"tie_word_embeddings": "DELETE"}, {"tie_embeddings": False}),
        ({"max_position_embeddings": "DELETE"}, {"max_positions": 2048}),
        ({"rope_scaling": {"type": "default"}}, {}),
        ({"rope_theta": "DELETE", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
        ({**QWEN2, "use_sliding_window": False, "sliding_window": 4096}, {"max_positions": 64}),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 2}, {"qkv_bias": True}),
        ({**QWEN3, "head_dim": "DELETE"}, {"head_dim": 128, "qk_norm": True}),
    ],
)
def test_fields_left_out_take_transformers_defaults(changes, expected, saved):
    edit_json(saved / "config.json", **changes)
    config = hf_config.read_config(saved)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' .* is not supported; supported: .*llama.*qwen2.*gemma3_text"),
        ({"model_type": "DELETE"}, r"model_type=None \(architectures=\['LlamaForCausalLM'\]\) is not supported"),
        (
            {"model_type": "gemma3", "text_config": {}},
            "model_type='gemma3' .* multimodal .* only text configs are read",
        ),
        ({"model_type": "llava", "vision_config": {}}, "model_type='llava' .* multimodal model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification.* only LlamaForCausalLM is"),
        ({"model_type": ["llama"]}, "model_type="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: \"silu\""),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor=missing"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor=missing: must be a positive number"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
        ({"rope_parameters": 3}, "rope_parameters=3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*no local layers"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=missing: layers that are"),
        ({**QWEN3, "layer_types": ["full_attention"]}, "layer_types=.*must be 2 times"),
        ({**QWEN3, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked_attention"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1: .* 0 or more"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window=0: must be a positive integer"),
        ({**MISTRAL, "layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.* contradicts"),
        ({**SMOLLM3, "no_rope_layers": [1]}, r"no_rope_layers=\[1\]: must be a list of 0 and 1, one for each of 2"),
        ({**SMOLLM3, "no_rope_layers": [1, 2]}, "no_rope_layers="),
        ({**SMOLLM3, "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: at most 10000 where layers differ"),
        ({**GEMMA3, "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: at most 10000 where layers differ"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window=missing: layers that are local need one"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({**GEMMA3, "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({**GEMMA3, "final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0: must be a positive number"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 7.0}}, "rope_parameters=.*must hold full_attention"),
        (
            {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.rope_type='linear'",
        ),
        ({"hidden_size": "DELETE"}, "hidden_size=missing"),
        ({"hidden_size": "16"}, "hidden_size='16': must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny'"),
        ({"num_key_value_heads": 3}, "kv_heads=3"),
        ({"head_dim": 3}, "head_dim=3"),
        *[({name: HUGE}, rf"{name}=10{{79}}: must be below 2\*\*31$") for name in WHOLE],
        ({"hidden_size": 2**31}, r"hidden_size=2147483648: must be below 2\*\*31"),
        ({**GEMMA2, "sliding_window": 10**21}, r"sliding_window=10{21}: must be below 2\*\*31"),
        *[
            ({name: HUGE}, f"{name}=10{{79}}: must be a positive number that")
            for name in ("rms_norm_eps", "rope_theta")
        ],
        ({"rope_scaling": {"type": "linear", "factor": HUGE}}, "rope_scaling.factor=10{79}: must be a positive number"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300: must be a positive number that float32 can hold"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps=1e-60: must be a positive number that float32 can hold"),
    ],
)
def test_configs_that_are_refused(changes, message, saved):
    edit_json(saved / "config.json", **changes)
    with pytest.raises(InputError, match=message) as error:
        hf_config.read_config(saved)
    one_line(error)


def tokens(vocab: dict[str, int], special: dict[str, int], **ids) -> Tokenizer:
    """`special` must come after `vocab` without a gap, unless they are in it: that is where tokenizers put them."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.add_special_tokens(list(special))
    assert backend.get_vocab(True) == vocab | special
    return Tokenizer(backend, ids.pop("eos_ids", (1,)), 0, **ids)


PAIR = {"a": 0, "b": 1}
FOUR = {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.mark.parametrize(
    ("tokenizer", "rows"),
    [
        (tokens(FOUR, {}), 4),
        (tokens(FOUR, {"<image_soft_token>": 4}), 4),  # google/gemma-3-1b-it
        (tokens({**PAIR, "</s>": 250}, {"</s>": 250}, eos_ids=(250,)), 300),
    ],
)
def test_vocabularies_that_fit(tokenizer, rows):
    hf_config.check_vocabulary(tokenizer, rows, "here")


@pytest.mark.parametrize(
    ("tokenizer", "rows", "message"),
    [
        (tokens(FOUR, {}), 3, "here: the tokenizer has token 'd' of id 3, the embedding only 3 rows"),
        # Fewer tokens than rows.
        (
            tokens({**PAIR, "\n": 5000}, {}),
            300,
            r"here: the tokenizer has token '\\n' of id 5000, the embedding only 300",
        ),
        (tokens({**PAIR, "</s>": 300}, {"</s>": 300}, eos_ids=(1, 300)), 300, "token '</s>' of id 300, .* 300 rows"),
        (tokens(FOUR, {"<s>": 4}, bos_id=4), 4, "token '<s>' of id 4"),
    ],
)
def test_vocabularies_that_do_not_fit(tokenizer, rows, message):
    with pytest.raises(InputError, match=message) as error:
        hf_config.check_vocabulary(tokenizer, rows, "here")
    one_line(error)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\udcff"])
def test_malformed_config_json(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"config.json") as error:
        hf_config.read_config(tmp_path)
    one_line(error)


def test_no_config_json(tmp_path):
    with pytest.raises(InputError, match=r"config.json: does not exist"):
        hf_config.read_config(tmp_path)


def test_a_config_its_family_cannot_say_is_not_written(tmp_path):
    config = dataclasses.replace(BASE, qkv_bias=True)
    with pytest.raises(InputError, match="qkv_bias=True: family 'llama' always has False"):
        hf_weights.save_params(tmp_path / "new", random_params(config), config)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"window": 4}),
        ("qwen2", {"activation": "gelu_tanh"}),
        ("mistral", {"local_layers": (True, False)}),
        ("smollm3", {"attn_softcap": 1.0}),
        ("gemma2", {"rope_theta_local": 3.0}),
        ("gemma3_text", {"attn_softcap": 1.0}),
        ("gemma3_text", {"embed_scale": False}),
        ("gemma3_text", {"rope_theta_local": 0.0}),
    ],
)
def test_what_no_file_of_a_family_says_is_refused(name, changes):
    config = dataclasses.replace(WRITTEN[name], **changes)
    with pytest.raises(InputError, match=f"{next(iter(changes))}|softcapping") as error:
        hf_config.config_json(config)
    one_line(error)
