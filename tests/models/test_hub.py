"""Models of the Hub: from a cache laid out as huggingface_hub does it, without a network."""

import json
import os
import pathlib
import shutil

import pytest
from huggingface_hub import constants, errors

from rhyme_jax.errors import InputError
from rhyme_jax.models import hub
from rhyme_jax.models.load import EMBEDDED, open_model

COMMIT, OLD = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """A cache that holds acme/tiny, and no network."""
    repo = tmp_path / "hub" / "models--acme--tiny"
    for commit in (COMMIT, OLD):
        (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted((EMBEDDED / "tiny").iterdir())):
        blob = repo / "blobs" / f"{number:040x}"
        shutil.copyfile(file, blob)
        (repo / "snapshots" / COMMIT / file.name).symlink_to(os.path.relpath(blob, repo / "snapshots" / COMMIT))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "old").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def snapshot(cache, commit=COMMIT) -> pathlib.Path:
    return cache / "hub" / "models--acme--tiny" / "snapshots" / commit


@pytest.mark.parametrize("spec", ["hf:acme/tiny", "hf:acme/tiny@main", f"hf:acme/tiny@{COMMIT}"])
def test_a_cached_model(spec, cache):
    model = open_model(spec)
    assert model.folder == snapshot(cache) and model.source == str(snapshot(cache))
    assert model.config == open_model("embedded:tiny").config and model.tokenizer.encode("1+1") != []


def refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        open_model(spec)
    assert repr(spec) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["hf:acme/other", "hf:acme/tiny@v2"])
def test_neither_cached_nor_reachable(spec, cache):
    refused(spec, r"not whole in the local cache.*offline mode is enabled.*`hf download acme/\w+`.*HF_HOME")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_cached_model_that_lacks_a_file(name, cache):
    (snapshot(cache) / name).unlink()
    refused("hf:acme/tiny", f"{name} is missing in .*{COMMIT}, and cannot be had from the Hub; download acme/tiny")
    refused("hf:acme/tiny@old", f"config.json is missing in .*{OLD}")


def test_a_cached_model_that_lacks_a_shard(cache):
    (snapshot(cache) / "model.safetensors").rename(snapshot(cache) / "model-1.safetensors")
    index = snapshot(cache) / "model.safetensors.index.json"
    for names, whole in ((["model-1.safetensors"], True), (["model-1.safetensors", "model-2.safetensors"], False)):
        index.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
        if whole:
            assert hub.fetch("hf:acme/tiny") == snapshot(cache)
        else:
            refused("hf:acme/tiny", "model-2.safetensors is missing")
    index.write_text(json.dumps({"weight_map": {"a\nb": "x" * 256}}))  # what no file can be called
    with pytest.raises(InputError, match=r"weight 'a\\nb' lies in 'x+, which is not a plain file name"):
        hub.fetch("hf:acme/tiny")


def test_pickled_weights_are_not_read(cache, monkeypatch):
    (snapshot(cache) / "model.safetensors").rename(snapshot(cache) / "pytorch_model.bin")
    refused("hf:acme/tiny", r"model.safetensors is missing .* pickled weights \(.bin, .pt\) are not read")
    asked = []

    def snapshot_download(**options):  # the Hub can be reached, and has nothing else
        asked.append(options)
        return str(snapshot(cache))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refused("hf:acme/tiny", "model.safetensors is missing")
    assert [options["local_files_only"] for options in asked] == [True, False]
    patterns = asked[1]["allow_patterns"]
    assert "model*.safetensors" in patterns and not any(p.endswith((".bin", ".pt", ".pth", "*")) for p in patterns)


class Response:
    """What the errors of huggingface_hub want to know of an answer."""

    headers, request, status_code, text = {}, None, 403, ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, r"accept its terms on https://huggingface.co/acme/other and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "the Hub has no such model, or it is private"),
        (errors.RevisionNotFoundError, "acme/other has no revision None"),
        (errors.HfHubHTTPError, r"cannot be downloaded \(Forbidden by the server\)"),
    ],
)
def test_what_the_hub_refuses(error, message, monkeypatch):
    def snapshot_download(local_files_only, **_):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        raise error("Forbidden by\n the server", response=Response())

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refused("hf:acme/other", message)


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:tiny", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@../x", "hf:a/..b", "hf:a b/c"]
)
def test_malformed_names(spec):
    refused(spec, "a model of the Hub is 'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION'")


def test_a_name_without_its_prefix():
    refused("HuggingFaceTB/SmolLM2-135M", "did you mean 'hf:HuggingFaceTB/SmolLM2-135M'")
