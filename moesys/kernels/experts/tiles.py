"""Tiles of a grouped GEMM, and the order in which programs take them.

G groups of consecutive rows, P rows in all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.launch import kernel

# Groups that a program writes the tiles of, with how many others it compares them at once, and how many tiles of each
# it writes at once.
OWN_GROUPS = 8
COMPARED_GROUPS = 512
WRITTEN_TILES = 128


class Tiles(NamedTuple):
    """Row tiles, int32. Those of ``tile_table`` come largest groups first, of equal ones the lower, in row order.

    ``group_M``, ``row_M`` [M]: a tile's group and first row, M = ⌈P / block_rows⌉ + G, of which ``count_1`` [1] are in
    use. A tile ends after ``block_rows`` rows or with its group.
    """

    group_M: Tensor
    row_M: Tensor
    count_1: Tensor
    block_rows: int

    def require(self, block: TileConfig) -> None:
        """Raises ValueError where these are not the tiles of ``block``."""
        if self.block_rows != block.rows:
            raise ValueError(f"tiles of {self.block_rows} rows for blocks of {block.rows}; make them with block.rows")


class RowGroups(NamedTuple):
    """Groups of rows as kernels of products take them: where each begins (int32), and its row tiles."""

    first_G1: Tensor
    tiles: Tiles


def require_contiguous(**tensors: Tensor) -> None:
    """Raises ValueError, which names the tensor, where one is not."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")


def require_matrices(**tensors: Tensor) -> None:
    """Raises ValueError, which names the tensor, where its matrices [E, ., .] are not contiguous, each by itself."""
    for name, tensor in tensors.items():
        if not tensor[:1].is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; each matrix must be contiguous")


def tile_table(first_G1: Tensor, num_rows: int, block_rows: int) -> Tiles:
    """Returns ``Tiles`` of groups that begin at ``first_G1`` int32 [G + 1]; ``num_rows``: P, at least ``first_G1[G]``.

    One kernel that does not wait for the host and is not compiled anew for other counts. Each of its programs reads all
    of ``first_G1`` and writes the tiles of a few groups: 2·M + 1 int32 in all, -1 behind the tiles in use. Largest
    first is Graham's rule for programs that take the next task when they are done ("Bounds on multiprocessing timing
    anomalies", 1969).
    """
    num_groups = len(first_G1) - 1
    most = -(-num_rows // block_rows) + num_groups
    group_M, row_M = (torch.empty(most, dtype=torch.int32, device=first_G1.device) for _ in range(2))
    count_1 = torch.empty(1, dtype=torch.int32, device=first_G1.device)
    tiles = Tiles(group_M, row_M, count_1, block_rows)
    sizes = (block_rows, OWN_GROUPS, COMPARED_GROUPS, WRITTEN_TILES)
    _write_tiles[(triton.cdiv(num_groups, OWN_GROUPS),)](first_G1, tiles, num_groups, most, *sizes)
    return tiles


@triton.jit
def _rows_of(first_G1, group, num_groups):  # type: ignore[no-untyped-def]
    """Returns each group's first row and number of rows; 0, 0 behind the last group."""
    inside = group < num_groups
    first_row = tl.load(first_G1 + group, mask=inside, other=0)
    return first_row, tl.load(first_G1 + group + 1, mask=inside, other=0) - first_row


@triton.jit
def _is_before(other, other_rows, group, rows):  # type: ignore[no-untyped-def]
    """Returns [groups, others]: whether the other group is the larger one, or of equal ones the lower."""
    larger = other_rows[None, :] > rows[:, None]
    return larger | ((other_rows[None, :] == rows[:, None]) & (other[None, :] < group[:, None]))


@kernel(do_not_specialize=["num_groups", "most"])
def _write_tiles(  # type: ignore[no-untyped-def]
    first_G1,
    table,
    num_groups,
    most,
    BLOCK_ROWS: tl.constexpr,
    OWN: tl.constexpr,
    COMPARED: tl.constexpr,
    WRITTEN: tl.constexpr,
):
    """Writes the tiles of a few groups per program. A group's first tile is the number of tiles of all groups that come
    before it, so no program needs the order itself.
    """
    group = tl.program_id(0) * OWN + tl.arange(0, OWN)
    first_row, rows = _rows_of(first_G1, group, num_groups)
    first_tile = tl.zeros([OWN], tl.int32)
    count = 0
    for start in range(0, num_groups, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_rows = _rows_of(first_G1, other, num_groups)[1]
        other_tiles = tl.cdiv(other_rows, BLOCK_ROWS)
        first_tile += tl.sum(tl.where(_is_before(other, other_rows, group, rows), other_tiles[None, :], 0), 1)
        count += tl.sum(other_tiles, 0)
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    for start in range(0, tl.max(tiles, 0), WRITTEN):
        tile = start + tl.arange(0, WRITTEN)[None, :]
        place, inside = first_tile[:, None] + tile, tile < tiles[:, None]
        tl.store(table.group_M + place, group[:, None], mask=inside)
        tl.store(table.row_M + place, first_row[:, None] + tile * BLOCK_ROWS, mask=inside)
    # All programs share the places without a tile.
    for start in range(count + tl.program_id(0) * WRITTEN, most, tl.num_programs(0) * WRITTEN):
        tile = start + tl.arange(0, WRITTEN)
        tl.store(table.group_M + tile, -1, mask=tile < most)
        tl.store(table.row_M + tile, -1, mask=tile < most)
    if tl.program_id(0) == 0:
        tl.store(table.count_1, count)


class RowTiles:
    """The ``Tiles`` of the same rows for several GEMMs: those whose blocks have as many rows share a table."""

    def __init__(self, first_G1: Tensor, num_rows: int) -> None:
        self.first_G1, self._num_rows = first_G1, num_rows
        self._tiles: dict[int, Tiles] = {}

    def of(self, block: TileConfig) -> Tiles:
        """Returns the table for ``block.rows``, which is made in the first call."""
        if block.rows not in self._tiles:
            self._tiles[block.rows] = tile_table(self.first_G1, self._num_rows, block.rows)
        return self._tiles[block.rows]


def groups_by_size(first_G1: Tensor) -> Tensor:
    """Returns int32 [G]: the groups that begin at ``first_G1`` int32 [G + 1], largest first, of equal ones the lower.

    The order of ``Tiles`` for work that is one task a group, whatever its size. One kernel that does not wait for the
    host.
    """
    num_groups = len(first_G1) - 1
    group_G = torch.empty(num_groups, dtype=torch.int32, device=first_G1.device)
    sizes = (OWN_GROUPS, COMPARED_GROUPS)
    _write_groups[(triton.cdiv(num_groups, OWN_GROUPS),)](first_G1, group_G, num_groups, *sizes)
    return group_G


@kernel(do_not_specialize=["num_groups"])
def _write_groups(  # type: ignore[no-untyped-def]
    first_G1, group_G, num_groups, OWN: tl.constexpr, COMPARED: tl.constexpr
):
    """Writes the places of a few groups per program. A group's place is the number of groups that come before it."""
    group = tl.program_id(0) * OWN + tl.arange(0, OWN)
    rows = _rows_of(first_G1, group, num_groups)[1]
    place = tl.zeros([OWN], tl.int32)
    for start in range(0, num_groups, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_rows = _rows_of(first_G1, other, num_groups)[1]
        is_one = (other < num_groups).to(tl.int32)
        place += tl.sum(tl.where(_is_before(other, other_rows, group, rows), is_one[None, :], 0), 1)
    tl.store(group_G + place, group, mask=group < num_groups)


@triton.jit
def rows_of_tile(groups, row_tile, block_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (first row, number of rows, group) of a row tile of ``RowGroups``."""
    group = tl.load(groups.tiles.group_M + row_tile)
    row = tl.load(groups.tiles.row_M + row_tile)
    num_rows = tl.minimum(tl.load(groups.first_G1 + group + 1) - row, block_rows)
    return row, num_rows, group


@triton.jit
def tile_of(task, num_row_tiles, num_column_tiles, raster: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (row tile, column tile) of a task: ``raster`` row tiles at a time sweep all column tiles."""
    tasks_of_sweep = raster * num_column_tiles
    first_row_tile = task // tasks_of_sweep * raster
    row_tiles = tl.minimum(num_row_tiles - first_row_tile, raster)
    in_sweep = task % tasks_of_sweep
    return first_row_tile + in_sweep % row_tiles, in_sweep // row_tiles
