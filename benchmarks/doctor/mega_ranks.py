"""MegaKernels between ranks: at every point of their search space the bits of kernels that stand alone."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from benchmarks.doctor.layers import EACH
from benchmarks.doctor.place import Place, require
from benchmarks.harness.contest import differing, in_words
from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega.mega_contest import TOY, points_of
from benchmarks.mega.ranks_layer import DIRECTIONS, MegaRun, draw_layer, regions_of, stand_alone_runs
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.symmetric.heap import Heap
from moesys.overlap.stages import at_once, side_by_side

DTYPE = torch.bfloat16
# In the interpreter a point takes seconds: one flag a tile, and one an expert.
REHEARSED_POINTS = ("fused", "experts, de-duplicated")
PROGRAMS = 4


def one_point_agrees(place: Place) -> str:
    """Two processes that map each other's memory on one GPU."""
    place.require_gpu("two processes of the CPU are what 'mega points' rehearses")
    return _agree(place, REHEARSED_POINTS[:1])


def points_agree(place: Place) -> str:
    return _agree(place, REHEARSED_POINTS if place.rehearsed else None)


def _agree(place: Place, only: Collection[str] | None) -> str:
    size = TOY if place.rehearsed else Size("doctor", 2048, 2048, 768, EACH * place.num_ranks, 8)
    device, rank = place.device, place.rank
    points = {name: point for name, point in points_of(_share(place)).items() if only is None or name in only}
    layer = draw_layer(size, place.num_ranks, DTYPE, device)
    # Every rank computes what all must find, on its own device.
    alone = stand_alone_runs(layer, [None] * place.num_ranks)
    for direction in DIRECTIONS:
        side_by_side([run.stages(direction) for run in alone])
    expected = alone[rank].results
    memory = MegaMemory(Heap.of_group(regions_of(layer, list(points.values())), dist.group.WORLD, device))
    wrong = []
    for name, point in points.items():
        run = MegaRun(layer, rank, point, memory)
        for direction in DIRECTIONS:
            at_once(run.stages(direction))
        memory.watch.wait()
        if differ := differing(run.results, expected):
            wrong.append(f"{name}: {in_words(differ)}")
    require(not wrong, "; ".join(wrong))
    return f"{place.num_ranks} ranks, {len(points)} points: equal bits of output and all gradients"


def _share(place: Place) -> int:
    """Programs of a rank, so that all of those that share a GPU are resident."""
    if place.rehearsed:
        return PROGRAMS
    return max(1, torch.cuda.get_device_properties(place.device).multi_processor_count // place.ranks_of_gpu)
