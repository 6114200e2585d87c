"""Log-probabilities in blocks of the vocabulary against all at once; what the backward pass keeps of activations."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.models.blocked_head import blocked_log_probs
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import LEARNER_RULES, abstract_params, make_mesh, param_shardings
from rhyme_jax.models.remat import REMAT_POLICIES, check_policy, checkpointed
from rhyme_jax.models.scoring import score_responses

B, T, D, V = 8, 5, 16, 88
TEMPERATURE, SOFTCAP = 0.7, 3.0
MODEL = DecoderConfig(
    vocab_size=512, width=16, layers=1, q_heads=4, kv_heads=2, head_dim=8, mlp_width=24, logit_softcap=5.0
)
SLOTS = 24

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them)")


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(B, T, D)).astype(np.float32),
        "table": rng.normal(size=(V, D)).astype(np.float32),
        "labels": rng.integers(0, V, (B, T)).astype(np.int32),
        "weights": rng.normal(size=(2, B, T)).astype(np.float32),  # of log-probabilities and entropies in the loss
    }


def loss(hidden, table, labels, weights, score):
    log_prob_BT, entropy_BT = score(hidden, table, labels)
    return jnp.sum(weights[0] * log_prob_BT + weights[1] * entropy_BT), (log_prob_BT, entropy_BT)


value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=4)


@functools.cache
def all_at_once(tied: bool, temperature: float, softcap: float):
    def score(hidden, table, labels):
        logits = hidden @ (table.T if tied else table)
        if softcap:
            logits = softcap * jnp.tanh(logits / softcap)
        log_probs = jax.nn.log_softmax(logits / temperature)
        label = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        return label, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    return score


def assert_close(got, want, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), got, want)


@pytest.mark.parametrize(
    ("shape", "block", "tied", "temperature", "softcap"),
    [
        pytest.param(None, 20, True, TEMPERATURE, SOFTCAP, id="last block is shorter"),
        pytest.param(None, 32, False, 1.0, 0.0, id="untied"),
        pytest.param((1, 1, 8), 4, True, TEMPERATURE, SOFTCAP, id="split eightfold", marks=needs_devices),
        pytest.param((2, 2, 2), 11, False, 1.0, 0.0, id="every axis", marks=needs_devices),
        pytest.param((1, 4, 2), 64, True, TEMPERATURE, SOFTCAP, id="block beyond the part", marks=needs_devices),
        pytest.param((8, 1, 1), 30, True, TEMPERATURE, SOFTCAP, id="rows only", marks=needs_devices),
    ],
)
def test_blocks_equal_all_at_once(shape, block, tied, temperature, softcap, case):
    table = case["table"] if tied else case["table"].T
    arguments = case["hidden"], table, case["labels"], case["weights"]
    score = functools.partial(
        blocked_log_probs,
        block=block,
        tied=tied,
        temperature=temperature,
        softcap=softcap,
        mesh=None if shape is None else make_mesh(*shape),
    )
    want = value_and_grad(*arguments, all_at_once(tied, temperature, softcap))
    (total, scores), gradients = value_and_grad(*arguments, score)
    assert_close((scores, gradients), (want[0][1], want[1]))
    np.testing.assert_allclose(total, want[0][0], rtol=1e-5)
    assert min(jnp.abs(g).max() for g in gradients) > 0.1


def test_large_and_equal_logits(case):
    """The running maximum starts below any logit, and rises, falls or stays from block to block."""
    score = jax.jit(functools.partial(blocked_log_probs, block=24, tied=True))
    for logits in (np.arange(V) * 10.0 - 5000, 400 - np.arange(V) * 10.0, np.full(V, -3.0)):
        table = np.zeros((V, D), np.float32)
        table[:, 0] = logits
        hidden = np.zeros((1, 2, D), np.float32)
        hidden[..., 0] = 1
        labels = np.array([[0, V - 1]])
        got = score(hidden, table, labels)
        p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        np.testing.assert_allclose(got[0], p[labels], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], np.full((1, 2), -(np.exp(p) * p).sum()), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_close_and_its_gradients_keep_their_dtypes(case):
    hidden = jnp.asarray(case["hidden"], jnp.bfloat16)
    arguments = hidden, case["table"], case["labels"], case["weights"]
    score = functools.partial(blocked_log_probs, block=44, tied=True, temperature=TEMPERATURE, softcap=SOFTCAP)
    (_, scores), gradients = value_and_grad(*arguments, score)
    want = value_and_grad(hidden.astype(np.float32), *arguments[1:], all_at_once(True, TEMPERATURE, SOFTCAP))
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    assert_close((scores, gradients), (want[0][1], want[1]), atol=0.1)  # of up to 8


def test_a_block_has_entries(case):
    with pytest.raises(ValueError, match="block=0: must be at least 1"):
        blocked_log_probs(case["hidden"], case["table"], case["labels"], block=0, tied=True)


# --- through the decoder ----------------------------------------------------------------------------------------


def score_program(mesh, vocab_block):
    """(compiled loss and gradients, its arguments) of 8 rows of 8 + 24 tokens."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(0.3, 0.4, x.shape).astype(x.dtype), abstract_params(MODEL))
    tokens_BS = rng.integers(0, MODEL.vocab_size, (B, 8 + SLOTS)).astype(np.int32)
    weights_BT = rng.normal(size=(2, B, SLOTS)).astype(np.float32)
    length_B = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)

    def score_loss(params, tokens_BS, length_B, weights_BT):
        scores = score_responses(
            params, MODEL, tokens_BS, length_B, SLOTS, temperature=TEMPERATURE, vocab_block=vocab_block, mesh=mesh
        )
        return jnp.sum(weights_BT[0] * scores[0] + weights_BT[1] * scores[1]), scores

    shardings = None if mesh is None else param_shardings(MODEL, mesh, LEARNER_RULES)
    program = jax.jit(
        jax.value_and_grad(score_loss, has_aux=True),
        in_shardings=(shardings, None, None, None),
        out_shardings=(None, shardings),
    )
    arguments = params, tokens_BS, length_B, weights_BT
    return program.lower(*arguments).compile(), arguments


@needs_devices
def test_no_device_holds_or_gathers_what_blocks_are_for():
    plain, arguments = score_program(None, 0)
    mesh = make_mesh(2, 2, 2)
    blocked, _ = score_program(mesh, 100)  # of 256 on each device
    shardings = blocked.input_shardings[0]
    want = plain(*arguments)
    assert_close(blocked(*jax.device_put(arguments, shardings)), want, atol=1e-4)

    def largest(program):
        """Elements of the largest float32 array that a device computes."""
        shapes = re.findall(r"f32\[([\d,]+)\]", program.as_text())
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    positions, vocabulary = B * SLOTS // 4, MODEL.vocab_size // 2  # of a device
    assert largest(blocked) < positions * vocabulary
    assert largest(plain) >= B * SLOTS * MODEL.vocab_size  # so the pattern finds them
    gathered = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", blocked.as_text())
    assert gathered  # the widths of parameters, over fsdp
    assert not any(str(MODEL.vocab_size) in shape.split(",") for shape in gathered)


def test_small_vocabularies_keep_their_program():
    params, rows = abstract_params(MODEL), jax.ShapeDtypeStruct((2, 6), jnp.int32)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)

    def program(vocab_block):
        score = functools.partial(score_responses, response_slots=4, vocab_block=vocab_block)
        return str(jax.make_jaxpr(lambda p, t, n: score(p, MODEL, t, n))(params, rows, length))

    assert program(0) == program(MODEL.vocab_size) == program(10**6) != program(MODEL.vocab_size - 1)


# --- rematerialisation ------------------------------------------------------------------------------------------


def test_policies_recompute_what_they_say():
    """Counted in matrix products: a layer has two with parameters and one between activations, each with two more in
    its backward pass; the result of the last is not needed again.
    """
    x, w = np.ones((2, 3, 4), np.float32), np.ones((2, 4, 4), np.float32)

    def layer(w, x):
        y = jnp.tanh(x @ w[0])
        scores = jnp.einsum("bsd,btd->bst", y, y)
        return x + jnp.tanh(jnp.sum(jnp.tanh(scores), axis=-1, keepdims=True) * y @ w[1])

    def products(policy):
        gradient = jax.grad(lambda w: jnp.sum(checkpointed(layer, policy)(w, x) ** 2))
        return str(jax.make_jaxpr(gradient)(w)).count("dot_general")

    counts = {policy: products(policy) for policy in REMAT_POLICIES}
    assert counts["dots"] == counts["none"] + 1
    assert counts["full"] == counts["none"] + 3


def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError, match=r"^optimizer.remat='some': must be one of none, dots, full$"):
        checkpointed(lambda x: x, "some")
    with pytest.raises(InputError, match=r"^optimizer.remat=True: must be one of none, dots, full$"):
        check_policy(True)
