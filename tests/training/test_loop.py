"""Whole runs of the loop on the embedded tiny model: resume, devices, the closing comparison, what is written."""

import itertools
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

from configs.math_grpo import get_config
from rhyme_jax.errors import InputError
from rhyme_jax.histospec.drafts import SOURCES
from rhyme_jax.models.load import load_model
from rhyme_jax.training.console import Console
from rhyme_jax.training.loop import Trainer, train
from rhyme_jax.training.workdir import read_metrics

ROOT = pathlib.Path(__file__).parents[2]


class Crash(Exception):
    pass


def crash(*_):
    raise Crash


def small_config(**rollout):
    """Two steps an epoch. Drafts look cheap, and cost the same in every run, so that runs can be compared."""
    c = get_config("smoke")
    c.draft.buckets = (1, 4)
    c.draft.costs = str(pathlib.Path(__file__).parent / "cheap_drafts.json")
    c.steps = 6
    c.checkpoint.every = 3
    c.eval.every = 6
    c.optimizer.learning_rate = 1e-3  # enough for the policy to move within six steps
    c.optimizer.micro_batches = 2
    c.rollout.samples_per_prompt = 8
    for name, value in rollout.items():
        c.rollout[name] = value
    return c


class Silent(Console):
    def line(self, text: str = "") -> None:
        pass


def trainer(config, workdir, devices=None) -> Trainer:
    return Trainer(config, str(workdir), Silent(), jax.devices()[:1] if devices is None else devices)


def run_until(t: Trainer, step: int) -> None:
    """A run that is killed in the middle of a step."""
    update = t._update

    def crash_in_step(*args):
        return crash() if t.progress.steps == step - 1 else update(*args)

    t._update = crash_in_step
    with pytest.raises(Crash):
        t.run()
    t.close()


def without_times(metrics: list[dict]) -> list[dict]:
    return [{k: v for k, v in m.items() if not k.startswith("seconds/")} for m in metrics]


def samples(workdir: pathlib.Path) -> dict[str, list]:
    return {
        f.name: [json.loads(line) for line in f.read_text().splitlines()]
        for f in sorted((workdir / "samples").glob("*.jsonl"))
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: (its trainer, workdir, result)."""
    workdir = tmp_path_factory.mktemp("whole")
    t = trainer(small_config(), workdir)
    result = t.run()
    t.close()
    return t, workdir, result


def test_a_run_writes_what_it_promises(whole):
    _, workdir, result = whole
    metrics = read_metrics(workdir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(7))
    assert len(samples(workdir)) == 6
    assert json.loads((workdir / "config.json").read_text())["config"]["steps"] == 6
    stored = json.loads((workdir / "result.json").read_text())
    assert stored == result
    for name in ("eval_accuracy_start", "eval_accuracy_end", "tokens_per_row_forward", "rollout_speedup"):
        assert isinstance(stored[name], float)
    assert metrics[0]["eval/accuracy_greedy"] == stored["eval_accuracy_start"]
    assert metrics[-1]["eval/accuracy_greedy"] == stored["eval_accuracy_end"]


def test_every_metric_is_documented(whole):
    documented = set(re.findall(r"`([a-z_/0-9]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    written = {name for m in read_metrics(whole[1] / "metrics.jsonl") for name in m}
    assert written <= documented, written - documented


def test_last_step_equals_plain_decoding(whole):
    _, workdir, result = whole
    last = read_metrics(workdir / "metrics.jsonl")[-1]
    assert result["identical_tokens"] == result["compared_tokens"] == last["rollout/tokens"]
    assert result["tokens_per_row_forward"] == last["rollout/tokens_per_row_forward"] > 1


def test_history_is_used_from_the_second_epoch_on(whole):
    _, workdir, _ = whole
    metrics = read_metrics(workdir / "metrics.jsonl")[1:]
    assert all(m["learner/staleness"] == 0 for m in metrics)
    assert [m["draft/history_accepted"] > 0 for m in metrics] == [False, False, True, True, True, True]
    assert all(m["rollout/tokens_per_row_forward"] > 1 for m in metrics[2:])


def test_draft_metrics_add_up(whole):
    steps = read_metrics(whole[1] / "metrics.jsonl")[1:]
    for m in steps:
        for kind in ("proposed", "accepted"):
            by_source = [m[f"draft/{source}_{kind}"] for source in SOURCES]
            assert sum(by_source) == m[f"rollout/{kind}"]
        assert sum(m["draft/iterations_by_k"].values()) == m["rollout/iterations"]
        assert sum(n * length for length, n in enumerate(m["draft/lengths"])) == m["rollout/proposed"]
        assert m["rollout/predicted_speedup"] > 0.9
    # Two steps an epoch: the second of each has the epoch's sums.
    assert ["epoch/proposed" in m for m in steps] == [False, True] * 3
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert second["epoch/accepted"] == first["rollout/accepted"] + second["rollout/accepted"]


def test_coupled_noise_repeats_what_did_not_change(tmp_path):
    """With a learning rate of almost nothing, each sample says what it said in the epoch before, drafts foretell it,
    and so do those of a run that was killed and started again.
    """
    config = small_config(noise="coupled")
    config.optimizer.learning_rate, config.steps, config.checkpoint.every = 1e-12, 4, 2
    config.eval.every = 4
    whole_run = trainer(config, tmp_path / "whole")
    whole_run.run()
    whole_run.close()
    metrics = read_metrics(tmp_path / "whole" / "metrics.jsonl")[1:]
    assert all(m["draft/own_accepted"] > 0.5 * m["rollout/tokens"] for m in metrics[2:])
    assert all(m["rollout/acceptance"] > 0.95 for m in metrics[2:])
    texts = [  # of an epoch: the first and the last pair of steps
        {(s["prompt"], s["sample"]): s["completion"] for step in pair for s in step}
        for pair in itertools.pairwise(samples(tmp_path / "whole").values())
    ]
    assert texts[0] == texts[2]

    first = trainer(config, tmp_path / "resumed")
    first.sampler.compare_with_plain = crash
    with pytest.raises(Crash):
        first.run()
    first.close()
    second = trainer(config, tmp_path / "resumed")
    assert second.progress.steps == 2
    second.run()
    second.close()
    assert samples(tmp_path / "resumed") == samples(tmp_path / "whole")
    assert without_times(read_metrics(tmp_path / "resumed" / "metrics.jsonl")) == without_times(
        [*read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    )


def test_refreshed_samples_meet_new_noise(tmp_path):
    config = small_config(noise="coupled")
    config.optimizer.learning_rate, config.steps, config.eval.every = 1e-12, 4, 4
    config.noise.refresh_epochs = 2
    t = trainer(config, tmp_path)
    for _ in range(4):
        t.step()
    t.close()
    by_epoch = [
        {(s["prompt"], s["sample"]): s["completion"] for step in pair for s in step}
        for pair in itertools.pairwise(samples(tmp_path).values())
    ]
    same = {key for key, text in by_epoch[0].items() if by_epoch[2][key] == text}
    kept = {key for key in by_epoch[0] if key[1] % 2 == 0}
    assert kept <= same and len(same) < len(kept) + 0.5 * len(kept)


def test_costs_are_measured_once_and_nothing_compiles_after_the_first_epoch(tmp_path):
    config = small_config()
    config.draft.costs = "measured"
    config.eval.every, config.steps = 1, 4
    t = trainer(config, tmp_path / "run")
    compiled = []  # programs of both engines, after each step
    step = t.step

    def counted():
        metrics = step()
        compiled.append(len(t.sampler.engine.compiled) + len(t.sampler.greedy.slices[0].engine.compiled))
        return metrics

    t.step = counted
    t.run()
    t.close()
    assert compiled == [compiled[0]] * 4
    table = json.loads((tmp_path / "run" / "cost_table.json").read_text())
    shapes = {(c["rows"], c["slots"]) for c in table["costs"]}
    assert {c["k"] for c in table["costs"]} == {1, 4} and len(table["costs"]) == 2 * len(shapes)
    assert all(c["seconds"] > 0 for c in table["costs"])
    drafting = [p for p in t.sampler.engine.compiled if p.startswith("decode") and "corpus" in p]
    assert len(drafting) == len(shapes), "one program for each declared shape and K above 1"

    # The table is the run's: another start of it, and a run that is given the file, decide by the same figures.
    config.draft.costs = str(tmp_path / "run" / "cost_table.json")
    again = trainer(config, tmp_path / "again")
    again.close()
    assert again.costs_known and again.sampler.engine.costs.to_json() == table


def test_rollout_and_learner_agree_on_log_probs(whole):
    """The tripwire of design section 8: at the first update of a batch the two paths score the same policy."""
    _, workdir, _ = whole
    for m in read_metrics(workdir / "metrics.jsonl")[1:]:
        assert m["learner/rollout_gap"] < 1e-4
        assert m["learner/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_the_policy_moves(whole):
    t, _, _ = whole
    start = load_model("embedded:tiny", "float32", "float32").params
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), start, jax.device_get(t.state.params))
    assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The same run, killed in the middle of its fifth step (third epoch) and started again."""
    workdir = tmp_path_factory.mktemp("resumed")
    run_until(trainer(small_config(), workdir), step=5)
    assert [m["step"] for m in read_metrics(workdir / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    with (workdir / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "torn')  # and a line that was being written
    second = trainer(small_config(), workdir)
    assert second.progress.steps == 3
    result = second.run()
    second.close()
    return second, workdir, result


def test_resume_is_exact_in_parameters_and_optimizer(whole, resumed):
    a, b = jax.device_get(whole[0].state), jax.device_get(resumed[0].state)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_resume_is_exact_in_history(whole, resumed):
    a, b = whole[0].history.to_arrays(), resumed[0].history.to_arrays()
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert whole[0].stream.position() == resumed[0].stream.position()


def test_resume_is_exact_in_metrics_and_samples(whole, resumed):
    a, b = (without_times(read_metrics(w / "metrics.jsonl")) for w in (whole[1], resumed[1]))
    assert a == b
    assert samples(whole[1]) == samples(resumed[1])
    timed = ("seconds", "rollout_speedup", "tokens_per_s", "plain_tokens_per_s", "workdir")
    assert {k: v for k, v in whole[2].items() if k not in timed} == {
        k: v for k, v in resumed[2].items() if k not in timed
    }


def test_a_finished_run_only_reports(whole):
    """Started again, a complete run trains no further step and changes no result."""
    _, workdir, result = whole
    before = (workdir / "metrics.jsonl").read_text()
    again = trainer(small_config(), workdir)
    repeated = again.run()
    again.close()
    assert (workdir / "metrics.jsonl").read_text() == before
    assert repeated == result


def test_eight_devices_make_the_same_run(whole, tmp_path):
    """Split over all axes; `test_slices` has runs split over rows alone."""
    config = small_config()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    t = trainer(config, tmp_path, jax.devices())
    for _ in range(3):  # into the second epoch
        t.step()
    t.close()
    assert len(t.state.params["embed"].sharding.device_set) == 8
    ours, theirs = samples(tmp_path), samples(whole[1])
    assert list(ours.values()) == list(theirs.values())[:3]  # same tokens, rewards, accepted drafts
    for a, b in zip(
        read_metrics(tmp_path / "metrics.jsonl"), read_metrics(whole[1] / "metrics.jsonl")[1:4], strict=True
    ):
        for name in ("learner/loss", "learner/entropy", "learner/grad_norm"):
            assert a[name] == pytest.approx(b[name], abs=1e-5)


def test_kl_penalty_and_several_updates_per_batch(tmp_path, capsys):
    config = small_config(samples_per_prompt=4)
    config.steps, config.draft.buckets = 2, (1,)
    config.grpo.kl_coef = 0.1
    config.grpo.updates_per_batch = 2
    config.model.param_dtype = config.model.dtype = "bfloat16"
    result = train(config, str(tmp_path), devices=jax.devices()[:1])
    metrics = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert all(m["learner/kl"] > 0 for m in metrics)  # measured after the first of the two updates
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"workdir: {tmp_path}"
    assert f"identical: {result['identical_tokens']}/{result['compared_tokens']} tokens" in said
    assert said[-2].startswith("result: held-out accuracy")


def test_resumed_with_fewer_steps_it_still_has_a_result(tmp_path):
    config = small_config(samples_per_prompt=4)
    config.steps, config.checkpoint.every, config.eval.every = 3, 2, 3
    config.draft.buckets = (1,)
    first = trainer(config, tmp_path)

    first.sampler.compare_with_plain = crash  # in the last step, after the checkpoint of step 2
    with pytest.raises(Crash):
        first.run()
    first.close()
    config.steps = 2
    second = trainer(config, tmp_path)
    result = second.run()
    second.close()
    assert result["steps"] == 2 and 0 <= result["eval_accuracy_end"] <= 1
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_damaged_checkpoint_is_named(whole, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[1], workdir)
    for file in (workdir / "checkpoints" / "6" / "learner").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(InputError, match=r"checkpoints/6: cannot be restored .*move that folder away"):
        trainer(small_config(), workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    earlier = trainer(small_config(), workdir)
    assert earlier.progress.steps == 3
    earlier.close()
