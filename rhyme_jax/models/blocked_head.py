"""Log-probabilities of labels, and entropies, over a large vocabulary, without ever holding its logits.

In float32, logits [B, T, V] of 768 positions over 151,936 tokens take 467 MB, and a backward pass holds several such
arrays. Here the vocabulary is walked through in blocks. The forward pass keeps what a softmax needs, updated from block
to block (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); the backward pass computes each
block's logits again. That is four matrix products where the plain way has three, for memory that grows with the block
and not with the vocabulary (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models").

On a mesh each device walks through its own part of the vocabulary for its own rows. What is sent is a few numbers for
each position, and, as everywhere in the learner, weights and their gradients over "fsdp" and "data".

Suffix letters: B rows, T response positions, N positions of all rows of a device, D width, V vocabulary of a device
(all of it without a mesh), v a block of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rhyme_jax.models.params import BATCH_AXES

_LOWEST = -1e30  # below every logit; not -inf, whose product with a sum of 0 is not a number


def blocked_log_probs(
    hidden_BTD: jax.Array,
    table: jax.Array,
    labels_BT: jax.Array,
    *,
    block: int,
    tied: bool,
    temperature: float = 1.0,
    softcap: float = 0.0,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of labels and entropies, of logits that exist only a block at a time.

    The logits are those of `decoder.logits` over `temperature`. Differentiable in `hidden_BTD` and `table`.

    Args:
      hidden_BTD: hidden states after the final norm. Their dtype is that of the matrix products, whose sums are kept in
        float32; on a mesh B must divide over its batch axes.
      table: [V, D] if `tied` (the embedding), else [D, V], in any floating dtype, which is also that of its gradient.
        On a mesh V must divide over "tensor" and D over "fsdp".
      labels_BT: int32 in [0, V).
      block: entries of the vocabulary computed at a time, at least 1; the last block may be smaller.
      temperature: divides the logits, after the soft-cap. A Python number: programs are compiled for it.
      softcap: 0 for none, else each logit l becomes softcap * tanh(l / softcap).
      mesh: of ("data", "fsdp", "tensor"): rows over the first two, the vocabulary over the last.

    Returns:
      (log_prob_BT, entropy_BT in nats), float32

    Raises:
      ValueError: block is below 1.
    """
    if block < 1:
        raise ValueError(f"block={block}: must be at least 1")
    return _log_probs(_Head(block, tied, temperature, softcap, mesh), hidden_BTD, table, labels_BT)


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is the same at each call; the methods run on one device's rows and part of the vocabulary."""

    block: int
    tied: bool
    temperature: float
    softcap: float
    mesh: Mesh | None

    @property
    def axis(self) -> int:
        """The table's axis of the vocabulary."""
        return 0 if self.tied else 1

    @property
    def table_spec(self) -> PartitionSpec:
        return PartitionSpec("tensor", "fsdp") if self.tied else PartitionSpec("fsdp", "tensor")

    def on_each_device(self, function: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
        if self.mesh is None:
            return function
        # Not left to the compiler, which may well gather a vocabulary to cut a block from it.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def gathered(self, table: jax.Array, dtype: Any) -> jax.Array:
        """The table with its whole width; once for all blocks, and in the dtype in which there is least to send."""
        if self.mesh is None or self.mesh.shape["fsdp"] == 1:
            return table
        return jax.lax.all_gather(table.astype(dtype), "fsdp", axis=1 - self.axis, tiled=True)

    def sum(self, x: Any, axes: str | tuple[str, ...]) -> Any:
        return x if self.mesh is None else jax.lax.psum(x, axes)

    def walk(self, step: Callable, carry: Any, size: int) -> Any:
        """Calls `carry = step(carry, start, width)` for each block of `size` entries."""
        block = min(self.block, size)
        carry = jax.lax.fori_loop(0, size // block, lambda i, carry: step(carry, i * block, block), carry)
        rest = size % block
        return step(carry, size - rest, rest) if rest else carry

    def logits(self, hidden_ND: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """(logits_Nv, the factor between their gradient and that of the products), float32, of a block's weights."""
        products = "nd,vd->nv" if self.tied else "nd,dv->nv"
        logits_Nv = jnp.einsum(products, hidden_ND, weights, preferred_element_type=jnp.float32)
        if not self.softcap:
            return logits_Nv / self.temperature, 1 / self.temperature
        tanh_Nv = jnp.tanh(logits_Nv / self.softcap)
        return tanh_Nv * (self.softcap / self.temperature), (1 - jnp.square(tanh_Nv)) / self.temperature

    def own_labels(self, labels_BT: jax.Array, size: int) -> jax.Array:
        """Labels counted from the start of this device's part; those of other parts lie outside [0, size)."""
        first = 0 if self.mesh is None else jax.lax.axis_index("tensor") * size
        return labels_BT.reshape(-1) - first


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(head: _Head, hidden_BTD, table, labels_BT):
    return _forward(head, hidden_BTD, table, labels_BT)[0]


def _forward(head: _Head, hidden_BTD, table, labels_BT):
    rows = PartitionSpec(BATCH_AXES)
    run = head.on_each_device(functools.partial(_sums, head), (rows, head.table_spec, rows), (rows, rows, rows))
    with jax.named_scope("head"):
        log_prob_BT, entropy_BT, log_total_BT = run(hidden_BTD, table, labels_BT)
    return (log_prob_BT, entropy_BT), (hidden_BTD, table, labels_BT, log_total_BT, entropy_BT)


def _backward(head: _Head, kept: tuple, gradients: tuple):
    rows = PartitionSpec(BATCH_AXES)
    run = head.on_each_device(
        functools.partial(_gradients, head), (rows, head.table_spec, *(rows,) * 5), (rows, head.table_spec)
    )
    with jax.named_scope("head"):
        return *run(*kept, *gradients), None


_log_probs.defvjp(_forward, _backward)


def _sums(head: _Head, hidden_BTD, table, labels_BT):
    """(the label's log-probability, the entropy, the logarithm of the sum of exp(logit)), each [B, T]."""
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    size = table.shape[head.axis]
    table = head.gathered(table, hidden_ND.dtype)
    labels_N = head.own_labels(labels_BT, size)

    def step(carry, start, width):
        top_N, total_N, mean_N, label_N = carry
        weights = jax.lax.dynamic_slice_in_dim(table, start, width, head.axis).astype(hidden_ND.dtype)
        logits_Nv, _ = head.logits(hidden_ND, weights)
        new_top_N, total_N, mean_N = _lifted(jnp.maximum(top_N, jnp.max(logits_Nv, axis=1)), top_N, total_N, mean_N)
        lowered_Nv = logits_Nv - new_top_N[:, None]
        weights_Nv = jnp.exp(lowered_Nv)
        at_N = labels_N - start
        found_N = jnp.take_along_axis(logits_Nv, jnp.clip(at_N, 0, width - 1)[:, None], axis=1)[:, 0]
        return (
            new_top_N,
            total_N + jnp.sum(weights_Nv, axis=1),
            mean_N + jnp.sum(weights_Nv * lowered_Nv, axis=1),
            jnp.where((at_N >= 0) & (at_N < width), found_N, label_N),
        )

    zeros_N = jnp.zeros(hidden_ND.shape[0], jnp.float32)
    top_N, total_N, mean_N, label_N = head.walk(step, (zeros_N + _LOWEST, zeros_N, zeros_N, zeros_N), size)
    if head.mesh is not None:
        top_N, total_N, mean_N = _lifted(jax.lax.pmax(top_N, "tensor"), top_N, total_N, mean_N)
    total_N, mean_N, label_N = head.sum((total_N, mean_N, label_N), "tensor")
    log_total_N = jnp.log(total_N)
    # In this order: a large logit less its like is exact, and what is added to it is rounded.
    log_prob_N = label_N - top_N - log_total_N
    results = log_prob_N, log_total_N - mean_N / total_N, top_N + log_total_N
    return tuple(x.reshape(labels_BT.shape) for x in results)


def _lifted(new_top_N, top_N, total_N, mean_N):
    """The sums of exp(l - top) and of exp(l - top) * (l - top), for a new top."""
    moved_N = top_N - new_top_N
    return new_top_N, jnp.exp(moved_N) * total_N, jnp.exp(moved_N) * (mean_N + total_N * moved_N)


def _gradients(head: _Head, hidden_BTD, table, labels_BT, log_total_BT, entropy_BT, log_prob_grad_BT, entropy_grad_BT):
    """Of the hidden states and of the table.

    With p the softmax of the logits l: d log p(label) / dl = onehot(label) - p, and dH / dl = -p * (log p + H).
    """
    dtype = hidden_BTD.dtype
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    size, stored = table.shape[head.axis], table.dtype
    table = head.gathered(table, dtype)
    labels_N = head.own_labels(labels_BT, size)
    log_total_N, grad_N, entropy_grad_N = (x.reshape(-1) for x in (log_total_BT, log_prob_grad_BT, entropy_grad_BT))
    # The factor of p is affine in the logit, so that an entry costs one multiplication and one addition.
    offset_N = entropy_grad_N * (log_total_N - entropy_BT.reshape(-1)) - grad_N

    def step(carry, start, width):
        hidden_grad_ND, table_grad = carry
        weights = jax.lax.dynamic_slice_in_dim(table, start, width, head.axis).astype(dtype)
        logits_Nv, factor = head.logits(hidden_ND, weights)
        probs_Nv = jnp.exp(logits_Nv - log_total_N[:, None])
        chosen_Nv = jnp.arange(width) == (labels_N - start)[:, None]
        logits_grad_Nv = probs_Nv * (offset_N[:, None] - entropy_grad_N[:, None] * logits_Nv)
        logits_grad_Nv = factor * (logits_grad_Nv + jnp.where(chosen_Nv, grad_N[:, None], 0))
        logits_grad_Nv = logits_grad_Nv.astype(dtype)
        to_hidden, to_table = ("nv,vd->nd", "nv,nd->vd") if head.tied else ("nv,dv->nd", "nv,nd->dv")
        hidden_grad_ND += jnp.einsum(to_hidden, logits_grad_Nv, weights, preferred_element_type=jnp.float32)
        block_grad = jnp.einsum(to_table, logits_grad_Nv, hidden_ND, preferred_element_type=jnp.float32)
        return hidden_grad_ND, jax.lax.dynamic_update_slice_in_dim(table_grad, block_grad, start, head.axis)

    carry = jnp.zeros(hidden_ND.shape, jnp.float32), jnp.zeros(table.shape, jnp.float32)
    hidden_grad_ND, table_grad = head.walk(step, carry, size)
    hidden_grad_ND = head.sum(hidden_grad_ND, "tensor")
    if head.mesh is not None:  # cut up over fsdp first, so that what is summed over data is small
        table_grad = jax.lax.psum_scatter(table_grad, "fsdp", scatter_dimension=1 - head.axis, tiled=True)
    table_grad = head.sum(table_grad, "data")
    return hidden_grad_ND.reshape(hidden_BTD.shape).astype(dtype), table_grad.astype(stored)
