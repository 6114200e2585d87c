"""What the backward pass keeps of each layer's activations, and what it computes again (rematerialisation).

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". For a row of S positions in a model of width D, with
H heads and an MLP of width F, a layer keeps:

  none   everything: some 12 arrays [S, D], 4 [S, F], and the attention weights [H, S, S].
  dots   the results of matrix products with parameters: 2 arrays [S, D], queries, keys and values, 3 [S, F]. Norms,
         rotations, the gate and attention are computed again: little arithmetic, and attention weights no longer count.
  full   its input [S, D]. The whole forward pass is computed again: a third more arithmetic in all.

None changes a gradient by more than rounding. What each takes here: docs/training.md.
"""

from collections.abc import Callable

import jax

from rhyme_jax.errors import InputError


def _keep_all(block: Callable) -> Callable:
    return block


def _keep_inputs(block: Callable) -> Callable:
    return jax.checkpoint(block)


def _keep_dots(block: Callable) -> Callable:
    return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


REMAT_POLICIES: dict[str, Callable[[Callable], Callable]] = {
    "none": _keep_all,
    "dots": _keep_dots,
    "full": _keep_inputs,
}


def checkpointed(block: Callable, policy: str) -> Callable:
    """`block`, keeping for its backward pass what `policy` names.

    Raises:
      InputError: `policy` is not one of REMAT_POLICIES.
    """
    check_policy(policy)
    return REMAT_POLICIES[policy](block)


def check_policy(policy: str, field: str = "optimizer.remat") -> None:
    """Raises InputError, naming the field, unless `policy` is one of REMAT_POLICIES."""
    if policy not in REMAT_POLICIES:
        raise InputError(f"{field}={policy!r}: must be one of {', '.join(REMAT_POLICIES)}")
