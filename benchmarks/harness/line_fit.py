"""A line through times: what a message or a step takes before its first byte or row, and for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of the line that is least far from the points, relative to each; neither is below zero.

    ``fit_line([1, 2, 4], [3.0, 5.0, 9.0])`` is (1.0, 2.0).
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    unit = x_N.max()
    (intercept, per_unit), _ = nnls(np.stack([1 / y_N, x_N / unit / y_N], axis=1), np.ones(len(y_N)))
    return float(intercept), float(per_unit / unit)
