"""Every mesh (data, fsdp, tensor) of eight devices: logits, losses and updated parameters are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SMALL, one_device

from rhyme_jax.grpo.learner import Batch, Learner, OptimizerConfig
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.models import decoder
from rhyme_jax.models.params import init_params, make_mesh

N, S, T = 8, 14, 6
MODEL = dataclasses.replace(SMALL, layers=1, vocab_size=48, q_heads=8, kv_heads=8, head_dim=4, tie_embeddings=False)
# Blocks that do not divide a device's part of the vocabulary, of 48 to 6 entries.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_norm=0.5, remat="dots", vocab_block=5)
SHAPES = [(data, fsdp, 8 // data // fsdp) for data in (8, 4, 2, 1) for fsdp in (8, 4, 2, 1) if data * fsdp <= 8]

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them)")


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return Batch(
        tokens=rng.integers(0, MODEL.vocab_size, (N, S)).astype(np.int32),
        prompt_length=rng.integers(2, 8, N).astype(np.int32),
        response_length=rng.integers(1, T + 1, N).astype(np.int32),
        log_prob=(-4 + 0.3 * rng.normal(size=(N, T))).astype(np.float32),
        advantage=rng.normal(size=N).astype(np.float32),
        valid=np.arange(N) != 3,
    )


def outcome(mesh, params, batch):
    """(logits [N, S, V], metrics of two updates, parameters after them)"""
    learner = Learner(MODEL, LossConfig(aggregate="token"), OPTIMIZER, mesh, 0.7, rows=N)
    state, positions = learner.init(params), jnp.broadcast_to(jnp.arange(S), (N, S))

    @jax.jit
    def logits(params):
        hidden, _ = decoder.forward(params, MODEL, batch.tokens, positions, mesh=mesh)
        return decoder.logits(params, MODEL, hidden)

    first, metrics = np.asarray(logits(state.params)), []
    for _ in range(2):
        state, m = learner.update(state, batch)
        metrics.append(m)
    return first, metrics, jax.device_get(state.params)


@pytest.fixture(scope="module")
def alone(params, batch):
    return outcome(one_device(), params, batch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_devices_as_one(shape, params, batch, alone):
    logits, metrics, learned = outcome(make_mesh(*shape), params, batch)
    np.testing.assert_allclose(logits, alone[0], atol=1e-5)
    for have, want in zip(metrics, alone[1], strict=True):
        assert have == pytest.approx(want, rel=1e-5, abs=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), learned, alone[2])
    assert metrics[0]["loss"] != pytest.approx(metrics[1]["loss"], abs=1e-3)


def test_all_of_them():
    assert len(SHAPES) == len(set(SHAPES)) == 10 and {np.prod(s) for s in SHAPES} == {8}
