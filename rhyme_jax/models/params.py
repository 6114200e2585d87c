"""Parameters of the decoder, declared once.

`declare` states, for each parameter, its shape, its logical axes and its initial scale. Everything else about
parameters (random init, abstract values, shardings, counting, checking loaded weights) is derived from it.

The tree is a nested dict::

    embed                      [V, D]
    layers/<i>/attn_norm       [D]
    layers/<i>/q               [D, H, head_dim]     (q_bias [H, head_dim], q_norm [head_dim])
    layers/<i>/k, v            [D, N, head_dim]     (k_bias, v_bias [N, head_dim], k_norm [head_dim])
    layers/<i>/o               [H, head_dim, D]     (attn_post_norm [D])
    layers/<i>/mlp_norm        [D]
    layers/<i>/gate, up        [D, F]
    layers/<i>/down            [F, D]               (mlp_post_norm [D])
    layers/<i>/<name>_lora_a   [in..., r]           (with config.lora: of each matrix <name> that it adapts)
    layers/<i>/<name>_lora_b   [r, out...]
    final_norm                 [D]
    head                       [D, V]               (absent when the embedding is tied)

Layers are separate entries rather than one stacked array: XLA then updates each layer's cache in place and
reads each weight where it lies, where slices of a stack would be copied on every decoded token.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.models import lora
from rhyme_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter's declaration. `scale` is the standard deviation of its normal init; None starts at ones,
    0.0 at zeros.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # a logical name for each dimension: "vocab", "embed", "q_heads", ...
    scale: float | None
    dtype: str | None = None  # None: the config's param_dtype


def declare(config: DecoderConfig) -> dict:
    """The tree of `Param` for a config.

    Matrices start at std 1/sqrt(fan-in); those that write to the residual stream at 1/sqrt(fan-in * 2L), so
    that the stream's variance does not grow with depth (GPT-2). Norms start at a factor of one, which is stored as
    zero where the decoder adds the one (config.norm_plus_one).
    """
    c = config
    unit = 0.0 if c.norm_plus_one else None
    fan_D, deep = c.width**-0.5, (2 * c.layers) ** -0.5

    def layer() -> dict:
        params = {
            "attn_norm": Param((c.width,), ("embed",), unit),
            "q": Param((c.width, c.q_heads, c.head_dim), ("embed", "q_heads", "head_dim"), fan_D),
            "k": Param((c.width, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), fan_D),
            "v": Param((c.width, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), fan_D),
            "o": Param(
                (c.q_heads, c.head_dim, c.width),
                ("q_heads", "head_dim", "embed"),
                (c.q_heads * c.head_dim) ** -0.5 * deep,
            ),
            "mlp_norm": Param((c.width,), ("embed",), unit),
            "gate": Param((c.width, c.mlp_width), ("embed", "mlp"), fan_D),
            "up": Param((c.width, c.mlp_width), ("embed", "mlp"), fan_D),
            "down": Param((c.mlp_width, c.width), ("mlp", "embed"), c.mlp_width**-0.5 * deep),
        }
        if c.qkv_bias:
            params["q_bias"] = Param((c.q_heads, c.head_dim), ("q_heads", "head_dim"), 0.0)
            params["k_bias"] = Param((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), 0.0)
            params["v_bias"] = Param((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), 0.0)
        if c.qk_norm:
            params["q_norm"] = Param((c.head_dim,), ("head_dim",), unit)
            params["k_norm"] = Param((c.head_dim,), ("head_dim",), unit)
        if c.post_norms:
            params["attn_post_norm"] = Param((c.width,), ("embed",), unit)
            params["mlp_post_norm"] = Param((c.width,), ("embed",), unit)
        for name in c.lora.targets if c.lora else ():
            params |= _adapters(name, params[name], c.lora.rank)
        return params

    tree = {
        "embed": Param((c.vocab_size, c.width), ("vocab", "embed"), fan_D if c.tie_embeddings else 1.0),
        "layers": {str(i): layer() for i in range(c.layers)},
        "final_norm": Param((c.width,), ("embed",), unit),
    }
    if not c.tie_embeddings:
        tree["head"] = Param((c.width, c.vocab_size), ("embed", "vocab"), fan_D)
    return tree


def _adapters(name: str, matrix: Param, rank: int) -> dict[str, Param]:
    """Low-rank adapters of a matrix, see `lora`. They learn, so they are of float32 even where it is not."""
    inputs = lora.INPUTS[name]
    fan_in = math.prod(matrix.shape[:inputs])
    a = Param((*matrix.shape[:inputs], rank), (*matrix.axes[:inputs], "lora"), fan_in**-0.5, "float32")
    b = Param((rank, *matrix.shape[inputs:]), ("lora", *matrix.axes[inputs:]), 0.0, "float32")
    return dict(zip(lora.adapters(name), (a, b), strict=True))


def _dtype(param: Param, config: DecoderConfig):
    return config.storage_dtype if param.dtype is None else jnp.dtype(param.dtype)


def _map(fn, config: DecoderConfig):
    return jax.tree.map(fn, declare(config), is_leaf=lambda x: isinstance(x, Param))


def abstract_params(config: DecoderConfig) -> dict:
    """`ShapeDtypeStruct`s of the parameters, without allocating them."""
    return _map(lambda p: jax.ShapeDtypeStruct(p.shape, _dtype(p, config)), config)


def count_params(config: DecoderConfig) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params(config)))


def init_params(config: DecoderConfig, key: jax.Array, chosen: Callable[[str], bool] = lambda path: True) -> dict:
    """Random parameters, of the chosen paths. Each draws from a key folded from its own: adding one moves no other."""
    flat = traverse_util.flatten_dict(declare(config), sep="/")
    params = {}
    for name, p in flat.items():
        if not chosen(name):
            continue
        if p.scale is None:
            value = jnp.ones(p.shape, _dtype(p, config))
        else:
            path_key = jax.random.fold_in(key, _stable_hash(name))
            value = (p.scale * jax.random.normal(path_key, p.shape)).astype(_dtype(p, config))
        params[name] = value
    return traverse_util.unflatten_dict(params, sep="/")


def _stable_hash(name: str) -> int:
    """FNV-1a, 32 bits: unlike `hash`, the same in every process."""
    h = 2166136261
    for byte in name.encode():
        h = ((h ^ byte) * 16777619) & 0xFFFFFFFF
    return h


def check_params(params: dict, config: DecoderConfig, source: str) -> None:
    """Raises InputError unless `params` has exactly the names and shapes that `config` declares."""
    want = {k: v.shape for k, v in traverse_util.flatten_dict(abstract_params(config), sep="/").items()}
    have = {k: v.shape for k, v in traverse_util.flatten_dict(params, sep="/").items()}
    for name in want:
        if name not in have:
            raise InputError(f"{source}: weight {name} is missing (expected shape {want[name]})")
        if tuple(have[name]) != tuple(want[name]):
            raise InputError(f"{source}: weight {name} has shape {tuple(have[name])}, expected {want[name]}")
    for name in have:
        if name not in want:
            raise InputError(f"{source}: unexpected weight {name} {tuple(have[name])}")


# --- sharding -------------------------------------------------------------------------------------------------

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # the mesh axes that the rows of a batch are split over

# Logical axis -> mesh axis. The learner splits every matrix twice: over "fsdp" along the residual width (its
# parts are gathered where they are used: Rajbhandari et al. 2020, ZeRO-3) and over "tensor" along heads, MLP
# and vocabulary (Shoeybi et al. 2019, Megatron-LM). The rollout keeps only the second: gathering weights for
# each decoded token would cost more than the token.
LEARNER_RULES = {"embed": "fsdp", "q_heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
ROLLOUT_RULES = {**LEARNER_RULES, "embed": None}


def partition_spec(param: Param, rules: dict) -> PartitionSpec:
    """Which mesh axis each of a parameter's dimensions is split over.

    Raises:
      ValueError: rules that would split two of its dimensions over one mesh axis.
    """
    by_mesh_axis: dict[str, str] = {}
    for axis in param.axes:
        mesh_axis = rules.get(axis)
        if mesh_axis in by_mesh_axis:
            raise ValueError(
                f"sharding rules: split both {by_mesh_axis[mesh_axis]!r} and {axis!r} of a parameter with axes "
                f"{param.axes} over mesh axis {mesh_axis!r}"
            )
        if mesh_axis is not None:
            by_mesh_axis[mesh_axis] = axis
    return PartitionSpec(*(rules.get(axis) for axis in param.axes))


def param_shardings(config: DecoderConfig, mesh: Mesh, rules: dict) -> dict:
    """A NamedSharding for each parameter.

    Raises, before anything compiles:
      InputError: a dimension does not divide over its mesh axis.
      ValueError: see `partition_spec`.
    """
    shardings = _map(lambda param: NamedSharding(mesh, partition_spec(param, rules)), config)
    split: dict[str, dict[str, int]] = {}  # mesh axis -> the sizes of the logical axes that it splits
    for param in jax.tree.leaves(declare(config), is_leaf=lambda x: isinstance(x, Param)):
        for size, axis in zip(param.shape, param.axes, strict=True):
            if rules.get(axis) is not None:
                split.setdefault(rules[axis], {})[axis] = size
    for mesh_axis, sizes in split.items():
        parts, common = mesh.shape[mesh_axis], math.gcd(*sizes.values())
        for axis, size in sizes.items():
            if size % parts:
                divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
                raise InputError(
                    f"mesh.{mesh_axis}={parts}: does not divide the model's {axis} of {size}; "
                    f"sizes that divide all it splits: {divisors}"
                )
    return shardings


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh ('data', 'fsdp', 'tensor') over `devices` (default: all). One size may be -1: what is left."""
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    for name, size in zip(MESH_AXES, sizes, strict=True):
        if size < 1 and size != -1:
            raise InputError(f"mesh.{name}={size}: must be at least 1, or -1 for the devices that are left")
    if sizes.count(-1) > 1:
        raise InputError(f"mesh={tuple(sizes)}: only one axis may be -1")
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if len(devices) % known:
            raise InputError(f"mesh={tuple(sizes)}: {known} does not divide the {len(devices)} devices")
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) > len(devices):
        raise InputError(f"mesh={tuple(sizes)}: needs {math.prod(sizes)} devices, there are {len(devices)}")
    # Auto axes: the compiler places intermediate values. (make_mesh's default changed to Explicit.)
    return jax.make_mesh(
        tuple(sizes),
        MESH_AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
        devices=devices[: math.prod(sizes)],
    )
