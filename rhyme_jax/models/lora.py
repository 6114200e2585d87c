"""Low-rank adapters (LoRA, Hu et al. 2021): a frozen matrix W [in, out] learns by A [in, r] and B [r, out].

The adapted layer computes x W + (alpha / r) (x A) B. B starts at zero, so at the start the model is the base model,
exactly. Adapters are declared beside the matrices that they adapt, as `<name>_lora_a` and `<name>_lora_b` of the same
layer (`params.declare`), so that initial values, shardings and checks treat them like any other parameter. For rollouts
and export they are merged into W: decoding costs what it did.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import traverse_util

from rhyme_jax.errors import InputError

# What can be adapted, with the number of leading axes of our arrays that are a layer's inputs.
INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
TARGETS = tuple(INPUTS)

MAX_RANK = 2**16  # more than the width of any model: adapters of such a rank are larger than their matrices


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: float  # the product of the adapters is scaled by alpha / rank
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise InputError(f"lora.rank={self.rank}: must be at least 1")
        if self.rank > MAX_RANK:
            raise InputError(f"lora.rank={repr(self.rank)[:80]}: must be at most {MAX_RANK}")
        if not 0 < self.alpha < math.inf:
            raise InputError(f"lora.alpha={self.alpha}: must be a positive number")
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"lora.targets: no matrix {target!r}; there are {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(f"lora.targets={'+'.join(self.targets)!r}: must name each matrix once, and one at least")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapters(name: str) -> tuple[str, str]:
    """The names of a matrix's two adapters."""
    return f"{name}_lora_a", f"{name}_lora_b"


def is_adapter(name: str) -> bool:
    return name.endswith(("_lora_a", "_lora_b"))


def split(params: dict) -> tuple[dict, dict]:
    """(what is trained, what stays as it is): all and nothing where there are no adapters, which otherwise are trained
    alone. Trees of the same leaves; nothing is copied.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if is_adapter(path)}
    if not trained:
        return params, {}
    frozen = {path: x for path, x in flat.items() if path not in trained}
    return traverse_util.unflatten_dict(trained, sep="/"), traverse_util.unflatten_dict(frozen, sep="/")


def join(trained: dict, frozen: dict) -> dict:
    """The tree of both parts, as of `split`."""
    flat = traverse_util.flatten_dict(frozen, sep="/") | traverse_util.flatten_dict(trained, sep="/")
    return traverse_util.unflatten_dict(flat, sep="/")


def base(params: dict) -> dict:
    """The same tree without adapters: the model before it learned, as long as only adapters are trained."""
    trained, frozen = split(params)
    return frozen or trained


def merge(params: dict, lora: LoraConfig | None) -> dict:
    """The tree without adapters that computes the same: W + (alpha / r) A B, added in float32 and kept in W's dtype."""
    if lora is None:
        return params

    def merged(layer: dict) -> dict:
        layer = dict(layer)
        for name in lora.targets:
            a, b = (layer.pop(adapter).astype(jnp.float32) for adapter in adapters(name))
            # Rounded products would be noise in each weight: W may be of 1e-2, and its change of 1e-5.
            update = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
            layer[name] = (layer[name].astype(jnp.float32) + lora.scale * update).astype(layer[name].dtype)
        return layer

    return {**params, "layers": {i: merged(layer) for i, layer in params["layers"].items()}}
