"""``moesys bench simulate``: how long the simulator takes for a step, of few ranks and of many.

Layers of Qwen3-30B-A3B on H100, experts sharded over all ranks, layouts by ``Greedy`` and splits by ``FlowSplit`` on
drawn loads. A few layers are planned and repeated; planning is not timed. MegaKernels have a second thread.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.stopwatch import machine_line, wall_ms
from moesys.config import FlowSplit, Fsep, Greedy, MegaKernel, Overlap, Pipelined, Sequential, Strategy, presets
from moesys.config.experiment import Generated
from moesys.lab.show.console import print_full
from moesys.lab.show.tables import figure
from moesys.load import LoadMatrix
from moesys.step import StepPlan, plan_layer, simulation
from moesys.traces import generate

MODEL = presets.QWEN3_30B_A3B
RANKS_PER_NODE, TOKENS_PER_RANK, PLANNED_LAYERS = 8, 4096, 4
# (layers, ranks)
SIZES = ((1, 32), (32, 32), (32, 256), (32, 1024))
OVERLAPS: dict[str, Overlap] = {
    "sequential": Sequential(),
    "pipelined": Pipelined(chunks=4),
    "mega_kernel": MegaKernel(),
}


@dataclass(frozen=True)
class Timing:
    """``step_ms``: to simulate it, with its timeline; ``spans_ms``: more to spell every span out; ``path_ms``: for the
    critical path. Medians of ``repeats``.
    """

    overlap: str
    layers: int
    ranks: int
    step_ms: float
    path_ms: float
    spans_ms: float
    num_spans: int
    repeats: int


def select(overlap: str) -> dict[str, Overlap]:
    """One overlap by its kind, or all. Raises ValueError for others."""
    if overlap != "all" and overlap not in OVERLAPS:
        raise ValueError(f"overlap={overlap!r} is none; choose one of {', '.join(OVERLAPS)}, or all")
    return {name: of for name, of in OVERLAPS.items() if overlap in (name, "all")}


def main(overlap: str, *, most_ranks: int, repeats: int, json_path: Path | None) -> int:
    """Time, print, and write."""
    timings = []
    for layers, ranks in SIZES:
        if ranks <= most_ranks:
            for name, of in select(overlap).items():
                timings.append(time_step(name, of, layers, ranks, repeats))
                print(f"{name}, {layers} layers on {ranks} ranks: {figure(timings[-1].step_ms)} ms", flush=True)
    threads = 2 if "mega_kernel" in select(overlap) else 1
    footer = f"MEASURED: medians of {repeats}; planning is not in it. {machine_line(threads, ('numpy', 'numba'))}"
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(timing) for timing in timings], indent=2), encoding="utf-8")
    print_full(_table(timings), [footer])
    return 0


def time_step(name: str, overlap: Overlap, layers: int, ranks: int, repeats: int) -> Timing:
    """Times of one size; one more run before warms up what is compiled."""
    plan = step_plan(overlap, layers, ranks)
    rows: list[tuple[float, float, float]] = []
    num_spans = 0
    for repetition in range(repeats + 1):
        start = time.perf_counter()
        simulated = simulation([plan])
        step_ms = 1e3 * (time.perf_counter() - start)
        if repetition:
            path_ms = wall_ms(partial(getattr, simulated, "critical_path"))
            rows.append((step_ms, path_ms, wall_ms(partial(getattr, simulated.timeline, "spans"))))
            num_spans = len(simulated.timeline.spans)
    step_ms, path_ms, spans_ms = (statistics.median(column) for column in zip(*rows, strict=True))
    return Timing(name, layers, ranks, step_ms, path_ms, spans_ms, num_spans, repeats)


def step_plan(overlap: Overlap, layers: int, ranks: int) -> StepPlan:
    """``PLANNED_LAYERS`` drawn and planned, again and again."""
    cluster = presets.h100(ranks // RANKS_PER_NODE)
    strategy = Strategy(
        name=overlap.kind,
        sharding=Fsep(slots_per_rank=-(-MODEL.num_experts // ranks) + 1, prefetch_layers=1, delay_reshard=True),
        balance=Greedy(),
        split=FlowSplit(),
        overlap=overlap,
    )
    drawn = Generated(num_layers=min(layers, PLANNED_LAYERS), warmup=0, steps=1, tokens_per_rank=TOKENS_PER_RANK)
    loads_LRE = generate(drawn, ranks, MODEL.num_experts, MODEL.top_k, seed=0).tokens_SLRE[0]
    planned = [plan_layer(strategy, MODEL, cluster, LoadMatrix(tokens_RE)) for tokens_RE in loads_LRE]
    return StepPlan(strategy, MODEL, cluster, tuple(planned[layer % len(planned)] for layer in range(layers)))


def _table(timings: Sequence[Timing]) -> Table:
    table = Table(title=Text("MEASURED: bench simulate", style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(("overlap", "layers", "ranks", "step ms", "path ms", "spans ms", "spans")):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for of in timings:
        milliseconds = (figure(ms) for ms in (of.step_ms, of.path_ms, of.spans_ms))
        table.add_row(of.overlap, str(of.layers), str(of.ranks), *milliseconds, str(of.num_spans))
    return table
