"""A line through measured times: the latency of a message or step, and the time per byte or row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns intercept and slope, neither negative, of the line with the least relative distance from the points.

    ``fit_line([1, 2, 4], [3.0, 5.0, 9.0])`` is (1.0, 2.0).
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    unit = x_N.max()
    (intercept, per_unit), _ = nnls(np.stack([1 / y_N, x_N / unit / y_N], axis=1), np.ones(len(y_N)))
    return float(intercept), float(per_unit / unit)
