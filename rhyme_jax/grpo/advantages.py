"""Group-relative advantages (Shao et al. 2024, DeepSeekMath, section 4.1)."""

import numpy as np

EPSILON = 1e-6  # added to the standard deviation of a group's rewards


def group_advantages(reward_GC: np.ndarray, normalize_std: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Each sample's reward relative to its group of C samples of one prompt.

    Computed in float64 and exactly 0 where a group's rewards are equal (a rounded mean in float32 would turn
    twelve rewards of 1.8 into advantages of 0.19) and for a group with one usable sample.

    Args:
      reward_GC: rewards; NaN marks a grade that failed. Such a sample takes no part and gets no gradient.
      normalize_std: divide by the group's standard deviation (GRPO) or not (Dr. GRPO, Liu et al. 2025).

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
    for g, (rewards, valid) in enumerate(zip(reward_GC, valid_GC, strict=True)):
        usable = rewards[valid]
        if usable.size == 0 or usable.min() == usable.max():
            continue
        centred = usable - usable.mean()
        advantage_GC[g, valid] = centred / (usable.std() + EPSILON) if normalize_std else centred
    return advantage_GC, valid_GC
