"""What speculation gains in rollouts: modes side by side in one process, and proof that no token changes.

python -m experiments.bench_rollout [--config=configs/bench_rollout.py:VARIANT] [--json=PATH] [--verify_tokens=N]
"""

import pathlib
import sys

from absl import flags

from rhyme_jax.benchmarks import rollout
from rhyme_jax.files import write_json
from rhyme_jax.training import cli
from rhyme_jax.training.console import Console

JSON = flags.DEFINE_string("json", None, "Where the figures are written.")
VERIFY = flags.DEFINE_integer("verify_tokens", 0, "Compare so many tokens with a slow oracle; 0 compares none.")


def experiment(config, variant: str, workdir: str | None) -> None:
    del workdir  # nothing is kept but the figures
    result = {"variant": variant, **rollout.run(config, Console(), VERIFY.value)}
    if JSON.value:
        write_json(pathlib.Path(JSON.value), result)
    # In bfloat16, rounding depends on the shape of a product: tokens are compared there, but not promised.
    promised = config.train.model.dtype == "float32"
    differ = any(m["identical_tokens"] != m["compared_tokens"] for m in result.get("modes", {}).values())
    if promised and (differ or result.get("exactness", {}).get("wrong")):
        sys.exit("error: drafted rollouts differ from plain decoding")


if __name__ == "__main__":
    cli.run(experiment, default_config="configs/bench_rollout.py")
