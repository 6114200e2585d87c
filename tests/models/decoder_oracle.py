"""The decoder in float64 NumPy: one row, position and head at a time, after the papers and config fields alone."""

import jax
import numpy as np


def logits(params, config, tokens_BS):
    """Logits [B, S, V] of whole rows, from position 0."""

    def norm(x, weight):
        return x / np.sqrt((x**2).mean() + config.norm_eps) * (weight + config.norm_plus_one)

    def frequency(j, local):
        if local and config.rope_theta_local:
            return config.rope_theta_local ** (-2 * j / config.head_dim)
        freq, scaling = config.rope_theta ** (-2 * j / config.head_dim), config.rope_scaling
        if scaling is None:
            return freq
        turns = freq * scaling.original_positions / (2 * np.pi)
        if scaling.kind == "linear" or turns < scaling.low_freq:
            return freq / scaling.factor
        if turns > scaling.high_freq:
            return freq
        share = (turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
        return (1 - share) * freq / scaling.factor + share * freq

    def rotate(x, position, i):
        if not config.has_rope(i):
            return x
        half = config.head_dim // 2
        out = np.empty_like(x)
        for j in range(half):
            angle = position * frequency(j, config.is_local(i))
            a, b = x[j], x[j + half]
            out[j], out[j + half] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return out

    def head(layer, name, x, i):
        y = x @ layer[name][:, i]
        return y + layer[f"{name}_bias"][i] if config.qkv_bias else y

    def capped(x, cap):
        return cap * np.tanh(x / cap) if cap else x

    def activation(x):
        if config.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def attention(layer, i, normed, s):
        out = 0
        first = max(0, s + 1 - config.window) if config.is_local(i) else 0
        for h in range(config.q_heads):
            n = h // (config.q_heads // config.kv_heads)  # neighbours share a key/value head
            query = head(layer, "q", normed[s], h)
            keys = {t: head(layer, "k", normed[t], n) for t in range(first, s + 1)}
            if config.qk_norm:
                query = norm(query, layer["q_norm"])
                keys = {t: norm(k, layer["k_norm"]) for t, k in keys.items()}
            scale = 1 / np.sqrt(config.query_scalar or config.head_dim)
            scores = np.array([rotate(query, s, i) @ rotate(k, t, i) * scale for t, k in keys.items()])
            weights = np.exp(capped(scores, config.attn_softcap))
            weights /= weights.sum()
            out = out + sum(w * head(layer, "v", normed[t], n) for w, t in zip(weights, keys)) @ layer["o"][h]
        return norm(out, layer["attn_post_norm"]) if config.post_norms else out

    def mlp(layer, x):
        x = norm(x, layer["mlp_norm"])
        out = (activation(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
        return norm(out, layer["mlp_post_norm"]) if config.post_norms else out

    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    out = np.zeros((*tokens_BS.shape, config.vocab_size))
    for b, tokens in enumerate(tokens_BS):
        stream = [p["embed"][t] * (np.sqrt(config.width) if config.embed_scale else 1) for t in tokens]
        for i in range(config.layers):
            layer = p["layers"][str(i)]
            normed = [norm(x, layer["attn_norm"]) for x in stream]
            stream = [x + attention(layer, i, normed, s) for s, x in enumerate(stream)]
            stream = [x + mlp(layer, x) for x in stream]
        table = p["embed"].T if config.tie_embeddings else p["head"]
        out[b] = [capped(norm(x, p["final_norm"]) @ table, config.logit_softcap) for x in stream]
    return out
