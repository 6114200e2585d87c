"""Named recipes: what each paper's loss sets of `grpo.*`, and nothing else. A field that is set itself goes first."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Preset:
    baseline: str = "group"  # this and the next: one of `advantages`
    normalize_std: str = "group"
    ratio: str = "token"  # of `losses`, as are those that no other is said of
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregate: str = "sequence"
    kl_in: str = "loss"
    kl_estimator: str = "k3"
    behaviour: str = "rollout"
    overlong_share: float = 0.0  # of the budget: the buffer in which long responses are punished
    sampling_rounds: int = 1


PRESETS = {
    "grpo": Preset(),  # Shao et al. 2024
    "dr_grpo": Preset(normalize_std="none", aggregate="constant"),  # Liu et al. 2025
    # Yu et al. 2025. Of their budget of 20,480 tokens the last 4,096 are the buffer. They sample until a batch is full;
    # four rounds fill it where a quarter of the prompts are of use.
    "dapo": Preset(clip_high=0.28, aggregate="token", overlong_share=0.2, sampling_rounds=4),
    # Zheng et al. 2025, section 5.1. So narrow a clip takes what rollout and learner make of one policy in bfloat16
    # (some 3e-3) for a change of it: 46 % of the tokens of an unchanged policy were clipped.
    "gspo": Preset(ratio="sequence", clip_low=3e-4, clip_high=4e-4, behaviour="recomputed"),
    # Ahmadian et al. 2024. Theirs is the baseline of rewards with the KL penalty, ours of those without: both unbiased.
    "rloo": Preset(
        baseline="leave_one_out", normalize_std="none", aggregate="constant", kl_in="reward", kl_estimator="k1"
    ),
    "reinforce": Preset(baseline="batch", normalize_std="none", aggregate="constant"),  # Williams 1992
    # Both of Hu et al. 2025.
    "reinforce++": Preset(baseline="none", normalize_std="batch", aggregate="token", kl_in="reward", kl_estimator="k1"),
    "reinforce++_baseline": Preset(normalize_std="batch", aggregate="token", kl_estimator="k2"),
}
