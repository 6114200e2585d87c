"""Bad input ends with exit code 2 and one clear line, before anything is compiled or written.

Each case is a real command line, run in a process of its own.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from rhyme_jax.models.load import EMBEDDED

ROOT = pathlib.Path(__file__).parents[2]
PROBLEM = {"question": "Two and two?", "answer": "2+2=4\n#### 4"}


def write_lines(path: pathlib.Path, lines) -> pathlib.Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Broken inputs by name."""
    d = tmp_path_factory.mktemp("inputs")
    tiny = EMBEDDED / "tiny"
    made = {
        "missing": d / "missing.jsonl",
        "empty": write_lines(d / "empty.jsonl", []),
        "bad_json": write_lines(d / "bad.jsonl", [json.dumps(PROBLEM), "{not json"]),
        "no_gold": write_lines(d / "gold.jsonl", [json.dumps({"question": "q", "answer": "no number"})]),
        "one": write_lines(d / "one.jsonl", [json.dumps(PROBLEM)]),
        "long": write_lines(
            d / "long.jsonl", [json.dumps({**PROBLEM, "question": f"{i}" + "1+" * 200}) for i in range(600)]
        ),
        "binary": d / "binary.jsonl",
        "gguf": d / "broken.gguf",
        "not_gguf": d / "text.gguf",
        "file": write_lines(d / "file", ["in the way"]),
        "no_config": d / "no_config",
        "wrong_shape": d / "wrong_shape",
        "truncated": d / "truncated",
        "gpt2": d / "gpt2",
        "other_config": d / "other_config.py",
        "changed_run": d / "changed_run",
        "other_json": d / "other.json",
    }
    made["binary"].write_bytes(b"\xff\xfe\x00\x80" * 100)
    made["gguf"].write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 64)
    made["not_gguf"].write_text("hello")
    made["no_config"].mkdir()
    for name in ("wrong_shape", "truncated", "gpt2"):
        shutil.copytree(tiny, made[name])
    weights = safetensors.numpy.load_file(tiny / "model.safetensors")
    weights["model.norm.weight"] = np.ones(7, np.float32)
    safetensors.numpy.save_file(weights, made["wrong_shape"] / "model.safetensors")
    whole = (tiny / "model.safetensors").read_bytes()
    (made["truncated"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    config = json.loads((tiny / "config.json").read_text())
    (made["gpt2"] / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    made["other_config"].write_text(
        "from configs.math_grpo import get_config as base\n"
        "def get_config():\n  c = base('smoke')\n  c.rollout.draft_bucket = 4\n  return c\n"
    )
    made["other_json"].write_text('{"costs": [{"rows": 1}], "assumed": 0}')
    made["changed_run"].mkdir()
    stored = {"config": {"seed": 7}}
    (made["changed_run"] / "config.json").write_text(json.dumps(stored))
    return made


# name -> (arguments, what the line must say). {x} stands for a path of `files`. Each is a process; fields out of their
# range are in `test_settings`, but for a few.
CASES = {
    "unknown key": (["--config.rollout.max_row=3"], "rollout.max_row: no such field; did you mean rollout.max_rows"),
    "flags without =": (["--config", "configs/math_grpo.py:smoke", "--config.bogus=1"], "config.bogus: no such field"),
    "unknown section": (["--config.rollot.max_rows=3"], "did you mean rollout.max_rows"),
    "unknown key in a config file": (["--config={other_config}"], "config.rollout.draft_bucket: no such field"),
    "unknown flag": (["--workdirr=/tmp/x"], "workdirr"),
    "stray argument": (["smoke"], "unexpected argument"),
    "wrong type": (["--config.steps=many"], "steps=many"),
    "fraction for a whole number": (["--config.steps=1.5"], "steps=1.5"),
    "words in a tuple": (["--config.draft.buckets=('a',)"], "draft.buckets"),
    "no such remat policy": (["--config.optimizer.remat=maybe"], "remat='maybe': must be one of none, dots, full"),
    "no such matrix": (["--config.lora.targets=q+w"], "lora.targets: no matrix 'w'; there are q, k, v, o, gate"),
    "no such date": (["--config.task.chat_date=today"], "task.chat_date='today': must be a date, as 2024-07-26"),
    "missing config file": (["--config=configs/nothing.py"], "configs/nothing.py: no such file"),
    "unknown variant": (["--config=configs/math_grpo.py:huge"], "no variant 'huge'; there are tiny, smollm2, long_"),
    "negative steps": (["--config.steps=-1"], "steps=-1: must be at least 1"),
    "zero temperature": (["--config.rollout.temperature=0"], "temperature=0.0: training needs a temperature above 0"),
    "buckets without 1": (["--config.draft.buckets=(8,)"], "draft.buckets=(8,)"),
    "unknown vote weight": (["--config.draft.weight=votes"], "draft.weight='votes': must be one of preset, reward"),
    "missing cost table": (["--config.draft.costs={missing}"], "draft.costs="),
    "broken cost table": (["--config.draft.costs={bad_json}"], "bad.jsonl: not readable as JSON"),
    "not a cost table": (["--config.draft.costs={other_json}"], "not a cost table"),
    "more prompts than the task has": (["--config.rollout.prompts_per_step=9"], "must not exceed task.train_size=8"),
    "no difficulties": (["--config.task.difficulties=()"], "task.difficulties=()"),
    "too few problems of a kind": (
        ["--config.task.difficulties=(1,)", "--config.task.train_size=100000"],
        "too few different problems",
    ),
    "unknown task": (["--config.task.name=chess"], "task.name='chess': must be one of arithmetic, gsm8k"),
    "unknown task in a mixture": (
        ["--config=configs/math_grpo.py:smoke+arithmetic+chess"],
        "tasks.chess.name='chess': must be one of arithmetic, gsm8k",
    ),
    "a task in words": (["--config.task.name=equations"], "its tokenizer does not know 'Solvefrx:"),
    "a path that is not read": (["--config.task.path={one}"], "is not used by task.name='arithmetic'"),
    "gsm8k without a path": (["--config.task.name=gsm8k"], "task.path='': a JSONL, JSON or Parquet file"),
    "missing data": (["--config.task.name=gsm8k", "--config.task.path={missing}"], "missing.jsonl: no such file"),
    "empty data": (["--config.task.name=gsm8k", "--config.task.path={empty}"], "holds no problems"),
    "broken data": (["--config.task.name=gsm8k", "--config.task.path={bad_json}"], "line 2: not valid JSON"),
    "data without answers": (["--config.task.name=gsm8k", "--config.task.path={no_gold}"], "line 1: 'answer' must end"),
    "data that is not text": (["--config.task.name=gsm8k", "--config.task.path={binary}"], "not readable as UTF-8"),
    "too little data": (["--config.task.name=gsm8k", "--config.task.path={one}"], "holds 1 different problems"),
    "prompt longer than allowed": (
        ["--config.task.name=gsm8k", "--config.task.path={long}", "--config.task.template=plain"],
        "max_prompt_tokens=32",
    ),
    "budget beyond the model": (["--config.rollout.max_new_tokens=1000"], "exceeds the model's 256 positions"),
    "unknown weights": (["--config.init.weights=gpt5"], "init.weights='gpt5'"),
    "weights without a config": (["--config.init.weights={no_config}"], "config.json"),
    "unsupported architecture": (["--config.init.weights={gpt2}"], "gpt2"),
    "weights of another shape": (["--config.init.weights={wrong_shape}"], "model.norm.weight"),
    "truncated weights": (["--config.init.weights={truncated}"], "model.safetensors"),
    "broken GGUF": (["--config.init.weights={gguf}"], "broken.gguf"),
    "not a GGUF": (["--config.init.weights={not_gguf}"], "text.gguf"),
    "learning rate of zero": (["--config.optimizer.learning_rate=0"], "optimizer.learning_rate=0.0: must be positive"),
    "batch that does not divide": (["--config.optimizer.micro_batches=3"], "must be divisible by"),
    "batch that does not divide over the mesh": (
        ["--config.mesh.data=8", "--config.optimizer.micro_batches=4"],
        "optimizer.micro_batches=4; these must be divisible by mesh.data * mesh.fsdp = 8",
    ),
    "slices that do not divide the devices": (
        ["--config.pipeline.slices=3"],
        "pipeline.slices=3: must divide the 8 devices that roll out",
    ),
    "a slice that runs ahead of none": (
        ["--config.pipeline.mode=cross_step"],
        "pipeline.slices=1: pipeline.mode='cross_step' needs 2 or more",
    ),
    "no such process": (
        ["--distributed.coordinator=localhost:1", "--distributed.num_processes=2", "--distributed.process_id=2"],
        "distributed.process_id=2",
    ),
    "more devices than there are": (["--config.mesh.data=16"], "needs 16 devices, there are 8"),
    "mesh that does not divide the model": (["--config.mesh.tensor=8"], "mesh.tensor=8"),
    "two free mesh axes": (["--config.mesh.fsdp=-1"], "only one axis may be -1"),
    "history of no depth": (["--config.history.depth=0"], "history.depth=0"),
    "keep no checkpoint": (["--config.checkpoint.keep=0"], "checkpoint.keep=0"),
    "workdir that is a file": (["--workdir={file}"], "cannot be"),
    "workdir below a file": (["--workdir={file}/run"], "cannot be"),
    "unwritable workdir": (["--workdir=/proc/rhyme"], "--workdir=/proc/rhyme: cannot be written"),
    "workdir of another run": (["--workdir={changed_run}"], "holds a run with config."),
}  # fmt: skip


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    base = [] if any(a.split("=")[0] == "--config" for a in arguments) else ["--config=configs/math_grpo.py:smoke"]
    command = [sys.executable, "-m", "experiments.math_grpo", *base, *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def outcomes(files, tmp_path_factory) -> dict[str, tuple[subprocess.CompletedProcess, pathlib.Path]]:
    """All cases, run two at a time: most of the time goes into starting Python."""
    workdirs = {name: tmp_path_factory.mktemp("runs") / "run" for name in CASES}

    def outcome(name):
        arguments = [a.format(**files) for a in CASES[name][0]]
        if not any(a.startswith("--workdir=") for a in arguments):
            arguments.append(f"--workdir={workdirs[name]}")
        return run(arguments)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = pool.map(outcome, CASES)
        return {name: (result, workdirs[name]) for name, result in zip(CASES, done, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(outcomes, name):
    result, workdir = outcomes[name]
    lines = result.stderr.splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert CASES[name][1] in lines[0]
    assert result.stdout == ""
    assert not workdir.exists()  # nothing was written for a run that never started
