"""How long a MegaKernel takes on one rank, and its own kernels apart: nothing travels, so that tiles are what differs.

Imports Triton, which a CPU need not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.calibrate.windows import Effort, timed
from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega.ranks_layer import DIRECTIONS, MegaRun, draw_layer, regions_of
from moesys.config import DType, MegaKernel
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.symmetric.heap import Heap
from moesys.lab.ranks.torchrun_ranks import rank_device
from moesys.moe.expert_parameters import DTYPES
from moesys.overlap.stages import at_once

FUSED, APART = MegaKernel(), MegaKernel(fused="none", overlap_weight_gradients=False)


@dataclass(frozen=True)
class FusedTiles:
    """Seconds of forward and backward of one layer, by window: fused, and by the same kernels one after another."""

    fused_s: list[float]
    apart_s: list[float]


def fused_tiles(size: Size, dtype: DType, effort: Effort, device_type: str) -> FusedTiles:
    """Every rank for itself, all at once. Raises ``PeerTimeoutError`` if a kernel waits for what does not come."""
    device = rank_device(device_type)
    layer = draw_layer(size, 1, DTYPES[dtype], device)
    (heap,) = Heap.virtual(regions_of(layer, [FUSED, APART]), 1, device)
    memory = MegaMemory(heap)
    runs = [MegaRun(layer, 0, point, memory) for point in (FUSED, APART)]
    windows = timed([_step(run) for run in runs], effort, device)
    memory.watch.wait()
    return FusedTiles(*windows)


def _step(run: MegaRun) -> Callable[[], None]:
    def both_ways() -> None:
        for direction in DIRECTIONS:
            at_once(run.stages(direction))

    return both_ways
