"""A run that trains adapters: resumed to the bit, with its KL reference, and exported merged. And how runs that cannot
begin or go on leave their workdir.
"""

import shutil

import jax
import numpy as np
import pytest
from test_loop import samples, small_config, trainer, without_times

from rhyme_jax.errors import InputError, RunError
from rhyme_jax.models import lora
from rhyme_jax.models.load import open_model
from rhyme_jax.training import loop
from rhyme_jax.training.export import export
from rhyme_jax.training.loop import Trainer, train
from rhyme_jax.training.workdir import read_metrics


def adapters_config():
    config = small_config(max_new_tokens=16)
    config.draft.buckets = (1,)
    config.steps, config.checkpoint.every, config.eval.every = 3, 1, 9
    config.optimizer.micro_batches, config.optimizer.vocab_block, config.optimizer.remat = 1, 8, "dots"
    config.lora.rank, config.lora.targets = 2, "q+down"
    config.grpo.kl_coef = 0.05
    return config


def step(t) -> None:
    """With rewards that differ within each group."""
    t.grade = lambda _, responses: _Done([float(len(r) % 3 + 0.1 * i) for i, r in enumerate(responses)])
    t.step()
    t._checkpoint_if_due()
    t.checkpoints.wait()


class _Done:
    def __init__(self, rewards):
        self.result = lambda: rewards

    def done(self):
        return True


def test_adapters_train_resume_and_are_exported(tmp_path):
    whole, cut, out = tmp_path / "whole", tmp_path / "cut", tmp_path / "out"
    t = trainer(adapters_config(), whole)
    step(t)
    shutil.copytree(whole, cut)
    step(t)
    merged = jax.device_get(t.learner.rollout_params(t.state))
    t.close()
    metrics = read_metrics(whole / "metrics.jsonl")
    assert metrics[0]["learner/kl"] == pytest.approx(0, abs=1e-6) and metrics[1]["learner/kl"] > 1e-8
    assert all(m["learner/rollout_gap"] < 1e-4 for m in metrics)

    again = trainer(adapters_config(), cut)
    step(again)
    again.close()
    jax.tree.map(np.testing.assert_array_equal, again.state, t.state)
    assert without_times(read_metrics(cut / "metrics.jsonl")) == without_times(metrics)
    assert samples(cut) == samples(whole)
    initial = open_model("embedded:tiny").load()
    jax.tree.map(np.testing.assert_array_equal, again.reference, initial)
    jax.tree.map(np.testing.assert_array_equal, lora.base(again.state.params), initial)

    export(whole, out)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), open_model(str(out)).load(), merged)
    moved = np.abs(merged["layers"]["0"]["q"] - initial["layers"]["0"]["q"]).max()
    assert moved > 1e-6 and (merged["layers"]["0"]["k"] == initial["layers"]["0"]["k"]).all()


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "Checkpoints", _fails)
    with pytest.raises(OSError, match="no room"):
        trainer(small_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(OSError, match="no room"):
        trainer(small_config(), tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]
    (tmp_path / "mine" / "model").mkdir()
    (tmp_path / "mine" / "model" / "net.py").touch()
    with pytest.raises(InputError, match="holds files that are none of a run's"):
        trainer(small_config(), tmp_path / "mine")
    assert {p.name for p in (tmp_path / "mine").iterdir()} == {"notes", "model"}


def _fails(*_):
    raise OSError("no room")


def test_a_loss_that_is_not_finite_ends_in_one_line(tmp_path, monkeypatch):
    def diverges(_):
        raise FloatingPointError("learner: loss=nan at update 7")

    monkeypatch.setattr(Trainer, "run", diverges)
    with pytest.raises(RunError, match=r"^learner: loss=nan at update 7; no step was saved yet$"):
        train(small_config(), str(tmp_path / "run"), devices=jax.devices()[:1])
