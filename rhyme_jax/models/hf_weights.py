"""Weights of a Hugging Face directory in and out: safetensors, in one file or in several with an index."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rhyme_jax.errors import InputError
from rhyme_jax.files import read_json
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.hf_config import config_json
from rhyme_jax.models.hf_names import Slot, slots
from rhyme_jax.models.params import check_params

_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that are read


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
