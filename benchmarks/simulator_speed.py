"""``python -m benchmarks simulate``: how long the simulator takes for a step, of few ranks and of many.

Layers of Qwen3-30B-A3B on H100, experts sharded over all ranks, layouts by ``Greedy`` and splits by ``FlowSplit`` on
drawn loads. A few layers are planned and repeated; planning is not timed. MegaKernels have a second thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.harness.names import chosen
from moesys.balance.plan import StepPlan, plan_layer
from moesys.config import FlowSplit, Fsep, Greedy, MegaKernel, Overlap, Pipelined, Sequential, Strategy, presets
from moesys.config.workload import Generated
from moesys.lab.runs.stopwatch import machine_line, wall_ms
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.lab.show.tables import figure
from moesys.load import LoadMatrix
from moesys.simulator.step_program import simulation
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

    overlap: Annotated[str, Column("overlap")]
    layers: Annotated[int, Column("layers")]
    ranks: Annotated[int, Column("ranks")]
    step_ms: Annotated[float, Column("step ms", figure)]
    path_ms: Annotated[float, Column("path ms", figure)]
    spans_ms: Annotated[float, Column("spans ms", figure)]
    num_spans: Annotated[int, Column("spans")]
    repeats: int


def select(overlap: str) -> dict[str, Overlap]:
    """One overlap by its kind, or all. Raises ValueError for others."""
    return {name: OVERLAPS[name] for name in chosen("overlap", overlap, OVERLAPS)}


def main(overlaps: Mapping[str, Overlap], *, most_ranks: int, repeats: int, json_path: Path | None) -> int:
    """Time, write, print; the exit code."""
    asked = [(name, *size) for size in SIZES if size[1] <= most_ranks for name in overlaps]
    timings = []
    with steps_told("simulate", len(asked)) as tell:
        for name, layers, ranks in asked:
            tell(f"{name}, {layers} layers on {ranks} ranks")
            timings.append(time_step(name, overlaps[name], layers, ranks, repeats))
    machine = machine_line(2 if "mega_kernel" in overlaps else 1, ("numpy", "numba"))
    notes = [f"Medians of {repeats}; planning is not in it. {machine}"]
    title = "MEASURED: bench simulate"
    sheet = Sheet(title, timings, notes)
    publish(
        Report("simulate", title, "measured", [sheet], data={"machine": machine, "rows": timings}), json_path=json_path
    )
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
