"""The learner with low-rank adapters: they alone learn, by the gradients of the whole; merged, they roll out."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers import SMALL, one_device

from rhyme_jax.grpo.learner import Batch, Learner, OptimizerConfig
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.models import lora
from rhyme_jax.models.lora import LoraConfig
from rhyme_jax.models.params import init_params, make_mesh
from rhyme_jax.models.scoring import score_responses

N, S, T = 8, 14, 6
BASE = dataclasses.replace(SMALL, layers=1)
MODEL = dataclasses.replace(BASE, lora=LoraConfig(4, 8.0, ("q", "o", "gate")))
RATE = OptimizerConfig(learning_rate=1e-2, micro_batches=2)


def make_learner(model=MODEL, mesh=None) -> Learner:
    return Learner(model, LossConfig(kl_coef=0.1), RATE, mesh or one_device(), 0.7, rows=N)


@pytest.fixture(scope="module")
def base():
    return init_params(BASE, jax.random.key(0))


@pytest.fixture(scope="module")
def batch(base):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, BASE.vocab_size, (N, S)).astype(np.int32)
    prompt, response = np.full(N, 8, np.int32), rng.integers(2, T + 1, N).astype(np.int32)
    score = jax.jit(lambda p: score_responses(p, BASE, tokens, prompt, T, temperature=0.7)[0])
    return Batch(
        tokens, prompt, response, np.array(score(base)), rng.normal(0, 1, N).astype(np.float32), np.ones(N, bool)
    )


@pytest.fixture(scope="module")
def learned(base, batch):
    """(learner, its state after 3 updates, metrics of each)"""
    learner = make_learner()
    state, metrics = learner.init(base, seed=3), []
    reference = learner.score(learner.base(state), batch)
    for _ in range(3):
        state, m = learner.update(state, batch, reference)
        metrics.append(m)
    return learner, state, metrics


def test_the_first_policy_is_the_base_model(base, batch):
    learner = make_learner()
    state = learner.init(base, seed=3)
    jax.tree.map(np.testing.assert_array_equal, learner.rollout_params(state), base)
    np.testing.assert_array_equal(learner.score(state.params, batch), learner.score(learner.base(state), batch))


def test_adapters_alone_learn(learned, base):
    learner, state, metrics = learned
    assert metrics[0]["rollout_gap"] < 1e-6 and metrics[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert metrics[2]["kl"] > 1e-4 and metrics[2]["loss"] < metrics[0]["loss"]
    jax.tree.map(np.testing.assert_array_equal, learner.base(state), base)
    for name, x in state.params["layers"]["0"].items():
        if lora.is_adapter(name):
            assert np.abs(x).max() > 0.005
    moments = optax.tree_utils.tree_get(state.optimizer, "mu")
    assert set(moments) == {"layers"} and all(map(lora.is_adapter, moments["layers"]["0"]))


def test_merged_for_rollout_scores_as_unmerged(learned, batch):
    learner, state, _ = learned
    merged = learner.rollout_params(state)
    assert jax.tree.structure(merged) == jax.tree.structure(learner.base(state))
    np.testing.assert_allclose(learner.score(merged, batch), learner.score(state.params, batch), atol=1e-5)
    assert np.abs(learner.score(merged, batch) - learner.score(learner.base(state), batch)).max() > 0.01


def test_gradients_are_those_of_the_whole_by_the_chain_rule(base, batch):
    """At the start B is 0, so that only B has a gradient: scale * A^T dW, of the gradient dW of the whole model."""
    whole, learner = make_learner(BASE), make_learner()
    full = whole.update(whole.init(base), batch, batch.log_prob)[0]
    state = learner.init(base, seed=3)
    a = {name: np.asarray(state.params["layers"]["0"][f"{name}_lora_a"]) for name in ("q", "o", "gate")}
    state = learner.update(state, batch, batch.log_prob)[0]
    # First moments are (1 - b1) times the gradient, scaled down to its norm, which is not the same for both.
    have, want = (optax.tree_utils.tree_get(s.optimizer, "mu")["layers"]["0"] for s in (state, full))
    products = {
        name: MODEL.lora.scale * np.tensordot(a[name].T, want[name], axes=a[name].ndim - 1) for name in ("q", "gate")
    }
    products["o"] = MODEL.lora.scale * np.einsum("hcr,hcd->rd", a["o"], want["o"])
    ratios = [np.vdot(have[f"{n}_lora_b"], p) / np.vdot(p, p) for n, p in products.items()]
    for name, product in products.items():
        np.testing.assert_allclose(have[f"{name}_lora_b"], ratios[0] * product, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(have[f"{name}_lora_a"], 0)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them)")
def test_eight_devices_learn_the_same(learned, base, batch):
    learner = make_learner(mesh=make_mesh(2, 2, 2))
    state = learner.init(jax.device_put(base, learner.base_shardings), seed=3, own=True)
    reference = learner.score(learner.base(state), batch)
    for _ in range(3):
        state, metrics = learner.update(state, batch, reference)
    assert metrics == pytest.approx(learned[2][2], rel=1e-4, abs=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state.params, learned[1].params)
    as_declared = jax.tree.map(
        lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, learner.abstract_state()
    )
    assert all(jax.tree.leaves(as_declared))


def test_without_adapters_there_is_no_base(base):
    learner = make_learner(BASE)
    with pytest.raises(ValueError, match="has no adapters"):
        learner.base(learner.init(base))
