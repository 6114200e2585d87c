"""Draws what scheduling gains from the figures of `experiments.simulate_pipeline --json`.

python docs/plot_pipeline.py HEAVY_TAIL.json SCALING.json PREDICTOR.json OUT.png
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from rhyme_jax.benchmarks import pipeline
from rhyme_jax.files import read_json


def main(heavy_tail: str, scaling: str, predictor: str, out: str) -> None:
    plt = pipeline.pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    pipeline.draw_policies(*axes[0], read_json(pathlib.Path(heavy_tail)))
    for axis, path, label in (
        (axes[1, 0], scaling, "accelerators, four prompts each"),
        (axes[1, 1], predictor, "share of prompts whose rank shifts (0.81: no history)"),
    ):
        pipeline.draw_cases(axis, read_json(pathlib.Path(path)))
        axis.set_xlabel(label)
    fig.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
