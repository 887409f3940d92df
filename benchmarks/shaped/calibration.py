"""What the simulator is told of hosts and links, each figure measured by itself: no step that is to be predicted is
looked at.

- links: all-to-alls of the sizes that steps have: latency and bandwidth, as gloo gets them; and how much slower
  products are while messages move;
- computing: steps of other numbers of tokens, less what they were blocked by communication (``host_steps.PIECES``): a
  rate, what a chunk costs, and what a layer costs besides.

All ranks do the same at once, so that cores which ranks share are shared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.shaped.host_steps import (
    CHUNKS,
    MOST_TOKENS,
    SOME_TOKENS,
    ShapedCase,
    beside_ms,
    even_case,
    exchange_ms,
)
from moesys.config import ClusterSpec
from moesys.lab.calibrate.measurement import fit_line
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.simulator.rest_of_step import RestOfStep

# Kernels that ``simulator`` launches for a layer, forward and backward: for each chunk, and besides.
_LAUNCHES_A_CHUNK, _LAUNCHES_A_LAYER = 10, 2
_SMALL_BYTES = 1000
# Computing twice as many tokens takes at least so much longer; less is what a machine that is busy otherwise shows.
_LEAST_GROWTH = 1.25
# A terabyte a second.
_LEAST_MS_A_BYTE = 1e-9
_RUN_S = 600.0


@dataclass(frozen=True)
class LinkFigures:
    """latency_ms, ms_a_byte: of the line through ``exchange_ms``, by bytes that a rank sends to other hosts; inside_ms:
    the same to ranks of its own, or None. copy_share: part of computing that is lost beside messages.
    """

    latency_ms: float
    ms_a_byte: float
    copy_share: float
    exchange_ms: dict[int, float]
    inside_ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Calibration:
    """``cluster`` and ``rest`` are for the simulator; they follow from ``links`` and the milliseconds of computing."""

    cluster: ClusterSpec
    rest: RestOfStep
    links: LinkFigures
    computed_ms: dict[str, float]


def exchanges_ms(ranks: Ranks, case: ShapedCase, repeats: int, inside: bool = False) -> dict[int, float]:
    """All-to-alls as large as the case's, by bytes that a rank sends: of next to nothing, of the smallest of its
    chunks, and of all its rows at once. ``inside``: within hosts.
    """
    sizes = [_SMALL_BYTES, away_bytes(case) // CHUNKS, away_bytes(case)]
    asked = repeats, case.ranks_per_host, inside
    return {size: slowest(ranks.run(exchange_ms, size, *asked, timeout_s=_RUN_S)) for size in sizes}


def away_bytes(case: ShapedCase) -> int:
    """Of a rank's rows that go to other ranks, tokens being even."""
    shape = case.shape
    rows = even_case(case).num_tokens[0] * shape.top_k
    return round(rows * (1 - 1 / case.num_hosts) * shape.hidden_size * shape.bytes_per_element)


def link_figures(ranks: Ranks, case: ShapedCase, repeats: int) -> LinkFigures:
    """Of links that are shaped as the case has them."""
    found_ms = exchanges_ms(ranks, case, repeats)
    latency_ms, ms_a_byte = fit_line(list(found_ms), list(found_ms.values()))
    # What a link lets through at once is not its rate.
    ms_a_byte = max(ms_a_byte, 8e-3 / case.mbit_per_s * case.ranks_per_host)
    inside_ms = None
    if case.ranks_per_host > 1:
        found_inside_ms = exchanges_ms(ranks, case, repeats, inside=True)
        latency_inside_ms, inside_ms_a_byte = fit_line(list(found_inside_ms), list(found_inside_ms.values()))
        # Of few bytes noise may find that more take no longer.
        inside_ms = latency_inside_ms, max(inside_ms_a_byte, _LEAST_MS_A_BYTE)
    # Messages that are under way longer than the products take.
    first = ranks.run(beside_ms, case.shape, _SMALL_BYTES, 1, case.ranks_per_host, timeout_s=_RUN_S)
    num_bytes = round(2 * max(alone_ms[0] for alone_ms, _ in first) / ms_a_byte)
    by_rank = ranks.run(beside_ms, case.shape, num_bytes, repeats, case.ranks_per_host, timeout_s=_RUN_S)
    alone_ms, together_ms = (slowest([rank[which] for rank in by_rank]) for which in (0, 1))
    copy_share = min(0.9, max(0.0, 1 - alone_ms / together_ms))
    return LinkFigures(latency_ms, ms_a_byte, copy_share, found_ms, inside_ms)


def calibration(case: ShapedCase, links: LinkFigures, computed_ms: Mapping[str, float]) -> Calibration:
    """``computed_ms``: of ``host_steps.PIECES``, the slowest rank's."""
    shape = case.shape
    most_ms, some_ms, chunks_ms = (computed_ms[name] for name in ("most", "some", "chunks"))
    rows = even_case(case).num_tokens[0] * shape.top_k
    fixed_ms, row_ms = fit_line(
        [rows * SOME_TOKENS, rows * MOST_TOKENS], [min(some_ms, most_ms / _LEAST_GROWTH), most_ms]
    )
    # In chunks computing goes on beside messages, as long as there are any: what it loses to them is no launch's.
    moved_ms = 4 * (links.latency_ms + MOST_TOKENS * away_bytes(case) * links.ms_a_byte)
    lost_ms = links.copy_share * min(moved_ms, chunks_ms)
    launch_ms = max(0.0, chunks_ms - most_ms - lost_ms) / (CHUNKS - 1) / _LAUNCHES_A_CHUNK
    other_ms = max(0.0, fixed_ms - (_LAUNCHES_A_CHUNK + _LAUNCHES_A_LAYER) * launch_ms)
    # ``cost.expert_seconds``, forward and backward.
    flops_a_row = 18 * shape.hidden_size * shape.intermediate_size
    cluster = case.cluster.replace(
        inter_node_gb_per_s=1e-6 / links.ms_a_byte * case.ranks_per_host,
        inter_node_us=links.latency_ms * 1e3,
        expert_tflops=flops_a_row / (row_ms * 1e-3) / 1e12,
        launch_us=launch_ms * 1e3,
        copy_share=links.copy_share,
    )
    if links.inside_ms is not None:
        latency_ms, ms_a_byte = links.inside_ms
        cluster = cluster.replace(intra_node_gb_per_s=1e-6 / ms_a_byte, intra_node_us=latency_ms * 1e3)
    # The simulator counts the rest of a layer once forward and twice backward.
    return Calibration(cluster, RestOfStep(other_seconds=other_ms * 1e-3 / 3), links, dict(computed_ms))


def slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Of the slowest rank in each repetition, the median."""
    return statistics.median([max(of_ranks) for of_ranks in zip(*by_rank, strict=True)])
