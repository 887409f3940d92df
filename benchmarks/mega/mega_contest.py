"""MegaKernels compared with sequential kernels over links of a declared pace: first the bits, then the times.

On a GPU the ranks are virtual: all on one device, each with a stream and its share of the multiprocessors. Without a
GPU, the benchmark is rehearsed on a toy layer in Triton's interpreter, one process per rank, and times mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.contest import Case, Contestant, Outcome, differing, hold, in_words, of_all_ranks
from benchmarks.harness.meters import CpuMeter, GpuMeter
from benchmarks.kernels.drawn_layer import SIZES, Size
from benchmarks.kernels.kernels_contest import DTYPES, WHOLE, require_device
from benchmarks.mega.pacing import paced_link
from benchmarks.mega.ranks_layer import (
    DIRECTIONS,
    MegaRun,
    RanksLayer,
    StandAloneRun,
    draw_layer,
    regions_of,
    stand_alone_runs,
)
from benchmarks.mega.virtual_ranks import side_by_side
from moesys.config.overlap import MegaKernel
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.symmetric.heap import Heap
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish

ON_GPU_RANKS, ON_GPU_BIT_RUNS = 4, 20
TOY = Size("toy", 12, 32, 16, 4, 2)
TOY_RANKS, TOY_BIT_RUNS = 2, 2
RANKS_TIMEOUT_S = 600.0

# The baselines: the same kernels launched one after another, and stand-alone kernels.
SEQUENTIAL, STAND_ALONE = "sequential", "stand-alone kernels"
UNFUSED = MegaKernel(fused="none", overlap_weight_gradients=False)
# Parts of a rank's multiprocessors: communication alone may be faster with fewer programs.
SHARES = {SEQUENTIAL: 1.0, f"{SEQUENTIAL}, 3/4 of programs": 0.75, f"{SEQUENTIAL}, 1/2 of programs": 0.5}
# Planned in the forward, and so in the CUDA graph of it; the plan of all others is made beforehand.
ON_DEVICE = "fused, planned on the device"
# While one of two programs on a multiprocessor waits or stores, the other one multiplies.
PAIRS = "fused, two programs a multiprocessor"
POINTS = {
    "fused": MegaKernel(),
    ON_DEVICE: MegaKernel(),
    PAIRS: MegaKernel(tile_rows=128, tile_columns=128, warps=4, stages=3),
    "fused, no weight gradients beside": MegaKernel(overlap_weight_gradients=False),
    "fused dispatch": UNFUSED.replace(fused="dispatch"),
    "fused combine": UNFUSED.replace(fused="combine"),
    "fetches first": MegaKernel(dispatch_share=1.0),
    "fetches when needed": MegaKernel(dispatch_share=0.0),
    "pushes as tasks": MegaKernel(combine_share=0.25, reduce_share=0.25),
    "experts, de-duplicated": MegaKernel(granularity="expert", deduplicate=True),
}


@dataclass(frozen=True)
class MegaContest:
    """The arguments of the benchmark; ``gb_per_s`` is the bandwidth of each rank's link."""

    size: Size
    num_ranks: int
    dtype: torch.dtype
    points: Mapping[str, MegaKernel]
    gb_per_s: float
    repeats: int
    bit_runs: int
    device: torch.device


def asked_for(
    size: str, dtype: str, gb_per_s: float, *, num_tokens: int | None, repeats: int, device: str
) -> MegaContest:
    """Returns the arguments from the words of a command line.

    Raises ValueError for an unknown word, or if the device is missing.
    """
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
    return MegaContest(
        chosen if num_tokens is None else chosen._replace(T=num_tokens),
        num_ranks,
        DTYPES[dtype],
        points_of(share),
        gb_per_s,
        repeats,
        bit_runs,
        torch.device(device),
    )


def points_of(share: int) -> dict[str, MegaKernel]:
    """Returns the points by name. With ``share`` programs per rank, or twice as many of those of which two fit on a
    multiprocessor, all are resident (``overlap.mega_executor``).
    """
    sequential = {name: UNFUSED.replace(programs=max(1, int(share * part))) for name, part in SHARES.items()}
    return sequential | {name: point.replace(programs=share * (1 + (name == PAIRS))) for name, point in POINTS.items()}


@dataclass(frozen=True)
class MegaRow:
    """The result of one contestant.

    wrong: why it was not timed, or "". samples_ms: of all ranks, by direction and repetition. x: the time of the best
    sequential contestant divided by that of this one.
    """

    name: Annotated[str, Column("contestant")]
    wrong: str
    samples_ms: dict[str, list[float]]
    ms: Annotated[dict[str, Quantiles], Column("{}, ms")]
    x: Annotated[dict[str, Quantiles], Column("{}, x")]

    @property
    def bits(self) -> Annotated[str, Column("bits", after="name")]:
        return self.wrong or "equal"


def rows_of(outcomes: Mapping[str, Outcome]) -> list[MegaRow]:
    """Returns a row per contestant, compared with the fastest sequential one in each direction."""
    samples_of = {name: dict(outcome.samples_ms) for name, outcome in outcomes.items()}
    for samples_ms in filter(None, samples_of.values()):
        samples_ms[WHOLE] = [sum(both) for both in zip(*samples_ms.values(), strict=True)]
    sequential = [samples_ms for name, samples_ms in samples_of.items() if name.startswith(SEQUENTIAL) and samples_ms]
    rows = []
    for name, outcome in outcomes.items():
        ms, x = {}, {}
        for direction, of_ms in samples_of[name].items():
            ms[direction] = Quantiles.of(of_ms)
            if sequential:
                best_ms = min((samples_ms[direction] for samples_ms in sequential), key=statistics.median)
                x[direction] = Quantiles.of_ratios(best_ms, of_ms)
        rows.append(MegaRow(name, outcome.wrong, outcome.samples_ms, ms, x))
    return rows


def main(asked: MegaContest, output: CommandOutput = AS_TABLES) -> int:
    """Checks, times and prints; returns 1 if a bit differs."""
    meter = GpuMeter(asked.device) if asked.device.type == "cuda" else CpuMeter()
    layer = draw_layer(asked.size, asked.num_ranks, asked.dtype, asked.device)
    with steps_told("overlap mega", len(asked.points) + 2, output.quiet) as tell:
        outcomes = (_on_streams if asked.device.type == "cuda" else _on_processes)(asked, layer, tell)
    rows = rows_of(outcomes)
    publish(_report(asked, layer, meter.source, meter.machine, rows), output)
    return int(any(row.wrong for row in rows))


def _report(asked: MegaContest, layer: RanksLayer, source: str, machine: str, rows: Sequence[MegaRow]) -> Report:
    """Returns the table; ``source`` is "measured" on a GPU and "rehearsed" elsewhere."""
    _, T, H, I, E, K = asked.size
    away_bytes = max(layer.away_bytes(rank) for rank in range(asked.num_ranks))
    dtype = str(asked.dtype).removeprefix("torch.")
    graphs = ", eager and as CUDA graphs" if source == "measured" else ""
    notes = [
        f"{machine}; {dtype}",
        f"{asked.size.name}: {asked.num_ranks} ranks of {T} tokens, H={H}, I={I}, E={E}, K={K}. The link of a rank "
        f"carries {asked.gb_per_s:g} GB/s by the device's clock: {link_ms(away_bytes, asked.gb_per_s):.3g} ms for the "
        f"{away_bytes / 1e6:.3g} MB of a dispatch or a combine. Forward and backward each have one of both.",
        f"ms: all ranks, median [p20, p80] of {asked.repeats} interleaved repetitions. x: the time of the best "
        f"'{SEQUENTIAL}' divided by this time in the same repetition; above 1, this is faster. '{SEQUENTIAL}': the "
        f"same kernels launched one after another, with three numbers of programs. '{STAND_ALONE}': copies, and "
        "kernels that have the whole device to themselves.",
        f"Bits: output, dx and all gradients equal those of '{STAND_ALONE}' in each of {asked.bit_runs} "
        f"runs{graphs}. A contestant with a different bit is not timed.",
        "Virtual ranks share one GPU's multiprocessors, L2 cache and memory. The table shows what is hidden behind "
        "what on links of this pace, and the cost of the queue and the flags. It does not show NVLink's latency, its "
        "pace with many small transfers, contention at a receiver, or clocks of several GPUs.",
    ]
    numbers = {name: getattr(asked, name) for name in ("num_ranks", "gb_per_s", "repeats", "bit_runs")}
    data = {"machine": machine, "size": asked.size._asdict(), "dtype": dtype, "away_bytes": away_bytes, **numbers}
    subject = "MegaKernels over paced links"
    title = f"{subject}, {source}: {machine.partition(',')[0]}"
    sheet = Sheet(f"{source.upper()}: {subject}", rows, notes)
    return Report("overlap mega", title, source, [sheet], data={**data, "contestants": rows})


def link_ms(num_bytes: int, gb_per_s: float) -> float:
    return num_bytes / gb_per_s / 1e6


# --- ranks that share a GPU -------------------------------------------------------------------------------


@dataclass
class _Together:
    """The ranks of one contestant on one device: eager until ``capture``, then as two CUDA graphs."""

    runs: Sequence[MegaRun | StandAloneRun]
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

    def results(self, first_rank: int = 0) -> dict[str, Tensor]:
        """Runs forward and backward, and returns the results by name and rank."""
        for direction in DIRECTIONS:
            self.step(direction)
        of_ranks = enumerate(self.runs, first_rank)
        return {f"{name} of rank {rank}": of for rank, run in of_ranks for name, of in run.results.items()}

    def contestant(self) -> Contestant:
        """Returns a contestant whose result is this object, so that the check can run it several times."""
        return Contestant(lambda: self, {direction: partial(self.step, direction) for direction in DIRECTIONS})


def _on_streams(asked: MegaContest, layer: RanksLayer, tell: Callable[[str], None]) -> dict[str, Outcome]:
    heaps = Heap.virtual(regions_of(layer, list(asked.points.values())), asked.num_ranks, asked.device)
    memories = [MegaMemory(heap) for heap in heaps]
    for memory in memories:
        memory.pace = paced_link(asked.gb_per_s, asked.device)
    streams = [torch.cuda.Stream(asked.device) for _ in memories]
    runs: dict[str, Sequence[MegaRun | StandAloneRun]] = {
        STAND_ALONE: stand_alone_runs(layer, [memory.pace for memory in memories])
    }
    for name, point in asked.points.items():
        runs[name] = [MegaRun(layer, rank, point, memory, name == ON_DEVICE) for rank, memory in enumerate(memories)]
    together = {name: _Together(of_ranks, streams) for name, of_ranks in runs.items()}
    expected = {name: of.clone() for name, of in together[STAND_ALONE].results().items()}

    def wrong(_: str, contestant: _Together) -> str:
        return _wrong_bits(contestant, expected, memories, asked.bit_runs)

    setups = {name: of.contestant for name, of in together.items()}
    return hold(Case(setups, wrong, stopwatch=GpuMeter(asked.device).ms), asked.repeats, tell)


def _wrong_bits(
    contestant: _Together, expected: Mapping[str, Tensor], memories: Sequence[MegaMemory], bit_runs: int
) -> str:
    """Runs the contestant eagerly and as CUDA graphs; returns which bits differ, or ""."""
    for captured in (False, True):
        if captured:
            contestant.capture()
        for _ in range(bit_runs):
            results = contestant.results()
            for memory in memories:
                memory.watch.wait()
            if differ := differing(results, expected):
                return in_words(differ) + " in a CUDA graph" * captured
    return ""


# --- a process a rank -------------------------------------------------------------------------------------


def _on_processes(asked: MegaContest, layer: RanksLayer, tell: Callable[[str], None]) -> dict[str, Outcome]:
    tell(f"bits of {STAND_ALONE}")
    runs = stand_alone_runs(layer, [paced_link(asked.gb_per_s, asked.device) for _ in range(asked.num_ranks)])
    expected = _Together(runs, ()).results()
    tell("bits and times of MegaKernels")
    environment, timeouts = {"TRITON_INTERPRET": "1"}, RankTimeouts(run_s=RANKS_TIMEOUT_S)
    with LocalRanks(asked.num_ranks, environment=environment, timeouts=timeouts) as ranks:
        by_rank = ranks.run(_on_rank, asked, expected)
    return {STAND_ALONE: Outcome(), **of_all_ranks(by_rank)}


def _on_rank(asked: MegaContest, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    layer = draw_layer(asked.size, asked.num_ranks, asked.dtype, asked.device)
    memory = MegaMemory(Heap.between_processes(regions_of(layer, list(asked.points.values())), dist.group.WORLD))
    memory.pace = paced_link(asked.gb_per_s, asked.device)
    runs = {name: MegaRun(layer, rank, point, memory, name == ON_DEVICE) for name, point in asked.points.items()}
    own = {name: right for name, right in expected.items() if name.endswith(f" of rank {rank}")}

    def wrong(_: str, alone: _Together) -> str:
        """Returns the first difference, after all runs: other ranks wait for each of them."""
        found = [differing(alone.results(rank), own) for _ in range(asked.bit_runs)]
        return in_words(next(filter(None, found), []))

    setups = {name: _Together([run], ()).contestant for name, run in runs.items()}
    return hold(Case(setups, wrong, before=dist.barrier), asked.repeats)
