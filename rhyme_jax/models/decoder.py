"""The decoder's forward pass: one function for the learner (no cache) and for the rollout (KV cache).

Suffix letters of shapes: B rows, K positions fed, S cache positions, D width, H query heads, N key/value heads,
M = H / N query heads per key/value head, Q = K * M, T = B * K, F MLP width, V vocabulary, h one head's width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhyme_jax.models import lora
from rhyme_jax.models.config import DecoderConfig, RopeScaling
from rhyme_jax.models.params import BATCH_AXES
from rhyme_jax.models.remat import checkpointed

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
    remat: str = "none",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Final hidden states of the fed tokens, and the cache with their keys and values written.

    Args:
      params: tree of `params.declare`, in any floating dtype.
      tokens_BK: int32 token ids; any id is embedded, masking is the caller's affair.
      positions_BK: int32 absolute positions. Without a cache these must be 0..K-1 in each row. With a cache,
        position s is also the cache slot: a token attends to slots 0..s, so stale entries beyond a row's
        length are never seen (as long as they are finite), and a write at or past S is dropped. Local layers
        keep all slots too; their mask hides those that have left the window.
      cache: buffers of `init_cache`, or None to attend within the fed tokens only.
      remat: what the backward pass computes again of each layer, one of `remat.REMAT_POLICIES`.
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
    if mesh is None:
        x_BKD = params["embed"][tokens_BK].astype(dtype)
    else:
        # Gathered over fsdp before the look-up: left to itself, XLA replicates the looked-up rows instead.
        whole = NamedSharding(mesh, PartitionSpec("tensor", None))
        x_BKD = shard_rows(jax.lax.with_sharding_constraint(params["embed"].astype(dtype), whole)[tokens_BK])
    if config.embed_scale:
        x_BKD = x_BKD * jnp.asarray(math.sqrt(config.width), dtype)
    rope = rope_local = _rope_tables(positions_BK, config.head_dim, config.rope_theta, config.rope_scaling)
    if config.rope_theta_local:
        rope_local = _rope_tables(positions_BK, config.head_dim, config.rope_theta_local)
    span = jnp.arange(tokens_BK.shape[1] if cache is None else cache[0][0].shape[2])
    visible_BKS = near_BKS = span[None, None, :] <= positions_BK[:, :, None]
    if config.window:
        # Positions past the end count as the last slot: a token that saw no slot at all would become NaN.
        near_BKS = visible_BKS & (span > jnp.minimum(positions_BK, span.size - 1)[:, :, None] - config.window)

    def block(layer, x_BKD, layer_cache, rope, visible_BKS):
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
            if config.post_norms:
                y_BKD = _rms_norm(y_BKD, layer["attn_post_norm"], config)
            x_BKD = x_BKD + y_BKD
        with jax.named_scope("mlp"):
            y_BKD = _mlp(layer, config, _rms_norm(x_BKD, layer["mlp_norm"], config))
            if config.post_norms:
                y_BKD = _rms_norm(y_BKD, layer["mlp_post_norm"], config)
            x_BKD = x_BKD + y_BKD
        return shard_rows(x_BKD), layer_cache

    block = checkpointed(block, remat)
    new_cache = []
    for i in range(config.layers):
        local = config.is_local(i)
        x_BKD, layer_cache = block(
            params["layers"][str(i)],
            x_BKD,
            None if cache is None else cache[i],
            (rope_local if local else rope) if config.has_rope(i) else None,
            near_BKS if local else visible_BKS,
        )
        new_cache.append(layer_cache)
    hidden_BKD = _rms_norm(x_BKD, params["final_norm"], config)
    return hidden_BKD, None if cache is None else tuple(new_cache)


def logits(params: dict, config: DecoderConfig, hidden_BKD: jax.Array) -> jax.Array:
    """Next-token logits_BKV of hidden states, accumulated, capped where config says so, and returned in float32."""
    dtype = config.logits_dtype
    hidden_BKD = hidden_BKD.astype(dtype)
    with jax.named_scope("head"):
        if config.tie_embeddings:
            embed_VD = params["embed"].astype(dtype)
            logits_BKV = jax.lax.platform_dependent(hidden_BKD, embed_VD, cpu=_tied_head_on_cpu, default=_tied_head)
        else:
            head_DV = params["head"].astype(dtype)
            logits_BKV = jnp.einsum("bkd,dv->bkv", hidden_BKD, head_DV, preferred_element_type=jnp.float32)
        return soft_cap(logits_BKV, config.logit_softcap)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap), which stays within +-cap and is x where x is small; x itself where cap is 0 (Gemma 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


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


def _linear(layer, config: DecoderConfig, name: str, x):
    """x [B, K, in...] times a layer's matrix [in..., out...], plus low-rank adapters and a bias where there are any:
    [B, K, out...].

    Every product with a layer's matrix is made here. Not by einsum, which contracts in alphabetical order ("h", "n")
    and so would copy the weights of "o" transposed at every call: a tenth of an iteration of SmolLM2 on CPU.
    """
    inputs = lora.INPUTS[name]
    y = jnp.tensordot(x, layer[name].astype(x.dtype), axes=inputs)
    a, b = (layer.get(adapter) for adapter in lora.adapters(name))
    if a is not None:
        low_BKr = jnp.tensordot(x, a.astype(x.dtype), axes=inputs)
        y = y + config.lora.scale * jnp.tensordot(low_BKr, b.astype(x.dtype), axes=1)
    if config.qkv_bias and name in ("q", "k", "v"):
        y = y + layer[f"{name}_bias"].astype(x.dtype)
    return y


def _rms_norm(x, weight, config: DecoderConfig):
    """RMSNorm (Zhang & Sennrich 2019) over the last axis, in float32 whatever the compute dtype."""
    x32, weight32 = x.astype(jnp.float32), weight.astype(jnp.float32)
    if config.norm_plus_one:
        weight32 = 1 + weight32
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
    return (x32 * weight32).astype(x.dtype)


def _rope_tables(positions_BK, head_dim: int, theta: float, scaling: RopeScaling | None = None):
    """cos and sin [B, K, 1, h/2] of the rotary angles (Su et al. 2021). In float32: bfloat16 rounds position
    257 to 256.
    """
    half = head_dim // 2
    freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        kept = 0.0  # the share of each frequency that is not divided
        if scaling.kind == "llama3":
            turns = freq * scaling.original_positions / (2 * math.pi)
            kept = jnp.clip((turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq), 0, 1)
        freq = freq * (kept + (1 - kept) / scaling.factor)
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
    q_BKHh, k_BKNh, v_BKNh = (_linear(layer, config, name, x_BKD) for name in ("q", "k", "v"))
    if config.qk_norm:
        q_BKHh = _rms_norm(q_BKHh, layer["q_norm"], config)
        k_BKNh = _rms_norm(k_BKNh, layer["k_norm"], config)
    if rope is not None:
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
    maths = {"scale": (config.query_scalar or config.head_dim) ** -0.5, "softcap": config.attn_softcap}
    out_BKHh = jax.lax.platform_dependent(
        q_BKHh,
        keys_BNSh,
        values_BNSh,
        visible_BKS,
        cpu=functools.partial(_attend_on_cpu, **maths),
        default=functools.partial(_attend_on_accelerator, **maths),
    )
    return _linear(layer, config, "o", out_BKHh), cache


def _attend_on_accelerator(q_BKHh, keys_BNSh, values_BNSh, visible_BKS, *, scale: float, softcap: float):
    """Softmax attention as the compilers of accelerators know it, or in plain operations where scores are capped."""
    if not softcap:
        return jax.nn.dot_product_attention(
            q_BKHh,
            keys_BNSh.swapaxes(1, 2),
            values_BNSh.swapaxes(1, 2),
            mask=visible_BKS[:, None],
            scale=scale,
        )
    rows, k, heads, width = q_BKHh.shape
    kv_heads = keys_BNSh.shape[1]
    q_BKNMh = q_BKHh.reshape(rows, k, kv_heads, heads // kv_heads, width)
    scores_BNMKS = jnp.einsum("bknmh,bnsh->bnmks", q_BKNMh, keys_BNSh, preferred_element_type=jnp.float32)
    scores_BNMKS = soft_cap(scores_BNMKS * scale, softcap)
    weights_BNMKS = jax.nn.softmax(jnp.where(visible_BKS[:, None, None], scores_BNMKS, -jnp.inf), axis=-1)
    out_BKNMh = jnp.einsum("bnmks,bnsh->bknmh", weights_BNMKS.astype(values_BNSh.dtype), values_BNSh)
    return out_BKNMh.reshape(q_BKHh.shape)


def _attend_on_cpu(q_BKHh, keys_BNSh, values_BNSh, visible_BKS, *, scale: float, softcap: float):
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
    scores_BNKMS = scores_BNQS.reshape(*q_BNKMh.shape[:-1], -1) * scale
    scores_BNKMS = soft_cap(scores_BNKMS, softcap)
    scores_BNKMS = jnp.where(visible_BKS[:, None, :, None], scores_BNKMS, -jnp.inf)
    # Every token sees one slot at least, so no maximum is -inf.
    highest_BNKM1 = jax.lax.stop_gradient(jnp.max(scores_BNKMS, axis=-1, keepdims=True))
    weights_BNKMS = jnp.exp(scores_BNKMS - highest_BNKM1)
    sum_BNQ1 = jnp.sum(weights_BNKMS, axis=-1).reshape(rows, kv_heads, -1, 1)
    weights_BNQS = weights_BNKMS.astype(values_BNSh.dtype).reshape(scores_BNQS.shape)
    out_BNQh = jnp.einsum("bnqs,bnsh->bnqh", weights_BNQS, values_BNSh, preferred_element_type=jnp.float32)
    out_BNKMh = (out_BNQh / sum_BNQ1).astype(q_BKHh.dtype).reshape(q_BNKMh.shape)
    return out_BNKMh.swapaxes(1, 2).reshape(q_BKHh.shape)


def _mlp(layer, config: DecoderConfig, x_BKD):
    """Gated MLP (Shazeer 2020: SwiGLU, GEGLU)."""
    gate_BKF, up_BKF = (_linear(layer, config, name, x_BKD) for name in ("gate", "up"))
    gate_BKF = jax.nn.silu(gate_BKF) if config.activation == "silu" else jax.nn.gelu(gate_BKF, approximate=True)
    return _linear(layer, config, "down", gate_BKF * up_BKF)
