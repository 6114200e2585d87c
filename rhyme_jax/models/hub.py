"""Models of the Hugging Face Hub: `hf:ORG/NAME[@REVISION]` becomes a directory in the local cache."""

import pathlib
import re

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.models.hf_config import MODEL_FILES
from rhyme_jax.models.hf_weights import INDEX, SINGLE, read_index

PREFIX = "hf:"
_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII)

# What is downloaded: configs, tokenizers and safetensors. Never pickled weights (.bin, .pt): reading one runs its code.
# Nor files in folders, which hold the same weights in other formats.
FILES = (*MODEL_FILES, "model*.safetensors", INDEX)
_LONGEST = 250  # characters of a name; the cache has files named like its parts


def is_repo_name(text: str) -> bool:
    """Whether `text` looks like ORG/NAME, with or without a revision."""
    return _SPEC.fullmatch(text) is not None


def fetch(spec: str) -> pathlib.Path:
    """The directory of a model of the Hub: that of the local cache, or else downloaded into it.

    What is in the cache is not compared with the Hub, so a run meets the same weights each time and needs no network;
    name a revision to have another. HF_HOME, HF_HUB_OFFLINE and HF_TOKEN mean what they mean to `huggingface_hub`.

    Args:
      spec: 'hf:ORG/NAME' (its main branch) or 'hf:ORG/NAME@REVISION' (a branch, a tag or a commit).

    Raises:
      InputError: the name is malformed; the Hub does not know it, or does not let us have it; it cannot be reached and
        the cache does not hold the model; the model has no safetensors.
    """
    found = _SPEC.fullmatch(spec.removeprefix(PREFIX))
    if not spec.startswith(PREFIX) or found is None or ".." in spec or len(spec) > _LONGEST:
        raise InputError(
            f"init.weights={repr(spec)[:200]}: a model of the Hub is 'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION'"
        )
    repo, revision = found["repo"], found["revision"]
    # Here, because it takes 0.3 s and only some runs need it.
    import huggingface_hub
    from huggingface_hub import errors

    def snapshot(local: bool) -> pathlib.Path:
        where = {"repo_id": repo, "revision": revision, "local_files_only": local}
        return pathlib.Path(
            huggingface_hub.snapshot_download(**where, allow_patterns=list(FILES), ignore_patterns=["*/*"])
        )

    try:
        folder = snapshot(local=True)
        if not _missing(folder):
            return folder
    except errors.LocalEntryNotFoundError:
        pass
    except errors.HFValidationError as e:
        raise InputError(f"init.weights={spec!r}: {one_line(e)}") from e
    elsewhere = (
        f"download {repo} where there is a network (`hf download {repo}`) and give init.weights that directory, or set "
        "HF_HOME to a cache that holds it"
    )
    try:
        folder = snapshot(local=False)
    except errors.GatedRepoError as e:
        raise InputError(
            f"init.weights={spec!r}: access to this model is restricted: accept its terms on "
            f"https://huggingface.co/{repo} and set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise InputError(
            f"init.weights={spec!r}: the Hub has no such model, or it is private: check the name, or set HF_TOKEN"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise InputError(f"init.weights={spec!r}: {repo} has no revision {revision!r}") from e
    except Exception as e:  # of the network, its proxies, the disk
        raise InputError(
            f"init.weights={spec!r}: not whole in the local cache, and cannot be downloaded ({_cause(e)}); {elsewhere}"
        ) from e
    missing = _missing(folder)
    if missing:  # also where there is no network: then we are given what the cache has
        never = "; pickled weights (.bin, .pt) are not read, because they can run code"
        raise InputError(
            f"init.weights={spec!r}: {missing} is missing in {folder}, and cannot be had from the Hub"
            f"{never if missing.endswith('.safetensors') else ''}; {elsewhere}"
        )
    return folder


def _missing(folder: pathlib.Path) -> str | None:
    """The first file that a model needs and `folder` has not."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            return name
    if (folder / SINGLE).is_file():
        return None
    index = folder / INDEX
    if not index.is_file():
        return SINGLE
    return next((name for name in sorted(set(read_index(index).values())) if not (folder / name).is_file()), None)


def _cause(error: BaseException) -> str:
    """What first went wrong: the library wraps it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)
