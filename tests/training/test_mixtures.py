"""Several tasks in one run: what a config says of them, their metrics, and that a run resumes exactly."""

import json
import pathlib
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from configs.math_grpo import add_task, get_config
from rhyme_jax.errors import InputError
from rhyme_jax.models.load import load_model
from rhyme_jax.models.tokenizer import char_tokenizer
from rhyme_jax.tasks.problems import Problem
from rhyme_jax.training.batches import Prompt
from rhyme_jax.training.console import Console
from rhyme_jax.training.loop import Trainer
from rhyme_jax.training.settings import Settings
from rhyme_jax.training.workdir import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
TODAY = Settings.from_config(get_config()).task.today


# --- config ---------------------------------------------------------------------------------------------------


def test_a_tasks_fields_are_those_of_task_unless_set_for_itself():
    config = get_config("tiny+countdown+equations")
    config.task.seed = 5
    config.tasks.countdown.seed = 7
    config.tasks.equations.weight = 2
    config.task.train_size = 64
    settings = Settings.from_config(config)
    assert list(settings.tasks) == ["countdown", "equations"]
    assert [(t.name, t.seed, t.weight, t.train_size) for t in settings.tasks.values()] == [
        ("countdown", 7, 1.0, 64),
        ("equations", 5, 2.0, 64),
    ]
    assert settings.task.name == "arithmetic" and settings.task.seed == 5


@pytest.mark.parametrize(
    ("label", "fields", "message"),
    [
        ("chess", {}, "tasks.chess.name='chess': must be one of arithmetic, gsm8k, math"),
        ("a", {"name": "arithmetic", "weight": 0.0}, "tasks.a.weight=0.0: must be positive"),
        ("a", {"name": "arithmetic", "path": "x"}, "tasks.a.path='x': is not used by tasks.a.name='arithmetic'"),
        ("a", {"name": "arithmetic", "eval_size": 0}, "tasks.a.eval_size=0: must be at least 1"),
        ("a", {"name": "arithmetic", "chat_date": ""}, "tasks.a.chat_date='': must be a date"),
        ("A b", {"name": "arithmetic"}, "tasks.A b: a task's label must be of lower-case letters, digits and _"),
    ],
)
def test_impossible_mixtures(label, fields, message):
    config = get_config("smoke")
    add_task(config, label, **fields)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        Settings.from_config(config)


def test_sections_are_checked_like_any_other():
    for changes, message in (
        ({"tasks": 3}, "config.tasks=3: must be a section of fields"),
        ({"tasks": {"a": 3}}, "config.tasks.a=3: must be a section of fields"),
        ({"tasks": {"a": {"nme": "x"}}}, "config.tasks.a.nme: no such field; did you mean tasks.a.name"),
        ({"tasks": {"a": {"name": "x"}}}, "config.tasks.a.weight: missing"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            Settings.from_config(type(get_config())({**get_config().to_dict(), **changes}))


# --- prompts --------------------------------------------------------------------------------------------------


def test_characters_that_a_model_does_not_know():
    tiny = load_model("embedded:tiny", "float32", "float32").tokenizer
    with pytest.raises(InputError) as error:
        Prompt.of(Problem("Solve for x: 1+2=x", True, "equations"), tiny, "", TODAY, 100)
    assert str(error.value) == (
        "init.weights: its tokenizer does not know 'Solvefrx:', as in 'Solve for x: 1+2=x' of the task 'equations'; "
        "that task needs a model with a larger alphabet"
    )
    assert len(Prompt.of(Problem("1+2=?\n", False, "arithmetic"), tiny, "", TODAY, 100).tokens) == 6
    larger = char_tokenizer("Solve frx:0123456789+=")
    assert len(Prompt.of(Problem("Solve for x: 1+2=x", True, "equations"), larger, "", TODAY, 100).tokens) == 18


# --- runs -----------------------------------------------------------------------------------------------------


class Silent(Console):
    def line(self, text: str = "") -> None:
        pass


def run_config():
    """A step takes three prompts of the first task and one of the second, which have two and six steps an epoch."""
    c = get_config("smoke")
    c.steps, c.checkpoint.every, c.eval.every = 4, 3, 4
    c.draft.buckets = (1,)
    c.rollout.noise = "coupled"
    c.noise.refresh_epochs = 1
    c.rollout.samples_per_prompt, c.rollout.max_new_tokens = 2, 24
    c.task.train_size, c.task.eval_size = 6, 6
    add_task(c, "short", name="arithmetic", difficulties=(2,), weight=3.0)
    add_task(c, "long", name="arithmetic", difficulties=(5,), weight=1.0, eval_size=3)
    return c


def trainer(workdir) -> Trainer:
    return Trainer(run_config(), str(workdir), Silent(), jax.devices()[:1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    t = trainer(workdir)
    t.run()
    t.close()
    return t, workdir


def samples(workdir) -> list[list[dict]]:
    files = sorted((workdir / "samples").glob("*.jsonl"))
    return [[json.loads(line) for line in f.read_text().splitlines()] for f in files]


def without_times(workdir) -> list[dict]:
    return [
        {k: v for k, v in m.items() if not k.startswith("seconds/")} for m in read_metrics(workdir / "metrics.jsonl")
    ]


def test_each_batch_has_its_shares(whole):
    for step in samples(whole[1]):
        assert Counter(s["task"] for s in step) == {"short": 3 * 2, "long": 1 * 2}
        assert all((s["prompt"].count("+") + s["prompt"].count("-") == 2) == (s["task"] == "short") for s in step)


def test_metrics_by_task(whole):
    _, workdir = whole
    metrics = read_metrics(workdir / "metrics.jsonl")
    for m, step in zip(metrics[1:], samples(workdir), strict=True):
        for label in ("short", "long"):
            rewards = [s["reward"] for s in step if s["task"] == label]
            assert m[f"task/{label}/responses"] == len(rewards) and m[f"task/{label}/failed_grades"] == 0
            assert m[f"task/{label}/reward_mean"] == m[f"task/{label}/accuracy"] == pytest.approx(np.mean(rewards))
            assert m[f"task/{label}/length_mean"] == np.mean([s["length"] for s in step if s["task"] == label])
        assert m["task/short/epoch"] == m["step"] / 2 and m["task/long/epoch"] == pytest.approx(m["step"] / 6)
        assert m["epoch"] == pytest.approx((m["step"] - 1) / 6)  # when it began, of the slower task
    for m in (metrics[0], metrics[-1]):
        for kind in ("greedy", "sampled"):
            of_tasks = 6 * m[f"task/short/eval_accuracy_{kind}"] + 3 * m[f"task/long/eval_accuracy_{kind}"]
            assert m[f"eval/accuracy_{kind}"] == pytest.approx(of_tasks / 9)
    result = json.loads((workdir / "result.json").read_text())
    assert result["tasks"]["long"]["eval_accuracy_end"] == metrics[-1]["task/long/eval_accuracy_greedy"]
    documented = set(re.findall(r"`([a-z_/0-9<>]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert {re.sub("/(short|long)/", "/<label>/", name) for m in metrics for name in m} <= documented


def test_coupled_noise_goes_by_the_epochs_of_each_task(tmp_path, whole):
    """Renewed each epoch: prompts of the first task meet new noise from the third step on, the others do not."""
    t = trainer(tmp_path)
    words: dict[str, list[set]] = {"short": [], "long": []}
    for step in range(4):
        prompts, requests, *_ = t.plan(step)
        for label, of_task in words.items():
            of_task.append({r.noise for r in requests if prompts[r.group].problem.task == label})
    t.close()
    assert words["short"][0] == words["short"][1] != words["short"][2] == words["short"][3]
    assert words["long"] == [words["short"][0]] * 4


def test_a_mixture_resumes_exactly(whole, tmp_path):
    """From the checkpoint of step 3, as if the run had been killed in its last step."""
    workdir = tmp_path / "copy"
    shutil.copytree(whole[1], workdir)
    shutil.rmtree(workdir / "checkpoints" / "4")
    second = trainer(workdir)
    assert second.progress.steps == 3
    assert second.stream.epochs() == {"short": 1.5, "long": 0.5}
    second.run()
    second.close()
    assert samples(workdir) == samples(whole[1])
    assert without_times(workdir) == without_times(whole[1])
    assert second.stream.position() == whole[0].stream.position()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.state), jax.device_get(whole[0].state))
