"""Writes a run's policy as a Hugging Face directory, which transformers and vLLM load.

python -m experiments.export_hf --workdir=DIR --out=DIR [--step=N] [--dtype=float32|bfloat16]
"""

from absl import flags

from rhyme_jax.errors import InputError
from rhyme_jax.training import cli, export
from rhyme_jax.training.console import Console

WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
OUT = flags.DEFINE_string("out", None, "The directory to write; it must not hold anything.")
STEP = flags.DEFINE_integer("step", None, "Of the checkpoint; the newest if not given.", lower_bound=0)
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of the weights; that of the run if not given.")


def main() -> None:
    for flag, what in ((WORKDIR, "the workdir of a run"), (OUT, "a directory to write to")):
        if not flag.value:
            raise InputError(f"--{flag.name}: {what} is needed")
    step = export.export(WORKDIR.value, OUT.value, STEP.value, DTYPE.value)
    Console().line(f"step {step} of {WORKDIR.value} is in {OUT.value}")


if __name__ == "__main__":
    cli.run_without_config(main)
