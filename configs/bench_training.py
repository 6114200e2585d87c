"""Memory and speed of a training step: remat policies, logits whole and in blocks; memory of loading.

  python -m experiments.bench_training --config=configs/bench_training.py:VARIANT [--json=FILE]

15m (default)  8 layers of width 384 with a vocabulary of 49,152, as that of SmolLM2: 31M parameters.
               Hardware: 2 CPU cores, 6 GiB.  Time: about 10 minutes.
0.5b           the shape of Qwen2.5-0.5B, vocabulary 151,936. Steps are compiled, not run, so no memory is taken for
               them; a checkpoint of 2 GB is written and loaded.
               Hardware: 2 CPU cores, 8 GiB.  Time: about 10 minutes.
smoke          seconds, for continuous integration.
"""

import ml_collections

VARIANTS = ("15m", "0.5b", "smoke")


def get_config(variant: str = "15m") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = ml_collections.ConfigDict()
    c.weights = "random:15m"  # a shape with random weights
    c.vocab_size = 49_152  # 0: the shape's own
    c.layers = 0  # 0: the shape's own
    c.rows = 8  # of a micro-batch
    c.prompt_tokens = 32
    c.response_tokens = 96
    c.dtypes = ("float32", "bfloat16")  # of activations
    c.remat = ("none", "dots", "full")
    c.vocab_blocks = (0, 4096)  # entries of the vocabulary at a time; 0: all at once
    c.repeats = 5  # timed steps of each setting, by turns; 0 compiles only
    c.loading = ml_collections.ConfigDict()
    c.loading.files = 2  # of a checkpoint that is written, to be loaded; 0 loads none
    c.loading.meshes = ((1, 1, 1), (1, 4, 1))  # devices (data, fsdp, tensor) that it is loaded onto

    if variant == "0.5b":
        c.weights, c.vocab_size = "random:0.5b", 0
        c.rows, c.prompt_tokens, c.response_tokens = 4, 256, 256
        c.repeats = 0
    elif variant == "smoke":
        c.vocab_size, c.layers = 8192, 2
        c.rows, c.prompt_tokens, c.response_tokens = 8, 8, 56
        c.dtypes, c.remat, c.vocab_blocks = ("float32",), ("none", "full"), (0, 2048)
        c.repeats, c.loading.files = 1, 0
    return c
