"""Gradients of the experts' matrices: for every group, the sum over its rows of an outer product.

One program at a time owns one tile of one group's matrix and adds the group's rows in their order, so the sum does not
depend on which program does it, on how many there are, or on the size of the tile; only on ``tile.contraction``, which
says how many rows one product takes. A program has one loop over the steps of all its tiles, so that the rows of the
next tile are on their way while one is stored: with few rows per group, a loop for each tile takes as long to begin and
to end as to multiply (Triton pipelines no flat loop with bounds that are data). One side of the product is not stored
by rows: it is read from its token, whose index is loaded in the loop (ScatterMoE, arXiv 2403.08245, reads so without a
permuted copy).

With ``RowBlocks`` the bits show neither which ranks had an expert's rows, nor how many (``balance.row_blocks`` cuts
rows, ``overlap.exact_sum`` has the grid). A group's rows are cut into blocks. A block's outer products are summed in
float32, as those of a group without blocks are; that sum is rounded to a multiple of the expert's grid, which is so
coarse that float64 adds blocks exactly. The sum of several ranks' totals in float64 is therefore the total of all
blocks, in any order.

G groups, P rows in order of groups, T tokens, L and R the widths of both sides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.products import Gather, Side, columns_by_columns, dot, outer_step, rounded
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import require_contiguous, tile_of
from moesys.kernels.launch import kernel

# The largest tile of blocks: 256 threads have three registers for each sum, and 255 in all. 128 columns spill.
MOST_ROWS, MOST_COLUMNS = 128, 64
# A tile is stored in slices of so many bytes for each warp, and of at least so many columns.
SLICE_BYTES, LEAST_COLUMNS = 4096, 32
# Tiles whose steps a program counts at once.
COUNTED_TILES = tl.constexpr(512)
# Adding it to a float64 and taking it away again rounds to a multiple of 1, half to even.
ROUNDING = tl.constexpr(1.5 * 2.0**52)


class OrderedGroups(NamedTuple):
    """The rows of each group, int32.

    ``entry_P``, ``first_G1`` [G + 1]: each row's choice, and where each group's rows begin (``routing.SortedRouting``).
    ``order_G``: every group once, in which order they are begun, best the largest first (``tiles.groups_by_size``), so
    that none is left for the end; changes no bit.
    """

    entry_P: Tensor
    first_G1: Tensor
    order_G: Tensor


class RowBlocks(NamedTuple):
    """Blocks of rows by which a group is summed. ``rows`` is the size of a block; the last block of a group has up to
    half as many rows less or more, or is its only one. ``grid_G`` float64: a power of two for each group, on which its
    blocks add up to less than 2⁵¹; NaN for a group whose sums are to be NaN.
    """

    rows: int
    grid_G: Tensor


class WeightGradients(NamedTuple):
    """Both sides of two weight gradients, rows [N, width] of this rank in order of groups, and where they go.

    ``up``: dh by x into [G, U, H]; ``down``: dy by weighted activations into [G, H, I]; None where the gradients of
    matrices are not computed.
    """

    dh_NU: Tensor
    x_NH: Tensor
    dgate_up_GUH: Tensor | None
    dy_NH: Tensor
    wa_NI: Tensor
    ddown_GHI: Tensor | None


def weight_gradient(
    left: Tensor,
    right: Tensor,
    groups: OrderedGroups,
    top_k: int,
    gathered: Literal["left", "right"],
    tile: TileConfig,
    out_GLR: Tensor | None = None,
    blocks: RowBlocks | None = None,
) -> Tensor:
    """Returns ``out[g] = Σ_p left[p]ᵀ · right[p]`` over the rows p of group g, in order; summed in float32, rounded
    once. With ``blocks`` it returns ``out[g] = Σ_b round(Σ_p left[p]ᵀ · right[p])`` over the blocks b of group g and
    the rows p of a block: inner sums are float32 and in order, ``round`` goes to the nearest multiple of the group's
    grid, and outer sums are exact in float64.

    The side that is ``gathered`` is [T, width], and its row p is ``side[entry_P[p] // top_k]``; the other is
    [P, width]. For the up projection: left = dh [P, U], right = x [T, H]. For the down projection: left = dy [T, H],
    right = weighted activations [P, I].

    Reads each side once for every tile of the other, mostly from the L2 cache: at least P·(L + R) elements; writes
    G·L·R. Bits depend on ``tile.contraction`` and on nothing else of ``tile``; those of blocks also on ``blocks.rows``.

    Args:
        left: [P or T, L], right: [P or T, R]: float32, float16 or bfloat16, the same, contiguous like all arguments.
        tile: ``rows`` and ``columns`` are those of a tile of the result; blocks cut it down to what fits.
        out_GLR: where it is written, in place of a new tensor: each matrix contiguous; between two of them may be a
            gap. Of any float dtype; with ``blocks`` of float64, or of float32 where one rank has all rows of a group.

    Returns:
        [G, L, R], zeros for a group without rows; a new one is float32, or float64 with ``blocks``. What is infinite or
        NaN is so as in any sum.
    """
    require_contiguous(left=left, right=right)
    num_groups, L, R = len(groups.first_G1) - 1, left.shape[1], right.shape[1]
    if out_GLR is None:
        dtype = torch.float32 if blocks is None else torch.float64
        out_GLR = torch.empty((num_groups, L, R), dtype=dtype, device=left.device)
    elif out_GLR.shape != (num_groups, L, R) or not out_GLR[:1].is_contiguous():
        raise ValueError(
            f"out_GLR is of shape {tuple(out_GLR.shape)} and strides {out_GLR.stride()}; "
            f"give contiguous matrices of shape {(num_groups, L, R)}"
        )
    grid_G, block_rows = None, 0
    if blocks is not None:
        grid_G, block_rows = blocks.grid_G, blocks.rows
        require_contiguous(grid_G=grid_G)
        if out_GLR.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"out_GLR is {out_GLR.dtype}; sums of blocks are written in torch.float64 or torch.float32"
            )
        tile = cut_to_fit(tile)
    num_tiles = num_groups * triton.cdiv(L, tile.rows) * triton.cdiv(R, tile.columns)
    slices = tile.rows * tile.columns * out_GLR.element_size() // (SLICE_BYTES * tile.warps)
    slices = max(1, min(slices, tile.columns // LEAST_COLUMNS))
    sizes = OuterSizes(L, R, out_GLR.stride(0), Gather(gathered == "left", top_k), block_rows, slices)
    grid = (min(num_tiles, tile.num_programs(left.device)),)
    if blocks is None:
        _outer_products[grid](left, right, groups, out_GLR, num_tiles, sizes, **tile.options())
    else:
        _outer_products_by_blocks[grid](left, right, groups, grid_G, out_GLR, num_tiles, sizes, **tile.options())
    return out_GLR


def cut_to_fit(tile: TileConfig) -> TileConfig:
    """Returns the tile, or as much of it as totals leave registers for."""
    return replace(tile, rows=min(tile.rows, MOST_ROWS), columns=min(tile.columns, MOST_COLUMNS))


class OuterSizes(NamedTuple):
    """The constants of the kernels. ``matrix_stride``: elements between two matrices of the result; ``block_rows``:
    rows of a block, 0 where a group's rows are summed without blocks; ``slices``: in how many parts a tile is stored,
    a power of two.
    """

    L: int
    R: int
    matrix_stride: int
    gather: Gather
    block_rows: int
    slices: int


class OuterProduct(NamedTuple):
    """Pointers to both sides, rows of L and R elements, and to matrices [L, R], ``matrix_stride`` elements apart."""

    left: Any
    right: Any
    out: Any
    L: Any
    R: Any
    matrix_stride: Any


@kernel(do_not_specialize=["num_tiles"])
def _outer_products(  # type: ignore[no-untyped-def]
    left_ptr, right_ptr, groups, out_ptr, num_tiles, sizes: tl.constexpr, tiling: tl.constexpr
):
    """Stores this program's tiles. What a tile's first step needs is loaded in the step before, and the numbers behind
    that one and two tiles ahead, so that no load waits for another one.
    """
    gather: tl.constexpr = sizes.gather
    L: tl.constexpr = sizes.L
    R: tl.constexpr = sizes.R
    along_L: tl.constexpr = (L + tiling.rows - 1) // tiling.rows
    along_R: tl.constexpr = (R + tiling.columns - 1) // tiling.columns
    of_group: tl.constexpr = along_L * along_R
    whole: tl.constexpr = L % tiling.rows == 0 and R % tiling.columns == 0
    step = tl.arange(0, tiling.contraction)
    in_rows, in_columns = tl.arange(0, tiling.rows), tl.arange(0, tiling.columns)
    own_steps = _own_steps(groups, num_tiles, of_group, tiling.contraction)
    programs, last_task = tl.num_programs(0), num_tiles - 1
    task = tl.program_id(0)
    group = tl.load(groups.order_G + task // of_group)
    row, end = _rows_of(groups, group)
    tile = tile_of(task % of_group, along_L, along_R, tiling.raster)
    at_left, at_right = tile[0] * tiling.rows, tile[1] * tiling.columns
    task += programs
    next_group = tl.load(groups.order_G + tl.minimum(task, last_task) // of_group)
    next_row, next_end = _rows_of(groups, next_group)
    group_after = tl.load(groups.order_G + tl.minimum(task + programs, last_task) // of_group)
    next_entry = tl.load(groups.entry_P + row + step, mask=step < end - row, other=0)
    total = tl.zeros((in_rows.shape[0], in_columns.shape[0]), tl.float32)
    for _ in tl.range(0, own_steps, num_stages=tiling.stages):
        token = (next_entry // gather.top_k).to(tl.int64)
        left = Side(left_ptr + at_left, in_rows, L, None if whole else L - at_left)
        right = Side(right_ptr + at_right, in_columns, R, None if whole else R - at_right)
        left_rows, right_rows = outer_step(left, right, row, step < end - row, token, gather, tiling)
        total = dot(left_rows.trans(), right_rows, total)
        row += tiling.contraction
        is_last = row >= end
        out_matrix = out_ptr + tl.cast(group, tl.int64) * sizes.matrix_stride
        this_left, this_right = at_left, at_right
        if is_last:
            group, row, end = next_group, next_row, next_end
            tile = tile_of(task % of_group, along_L, along_R, tiling.raster)
            at_left, at_right = tile[0] * tiling.rows, tile[1] * tiling.columns
            task += programs
            next_group = group_after
            next_row, next_end = _rows_of(groups, next_group)
            group_after = tl.load(groups.order_G + tl.minimum(task + programs, last_task) // of_group)
        next_entry = tl.load(groups.entry_P + row + step, mask=step < end - row, other=0)
        if is_last:
            _store_in_slices(out_matrix, total, this_left + in_rows, this_right, L, R, whole, sizes.slices)
            total = tl.zeros((in_rows.shape[0], in_columns.shape[0]), tl.float32)


@triton.jit
def _rows_of(groups, group):  # type: ignore[no-untyped-def]
    """Returns a group's first row, and the one behind its last."""
    return tl.load(groups.first_G1 + group), tl.load(groups.first_G1 + group + 1)


@triton.jit
def _own_steps(groups, num_tiles, tiles_of_group: tl.constexpr, contraction: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the steps of all tiles of this program; a tile of a group without rows has one, which adds zeros."""
    steps = 0
    for first_task in range(tl.program_id(0), num_tiles, tl.num_programs(0) * COUNTED_TILES):
        task = first_task + tl.arange(0, COUNTED_TILES) * tl.num_programs(0)
        group = tl.load(groups.order_G + task // tiles_of_group, mask=task < num_tiles, other=0)
        first, end = _rows_of(groups, group)
        of_tile = tl.maximum((end - first + contraction - 1) // contraction, 1)
        steps += tl.sum(tl.where(task < num_tiles, of_tile, 0), 0)
    return steps


@triton.jit
def _store_in_slices(  # type: ignore[no-untyped-def]
    out_matrix, total, on_left, column, L: tl.constexpr, R: tl.constexpr, whole: tl.constexpr, slices: tl.constexpr
):
    """Stores a tile from ``column`` on: what a whole one needs beside the rows on their way does not fit in shared
    memory.
    """
    columns: tl.constexpr = total.shape[1]
    if slices > 1:
        first, second = total.reshape(total.shape[0], 2, columns // 2).permute(0, 2, 1).split()
        _store_in_slices(out_matrix, first, on_left, column, L, R, whole, slices // 2)
        _store_in_slices(out_matrix, second, on_left, column + columns // 2, L, R, whole, slices // 2)
    else:
        on_right = column + tl.arange(0, columns)
        at = out_matrix + (on_left.to(tl.int64) * R)[:, None] + on_right[None, :]
        out = rounded(total, out_matrix.dtype.element_ty)
        if whole:
            tl.store(at, out)
        else:
            tl.store(at, out, mask=(on_left < L)[:, None] & (on_right < R)[None, :])


@kernel(do_not_specialize=["num_tiles"])
def _outer_products_by_blocks(  # type: ignore[no-untyped-def]
    left_ptr, right_ptr, groups, grid_ptr, out_ptr, num_tiles, sizes: tl.constexpr, tiling: tl.constexpr
):
    gather: tl.constexpr = sizes.gather
    block_rows: tl.constexpr = sizes.block_rows
    tiles_along_L: tl.constexpr = (sizes.L + tiling.rows - 1) // tiling.rows
    tiles_along_R: tl.constexpr = (sizes.R + tiling.columns - 1) // tiling.columns
    for task in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.load(groups.order_G + task // (tiles_along_L * tiles_along_R))
        tile = tile_of(task % (tiles_along_L * tiles_along_R), tiles_along_L, tiles_along_R, tiling.raster)
        product = OuterProduct(left_ptr, right_ptr, out_ptr, sizes.L, sizes.R, sizes.matrix_stride)
        store_outer_product(product, groups.entry_P, groups.first_G1, grid_ptr, group, tile, gather, block_rows, tiling)


@triton.jit
def store_outer_product(  # type: ignore[no-untyped-def]
    product, entry_ptr, first_ptr, grid_ptr, group, tile, gather: tl.constexpr, block_rows: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Stores a tile, numbered along both sides, of one group's matrix. ``entry_ptr``: see ``columns_by_columns``;
    ``grid_ptr``: the grids of groups whose sums are of blocks of ``block_rows``, else None.
    """
    first, end = tl.load(first_ptr + group), tl.load(first_ptr + group + 1)
    on_left = tile[0] * tiling.rows + tl.arange(0, tiling.rows)
    on_right = tile[1] * tiling.columns + tl.arange(0, tiling.columns)
    left = Side(product.left, on_left, product.L, product.L)
    right = Side(product.right, on_right, product.R, product.R)
    if grid_ptr is None:
        total = columns_by_columns(left, right, first, end, entry_ptr, gather, tiling)
        total = rounded(total, product.out.dtype.element_ty)
    else:
        shift = tl.load(grid_ptr + group) * ROUNDING
        total = _sum_of_blocks(left, right, first, end, shift, entry_ptr, gather, block_rows, tiling)
    out_matrix = product.out + tl.cast(group, tl.int64) * product.matrix_stride
    tl.store(
        out_matrix + (on_left.to(tl.int64) * product.R)[:, None] + on_right[None, :],
        total,
        mask=(on_left < product.L)[:, None] & (on_right < product.R)[None, :],
    )


@triton.jit
def _sum_of_blocks(  # type: ignore[no-untyped-def]
    left, right, first, end, shift, entry_ptr, gather: tl.constexpr, block_rows: tl.constexpr, tiling: tl.constexpr
):
    """Returns float64 [left columns, right columns]: the sum over blocks of rows ``first`` to ``end``, each rounded by
    adding ``shift``. One loop over the steps of all blocks, so that the next block's rows are on their way while one is
    added.
    """
    steps: tl.constexpr = (block_rows + tiling.contraction - 1) // tiling.contraction
    gathers: tl.constexpr = entry_ptr is not None
    in_step = tl.arange(0, tiling.contraction)
    # A remainder of less than half a block belongs to the last block (``balance.row_blocks``).
    last = tl.maximum((2 * (end - first) + block_rows) // (2 * block_rows) - 1, 0)
    last_steps = (end - first - last * block_rows + tiling.contraction - 1) // tiling.contraction
    total = tl.zeros((left.columns.shape[0], right.columns.shape[0]), tl.float64)
    part = tl.zeros((left.columns.shape[0], right.columns.shape[0]), tl.float32)
    if gathers:
        # One step ahead, as in ``columns_by_columns``.
        next_entry = tl.load(entry_ptr + first + in_step, mask=in_step < end - first, other=0)
    for number in tl.range(0, last * steps + last_steps, num_stages=tiling.stages):
        block = tl.minimum(number // steps, last)
        row = first + block * block_rows + (number - block * steps) * tiling.contraction
        stop = tl.where(block < last, first + (block + 1) * block_rows, end)
        token = None
        if gathers:
            token = (next_entry // gather.top_k).to(tl.int64)
            next_block = tl.minimum((number + 1) // steps, last)
            next_row = first + next_block * block_rows + (number + 1 - next_block * steps) * tiling.contraction
            next_entry = tl.load(entry_ptr + next_row + in_step, mask=in_step < end - next_row, other=0)
        left_rows, right_rows = outer_step(left, right, row, in_step < stop - row, token, gather, tiling)
        part = dot(left_rows.trans(), right_rows, part)
        if row + tiling.contraction >= stop:
            total += (part.to(tl.float64) + shift) - shift
            part = tl.zeros((left.columns.shape[0], right.columns.shape[0]), tl.float32)
    return total
