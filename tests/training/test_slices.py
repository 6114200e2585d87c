"""Runs over several slices: the same rollouts and losses as on one, whoever decodes what, and what may be stale."""

import concurrent.futures
import json

import jax
import numpy as np
import pytest
from test_loop import run_until, samples, small_config, trainer, without_times

from rhyme_jax.errors import InputError, RunError
from rhyme_jax.training.loop import train
from rhyme_jax.training.workdir import read_metrics

STEPS = 3


def pipeline_config(steps=STEPS, **pipeline):
    """Two steps an epoch, plain decoding: drafts over slices are the business of tests of their own."""
    c = small_config()
    c.steps, c.checkpoint.every, c.eval.every = steps, steps, steps
    c.draft.buckets = (1,)
    c.rollout.max_rows = 8
    for name, value in pipeline.items():
        c.pipeline[name] = value
    return c


def run(config, workdir, devices=4):
    t = trainer(config, workdir, jax.devices()[:devices])
    t.run()
    t.close()
    return t


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """On one device."""
    workdir = tmp_path_factory.mktemp("alone")
    run(pipeline_config(mode="sync"), workdir, devices=1)
    return workdir


def assert_same_run(workdir, alone):
    assert samples(workdir) == samples(alone)
    for have, want in zip(read_metrics(workdir / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl"), strict=True):
        for name in ("learner/loss", "learner/entropy", "learner/grad_norm"):
            if name in want:
                assert have[name] == pytest.approx(want[name], abs=1e-5)


PIPELINES = {
    "sync": ({"mode": "sync", "slices": 2}, 2),
    "balanced": ({"mode": "balanced", "slices": 4}, 4),
    "a learner of its own": ({"mode": "balanced", "slices": 2, "learner_devices": 2}, 4),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_run_on_any_slices(alone, tmp_path, name):
    pipeline, devices = PIPELINES[name]
    t = trainer(pipeline_config(**pipeline), tmp_path, jax.devices()[:devices])
    left = []  # responses that are still decoded when a micro-batch goes to the learner
    accumulate = t.learner.accumulate

    def spy(*args, **kwargs):
        left.append(int(t.under_way[0].flight.unfinished_N.sum()))
        return accumulate(*args, **kwargs)

    t.learner.accumulate = spy
    t.run()
    t.close()
    if t.sampler.slices.colocated:
        assert not left
    else:
        assert len(left) == STEPS * 2 and max(left[::2]) > 0 == max(left[1::2])
    assert_same_run(tmp_path, alone)
    metrics = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert all(m["learner/staleness_max"] == 0 and m["learner/rollout_gap"] < 1e-4 for m in metrics)
    assert all(0 <= m["pipeline/bubble_iterations"] < 1 for m in metrics)
    records = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    slices = t.sampler.slices.total
    assert {r["slice"] for r in records if r["kind"] == "chunk"} == set(range(slices))
    assert [r["step"] for r in records if r["kind"] == "plan"] == list(range(1, STEPS + 1))
    iterations = sum(r["iterations"] for r in records if r["kind"] == "chunk")
    assert iterations == sum(m["rollout/iterations"] for m in metrics)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A run of eight steps whose slices run ahead but where it saves (after 4 and 8) and at its end."""
    workdir = tmp_path_factory.mktemp("ahead")
    config = ahead_config()
    return run(config, workdir, devices=2), workdir


def ahead_config():
    config = pipeline_config(steps=8, mode="cross_step", slices=2, defer=0.5)
    config.checkpoint.every = 4
    config.optimizer.learning_rate = 3e-4
    return config


def test_running_ahead_is_labelled_and_never_two_steps(ahead):
    _, workdir = ahead
    metrics = read_metrics(workdir / "metrics.jsonl")[1:]
    assert max(m["learner/staleness_max"] for m in metrics) == 1
    # Nothing is under way where the run saves or ends, so the next step has the newest policy.
    assert [m["learner/staleness_max"] for m in metrics if m["step"] in (1, 5, 8)] == [0, 0, 0]
    rolled_out = {}
    for m, of_step in zip(metrics, samples(workdir).values(), strict=True):
        step = m["step"] - 1
        stale = [s for s in of_step if s["policy_version"] < step]
        assert all(step - 1 <= s["policy_version"] <= step for s in of_step)
        assert all(s["policy_version"] == step - 1 for s in of_step if s["deferred"]), "deferred and not labelled"
        assert m["learner/stale_share"] == pytest.approx(
            sum(s["length"] for s in stale) / sum(s["length"] for s in of_step), abs=1e-6
        )
        for s in of_step:
            rolled_out.setdefault((s["prompt"], s["sample"]), []).append(m["step"])
    # Each prompt comes once in an epoch of two steps, whether it was deferred or not.
    assert {len(steps) for steps in rolled_out.values()} == {4}
    assert sum(m["pipeline/deferred"] for m in metrics) * 8 == sum(
        s["deferred"] for of_step in samples(workdir).values() for s in of_step
    )


def test_stale_rollouts_carry_the_log_probs_of_their_own_policy(ahead):
    t, workdir = ahead
    versions = [r.policy_version for p in t.train_prompts for r in t.history.responses(p.tokens)]
    assert set(versions) <= set(range(8))
    metrics = read_metrics(workdir / "metrics.jsonl")[1:]
    # The tripwire looks at fresh tokens alone; of the stale ones the importance is near 1, and not 1.
    assert all(m["learner/rollout_gap"] < 1e-4 for m in metrics)
    stale = [m for m in metrics if m["learner/stale_share"] > 0]
    assert stale and all(0.5 < m["learner/importance_mean"] < 1.5 for m in stale)
    assert any(abs(m["learner/importance_mean"] - 1) > 1e-5 for m in stale)


def test_resume_is_exact_when_slices_run_ahead(ahead, tmp_path):
    run_until(trainer(ahead_config(), tmp_path, jax.devices()[:2]), step=7)
    second = trainer(ahead_config(), tmp_path, jax.devices()[:2])
    assert second.progress.steps == 4
    second.run()
    second.close()
    whole, workdir = ahead
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(t.state) for t in (whole, second)))
    assert samples(tmp_path) == samples(workdir)
    a, b = (without_times(read_metrics(w / "metrics.jsonl")) for w in (workdir, tmp_path))
    assert a == b


def test_drafts_over_slices_change_no_token(alone, tmp_path):
    """History, siblings and K by cost on two slices with migration, against plain decoding on one device."""
    config = pipeline_config(slices=2)
    config.draft.buckets = (1, 4)
    run(config, tmp_path, devices=2)
    drafted, plain = (
        [{k: v for k, v in s.items() if k != "accepted"} for of_step in samples(w).values() for s in of_step]
        for w in (tmp_path, alone)
    )
    assert drafted == plain
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["rollout/accepted"] > 0


# --- failures -------------------------------------------------------------------------------------------------


def failing_grade(t, at_step):
    grade = t.grade

    def fails(problem, responses):
        if t.progress.steps == at_step:
            future = concurrent.futures.Future()
            future.set_exception(RunError(f"grading {problem.question!r}: boom"))
            return future
        return grade(problem, responses)

    return fails


def test_a_failed_grader_names_the_prompt_and_the_way_on(tmp_path, monkeypatch):
    config = pipeline_config(slices=2, steps=4)
    config.checkpoint.every = 2
    made = []

    def make(*args):
        t = trainer(config, tmp_path, jax.devices()[:2])
        t.grade = failing_grade(t, at_step=3)
        made.append(t)
        return t

    monkeypatch.setattr("rhyme_jax.training.loop.Trainer", make)
    with pytest.raises(RunError) as error:
        train(config, str(tmp_path))
    message = str(error.value)
    assert "\n" not in message and "boom" in message and "goes on after step 2" in message
    assert any(p.problem.question.strip() in message.encode().decode("unicode_escape") for p in made[0].train_prompts)
    monkeypatch.undo()
    again = trainer(config, tmp_path, jax.devices()[:2])
    assert again.progress.steps == 2
    again.close()


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"slices": 3}, "pipeline.slices=3: must divide the 4 devices that roll out"),
        ({"slices": 2, "tensor": 4}, "pipeline.tensor=4: must divide the 2 devices of a slice"),
        ({"learner_devices": 4}, "pipeline.learner_devices=4: must be from 0 (shared) to 3"),
        ({"slices": 4, "learner_devices": 1}, "pipeline.slices=4: must divide the 3 devices that roll out"),
    ],
)
def test_impossible_slices_are_refused(tmp_path, pipeline, message):
    with pytest.raises(InputError) as error:
        trainer(pipeline_config(**pipeline), tmp_path / "none", jax.devices()[:4])
    assert str(error.value).startswith(message)
    assert not (tmp_path / "none").exists()
