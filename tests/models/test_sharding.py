"""Which sizes of a mesh a model divides over, and what is said of the others, before anything compiles."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import (
    LEARNER_RULES,
    ROLLOUT_RULES,
    Param,
    make_mesh,
    param_shardings,
    partition_spec,
)

MODEL = DecoderConfig(
    vocab_size=96, width=24, layers=2, q_heads=8, kv_heads=4, head_dim=6, mlp_width=48, tie_embeddings=False
)

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them)")


def test_specs():
    mesh = make_mesh(1, 2, 4)
    learner, rollout = (param_shardings(MODEL, mesh, rules) for rules in (LEARNER_RULES, ROLLOUT_RULES))
    assert learner["embed"].spec == PartitionSpec("tensor", "fsdp")
    assert learner["head"].spec == PartitionSpec("fsdp", "tensor")
    assert learner["layers"]["1"]["o"].spec == PartitionSpec("tensor", None, "fsdp")
    assert learner["final_norm"].spec == PartitionSpec("fsdp")
    assert rollout["layers"]["1"]["o"].spec == PartitionSpec("tensor", None, None)
    assert rollout["head"].spec == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("change", "shape", "rules", "message"),
    [
        pytest.param(
            {},
            (1, 1, 8),
            LEARNER_RULES,
            "mesh.tensor=8: does not divide the model's kv_heads of 4; 1, 2, 4",
            id="heads",
        ),
        pytest.param(
            # Three divides heads and MLP too; what is named is what is wrong, what is listed suits all.
            {"vocab_size": 98},
            (1, 1, 4),
            ROLLOUT_RULES,
            "mesh.tensor=4: does not divide the model's vocab of 98; 1, 2",
            id="vocabulary",
        ),
        pytest.param(
            {"vocab_size": 97},
            (1, 1, 2),
            ROLLOUT_RULES,
            "mesh.tensor=2: does not divide the model's vocab of 97; 1",
            id="prime",
        ),
        pytest.param(
            {"width": 20},
            (1, 8, 1),
            LEARNER_RULES,
            "mesh.fsdp=8: does not divide the model's embed of 20; 1, 2, 4, 5, 10, 20",
            id="width",
        ),
    ],
)
def test_sizes_that_would_do_are_named(change, shape, rules, message):
    with pytest.raises(InputError) as error:
        param_shardings(dataclasses.replace(MODEL, **change), make_mesh(*shape), rules)
    assert str(error.value) == message.replace("; ", "; sizes that divide all it splits: ")


@pytest.mark.parametrize("rules", [LEARNER_RULES, ROLLOUT_RULES])
def test_sizes_that_are_named_do(rules):
    for tensor in (1, 2, 4):
        param_shardings(MODEL, make_mesh(1, 1, tensor, devices=jax.devices()[:tensor]), rules)


def test_the_width_is_not_split_in_rollouts():
    odd = dataclasses.replace(MODEL, width=23)
    param_shardings(odd, make_mesh(2, 4, 1), ROLLOUT_RULES)
    with pytest.raises(InputError, match=r"mesh.fsdp=4: does not divide the model's embed of 23"):
        param_shardings(odd, make_mesh(2, 4, 1), LEARNER_RULES)


def test_one_mesh_axis_cannot_split_two_dimensions():
    rules = {**LEARNER_RULES, "mlp": "fsdp"}
    with pytest.raises(ValueError, match=r"split both 'embed' and 'mlp' of a parameter .* over mesh axis 'fsdp'$"):
        partition_spec(Param((4, 8), ("embed", "mlp"), None), rules)
    with pytest.raises(ValueError, match="split both"):
        param_shardings(MODEL, make_mesh(8, 1, 1), rules)
    assert partition_spec(Param((4, 8), ("embed", "head_dim"), None), ROLLOUT_RULES) == PartitionSpec(None, None)
