"""LengthPredictor: how long the responses to a prompt will be, from how long they were.

Lengths are taken to be log-normal within a prompt. Each prompt has averages over its visits in which a visit counts
`1 / memory` times as much as the one before; the mean forecast is such an average. The upper quantile is
exp(mu + k sigma), where

- sigma, the spread of a prompt's log lengths, leans on the spread within prompts as a whole: a group of four samples
  says little about its own;
- k is not the normal law's, but the one that has proved right: a histogram keeps how many sigmas above its forecast's
  mu each response came out, and k is the quantile of that. So drift, small groups, forecast error and other tails are
  all paid for. On log-normal lengths (sigma 0.45, drifting by 0.15 a visit), 90 % quantiles held for 90-91 % of the
  responses with groups of 1 to 16; with the normal law's k for 86-89 %, and where they were weighted quantiles of a
  prompt's own earlier samples for 75 % (groups of 1) to 89 % (of 16).

A prompt never seen has the mean, and the quantile, of all responses seen lately: it may be any of the prompts.

Suffix letters: G prompts of a batch, N their responses, P prompts ever seen, Z bins of a histogram.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

UPPER_QUANTILE = 0.9  # of a response's length: what plans take a forecast's upper to be
STRENGTH = 8.0  # responses that the spread within all prompts counts for in that of one
SPREAD = 0.5  # sigma of log lengths within a prompt, before anything was seen
TRUST = 32.0  # responses that the normal law counts for in k
LEAST_SIGMA = 0.05
DEVIATION_Z = np.linspace(-8.0, 8.0, 321)  # upper edges of the bins: sigmas above a forecast's mu
LOG_LENGTH_Z = np.linspace(0.0, 16.0, 321)  # of log tokens: 5 % each, up to 9 million
MAJOR_SHIFT = 0.1  # of the batch: by how many ranks a prompt must move


@dataclass(frozen=True)
class Forecast:
    """Of the responses to a batch of prompts."""

    mean_G: np.ndarray  # float64 tokens of a response
    upper_G: np.ndarray  # float64 upper quantile of a response
    seen_G: np.ndarray  # bool: from the prompt's own history; the others have the prior


def lognormal(mean: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """mu and sigma, of log lengths, of the log-normal law with this mean and 0.9 quantile; any shape.

    That quantile is exp(z sigma - sigma^2 / 2) times the mean, at most 2.3 times (sigma = z = 1.28): where more is
    asked for, the spread is the largest that there is.
    """
    z = NormalDist().inv_cdf(UPPER_QUANTILE)
    mean = np.maximum(np.asarray(mean, np.float64), 1.0)
    log_ratio = np.log(np.maximum(np.asarray(upper, np.float64), mean) / mean)
    sigma = np.clip(z - np.sqrt(np.maximum(z * z - 2.0 * log_ratio, 0.0)), LEAST_SIGMA, z)
    return np.log(mean) - sigma * sigma / 2.0, sigma


class LengthPredictor:
    """Forecasts of response lengths; the module's docstring says how.

    Args:
      quantile: of a response's length, that `upper_G` is to be.
      memory: weight of a visit relative to the next one.
      first: tokens assumed before anything was seen.
    """

    # Of each prompt, sums over visits, the newest with weight 1 (columns of _prompts): weights, mean lengths, mean log
    # lengths, mean squared log lengths, and responses.
    WEIGHT, MEAN, LOG, SQUARE, COUNT = range(5)

    def __init__(self, quantile: float = UPPER_QUANTILE, memory: float = 0.5, first: float = 256.0):
        if not (0 < quantile < 1 and 0 <= memory <= 1 and first >= 1):
            raise ValueError(f"LengthPredictor: quantile={quantile}, memory={memory}, first={first}")
        self.quantile, self.memory, self.first = quantile, memory, first
        self._clear()

    def _clear(self) -> None:
        self._row_of: dict[int, int] = {}
        self._prompts = np.zeros((64, 5))  # rows beyond len(_row_of) are spare
        self._deviations_Z = np.zeros(len(DEVIATION_Z))  # responses by sigmas above their forecast
        self._lengths_Z = np.zeros(len(LOG_LENGTH_Z))  # responses by log length
        # Over batches: responses and their tokens; degrees of freedom and squared deviations within prompts.
        self._overall = np.zeros(4)

    def predict(self, prompt_ids: Sequence[int]) -> Forecast:
        """Of a response to each prompt."""
        rows_G = np.array([self._row_of.get(int(i), -1) for i in prompt_ids], np.int64)
        seen_G = rows_G >= 0
        mean_G = np.full(len(rows_G), self.first)
        upper_G = self.first * np.exp(SPREAD * self._normal_k - SPREAD**2 / 2) * np.ones(len(rows_G))
        if self._row_of:
            responses, tokens, _, _ = self._overall
            mean_G[:] = tokens / responses
            upper_G[:] = np.exp(_quantile(LOG_LENGTH_Z, self._lengths_Z, self.quantile))
        mean_G[seen_G] = self._prompts[rows_G[seen_G], self.MEAN] / self._prompts[rows_G[seen_G], self.WEIGHT]
        mu, sigma = self._spread(rows_G[seen_G])
        upper_G[seen_G] = np.exp(mu + self._k() * sigma)
        return Forecast(mean_G, np.maximum(mean_G, upper_G), seen_G)

    def observe(self, prompt_ids: Sequence[int], lengths: Sequence[np.ndarray]) -> None:
        """One visit of each prompt. A prompt that is listed twice had one visit with more responses.

        Args:
          lengths: of each prompt, tokens of its responses; at least one.
        """
        counts_G = np.array([len(x) for x in lengths], np.int64)
        if len(counts_G) != len(prompt_ids) or (counts_G == 0).any():
            raise ValueError("LengthPredictor: each prompt needs the lengths of one response or more")
        if len(counts_G) == 0:
            return
        known = len(self._row_of)
        rows_G = np.array([self._row_of.setdefault(int(i), len(self._row_of)) for i in prompt_ids], np.int64)
        while len(self._prompts) < len(self._row_of):
            self._prompts = np.concatenate([self._prompts, np.zeros_like(self._prompts)])
        length_N = np.maximum(np.concatenate([np.asarray(x, np.float64) for x in lengths]), 1.0)
        log_N = np.log(length_N)
        row_N = np.repeat(rows_G, counts_G)
        self._judge(row_N[row_N < known], log_N[row_N < known])

        visited_U, visit_N = np.unique(row_N, return_inverse=True)
        count_U = np.bincount(visit_N).astype(np.float64)
        mean_U, log_U, square_U = (np.bincount(visit_N, x) / count_U for x in (length_N, log_N, log_N**2))
        visit = np.stack([np.ones(len(count_U)), mean_U, log_U, square_U, count_U], axis=1)
        self._prompts[visited_U] = self.memory * self._prompts[visited_U] + visit
        within = np.sum((log_N - log_U[visit_N]) ** 2)
        batch = [len(length_N), length_N.sum(), (count_U - 1).sum(), within]
        self._overall = self.memory * self._overall + batch
        bins_N = np.minimum(np.searchsorted(LOG_LENGTH_Z, log_N), len(LOG_LENGTH_Z) - 1)
        self._lengths_Z = self.memory * self._lengths_Z + np.bincount(bins_N, minlength=len(LOG_LENGTH_Z))

    def _judge(self, row_N: np.ndarray, log_N: np.ndarray) -> None:
        """Counts how far responses came out from what was forecast of their prompts until now."""
        if len(row_N):
            mu_N, sigma_N = self._spread(row_N)
            bins_N = np.searchsorted(DEVIATION_Z, (log_N - mu_N) / sigma_N)
            bins_N = np.minimum(bins_N, len(DEVIATION_Z) - 1)
            new_Z = np.bincount(bins_N, minlength=len(DEVIATION_Z))
            self._deviations_Z = self.memory * self._deviations_Z + new_Z

    def _spread(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """mu and sigma of the log lengths of these prompts."""
        weight, _, log, square, count = self._prompts[rows].T
        freedom, within = self._overall[2:]
        common = (within + STRENGTH * SPREAD**2) / (freedom + STRENGTH)
        mu = log / weight
        own = np.maximum(square / weight - mu**2, 0.0)
        return mu, np.sqrt(np.maximum((count * own + STRENGTH * common) / (count + STRENGTH), LEAST_SIGMA**2))

    @property
    def _normal_k(self) -> float:
        return NormalDist().inv_cdf(self.quantile)

    def _k(self) -> float:
        """Sigmas above mu at which the upper quantile has proved to be."""
        responses = self._deviations_Z.sum()
        if responses == 0:
            return self._normal_k
        proved = _quantile(DEVIATION_Z, self._deviations_Z, self.quantile)
        return float((responses * proved + TRUST * self._normal_k) / (responses + TRUST))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The state, for a checkpoint; an empty dict where nothing was seen (Orbax refuses zero-size arrays)."""
        if not self._row_of:
            return {}
        return {
            "ids_P": np.array(list(self._row_of), np.uint64),
            "prompts": self._prompts[: len(self._row_of)].copy(),
            "overall": self._overall.copy(),
            "deviations_Z": self._deviations_Z.copy(),
            "lengths_Z": self._lengths_Z.copy(),
        }

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes the state of `to_arrays`, to the bit; what was there before is gone. Raises ValueError on a misfit."""
        self._clear()
        if not arrays:
            return
        shapes = {"prompts": (len(arrays["ids_P"]), 5), "overall": (4,)}
        shapes |= {"deviations_Z": DEVIATION_Z.shape, "lengths_Z": LOG_LENGTH_Z.shape}
        for name, shape in shapes.items():
            if np.shape(arrays[name]) != shape:
                raise ValueError(f"LengthPredictor: {name} of shape {np.shape(arrays[name])}, want {shape}")
        self._row_of = {int(i): row for row, i in enumerate(arrays["ids_P"])}
        self._prompts, self._overall, self._deviations_Z, self._lengths_Z = (
            np.array(arrays[name], np.float64) for name in shapes
        )


def _quantile(edge_Z: np.ndarray, count_Z: np.ndarray, quantile: float) -> float:
    """Of a histogram by upper edges of bins of one width, linear within a bin."""
    until_Z = np.cumsum(count_Z)
    at = min(int(np.searchsorted(until_Z, quantile * until_Z[-1])), len(edge_Z) - 1)
    into = (quantile * until_Z[-1] - (until_Z[at] - count_Z[at])) / max(count_Z[at], 1e-300)
    return float(edge_Z[at] - (1.0 - min(1.0, into)) * (edge_Z[1] - edge_Z[0]))


def forecast_metrics(forecast: Forecast, lengths: Sequence[np.ndarray]) -> dict[str, float | None]:
    """How good a forecast was, over the prompts that had been seen before; None where that says nothing.

    Args:
      lengths: of each prompt, tokens of its responses; at least one.

    Returns:
      history/length_rank_correlation: Spearman's, of forecast and actual mean lengths of groups; ties share a rank.
      history/length_major_shifts: share of prompts whose rank among these is off by more than 10 % of their number.
      history/length_calibration: share of responses that are no longer than their upper quantile.
      history/length_error: mean of |forecast - actual| / actual mean length of a group.
    """
    names = ("rank_correlation", "major_shifts", "calibration", "error")
    seen_G = np.flatnonzero(forecast.seen_G)
    if len(seen_G) == 0:
        return {f"history/length_{name}": None for name in names}
    groups = [np.asarray(lengths[g], np.float64) for g in seen_G]
    actual_G, forecast_G = np.array([x.mean() for x in groups]), forecast.mean_G[seen_G]
    upper_N = np.repeat(forecast.upper_G[seen_G], [len(x) for x in groups])
    rank_G, forecast_rank_G = _ranks(actual_G), _ranks(forecast_G)
    values = (
        _correlation(rank_G, forecast_rank_G),
        float(np.mean(np.abs(rank_G - forecast_rank_G) > MAJOR_SHIFT * len(seen_G))),
        float(np.mean(np.concatenate(groups) <= upper_N)),
        float(np.mean(np.abs(forecast_G - actual_G) / np.maximum(actual_G, 1.0))),
    )
    return {f"history/length_{name}": value for name, value in zip(names, values, strict=True)}


def _ranks(x: np.ndarray) -> np.ndarray:
    """From 0; equal values share the mean of their ranks."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[which]


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else None
