"""predict: from the loads that were to the load that a layout is planned for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

import numpy as np

from moesys.config import Ema, Last, Predictor, WindowMean
from moesys.load import LoadMatrix

# An Ema's result counts 1/256 tokens, so that experts with few tokens keep their differences.
EMA_UNITS_PER_TOKEN = 256
EMA_WEIGHT_BITS = 24
EMA_SMALLEST_WEIGHT = 1e-6
LARGEST_SUM = 2**62


def window(config: Predictor) -> int:
    """How many of the newest loads a predictor needs; older ones may be dropped.

    ``Ema`` weighs the load of k steps ago by decay^k of the newest; loads that weigh less than 1e-6 are left out:
    39 loads are kept at decay 0.7, 1375 at 0.99.
    """
    match config:
        case Last():
            return 1
        case WindowMean():
            return config.steps
        case Ema():
            if config.decay <= EMA_SMALLEST_WEIGHT:
                return 1
            return math.ceil(math.log(EMA_SMALLEST_WEIGHT) / math.log(config.decay))
        case _:
            assert_never(config)


def predict(history: Sequence[LoadMatrix], config: Predictor) -> LoadMatrix:
    """The load to plan for, from the loads so far, oldest first; all of one shape. Only its proportions mean something.

    ``Last`` returns the newest load; ``WindowMean`` the sum of the newest ``steps`` (fewer at the start), which is
    their mean without its rounding; ``Ema`` the weighted mean in 1/256 tokens, rounded half up, with weights decay^k
    of the newest that sum to 1 over the loads there are, so that a short history is not drawn towards its first load.
    Weights are 24-bit integers: no floating point reaches the result.

    Raises ValueError for an empty history, loads of different shapes, and sums beyond 2**62.
    """
    if not history:
        raise ValueError("history is empty; give at least one load (before the first one, plan on a uniform load)")
    shapes = {load.tokens_RE.shape for load in history}
    if len(shapes) > 1:
        raise ValueError(
            f"history has loads of shapes {sorted(shapes)}; give loads of one cluster and model, "
            "and begin a new history when either changes"
        )
    newest = [load.tokens_RE for load in history[-window(config) :]]
    match config:
        case Last():
            return history[-1]
        case WindowMean():
            _check_sum(newest, len(newest))
            return LoadMatrix(np.sum(newest, axis=0))
        case Ema():
            return LoadMatrix(_ema(newest, config.decay))
        case _:
            assert_never(config)


def _ema(tokens_KRE: list[np.ndarray], decay: float) -> np.ndarray:
    """Weighted mean, [R, E], of K load arrays, oldest first, in 1/256 tokens."""
    one = 1 << EMA_WEIGHT_BITS
    step = round(decay * one)
    weights = [one]
    while len(weights) < len(tokens_KRE):
        weights.append(weights[-1] * step >> EMA_WEIGHT_BITS)
    total = sum(weights)
    _check_sum(tokens_KRE, total)
    weighted_RE = sum(weight * tokens_RE for weight, tokens_RE in zip(weights, reversed(tokens_KRE), strict=True))
    whole_RE, rest_RE = np.divmod(weighted_RE, total)
    return whole_RE * EMA_UNITS_PER_TOKEN + (rest_RE * EMA_UNITS_PER_TOKEN + total // 2) // total


def _check_sum(tokens_KRE: list[np.ndarray], total_weight: int) -> None:
    largest = max(int(tokens_RE.max()) for tokens_RE in tokens_KRE)
    if largest * total_weight >= LARGEST_SUM:
        raise ValueError(
            f"history has a count of {largest} tokens, and the sum with weights of {total_weight} may pass 2**62; "
            "use a smaller decay or fewer steps, or predictor=Last()"
        )
