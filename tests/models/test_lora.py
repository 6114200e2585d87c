"""Low-rank adapters: at the start the base model, bit for bit; merged what they are unmerged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SMALL

from rhyme_jax.errors import InputError
from rhyme_jax.models import lora
from rhyme_jax.models.decoder import forward, logits
from rhyme_jax.models.lora import LoraConfig
from rhyme_jax.models.params import LEARNER_RULES, abstract_params, init_params, make_mesh, param_shardings

CONFIG = dataclasses.replace(SMALL, qkv_bias=True, lora=LoraConfig(rank=3, alpha=6.0))
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 12))
POSITIONS = np.broadcast_to(np.arange(12), TOKENS.shape)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def trained(params, seed=0):
    """Adapters that have learned something; biases too, which are not adapted."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


@jax.jit
def run(params):
    return logits(params, CONFIG, forward(params, CONFIG, TOKENS, POSITIONS)[0])


def test_at_the_start_it_is_the_base_model_to_the_bit(params):
    base = lora.base(params)
    assert not any(map(lora.is_adapter, base["layers"]["0"]))
    assert any((params["layers"]["0"]["q_lora_a"] != 0).ravel())
    np.testing.assert_array_equal(run(params), run(base))
    jax.tree.map(np.testing.assert_array_equal, lora.merge(params, CONFIG.lora), base)
    # And the base model is the one that is initialised without adapters.
    jax.tree.map(
        np.testing.assert_array_equal, base, init_params(dataclasses.replace(CONFIG, lora=None), jax.random.key(0))
    )


def test_merged_is_unmerged(params):
    params = trained(params)
    merged = lora.merge(params, CONFIG.lora)
    assert jax.tree.structure(merged) == jax.tree.structure(lora.base(params))
    np.testing.assert_allclose(run(merged), run(params), atol=1e-5)
    assert np.abs(run(merged) - run(lora.base(params))).max() > 0.1


def test_merging_by_hand(params):
    """W + (alpha / r) A B, head by head, in float64."""
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), trained(params)["layers"]["1"])
    merged = lora.merge(trained(params), CONFIG.lora)["layers"]["1"]
    for h in range(CONFIG.q_heads):
        want = layer["q"][:, h] + 2 * layer["q_lora_a"] @ layer["q_lora_b"][:, h]
        np.testing.assert_allclose(merged["q"][:, h], want, atol=1e-6)
        want = layer["o"][h] + 2 * layer["o_lora_a"][h] @ layer["o_lora_b"]
        np.testing.assert_allclose(merged["o"][h], want, atol=1e-6)
    np.testing.assert_allclose(
        merged["down"], layer["down"] + 2 * layer["down_lora_a"] @ layer["down_lora_b"], atol=1e-6
    )


def test_every_matrix_is_adapted_or_the_targets_alone():
    names = set(abstract_params(CONFIG)["layers"]["0"])
    assert {n for n in names if lora.is_adapter(n)} == {a for t in lora.TARGETS for a in lora.adapters(t)}
    some = dataclasses.replace(CONFIG, lora=LoraConfig(2, 4.0, ("q", "down")))
    layer = abstract_params(some)["layers"]["0"]
    assert {n: layer[n].shape for n in layer if lora.is_adapter(n)} == {
        "q_lora_a": (32, 2),
        "q_lora_b": (2, 4, 8),
        "down_lora_a": (64, 2),
        "down_lora_b": (2, 32),
    }


def test_split_and_join(params):
    learn, frozen = lora.split(params)
    assert set(learn) == {"layers"} and set(learn["layers"]["1"]) == {a for t in lora.TARGETS for a in lora.adapters(t)}
    assert len(jax.tree.leaves(learn)) + len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(params))
    joined = lora.join(learn, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    assert joined["layers"]["0"]["k_lora_b"] is params["layers"]["0"]["k_lora_b"]
    without = lora.base(params)
    assert lora.split(without) == (without, {}) and lora.join(without, {}).keys() == without.keys()


def test_adapters_stay_in_float32_beside_a_bfloat16_model():
    low = abstract_params(dataclasses.replace(CONFIG, param_dtype="bfloat16"))["layers"]["0"]
    assert low["q"].dtype == jnp.bfloat16 and low["q_lora_a"].dtype == low["q_lora_b"].dtype == jnp.float32
    params = trained(init_params(dataclasses.replace(CONFIG, param_dtype="bfloat16"), jax.random.key(0)))
    assert lora.merge(params, CONFIG.lora)["layers"]["0"]["up"].dtype == params["layers"]["0"]["up"].dtype


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them on a CPU)")
def test_adapters_are_split_as_their_matrices_are():
    mesh = make_mesh(2, 2, 2)
    layer = param_shardings(CONFIG, mesh, LEARNER_RULES)["layers"]["0"]
    specs = {name: tuple(layer[name].spec) for name in ("q_lora_a", "q_lora_b", "down_lora_a", "down_lora_b")}
    assert specs == {
        "q_lora_a": ("fsdp", None),
        "q_lora_b": (None, "tensor", None),
        "down_lora_a": ("tensor", None),
        "down_lora_b": (None, "fsdp"),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1.0), "lora.rank=0: must be at least 1"),
        ((65_537, 1.0), "lora.rank=65537: must be at most 65536"),
        ((10**400, 1.0), "lora.rank=10{79}: must be at most 65536"),
        ((2, 0.0), "lora.alpha=0.0: must be a positive number"),
        ((2, float("nan")), "lora.alpha=nan"),
        ((2, 1.0, ("q", "embed")), "lora.targets: no matrix 'embed'; there are q, k, v, o, gate, up, down"),
        ((2, 1.0, ("q", "q")), "must name each matrix once"),
        ((2, 1.0, ()), "one at least"),
    ],
)
def test_refused(values, message):
    with pytest.raises(InputError, match=message):
        LoraConfig(*values)
