"""A trained model as a Hugging Face directory, which transformers and vLLM load like the one it came from.

A run keeps the small files of its model (`keep_model_files`); with weights from a checkpoint they make a directory
again (`write_model`). Everything that those files say and we do not read is kept.
"""

import json
import pathlib
import shutil

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json, write_json
from rhyme_jax.models import hf_weights
from rhyme_jax.models.config import DTYPES, DecoderConfig
from rhyme_jax.models.hf_config import config_json
from rhyme_jax.models.load import Model
from rhyme_jax.models.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"

# All that belongs to a model beside its weights.
MODEL_FILES = (
    CONFIG,
    GENERATION,
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


def keep_model_files(model: Model, folder) -> None:
    """Copies the files of a model but for its weights into `folder`, byte for byte; writes them where it has none.

    A folder that is there already is left as it is: a run goes on with the model that it began with.

    Raises:
      InputError: a file cannot be read or written.
    """
    folder = pathlib.Path(folder)
    if (folder / CONFIG).is_file():
        return
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if model.folder is None:
            write_json(temporary / CONFIG, config_json(model.config, model.tokenizer.eos_ids))
            model.tokenizer.save(temporary)
        else:
            for file in (model.folder / name for name in MODEL_FILES):
                if file.is_file():
                    shutil.copyfile(file, temporary / file.name)
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
        temporary.replace(folder)
    except OSError as e:
        raise InputError(f"{folder}: the model's files cannot be kept ({e.strerror or e})") from e


def write_model(out, params: dict, config: DecoderConfig, folder, dtype: str | None = None) -> None:
    """Writes a Hugging Face directory, whole or not at all.

    Args:
      out: absent, or an empty directory.
      params: tree of `params.declare`, numpy or jax arrays.
      folder: what `keep_model_files` left. In config.json only the dtype is changed, in generation_config.json, which
        is made where there is none, only the end-of-sequence ids.
      dtype: of the weights, "float32" | "bfloat16"; None for that of the parameters.

    Raises:
      InputError: `out` holds something or cannot be written, the dtype is unknown, or the parameters are not those
        that `config` declares.
    """
    out, folder = pathlib.Path(out), pathlib.Path(folder)
    check_out(out)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype={dtype}: must be one of {', '.join(DTYPES)}")
    tensors = hf_weights.hf_tensors(params, config, None if dtype is None else np.dtype(DTYPES[dtype]))
    temporary = out.with_name(out.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in (folder / name for name in MODEL_FILES):
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        _set_eos(temporary, Tokenizer.load(folder))
        _set_dtype(temporary / CONFIG, dtype or str(np.dtype(params["embed"].dtype)))
        hf_weights.write_tensors(temporary, tensors)
        if out.is_dir():
            out.rmdir()
        temporary.replace(out)
    except OSError as e:
        raise InputError(f"--out={out}: cannot be written ({e.strerror or e})") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_out(out) -> None:
    """Raises InputError unless `out` is absent or an empty directory."""
    out = pathlib.Path(out)
    try:
        taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    except OSError as e:
        raise InputError(f"--out={out}: cannot be read ({e.strerror or e})") from e
    if taken:
        raise InputError(f"--out={out}: exists and is not an empty directory; name another, or remove it")


def _set_dtype(path: pathlib.Path, dtype: str) -> None:
    value = read_json(path)
    # transformers 4 writes `torch_dtype`, 5 writes `dtype`; both read both.
    names = [name for name in ("dtype", "torch_dtype") if name in value] or ["torch_dtype"]
    if any(value.get(name) != dtype for name in names):
        _write(path, value | dict.fromkeys(names, dtype))


def _set_eos(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    path, ids = folder / GENERATION, list(tokenizer.eos_ids)
    value = read_json(path) if path.is_file() else {}
    stored = value.get("eos_token_id")
    if (stored if isinstance(stored, list) else [stored]) != ids:
        _write(path, value | {"eos_token_id": ids})


def _write(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
