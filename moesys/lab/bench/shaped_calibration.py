"""What the simulator is told of hosts and links, each figure measured by itself: no step that is to be predicted is
looked at.

- computing: the first strategy's step over links as fast as the machine, less what it was blocked by communication, of
  all tokens, of half of them, and of all in chunks: a rate, what a chunk costs, and what a layer costs besides;
- links: all-to-alls of several sizes: latency and bandwidth, as gloo gets them;
- how much slower products are while messages move.

All ranks do the same at once, so that cores which ranks share are shared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.lab.bench.shaped_case import Case, beside_ms, compute_ms, exchange_ms
from moesys.lab.ranks import LocalRanks
from moesys.lab.shaped_links import ShapedLinks
from moesys.overlap.simulator import RestOfStep

# So fast that only gloo's own time is left.
UNSHAPED_MBIT_PER_S = 20_000.0
_CHUNKS = 4
# Kernels that ``overlap.simulator`` launches for a layer, forward and backward: for each chunk, and besides.
_LAUNCHES_A_CHUNK, _LAUNCHES_A_LAYER = 10, 2
_RUN_S = 600.0


@dataclass(frozen=True)
class Calibration:
    """``cluster`` and ``rest`` are for the simulator; they follow from the milliseconds, by work and by bytes."""

    cluster: ClusterSpec
    rest: RestOfStep
    compute_ms: dict[str, float]
    exchange_ms: dict[int, float]


def calibrate(ranks: LocalRanks, links: ShapedLinks, case: Case, repeats: int, seed: int) -> Calibration:
    """Over the case's links, which are shaped when this returns."""
    links.reshape(UNSHAPED_MBIT_PER_S)
    by_rank = ranks.run(compute_ms, case, _CHUNKS, repeats, seed, timeout_s=_RUN_S)
    computed_ms = {name: _slowest([rank[name] for rank in by_rank]) for name in by_rank[0]}
    whole_ms, half_ms, chunks_ms = (computed_ms[name] for name in ("tokens", "half", "chunks"))
    links.reshape(case.mbit_per_s)
    sizes = [1000, *(round(case.mbit_per_s * 125 * milliseconds) for milliseconds in (10, 40))]
    exchanges_ms = {size: _slowest(ranks.run(exchange_ms, size, repeats, timeout_s=_RUN_S)) for size in sizes}
    latency_ms, ms_a_byte = fit_line(list(exchanges_ms), list(exchanges_ms.values()))
    alone_ms, together_ms = _beside(ranks, case, ms_a_byte, repeats)

    shape, layers, rows = case.shape, case.num_layers, max(case.num_tokens) * case.shape.top_k
    # On a machine that is busy with something else half may seem as long as all.
    fixed_ms, row_ms = fit_line([rows / 2, rows], [min(half_ms, 0.9 * whole_ms), whole_ms])
    launch_ms = max(0.0, chunks_ms - whole_ms) / (_CHUNKS - 1) / (_LAUNCHES_A_CHUNK * layers)
    # A rank that sends nothing to itself computes what it is sent: tokens are even, so as many rows as it has.
    flops_a_row = 18 * shape.hidden_size * shape.intermediate_size * layers
    other_ms = max(0.0, fixed_ms / layers - (_LAUNCHES_A_CHUNK + _LAUNCHES_A_LAYER) * launch_ms)
    cluster = case.cluster.replace(
        inter_node_gb_per_s=1e-6 / ms_a_byte,
        inter_node_us=latency_ms * 1e3,
        expert_tflops=flops_a_row / (row_ms * 1e-3) / 1e12,
        launch_us=launch_ms * 1e3,
        copy_share=min(0.9, max(0.0, 1 - alone_ms / together_ms)),
    )
    # The simulator counts the rest of a layer once forward and twice backward.
    rest = RestOfStep(other_seconds=other_ms * 1e-3 / 3)
    return Calibration(cluster, rest, computed_ms, exchanges_ms)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of the line that is least far from the points, relative to each; neither is below zero.

    ``fit_line([1, 2, 4], [3.0, 5.0, 9.0])`` is (1.0, 2.0).
    """
    over_y = 1 / np.asarray(y, dtype=np.float64)
    columns = np.stack([over_y, np.asarray(x) * over_y], axis=1)
    intercept, slope = np.linalg.lstsq(columns, np.ones(len(over_y)), rcond=None)[0]
    if intercept < 0:
        return 0.0, float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    if slope < 0:
        return float(over_y.sum() / (over_y**2).sum()), 0.0
    return float(intercept), float(slope)


def _beside(ranks: LocalRanks, case: Case, ms_a_byte: float, repeats: int) -> tuple[float, float]:
    """Products alone, and beside an all-to-all that takes longer than they."""
    first = ranks.run(beside_ms, case.shape, 1000, 1, timeout_s=_RUN_S)
    takes_ms = max(alone_ms[0] for alone_ms, _ in first)
    by_rank = ranks.run(beside_ms, case.shape, round(2 * takes_ms / ms_a_byte), repeats, timeout_s=_RUN_S)
    return _slowest([alone for alone, _ in by_rank]), _slowest([together for _, together in by_rank])


def _slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Of the slowest rank in each repetition, the median."""
    return statistics.median([max(of_ranks) for of_ranks in zip(*by_rank, strict=True)])
