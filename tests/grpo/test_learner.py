"""The learner against a plain reference that knows no padding, micro-batches, masks or meshes.

The reference differentiates one unpadded response at a time, adds up, and takes an AdamW step in float64 NumPy.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from helpers import SMALL, one_device
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.learner import Batch, Learner, LearnerState, OptimizerConfig, place
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.models import decoder
from rhyme_jax.models.params import init_params, make_mesh
from rhyme_jax.models.scoring import score_responses

N, S, T = 16, 14, 6
MODEL = dataclasses.replace(SMALL, layers=1)  # compilations take most of the time here, and layers are alike
LENGTHS = [(4, 3), (8, 6)]  # (prompt, response); two, for the reference compiles for each; one fills the row
TEMPERATURE = 0.7
GRPO = LossConfig()
DAPO_KL = LossConfig(clip_low=0.1, clip_high=0.3, kl_coef=0.5, aggregate="token")
PLAIN = OptimizerConfig(learning_rate=1e-4, clip_norm=100.0)
CLIPPED = dataclasses.replace(
    PLAIN, clip_norm=0.05, weight_decay=0.1, b1=0.8, b2=0.99, warmup_updates=2, schedule="cosine", total_updates=9
)
needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them)")


def learner(loss=GRPO, optimizer=PLAIN, mesh=(1, 1, 1), model=MODEL) -> Learner:
    return _learner(loss, optimizer, mesh, model)


@functools.cache  # with what it has compiled
def _learner(loss, optimizer, mesh, model) -> Learner:
    mesh = one_device() if mesh == (1, 1, 1) else make_mesh(*mesh)
    return Learner(model, loss, optimizer, mesh, TEMPERATURE, rows=N)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def other_params():
    return init_params(MODEL, jax.random.key(1))


@pytest.fixture(scope="module")
def batch(params):
    """Rollouts of a policy near `params`: ratios between 0.5 and 2, so that the clip is at work."""
    rng = np.random.default_rng(0)
    prompt, response = np.array([LENGTHS[n % 2] for n in range(N)], np.int32).T
    tokens = rng.integers(0, MODEL.vocab_size, (N, S)).astype(np.int32)
    log_prob = np.asarray(scores(params, tokens, prompt)[0]) + rng.normal(0, 0.3, (N, T)).astype(np.float32)
    advantage = rng.normal(0, 1, N).astype(np.float32)
    return Batch(tokens, prompt, response, log_prob, advantage, valid=np.arange(N) != 4)


@jax.jit
def scores(params, tokens, prompt_length, temperature=TEMPERATURE):
    return score_responses(params, MODEL, tokens, prompt_length, T, temperature=temperature)


# --- the reference --------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(2, 3))
def _row_log_probs(params, tokens, prompt: int, response: int):
    positions = jnp.arange(prompt + response)
    hidden, _ = decoder.forward(params, MODEL, tokens[None], positions[None])
    log_probs = jax.nn.log_softmax(decoder.logits(params, MODEL, hidden)[0] / TEMPERATURE)
    return log_probs[positions[prompt:] - 1, tokens[prompt:]]


@functools.partial(jax.jit, static_argnums=(2, 3))
@functools.partial(jax.value_and_grad, has_aux=True)
def _row_loss(params, tokens, prompt: int, response: int, least, most, kl_coef, near, factor, advantage, reference):
    log_prob = _row_log_probs(params, tokens, prompt, response)
    ratio = jnp.exp(log_prob - near)
    held = jnp.where(advantage > 0, jnp.minimum(ratio, most), jnp.maximum(ratio, least))
    kl = jnp.exp(reference - log_prob) - (reference - log_prob) - 1
    return jnp.sum(-held * advantage * factor + kl_coef * kl), jnp.sum(kl)


def reference_loss(
    params, batch: Batch, loss: LossConfig, reference_params, proximal_params
) -> tuple[float, float, dict]:
    """(loss, KL, gradients as float64 NumPy) of the mean over valid rows, or over their tokens."""
    total = kl_total = weight = 0
    gradients = jax.tree.map(lambda p: np.zeros(p.shape), params)
    bounds = 1 - loss.clip_low, 1 + loss.clip_high, loss.kl_coef
    for n in np.flatnonzero(batch.valid):
        prompt, response = int(batch.prompt_length[n]), int(batch.response_length[n])
        row = batch.tokens[n, : prompt + response], prompt, response
        reference = _row_log_probs(reference_params, *row)
        near, factor = batch.log_prob[n, :response], np.ones(response, np.float32)
        if batch.stale is not None and batch.stale[n]:
            proximal = _row_log_probs(proximal_params, *row)
            factor = np.minimum(np.exp(proximal - near), loss.importance_cap)
            near = proximal
        (value, kl), gradient = _row_loss(params, *row, *bounds, near, factor, batch.advantage[n], reference)
        share = 1 if loss.aggregate == "token" else 1 / response
        total, kl_total, weight = total + share * value, kl_total + share * kl, weight + share * response
        gradients = jax.tree.map(
            lambda old, g, share=share: old + share * np.asarray(g, np.float64), gradients, gradient
        )
    return float(total / weight), float(kl_total / weight), jax.tree.map(lambda g: g / weight, gradients)


class ReferenceAdamW:
    """Loshchilov & Hutter 2019, after scaling the gradients down to a global norm."""

    def __init__(self, params, config: OptimizerConfig):
        self.config, self.count = config, 0
        self.params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        self.first = self.second = jax.tree.map(np.zeros_like, self.params)

    def step(self, gradients, learning_rate: float):
        c = self.config
        self.count += 1
        scale = min(1, c.clip_norm / norm(gradients))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        self.first = jax.tree.map(lambda m, g: c.b1 * m + (1 - c.b1) * g, self.first, gradients)
        self.second = jax.tree.map(lambda v, g: c.b2 * v + (1 - c.b2) * g**2, self.second, gradients)
        self.params = jax.tree.map(
            lambda p, m, v: (
                p
                - learning_rate
                * (m / (1 - c.b1**self.count) / (np.sqrt(v / (1 - c.b2**self.count)) + 1e-8) + c.weight_decay * p)
            ),
            self.params,
            self.first,
            self.second,
        )


def norm(tree) -> float:
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree)))


def assert_close(got, want, atol: float):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol), got, want)


def run(learner: Learner, params, batch: Batch, reference=None, updates: int = 2):
    """(host copies of the params after `updates` updates on one batch, metrics of each update)"""
    state, metrics = learner.init(params), []
    for _ in range(updates):
        state, m = learner.update(state, batch, reference)
        metrics.append(m)
    assert int(state.updates) == updates
    return jax.device_get(state.params), metrics


@pytest.fixture(scope="module")
def plain_run(params, batch):
    return run(learner(), params, batch)


# --- one update -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "optimizer", "stale"),
    [(GRPO, PLAIN, None), (DAPO_KL, CLIPPED, np.arange(N) % 3 == 0)],
    ids=["grpo", "dapo, kl, clipped, a third stale"],
)
def test_updates_equal_the_reference(loss, optimizer, stale, params, other_params, batch):
    """Two on one batch, so that the second has moved away from the policy that was proximal at the first."""
    fast, batch = learner(loss, optimizer), batch.replace(stale=stale)
    reference = fast.score(other_params, batch) if loss.kl_coef else None
    proximal = fast.score(params, batch) if stale is not None else None
    rates = [1e-4 / 3, 2e-4 / 3] if optimizer.warmup_updates else [1e-4, 1e-4]
    state, slow = fast.init(params), ReferenceAdamW(params, optimizer)
    for rate in rates:
        slow_params = jax.tree.map(np.float32, slow.params)
        value, kl, gradients = reference_loss(slow_params, batch, loss, other_params, params)
        slow.step(gradients, rate)
        state, metrics = fast.update(state, batch, reference, proximal)
        assert metrics["loss"] == pytest.approx(value, rel=2e-6, abs=1e-6)
        assert metrics["kl"] == pytest.approx(kl if loss.kl_coef else 0, rel=2e-6, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm(gradients), rel=1e-5)  # before it is clipped
        assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-6)
        assert metrics["clip_fraction"] > 0.1
        assert 0.2 < metrics["stale_share"] < 0.4 if stale is not None else metrics["stale_share"] == 0
        assert_close(optax.tree_utils.tree_get(state.optimizer, "mu"), slow.first, 1e-6)
        assert_close(state.params, slow.params, 1e-6)
    moved = jax.tree.map(lambda p, q: np.abs(np.asarray(p) - np.asarray(q)).max(), state.params, params)
    assert min(jax.tree.leaves(moved)) > 1e-5  # every parameter learns


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_are_scaled_down_to_the_norm(clipped, params, batch):
    """The first moment after one update is (1 - b1) times the gradient that was applied."""
    loss, optimizer, reference = (DAPO_KL, CLIPPED, batch.log_prob) if clipped else (GRPO, PLAIN, None)
    state, metrics = learner(loss, optimizer).update(learner(loss, optimizer).init(params), batch, reference)
    applied = norm(optax.tree_utils.tree_get(state.optimizer, "mu")) / (1 - optimizer.b1)
    assert CLIPPED.clip_norm < metrics["grad_norm"] < PLAIN.clip_norm
    assert applied == pytest.approx(CLIPPED.clip_norm if clipped else metrics["grad_norm"], rel=1e-5)


def test_micro_batches_change_nothing(params, batch, plain_run):
    got, metrics = run(learner(GRPO, dataclasses.replace(PLAIN, micro_batches=4)), params, batch)
    assert_close(got, plain_run[0], 1e-6)
    for m, want in zip(metrics, plain_run[1], strict=True):
        assert m == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_remat_changes_nothing(params, batch, plain_run):
    got, metrics = run(learner(GRPO, dataclasses.replace(PLAIN, remat="full")), params, batch)
    assert_close(got, plain_run[0], 1e-6)
    assert metrics[1] == pytest.approx(plain_run[1][1], rel=1e-5, abs=1e-6)


# --- other losses ---------------------------------------------------------------------------------------------

OTHER = LossConfig(
    ratio="sequence",
    clip_low=0.05,
    clip_high=0.1,
    clip_dual=1.2,
    aggregate="constant",
    budget=T,
    kl_coef=0.5,
    kl_estimator="k2",
    entropy_coef=0.3,
    behaviour="corrected",
    importance_cap=1.1,
)


def other_loss(params, batch: Batch, reference, proximal):
    """OTHER response by response, each with tokens' own advantages; the clip by the response's ratio, which a token's
    gradient goes around.
    """
    log_prob, entropy = scores(params, batch.tokens, batch.prompt_length)
    total = 0.0
    for n in np.flatnonzero(batch.valid):
        x, before, rollout, other, advantage, h = (
            a[n, : batch.response_length[n]]
            for a in (log_prob, proximal, batch.log_prob, reference, batch.advantage, entropy)
        )
        weight = jnp.minimum(jnp.exp(jnp.mean(before - rollout)), 1.1)
        ratio = jax.lax.stop_gradient(jnp.exp(jnp.mean(x - before)))
        free = jnp.where(advantage > 0, ratio <= 1.1, (ratio >= 0.95) & (ratio <= 1.2))
        held = jnp.where(advantage > 0, jnp.minimum(ratio, 1.1), jnp.clip(ratio, 0.95, 1.2))
        gain = advantage * (held + free * ratio * (x - jax.lax.stop_gradient(x)))
        total += jnp.sum(-weight * gain + 0.5 * (x - other) ** 2 / 2 - 0.3 * h) / T
    return total / batch.valid.sum()


def test_a_loss_with_every_switch(params, other_params, batch):
    """Seven rows, in micro-batches of 4, at a policy that has moved from the one before the first update."""
    rng = np.random.default_rng(3)
    reference, proximal = (
        np.asarray(scores(p, batch.tokens, batch.prompt_length)[0])[:7] for p in (other_params, params)
    )
    batch = pick(batch, slice(7)).replace(advantage=rng.normal(0, 1, (7, T)).astype(np.float32))
    fast = learner(OTHER, dataclasses.replace(PLAIN, micro_batches=4))
    moved = jax.tree.map(lambda p, q: p + 0.05 * (q - p), params, other_params)
    slow = jax.jit(jax.value_and_grad(lambda params: other_loss(params, batch, reference, proximal)))
    want, slopes = slow(moved)
    state, metrics = fast.update(fast.init(moved), batch, reference, proximal)
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-5)
    assert 0.1 < metrics["clip_fraction"] < 0.9 and 0 < metrics["importance_truncated"] < 1
    assert metrics["stale_share"] == 0 and metrics["rollout_gap"] > 0.1
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - PLAIN.b1), optax.tree_utils.tree_get(state.optimizer, "mu"))
    assert_close(got, slopes, 2e-6)


# --- meshes (test_meshes has what they must not change) --------------------------------------------------------


@needs_8_devices
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 4, 2)], ids=str)
def test_the_state_is_sharded(shape, params, batch):
    """Parameters and both moments are split over fsdp and tensor, before and after an update, and as
    `abstract_state` (which checkpoints are restored into) says; the rollout's weights over tensor alone.
    """
    _, fsdp, tensor = shape
    fast = learner(GRPO, dataclasses.replace(PLAIN, micro_batches=2), shape)
    V, D, F, H = MODEL.vocab_size, MODEL.width, MODEL.mlp_width, MODEL.q_heads
    state = fast.init(params)
    for _ in range(2):
        moments = [optax.tree_utils.tree_get(state.optimizer, name) for name in ("mu", "nu")]
        for tree in (state.params, *moments):
            assert shard_shape(tree["embed"]) == (V // tensor, D // fsdp)
            assert shard_shape(tree["layers"]["0"]["down"]) == (F // tensor, D // fsdp)
            assert shard_shape(tree["layers"]["0"]["q"]) == (D // fsdp, H // tensor, MODEL.head_dim)
            assert shard_shape(tree["final_norm"]) == (D // fsdp,)
        jax.tree.map(assert_as_declared, state, fast.abstract_state())
        rollout = fast.rollout_params(state)
        assert shard_shape(rollout["embed"]) == (V // tensor, D)
        assert shard_shape(rollout["layers"]["0"]["q"]) == (D, H // tensor, MODEL.head_dim)
        jax.tree.map(np.testing.assert_array_equal, rollout, state.params)
        state, _ = fast.update(state, batch)


def shard_shape(x) -> tuple[int, ...]:
    (shape,) = {s.data.shape for s in x.addressable_shards}
    return shape


def assert_as_declared(x, declared):
    assert x.shape == declared.shape and x.dtype == declared.dtype
    assert x.sharding.is_equivalent_to(declared.sharding, x.ndim)


@needs_8_devices
def test_place_is_device_put(params):
    """Where the mesh lies in one process; elsewhere it puts down the same blocks, one by one."""
    mesh = make_mesh(2, 2, 2)
    x = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
    for spec in (PartitionSpec(), PartitionSpec(("data", "fsdp")), PartitionSpec("data", None, "tensor")):
        sharding = NamedSharding(mesh, spec)
        blocks = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        for got in (place(x, sharding), blocks):
            assert got.sharding == sharding
            np.testing.assert_array_equal(got, x)


# --- micro-batches --------------------------------------------------------------------------------------------


def pick(batch: Batch, rows) -> Batch:
    return jax.tree.map(lambda x: x[rows], batch)


@settings(deadline=None, max_examples=12)
@given(order=st.permutations(range(N)), cuts=st.sets(st.integers(1, N - 1)))
def test_rows_may_come_in_any_order_and_pieces(order, cuts, params, batch, plain_run):
    """Pieces of 1 to 4 rows into micro-batches of 4, the rest of which is padding."""
    fast = learner(GRPO, dataclasses.replace(PLAIN, micro_batches=4))
    edges = sorted({*cuts, *range(0, N + 1, 4)})
    state, sums = fast.init(params), None
    for update in range(2):
        sums = None
        for start, stop in itertools.pairwise(edges):
            sums = fast.accumulate(state, sums, pick(batch, list(order[start:stop])))
        state, metrics = fast.apply(state, sums)
        assert metrics == pytest.approx(plain_run[1][update], rel=1e-5, abs=1e-6)
    assert_close(state.params, plain_run[0], 1e-6)


def test_the_last_micro_batch_is_filled_up(params, batch, plain_run):
    """16 rows in micro-batches of 6; each program is compiled once, whatever the size of a batch."""
    fast = learner(GRPO, dataclasses.replace(PLAIN, micro_batches=3))
    assert fast.micro_rows == 6
    got, metrics = run(fast, params, batch)
    assert_close(got, plain_run[0], 1e-6)
    assert metrics[1] == pytest.approx(plain_run[1][1], rel=1e-5, abs=1e-6)
    state = fast.init(params)
    for rows in (1, 7, 12, 40):
        some = pick(batch, np.arange(rows) % N)
        assert fast.score(params, some).shape == (rows, T)
        state, metrics = fast.update(state, some)
        assert math.isfinite(metrics["loss"])
    for program in (fast._accumulate, fast._apply, fast._score, fast._zeros):
        assert program._cache_size() == 1


def test_accumulating_takes_a_copy_and_donates_the_sums_alone(params, batch):
    fast = learner(GRPO, dataclasses.replace(PLAIN, micro_batches=4))
    state = fast.init(params)
    pieces = [pick(batch, slice(i, i + 4)) for i in range(0, N, 4)]
    want = None
    for piece in pieces:
        want = fast.accumulate(state, want, piece)
    sums = None
    for piece in pieces:
        old, mine = sums, jax.tree.map(np.array, piece)
        sums = fast.accumulate(state, sums, mine)
        for x in jax.tree.leaves(mine):
            x[...] = 1
        assert old is None or all(x.is_deleted() for x in jax.tree.leaves(old.gradients))
    jax.tree.map(np.testing.assert_array_equal, sums, want)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


@needs_8_devices
def test_micro_batches_that_do_not_divide_over_the_mesh_are_refused(params, batch):
    optimizer = dataclasses.replace(PLAIN, micro_batches=2)
    fast = learner(GRPO, optimizer, (2, 2, 2))
    for rows in (7, 8, 15, 16, 80):  # micro-batches of 4, 8, 40
        fast.check_batch_size(rows)
    message = (
        r"^rollout.prompts_per_step \* samples_per_prompt / grpo.minibatches={}: makes micro-batches of {} rows with "
        r"optimizer.micro_batches=2; these must be divisible by mesh.data \* mesh.fsdp = 4$"
    )
    for rows, micro_rows in ((12, 6), (9, 5), (2, 1), (0, 0)):
        with pytest.raises(InputError, match=message.format(rows, micro_rows)):
            fast.check_batch_size(rows)
    twelve = pick(batch, slice(12))
    with pytest.raises(InputError, match=message.format(12, 6)):
        Learner(MODEL, GRPO, optimizer, fast.mesh, TEMPERATURE, rows=12)
    unset = Learner(MODEL, GRPO, optimizer, fast.mesh, TEMPERATURE)
    with pytest.raises(InputError, match=message.format(12, 6)):
        unset.update(unset.init(params), twelve)
    with pytest.raises(InputError, match=message.format(12, 6)):
        unset.score(params, twelve)


def test_shapes_are_checked(params, batch):
    fast = Learner(MODEL, GRPO, dataclasses.replace(PLAIN, micro_batches=4), one_device(), TEMPERATURE)
    state = LearnerState(params, optimizer=None, updates=None)  # nothing is computed
    with pytest.raises(ValueError, match=r"^learner: the rows of a batch are not known yet$"):
        fast.accumulate(state, None, batch)
    fast.check_batch_size(N)
    for rows in (5, 0):
        with pytest.raises(ValueError, match=rf"^learner: a micro-batch of {rows} rows; must have 1 to 4$"):
            fast.accumulate(state, None, pick(batch, slice(rows)))
    with pytest.raises(ValueError, match=r"^learner: a batch without rows$"):
        fast.update(state, pick(batch, slice(0)))
    four = pick(batch, slice(4))
    fast._placed(four)  # the first rows say how wide the others must be
    for change, message in (
        ({"tokens": four.tokens[:, 1:]}, r"tokens of shape \(4, 13\); this learner's batches need \(4, 14\)"),
        ({"log_prob": four.log_prob[:, 1:]}, r"log_prob of shape \(4, 5\); this learner's batches need \(4, 6\)"),
        ({"valid": four.valid[1:]}, r"valid of shape \(3,\); this learner's batches need \(4,\)"),
        ({"stale": four.log_prob > 0}, r"stale of shape \(4, 6\); this learner's batches need \(4,\)"),
    ):
        with pytest.raises(ValueError, match=f"^learner: {message}$"):
            fast.accumulate(state, None, four.replace(**change))
    for log_probs in ((batch.log_prob, None), (None, four.log_prob[:, 1:])):
        with pytest.raises(ValueError, match=r"^learner: reference or proximal log_prob of shape"):
            fast.accumulate(state, None, four, *log_probs)


# --- what counts and what does not ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [TEMPERATURE, 1.0])
def test_the_temperature_enters_the_log_probs(temperature, params, batch):
    """Rollouts of the learner's own policy have ratio 1 where they are scored at its temperature, and only there."""
    log_prob = np.asarray(scores(params, batch.tokens, batch.prompt_length, temperature)[0])
    _, (metrics,) = run(learner(), params, batch.replace(log_prob=log_prob), updates=1)
    if temperature == TEMPERATURE:
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["rollout_gap"] < 1e-5 and metrics["clip_fraction"] == 0
    else:
        assert metrics["rollout_gap"] > 0.1


def test_metrics_are_means_over_valid_response_tokens(params, batch, plain_run):
    log_prob, entropy = scores(params, batch.tokens, batch.prompt_length)
    mask = (np.arange(T) < batch.response_length[:, None]) & batch.valid[:, None]
    log_ratio = (np.asarray(log_prob) - batch.log_prob)[mask].astype(np.float64)
    want = {
        "entropy": np.asarray(entropy)[mask].mean(dtype=np.float64),
        "ratio_mean": np.exp(log_ratio).mean(),
        "rollout_gap": np.abs(log_ratio).mean(),
    }
    assert {k: plain_run[1][0][k] for k in want} == pytest.approx(want, rel=1e-5)
    assert all(type(v) is float for v in plain_run[1][0].values())


def test_ungraded_samples_get_no_gradient(params, batch, plain_run):
    """Whatever stands in the row, no bit changes."""
    rng = np.random.default_rng(1)
    garbage = dataclasses.replace(batch, **{k: getattr(batch, k).copy() for k in ("tokens", "log_prob", "advantage")})
    garbage.tokens[4] = rng.integers(0, MODEL.vocab_size, S)
    garbage.log_prob[4], garbage.advantage[4] = -1e30, 1e30
    got, metrics = run(learner(), params, garbage)
    jax.tree.map(np.testing.assert_array_equal, got, plain_run[0])
    assert metrics == plain_run[1]


def test_a_batch_without_a_graded_sample_leaves_the_parameters_alone(params, batch):
    got, (metrics,) = run(learner(), params, batch.replace(valid=np.zeros(N, bool)), updates=1)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert metrics.pop("learning_rate") > 0 and metrics.pop("importance_mean") == 1 and not any(metrics.values())


def test_padding_changes_nothing(params, batch, plain_run):
    """Neither its contents nor its length."""
    beyond = np.arange(S) >= (batch.prompt_length + batch.response_length)[:, None]
    unused = np.arange(T) >= batch.response_length[:, None]
    dirty = batch.replace(
        tokens=np.where(beyond, 39 - batch.tokens, batch.tokens),
        log_prob=np.where(unused, np.float32(-1e30), batch.log_prob),
    )
    got, metrics = run(learner(), params, dirty)
    jax.tree.map(np.testing.assert_array_equal, got, plain_run[0])
    assert metrics == plain_run[1]
    longer = dirty.replace(
        tokens=np.pad(dirty.tokens, ((0, 0), (0, 5)), constant_values=7),
        log_prob=np.pad(dirty.log_prob, ((0, 0), (0, 3)), constant_values=1e30),
    )
    got, metrics = run(Learner(MODEL, GRPO, PLAIN, one_device(), TEMPERATURE), params, longer)
    assert_close(got, plain_run[0], 1e-6)
    assert metrics[1] == pytest.approx(plain_run[1][1], rel=1e-5, abs=1e-6)


def test_stale_rows(params, batch):
    """The tripwire and the means know who is who."""
    stale = np.arange(N) % 2 == 0
    mask = (np.arange(T) < batch.response_length[:, None]) & batch.valid[:, None]
    log_ratio = np.asarray(scores(params, batch.tokens, batch.prompt_length)[0]) - batch.log_prob
    importance = np.exp(log_ratio[mask & stale[:, None]])
    want = {
        "stale_share": mask[stale].sum() / mask.sum(),
        "importance_mean": np.minimum(importance, 1.25).mean(),
        "importance_truncated": (importance >= 1.25).mean(),
        "rollout_gap": np.abs(log_ratio[mask & ~stale[:, None]]).mean(),
    }
    fast = Learner(MODEL, dataclasses.replace(GRPO, importance_cap=1.25), PLAIN, one_device(), TEMPERATURE, rows=N)
    _, (metrics,) = run(fast, params, batch.replace(stale=stale), updates=1)
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-5)


def test_kl_to_the_same_weights_is_zero(params, other_params, batch):
    fast = learner(DAPO_KL, CLIPPED)
    own = fast.score(params, batch)
    assert own.shape == (N, T) and own.dtype == np.float32
    np.testing.assert_allclose(own, scores(params, batch.tokens, batch.prompt_length)[0], atol=1e-5)
    _, (metrics,) = run(fast, params, batch, own, updates=1)
    assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    _, (metrics,) = run(fast, params, batch, fast.score(other_params, batch), updates=1)
    assert metrics["kl"] > 0.1


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_scores_keep_the_order_of_the_rows(micro_batches, params, batch):
    fast = learner(GRPO, dataclasses.replace(PLAIN, micro_batches=micro_batches))
    want = scores(params, batch.tokens, batch.prompt_length)[0]
    np.testing.assert_allclose(fast.score(params, batch), want, atol=1e-5)


# --- buffers and dtypes ---------------------------------------------------------------------------------------


def test_nothing_aliases_the_donated_state(params, batch):
    """The update frees the state's buffers; the weights it was made from and those given to the rollout live on."""
    fast = learner()
    mine = jax.tree.map(jnp.copy, params)
    state = fast.init(mine)
    weights = fast.rollout_params(state)
    new, _ = fast.update(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    for tree in (mine, weights):
        jax.tree.map(np.testing.assert_array_equal, tree, params)
    fast.update(new, batch)


@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16"])
def test_bfloat16_weights_for_the_rollout_only(head_dtype, params):
    """But for the head's, here the embedding, as the config says."""
    fast = learner(model=dataclasses.replace(MODEL, dtype="bfloat16", head_dtype=head_dtype))
    state = fast.init(params)
    weights = fast.rollout_params(state)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    for path, w in traverse_util.flatten_dict(weights, sep="/").items():
        assert w.dtype == (head_dtype if path == "embed" else "bfloat16"), path
    jax.tree.map(lambda w, p: np.testing.assert_array_equal(w, p.astype(w.dtype)), weights, params)


def test_bfloat16_parameters_keep_their_dtype(batch):
    model = dataclasses.replace(MODEL, param_dtype="bfloat16")
    fast = learner(optimizer=dataclasses.replace(PLAIN, learning_rate=0.1), model=model)
    start = init_params(model, jax.random.key(0))
    state, metrics = fast.update(fast.init(start), batch)
    jax.tree.map(assert_as_declared, state, fast.abstract_state())
    assert math.isfinite(metrics["loss"])
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(start)))


@pytest.mark.parametrize("done", [0, 1])
def test_a_loss_that_is_not_finite_stops_the_run(done, params, batch):
    fast = learner()
    state = fast.init(params)
    for _ in range(done):
        state, _ = fast.update(state, batch)
    broken = batch.replace(log_prob=np.where(np.arange(T) == 0, np.float32(np.nan), batch.log_prob))
    with pytest.raises(FloatingPointError, match=rf"^learner: loss=nan at update {done + 1}$"):
        fast.update(state, broken)


# --- settings -------------------------------------------------------------------------------------------------


def rates(updates: int, **config) -> list[float]:
    schedule = OptimizerConfig(learning_rate=2.0, **config).learning_rates()
    return [float(schedule(i)) for i in range(updates)]


def test_learning_rates():
    assert rates(4) == [2, 2, 2, 2]
    assert rates(6, warmup_updates=3) == pytest.approx([0.5, 1, 1.5, 2, 2, 2])
    assert rates(3, warmup_updates=1) == pytest.approx([1, 2, 2])
    half = [2 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    assert rates(5, schedule="cosine", total_updates=4) == pytest.approx(half)
    assert rates(7, schedule="cosine", total_updates=6, warmup_updates=2) == pytest.approx([2 / 3, 4 / 3, *half])
    assert rates(8, schedule="cosine", total_updates=6)[6:] == pytest.approx([0, 0], abs=1e-7)  # past the end
    assert rates(4, schedule="cosine", total_updates=2, warmup_updates=3) == pytest.approx([0.5, 1, 1.5, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linear"}, "schedule='linear': must be one of constant, cosine"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: must be positive"),
        ({"learning_rate": math.nan}, "learning_rate=nan: must be positive"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0: must be positive"),
        ({"warmup_updates": -1}, "warmup_updates=-1: must not be negative"),
        ({"weight_decay": math.nan}, "weight_decay=nan: must not be negative"),
        ({"b1": 1.0}, r"b1=1.0: must lie in \[0, 1\)"),
        ({"b2": -0.1}, r"b2=-0.1: must lie in \[0, 1\)"),
        ({"micro_batches": 0}, "micro_batches=0: must be at least 1"),
    ],
)
def test_impossible_optimizers_are_refused(change, message):
    with pytest.raises(InputError, match=rf"^optimizer\.{message}$"):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_greedy_rollouts_cannot_be_learned_from(temperature):
    with pytest.raises(InputError, match=r"^rollout.temperature=.*: training needs a temperature above 0$"):
        Learner(MODEL, GRPO, PLAIN, one_device(), temperature)


# --- models.scoring -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_scores_equal_the_softmax_of_the_logits(temperature, params):
    """Every slot, also with a prompt of one token and where prompt + slots lie past the end of the row."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, MODEL.vocab_size, (N, S)).astype(np.int32)
    prompt = np.resize(np.array([1, 4, S - T, S - 2, S], np.int32), N)
    log_prob, entropy = (np.asarray(x) for x in scores(params, tokens, prompt, temperature))
    hidden, _ = decoder.forward(params, MODEL, tokens, np.broadcast_to(np.arange(S), tokens.shape))
    scaled = np.asarray(decoder.logits(params, MODEL, hidden), np.float64) / temperature
    want = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    for b, start in enumerate(prompt):
        for t in range(min(T, S - start)):
            predicted = want[b, start + t - 1]
            assert log_prob[b, t] == pytest.approx(predicted[tokens[b, start + t]], abs=1e-5)
            assert entropy[b, t] == pytest.approx(-(np.exp(predicted) * predicted).sum(), abs=1e-5)
    assert log_prob.dtype == entropy.dtype == np.float32
    assert np.isfinite(log_prob).all() and np.isfinite(entropy).all()
