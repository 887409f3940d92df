"""From times to the fields of a ``ClusterSpec``: lines through messages, and a rate and tiles through products.

Fits are of relative errors, so that short and long times count alike, and of medians, so that a disturbed window counts
little. Products are predicted by the cost model itself (``cost.pass_seconds``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from moesys.bench.calibrate.rank_timings import ExpertCase
from moesys.bench.harness.line_fit import fit_line
from moesys.config import ClusterSpec, DType, ModelShape
from moesys.cost import pass_seconds

# Of a rank's matmul rate, TFLOP/s: from less than a slow core to more than any GPU.
RATES = (1e-5, 1e5)
# Larger tiles must explain this much better: where no case tells them apart, the smallest are taken.
CLEARLY_BETTER = 0.95


@dataclass(frozen=True)
class MessageLine:
    """Seconds of a message of B bytes: latency + B / rate.

    errors: predicted over measured, less 1, by bytes.
    """

    latency_us: float
    gb_per_s: float
    errors: dict[int, float]

    def seconds(self, num_bytes: float) -> float:
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


def fit_messages(seconds: Mapping[int, float]) -> MessageLine:
    """The line through (bytes, median seconds), at least two sizes; no latency is negative.

    Where times do not grow with size, the rate is that of the largest message.
    """
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} sizes of messages are no line; measure two or more")
    latency_s, byte_s = fit_line(list(seconds), list(seconds.values()))
    if byte_s <= 0:
        latency_s, byte_s = 0.0, seconds[max(seconds)] / max(seconds)
    errors = {num_bytes: (latency_s + num_bytes * byte_s) / of - 1 for num_bytes, of in seconds.items()}
    return MessageLine(latency_s * 1e6, 1e-9 / byte_s, errors)


@dataclass(frozen=True)
class ProductFit:
    """``cluster`` with the rate and the tiles that explain the products best. errors: predicted over measured, less 1,
    in the order of the cases.
    """

    cluster: ClusterSpec
    errors: list[float]


def fit_products(
    cases: Sequence[ExpertCase],
    seconds: Sequence[float],
    cluster: ClusterSpec,
    dtype: DType,
    tiles: Sequence[tuple[int, int]],
) -> ProductFit:
    """``cluster`` gives memory, multiprocessors and launches; of ``tiles`` (rows, columns), in rising order, the first
    is taken that no later one explains clearly better.
    """
    measured_C = np.asarray(seconds)
    best: ProductFit | None = None
    for tile_rows, tile_columns in tiles:
        tiled = cluster.replace(tile_rows=tile_rows, tile_columns=tile_columns)

        def error(log_rate: float, tiled: ClusterSpec = tiled) -> float:
            predicted_C = _predicted(cases, tiled.replace(expert_tflops=float(np.exp(log_rate))), dtype)
            return float(np.square(np.log(predicted_C / measured_C)).sum())

        bounds = (float(np.log(RATES[0])), float(np.log(RATES[1])))
        rate = float(np.exp(minimize_scalar(error, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))
        fitted = tiled.replace(expert_tflops=rate)
        errors_C = _predicted(cases, fitted, dtype) / measured_C - 1
        found = ProductFit(fitted, errors_C.tolist())
        if best is None or _rms(found) < CLEARLY_BETTER * _rms(best):
            best = found
    assert best is not None
    return best


def _rms(fit: ProductFit) -> float:
    return float(np.sqrt(np.square(np.log1p(fit.errors)).mean()))


def _predicted(cases: Sequence[ExpertCase], cluster: ClusterSpec, dtype: DType) -> np.ndarray:
    return np.array([predicted_seconds(case, cluster, dtype) for case in cases])


def predicted_seconds(case: ExpertCase, cluster: ClusterSpec, dtype: DType) -> float:
    """Of a case's products on one rank, by the cost model."""
    model = ModelShape(
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_experts=len(case.rows),
        top_k=1,
        dtype=dtype,
    )
    return float(pass_seconds(np.array([case.rows], dtype=np.float64), model, cluster, "forward")[0])
