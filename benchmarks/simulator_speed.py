"""The command ``simulate``: how long the simulator takes for one step, on few ranks and on many.

Layers of Qwen3-30B-A3B on H100, with experts sharded over all ranks, layouts by ``Greedy`` and splits by ``FlowSplit``
on generated loads. A few layers are planned and repeated; planning is not timed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from benchmarks.harness.options import Repeats, chosen, machine_line
from benchmarks.harness.stopwatch import wall_ms
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.plan import StepPlan, plan_layer
from moesys.config import Fsep, Overlap, Strategy, presets
from moesys.config.overlap import MegaKernel, Pipelined, Sequential
from moesys.config.workload import Generated
from moesys.lab.commands.options import option, refusing
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, figure, publish
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
    """Median milliseconds of one size over ``repeats``.

    step_ms: to simulate the step, with its timeline. spans_ms: to list all spans. path_ms: to find the critical path.
    """

    overlap: Annotated[str, Column("overlap")]
    layers: Annotated[int, Column("layers")]
    ranks: Annotated[int, Column("ranks")]
    step_ms: Annotated[float, Column("step ms", figure)]
    path_ms: Annotated[float, Column("path ms", figure)]
    spans_ms: Annotated[float, Column("spans ms", figure)]
    num_spans: Annotated[int, Column("spans")]
    repeats: int


def bench_simulate(
    overlap: Annotated[str, option("NAME", "sequential, pipelined, mega_kernel or all.")] = "sequential",
    most_ranks: Annotated[int, option("N", "Leave out larger clusters.", min=1)] = 1024,
    repeats: Repeats = 3,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Times the simulator."""
    with refusing():
        names = chosen("overlap", overlap, OVERLAPS)
    asked = [(name, *size) for size in SIZES if size[1] <= most_ranks for name in names]
    timings = []
    with steps_told("simulate", len(asked), output.quiet) as tell:
        for name, layers, ranks in asked:
            tell(f"{name}, {layers} layers on {ranks} ranks")
            timings.append(time_step(name, layers, ranks, repeats))
    machine = machine_line(1, ("numpy", "numba"))
    title = "MEASURED: time of the simulator"
    sheet = Sheet(title, timings, [f"Medians of {repeats} repetitions, without planning. {machine}"])
    data = {"machine": machine, "rows": timings}
    publish(Report("simulate", title, "measured", [sheet], data=data), output)


def time_step(name: str, layers: int, ranks: int, repeats: int) -> Timing:
    """Times one size, after one run in which numba compiles."""
    plan = step_plan(OVERLAPS[name], layers, ranks)
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
    """Returns a step of ``layers`` layers, which repeat the plans of ``PLANNED_LAYERS``."""
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
