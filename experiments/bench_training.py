"""Peak memory and seconds of a training step, by remat policy and with logits in blocks.

python -m experiments.bench_training [--config=configs/bench_training.py:VARIANT] [--json=FILE]
"""

import pathlib

from absl import flags

from rhyme_jax.benchmarks import training
from rhyme_jax.files import write_json
from rhyme_jax.training import cli
from rhyme_jax.training.console import Console

JSON = flags.DEFINE_string("json", None, "Where the figures are written.")


def experiment(config, variant: str, workdir: str | None) -> None:
    del workdir  # nothing is kept but the figures
    result = {"variant": variant, **training.run(config, Console())}
    if JSON.value:
        write_json(pathlib.Path(JSON.value), result)


if __name__ == "__main__":
    cli.run(experiment, default_config="configs/bench_training.py")
