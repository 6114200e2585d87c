"""The decoder's forward pass: one function for the learner (no cache) and for the rollout (KV cache).

Suffix letters of shapes: B rows, K positions fed, S cache positions, D width, H query heads, N key/value heads,
M = H / N query heads per key/value head, Q = K * M, T = B * K, F MLP width, V vocabulary, h one head's width.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import BATCH_AXES

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # per layer: keys and values, each [B, N, S, h]

FEW_TOKENS = 64  # fed at once, up to which the head is computed the other way round on CPU


def init_cache(config: DecoderConfig, rows: int, positions: int) -> Cache:
    """Zeroed per-layer key and value buffers.

    [rows, kv_heads, positions, head_dim] decodes about twice as fast on CPU as with positions before heads;
    a buffer per layer is updated in place, where one stacked over layers would be copied every iteration.
    """
    shape = (rows, config.kv_heads, positions, config.head_dim)
    return tuple(
        (jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)) for _ in range(config.layers)
    )


def forward(
    params: dict,
    config: DecoderConfig,
    tokens_BK: jax.Array,
    positions_BK: jax.Array,
    cache: Cache | None = None,
    *,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Final hidden states of the fed tokens, and the cache with their keys and values written.

    Args:
      params: tree of `params.declare`, in any floating dtype.
      tokens_BK: int32 token ids; any id is embedded, masking is the caller's affair.
      positions_BK: int32 absolute positions. Without a cache these must be 0..K-1 in each row. With a cache,
        position s is also the cache slot: a token attends to slots 0..s, so stale entries beyond a row's
        length are never seen (as long as they are finite), and a write at or past S is dropped.
      cache: buffers of `init_cache`, or None to attend within the fed tokens only.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      mesh: when given, hidden states are kept split by rows over the mesh's batch axes.

    Returns:
      (hidden_BKD in the compute dtype, after the final norm; the updated cache or None)
    """

    def shard_rows(x):
        if mesh is None:
            return x
        spec = PartitionSpec(BATCH_AXES, *(None,) * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    dtype = config.compute_dtype
    embed_VD = params["embed"].astype(dtype)
    if mesh is not None:
        # Gathered over fsdp before the look-up: left to itself, XLA replicates the looked-up rows instead.
        embed_VD = jax.lax.with_sharding_constraint(embed_VD, NamedSharding(mesh, PartitionSpec("tensor", None)))
    x_BKD = shard_rows(embed_VD[tokens_BK])
    rope = _rope_tables(positions_BK, config)
    span = jnp.arange(tokens_BK.shape[1] if cache is None else cache[0][0].shape[2])
    visible_BKS = span[None, None, :] <= positions_BK[:, :, None]

    def block(layer, x_BKD, layer_cache):
        with jax.named_scope("attention"):
            y_BKD, layer_cache = _attention(
                layer,
                config,
                _rms_norm(x_BKD, layer["attn_norm"], config),
                positions_BK,
                rope,
                visible_BKS,
                layer_cache,
            )
            x_BKD = x_BKD + y_BKD
        with jax.named_scope("mlp"):
            x_BKD = x_BKD + _mlp(layer, config, _rms_norm(x_BKD, layer["mlp_norm"], config))
        return shard_rows(x_BKD), layer_cache

    if remat:
        block = jax.checkpoint(block)
    new_cache = []
    for i in range(config.layers):
        x_BKD, layer_cache = block(params["layers"][str(i)], x_BKD, None if cache is None else cache[i])
        new_cache.append(layer_cache)
    hidden_BKD = _rms_norm(x_BKD, params["final_norm"], config)
    return hidden_BKD, None if cache is None else tuple(new_cache)


def logits(params: dict, config: DecoderConfig, hidden_BKD: jax.Array) -> jax.Array:
    """Next-token logits_BKV of hidden states, accumulated and returned in float32."""
    dtype = hidden_BKD.dtype
    with jax.named_scope("head"):
        if not config.tie_embeddings:
            head_DV = params["head"].astype(dtype)
            return jnp.einsum("bkd,dv->bkv", hidden_BKD, head_DV, preferred_element_type=jnp.float32)
        embed_VD = params["embed"].astype(dtype)
        return jax.lax.platform_dependent(hidden_BKD, embed_VD, cpu=_tied_head_on_cpu, default=_tied_head)


def _tied_head(hidden_BKD, embed_VD):
    return jnp.einsum("bkd,vd->bkv", hidden_BKD, embed_VD, preferred_element_type=jnp.float32)


def _tied_head_on_cpu(hidden_BKD, embed_VD):
    """With few tokens, the embedding as the left operand, which XLA's CPU products do not repack: 0.65 of the head's
    time at 2 to 32 tokens, 0.9 at 64. At 96, transposing the logits costs more than that; one token is a vector
    product.
    """
    rows, k, width = hidden_BKD.shape
    if not 1 < rows * k <= FEW_TOKENS:
        return _tied_head(hidden_BKD, embed_VD)
    hidden_TD = hidden_BKD.reshape(-1, width)
    logits_VT = jnp.einsum("vd,td->vt", embed_VD, hidden_TD, preferred_element_type=jnp.float32)
    # The barrier keeps XLA from folding the transposition into the product, which would swap its operands back.
    return jax.lax.optimization_barrier(logits_VT).T.reshape(rows, k, -1)


def _rms_norm(x, scale, config: DecoderConfig):
    """RMSNorm (Zhang & Sennrich 2019) over the last axis, in float32 whatever the compute dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def _rope_tables(positions_BK, config: DecoderConfig):
    """cos and sin [B, K, 1, h/2] of the rotary angles (Su et al. 2021). In float32: bfloat16 rounds position
    257 to 256.
    """
    half = config.head_dim // 2
    freq = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BK.astype(jnp.float32)[:, :, None, None] * freq
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_BKHh, rope):
    """Rotates the pairs (x[j], x[j + h/2]): the Hugging Face convention. GGUF's Llama rows are interleaved and
    are put back on loading.
    """
    cos, sin = rope
    first, second = jnp.split(x_BKHh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BKHh.dtype)


def _attention(layer, config: DecoderConfig, x_BKD, positions_BK, rope, visible_BKS, cache):
    dtype = x_BKD.dtype
    q_BKHh = jnp.einsum("bkd,dnh->bknh", x_BKD, layer["q"].astype(dtype))
    k_BKNh = jnp.einsum("bkd,dnh->bknh", x_BKD, layer["k"].astype(dtype))
    v_BKNh = jnp.einsum("bkd,dnh->bknh", x_BKD, layer["v"].astype(dtype))
    if config.qkv_bias:
        q_BKHh, k_BKNh, v_BKNh = (
            y + layer[f"{name}_bias"].astype(dtype) for name, y in (("q", q_BKHh), ("k", k_BKNh), ("v", v_BKNh))
        )
    if config.qk_norm:
        q_BKHh = _rms_norm(q_BKHh, layer["q_norm"], config)
        k_BKNh = _rms_norm(k_BKNh, layer["k_norm"], config)
    q_BKHh, k_BKNh = _rotate(q_BKHh, rope), _rotate(k_BKNh, rope)

    if cache is None:
        keys_BNSh, values_BNSh = k_BKNh.swapaxes(1, 2), v_BKNh.swapaxes(1, 2)
    else:
        # A scatter, because rows stand at different positions; mode="drop", because a clamped write past the
        # end would overwrite earlier tokens.
        rows_B1 = jnp.arange(x_BKD.shape[0])[:, None]
        keys_BNSh, values_BNSh = (
            buffer.at[rows_B1, :, positions_BK].set(new, mode="drop")
            for buffer, new in zip(cache, (k_BKNh, v_BKNh), strict=True)
        )
        cache = (keys_BNSh, values_BNSh)

    # Both are traced; lowering for one platform keeps only its own.
    out_BKHh = jax.lax.platform_dependent(
        q_BKHh, keys_BNSh, values_BNSh, visible_BKS, cpu=_attend_on_cpu, default=_attend_on_accelerator
    )
    # Not einsum, which contracts in alphabetical order (h, n) and so would copy the weights transposed at every call:
    # a tenth of an iteration of SmolLM2 on CPU.
    return jnp.tensordot(out_BKHh, layer["o"].astype(dtype), axes=2), cache


def _attend_on_accelerator(q_BKHh, keys_BNSh, values_BNSh, visible_BKS):
    """Softmax attention as the compilers of accelerators know it."""
    return jax.nn.dot_product_attention(
        q_BKHh,
        keys_BNSh.swapaxes(1, 2),
        values_BNSh.swapaxes(1, 2),
        mask=visible_BKS[:, None],
        scale=q_BKHh.shape[-1] ** -0.5,
    )


def _attend_on_cpu(q_BKHh, keys_BNSh, values_BNSh, visible_BKS):
    """The same, in the shapes that XLA's CPU matrix products are fast at: 0.55 (small heads, many rows) to 0.85 of the
    time of the plain order with K up to 16, and no slower beyond.

    The query heads that share a key head stand side by side as rows of one matrix product per (row, key head). The
    keys are its left operand: on the right, they would be repacked for the few queries. And the division by the
    softmax's sum comes last, where there is least to divide.
    """
    rows, k, heads, width = q_BKHh.shape
    kv_heads = keys_BNSh.shape[1]
    q_BNKMh = q_BKHh.reshape(rows, k, kv_heads, heads // kv_heads, width).swapaxes(1, 2)
    q_BNQh = q_BNKMh.reshape(rows, kv_heads, -1, width)
    scores_BNSQ = jnp.einsum("bnsh,bnqh->bnsq", keys_BNSh, q_BNQh, preferred_element_type=jnp.float32)
    # The barrier keeps XLA from folding the transposition into the product, as in the head.
    scores_BNQS = jax.lax.optimization_barrier(scores_BNSQ).swapaxes(2, 3)
    scores_BNKMS = scores_BNQS.reshape(*q_BNKMh.shape[:-1], -1) * width**-0.5
    scores_BNKMS = jnp.where(visible_BKS[:, None, :, None], scores_BNKMS, -jnp.inf)
    # Every token sees slot 0, so no maximum is -inf.
    highest_BNKM1 = jax.lax.stop_gradient(jnp.max(scores_BNKMS, axis=-1, keepdims=True))
    weights_BNKMS = jnp.exp(scores_BNKMS - highest_BNKM1)
    sum_BNQ1 = jnp.sum(weights_BNKMS, axis=-1).reshape(rows, kv_heads, -1, 1)
    weights_BNQS = weights_BNKMS.astype(values_BNSh.dtype).reshape(scores_BNQS.shape)
    out_BNQh = jnp.einsum("bnqs,bnsh->bnqh", weights_BNQS, values_BNSh, preferred_element_type=jnp.float32)
    out_BNKMh = (out_BNQh / sum_BNQ1).astype(q_BKHh.dtype).reshape(q_BNKMh.shape)
    return out_BNKMh.swapaxes(1, 2).reshape(q_BKHh.shape)


def _mlp(layer, config: DecoderConfig, x_BKD):
    """Gated MLP with SiLU (Shazeer 2020, SwiGLU)."""
    dtype = x_BKD.dtype
    gate_BKF = jnp.einsum("bkd,df->bkf", x_BKD, layer["gate"].astype(dtype))
    up_BKF = jnp.einsum("bkd,df->bkf", x_BKD, layer["up"].astype(dtype))
    return jnp.einsum("bkf,fd->bkd", jax.nn.silu(gate_BKF) * up_BKF, layer["down"].astype(dtype))
