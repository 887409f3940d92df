"""Measures what the simulator knows of hosts and links. Each figure is measured by itself; no step that is to be
predicted contributes to it.

- Links: all-to-alls of the sizes that steps have, for latency and bandwidth, and how much slower products are while
  messages move.
- Computation in the cases of one layer: steps of fewer tokens (``layers.PIECES``), less the time for which
  communication blocked them, for the rate of experts, the cost of a chunk, and the cost of the rest of a layer.

All ranks do the same at once, so that cores which ranks share are shared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.contest import Outcome
from benchmarks.harness.stopwatch import interleave, repeated_ms, wall_ms
from benchmarks.shaped.cases import ShapedCase
from benchmarks.shaped.layers import CHUNKS, MOST_TOKENS, PIECES, SOME_TOKENS, even_case
from moesys.config import ClusterSpec, ModelShape
from moesys.lab.calibrate.measurement import fit_line
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.overlap.comm.channel import Channel, exchange
from moesys.overlap.comm.record import Meter, Recorder
from moesys.simulator.rest_of_step import RestOfStep

# Kernels that the simulator launches per chunk, and besides per layer, forward and backward.
_LAUNCHES_A_CHUNK, _LAUNCHES_A_LAYER = 10, 2
_SMALL_BYTES = 1000
# Computing twice as many tokens takes at least so much longer; a smaller ratio comes from other load on the machine.
_LEAST_GROWTH = 1.25
# A terabyte per second.
_LEAST_MS_A_BYTE = 1e-9
_RUN_S = 600.0
# Products that are timed beside messages have as many rows as a chunk gives an expert, and take milliseconds.
_PRODUCT_ROWS, _PRODUCTS = 128, 10
# The number of messages per repetition that show how late a host sees them.
_MESSAGES = 10


@dataclass(frozen=True)
class LinkFigures:
    """Measured links.

    Attributes:
        latency_ms, ms_a_byte: the line through ``exchange_ms``, which is by bytes that a rank sends to other hosts.
        inside_ms: the same two figures between ranks of a host; None for hosts of one rank.
        copy_share: the part of the computing speed that is lost beside messages.
    """

    latency_ms: float
    ms_a_byte: float
    copy_share: float
    exchange_ms: dict[int, float]
    inside_ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Calibration:
    """The figures that the simulator uses. ``rest`` is the rest of a layer; it is None for models, whose layers are
    simulated as a whole.
    """

    cluster: ClusterSpec
    links: LinkFigures
    rest: RestOfStep | None = None


def calibration(case: ShapedCase, links: LinkFigures, computed_ms: Mapping[str, float]) -> Calibration:
    """Returns what follows from the links and, of ``layers.PIECES``, the slowest rank's computing time."""
    shape = case.shape
    most_ms, some_ms, chunks_ms = (computed_ms[name] for name in PIECES)
    rows = even_case(case).num_tokens[0] * shape.top_k
    some_ms = min(some_ms, most_ms / _LEAST_GROWTH)
    fixed_ms, row_ms = fit_line([rows * SOME_TOKENS, rows * MOST_TOKENS], [some_ms, most_ms])
    # In chunks, computation goes on beside messages as long as there are any; what it loses to them is no launch's.
    moved_ms = 4 * (links.latency_ms + MOST_TOKENS * away_bytes(case) * links.ms_a_byte)
    lost_ms = links.copy_share * min(moved_ms, chunks_ms)
    launch_ms = max(0.0, chunks_ms - most_ms - lost_ms) / (CHUNKS - 1) / _LAUNCHES_A_CHUNK
    other_ms = max(0.0, fixed_ms - (_LAUNCHES_A_CHUNK + _LAUNCHES_A_LAYER) * launch_ms)
    # As ``cost.expert_seconds`` counts them, forward and backward.
    flops_a_row = 18 * shape.hidden_size * shape.intermediate_size
    computing = {"expert_tflops": flops_a_row / (row_ms * 1e-3) / 1e12, "launch_us": launch_ms * 1e3}
    cluster = with_links(case.cluster.replace(**computing), links, case.ranks_per_host)
    # The simulator counts the rest of a layer once forward and twice backward.
    return Calibration(cluster, links, RestOfStep(other_seconds=other_ms * 1e-3 / 3))


def with_links(cluster: ClusterSpec, links: LinkFigures, ranks_per_host: int = 1) -> ClusterSpec:
    """Returns the cluster with the measured links."""
    cluster = cluster.replace(
        inter_node_gb_per_s=1e-6 / links.ms_a_byte * ranks_per_host,
        inter_node_us=links.latency_ms * 1e3,
        copy_share=links.copy_share,
    )
    if links.inside_ms is None:
        return cluster
    latency_ms, ms_a_byte = links.inside_ms
    return cluster.replace(intra_node_gb_per_s=1e-6 / ms_a_byte, intra_node_us=latency_ms * 1e3)


def link_figures(ranks: Ranks, case: ShapedCase, repeats: int) -> LinkFigures:
    """Measures links that have the bandwidth of the case."""
    found_ms = exchanges_ms(ranks, case, repeats)
    latency_ms, ms_a_byte = fit_line(list(found_ms), list(found_ms.values()))
    # After a pause, a link lets some bytes through at once; the fit must not take them for its rate.
    ms_a_byte = max(ms_a_byte, 8e-3 / case.mbit_per_s * case.ranks_per_host)
    inside_ms = None
    if case.ranks_per_host > 1:
        found_inside_ms = exchanges_ms(ranks, case, repeats, inside=True)
        latency_inside_ms, inside_ms_a_byte = fit_line(list(found_inside_ms), list(found_inside_ms.values()))
        # With few bytes, noise may make more bytes take no longer.
        inside_ms = latency_inside_ms, max(inside_ms_a_byte, _LEAST_MS_A_BYTE)
    # The messages take longer than the products.
    first = ranks.run(beside_ms, case.shape, _SMALL_BYTES, 1, case.ranks_per_host, timeout_s=_RUN_S)
    num_bytes = round(2 * max(alone_ms[0] for alone_ms, _ in first) / ms_a_byte)
    by_rank = ranks.run(beside_ms, case.shape, num_bytes, repeats, case.ranks_per_host, timeout_s=_RUN_S)
    alone_ms, together_ms = (slowest([rank[which] for rank in by_rank]) for which in (0, 1))
    copy_share = min(0.9, max(0.0, 1 - alone_ms / together_ms))
    return LinkFigures(latency_ms, ms_a_byte, copy_share, found_ms, inside_ms)


def exchanges_ms(ranks: Ranks, case: ShapedCase, repeats: int, inside: bool = False) -> dict[int, float]:
    """Times all-to-alls by the bytes that a rank sends: next to nothing, the smallest chunk of the case, and all rows
    of the case at once. ``inside``: within hosts.
    """
    sizes = [_SMALL_BYTES, away_bytes(case) // CHUNKS, away_bytes(case)]
    asked = repeats, case.ranks_per_host, inside
    return {size: slowest(ranks.run(exchange_ms, size, *asked, timeout_s=_RUN_S)) for size in sizes}


def late_ms(ranks: Ranks, case: ShapedCase, repeats: int) -> float:
    """Measures the latency of a message to hosts that compute."""
    by_rank = ranks.run(interrupted_ms, case.shape, repeats, timeout_s=_RUN_S)
    alone_ms, with_message_ms = (slowest([rank[which] for rank in by_rank]) for which in (0, 1))
    return with_message_ms - alone_ms


def away_bytes(case: ShapedCase) -> int:
    """Returns the bytes of a rank's rows that go to other hosts, if tokens are even."""
    shape = case.shape
    rows = even_case(case).num_tokens[0] * shape.top_k
    return round(rows * (1 - 1 / case.num_hosts) * shape.hidden_size * shape.bytes_per_element)


def computed_ms(by_rank: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    """Returns for each of ``layers.PIECES`` the slowest rank's time without what communication blocked."""

    def of_rank_ms(outcome: Outcome) -> list[float]:
        return (np.asarray(outcome.samples_ms["step"]) - outcome.metrics.blocked_ms).tolist()

    return {name: slowest([of_rank_ms(outcomes[name]) for outcomes in by_rank]) for name in PIECES}


def slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Returns the median over repetitions of the slowest rank's time."""
    return statistics.median([max(of_ranks) for of_ranks in zip(*by_rank, strict=True)])


# --- on a rank --------------------------------------------------------------------------------------------------------


def exchange_ms(num_bytes: int, repeats: int, ranks_per_host: int, inside: bool = False) -> list[float]:
    """Times all-to-alls in which this rank sends ``num_bytes`` to the ranks of other hosts, or to the other ranks of
    its own host, and receives as many.
    """
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group, range(dist.get_world_size()), Recorder(dist.get_rank()), Meter())
    peers = _peers(ranks_per_host, inside)
    rows = max(1, num_bytes // len(peers))
    sent, received = (torch.ones(rows * len(peers), dtype=torch.uint8) for _ in range(2))
    counts = [rows if rank in peers else 0 for rank in range(dist.get_world_size())]

    def exchanged() -> None:
        channel.all_to_all(received, sent, counts, counts, lane="dispatch").wait()

    return repeated_ms(exchanged, repeats, before=dist.barrier)


def interrupted_ms(shape: ModelShape, repeats: int) -> tuple[list[float], list[float]]:
    """Times the same products alone, and with an all-to-all of next to nothing behind each.

    A host with a share of a processor that has just computed may have to wait for its next share before it sees a
    message.
    """
    group = dist.group.WORLD
    assert group is not None
    sent = torch.ones(dist.get_world_size(), dtype=torch.uint8)
    received, counts, products = torch.empty_like(sent), [1] * len(sent), _products(shape)

    def interrupted() -> None:
        products()
        exchange(received, sent, counts, counts, group).wait()

    works = {name: partial(wall_ms, work) for name, work in (("alone", products), ("interrupted", interrupted))}
    taken_ms = interleave(works, repeats * _MESSAGES, before=dist.barrier)
    return taken_ms["alone"], taken_ms["interrupted"]


def beside_ms(shape: ModelShape, num_bytes: int, repeats: int, ranks_per_host: int) -> tuple[list[float], list[float]]:
    """Times the same products alone, and while an all-to-all of ``num_bytes`` is under way."""
    group = dist.group.WORLD
    assert group is not None
    peers = _peers(ranks_per_host, inside=False)
    sent = torch.ones(len(peers), num_bytes // len(peers), dtype=torch.uint8)
    received = torch.empty_like(sent)
    counts = [int(rank in peers) for rank in range(dist.get_world_size())]
    products, alone_ms, together_ms = _products(shape), [], []
    for _ in range(repeats + 1):
        dist.barrier()
        alone_ms.append(wall_ms(products))
        dist.barrier()
        moving = exchange(received, sent, counts, counts, group)
        together_ms.append(wall_ms(products))
        moving.wait()
    return alone_ms[1:], together_ms[1:]


def _peers(ranks_per_host: int, inside: bool) -> list[int]:
    """Returns the other ranks of this rank's host, or those of all other hosts."""
    mine = dist.get_rank()
    others = (rank for rank in range(dist.get_world_size()) if rank != mine)
    return [rank for rank in others if (rank // ranks_per_host == mine // ranks_per_host) == inside]


def _products(shape: ModelShape) -> Callable[[], None]:
    """Returns the work of some products of H by 2I."""
    x_NH = torch.randn(_PRODUCT_ROWS, shape.hidden_size)
    weight_HI = torch.randn(shape.hidden_size, 2 * shape.intermediate_size)
    out_NI = x_NH @ weight_HI

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(x_NH, weight_HI, out=out_NI)

    return products
