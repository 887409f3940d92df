"""Tiles of a grouped GEMM: how large they are, which there are, and in which order programs take them.

G groups of rows that lie one behind the other, P rows in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The interpreter runs programs one after another; a few of them show whether they share the tiles rightly.
INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True)
class Block:
    """Sizes of one tile of a grouped GEMM, and how programs work on it.

    ``contraction`` decides in which groups products are summed, and so the bits; nothing else does. ``raster``: so
    many row tiles sweep all column tiles together, to find them in the L2 cache. ``programs``: how many are resident,
    by default one a multiprocessor.
    """

    rows: int = 128
    columns: int = 128
    contraction: int = 64
    warps: int = 8
    stages: int = 3
    raster: int = 8
    programs: int | None = None

    def num_programs(self, device: torch.device) -> int:
        """Resident programs on ``device``."""
        if self.programs is not None:
            return self.programs
        if device.type != "cuda":
            return INTERPRETED_PROGRAMS
        return torch.cuda.get_device_properties(device).multi_processor_count


class Tiles(NamedTuple):
    """Row tiles, largest groups first (of equal ones the lower), those of a group in row order; int32.

    ``group_M``, ``row_M`` [M]: a tile's group and first row, M = ⌈P / block_rows⌉ + G, of which ``count_1`` [1] are in
    use. A tile ends after ``block_rows`` rows or with its group.
    """

    group_M: Tensor
    row_M: Tensor
    count_1: Tensor
    block_rows: int


def tile_table_reference(first_G1: Tensor, num_rows: int, block_rows: int) -> Tiles:
    """``Tiles`` of groups that begin at ``first_G1`` int32 [G + 1]; ``num_rows``: P, at least ``first_G1[G]``."""
    first = first_G1.tolist()
    num_groups = len(first) - 1
    most = -(-num_rows // block_rows) + num_groups
    groups = sorted(range(num_groups), key=lambda group: (first[group] - first[group + 1], group))
    tiles = [(group, row) for group in groups for row in range(first[group], first[group + 1], block_rows)]
    padded = torch.tensor(tiles + [(-1, -1)] * (most - len(tiles)), dtype=torch.int32, device=first_G1.device)
    count_1 = torch.tensor([len(tiles)], dtype=torch.int32, device=first_G1.device)
    group_M, row_M = padded.view(most, 2).t().contiguous()
    return Tiles(group_M, row_M, count_1, block_rows)


@triton.jit
def tile_of(task, num_row_tiles, num_column_tiles, raster: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tile, column tile) of a task: ``raster`` row tiles at a time sweep all column tiles."""
    tasks_of_sweep = raster * num_column_tiles
    first_row_tile = task // tasks_of_sweep * raster
    row_tiles = tl.minimum(num_row_tiles - first_row_tile, raster)
    in_sweep = task % tasks_of_sweep
    return first_row_tile + in_sweep % row_tiles, in_sweep // row_tiles
