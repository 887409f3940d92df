"""Measure ranks, and write them down as a ``ClusterSpec`` that simulations live by.

``calibrate`` takes any ranks that run functions: local processes, those of torchrun, or processes in other places.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, TypeVar

import numpy as np

from moesys.bench.calibrate import rank_timings as on_rank
from moesys.bench.calibrate.calibrated_rows import Figure, Link, Product
from moesys.bench.calibrate.cluster_fit import fit_messages, fit_products, predicted_seconds
from moesys.bench.calibrate.rank_timings import Effort, ExpertCase
from moesys.bench.harness.bench_ranks import Ranks
from moesys.bench.harness.stopwatch import Spread
from moesys.config import ClusterSpec, DType, ModelShape
from moesys.cost import link_seconds
from moesys.lab.runs.environment import cpu_name

T = TypeVar("T")

PARTS = ("launches and memory", "products of experts", "links", "products beside copies", "flags")
PART_TIMEOUT_S = 600.0
DEFAULT_EFFORT = Effort()
# Between all nodes up to so many each pair is measured, between more each node and the next.
ALL_PAIRS_NODES = 4
# A product that loses more beside copies is not computing.
MOST_COPY_SHARE = 0.95


@dataclass(frozen=True)
class LayerCase:
    """A layer, and how many tokens each rank has."""

    shape: ModelShape
    num_tokens: int


@dataclass(frozen=True)
class Grid:
    """What is measured on one kind of device.

    tiles: (rows, columns) among which the fit chooses. memory_bytes: copied at once. longest_message_s: larger messages
    than take so long are left out. layers: whose steps are measured and simulated in the end, if any.
    """

    dtype: DType
    cases: tuple[ExpertCase, ...]
    tiles: tuple[tuple[int, int], ...]
    beside_copies: ExpertCase
    memory_bytes: int
    message_bytes: tuple[int, ...]
    longest_message_s: float = 0.25
    layers: tuple[LayerCase, ...] = ()


def _cases(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], groups: Sequence[tuple[int, int]]
) -> tuple[ExpertCase, ...]:
    """Every shape (H, I) with each number of rows, and with (experts, rows of each)."""
    several = [(each,) for each in rows] + [(each,) * experts for experts, each in groups]
    return tuple(ExpertCase(case_rows, H, I) for H, I in shapes for case_rows in several)


CPU_GRID = Grid(
    dtype="float32",
    cases=_cases(
        [(256, 512), (512, 512), (512, 1024)], [7, 21, 41, 71, 101, 151, 301, 1001], [(8, 21), (8, 51), (8, 101)]
    ),
    # Rows alone are rounded: to bring a matrix into the order that the CPU likes costs as much as some rows.
    tiles=tuple((rows, 1) for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64)),
    beside_copies=ExpertCase((256,), 512, 512),
    memory_bytes=64 << 20,
    message_bytes=tuple(1 << power for power in range(10, 24, 2)),
    layers=tuple(
        LayerCase(ModelShape(hidden_size=512, intermediate_size=width, num_experts=8, top_k=2), tokens)
        for width, tokens in ((512, 256), (512, 1024), (1024, 512))
    ),
)
CUDA_GRID = Grid(
    dtype="bfloat16",
    cases=_cases(
        [(2048, 768), (7168, 2048), (4096, 14336)], [1, 24, 100, 300, 1000, 4096, 16384], [(32, 100), (32, 512)]
    ),
    tiles=tuple((rows, columns) for rows in (64, 128, 256) for columns in (64, 128, 256)),
    beside_copies=ExpertCase((4096,), 4096, 2048),
    memory_bytes=1 << 30,
    message_bytes=tuple(1 << power for power in range(12, 28, 3)),
)
GRIDS = {"cpu": CPU_GRID, "cuda": CUDA_GRID}


@dataclass(frozen=True)
class Calibration:
    """``cluster``: what was measured, as the cost model takes it. samples_s: all, by what was timed."""

    cluster: ClusterSpec
    device_type: str
    dtype: DType
    figures: list[Figure]
    products: list[Product]
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
    session = _Session(ranks, shape, device_type, grid or GRIDS[device_type], effort, tell, keep)
    computing = _computing(session)
    near, far, pairs = _links(session)
    share = _copy_share(session, near, far)
    flag = _flags(session)
    figures = [*computing.figures, *_link_figures(near, far), share, flag]
    measured = computing.cluster.replace(**{figure.field: figure.value for figure in figures})
    return Calibration(
        cluster=measured,
        device_type=device_type,
        dtype=session.grid.dtype,
        figures=figures,
        products=[
            Product(case, ms, 1e3 * predicted_seconds(case, measured, session.grid.dtype))
            for case, ms in zip(session.grid.cases, computing.products_ms, strict=True)
        ],
        links=[link for link in (near, far, *pairs) if link is not None],
        samples_s=session.samples,
    )


@dataclass
class _Session:
    """One calibration, and the samples that it has so far."""

    ranks: Ranks
    cluster: ClusterSpec
    device_type: str
    grid: Grid
    effort: Effort
    tell: Callable[[str], None]
    keep: Callable[[dict[str, Any]], None]
    samples: dict[str, Any] = field(default_factory=dict)

    def run(self, what: str, fn: Callable[..., T], *args: Any) -> list[T]:
        by_rank = self.ranks.run(fn, *args, timeout_s=PART_TIMEOUT_S)
        self.samples[what] = by_rank
        self.keep(self.samples)
        return by_rank

    @property
    def neighbours(self) -> tuple[int, int] | None:
        """The first two ranks that share a node."""
        first_N = np.cumsum((0, *self.cluster.node_sizes))
        found = [first for first, size in zip(first_N, self.cluster.node_sizes, strict=False) if size > 1]
        return (int(found[0]), int(found[0]) + 1) if found else None


# --- computing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Computing:
    cluster: ClusterSpec
    figures: list[Figure]
    products_ms: list[Spread]


def _computing(session: _Session) -> _Computing:
    grid, effort, device_type = session.grid, session.effort, session.device_type
    session.tell(PARTS[0])
    launch = Spread.of(_pooled(session.run("launch", on_rank.launches, effort, device_type))).times(1e6)
    copy_s = _pooled(session.run("memory copy", on_rank.memory_copies, grid.memory_bytes, effort, device_type))
    memory = Spread.of([2 * grid.memory_bytes / seconds for seconds in copy_s]).times(1e-9)
    processor, multiprocessors, memory_gb = cpu_name(), 1, None
    told = "a rank of the CPU computes one tile at a time"
    if device_type == "cuda":
        (processor, multiprocessors, memory_gb), told = session.run("GPU", on_rank.gpu_facts)[0], "as the device says"

    session.tell(PARTS[1])
    by_rank = session.run("expert products", on_rank.expert_products, grid.cases, grid.dtype, effort, device_type)
    products_ms = [Spread.of(_pooled(windows)).times(1e3) for windows in zip(*by_rank, strict=True)]
    known = session.cluster.replace(
        name=f"{_shape(session.cluster)} {processor}, {datetime.date.today().isoformat()}",
        memory_gb_per_s=memory.median,
        memory_gb=memory_gb,
        multiprocessors=multiprocessors,
        launch_us=launch.median,
    )
    fit = fit_products(grid.cases, [1e-3 * ms.median for ms in products_ms], known, grid.dtype, grid.tiles)
    rate = fit.cluster.expert_tflops
    rates = Spread.of([rate * (1 + error) for error in fit.errors])
    of_products = f"{len(grid.cases)} forward products in {grid.dtype}, {sum(ms.n for ms in products_ms)} windows"
    figures = [
        Figure("expert_tflops", rate, of_products, rates, fit.errors),
        Figure("tile_rows", fit.cluster.tile_rows, "the same products"),
        Figure("tile_columns", fit.cluster.tile_columns, "the same products"),
        Figure("multiprocessors", multiprocessors, told),
        *([] if memory_gb is None else [Figure("memory_gb", memory_gb, told)]),
        Figure("memory_gb_per_s", memory.median, f"copies of {grid.memory_bytes >> 20} MiB, read and written", memory),
        Figure("launch_us", launch.median, "products of one element, one after another", launch),
    ]
    return _Computing(fit.cluster, figures, products_ms)


# --- links ------------------------------------------------------------------------------------------------------------


def _links(session: _Session) -> tuple[Link | None, Link | None, list[Link]]:
    """Inside nodes, between nodes, and from rank to rank."""
    session.tell(PARTS[2])
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


def _all_to_all(session: _Session, between: str) -> Link:
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


def _pairs(session: _Session) -> list[tuple[int, int]]:
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


def _copy_share(session: _Session, near: Link | None, far: Link | None) -> Figure:
    session.tell(PARTS[3])
    lines = [(link.line, between) for link, between in ((near, "ranks"), (far, "nodes")) if link is not None]
    if not lines:
        return Figure("copy_share", 0.0, "not measured: there is no second rank", measured=False)
    peer_bytes_per_s = min(
        line.gb_per_s * 1e9 / _bytes_of_busiest_link(session.cluster, between) for line, between in lines
    )
    grid = session.grid
    timing = (grid.beside_copies, grid.dtype, peer_bytes_per_s, session.effort, session.device_type)
    by_rank = session.run("products beside copies", on_rank.products_beside_copies, *timing)
    shares = [1 - alone / beside for rank in by_rank for alone, beside in zip(rank.alone_s, rank.beside_s, strict=True)]
    if not shares:
        why = "not measured: rows were there before products of the same time had ended"
        return Figure("copy_share", 0.0, why, measured=False)
    spread = Spread.of(shares)
    lost = min(MOST_COPY_SHARE, max(0.0, spread.median))
    return Figure("copy_share", lost, "products of an expert while an all-to-all is under way", spread)


def _flags(session: _Session) -> Figure:
    session.tell(PARTS[4])
    if session.device_type == "cpu":
        why = "not measured: on the CPU flags are seen by Triton's interpreter alone"
        return Figure("flag_us", 0.0, why, measured=False)
    if session.neighbours is None:
        return Figure("flag_us", 0.0, "not measured: no two ranks share a node", measured=False)
    by_rank = session.run("flags", on_rank.flag_ping_pongs, session.neighbours, session.effort)
    spread = Spread.of(_pooled(by_rank)).times(1e6)
    return Figure("flag_us", spread.median, f"flags in turn of ranks {session.neighbours}", spread)


def _pooled(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [sample for samples in by_rank for sample in samples]


def _shape(cluster: ClusterSpec) -> str:
    """``4 x 8``, or what nodes have."""
    sizes = cluster.node_sizes
    return f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
