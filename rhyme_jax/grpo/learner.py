"""The learner: sharded updates of the policy from graded rollouts.

Parameters and optimizer state are split over the mesh by `params.LEARNER_RULES`, the rows of a micro-batch over
its batch axes. Gradients of the loss *sums* are accumulated over micro-batches and divided once, so an update does
not depend on how its rows are cut up or ordered, and rows can be fed while others are still being decoded.

Suffix letters: N rows of a batch, B of a micro-batch, S positions, T response positions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.grpo.losses import LossConfig, LossSums, policy_loss
from rhyme_jax.models import lora
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import (
    BATCH_AXES,
    LEARNER_RULES,
    ROLLOUT_RULES,
    abstract_params,
    init_params,
    param_shardings,
)
from rhyme_jax.models.remat import check_policy
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
    remat: str = "none"  # what the backward pass computes again, one of `remat.REMAT_POLICIES`
    vocab_block: int = 0  # vocabulary entries whose logits exist at a time on a device; 0: all

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
        check_policy(self.remat)
        if self.vocab_block < 0:
            raise InputError(f"optimizer.vocab_block={self.vocab_block}: must not be negative; 0 is all at once")

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
    optimizer: optax.OptState  # of what is trained: all parameters, or low-rank adapters alone
    updates: jax.Array  # int32: updates done


@struct.dataclass
class Batch:
    """Graded rollouts, each leaf [N, ...]; rows are `prompt, response, padding`."""

    tokens: jax.Array  # int32 [N, S]
    prompt_length: jax.Array  # int32 [N]
    response_length: jax.Array  # int32 [N]
    log_prob: jax.Array  # float32 [N, T] under the policy that sampled, at the sampling temperature
    advantage: jax.Array  # float32 [N], or [N, T] where tokens have their own
    valid: jax.Array  # bool [N]: graded; others get no gradient
    stale: jax.Array | None = None  # bool [N]: sampled by an older policy than the one that learns; None: none is


@struct.dataclass
class Accumulated:
    """What micro-batches have added up to."""

    gradients: dict  # of the loss sums: float32, laid out like the parameters that are trained
    sums: LossSums


def place(x, sharding: NamedSharding) -> jax.Array:
    """A host array, the same on every process, laid out over a mesh that may span several processes; an array that is
    laid out so already, as it is.
    """
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class Learner:
    """Owns the optimizer and the compiled programs; the state is passed in and out.

    Each program takes `micro_rows` rows of one width, so it is compiled once, whatever the size of a batch.
    """

    def __init__(
        self,
        model: DecoderConfig,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        temperature: float,
        rows: int | None = None,
    ):
        """`rows`: of the usual batch, see `check_batch_size`. None takes those of the first batch.

        Raises:
          InputError: no temperature, or rows or parameters that do not divide over the mesh.
        """
        if not temperature > 0:
            raise InputError(f"rollout.temperature={temperature}: training needs a temperature above 0")
        self.model, self.loss, self.optimizer_config, self.mesh = model, loss, optimizer, mesh
        self.temperature = temperature
        self.learning_rates = optimizer.learning_rates()
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(optimizer.clip_norm),
            optax.adamw(self.learning_rates, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay),
        )
        self._micro_rows: int | None = None
        self._widths: tuple[int, int] | None = None  # (S, T), from the first batch
        if rows is not None:
            self.check_batch_size(rows)
        replicated = self._replicated = NamedSharding(mesh, PartitionSpec())
        self._by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        # Micro-batches are scanned over, so their axis stays whole and the rows of each are split.
        self._by_piece = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self._params = param_shardings(model, mesh, LEARNER_RULES)
        self._state = self._state_shardings()
        trained = self._state.replace(params=lora.split(self._params)[0])
        accumulated = Accumulated(gradients=trained.params, sums=replicated)
        self._init = jax.jit(self._init_state, out_shardings=self._state)
        self._init_owned = jax.jit(self._init_state, out_shardings=self._state, donate_argnums=0)
        self._zeros = jax.jit(self._no_rows, out_shardings=accumulated)
        self._accumulate = jax.jit(self._add_rows, donate_argnums=1, out_shardings=accumulated)
        # The micro-batches of a usual batch in one program: a call of its own for each takes fresh memory each time,
        # which on CPU costs a quarter of it (1.3 s against 1.05 s of CPU time; 1.1M parameters, 64 rows of 96 tokens).
        self._accumulate_all = jax.jit(self._add_all, out_shardings=accumulated)
        self._apply = jax.jit(self._step, donate_argnums=0, out_shardings=(trained, replicated))
        # Replicated like all that the host reads: a process can only read what lies on its own devices.
        self._score = jax.jit(lambda params, rows: self._score_rows(params, rows)[0], out_shardings=replicated)
        base = dataclasses.replace(model, lora=None)
        self._to_rollout = jax.jit(self._policy, out_shardings=param_shardings(base, mesh, ROLLOUT_RULES))

    @property
    def base_shardings(self) -> dict:
        """Where parameters without adapters belong, as `init` and `place_params` take them."""
        return lora.base(self._params)

    def init(self, params: dict, seed: int = 0, own: bool = False) -> LearnerState:
        """Places loaded parameters on the mesh with a fresh optimizer state.

        Args:
          params: without adapters.
          seed: of the adapters, if the model has any.
          own: the parameters are jax Arrays that nobody else needs: their buffers are taken over.
        """
        return (self._init_owned if own else self._init)(self.place_params(params), np.uint32(seed))

    def place_params(self, params: dict) -> dict:
        """Parameters without adapters, split over the mesh by the learner's rules."""
        return jax.tree.map(place, params, self.base_shardings)

    def base(self, state: LearnerState) -> dict:
        """The parameters that are not trained, where adapters are: those of the initial model. Not copied; no update
        donates them.

        Raises:
          ValueError: all parameters are trained.
        """
        if self.model.lora is None:
            raise ValueError("learner: has no adapters, so the initial model is gone")
        return lora.base(state.params)

    def abstract_state(self) -> LearnerState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        shapes = jax.eval_shape(self._init_state, lora.base(abstract_params(self.model)), np.uint32(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._state)

    def rollout_params(self, state: LearnerState) -> dict:
        """The policy in the compute dtype, laid out for decoding. Does not alias the state."""
        return self._to_rollout(state.params)

    def check_batch_size(self, rows: int) -> None:
        """Sets `micro_rows`, unless it is set, for batches of usually `rows` rows.

        Raises:
          InputError: the rows of a micro-batch do not divide over the mesh.
        """
        shards = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        micro_rows = -(-rows // self.optimizer_config.micro_batches)
        if micro_rows % shards or micro_rows == 0:
            raise InputError(
                f"rollout.prompts_per_step * samples_per_prompt / grpo.minibatches={rows}: makes micro-batches of "
                f"{micro_rows} rows with optimizer.micro_batches={self.optimizer_config.micro_batches}; these must "
                f"be divisible by mesh.data * mesh.fsdp = {shards}"
            )
        if self._micro_rows is None:
            self._micro_rows = micro_rows

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch: ceil(rows of the usual batch / micro_batches), once these are known.

        Raises:
          ValueError: they are not.
        """
        if self._micro_rows is None:
            raise ValueError("learner: the rows of a batch are not known yet")
        return self._micro_rows

    def score(self, params: dict, batch: Batch) -> np.ndarray:
        """log-probs [N, T], float32, of the responses under any weights laid out by `place_params`.

        Those of the reference are for the KL penalty, those of the policy before a batch's first update are the
        proximal ones of `policy_loss`.
        """
        # Read one by one, so that the activations of one micro-batch are alive at a time.
        scores = [np.asarray(self._score(params, *self._placed(*piece))) for piece in self._pieces(batch)]
        return np.concatenate(scores)[: len(batch.tokens)]

    def accumulate(
        self,
        state: LearnerState,
        sums: Accumulated | None,
        rows: Batch,
        reference_log_prob: np.ndarray | None = None,
        proximal_log_prob: np.ndarray | None = None,
    ) -> Accumulated:
        """Adds the loss and gradients of one micro-batch to `sums`; None starts. The buffers of `sums` are donated.

        Does not wait for the devices, so it can run beside decoding. The rows are copied at once.

        Args:
          rows: at most `micro_rows` rows of host arrays; as wide, S and T, as all others that this learner gets.
          reference_log_prob: [B, T] of `score`; needed where kl_coef > 0.
          proximal_log_prob: [B, T], the policy's of `score` before the batch's first update, for stale rows, and for
            all where `LossConfig.decoupled`. May be left out at that update.

        Raises:
          ValueError: too many rows, or shapes that differ.
        """
        micro_batch, *log_probs = self._placed(rows, reference_log_prob, proximal_log_prob)
        return self._accumulate(state.params, self._zeros() if sums is None else sums, micro_batch, *log_probs)

    def apply(self, state: LearnerState, sums: Accumulated) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer step on the rows added up in `sums`. Waits for it.

        Returns:
          (new state, metrics as Python floats). The old state's buffers are donated.

        Raises:
          FloatingPointError: the loss or the gradient is not finite.
        """
        trained, frozen = lora.split(state.params)
        state, metrics = self._apply(state.replace(params=trained), sums)
        state = state.replace(params=lora.join(state.params, frozen))
        metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(metrics[name]):
                raise FloatingPointError(f"learner: {name}={metrics[name]} at update {int(state.updates)}")
        return state, metrics

    def update(
        self,
        state: LearnerState,
        batch: Batch,
        reference_log_prob: np.ndarray | None = None,
        proximal_log_prob: np.ndarray | None = None,
    ) -> tuple[LearnerState, dict[str, float]]:
        """`accumulate` over a batch of any number of rows N, log-probs [N, T], and `apply`: one optimizer step.

        Raises:
          InputError: the first batch, where no other rows were named, does not divide over the mesh.
          ValueError, FloatingPointError: as these say.
        """
        pieces = self._pieces(batch, reference_log_prob, proximal_log_prob)
        if len(batch.tokens) == self.micro_rows * self.optimizer_config.micro_batches:
            stacked = jax.tree.map(lambda *x: place(np.stack(x), self._by_piece), *map(self._filled, pieces))
            return self.apply(state, self._accumulate_all(state.params, *stacked))
        sums = None
        for piece in pieces:
            sums = self.accumulate(state, sums, *piece)
        return self.apply(state, sums)

    def _pieces(self, batch: Batch, *log_probs) -> list[tuple]:
        """(rows, *log_probs) of each micro-batch; the last may be short."""
        rows = len(batch.tokens)
        if self._micro_rows is None:
            self.check_batch_size(rows)
        if rows == 0:
            raise ValueError("learner: a batch without rows")
        cuts = [slice(start, start + self.micro_rows) for start in range(0, rows, self.micro_rows)]
        return [jax.tree.map(lambda x, cut=cut: x[cut], (batch, *log_probs)) for cut in cuts]

    def _placed(self, rows: Batch, *log_probs) -> tuple:
        """(rows, *log_probs) on the mesh, filled up to `micro_rows`."""
        return jax.tree.map(lambda x: place(x, self._by_row), self._filled((rows, *log_probs)))

    def _filled(self, piece: tuple) -> tuple:
        """A micro-batch (rows, *log_probs), filled up to `micro_rows` with rows that are not valid."""
        rows, *log_probs = piece
        count = len(rows.tokens)
        if not 1 <= count <= self.micro_rows:
            raise ValueError(f"learner: a micro-batch of {count} rows; must have 1 to {self.micro_rows}")
        if rows.stale is None:
            rows = rows.replace(stale=np.zeros(count, bool))
        positions, slots = self._widths or (rows.tokens.shape[1], rows.log_prob.shape[1])
        shapes = {"tokens": (count, positions), "log_prob": (count, slots)}
        if np.ndim(rows.advantage) == 2:
            shapes["advantage"] = (count, slots)
        for field in dataclasses.fields(Batch):
            _check_shape(field.name, getattr(rows, field.name), shapes.get(field.name, (count,)))
        for x in log_probs:
            if x is not None:
                _check_shape("reference or proximal log_prob", x, (count, slots))
        self._widths = positions, slots

        def filled(x) -> np.ndarray:  # always a copy, so that the caller may reuse its own while the devices work
            return np.concatenate([x, np.repeat(x[-1:], self.micro_rows - count, axis=0)])

        rows, *log_probs = jax.tree.map(filled, (rows, *log_probs))
        rows.valid[count:] = False
        return rows, *log_probs

    def _state_shardings(self) -> LearnerState:
        abstract = jax.eval_shape(self.optimizer.init, lora.split(abstract_params(self.model))[0])
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            abstract,
            lora.split(self._params)[0],
            transform_non_params=lambda _: self._replicated,
        )
        return LearnerState(params=self._params, optimizer=optimizer, updates=self._replicated)

    def _init_state(self, params: dict, seed: jax.Array) -> LearnerState:
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        if self.model.lora is not None:
            params = lora.join(init_params(self.model, jax.random.key(seed), lora.is_adapter), params)
        optimizer = self.optimizer.init(lora.split(params)[0])
        return LearnerState(params=params, optimizer=optimizer, updates=jnp.int32(0))

    def _policy(self, params: dict) -> dict:
        """What decodes: adapters merged, cast. A copy even where nothing changes: the update donates its buffers."""
        merged = lora.merge(params, self.model.lora)
        head = "embed" if self.model.tie_embeddings else "head"
        dtypes = {name: self.model.logits_dtype if name == head else self.model.compute_dtype for name in merged}
        return {
            name: jax.tree.map(lambda x, dtype=dtypes[name]: jnp.array(x, dtype, copy=True), part)
            for name, part in merged.items()
        }

    def _score_rows(self, params: dict, rows: Batch) -> tuple[jax.Array, jax.Array]:
        return score_responses(
            params,
            self.model,
            rows.tokens,
            rows.prompt_length,
            rows.log_prob.shape[1],
            temperature=self.temperature,
            remat=self.optimizer_config.remat,
            vocab_block=self.optimizer_config.vocab_block,
            mesh=self.mesh,
        )

    def _no_rows(self) -> Accumulated:
        return Accumulated(
            gradients=jax.tree.map(
                lambda p: jnp.zeros(p.shape, jnp.float32), lora.split(abstract_params(self.model))[0]
            ),
            sums=LossSums(**{f.name: jnp.float32(0) for f in dataclasses.fields(LossSums)}),
        )

    def _add_rows(self, params: dict, total: Accumulated, rows: Batch, reference_BT, proximal_BT) -> Accumulated:
        trained, frozen = lora.split(params)

        def loss_sum(trained: dict) -> tuple[jax.Array, LossSums]:
            log_prob_BT, entropy_BT = self._score_rows(lora.join(trained, frozen), rows)
            mask_BT = (jnp.arange(log_prob_BT.shape[1]) < rows.response_length[:, None]) & rows.valid[:, None]
            sums = policy_loss(
                self.loss,
                log_prob_BT,
                entropy_BT,
                rows.log_prob,
                rows.advantage,
                mask_BT,
                reference_BT,
                rows.stale,
                proximal_BT,
            )
            return sums.loss, sums

        gradients, sums = jax.grad(loss_sum, has_aux=True)(trained)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return jax.tree.map(jnp.add, total, Accumulated(gradients, sums))

    def _add_all(self, params: dict, rows: Batch, reference_MBT, proximal_MBT) -> Accumulated:
        """Of micro-batches [M, B, ...]."""

        def add(sums: Accumulated, piece: tuple) -> tuple[Accumulated, None]:
            return self._add_rows(params, sums, *piece), None

        return jax.lax.scan(add, self._no_rows(), (rows, reference_MBT, proximal_MBT))[0]

    def _step(self, state: LearnerState, total: Accumulated) -> tuple[LearnerState, dict]:
        sums = total.sums
        # All samples masked gives sums of 0; the guards make that a zero gradient instead of 0/0.
        weight, tokens, weighted, fresh = (
            jnp.maximum(count, 1) for count in (sums.weight, sums.tokens, sums.weighted, sums.tokens - sums.stale)
        )
        gradients = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), total.gradients, state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        metrics = {
            "loss": sums.loss / weight,
            "kl": sums.kl / weight,
            "entropy": sums.entropy / tokens,
            "clip_fraction": sums.clipped / tokens,
            "ratio_mean": sums.ratio / tokens,
            "rollout_gap": sums.gap / fresh,
            "stale_share": sums.stale / tokens,
            "importance_mean": jnp.where(sums.weighted > 0, sums.importance / weighted, 1.0),
            "importance_truncated": sums.truncated / weighted,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": self.learning_rates(state.updates),
        }
        return (
            LearnerState(
                params=optax.apply_updates(state.params, updates), optimizer=optimizer, updates=state.updates + 1
            ),
            metrics,
        )


def _check_shape(name: str, x: np.ndarray, want: tuple[int, ...]) -> None:
    if np.shape(x) != want:
        raise ValueError(f"learner: {name} of shape {np.shape(x)}; this learner's batches need {want}")
