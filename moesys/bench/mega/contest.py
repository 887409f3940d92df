"""MegaKernels beside Sequential, forward and backward, over links of a declared pace: bits first, then times.

On a GPU the ranks are virtual: all on one device, each with a stream and its share of the multiprocessors. Without one
the same runs in Triton's interpreter, on a toy, with a process a rank, where times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.bench.harness.meters import CpuMeter, GpuMeter
from moesys.bench.harness.steps import steps_told
from moesys.bench.harness.stopwatch import interleave, wall_ms
from moesys.bench.kernels.aot import SIZES, Size
from moesys.bench.kernels.checks import in_a_line
from moesys.bench.kernels.contest import DTYPES, require_device
from moesys.bench.mega.case import DIRECTIONS, Layer, MegaRun, draw_layer, regions_of
from moesys.bench.mega.report import SEQUENTIAL, STAND_ALONE, Contestant, Report, print_report, write_report
from moesys.bench.mega.sequential import SequentialRun, sequential_runs
from moesys.kernels.mega.arguments import MegaMemory, MegaPoint
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.pacing import new_link
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.stages import side_by_side

ON_GPU_RANKS, ON_GPU_BIT_RUNS = 4, 20
TOY = Size("toy", 12, 32, 16, 4, 2)
TOY_RANKS, TOY_BIT_RUNS = 2, 2
WARM_UPS = 3
RANKS_TIMEOUT_S = 600.0

UNFUSED = MegaPoint(fuse_dispatch=False, fuse_combine=False, fuse_weight_gradients=False)
# What a rank's share of the multiprocessors is multiplied by: communication alone may be quicker with fewer.
SHARES = {SEQUENTIAL: 1.0, f"{SEQUENTIAL}, 3/4 of programs": 0.75, f"{SEQUENTIAL}, 1/2 of programs": 0.5}
# Planned by its forward, and so by the graph that has captured it; all others' plan is made beforehand.
ON_DEVICE = "fused, planned on the device"
POINTS = {
    "fused": MegaPoint(),
    ON_DEVICE: MegaPoint(),
    "fused, no weight gradients beside": MegaPoint(fuse_weight_gradients=False),
    "fused dispatch": replace(UNFUSED, fuse_dispatch=True),
    "fused combine": replace(UNFUSED, fuse_combine=True),
    "fetches first": MegaPoint(dispatch_share=1.0),
    "fetches when needed": MegaPoint(dispatch_share=0.0),
    "pushes as tasks": MegaPoint(combine_share=0.25, reduce_share=0.25),
    "experts, de-duplicated": MegaPoint(granularity="expert", deduplicate=True),
}


@dataclass(frozen=True)
class Plan:
    """What is asked for; ``gb_per_s`` of each rank's link."""

    size: Size
    num_ranks: int
    dtype: torch.dtype
    points: Mapping[str, MegaPoint]
    gb_per_s: float
    repeats: int
    bit_runs: int
    device: torch.device


def plan(
    size: str = "qwen3-30b",
    *,
    dtype: str = "bfloat16",
    gb_per_s: float = 100.0,
    num_tokens: int | None = None,
    repeats: int = 9,
    device: str = "cuda",
) -> Plan:
    """From the words of a command line. Raises ValueError for one that is not known, or without the device."""
    require_device(
        device,
        dtype,
        without_gpu=(
            "MegaKernels are timed on a GPU, and torch finds none here; --device cpu with TRITON_INTERPRET=1 rehearses "
            "this command on a toy, and moesys run experiments/mega_interpret.py trains with them"
        ),
    )
    if gb_per_s <= 0:
        raise ValueError(f"gb_per_s={gb_per_s:g} must be more than 0, the pace of a rank's link")
    if device == "cpu":
        chosen, num_ranks, bit_runs, share = TOY, TOY_RANKS, TOY_BIT_RUNS, 4
    else:
        by_name = {known.name: known for known in SIZES}
        if size not in by_name:
            raise ValueError(f"size={size!r} is not known; use one of {', '.join(by_name)}")
        num_ranks, bit_runs = ON_GPU_RANKS, ON_GPU_BIT_RUNS
        chosen = by_name[size]._replace(T=by_name[size].T // num_ranks)
        share = torch.cuda.get_device_properties(device).multi_processor_count // num_ranks
    return Plan(
        chosen if num_tokens is None else chosen._replace(T=num_tokens),
        num_ranks,
        DTYPES[dtype],
        points_of(share),
        gb_per_s,
        repeats,
        bit_runs,
        torch.device(device),
    )


def points_of(share: int) -> dict[str, MegaPoint]:
    """By name; ``share``: the programs of a rank, which so all are resident together (``overlap.stages``)."""
    sequential = {name: replace(UNFUSED, programs=max(1, int(share * part))) for name, part in SHARES.items()}
    return sequential | {name: replace(point, programs=share) for name, point in POINTS.items()}


def main(plan: Plan, out: Path | None = None) -> int:
    """Checks, times, prints; 1 if a bit differs. ``out``: a folder for all numbers and a page of tables."""
    on_gpu = plan.device.type == "cuda"
    meter = GpuMeter(plan.device) if on_gpu else CpuMeter()
    layer = draw_layer(plan.size, plan.num_ranks, plan.dtype, plan.device)
    with steps_told("overlap mega", len(plan.points) + 2) as tell:
        found = (_on_streams if on_gpu else _on_processes)(plan, layer, tell)
    report = Report(
        meter.source,
        meter.machine,
        plan.size,
        plan.num_ranks,
        str(plan.dtype).removeprefix("torch."),
        plan.gb_per_s,
        max(layer.away_bytes(rank) for rank in range(plan.num_ranks)),
        plan.repeats,
        plan.bit_runs,
        found,
    )
    if out is not None:
        write_report(report, out)
    print_report(report)
    return int(not report.holds)


def different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of results whose bits differ, or that are missing."""
    return [name for name, right in expected.items() if name not in found or not torch.equal(found[name], right)]


# --- ranks that share a GPU -------------------------------------------------------------------------------


@dataclass
class _Together:
    """All ranks of one contestant on one GPU: eager until ``capture``, then as two CUDA graphs."""

    runs: Sequence[MegaRun | SequentialRun]
    streams: Sequence[torch.cuda.Stream]
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def step(self, direction: str) -> None:
        if direction in self.graphs:
            self.graphs[direction].replay()
        else:
            side_by_side([run.stages(direction) for run in self.runs], self.streams)

    def capture(self) -> None:
        for direction in DIRECTIONS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step(direction)
            self.graphs[direction] = graph

    def results(self) -> dict[str, Tensor]:
        """Of a forward and backward; names tell the rank."""
        for direction in DIRECTIONS:
            self.step(direction)
        return {f"{name} of rank {rank}": of for rank, run in enumerate(self.runs) for name, of in run.results.items()}


def _on_streams(plan: Plan, layer: Layer, tell: Callable[[str], None]) -> list[Contestant]:
    meter = GpuMeter(plan.device)
    heaps = Heap.virtual(regions_of(layer, list(plan.points.values())), plan.num_ranks, plan.device)
    memories = [MegaMemory(heap) for heap in heaps]
    for memory in memories:
        memory.link = new_link(plan.gb_per_s, plan.device)
    streams = [torch.cuda.Stream(plan.device) for _ in memories]
    runs: dict[str, Sequence[MegaRun | SequentialRun]] = {
        STAND_ALONE: sequential_runs(layer, [memory.link for memory in memories])
    }
    for name, point in plan.points.items():
        runs[name] = [MegaRun(layer, rank, point, memory, name == ON_DEVICE) for rank, memory in enumerate(memories)]
    together = {name: _Together(of_ranks, streams) for name, of_ranks in runs.items()}
    expected = {name: of.clone() for name, of in together[STAND_ALONE].results().items()}
    found = {name: Contestant(name) for name in together}
    for name, contestant in together.items():
        tell(f"bits of {name}")
        try:
            found[name].wrong = _wrong_bits(contestant, expected, memories, plan.bit_runs)
        except Exception as error:
            found[name].wrong = in_a_line(error)
    tell("times")
    ready = {name: contestant for name, contestant in together.items() if not found[name].wrong}
    works = {(name, direction): partial(of.step, direction) for name, of in ready.items() for direction in DIRECTIONS}
    _record(found, works, plan.repeats, meter.ms)
    return list(found.values())


def _wrong_bits(
    contestant: _Together, expected: Mapping[str, Tensor], memories: Sequence[MegaMemory], bit_runs: int
) -> str:
    """Runs again and again, captures it, and runs the graphs as often. "" where all bits are as expected."""
    for captured in (False, True):
        if captured:
            contestant.capture()
        for _ in range(bit_runs):
            results = contestant.results()
            for memory in memories:
                memory.watch.wait()
            if differ := different(results, expected):
                return f"{', '.join(differ)} differ{'s' * (len(differ) == 1)}{' in a CUDA graph' * captured}"
    return ""


def _record(
    found: Mapping[str, Contestant],
    works: Mapping[tuple[str, str], Callable[[], object]],
    repeats: int,
    stopwatch: Callable[[Callable[[], object]], float],
    before: Callable[[], object] = lambda: None,
) -> None:
    by_label = {" ".join(label): work for label, work in works.items()}
    samples_ms = interleave(by_label, repeats, stopwatch=stopwatch, before=before) if repeats else {}
    for name, direction in works:
        found[name].samples_ms[direction] = samples_ms.get(f"{name} {direction}", [])


# --- a process a rank -------------------------------------------------------------------------------------


def _on_processes(plan: Plan, layer: Layer, tell: Callable[[str], None]) -> list[Contestant]:
    tell(f"bits of {STAND_ALONE}")
    runs = sequential_runs(layer, [new_link(plan.gb_per_s, plan.device) for _ in range(plan.num_ranks)])
    expected = _Together(runs, ()).results()
    tell("bits and times of MegaKernels")
    with LocalRanks(plan.num_ranks, environment={"TRITON_INTERPRET": "1"}, timeout_s=RANKS_TIMEOUT_S) as ranks:
        by_rank = ranks.run(_on_rank, plan, expected)
    found = [Contestant(STAND_ALONE)]
    for of_ranks in zip(*by_rank, strict=True):
        wrong = "; ".join(of_rank.wrong for of_rank in of_ranks if of_rank.wrong)
        samples_ms = {
            direction: [max(of) for of in zip(*(of_rank.samples_ms[direction] for of_rank in of_ranks), strict=True)]
            for direction in of_ranks[0].samples_ms
        }
        found.append(Contestant(of_ranks[0].name, wrong, samples_ms))
    return found


def _on_rank(plan: Plan, expected: Mapping[str, Tensor]) -> list[Contestant]:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    layer = draw_layer(plan.size, plan.num_ranks, plan.dtype, plan.device)
    memory = MegaMemory(Heap.between_processes(regions_of(layer, list(plan.points.values())), dist.group.WORLD))
    memory.link = new_link(plan.gb_per_s, plan.device)
    runs = {name: MegaRun(layer, rank, point, memory, name == ON_DEVICE) for name, point in plan.points.items()}
    found = {name: Contestant(name) for name in runs}
    own = {name: right for name, right in expected.items() if name.endswith(f" of rank {rank}")}
    for name, run in runs.items():
        for _ in range(plan.bit_runs):
            for direction in DIRECTIONS:
                side_by_side([run.stages(direction)])
            differ = different({f"{name} of rank {rank}": of for name, of in run.results.items()}, own)
            if differ:
                found[name].wrong = f"{', '.join(differ)} differ{'s' * (len(differ) == 1)}"
    # All ranks time the same points, or they would wait for one another for ever.
    wrong = torch.tensor([bool(found[name].wrong) for name in runs], dtype=torch.int64)
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    ready = {name: run for (name, run), is_wrong in zip(runs.items(), wrong.tolist(), strict=True) if not is_wrong}
    works = {
        (name, direction): partial(_step, run, direction) for name, run in ready.items() for direction in DIRECTIONS
    }
    _record(found, works, plan.repeats, wall_ms, dist.barrier)
    return list(found.values())


def _step(run: MegaRun, direction: str) -> None:
    side_by_side([run.stages(direction)])
