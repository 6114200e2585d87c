"""Named ways of drafting, to be compared: the paper's, its authors' released code's, and ours."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Preset:
    sources: tuple[str, ...]  # of drafts.SOURCES
    weight: str  # how earlier responses vote: one of history.store.VOTE_WEIGHTS
    window: str  # one of budget.WINDOWS
    min_prob: float  # share of the votes below which a drafted path stops


PRESETS = {
    # He et al. 2025: rewards weigh the branches, a row's window grows by two and falls back to two. The threshold is
    # not in the paper; it is that of the code.
    "paper": Preset(("history",), "reward", "paper", 0.1),
    # Counts only, a window doubled and halved.
    "released": Preset(("history",), "count", "released", 0.1),
    "rhyme": Preset(("history", "siblings", "self"), "reward", "marginal", 0.1),
}
