"""GRPO on code run against tests in a sandbox, with rollouts drafted from history.

python -m experiments.code_grpo [--config=configs/code_grpo.py:VARIANT] [--config.x.y=VALUE] [--workdir=DIR]
"""

from rhyme_jax.training import cli, loop

if __name__ == "__main__":
    cli.run(loop.experiment("code_grpo"), default_config="configs/code_grpo.py", several_processes=True)
