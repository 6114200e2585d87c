"""Pretraining of the embedded base models.

  python -m experiments.pretrain_tiny [--config=configs/pretrain_tiny.py:VARIANT] --workdir=DIR

full (default)  embedded:tiny, for arithmetic chains.
                Hardware: 2 CPU cores.  Time: under an hour.
code            embedded:code_tiny, for small Python functions.
                Hardware: 2 CPU cores.  Time: under an hour.
smoke           a few steps of `full` for continuous integration.
                Hardware: 2 CPU cores.  Time: under a minute.  Expected: runs to the end; nothing is learned.

Expected of the first two: worked solutions of held-out problems executed reliably (the `worked` column at least 0.95),
while greedy decoding of the base model mostly answers without working.
"""

import ml_collections

VARIANTS = ("full", "code", "smoke")


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = ml_collections.ConfigDict()
    c.seed = 0
    # --- data
    c.task = "arithmetic"  # whose problems: "arithmetic" | "functions"
    c.difficulties = (2, 3, 4, 5, 6)  # operations per problem
    c.task_seed = 0  # the default run's task.seed: its eval problems are kept out of the demonstrations
    c.exclude_size = 1024  # eval problems kept out (at least the largest eval_size of any config)
    c.worked = 0.25  # share of worked solutions in the mixture
    c.sloppy = 0.20  # share of half-worked guesses; the rest answers directly
    # --- model (1.1M parameters)
    c.model = ml_collections.ConfigDict()
    c.model.width = 160
    c.model.layers = 4
    c.model.q_heads = 4
    c.model.kv_heads = 2
    c.model.head_dim = 40
    c.model.mlp_width = 432
    # --- optimisation
    c.steps = 4800
    c.mixed_from = 4000  # first step of the mixture; a multiple of pretrain.POOL
    c.batch_size = 32  # demonstrations per step
    c.length_bucket = 16  # padded lengths are multiples of this, which bounds the number of compilations
    c.learning_rate = 1.5e-3  # peak, cosine to 2 %
    c.warmup_steps = 200
    c.weight_decay = 0.01
    c.log_every = 200
    if variant == "code":
        c.task, c.difficulties = "functions", (2, 3, 4, 5)
        c.worked, c.sloppy = 0.15, 0.15
        c.steps, c.mixed_from, c.log_every = 2000, 1600, 100
        c.batch_size, c.length_bucket = 16, 32
    elif variant == "smoke":
        c.steps, c.mixed_from, c.warmup_steps, c.log_every = 32, 16, 8, 16
        c.batch_size = 8
    return c
