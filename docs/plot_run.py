"""Draws held-out accuracy, reward, response length and tokens per forward pass of a run.

python docs/plot_run.py WORKDIR OUT.png
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from rhyme_jax.training.workdir import read_metrics


def main(workdir: str, out: str) -> None:
    metrics = read_metrics(pathlib.Path(workdir) / "metrics.jsonl")
    steps = [m for m in metrics if "reward/mean" in m]
    evals = [m for m in metrics if "eval/accuracy_greedy" in m]
    fig, (accuracy, length, forward) = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")

    def line(axis, rows, name, label, **style):
        axis.plot([m["step"] for m in rows], [m[name] for m in rows], label=label, **style)

    line(accuracy, steps, "reward/mean", "training reward", color="0.7")
    line(accuracy, evals, "eval/accuracy_sampled", "held-out, sampled", marker="o", ms=4)
    line(accuracy, evals, "eval/accuracy_greedy", "held-out, greedy", marker="o", ms=4)
    accuracy.set(title="accuracy", ylim=(0, 1))
    accuracy.legend(frameon=False, fontsize=8)
    line(length, steps, "response/length_mean", "length")
    length.set(title="response length (tokens)", ylim=(0, None))
    line(forward, steps, "rollout/tokens_per_row_forward", "tokens per forward")
    forward.axhline(1, color="0.7", lw=1)
    forward.set(title="tokens per row and forward pass", ylim=(0, None))
    for axis in (accuracy, length, forward):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
