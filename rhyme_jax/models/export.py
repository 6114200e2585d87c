"""A trained model as a Hugging Face directory, which transformers and vLLM load like the one it came from.

A run keeps the small files of its model (`keep_model_files`); with weights from a checkpoint they make a directory
again (`write_model`). Everything that those files say and we do not read is kept.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json, write_json
from rhyme_jax.models import hf_weights
from rhyme_jax.models.config import DTYPES, DecoderConfig
from rhyme_jax.models.hf_config import MODEL_FILES, config_json
from rhyme_jax.models.load import Model
from rhyme_jax.models.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"


def check_model_files(model: Model, folder) -> None:
    """What `keep_model_files` left must be what the model has now: a run goes on with the model that it began with.

    Raises:
      InputError: a file differs, or `folder` holds something else.
    """
    folder = pathlib.Path(folder)
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a directory; a run keeps the files of its model there")
        if not (folder / CONFIG).is_file():
            if any(folder.iterdir()):
                raise InputError(f"{folder}: holds files that are none of a run's; use another --workdir")
            return
        if model.folder is None:
            if read_json(folder / CONFIG) != _config_json(model):
                raise _another(model, folder / CONFIG)
            return
        for name in MODEL_FILES:
            theirs, ours = ((f / name).read_bytes() if (f / name).is_file() else None for f in (model.folder, folder))
            if theirs != ours:
                raise _another(model, folder / name)
    except OSError as e:
        raise InputError(f"{folder}: cannot be read ({e.strerror or e})") from e


def _another(model: Model, path: pathlib.Path) -> InputError:
    return InputError(f"{path}: is not that of init.weights={model.source}, though the run began with it")


def _config_json(model: Model) -> dict:
    return config_json(model.config, model.tokenizer.eos_ids)


def keep_model_files(model: Model, folder) -> None:
    """Copies the files of a model but for its weights into `folder`, byte for byte; writes them where it has none.

    A folder that holds them already is left as it is.

    Raises:
      InputError: as `check_model_files`, or a file cannot be read or written.
    """
    folder = pathlib.Path(folder)
    check_model_files(model, folder)
    if (folder / CONFIG).is_file():
        return
    try:
        with _new_directory(folder) as made:
            if model.folder is None:
                write_json(made / CONFIG, _config_json(model))
                model.tokenizer.save(made)
            else:
                _copy(model.folder, made)
    except OSError as e:
        raise InputError(f"{folder}: the model's files cannot be kept ({e.strerror or e})") from e


@contextlib.contextmanager
def _new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory to fill. It takes the place of `path`, absent or empty, once the block is done, and else is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        temporary.chmod(0o755)  # as other directories; mkdtemp's are private
        yield temporary
        if path.is_dir():  # filled rather than replaced: it may be where a shell stands, or something is mounted
            for file in sorted(temporary.iterdir(), key=lambda f: f.name == CONFIG):  # what makes it a model comes last
                file.replace(path / file.name)
        else:
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    for file in (source / name for name in MODEL_FILES):
        if file.is_file():
            shutil.copyfile(file, target / file.name)


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
    out, folder = pathlib.Path(os.path.abspath(out)), pathlib.Path(folder)
    check_out(out)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype={dtype}: must be one of {', '.join(DTYPES)}")
    tensors = hf_weights.hf_tensors(params, config, None if dtype is None else np.dtype(DTYPES[dtype]))
    try:
        with _new_directory(out) as made:
            _copy(folder, made)
            _set_eos(made, Tokenizer.load(folder))
            _set_dtype(made / CONFIG, dtype or str(np.dtype(params["embed"].dtype)))
            hf_weights.write_tensors(made, tensors)
    except OSError as e:
        raise InputError(f"--out={out}: cannot be written ({e.strerror or e})") from e


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
