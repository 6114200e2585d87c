"""A run's directory: what may change on resuming, what is damaged, and metrics that survive a crash."""

import json
import math
import pathlib

import ml_collections
import pytest

from configs.math_grpo import get_config
from rhyme_jax.errors import InputError
from rhyme_jax.training.workdir import MAY_CHANGE, StepFile, Workdir, read_metrics


def config(**changes) -> ml_collections.ConfigDict:
    """The smoke variant with fields changed; `a__b` stands for a.b."""
    c = get_config("smoke")
    c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return c


def refusal(path, c=None) -> str:
    with pytest.raises(InputError) as error:
        Workdir(path).prepare(config() if c is None else c)
    message = str(error.value)
    assert message.startswith(f"--workdir={path}: ") and "\n" not in message
    return message.removeprefix(f"--workdir={path}: ")


# --- the stored config ----------------------------------------------------------------------------------------


def test_a_new_workdir_stores_its_config(tmp_path):
    workdir = Workdir(tmp_path / "new" / "run")
    workdir.prepare(config())
    stored = json.loads(workdir.config.read_text())
    # Through JSON, which has no tuples.
    assert stored["config"] == json.loads(json.dumps(config().to_dict()))
    assert stored["config"]["draft"]["buckets"] == list(config().draft.buckets)
    assert {"jax", "numpy", "orbax-checkpoint"} <= stored["packages"].keys() and "git_revision" in stored
    assert workdir.samples.is_dir()
    assert sorted(p.name for p in workdir.path.iterdir()) == ["config.json", "lock", "samples"]


def test_the_same_config_again_changes_nothing(tmp_path):
    Workdir(tmp_path).prepare(config())
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "samples").rmdir()  # someone cleaned up
    Workdir(str(tmp_path)).prepare(config())
    assert (tmp_path / "config.json").read_bytes() == before and (tmp_path / "samples").is_dir()


def test_an_existing_directory_without_a_run_is_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Workdir(tmp_path).prepare(config())
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "config.seed=0, now 1"),
        ({"rollout__temperature": 0.5}, "config.rollout.temperature=1.0, now 0.5"),
        ({"draft__buckets": (1, 4)}, "config.draft.buckets=[1, 4, 8, 16], now [1, 4]"),
        ({"init__weights": "smollm2"}, "config.init.weights='embedded:tiny', now 'smollm2'"),
        ({"optimizer__remat": "full"}, "config.optimizer.remat='none', now 'full'"),
        ({"optimizer__schedule": "cosine"}, "config.optimizer.schedule='constant', now 'cosine'"),
        ({"mesh__data": 1}, "config.mesh.data=-1, now 1"),
    ],
)
def test_a_changed_config_is_refused_with_both_values(changes, message, tmp_path):
    Workdir(tmp_path).prepare(config())
    assert refusal(tmp_path, config(**changes)) == (f"holds a run with {message}; use that value or another workdir")


def test_fields_that_came_or_went_are_refused(tmp_path):
    """A workdir of another version."""
    older = config().to_dict()
    del older["grpo"]["normalize_std"]
    older["grpo"]["extra"] = 3
    Workdir(tmp_path).prepare(ml_collections.ConfigDict(older))
    assert refusal(tmp_path).startswith("holds a run with config.grpo.extra=3, now None;")
    del older["grpo"]["extra"]
    other = tmp_path / "other"
    Workdir(other).prepare(ml_collections.ConfigDict(older))
    assert refusal(other).startswith("holds a run with config.grpo.normalize_std=None, now 'preset';")


def test_fields_that_may_change(tmp_path):
    Workdir(tmp_path).prepare(config())
    changes = {name.replace(".", "__"): 7 for name in MAY_CHANGE}
    assert set(changes) == {"steps", "eval__every", "checkpoint__every", "checkpoint__keep"}
    for name, value in changes.items():
        Workdir(tmp_path).prepare(config(**{name: value}))
    Workdir(tmp_path).prepare(config(**changes))


def test_a_cosine_schedule_fixes_the_steps(tmp_path):
    """It is stretched over them: each update done so far had another learning rate."""
    Workdir(tmp_path).prepare(config(optimizer__schedule="cosine"))
    message = refusal(tmp_path, config(optimizer__schedule="cosine", steps=9))
    assert message == "holds a run with config.steps=4, now 9; use that value or another workdir"
    Workdir(tmp_path).prepare(config(optimizer__schedule="cosine", eval__every=9))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "Expecting value"),
        (b'{"config": {"se', "Unterminated string"),
        (b"[]", "expected a JSON object, got list"),
        (b"{}", "no 'config' object"),
        (b'{"config": 3}', "no 'config' object"),
        (b"\xff\xfe", "can't decode"),
        (b'{"config": ' + b"[" * 100_000, "recursion"),
    ],
    ids=lambda x: x[:12] if isinstance(x, bytes) else x,
)
def test_a_damaged_config_is_refused(content, what, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith("its config.json is damaged (") and what in message
    assert (tmp_path / "config.json").read_bytes() == content  # left for the user to look at


# --- places that cannot be written (as root, permissions would not stop the test) ----------------------------------


def test_a_path_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert refusal(file) == "cannot be written (Not a directory)"
    assert refusal(file / "below") == "cannot be written (Not a directory)"
    assert file.read_text() == "mine"


def test_a_directory_where_the_config_belongs(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "is not a file" in refusal(tmp_path)


@pytest.mark.skipif(not pathlib.Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_place_where_nothing_can_be_made():
    assert refusal("/proc/run").startswith("cannot be written (")


def test_a_path_too_long(tmp_path):
    assert refusal(tmp_path / ("x" * 300)) == "cannot be read (File name too long)"


# --- samples --------------------------------------------------------------------------------------------------


def test_samples_are_one_object_a_line(tmp_path):
    workdir = Workdir(tmp_path)
    workdir.prepare(config())
    samples = [{"completion": "a\nb\u2028 é", "reward": None}, {"completion": "", "reward": 1.0}]
    workdir.write_samples(7, iter(samples))
    lines = (tmp_path / "samples" / "step_000007.jsonl").read_bytes().decode("utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == samples and lines[-1] == ""
    workdir.write_samples(7, samples[:1])  # the step of a resumed run again
    assert len((tmp_path / "samples" / "step_000007.jsonl").read_text(encoding="utf-8").split("\n")) == 2


# --- metrics --------------------------------------------------------------------------------------------------


def line(step, **metrics) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def steps(path) -> list[int]:
    return [m["step"] for m in read_metrics(path)]


def test_metrics_are_readable_while_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    file = StepFile(path, 0)
    assert read_metrics(path) == []
    for step in range(3):
        file.write({"step": step, "loss": 0.1 * step})
        assert read_metrics(str(path)) == [{"step": s, "loss": 0.1 * s} for s in range(step + 1)]
    file.close()


def test_a_resumed_run_drops_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = [line(s, loss=0.1 * s, text="é", more=[1, math.pi]) for s in range(4)]
    path.write_text("".join(kept) + line(4) + line(5))
    file = StepFile(path, 3)
    assert path.read_text() == "".join(kept)  # to the bit
    file.write({"step": 4})
    file.close()
    assert steps(path) == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_without_a_checkpoint_starts_its_metrics_over(tmp_path):
    """It evaluates the initial weights again; step 0 must not stand there twice."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0, accuracy=0.5) + line(1))
    StepFile(path, 0).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize("torn", ["{", '{"step": 3, "loss": 0.', '{"step": 3}', "\0\0\0", "é"])
def test_a_torn_last_line_is_dropped(torn, tmp_path):
    """Also one that would be whole but for its newline: it was not finished."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + torn)
    assert steps(path) == [1, 2]
    file = StepFile(path, 9)
    file.write({"step": 3})
    file.close()
    assert path.read_text() == line(1) + line(2) + line(3)


def test_a_line_torn_within_a_character_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1).encode() + '{"step": 2, "é'.encode()[:-1])
    assert steps(path) == [1]


@pytest.mark.parametrize(
    "damaged", ["", '{"step": 2, "lo', "[]", "3", "null", "{}", '{"step": "2"}', '{"step": 2.5}', "\0", "[" * 100_000]
)
def test_a_damaged_line_in_the_middle_is_named(damaged, tmp_path):
    """Nothing here writes such a line, so it is not for us to throw away."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + damaged + "\n" + line(3))
    before = path.read_bytes()
    for read in (read_metrics, lambda p: StepFile(p, 9)):
        with pytest.raises(InputError) as error:
            read(path)
        assert str(error.value) == f"{path}, line 2: damaged; remove that line to go on"
    assert path.read_bytes() == before


def test_numbers_that_json_lacks_become_null(tmp_path):
    """reward/mean is NaN in a step whose grades all failed; strict readers of JSON refuse a bare NaN."""
    path = tmp_path / "metrics.jsonl"
    file = StepFile(path, 0)
    file.write({"step": 1, "reward/mean": math.nan, "learner/loss": math.inf, "rollout/tokens": 3})
    file.close()
    StepFile(path, 1).close()
    assert read_metrics(path) == [{"step": 1, "reward/mean": None, "learner/loss": None, "rollout/tokens": 3}]


# --- one run at a time ----------------------------------------------------------------------------------------------


def test_a_workdir_in_use_is_refused(tmp_path):
    first, second = Workdir(tmp_path), Workdir(tmp_path)
    first.prepare(config())
    with pytest.raises(InputError, match="another run is using it"):
        second.prepare(config())
    first.release()
    second.prepare(config())
    second.release()
