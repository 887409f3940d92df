"""From times to the fields of a ``ClusterSpec``: lines through messages, tiles and rates through what is computed.

Fits are of relative errors, so that short and long times count alike, and of medians, so that a disturbed window counts
little. What is computed is predicted by the cost model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from benchmarks.calibrate.block_timings import AttentionCase, ElementwiseCase
from benchmarks.calibrate.expert_passes import ExpertCase, Pass
from benchmarks.harness.line_fit import fit_line
from moesys.config import ClusterSpec, DType
from moesys.config.base import BYTES_PER_ELEMENT
from moesys.cost import ExpertPass, FloatArray, attention_rate, elementwise_seconds, pass_seconds

# TFLOP/s or GB/s of a rank: from less than a slow core to more than any GPU.
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
class RateFit:
    """A rate, and errors at it: predicted over measured, less 1, by case."""

    rate: float
    errors: list[float]

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.square(np.log1p(self.errors)).mean()))


def fit_rate(predicted: Callable[[float], FloatArray], seconds: Sequence[float]) -> RateFit:
    """The rate at which seconds ``predicted`` [C] for all cases come nearest to those measured."""
    measured_C = np.asarray(seconds)

    def error(log_rate: float) -> float:
        return float(np.square(np.log(predicted(float(np.exp(log_rate))) / measured_C)).sum())

    bounds = (float(np.log(RATES[0])), float(np.log(RATES[1])))
    rate = float(np.exp(minimize_scalar(error, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))
    return RateFit(rate, (predicted(rate) / measured_C - 1).tolist())


def fit_products(
    cases: Sequence[ExpertCase],
    seconds: Sequence[float],
    cluster: ClusterSpec,
    dtype: DType,
    tiles: Sequence[tuple[int, int]],
) -> tuple[ClusterSpec, RateFit]:
    """``cluster`` with the rate and the tiles that explain forward passes of ``cases`` best.

    ``cluster`` gives memory, multiprocessors and launches; of ``tiles`` (rows, columns), in rising order, the first
    is taken that no later one explains clearly better.
    """
    best: tuple[ClusterSpec, RateFit] | None = None
    for tile_rows, tile_columns in tiles:
        tiled = cluster.replace(tile_rows=tile_rows, tile_columns=tile_columns)

        def predicted(rate: float, tiled: ClusterSpec = tiled) -> FloatArray:
            with_rate = tiled.replace(expert_tflops=rate)
            return np.array([pass_of_case(case, "forward", with_rate, dtype) for case in cases])

        found = fit_rate(predicted, seconds)
        if best is None or found.rms < CLEARLY_BETTER * best[1].rms:
            best = tiled.replace(expert_tflops=found.rate), found
    assert best is not None
    return best


def pass_of_case(case: ExpertCase, of: Pass, cluster: ClusterSpec, dtype: DType) -> float:
    """Seconds of a pass on one rank, by the cost model."""
    rows_RE = np.array([case.rows], dtype=np.float64)
    parts: tuple[ExpertPass, ...] = ("input_gradients", "weight_gradients") if of == "backward" else (of,)
    return float(sum(pass_seconds(rows_RE, case.shape(dtype), cluster, part)[0] for part in parts))


def attention_of_case(case: AttentionCase, cluster: ClusterSpec, backward: bool) -> float:
    """Seconds of one way, as ``simulator.model.rest_seconds`` has them."""
    flops = case.backward_flops if backward else case.flops
    return flops / attention_rate(cluster, backward) + cluster.launch_us * 1e-6


def elementwise_of_case(case: ElementwiseCase, cluster: ClusterSpec, dtype: DType, backward: bool) -> float:
    """Seconds of one way, as ``simulator.model.rest_seconds`` has them."""
    element_bytes = BYTES_PER_ELEMENT[dtype]
    num_bytes = case.backward_bytes(element_bytes) if backward else case.forward_bytes(element_bytes)
    return elementwise_seconds(num_bytes, cluster, backward) + case.num_kernels * cluster.launch_us * 1e-6
