"""What ranks compute, measured and fitted: launches, memory, experts, a block's other work, fused tiles."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from benchmarks.calibrate import block_timings as of_block
from benchmarks.calibrate import rank_timings as on_rank
from benchmarks.calibrate.calibrated_rows import BlockWork, Figure, Product
from benchmarks.calibrate.cluster_fit import (
    RateFit,
    attention_of_case,
    elementwise_of_case,
    fit_products,
    fit_rate,
    pass_of_case,
)
from benchmarks.calibrate.expert_passes import PASSES, ExpertCase, Pass
from benchmarks.calibrate.session import Session, pooled
from moesys.config import ClusterSpec
from moesys.lab.runs.environment import cpu_name
from moesys.lab.runs.stopwatch import Spread
from moesys.simulator.model.end_of_step import update_bytes

PARTS = ("launches and memory", "experts", "attention, norms and updates", "fused tiles")
WAYS = ("forward", "backward")


@dataclass
class Computing:
    """What was found, part by part. ``cluster`` has the figures so far."""

    cluster: ClusterSpec
    figures: list[Figure] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    works: list[BlockWork] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        if figure.measured:
            self.cluster = self.cluster.replace(**{figure.field: figure.value})


def measure_computing(session: Session) -> Computing:
    """All of ``PARTS``, in that order, as later ones are predicted with figures of earlier ones."""
    found = Computing(session.cluster)
    for part, measure in zip(PARTS, (_launches_and_memory, _experts, _block, _fused_tiles), strict=True):
        session.tell(part)
        measure(session, found)
    return found


def _launches_and_memory(session: Session, found: Computing) -> None:
    grid, effort, device_type = session.grid, session.effort, session.device_type
    launch = Spread.of(pooled(session.run("launch", on_rank.launches, effort, device_type))).times(1e6)
    copy_s = pooled(session.run("memory copy", on_rank.memory_copies, grid.memory_bytes, effort, device_type))
    memory = Spread.of([2 * grid.memory_bytes / seconds for seconds in copy_s]).times(1e-9)
    processor, multiprocessors, memory_gb = cpu_name(), 1, None
    told = "a rank of the CPU computes one tile at a time"
    if device_type == "cuda":
        (processor, multiprocessors, memory_gb), told = session.run("GPU", on_rank.gpu_facts)[0], "as the device says"
    sizes = session.cluster.node_sizes
    shape = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    found.cluster = found.cluster.replace(name=f"{shape} {processor}, {datetime.date.today().isoformat()}")
    found.add(Figure("multiprocessors", multiprocessors, told))
    if memory_gb is not None:
        found.add(Figure("memory_gb", memory_gb, told))
    copies = f"copies of {grid.memory_bytes >> 20} MiB, read and written"
    found.add(Figure("memory_gb_per_s", memory.median, copies, memory))
    found.add(Figure("launch_us", launch.median, "products of one element, one after another", launch))


# --- experts ----------------------------------------------------------------------------------------------------------


def _experts(session: Session, found: Computing) -> None:
    """Forward gives its rate and the tiles; backward its rate, with the same tiles."""
    grid = session.grid
    by_rank = session.run("experts", on_rank.expert_passes, grid.cases, grid.dtype, session.effort, session.device_type)
    ms = {
        (case, of): Spread.of(pooled([windows[place][of] for windows in by_rank])).times(1e3)
        for place, case in enumerate(grid.cases)
        for of in PASSES
    }
    keys: dict[bool, list[tuple[ExpertCase, Pass]]] = {
        back: [key for key in ms if not key[0].held_out and (key[1] != "forward") == back] for back in (False, True)
    }
    fitted = [case for case, _ in keys[False]]
    seconds = [1e-3 * ms[key].median for key in keys[False]]
    found.cluster, forward = fit_products(fitted, seconds, found.cluster, grid.dtype, grid.tiles)

    def predicted(rate: float) -> Any:
        cluster = found.cluster.replace(backward_tflops=rate)
        return np.array([pass_of_case(*key, cluster, grid.dtype) for key in keys[True]])

    backward = fit_rate(predicted, [1e-3 * ms[key].median for key in keys[True]])
    found.cluster = found.cluster.replace(backward_tflops=backward.rate)
    found.products = [
        Product(case, of, each, 1e3 * pass_of_case(case, of, found.cluster, grid.dtype))
        for (case, of), each in ms.items()
    ]
    passes = f"passes of a rank's experts in {grid.dtype}"
    for name, fit, words, back in (
        ("expert_tflops", forward, f"{len(fitted)} forward {passes}", False),
        ("backward_tflops", backward, f"{len(keys[True])} backward {passes}", True),
    ):
        left_out = [each.error for each in found.products if each.case.held_out and (each.of != "forward") == back]
        found.add(_rate_figure(name, fit, words, left_out))
    found.add(Figure("tile_rows", found.cluster.tile_rows, "the same forward passes"))
    found.add(Figure("tile_columns", found.cluster.tile_columns, "the same forward passes"))


def _rate_figure(name: str, fit: RateFit, words: str, held_out: Sequence[float]) -> Figure:
    return Figure(
        name, fit.rate, words, Spread.of([fit.rate * (1 + error) for error in fit.errors]), fit.errors, held_out
    )


# --- a block's other work ---------------------------------------------------------------------------------------------


def _block(session: Session, found: Computing) -> None:
    grid, timing = session.grid, (session.grid.dtype, session.effort, session.device_type)
    by_rank = session.run("attention", of_block.attention, grid.attention, *timing)
    _both_ways(found, "attention", "tflops", grid.attention, by_rank, attention_of_case)
    by_rank = session.run("elementwise", of_block.elementwise, grid.elementwise, *timing)

    def of_case(case: of_block.ElementwiseCase, cluster: ClusterSpec, backward: bool) -> float:
        return elementwise_of_case(case, cluster, grid.dtype, backward)

    _both_ways(found, "elementwise", "gb_per_s", grid.elementwise, by_rank, of_case)
    seconds = session.run("updates", of_block.adam_updates, grid.parameters, session.effort, session.device_type)
    count = sum(rows * columns for rows, columns in grid.parameters)
    rate = Spread.of([update_bytes("adam") * count / each for each in pooled(seconds)]).times(1e-9)
    words = f"AdamW of {count:,} parameters in {len(grid.parameters)} tensors"
    found.add(Figure("optimizer_gb_per_s", rate.median, words, rate))


def _both_ways(
    found: Computing,
    work: Literal["attention", "elementwise"],
    unit: str,
    cases: Sequence[Any],
    by_rank: Sequence[Sequence[tuple[list[float], list[float]]]],
    seconds_of: Callable[[Any, ClusterSpec, bool], float],
) -> None:
    """Fits a rate of each way, with the launches that are known."""
    for way in WAYS:
        backward = way == "backward"
        name = f"{work}_backward_{unit}" if backward else f"{work}_{unit}"
        ms = [
            Spread.of(pooled([windows[place][backward] for windows in by_rank])).times(1e3)
            for place in range(len(cases))
        ]
        fitted = [(case, 1e-3 * each.median) for case, each in zip(cases, ms, strict=True) if not case.held_out]

        def predicted(rate: float, name: str = name, fitted: Any = fitted, backward: bool = backward) -> Any:
            cluster = found.cluster.replace(**{name: rate})
            return np.array([seconds_of(case, cluster, backward) for case, _ in fitted])

        fit = fit_rate(predicted, [seconds for _, seconds in fitted])
        with_rate = found.cluster.replace(**{name: fit.rate})
        works = [
            BlockWork(f"{work} {way}", case, each, 1e3 * seconds_of(case, with_rate, backward))
            for case, each in zip(cases, ms, strict=True)
        ]
        words = "torch's attention" if work == "attention" else "norms, rotary, SwiGLU, residuals"
        held_out = [each.error for each in works if each.case.held_out]
        found.add(_rate_figure(name, fit, f"{words}, {way}, {len(fitted)} sizes", held_out))
        found.works += works


# --- MegaKernels ------------------------------------------------------------------------------------------------------


def _fused_tiles(session: Session, found: Computing) -> None:
    if session.device_type == "cpu":
        why = "not measured: on the CPU MegaKernels run in Triton's interpreter alone"
    elif session.grid.fused is None:
        why = "not measured: no layer was asked for"
    else:
        arguments = (session.grid.fused, session.grid.dtype, session.effort)
        by_rank = session.run("fused tiles", on_rank.fused_tiles, *arguments)
        pairs = [pair for of in by_rank for pair in zip(of.apart_s, of.fused_s, strict=True)]
        rates = Spread.of([apart / fused for apart, fused in pairs])
        words = "a MegaKernel on one rank beside its own kernels one after another, forward and backward"
        found.add(Figure("fused_rate", min(1.0, rates.median), words, rates))
        return
    found.add(Figure("fused_rate", ClusterSpec.model_fields["fused_rate"].default, why, measured=False))
