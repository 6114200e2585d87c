"""Writes families/<name>/: tiny random models as transformers saves them, with its float32 logits.

They pin what a model_type stands for (names, layouts, biases, query/key norms, defaults) to transformers' own word.
Environment as in make_smollm2.py. Each directory holds config.json, model.safetensors (one of them in two shards
with an index, one in bfloat16) and golden.npz: tokens int32 [2, 12], logits float32 [2, 12, V].
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=500.0),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=8),
}


def main():
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        folder = pathlib.Path(__file__).parent / "families" / name
        shutil.rmtree(folder, ignore_errors=True)
        tokens = np.random.default_rng(seed).integers(0, 40, (2, 12)).astype(np.int32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too, which start at ones and zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
            model = model.to(torch.bfloat16 if name == "qwen2" else torch.float32)
            model.save_pretrained(folder, max_shard_size="8KB" if name == "qwen3" else "1GB")
            (folder / "generation_config.json").unlink(missing_ok=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            logits = model(torch.tensor(tokens)).logits.numpy()
        np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=logits)
        print(name, transformers.__version__, torch.__version__, [p.name for p in sorted(folder.iterdir())])  # noqa: T201


if __name__ == "__main__":
    main()
