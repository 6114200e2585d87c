"""The learner: one jitted, sharded update of the policy from a batch of graded rollouts.

Parameters and optimizer state are split over the mesh by `params.LEARNER_RULES`, the rows of a micro-batch over
its batch axes. Gradients of the loss *sums* are accumulated over micro-batches and divided once.

Suffix letters: M micro-batches, B rows of one, S positions, T response positions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.losses import LossConfig, LossSums, policy_loss
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import (
    BATCH_AXES,
    LEARNER_RULES,
    ROLLOUT_RULES,
    abstract_params,
    param_shardings,
)
from rhyme_jax.models.scoring import score_responses

SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float  # peak
    schedule: str = "constant"  # after the warm-up: "constant" | "cosine" (to 0 at total_updates)
    warmup_updates: int = 0  # linear from rate / (n + 1): at once, the first Adam steps can wreck a small model
    total_updates: int = 1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # global gradient norm above which gradients are scaled down
    micro_batches: int = 1  # pieces of a batch whose gradients are accumulated
    remat: bool = False  # recompute activations in the backward pass

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise InputError(f"optimizer.schedule={self.schedule!r}: must be one of {', '.join(SCHEDULES)}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: must be positive")
        for name in ("warmup_updates", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: must not be negative")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: must lie in [0, 1)")
        if self.micro_batches < 1:
            raise InputError(f"optimizer.micro_batches={self.micro_batches}: must be at least 1")

    def learning_rates(self) -> optax.Schedule:
        if self.schedule == "constant":
            main = optax.constant_schedule(self.learning_rate)
        else:
            main = optax.cosine_decay_schedule(self.learning_rate, max(1, self.total_updates - self.warmup_updates))
        warmup = optax.linear_schedule(
            self.learning_rate / (self.warmup_updates + 1), self.learning_rate, max(1, self.warmup_updates)
        )
        return optax.join_schedules([warmup, main], [self.warmup_updates]) if self.warmup_updates else main


@struct.dataclass
class LearnerState:
    params: dict
    optimizer: optax.OptState
    updates: jax.Array  # int32: updates done; also the version of the policy


@struct.dataclass
class Batch:
    """Graded rollouts, each leaf [N, ...]; rows are `prompt, response, padding`."""

    tokens: jax.Array  # int32 [N, S]
    prompt_length: jax.Array  # int32 [N]
    response_length: jax.Array  # int32 [N]
    log_prob: jax.Array  # float32 [N, T] under the policy that sampled, at the sampling temperature
    advantage: jax.Array  # float32 [N]
    valid: jax.Array  # bool [N]: graded; others get no gradient


class Learner:
    """Owns the optimizer and the compiled update; the state is passed in and out."""

    def __init__(
        self,
        model: DecoderConfig,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        temperature: float,
    ):
        if not temperature > 0:
            raise InputError(f"rollout.temperature={temperature}: training needs a temperature above 0")
        self.model, self.loss, self.optimizer_config, self.mesh = model, loss, optimizer, mesh
        self.temperature = temperature
        self.learning_rates = optimizer.learning_rates()
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(optimizer.clip_norm),
            optax.adamw(self.learning_rates, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay),
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        # Micro-batches are scanned over, so their axis stays whole and the rows of each are split.
        self._by_row = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self._params = param_shardings(model, mesh, LEARNER_RULES)
        self._state = self._state_shardings()
        self._init = jax.jit(self._init_state, out_shardings=self._state)
        self._update = jax.jit(self._update_state, donate_argnums=0, out_shardings=(self._state, self._replicated))
        self._reference = jax.jit(self._score)
        # A copy even where nothing changes: the update donates the learner's buffers.
        self._to_rollout = jax.jit(
            functools.partial(jax.tree.map, lambda x: jnp.array(x, model.compute_dtype, copy=True)),
            out_shardings=param_shardings(model, mesh, ROLLOUT_RULES),
        )

    def init(self, params: dict) -> LearnerState:
        """Places loaded parameters on the mesh with a fresh optimizer state."""
        return self._init(self.place_params(params))

    def place_params(self, params: dict) -> dict:
        """Parameters split over the mesh by the learner's rules."""
        return jax.device_put(params, self._params)

    def abstract_state(self) -> LearnerState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        shapes = jax.eval_shape(self._init_state, abstract_params(self.model))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._state)

    def rollout_params(self, state: LearnerState) -> dict:
        """The policy in the compute dtype, laid out for decoding. Does not alias the state."""
        return self._to_rollout(state.params)

    def reference_log_probs(self, params: dict, batch: Batch) -> np.ndarray:
        """log-probs [N, T] of the responses under other weights, for the KL penalty."""
        placed = self._place(batch)
        return np.concatenate(list(np.asarray(self._reference(params, placed))))

    def update(
        self, state: LearnerState, batch: Batch, reference_log_prob: np.ndarray | None = None
    ) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer step on a batch.

        Returns:
          (new state, metrics as Python floats). The old state's buffers are donated.

        Raises:
          InputError: the batch does not divide into micro-batches over the mesh.
          FloatingPointError: the loss or the gradient is not finite.
        """
        placed = self._place(batch)
        if reference_log_prob is not None:
            reference_log_prob = self._split(reference_log_prob)
        state, metrics = self._update(state, placed, reference_log_prob)
        metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(metrics[name]):
                raise FloatingPointError(f"learner: {name}={metrics[name]} at update {int(state.updates)}")
        return state, metrics

    def check_batch_size(self, rows: int) -> None:
        """Raises InputError unless `rows` split evenly into micro-batches over the mesh."""
        shards = int(np.prod([self.mesh.shape[a] for a in BATCH_AXES]))
        pieces = self.optimizer_config.micro_batches * shards
        if rows % pieces:
            raise InputError(
                f"rollout.prompts_per_step * samples_per_prompt={rows}: must be divisible by "
                f"optimizer.micro_batches * mesh.data * mesh.fsdp = {self.optimizer_config.micro_batches} * {shards}"
            )

    def _place(self, batch: Batch) -> Batch:
        self.check_batch_size(batch.tokens.shape[0])
        return jax.tree.map(self._split, batch)

    def _split(self, x) -> jax.Array:
        """[N, ...] -> [M, N / M, ...] on the mesh."""
        x = np.asarray(x)
        return jax.device_put(x.reshape(self.optimizer_config.micro_batches, -1, *x.shape[1:]), self._by_row)

    def _state_shardings(self) -> LearnerState:
        abstract = jax.eval_shape(self.optimizer.init, abstract_params(self.model))
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            abstract,
            self._params,
            transform_non_params=lambda _: self._replicated,
        )
        return LearnerState(params=self._params, optimizer=optimizer, updates=self._replicated)

    def _init_state(self, params: dict) -> LearnerState:
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        return LearnerState(params=params, optimizer=self.optimizer.init(params), updates=jnp.int32(0))

    def _score_rows(self, params: dict, rows: Batch) -> tuple[jax.Array, jax.Array]:
        return score_responses(
            params,
            self.model,
            rows.tokens,
            rows.prompt_length,
            rows.log_prob.shape[1],
            temperature=self.temperature,
            remat=self.optimizer_config.remat,
            mesh=self.mesh,
        )

    def _score(self, params: dict, batch: Batch) -> jax.Array:
        return jax.lax.map(lambda rows: self._score_rows(params, rows)[0], batch)

    def _update_state(self, state: LearnerState, batch: Batch, reference_MBT) -> tuple[LearnerState, dict]:
        def loss_sum(params: dict, rows: Batch, reference_BT) -> tuple[jax.Array, LossSums]:
            log_prob_BT, entropy_BT = self._score_rows(params, rows)
            mask_BT = (jnp.arange(log_prob_BT.shape[1]) < rows.response_length[:, None]) & rows.valid[:, None]
            sums = policy_loss(self.loss, log_prob_BT, entropy_BT, rows.log_prob, rows.advantage, mask_BT, reference_BT)
            return sums.loss, sums

        def accumulate(carry, piece):
            gradients, sums = jax.grad(loss_sum, has_aux=True)(state.params, *piece)
            return jax.tree.map(jnp.add, carry, (jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums)), None

        zero = jnp.float32(0)
        start = (
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params),
            LossSums(**{f.name: zero for f in dataclasses.fields(LossSums)}),
        )
        (gradients, sums), _ = jax.lax.scan(accumulate, start, (batch, reference_MBT))
        # All samples masked gives sums of 0; the guard makes that a zero gradient instead of 0/0.
        weight, tokens = jnp.maximum(sums.weight, 1), jnp.maximum(sums.tokens, 1)
        gradients = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), gradients, state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        metrics = {
            "loss": sums.loss / weight,
            "kl": sums.kl / weight,
            "entropy": sums.entropy / tokens,
            "clip_fraction": sums.clipped / tokens,
            "ratio_mean": sums.ratio / tokens,
            "rollout_gap": sums.gap / tokens,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": self.learning_rates(state.updates),
        }
        return (
            LearnerState(
                params=optax.apply_updates(state.params, updates), optimizer=optimizer, updates=state.updates + 1
            ),
            metrics,
        )
