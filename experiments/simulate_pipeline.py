"""What scheduling over slices gains, simulated: from eight accelerators to thousands, on none.

python -m experiments.simulate_pipeline [--config=configs/simulate_pipeline.py:VARIANT] [--json=PATH] [--plot=PATH]
"""

import pathlib

from absl import flags

from rhyme_jax.benchmarks import pipeline
from rhyme_jax.errors import InputError
from rhyme_jax.files import write_json
from rhyme_jax.training import cli
from rhyme_jax.training.console import Console

JSON = flags.DEFINE_string("json", None, "Where the figures are written.")
PLOT = flags.DEFINE_string("plot", None, "Where a picture of them is written; needs matplotlib.")


def experiment(config, variant: str, workdir: str | None) -> None:
    if workdir:
        raise InputError(f"--workdir={workdir}: nothing is kept but the figures; see --json")
    if PLOT.value:
        pipeline.pyplot()  # if it is missing, that is said before the simulation and not after
    for flag in (JSON, PLOT):
        if flag.value and not pathlib.Path(flag.value).absolute().parent.is_dir():
            raise InputError(f"--{flag.name}={flag.value}: there is no such directory")
    result = {"variant": variant, **pipeline.run(config, Console())}
    if JSON.value:
        write_json(pathlib.Path(JSON.value), {**result, "config": config.to_dict()})
    if PLOT.value:
        pipeline.plot(result, PLOT.value)


if __name__ == "__main__":
    cli.run(experiment, default_config="configs/simulate_pipeline.py")
