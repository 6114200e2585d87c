"""The recipes are those that docs/losses.md lists."""

import pathlib
import re

from rhyme_jax.grpo.presets import PRESETS

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "losses.md"


def test_the_document_lists_what_the_recipes_set():
    rows = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| `[a-z_+]+`( \(default\))? \|", line)]
    listed = {}
    for row in rows[: len(PRESETS)]:
        name, baseline, normalize_std, ratio, clips, aggregate, kl, beside, _ = (
            cell.strip() for cell in row.strip("|").split("|")
        )
        listed[name.split()[0].strip("`")] = (
            *(baseline, normalize_std, ratio),
            *map(float, clips.split(", ")),
            aggregate,
            tuple(kl.split(", ")),
            ("a fifth of the budget" in beside) * 0.2,
            *(int(x) for x in re.findall(r"`sampling_rounds` (\d+)", beside) or ["1"]),
            *(re.findall(r"`behaviour` (\w+)", beside) or ["rollout"]),
        )
    assert listed == {
        name: (
            *(p.baseline, p.normalize_std, p.ratio, p.clip_low, p.clip_high, p.aggregate),
            (p.kl_in, p.kl_estimator),
            *(p.overlong_share, p.sampling_rounds, p.behaviour),
        )
        for name, p in PRESETS.items()
    }
