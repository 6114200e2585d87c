"""A run's policy as a Hugging Face directory: what was loaded comes out again, and transformers reads it alike."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from subprocess import PIPE

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.learner import LearnerState
from rhyme_jax.models.export import check_model_files, keep_model_files
from rhyme_jax.models.hf_config import read_config
from rhyme_jax.models.load import EMBEDDED, RANDOM, Model, open_model
from rhyme_jax.models.params import LEARNER_RULES, make_mesh, param_shardings
from rhyme_jax.models.tokenizer import Tokenizer, char_tokenizer
from rhyme_jax.training.checkpoints import Checkpoints
from rhyme_jax.training.export import export

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = ROOT / "tests" / "golden" / "families"
DTYPES = {  # of the files
    name.name: next(v for k, v in json.loads((name / "config.json").read_text()).items() if k.endswith("dtype"))
    for name in sorted(FAMILIES.iterdir())
}


def tensors(folder) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name])


def run_of(model: Model, workdir, steps=(2,)) -> pathlib.Path:
    """The workdir of a run that has learned nothing, on a mesh that splits every matrix."""
    params = model.load(param_shardings(model.config, make_mesh(1, 4, 2), LEARNER_RULES))
    state = LearnerState(params, ({}, [{"mu": params, "count": jnp.int32(3)}]), jnp.int32(3))
    keep_model_files(model, workdir / "model")
    checkpoints = Checkpoints(workdir / "checkpoints", keep=9)
    for step in steps:
        checkpoints.save(step, state, {"history": {}, "lengths": {}}, {"steps": step})
    checkpoints.close()
    return workdir


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, tuple[pathlib.Path, pathlib.Path]]:
    """(source, export of a run that began from it) by family."""
    folders = {}
    for name, dtype in DTYPES.items():
        folder = tmp_path_factory.mktemp(name)
        source = pathlib.Path(shutil.copytree(FAMILIES / name, folder / "source"))
        char_tokenizer("0123456789+-=?").save(source)
        generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
        (source / "generation_config.json").write_text(json.dumps(generation))
        (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "unheard_of": [1, "ü"]}))
        run = run_of(open_model(str(source), param_dtype=dtype), folder / "run")
        assert export(run, folder / "out") == 2
        folders[name] = source, folder / "out"
    return folders


@pytest.mark.parametrize("name", DTYPES)
def test_what_was_loaded_comes_out_again(name, exported):
    source, out = exported[name]
    assert_same(tensors(out), tensors(source))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    before, after = open_model(str(source), param_dtype=DTYPES[name]), open_model(str(out), param_dtype=DTYPES[name])
    assert after.config == before.config and after.tokenizer.eos_ids == before.tokenizer.eos_ids
    jax.tree.map(np.testing.assert_array_equal, after.load(), before.load())


@pytest.mark.parametrize("name", DTYPES)
def test_live_against_transformers(name, exported):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tokens = torch.tensor(np.load(FAMILIES / name / "golden.npz")["tokens"], dtype=torch.long)
    logits, states = [], []
    for folder in exported[name]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(tokens).logits.numpy())
        states.append({k: v.numpy() for k, v in model.state_dict().items()})
        assert model.generation_config.eos_token_id in (1, [1]) and model.generation_config.top_k == 20
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer("1+1").input_ids == [4, 13, 4] and tokenizer.eos_token_id == 1
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1"
    assert_same(*states)
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> pathlib.Path:
    """A run of the embedded model, with two checkpoints."""
    return run_of(open_model("embedded:tiny"), tmp_path_factory.mktemp("tiny"), steps=(2, 11))


def test_another_dtype_and_step(tiny, tmp_path):
    assert export(tiny, tmp_path / "new" / "out", step=2, dtype="bfloat16") == 2
    out, source = tmp_path / "new" / "out", tensors(EMBEDDED / "tiny")
    assert_same(tensors(out), {k: v.astype(ml_dtypes.bfloat16) for k, v in source.items()})
    config = json.loads((EMBEDDED / "tiny" / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == {**config, "torch_dtype": "bfloat16"}
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [1]}  # which it had not


def test_a_model_that_comes_from_no_directory(tmp_path):
    """As of random weights: its files are written from what is known of it."""
    model = dataclasses.replace(open_model("embedded:tiny"), folder=None)
    keep_model_files(model, tmp_path / "model")
    assert open_model("embedded:tiny").tokenizer.eos_ids == Tokenizer.load(tmp_path / "model").eos_ids
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 0}')
    out = tmp_path / "out"
    out.mkdir()  # an empty directory will do
    export(run_of(model, tmp_path), out)
    assert open_model(str(out)).config == model.config
    # The ends that the run stopped at, with what else is asked for.
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.6, "eos_token_id": [1]}
    assert_same(tensors(out), tensors(EMBEDDED / "tiny"))


@pytest.mark.parametrize("name", RANDOM)
def test_files_of_random_models(name, tmp_path):
    model = open_model(f"random:{name}")
    keep_model_files(model, tmp_path / "model")
    assert read_config(tmp_path / "model") == model.config


def test_the_files_that_a_run_began_with_are_kept(tmp_path):
    source = pathlib.Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "source"))
    model = open_model(str(source))
    keep_model_files(model, tmp_path / "run" / "model")
    kept = {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()}
    assert kept == {name: (source / name).read_bytes() for name in kept} and len(kept) == 3
    (tmp_path / "run" / "model" / "config.json").touch()
    keep_model_files(model, tmp_path / "run" / "model")
    (source / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"model/tokenizer_config.json: is not that of init.weights"):
        keep_model_files(model, tmp_path / "run" / "model")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()} == kept
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["model"]
    with pytest.raises(InputError, match=r"tokenizer.json/model: the model's files cannot be kept \(File exists\)"):
        keep_model_files(model, source / "tokenizer.json" / "model")


def test_nothing_of_the_users_is_touched(tiny, tmp_path, monkeypatch):
    """Folders that happen to be called like ours, and an empty directory that a shell stands in."""
    model = open_model("embedded:tiny")
    mine, beside = tmp_path / "model", tmp_path / "out.tmp"
    for folder in (mine, beside):
        folder.mkdir()
        (folder / "net.py").write_text("mine")
    with pytest.raises(InputError, match="holds files that are none of a run's; use another --workdir"):
        check_model_files(model, mine)
    with pytest.raises(InputError, match="holds files that are none of a run's"):
        keep_model_files(model, mine)
    export(tiny, tmp_path / "out")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    export(tiny, ".")
    assert {p.name for p in here.iterdir()} == {p.name for p in (tmp_path / "out").iterdir()} and (
        here.stat().st_mode & 5
    )
    assert [[p.name for p in f.iterdir()] for f in (mine, beside)] == [["net.py"]] * 2
    assert {p.name for p in tmp_path.iterdir()} == {"model", "out.tmp", "out", "here"}


@pytest.mark.parametrize("spec", ["embedded:tiny", "random:15m"])
def test_a_run_goes_on_with_the_model_it_began_with(spec, tmp_path):
    model, folder = open_model(spec), tmp_path / "model"
    check_model_files(model, folder)
    keep_model_files(model, folder)
    check_model_files(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    with pytest.raises(
        InputError, match=r"model/config.json: is not that of init.weights=.*, though the run began with it"
    ):
        check_model_files(model, folder)


def refused(message: str, *args, **options) -> None:
    with pytest.raises(InputError, match=message) as error:
        export(*args, **options)
    assert "\n" not in str(error.value)


def test_bad_input(tiny, tmp_path):
    out = tmp_path / "out"
    refused(r"--workdir=.*nowhere: no such directory", tmp_path / "nowhere", out)
    refused(r"holds no model/", tmp_path, out)
    refused(r"--step=3: no such checkpoint; there are 2, 11", tiny, out, step=3)
    refused(r"--dtype=int8: must be one of float32, bfloat16", tiny, out, dtype="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for taken in ("full", "full/file"):
        refused(r"--out=.*: exists and is not an empty directory", tiny, tmp_path / taken)
    refused(r"--out=/proc/out: cannot be written", tiny, "/proc/out")
    shutil.copytree(tiny / "model", tmp_path / "run" / "model")
    refused(r"holds no checkpoint yet", tmp_path / "run", out)
    shutil.copytree(tiny / "checkpoints" / "2", tmp_path / "run" / "checkpoints" / "2")
    for damaged in (tmp_path / "run" / "checkpoints" / "2" / "learner").rglob("*"):
        if damaged.is_file() and damaged.stat().st_size > 1000:
            damaged.write_bytes(damaged.read_bytes()[:100])
    refused(r"checkpoints/2: cannot be read \(.*\); export another --step", tmp_path / "run", out)
    assert not out.exists() and not list(tmp_path.glob("*.tmp"))


def test_the_command_line(tiny, tmp_path):
    def started(out, *arguments):
        line = [sys.executable, "-m", "experiments.export_hf", f"--workdir={tiny}", f"--out={tmp_path / out}"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen([*line, *arguments], cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE, text=True)

    newest, missing = started("out"), started("other", "--step=12")
    assert newest.communicate(timeout=300) == (f"step 11 of {tiny} is in {tmp_path / 'out'}\n", "")
    assert missing.communicate(timeout=300) == ("", "error: --step=12: no such checkpoint; there are 2, 11\n")
    assert (newest.returncode, missing.returncode) == (0, 2)
    assert_same(tensors(tmp_path / "out"), tensors(EMBEDDED / "tiny"))
