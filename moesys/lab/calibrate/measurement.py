"""Measures ranks and fits a ``ClusterSpec`` to their times, for simulations.

Fits minimise relative errors, so that short and long times count equally, and use medians, so that a disturbed window
counts little. The cost model itself predicts the times of computation.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar, nnls

from moesys.config import ClusterSpec, DType
from moesys.cost import link_seconds
from moesys.lab.calibrate import timings
from moesys.lab.calibrate.timings import GRIDS, Case, Effort, Grid, Pass
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.environment import cpu_name
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.sheets import Column
from moesys.simulator.model.simulate_model import update_bytes

T = TypeVar("T")

DEFAULT_EFFORT = Effort()
PART_TIMEOUT_S = 600.0
# A computation that loses more than this beside copies does not compute.
MOST_COPY_SHARE = 0.95
# These limits, in TFLOP/s or GB/s per rank, reach from less than a slow core to more than any GPU.
RATES = (1e-5, 1e5)
# Larger tiles must reduce the error to this part: where no case distinguishes tiles, the smallest are chosen.
CLEARLY_BETTER = 0.95
# The fields that are fitted to passes, by kind of case, in the order in which they are fitted.
FITS: dict[str, dict[str, tuple[Pass, ...]]] = {
    "experts": {"expert_tflops": ("forward",), "backward_tflops": ("input_gradients", "backward")},
    "attention": {"attention_tflops": ("forward",), "attention_backward_tflops": ("backward",)},
    "elementwise": {"elementwise_gb_per_s": ("forward",), "elementwise_backward_gb_per_s": ("backward",)},
}


# --- results ----------------------------------------------------------------------------------------------------------


def four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _errors(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.0%}, {sizes.max():.0%}" if len(sizes) else ""


MEDIAN = Column("ms", lambda ms: four_digits(ms.median))
RANGE = (
    Column("p20 to p80", lambda spread: f"{four_digits(spread.p20)} to {four_digits(spread.p80)}"),
    Column("n", lambda spread: str(spread.n)),
)


@dataclass(frozen=True)
class Figure:
    """One field of the ``ClusterSpec``. how: the measurement, or the reason why there is none.

    spread: of samples in the field's unit. errors: of the fit, predicted divided by measured, less 1. held_out: the
    same for cases that the field was not fitted to.
    """

    field: Annotated[str, Column("field")]
    value: float
    how: Annotated[str, Column("from", wraps=True)]
    spread: Annotated[Quantiles | None, *RANGE] = None
    errors: Annotated[Sequence[float], Column("fit: median, worst error", _errors)] = ()
    held_out: Annotated[Sequence[float], Column("held out: median, worst", _errors)] = ()
    measured: bool = True

    @property
    def figure(self) -> Annotated[str, Column("figure", after="field")]:
        return four_digits(self.value) if self.measured else "n/a"


@dataclass(frozen=True)
class Timing:
    """One pass of one case, or messages of one size, and the time predicted with the fitted fields."""

    work: Annotated[str, Column("work")]
    size: Annotated[str, Column("size")]
    held_out: Annotated[bool, Column("fit", lambda held_out: "held out" if held_out else "")]
    ms: Annotated[Quantiles, MEDIAN, *RANGE]
    predicted_ms: Annotated[float, Column("predicted, ms", four_digits)]
    flops: int | None = None

    @property
    def tflops(self) -> Annotated[float | None, Column("TFLOP/s", four_digits, after="ms")]:
        return self.flops and self.flops / self.ms.median / 1e9

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        return self.predicted_ms / self.ms.median - 1


@dataclass(frozen=True)
class MeasuredLink:
    """All-to-alls inside nodes, between nodes, or between two ranks, and the line through their times.

    messages: by the bytes of the busiest link, as the cost model counts them. peer_gb_per_s: the rate at which a rank
    sends to each peer, by the largest messages.
    """

    name: str
    latency_us: float
    gb_per_s: float
    peer_gb_per_s: float
    messages: list[Timing]


@dataclass
class Calibration:
    """A calibration, in progress or complete. cluster: with all fields measured so far. samples_s: all seconds, by name
    of the timing.
    """

    ranks: Ranks
    grid: Grid
    effort: Effort
    device_type: str
    cluster: ClusterSpec
    figures: list[Figure] = field(default_factory=list)
    passes: list[Timing] = field(default_factory=list)
    links: list[MeasuredLink] = field(default_factory=list)
    samples_s: dict[str, Any] = field(default_factory=dict)

    def run(self, what: str, fn: Callable[..., T], *args: Any) -> list[T]:
        """Calls ``fn(*args, effort, device_type)`` on each rank, and records what it returns."""
        self.samples_s[what] = by_rank = self.ranks.run(
            fn, *args, self.effort, self.device_type, timeout_s=PART_TIMEOUT_S
        )
        return by_rank

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        self.cluster = self.cluster.replace(**{figure.field: figure.value})

    def add_default(self, name: str, why: str) -> None:
        """Adds a field that is not measured."""
        self.add(Figure(name, ClusterSpec.model_fields[name].default, f"not measured: {why}", measured=False))


def calibrate(
    ranks: Ranks,
    cluster: ClusterSpec,
    *,
    device_type: str = "cpu",
    grid: Grid | None = None,
    effort: Effort = DEFAULT_EFFORT,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measures the fields of a ``ClusterSpec`` on ``ranks``, all of them at the same time, as they train.

    ``cluster`` says how many ranks there are and which of them share a node; its speeds are not used. Fields that
    cannot be measured keep their defaults; where there is only one kind of link, its figures stand for both kinds.
    ``tell`` is called with the name of each of the ``PARTS`` before it starts.
    """
    shape = ClusterSpec(
        num_nodes=cluster.num_nodes, ranks_per_node=cluster.ranks_per_node, ranks_per_domain=cluster.ranks_per_domain
    )
    found = Calibration(ranks, grid or GRIDS[device_type], effort, device_type, shape)
    for part, measure in PARTS.items():
        tell(part)
        measure(found)
    return found


# --- computing --------------------------------------------------------------------------------------------------------


def _measure_basics(found: Calibration) -> None:
    grid, how = found.grid, "a rank on a CPU computes one tile at a time"
    processor, multiprocessors, memory_gb = cpu_name(), 1, None
    if found.device_type == "cuda":
        (processor, multiprocessors, memory_gb), how = found.ranks.run(timings.gpu_facts)[0], "as the device reports"
    sizes = found.cluster.node_sizes
    shape = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    found.cluster = found.cluster.replace(name=f"{shape} {processor}, {datetime.date.today().isoformat()}")
    found.add(Figure("multiprocessors", multiprocessors, how))
    if memory_gb is not None:
        found.add(Figure("memory_gb", memory_gb, how))
    by_rank = found.run("basics", timings.basics, grid.memory_bytes, grid.parameters)
    seconds = {what: np.array([of_rank[what] for of_rank in by_rank]).flatten() for what in by_rank[0]}
    num_parameters = sum(map(math.prod, grid.parameters))
    copied, updated = 2e-9 * grid.memory_bytes, 1e-9 * update_bytes("adam") * num_parameters
    for name, how, samples in (
        ("memory_gb_per_s", "memory copies, bytes read and written", copied / seconds["memory copy"]),
        ("launch_us", "products of one element, one after another", 1e6 * seconds["launch"]),
        ("optimizer_gb_per_s", f"AdamW updates of {num_parameters:,} parameters", updated / seconds["update"]),
    ):
        spread = Quantiles.of(samples.tolist())
        found.add(Figure(name, spread.median, how, spread))


def _measure_passes(found: Calibration, kind: str) -> None:
    dtype, cases = found.grid.dtype, found.grid.cases(kind)
    by_rank = found.run(kind, timings.passes, cases, dtype)
    for name, passes in FITS[kind].items():
        ms = {
            (case, of): Quantiles.of(_pooled(windows[place][of] for windows in by_rank)).times(1e3)
            for of in passes
            for place, case in enumerate(cases)
        }
        # Forward passes of experts determine the tiles, too.
        clusters = [found.cluster]
        if name == "expert_tflops":
            clusters = [found.cluster.replace(tile_rows=rows, tile_columns=cols) for rows, cols in found.grid.tiles]
        fitted = {key: 1e-3 * spread.median for key, spread in ms.items() if not key[0].held_out}
        cluster = fit_rate(name, clusters, fitted, dtype)
        rows = []
        for (case, of), spread in ms.items():
            predicted_ms = 1e3 * case.seconds(of, cluster, dtype)
            rows.append(Timing(f"{kind} {of}", case.words, case.held_out, spread, predicted_ms, case.flops(of)))
        found.passes += rows
        errors, held_out = ([row.error for row in rows if row.held_out is out] for out in (False, True))
        rate = getattr(cluster, name)
        spread = Quantiles.of([rate * (1 + error) for error in errors])
        found.add(Figure(name, rate, f"{len(errors)} passes of {kind}", spread, errors, held_out))
        for side in ("tile_rows", "tile_columns") if len(clusters) > 1 else ():
            found.add(Figure(side, getattr(cluster, side), "the same passes"))


def _pooled(by_rank: Iterable[Sequence[float]]) -> list[float]:
    return [sample for samples in by_rank for sample in samples]


def fit_rate(
    name: str, clusters: Sequence[ClusterSpec], seconds: Mapping[tuple[Case, Pass], float], dtype: DType
) -> ClusterSpec:
    """Returns the cluster with the rate, its field ``name``, that predicts ``seconds`` best. Of ``clusters``, the first
    is chosen that no later one is clearly better than.
    """
    best, least = clusters[0], math.inf
    for cluster in clusters:

        def error(log_rate: float, cluster: ClusterSpec = cluster) -> float:
            rated = cluster.replace(**{name: math.exp(log_rate)})
            logs = [math.log(case.seconds(of, rated, dtype) / measured) for (case, of), measured in seconds.items()]
            return float(np.square(logs).mean())

        found = minimize_scalar(error, bounds=np.log(RATES), method="bounded", options={"xatol": 1e-6})
        if found.fun < CLEARLY_BETTER**2 * least:
            best, least = cluster.replace(**{name: math.exp(found.x)}), found.fun
    return best


def _measure_fused_tiles(found: Calibration) -> None:
    if found.device_type == "cpu":
        found.add_default("fused_rate", "on a CPU, MegaKernels run only in Triton's interpreter")
        return
    # This import is here because it imports Triton, which a machine without GPUs need not have.
    from moesys.lab.calibrate import gpu_timings

    by_rank = found.run("fused tiles", gpu_timings.fused_tiles, found.grid.mega, found.grid.dtype)
    rates = Quantiles.of(np.array([np.divide(of["apart"], of["fused"]) for of in by_rank]).flatten().tolist())
    how = "a MegaKernel on one rank, and its kernels one after another, forward and backward"
    found.add(Figure("fused_rate", min(1.0, rates.median), how, rates))


# --- links ------------------------------------------------------------------------------------------------------------


def _measure_links(found: Calibration) -> None:
    """Measures links as layers use them, by all-to-alls inside and between nodes; and pairs of ranks, where a slow host
    shows: two of a node, and the first ranks of each node and the next.
    """
    sizes, near_RR = found.cluster.node_sizes, _near(found.cluster)
    near = _measure_link(found, "all-to-all inside nodes", near_RR)
    far = _measure_link(found, "all-to-all between nodes", ~near_RR & ~np.eye(len(near_RR), dtype=bool))
    for place, link, other in (("intra_node", near, far), ("inter_node", far, near)):
        if source := link or other:
            how = (
                f"{link.name}, a line by size"
                if link
                else "not measured: there is no such link; the other kind's figure"
            )
            errors = [message.error for message in link.messages] if link else []
            for unit, value in (("gb_per_s", source.gb_per_s), ("us", source.latency_us)):
                found.add(Figure(f"{place}_{unit}", value, how, errors=errors, measured=link is not None))
    first_N = np.cumsum((0, *sizes))[:-1].tolist()
    for pair in (*np.argwhere(near_RR)[:1].tolist(), *map(list, pairwise(first_N))):
        pair_RR = np.zeros_like(near_RR)
        pair_RR[pair, pair[::-1]] = True
        _measure_link(found, f"ranks {pair[0]} and {pair[1]}", pair_RR)


def _near(cluster: ClusterSpec) -> npt.NDArray[np.bool_]:
    """Returns [R, R]: which other ranks are in a rank's node."""
    node_R = np.asarray(cluster.node_of_rank)
    return (node_R[:, None] == node_R) & ~np.eye(len(node_R), dtype=bool)


def _measure_link(found: Calibration, name: str, peers_RR: npt.NDArray[np.bool_]) -> MeasuredLink | None:
    """Measures all-to-alls between these peers, if there are any; each ends when it has ended on the slowest rank."""
    if not peers_RR.any():
        return None
    sizes = found.grid.message_bytes
    by_rank = found.run(name, timings.all_to_alls, sizes, peers_RR, found.grid.longest_message_s)
    one_byte_a_second = found.cluster.replace(intra_node_gb_per_s=1e-9, inter_node_gb_per_s=1e-9)
    busiest = round(link_seconds(peers_RR.astype(np.float64), one_byte_a_second).max())
    ms = {size: Quantiles.of(np.max([of[size] for of in by_rank], axis=0).tolist()).times(1e3) for size in by_rank[0]}
    latency_us, gb_per_s = fit_messages({busiest * size: 1e-3 * spread.median for size, spread in ms.items()})
    messages = [
        Timing(name, f"{busiest * size:,} bytes", False, spread, 1e-3 * latency_us + 1e-6 * busiest * size / gb_per_s)
        for size, spread in ms.items()
    ]
    found.links.append(MeasuredLink(name, latency_us, gb_per_s, 1e-6 * max(ms) / ms[max(ms)].median, messages))
    return found.links[-1]


def fit_messages(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Returns the latency (us, at least 0) and rate (GB/s) of the line through (bytes, median seconds).

    If times do not grow with size, the rate is that of the largest message.
    """
    latency_s, byte_s = fit_line(list(seconds), list(seconds.values()))
    if byte_s <= 0:
        latency_s, byte_s = 0.0, seconds[max(seconds)] / max(seconds)
    return latency_s * 1e6, 1e-9 / byte_s


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns (intercept, slope) of the line with the least relative squared error; neither is negative.

    ``fit_line([1, 2, 4], [3.0, 5.0, 9.0])`` is (1.0, 2.0).
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    unit = x_N.max()
    (intercept, per_unit), _ = nnls(np.stack([1 / y_N, x_N / unit / y_N], axis=1), np.ones(len(y_N)))
    return float(intercept), float(per_unit / unit)


# --- computing and links at the same time -----------------------------------------------------------------------------


def _measure_copy_share(found: Calibration) -> None:
    if not found.links:
        found.add_default("copy_share", "there is no second rank")
        return
    bytes_per_s = 1e9 * min(link.peer_gb_per_s for link in found.links)
    timing = (found.grid.beside_copies, found.grid.dtype, bytes_per_s)
    by_rank = found.run("experts beside copies", timings.products_beside_copies, *timing)
    shares = [1 - alone / beside for of_rank in by_rank for alone, beside in of_rank]
    if not shares:
        found.add_default("copy_share", "rows arrived before products of the same time had ended")
        return
    spread = Quantiles.of(shares)
    lost = min(MOST_COPY_SHARE, max(0.0, spread.median))
    found.add(Figure("copy_share", lost, "products of an expert while an all-to-all is under way", spread))


def _measure_flags(found: Calibration) -> None:
    pairs = np.argwhere(_near(found.cluster)).tolist()
    if found.device_type == "cpu" or not pairs:
        on_cpu = "on a CPU, flags are seen only in Triton's interpreter"
        found.add_default("flag_us", on_cpu if found.device_type == "cpu" else "no two ranks share a node")
        return
    # This import is here because it imports Triton.
    from moesys.lab.calibrate import gpu_timings

    first, second = pairs[0]
    spread = Quantiles.of(_pooled(found.run("flags", gpu_timings.flag_ping_pongs, (first, second)))).times(1e6)
    found.add(Figure("flag_us", spread.median, f"flags in turn of ranks {first} and {second}", spread))


# Later parts are predicted with the figures of earlier ones.
PARTS: dict[str, Callable[[Calibration], None]] = {
    "launches, memory and optimizer": _measure_basics,
    **{kind: partial(_measure_passes, kind=kind) for kind in FITS},
    "fused tiles": _measure_fused_tiles,
    "links": _measure_links,
    "experts beside copies": _measure_copy_share,
    "flags": _measure_flags,
}
