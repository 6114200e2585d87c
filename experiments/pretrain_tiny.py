"""Pretrains the embedded tiny base model from scratch and writes it as a Hugging Face directory.

python -m experiments.pretrain_tiny --workdir=DIR [--config.x=VALUE]
"""

from rhyme_jax.errors import InputError
from rhyme_jax.training import cli, pretrain
from rhyme_jax.training.console import Console


def experiment(config, variant: str, workdir: str | None) -> None:
    del variant
    if workdir is None:
        raise InputError("--workdir: a directory to write the model to is needed")
    pretrain.make_model(config, workdir, Console())


if __name__ == "__main__":
    cli.run(experiment, default_config="configs/pretrain_tiny.py")
