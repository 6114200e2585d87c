"""The shape of a decoder. One dataclass covers Llama 2/3, Qwen2/2.5, Qwen3 and SmolLM2."""

import dataclasses

import jax.numpy as jnp

from rhyme_jax.errors import InputError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a pre-norm decoder with rotary positions and gated MLPs.

    The letters are those of the shape suffixes used throughout the code (see the README).
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
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim on queries and keys, before the rotation
    max_positions: int = 2048  # longest sequence the weights were trained for
    family: str = "llama"  # "llama" | "qwen2" | "qwen3": names the files' conventions, not the maths
    dtype: str = "float32"  # of the activations and the KV cache: "float32" | "bfloat16"
    param_dtype: str = "float32"  # of the stored parameters

    def __post_init__(self):
        for name in ("vocab_size", "width", "layers", "q_heads", "kv_heads", "head_dim", "mlp_width", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.q_heads % self.kv_heads:
            raise InputError(f"model.kv_heads={self.kv_heads}: must divide q_heads={self.q_heads}")
        if self.head_dim % 2:
            raise InputError(f"model.head_dim={self.head_dim}: must be even (rotary positions turn pairs)")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise InputError(f"model.{name}={getattr(self, name)!r}: must be one of {', '.join(DTYPES)}")

    @property
    def compute_dtype(self):
        return DTYPES[self.dtype]

    @property
    def storage_dtype(self):
        return DTYPES[self.param_dtype]
