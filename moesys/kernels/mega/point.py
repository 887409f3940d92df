"""One point of the MegaKernels' search space, and what it makes of a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import triton
from torch import Tensor

from moesys.kernels.experts.activation_gradient import SUM_COLUMNS
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.products import LowRankRows
from moesys.kernels.experts.tile_config import (
    THREADS_OF_WARP,
    TileConfig,
    TileConfigs,
    all_registers,
    usual_programs,
)
from moesys.kernels.experts.tile_tuner import HOPPER, INTERPRETED, OLD_TRITON, SINGLE, capability_of
from moesys.kernels.mega.exchange import TileOrder
from moesys.kernels.mega.tasks import WHOLE
from moesys.kernels.symmetric.heap import Heap

# Triton 3.6, and every release for GPUs after Hopper, spills registers in backward's combine if tiles of weight
# gradients have more columns (``python -m benchmarks kernels --aot``).
NARROW_COLUMNS = 128
# The multiprocessors that NCCL's kernels find free beside MegaKernels between ranks; it takes up to as many channels.
SPARED_BETWEEN_RANKS = 16
# The bytes of one load, and of all loads that a thread has in flight.
LOAD_BYTES, FLIGHT_BYTES = 16, 128


class MegaPoint(Protocol):
    """One point of the search space (UniEP, arXiv 2604.19241), whoever declares it. None of its fields changes a bit.

    ``fused``: sides that are one launch with their product, else one launch after another. ``dispatch_share``: at least
    this part of the tasks before the last fetch are fetches; 1 pulls all first, 0 pulls what the next tiles need.
    ``combine_share``: 0 has tiles of the product push their rows themselves; else pushes are tasks of their own, at
    most this part of the tasks. ``reduce_share``: at most this part of the last tasks sums returned rows while
    there are tiles of weight gradients. ``granularity`` of the flags that are waited for. ``deduplicate``: a token that
    goes to several experts of a rank is pulled once. ``overlap_weight_gradients``: their tiles are tasks of backward's
    combine. ``keep_x``: rows of x stay from forward to backward, else they are pulled again. ``fetch_rows``: rows of
    one fetch, ``sum_tokens``: tokens of one sum, powers of two. ``tile_rows``, ``tile_columns`` (at least
    ``SUM_COLUMNS``), ``warps``, ``stages``: of every product's tiles, None for what is likely fast
    (``TileConfigs.require_warpgroups`` has what GPUs need of them); with a gate, a tile of ``up`` has half of the
    columns twice. ``programs``: how many are resident, None for one a multiprocessor.
    """

    @property
    def fused(self) -> Literal["both", "dispatch", "combine", "none"]: ...
    @property
    def dispatch_share(self) -> float: ...
    @property
    def combine_share(self) -> float: ...
    @property
    def reduce_share(self) -> float: ...
    @property
    def granularity(self) -> Literal["tile", "expert"]: ...
    @property
    def tile_order(self) -> TileOrder: ...
    @property
    def deduplicate(self) -> bool: ...
    @property
    def keep_x(self) -> bool: ...
    @property
    def overlap_weight_gradients(self) -> bool: ...
    @property
    def fetch_rows(self) -> int: ...
    @property
    def sum_tokens(self) -> int: ...
    @property
    def tile_rows(self) -> int | None: ...
    @property
    def tile_columns(self) -> int | None: ...
    @property
    def warps(self) -> int | None: ...
    @property
    def stages(self) -> int | None: ...
    @property
    def programs(self) -> int | None: ...


def fuses(point: MegaPoint, side: Literal["dispatch", "combine"]) -> bool:
    """Returns whether ``side`` is one launch with its product."""
    return point.fused in ("both", side)


def blocks_at(
    point: MegaPoint, activation: str, dtype: torch.dtype, device: torch.device, capability: int | None = None
) -> TileConfigs:
    """Returns the tiles of all products. They have equal numbers of rows, because they share a table, and operands
    through pointers, because TMA must not read rows that other programs have just stored. ``capability``: of the GPU,
    None for that of ``device``.
    """
    if device.type == "cpu":
        usual = INTERPRETED
    else:
        usual = (
            SINGLE if dtype == torch.float32 else TileConfig(rows=128, columns=256, contraction=64, warps=8, stages=4)
        )
    block = replace(
        usual,
        rows=point.tile_rows or usual.rows,
        columns=point.tile_columns or usual.columns,
        warps=point.warps or usual.warps,
        stages=point.stages or usual.stages,
    )
    halved = replace(block, columns=max(16, block.columns // 2)) if GATED[activation] else block
    if capability is None:
        capability = capability_of(device)
    narrow = OLD_TRITON or capability > HOPPER
    outer = replace(block, columns=min(block.columns, NARROW_COLUMNS)) if narrow else block
    found = replace(TileConfigs.all_of(block), up=halved, weight_gradient=outer)
    if block.warps >= usual.warps:
        return found
    # With fewer warps a thread has more of a tile, and what follows from it does not fit in registers beside it.
    half = replace(block, columns=max(SUM_COLUMNS, block.columns // 2))
    return replace(found, activation_gradient=half, weight_gradient=half if capability > HOPPER else outer)


def programs_at(point: MegaPoint, heap: Heap) -> int:
    """Returns how many programs are resident. Those of several ranks leave multiprocessors to collectives, which would
    otherwise wait for the end of kernels that wait for peers.
    """
    return point.programs or usual_programs(heap.arena.device, SPARED_BETWEEN_RANKS if heap.num_ranks > 1 else 0)


def columns_at_once(num_rows: int, rows_NH: Tensor, block: TileConfig) -> int:
    """Returns how many columns of ``num_rows`` rows a program copies at a time: eight loads of each thread are under
    way before it stores what the first has brought, as memory of a peer is a microsecond away.
    """
    size = rows_NH.element_size()
    columns = FLIGHT_BYTES * THREADS_OF_WARP * block.warps // (num_rows * size)
    return max(LOAD_BYTES // size, min(columns, triton.next_power_of_2(rows_NH.shape[1])))


def parts_of(share: float) -> int:
    """Returns a share of the tasks in units of 1 / ``WHOLE``."""
    return round(share * WHOLE.value)


def launch_options(block: TileConfig, low_rank: LowRankRows | None) -> dict[str, Any]:
    """Returns the options of a launch of ``block``, whose one program per multiprocessor has all registers."""
    return block.options(low_rank=low_rank) | all_registers(block.warps)
