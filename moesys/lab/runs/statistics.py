"""Tells whether a difference is real: ratios paired by seed, and their interval.

Every strategy sees the same routing under one seed, so a seed that is slow for all changes no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# By the signs of its ratios, even the clearest difference of 5 seeds has p = 2 / 2^5 > 0.05.
MIN_SEEDS = 6
CONFIDENCE = 0.95

Verdict = Literal["faster", "slower", "~", "too few seeds to tell"]


@dataclass(frozen=True)
class PairedRatio:
    """How many times faster than a baseline: the geometric mean over seeds of baseline time / own time.

    low, high: its 95 % interval; None for a single seed, which tells nothing about the spread.
    """

    n: int
    estimate: float
    low: float | None
    high: float | None

    def __format__(self, form: str) -> str:
        """Returns ``1.23 [1.10, 1.38]``, whose numbers have the form; a single seed has no interval."""
        return f"{self.estimate:{form}}" + ("" if self.low is None else f" [{self.low:{form}}, {self.high:{form}}]")

    @property
    def holds_one(self) -> bool:
        """True if the interval contains 1, which means no difference."""
        return self.low is None or self.high is None or self.low <= 1 <= self.high

    @property
    def verdict(self) -> Verdict:
        if self.n < MIN_SEEDS:
            return "too few seeds to tell"
        if self.holds_one:
            return "~"
        return "faster" if self.estimate > 1 else "slower"


def paired_ratio(
    baseline: Mapping[int, Sequence[float]], contestant: Mapping[int, Sequence[float]]
) -> PairedRatio | None:
    """Returns the ratio ``baseline / contestant`` from the seeds that both have; None if they share none.

    A seed gives one number, the ratio of the medians of its samples: steps of one trial are not independent, trials
    are. On the n logarithms x of these ratios stands Student's interval, mean ± t(n-1) · s / √n. It leans on the
    logarithms being roughly normal, and then holds the truth in 95 % of cases at any n. A bootstrap, BCa included,
    needs no such assumption but can never reach beyond the smallest and largest ratio, between which lies the median
    of their distribution in only 1 - 2 / 2^n of cases: 75 % at n = 3. As logarithms are averaged, swapping the two
    gives the reciprocal.

    ``paired_ratio({0: [2.0], 1: [8.0]}, {0: [1.0], 1: [1.0]})`` estimates 4.0.

    Raises ValueError for a sample that is not a positive finite number.
    """
    ratios = seed_ratios(baseline, contestant)
    if not ratios:
        return None
    log_N = np.log(list(ratios.values()))
    n, mean = len(log_N), float(log_N.mean())
    low, high = None, None
    if n > 1:
        # This import is here because only tables of several seeds need scipy.
        from scipy import stats

        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * log_N.std(ddof=1) / np.sqrt(n))
        low, high = float(np.exp(mean - half)), float(np.exp(mean + half))
    return PairedRatio(n, float(np.exp(mean)), low, high)


def seed_ratios(baseline: Mapping[int, Sequence[float]], contestant: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Returns, for each seed that both have, the ratio of the medians of its samples, ``baseline / contestant``.

    Raises ValueError for a sample that is not a positive finite number.
    """
    seeds = sorted(baseline.keys() & contestant.keys())
    return {seed: _median(baseline[seed]) / _median(contestant[seed]) for seed in seeds}


def _median(samples: Sequence[float]) -> float:
    median = float(np.median(samples)) if len(samples) else float("nan")
    if not 0 < median < float("inf"):
        raise ValueError(f"the median of {len(samples)} samples is {median}, and a ratio needs a positive number")
    return median


@dataclass(frozen=True)
class Quantiles:
    """``n`` samples: their median, and their 20th and 80th percentile."""

    median: float
    p20: float
    p80: float
    n: int

    @staticmethod
    def of(samples: Sequence[float], method: Literal["linear", "nearest"] = "linear") -> Quantiles:
        """Returns the spread of samples; ``method``: how a percentile between two samples is found."""
        low, high = (float(value) for value in np.percentile(samples, (20, 80), method=method))
        return Quantiles(float(np.median(samples)), low, high, len(samples))

    @staticmethod
    def of_ratios(longer_ms: Sequence[float], shorter_ms: Sequence[float]) -> Quantiles:
        """Returns the spread of ``longer / shorter`` in each repetition, so that what slows a whole repetition cancels.

        ``Quantiles.of_ratios([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])`` has the median 2.0.
        """
        return Quantiles.of(np.asarray(longer_ms) / np.asarray(shorter_ms))

    def times(self, factor: float) -> Quantiles:
        return Quantiles(self.median * factor, self.p20 * factor, self.p80 * factor, self.n)

    def __format__(self, form: str) -> str:
        """Returns ``1.23 [1.10, 1.38]``; ``form`` is the format of each number, by default with two digits."""
        return "{0:{3}} [{1:{3}}, {2:{3}}]".format(self.median, self.p20, self.p80, form or ".2f")

    def __str__(self) -> str:
        return format(self)
