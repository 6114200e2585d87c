"""Advantages: how much better than expected each response, or each of its tokens, was.

Two steps, for what groups say can be learned from while other groups are still decoded:

1. `group_advantages`: within each group of C responses to one prompt, from its rewards alone;
2. `batch_advantages`: what needs the whole batch (its mean, its standard deviation) or a reference policy.

All of it in float64 on the host. Relative to a group, advantages are exactly 0 where its rewards are equal.

Suffix letters: N rows of a batch, G groups of C samples, T response positions.
"""

import dataclasses

import numpy as np

from rhyme_jax.errors import InputError

EPSILON = 1e-6  # added to a standard deviation that is divided by

BASELINES = ("group", "leave_one_out", "batch", "none")
NORMALIZERS = ("group", "batch", "none")


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """The fields of `grpo` that make advantages of rewards. Whole numbers are tokens."""

    baseline: str = "group"  # what rewards are compared with, see `group_advantages` and `batch_advantages`
    normalize_std: str = "group"  # what they are divided by
    kl_coef: float = 0.0  # weight of the KL penalty in the reward; 0 where it is in the loss, or nowhere
    budget: int = 0  # of a response; needed with overlong_buffer
    overlong_buffer: int = 0  # the last tokens of the budget, in which a response is punished; 0 is off
    overlong_factor: float = 1.0  # the penalty at the end of the buffer
    mask_truncated: bool = False  # responses that the budget cut off get no gradient

    def __post_init__(self):
        for name, choices in (("baseline", BASELINES), ("normalize_std", NORMALIZERS)):
            if getattr(self, name) not in choices:
                raise InputError(f"grpo.{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if self.normalize_std == "group" and self.baseline not in ("group", "leave_one_out"):
            # Where all rewards of a group are equal, they themselves would be divided by nothing.
            raise InputError(
                f"grpo.normalize_std='group': needs grpo.baseline='group' or 'leave_one_out', not {self.baseline!r}"
            )
        if not self.kl_coef >= 0:
            raise InputError(f"grpo.kl_coef={self.kl_coef}: must not be negative")
        if not self.overlong_factor > 0:
            raise InputError(f"grpo.overlong_factor={self.overlong_factor}: must be positive")
        if not 0 <= self.overlong_buffer <= self.budget:
            raise InputError(
                f"grpo.overlong_buffer={self.overlong_buffer}: must be from 0 to rollout.max_new_tokens={self.budget}"
            )

    @property
    def whole_batch(self) -> bool:
        """Whether `batch_advantages` has anything to do."""
        return "batch" in (self.baseline, self.normalize_std) or self.kl_coef > 0


def overlong_penalty(config: AdvantageConfig, length: np.ndarray) -> np.ndarray:
    """What is added to the rewards of responses of these lengths: float64, as many (DAPO, Yu et al. 2025, eq. 13).

    0 up to the buffer, then down along a line to -overlong_factor where the budget ends. A response that was cut off
    has the length of the budget.
    """
    if not config.overlong_buffer:
        return np.zeros(np.shape(length))
    into = np.asarray(length, np.float64) - (config.budget - config.overlong_buffer)
    return -config.overlong_factor * np.clip(into / config.overlong_buffer, 0.0, 1.0)


def group_advantages(
    reward_GC: np.ndarray, baseline: str = "group", normalize_std: str = "group"
) -> tuple[np.ndarray, np.ndarray]:
    """Each sample's reward relative to its group of C samples of one prompt.

    Computed in float64 and exactly 0 where a group's rewards are equal (a rounded mean in float32 would turn
    twelve rewards of 1.8 into advantages of 0.19) and for a group with one usable sample.

    Args:
      reward_GC: rewards; NaN marks a grade that failed. Such a sample takes no part and gets no gradient.
      baseline: "group", the mean of the group (GRPO, Shao et al. 2024, section 4.1); "leave_one_out", the mean of the
        other samples, which unlike the group's does not depend on the sample (RLOO, Ahmadian et al. 2024): with n
        usable samples n / (n - 1) times as much; "batch" and "none" leave the rewards as they are.
      normalize_std: "group" divides by the group's standard deviation (GRPO); "batch" and "none" do not (Dr. GRPO,
        Liu et al. 2025). "group" needs a baseline of the group.

    Returns:
      (advantage_GC float32, valid_GC bool: graded)

    Raises:
      ValueError: a reward is infinite.
    """
    reward_GC = np.asarray(reward_GC, np.float64)
    if np.isinf(reward_GC).any():
        raise ValueError("advantages: a reward is infinite")
    valid_GC = ~np.isnan(reward_GC)
    advantage_GC = np.zeros(reward_GC.shape, np.float32)
    if baseline in ("batch", "none"):
        return np.where(valid_GC, reward_GC, advantage_GC).astype(np.float32), valid_GC
    for g, (rewards, valid) in enumerate(zip(reward_GC, valid_GC, strict=True)):
        usable = rewards[valid]
        if usable.size == 0 or usable.min() == usable.max():
            continue
        centred = usable - usable.mean()
        if baseline == "leave_one_out":
            centred *= usable.size / (usable.size - 1)
        advantage_GC[g, valid] = centred / (usable.std() + EPSILON) if normalize_std == "group" else centred
    return advantage_GC, valid_GC


def informative_groups(reward_GC: np.ndarray, counts_GC: np.ndarray) -> np.ndarray:
    """bool [G]: some sample that counts got another reward than the mean of its group. The others teach nothing."""
    centred_GC, _ = group_advantages(reward_GC, "group", "none")
    return ((centred_GC != 0) & counts_GC).any(axis=1)


def batch_advantages(
    config: AdvantageConfig, advantage_N: np.ndarray, mask_NT: np.ndarray, k1_NT: np.ndarray | None = None
) -> np.ndarray:
    """What `group_advantages` left to do, over the whole batch: in this order, where the config says so,

    - baseline "batch": less the mean over responses (REINFORCE with the average reward as baseline, Williams 1992);
    - kl_coef: less kl_coef times the KL penalties from each token to the end of its response (REINFORCE++, Hu et al.
      2025), so that the advantage is one of tokens;
    - normalize_std "batch": less the mean, and divided by the standard deviation, over all tokens of the batch
      (REINFORCE++). Each response counts as often as it has tokens.

    Args:
      mask_NT: bool, the response tokens that count. Others have no part in the means, and get 0.
      k1_NT: log-prob of the policy that sampled less that of the reference; needed with kl_coef.

    Returns:
      float32 [N]; [N, T] with kl_coef.
    """
    advantage_NT = np.broadcast_to(np.asarray(advantage_N, np.float64)[:, None], mask_NT.shape)
    if config.baseline == "batch":
        first_NT = mask_NT & (np.cumsum(mask_NT, axis=1) == 1)  # one token stands for its response
        advantage_NT = advantage_NT - _mean(advantage_NT[first_NT])
    if config.kl_coef > 0:
        penalty_NT = np.where(mask_NT, k1_NT, 0.0).astype(np.float64)
        advantage_NT = advantage_NT - config.kl_coef * np.cumsum(penalty_NT[:, ::-1], axis=1)[:, ::-1]
    if config.normalize_std == "batch":
        of_tokens = advantage_NT[mask_NT]
        centred_NT = advantage_NT - _mean(of_tokens)
        advantage_NT = centred_NT / (of_tokens.std() + EPSILON) if of_tokens.size else centred_NT
    advantage_NT = np.where(mask_NT, advantage_NT, 0.0).astype(np.float32)
    if config.kl_coef > 0:
        return advantage_NT
    return np.where(mask_NT.any(axis=1), advantage_NT[np.arange(len(mask_NT)), mask_NT.argmax(axis=1)], np.float32(0))


def _mean(x: np.ndarray) -> float:
    """Exactly the value where all are equal; 0 of nothing."""
    if x.size == 0:
        return 0.0
    return float(x[0]) if x.min() == x.max() else float(x.mean())
