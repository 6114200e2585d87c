"""The training benchmark: that it measures the learner's step, what it says of memory, and what it refuses."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from flax import traverse_util
from helpers import SMALL, one_device

from configs.bench_training import VARIANTS, get_config
from rhyme_jax.benchmarks import training
from rhyme_jax.errors import InputError
from rhyme_jax.grpo.learner import Batch, Learner, LearnerState, OptimizerConfig
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.models.params import abstract_params
from rhyme_jax.training.console import Console

MODEL = dataclasses.replace(SMALL, layers=1)


def test_smoke(monkeypatch):
    monkeypatch.setitem(training.RANDOM, "small", MODEL)
    text = io.StringIO()
    config = get_config("smoke")
    config.weights, config.remat, config.layers = "random:small", ("none",), 0
    result = training.run(config, Console(text))
    whole, blocked = result["steps"]
    assert (whole["vocab_block"], blocked["vocab_block"]) == (0, 2048)
    assert all(len(step["seconds"]) == config.repeats and step["seconds"][0] > 0 for step in result["steps"])
    logits = 4 * config.rows * config.response_tokens * config.vocab_size
    assert whole["temporary_bytes"] - blocked["temporary_bytes"] > logits
    for step in result["steps"]:
        # Parameters, gradients and two moments are there while gradients are accumulated, beside the temporaries.
        assert step["accumulate_bytes"] >= 4 * 4 * result["parameters"] + step["temporary_bytes"]
        assert step["peak_bytes"] >= step["accumulate_bytes"]
    lines = text.getvalue().splitlines()
    assert lines[0] == (
        "random:small: 0M parameters, 1 layer(s), vocabulary 8192; micro-batches of 8 rows of 8 + 56 tokens"
    )
    assert [line.split()[:3] for line in lines[-2:]] == [["float32", "none", "whole"], ["float32", "none", "2048"]]


def random_params(scale=0.2):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.normal(0, scale, p.shape).astype(p.dtype), abstract_params(MODEL))


def test_gradients_are_the_learners():
    rows, positions, slots = 4, 12, 7
    params, batch = random_params(), training.make_batch(MODEL, rows, positions, slots)
    program = training.compile_accumulate(MODEL, "none", 0, rows, positions, slots)
    total = jax.device_get(program(params, jax.tree.map(np.zeros_like, params), batch))

    learner = Learner(MODEL, LossConfig(), OptimizerConfig(1e-3), one_device(), temperature=1.0, rows=rows)
    graded = Batch(
        np.asarray(batch["tokens"]),
        np.asarray(batch["prompt_length"]),
        np.full(rows, slots),
        np.asarray(batch["log_prob"]),
        np.asarray(batch["advantage"]),
        np.ones(rows, bool),
    )
    want = learner.accumulate(LearnerState(params, None, None), None, graded).gradients
    want = traverse_util.unflatten_dict(traverse_util.flatten_dict(want, sep="/"), sep="/")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), total, want)
    assert min(np.abs(g).max() for g in jax.tree.leaves(total)) > 1e-4


def test_the_update_is_adams_first():
    weight, params = 4.0, random_params()
    total = jax.tree.map(lambda p: np.cos(100 * p), params)
    moments = training.make_optimizer().init(params)
    program, moments_bytes = training.compile_apply(MODEL, weight)
    assert moments_bytes == sum(x.nbytes for x in jax.tree.leaves(moments))
    got = jax.device_get(program((params, moments), total)[0])
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(total))) / weight
    assert norm > 1  # so gradients are clipped
    for new, old, g in zip(*map(jax.tree.leaves, (got, params, total)), strict=True):
        g = np.asarray(g) / weight / norm
        np.testing.assert_allclose(new - old, -training.LEARNING_RATE * g / (np.abs(g) + 1e-8), atol=2e-7)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weights", "15m", "config.weights='15m': no such shape; there are random:15m, random:0.5b, random:1.5b"),
        ("rows", 0, "config.rows=0: must be at least 1"),
        ("repeats", -1, "config.repeats=-1: must be at least 0"),
        ("dtypes", ("float16",), "config.dtypes=('float16',): no 'float16'; there are float32, bfloat16"),
        ("remat", ("some",), "config.remat='some': must be one of none, dots, full"),
        ("remat", (), "config.remat=(): must name at least one"),
        ("vocab_blocks", (-1,), "config.vocab_blocks=(-1,): must not be negative"),
    ],
)
def test_bad_configs(field, value, message):
    config = get_config()
    config[field] = value
    with pytest.raises(InputError) as error:
        training.run(config, Console(io.StringIO()))
    assert str(error.value) == message


def test_variants():
    sizes = {variant: training.count_params(training._checked(get_config(variant))) for variant in VARIANTS}
    assert {variant: round(size / 1e6) for variant, size in sizes.items()} == {"15m": 31, "0.5b": 494, "smoke": 6}
    with pytest.raises(ValueError, match=r"no variant 'huge'; there are 15m, 0\.5b, smoke"):
        get_config("huge")
