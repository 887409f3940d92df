"""Measure ranks, and write them down as a ``ClusterSpec`` that simulations live by.

``calibrate`` takes any ranks that run functions: local processes, those of torchrun, or processes in other places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from benchmarks.calibrate import rank_timings as on_rank
from benchmarks.calibrate.calibrated_rows import BlockWork, Figure, Link, Product
from benchmarks.calibrate.cluster_fit import fit_messages
from benchmarks.calibrate.computing import PARTS as COMPUTING_PARTS
from benchmarks.calibrate.computing import measure_computing
from benchmarks.calibrate.grids import GRIDS, Grid
from benchmarks.calibrate.session import Session, pooled
from benchmarks.calibrate.windows import Effort
from moesys.config import ClusterSpec, DType
from moesys.cost import link_seconds
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.stopwatch import Spread

PARTS = (*COMPUTING_PARTS, "links", "experts beside copies", "flags")
DEFAULT_EFFORT = Effort()
# Between all nodes up to so many each pair is measured, between more each node and the next.
ALL_PAIRS_NODES = 4
# A product that loses more beside copies is not computing.
MOST_COPY_SHARE = 0.95


@dataclass(frozen=True)
class Calibration:
    """``cluster``: what was measured, as the cost model takes it. samples_s: all, by what was timed."""

    cluster: ClusterSpec
    device_type: str
    dtype: DType
    figures: list[Figure]
    products: list[Product]
    works: list[BlockWork]
    links: list[Link]
    samples_s: dict[str, Any]


def calibrate(
    ranks: Ranks,
    cluster: ClusterSpec,
    *,
    device_type: str = "cpu",
    grid: Grid | None = None,
    effort: Effort = DEFAULT_EFFORT,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Calibration:
    """Measure what a ``ClusterSpec`` tells of ``ranks``, all of them at once, as they train.

    ``cluster`` says how many ranks there are and which share a node; its speeds mean nothing. Links are timed as layers
    use them, by all-to-alls inside nodes and between nodes, and besides from rank to rank. What cannot be measured
    costs nothing in the result; where there is one kind of link only, its figures stand for both. ``tell`` hears of
    each of the ``PARTS`` as it begins, ``keep`` gets all samples so far after each.
    """
    shape = ClusterSpec(
        num_nodes=cluster.num_nodes, ranks_per_node=cluster.ranks_per_node, ranks_per_domain=cluster.ranks_per_domain
    )
    session = Session(ranks, shape, device_type, grid or GRIDS[device_type], effort, tell, keep)
    computing = measure_computing(session)
    near, far, pairs = _links(session)
    share = _copy_share(session, near, far)
    flag = _flags(session)
    beside = [*_link_figures(near, far), share, flag]
    return Calibration(
        cluster=computing.cluster.replace(**{figure.field: figure.value for figure in beside}),
        device_type=device_type,
        dtype=session.grid.dtype,
        figures=[*computing.figures, *beside],
        products=computing.products,
        works=computing.works,
        links=[link for link in (near, far, *pairs) if link is not None],
        samples_s=session.samples,
    )


# --- links ------------------------------------------------------------------------------------------------------------


def _links(session: Session) -> tuple[Link | None, Link | None, list[Link]]:
    """Inside nodes, between nodes, and from rank to rank."""
    session.tell("links")
    near = _all_to_all(session, "ranks") if session.neighbours else None
    far = _all_to_all(session, "nodes") if session.cluster.num_nodes > 1 else None
    pairs = []
    for first, second in _pairs(session):
        name = f"rank {first} to {second}"
        timing = (session.grid.message_bytes, (first, second), session.grid.longest_message_s)
        by_rank = session.run(name, on_rank.round_trips, *timing, session.effort, session.device_type)
        seconds = {num_bytes: Spread.of(windows) for num_bytes, windows in by_rank[first].items()}
        there_and_back = fit_messages({num_bytes: spread.median for num_bytes, spread in seconds.items()})
        # The way back is as long before its first byte, and has no more.
        line = replace(there_and_back, latency_us=there_and_back.latency_us / 2)
        pairs.append(Link(name, seconds, line))
    return near, far, pairs


def _all_to_all(session: Session, between: str) -> Link:
    """An all-to-all is over when it is on the slowest rank."""
    cluster, grid = session.cluster, session.grid
    timing = (grid.message_bytes, cluster.node_of_rank, between, grid.longest_message_s)
    by_rank = session.run(f"all-to-all of {between}", on_rank.all_to_alls, *timing, session.effort, session.device_type)
    busiest = _bytes_of_busiest_link(cluster, between)
    seconds = {
        busiest * num_bytes: Spread.of(np.max([samples[num_bytes] for samples in by_rank], axis=0).tolist())
        for num_bytes in by_rank[0]
    }
    line = fit_messages({num_bytes: spread.median for num_bytes, spread in seconds.items()})
    return Link("all-to-all inside nodes" if between == "ranks" else "all-to-all between nodes", seconds, line)


def _bytes_of_busiest_link(cluster: ClusterSpec, between: str) -> int:
    """Of an all-to-all of one byte to each peer, as the cost model counts them."""
    node_R = np.asarray(cluster.node_of_rank)
    same_node_RR = node_R[:, None] == node_R[None, :]
    bytes_RR = (same_node_RR if between == "ranks" else ~same_node_RR).astype(np.float64)
    np.fill_diagonal(bytes_RR, 0.0)
    one_byte_a_second = cluster.replace(intra_node_gb_per_s=1e-9, inter_node_gb_per_s=1e-9)
    return round(link_seconds(bytes_RR, one_byte_a_second).max())


def _pairs(session: Session) -> list[tuple[int, int]]:
    """Neighbours in a node; and between nodes their first ranks, of each to each, or of many nodes to the next."""
    first_N = np.cumsum((0, *session.cluster.node_sizes))[:-1].tolist()
    pairs = [session.neighbours] if session.neighbours else []
    if len(first_N) <= ALL_PAIRS_NODES:
        return pairs + list(permutations(first_N, 2))
    return pairs + list(zip(first_N, first_N[1:] + first_N[:1], strict=True))


def _link_figures(near: Link | None, far: Link | None) -> list[Figure]:
    figures = []
    for place, link, other in (("intra_node", near, far), ("inter_node", far, near)):
        rate, latency = f"{place}_gb_per_s", f"{place}_us"
        if link is not None:
            sizes = f"{link.name} of {min(link.seconds):,} to {max(link.seconds):,} bytes"
            errors = list(link.line.errors.values())
            figures.append(Figure(rate, link.line.gb_per_s, sizes, errors=errors))
            figures.append(Figure(latency, link.line.latency_us, "the same, before the first byte", errors=errors))
        elif other is not None:
            why = "not measured: there is no such link; as the other kind"
            figures.append(Figure(rate, other.line.gb_per_s, why, measured=False))
            figures.append(Figure(latency, other.line.latency_us, why, measured=False))
        else:
            why = "not measured: there is no second rank; the default, which nothing uses"
            figures.append(Figure(rate, ClusterSpec.model_fields[rate].default, why, measured=False))
    return figures


# --- both at once -----------------------------------------------------------------------------------------------------


def _copy_share(session: Session, near: Link | None, far: Link | None) -> Figure:
    session.tell("experts beside copies")
    lines = [(link.line, between) for link, between in ((near, "ranks"), (far, "nodes")) if link is not None]
    if not lines:
        return Figure("copy_share", 0.0, "not measured: there is no second rank", measured=False)
    peer_bytes_per_s = min(
        line.gb_per_s * 1e9 / _bytes_of_busiest_link(session.cluster, between) for line, between in lines
    )
    grid = session.grid
    timing = (grid.beside_copies, grid.dtype, peer_bytes_per_s, session.effort, session.device_type)
    by_rank = session.run("experts beside copies", on_rank.products_beside_copies, *timing)
    shares = [1 - alone / beside for rank in by_rank for alone, beside in zip(rank.alone_s, rank.beside_s, strict=True)]
    if not shares:
        why = "not measured: rows were there before products of the same time had ended"
        return Figure("copy_share", 0.0, why, measured=False)
    spread = Spread.of(shares)
    lost = min(MOST_COPY_SHARE, max(0.0, spread.median))
    return Figure("copy_share", lost, "products of an expert while an all-to-all is under way", spread)


def _flags(session: Session) -> Figure:
    session.tell("flags")
    if session.device_type == "cpu":
        why = "not measured: on the CPU flags are seen by Triton's interpreter alone"
        return Figure("flag_us", 0.0, why, measured=False)
    if session.neighbours is None:
        return Figure("flag_us", 0.0, "not measured: no two ranks share a node", measured=False)
    by_rank = session.run("flags", on_rank.flag_ping_pongs, session.neighbours, session.effort)
    spread = Spread.of(pooled(by_rank)).times(1e6)
    return Figure("flag_us", spread.median, f"flags in turn of ranks {session.neighbours}", spread)
