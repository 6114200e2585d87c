"""GRPO on code run against tests in a sandbox, with rollouts drafted from history.

python -m experiments.code_grpo [--config=configs/code_grpo.py:VARIANT] [--config.x.y=VALUE] [--workdir=DIR]
"""

import datetime

from rhyme_jax.training import cli, distributed, loop


def experiment(config, variant: str, workdir: str | None) -> None:
    if workdir is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        workdir = f"runs/code_grpo-{variant}-{now}"
    workdir = distributed.from_primary(workdir)  # one name, though the clocks of several processes differ
    loop.train(config, workdir)


if __name__ == "__main__":
    cli.run(experiment, default_config="configs/code_grpo.py", several_processes=True)
