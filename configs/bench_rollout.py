"""Rollouts mode against mode: plain, drafted, coupled, and what should never be slower.

  python -m experiments.bench_rollout --config=configs/bench_rollout.py:VARIANT [--json=PATH] [--verify_tokens=N]

tiny (default)  the embedded 1.1M-parameter model, 32 prompts x 8 samples, after three epochs of GRPO
                (`--config.groups=4` measures 32 rows only).
                Hardware: 2 CPU cores, 2 GiB.  Time: about 5 minutes.
smollm2         SmolLM2-135M-Instruct, 2 prompts x 4 samples of easy word problems, two real updates (learning rate
                1e-6) between the oldest history and the policy that is measured.
                Hardware: 2 CPU cores, 10 GiB.  Time: about 15 minutes.
random          random weights in the shape of a model (`--config.train.init.weights=random:0.5b`): costs and
                exactness; nothing is learned.
                Hardware: 2 CPU cores for random:15m (5 minutes), a GPU for random:0.5b and random:1.5b.
smoke           a minute of `tiny`, for continuous integration.
"""

import ml_collections

from configs import math_grpo

VARIANTS = ("tiny", "smollm2", "random", "smoke")


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = ml_collections.ConfigDict()
    c.modes = ("vanilla", "histospec", "coupled", "cold", "adversarial", "oracle", "paper", "released")
    c.reward = "task"  # of those steps; "brevity": shorter is better, for a model that solves none of the problems
    c.groups = 0  # prompts of a batch whose rollouts are measured; 0 takes all
    c.repeats = 9  # timed runs of each mode, by turns
    c.steps = 12  # training steps before the one whose rollouts are measured
    c.plain_rows = ()  # batch sizes for which plain decoding is timed too
    c.plain_tokens = 128  # new tokens of each of those rows
    c.drafting = ml_collections.ConfigDict()  # the shape for which drafting alone is timed
    c.drafting.rows = 32
    c.drafting.samples = 16  # of a group: live texts
    c.drafting.responses = 16  # earlier ones, of each group
    c.drafting.tokens = 4096  # of each
    c.drafting.k = 8

    # --- the run that makes policies and histories; see configs/math_grpo.py
    c.train = math_grpo.get_config("smollm2" if variant == "smollm2" else "tiny")
    c.train.eval.every = c.train.checkpoint.every = 10**9  # neither
    if variant == "smollm2":
        c.steps, c.repeats = 2, 4
        c.reward = "brevity"
        c.plain_rows = (8, 32)
        c.train.task.path = "experiments/data/questions.jsonl"
        c.train.task.train_size, c.train.task.eval_size = 2, 1
        c.train.rollout.prompts_per_step, c.train.rollout.samples_per_prompt = 2, 4
        c.train.rollout.max_prompt_tokens, c.train.rollout.max_new_tokens = 96, 128
        c.train.draft.buckets = (1, 2, 4, 8, 16, 32)
        c.train.optimizer.micro_batches, c.train.optimizer.warmup_updates = 2, 0
    elif variant == "random":
        c.steps, c.repeats = 2, 3
        c.plain_rows = (8, 32)
        c.train.init.weights = "random:15m"
        c.train.task.train_size, c.train.task.eval_size = 4, 1
        c.train.rollout.prompts_per_step, c.train.rollout.samples_per_prompt = 4, 8
        c.train.rollout.max_new_tokens = 128
        c.train.draft.buckets = (1, 2, 4, 8, 16, 32)
    elif variant == "smoke":
        c.steps, c.repeats = 4, 1
        c.modes = ("vanilla", "histospec", "coupled", "adversarial")
        c.train.task.train_size, c.train.task.eval_size = 8, 8
        c.train.rollout.prompts_per_step, c.train.rollout.samples_per_prompt = 4, 4
        c.train.draft.buckets = (1, 4)
        c.train.optimizer.micro_batches = 1
        c.drafting.rows, c.drafting.tokens = 16, 128
    return c
