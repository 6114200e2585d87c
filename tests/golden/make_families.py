"""Writes families/<name>/: tiny random models as transformers saves them, with its logits and gradients.

They pin what a model_type stands for (names, layouts, biases, norms, windows, rotations, defaults) to transformers' own
word. Environment as in make_smollm2.py. Each directory holds config.json, model.safetensors (one of them in shards with
an index, one in bfloat16) and golden.npz, in float32: tokens int32 [2, 24], logits [2, 24, V] and, for each weight by
its name, "grad/<name>": the gradient of the mean cross-entropy of the next token. Windows and the length that a
rotation was first made for are shorter than the 24 tokens.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

TOKENS = (2, 24)


def configs(**sizes) -> dict[str, transformers.PretrainedConfig]:
    """A tiny config for each family and kind of layer."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "pad_token_id": None,  # a row of the embedding that had one would get no gradient
        "eos_token_id": 1,
    } | sizes
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    gemma3_rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    }
    window = {"use_sliding_window": True, "sliding_window": 5}
    return {
        "llama": transformers.LlamaConfig(
            **sizes, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
        "qwen2": transformers.Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(
            **sizes, tie_word_embeddings=False, head_dim=8, max_window_layers=1, **window
        ),
        "llama3": transformers.LlamaConfig(**sizes, tie_word_embeddings=True, head_dim=8, rope_parameters=llama3),
        "mistral": transformers.MistralConfig(**sizes, sliding_window=6),
        "smollm3": transformers.SmolLM3Config(**sizes | {"num_hidden_layers": 3}, no_rope_layer_interval=2, **window),
        "gemma2": transformers.Gemma2Config(
            **sizes,
            head_dim=8,
            query_pre_attn_scalar=4,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3_text": transformers.Gemma3TextConfig(
            **sizes | {"num_hidden_layers": 3},
            head_dim=8,
            query_pre_attn_scalar=12,
            sliding_window=5,
            sliding_window_pattern=3,
            rope_parameters=gemma3_rope,
        ),
    }


def build(config, seed: int):
    """A model of `config` with each weight random: norms and biases too, which start at ones and zeros."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def answers(folder, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of the model saved in `folder`, and its gradients by "grad/<name>", in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.tensor(tokens, dtype=torch.long)
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {f"grad/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return {"logits": logits.detach().numpy(), **gradients}


def main():
    for seed, (name, config) in enumerate(configs().items()):
        folder = pathlib.Path(__file__).parent / "families" / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(config, seed).to(torch.bfloat16 if name == "qwen2" else torch.float32)
        model.save_pretrained(folder, max_shard_size="8KB" if name == "qwen3" else "1GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, TOKENS).astype(np.int32)
        np.savez_compressed(folder / "golden.npz", tokens=tokens, **answers(folder, tokens))
        size = sum(p.stat().st_size for p in folder.iterdir()) // 1024
        print(name, transformers.__version__, torch.__version__, f"{size} KiB")  # noqa: T201


if __name__ == "__main__":
    main()
