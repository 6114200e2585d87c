"""GRPO on mathematics, with rollouts drafted from history.

python -m experiments.math_grpo [--config=configs/math_grpo.py:VARIANT] [--config.x.y=VALUE] [--workdir=DIR]
"""

from rhyme_jax.training import cli, loop

if __name__ == "__main__":
    cli.run(loop.experiment("math_grpo"), default_config="configs/math_grpo.py", several_processes=True)
