"""GPU checks of MegaKernels between ranks: they have the bits of kernels that stand alone."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from gpu_layers import EXPERTS_PER_RANK
from gpu_ranks import GpuRank

from benchmarks.harness.contest import differing, in_words
from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega.mega_contest import TOY, points_of
from benchmarks.mega.ranks_layer import DIRECTIONS, MegaRun, draw_layer, regions_of, stand_alone_runs
from benchmarks.mega.virtual_ranks import side_by_side
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.symmetric.heap import Heap
from moesys.overlap.mega_executor import at_once

pytestmark = pytest.mark.gpu(layer="MegaKernels")

DTYPE = torch.bfloat16
# A point takes seconds in the interpreter: one with a flag per tile, and one with a flag per expert.
REHEARSED_POINTS = ("fused", "experts, de-duplicated")
REHEARSED_PROGRAMS = 4


@pytest.mark.gpu(limit_s=90, ranks="two on one GPU", after=("experts", "rounds on one gpu"))
def test_one_gpu_for_two(gpu: GpuRank) -> str:
    """Two processes, which map each other's memory, run a MegaKernel on one GPU."""
    gpu.require_gpu("'mega points' rehearses two processes on the CPU")
    return _compare_points(gpu, REHEARSED_POINTS[:1])


@pytest.mark.gpu(limit_s=240, ranks="together", after=("experts", "rounds"))
def test_mega_points(gpu: GpuRank) -> str:
    """Every point of the MegaKernels' search space has the bits of kernels that stand alone."""
    return _compare_points(gpu, REHEARSED_POINTS if gpu.rehearsed else None)


def _compare_points(gpu: GpuRank, only: Collection[str] | None) -> str:
    size = TOY if gpu.rehearsed else Size("doctor", 2048, 2048, 768, EXPERTS_PER_RANK * gpu.num_ranks, 8)
    device, rank = gpu.device, gpu.rank
    points = {name: point for name, point in points_of(_programs(gpu)).items() if only is None or name in only}
    layer = draw_layer(size, gpu.num_ranks, DTYPE, device)
    # Every rank computes the expected results of all ranks on its own device.
    alone = stand_alone_runs(layer, [None] * gpu.num_ranks)
    for direction in DIRECTIONS:
        side_by_side([run.stages(direction) for run in alone])
    expected = alone[rank].results
    memory = MegaMemory(Heap.of_group(regions_of(layer, list(points.values())), dist.group.WORLD, device))
    wrong = []
    for name, point in points.items():
        begin_s = time.monotonic()
        run = MegaRun(layer, rank, point, memory)
        for direction in DIRECTIONS:
            at_once(run.stages(direction))
        memory.watch.wait()
        # Compiling takes most of it; the log says so where the time limit ends the check.
        print(f"{name}: {time.monotonic() - begin_s:.1f} s", flush=True)
        if differ := differing(run.results, expected):
            wrong.append(f"{name}: {in_words(differ)}")
    assert not wrong, "; ".join(wrong)
    return f"{gpu.num_ranks} ranks, {len(points)} points: equal bits of output and all gradients"


def _programs(gpu: GpuRank) -> int:
    """Returns the programs per rank with which the programs of all ranks on a GPU are resident."""
    if gpu.rehearsed:
        return REHEARSED_PROGRAMS
    return max(1, torch.cuda.get_device_properties(gpu.device).multi_processor_count // gpu.ranks_per_gpu)
