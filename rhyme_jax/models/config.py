"""The shape of a decoder. One dataclass covers Llama 2/3, Mistral, Qwen2/2.5, Qwen3, SmolLM2/3, Gemma 2 and Gemma 3."""

import dataclasses
import math

import jax.numpy as jnp

from rhyme_jax.errors import InputError
from rhyme_jax.models.lora import LoraConfig

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ACTIVATIONS = ("silu", "gelu_tanh")
ROPE_SCALINGS = ("linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered for sequences longer than those of the first training.

    "linear" divides each frequency by `factor` (Chen et al. 2023, position interpolation). "llama3" (Llama 3.1) divides
    only those that turn less than `low_freq` times in `original_positions` positions, keeps those that turn more than
    `high_freq` times, and goes over from the one to the other in between.
    """

    kind: str  # "linear" | "llama3"
    factor: float  # of the lengths
    low_freq: float = 1.0  # turns in original_positions; as the three below it, of "llama3" only
    high_freq: float = 4.0
    original_positions: int = 8192

    def __post_init__(self):
        if self.kind not in ROPE_SCALINGS:
            raise InputError(f"model.rope_scaling.kind={self.kind!r}: must be one of {', '.join(ROPE_SCALINGS)}")
        for name in ("factor", "low_freq", "high_freq", "original_positions"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"model.rope_scaling.{name}={getattr(self, name)}: must be a positive number")
        if self.high_freq <= self.low_freq:
            raise InputError(
                f"model.rope_scaling.high_freq={self.high_freq}: must be greater than low_freq={self.low_freq}"
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a pre-norm decoder with rotary positions and gated MLPs.

    The letters are those of the shape suffixes used throughout the code (see the README). A tuple with one entry per
    layer may be left empty, which stands for True in each. What says no more than its default does is replaced by it
    (all of a tuple True, a `query_scalar` of head_dim), so that equal models have equal configs.
    """

    vocab_size: int  # V
    width: int  # D, of the residual stream
    layers: int  # L
    q_heads: int  # H
    kv_heads: int  # N; divides q_heads (grouped-query attention, Ainslie et al. 2023)
    head_dim: int  # of one head; even, for rotary pairs
    mlp_width: int  # F
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    tie_embeddings: bool = True  # the head is the transposed embedding
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3, Gemma 3: RMSNorm over head_dim on queries and keys, before the rotation
    max_positions: int = 2048  # longest sequence the weights were trained for
    family: str = "llama"  # a model_type of `hf_config`: names the files' conventions, not the maths
    dtype: str = "float32"  # of the activations and the KV cache: "float32" | "bfloat16"
    param_dtype: str = "float32"  # of the stored parameters
    head_dtype: str = "float32"  # of the head's weights and its product with hidden states; they are never of less than
    # `dtype`. In bfloat16 it is what rounds probabilities most (MiniMax 2025, M1, section 3.2)
    rope_scaling: RopeScaling | None = None  # Llama 3.1; Gemma 3's global layers
    rope_layers: tuple[bool, ...] = ()  # which layers rotate queries and keys; SmolLM3 leaves out one in four (NoPE)
    window: int = 0  # positions that a local layer's token sees, itself included; 0: no layer is local
    local_layers: tuple[bool, ...] = ()  # which layers are local, where there is a window: all of Mistral's
    rope_theta_local: float = 0.0  # of local layers, which `rope_scaling` then leaves alone (Gemma 3); 0: as the others
    query_scalar: int = 0  # attention scores are divided by its square root (Gemma); 0: by that of head_dim
    attn_softcap: float = 0.0  # attention scores s become c tanh(s / c), before the mask (Gemma 2); 0: off
    logit_softcap: float = 0.0  # the same of the logits (Gemma 2); 0: off
    activation: str = "silu"  # of the MLP's gate: "silu" | "gelu_tanh" (Gemma: GELU by its tanh approximation)
    embed_scale: bool = False  # embeddings are multiplied by sqrt(width), rounded to `dtype` (Gemma)
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + weight (Gemma)
    post_norms: bool = False  # RMSNorms also after attention and after the MLP, before the residual is added (Gemma)
    lora: LoraConfig | None = None  # low-rank adapters beside the matrices; None: there are none

    def __post_init__(self):
        for name in ("vocab_size", "width", "layers", "q_heads", "kv_heads", "head_dim", "mlp_width", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.q_heads % self.kv_heads:
            raise InputError(f"model.kv_heads={self.kv_heads}: must divide q_heads={self.q_heads}")
        if self.head_dim % 2:
            raise InputError(f"model.head_dim={self.head_dim}: must be even (rotary positions turn pairs)")
        for name in ("dtype", "param_dtype", "head_dtype"):
            if getattr(self, name) not in DTYPES:
                raise InputError(f"model.{name}={getattr(self, name)!r}: must be one of {', '.join(DTYPES)}")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"model.activation={self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        for name in ("window", "rope_theta_local", "query_scalar", "attn_softcap", "logit_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"model.{name}={getattr(self, name)}: must be a positive number, or 0 for none")
        for name in ("rope_layers", "local_layers"):
            flags = tuple(map(bool, getattr(self, name)))
            if flags and len(flags) != self.layers:
                raise InputError(
                    f"model.{name}: has {len(flags)} entries; must have one for each of {self.layers} layers"
                )
            object.__setattr__(self, name, () if all(flags) else flags)
        if self.query_scalar == self.head_dim:
            object.__setattr__(self, "query_scalar", 0)
        if self.rope_theta_local == self.rope_theta and self.rope_scaling is None:
            object.__setattr__(self, "rope_theta_local", 0.0)
        for name in ("local_layers", "rope_theta_local"):
            if getattr(self, name) and not self.window:
                raise InputError(f"model.{name}={getattr(self, name)}: needs a window, which is 0")

    @property
    def compute_dtype(self):
        return DTYPES[self.dtype]

    @property
    def storage_dtype(self):
        return DTYPES[self.param_dtype]

    @property
    def logits_dtype(self):
        """Of the operands of the head's product, whose sums are always of float32."""
        return jnp.promote_types(self.compute_dtype, DTYPES[self.head_dtype])

    def is_local(self, layer: int) -> bool:
        """Whether a layer's tokens see only the last `window` positions."""
        return self.window > 0 and (not self.local_layers or self.local_layers[layer])

    def has_rope(self, layer: int) -> bool:
        """Whether a layer rotates its queries and keys."""
        return not self.rope_layers or self.rope_layers[layer]
