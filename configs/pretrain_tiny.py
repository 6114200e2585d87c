"""Pretraining of the embedded tiny base model.

  python -m experiments.pretrain_tiny --workdir=/tmp/tiny

Hardware: 2 CPU cores. Time: under an hour. Expected: worked solutions of held-out problems executed reliably
(the `worked` column at least 0.95), while greedy decoding of the base model mostly answers without working.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
    if variant not in ("full", "smoke"):
        raise ValueError(f"no variant {variant!r}; there are full, smoke")
    c = ml_collections.ConfigDict()
    c.seed = 0
    # --- data
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
    c.learning_rate = 1.5e-3  # peak, cosine to 2 %
    c.warmup_steps = 200
    c.weight_decay = 0.01
    c.log_every = 200
    if variant == "smoke":  # under a minute, for continuous integration; learns nothing
        c.steps, c.mixed_from, c.warmup_steps, c.log_every = 32, 16, 8, 16
        c.batch_size = 8
    return c
