"""Gradients of the experts' matrices: for every group, the sum over its rows of an outer product.

One program at a time owns one tile of one group's matrix and adds the group's rows in their order, so the sum does not
depend on which program does it, on how many there are, or on the size of the tile; only on ``tile.contraction``, which
says how many rows one product takes. One side of the product is not stored by rows: it is read from its token, whose
index is loaded in the loop (ScatterMoE, arXiv 2403.08245, reads so without a permuted copy).

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

    ``up``: dh by x into [G, U, H]; ``down``: dy by weighted activations into [G, H, I].
    """

    dh_NU: Tensor
    x_NH: Tensor
    dgate_up_GUH: Tensor
    dy_NH: Tensor
    wa_NI: Tensor
    ddown_GHI: Tensor


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
    sizes = OuterSizes(L, R, out_GLR.stride(0), Gather(gathered == "left", top_k), block_rows)
    _outer_products[(min(num_tiles, tile.num_programs(left.device)),)](
        left, right, groups, grid_G, out_GLR, num_tiles, sizes, **tile.options()
    )
    return out_GLR


def cut_to_fit(tile: TileConfig) -> TileConfig:
    """Returns the tile, or as much of it as totals leave registers for."""
    return replace(tile, rows=min(tile.rows, MOST_ROWS), columns=min(tile.columns, MOST_COLUMNS))


class OuterSizes(NamedTuple):
    """The constants of the kernel. ``matrix_stride``: elements between two matrices of the result; ``block_rows``:
    rows of a block, 0 where a group's rows are summed without blocks.
    """

    L: int
    R: int
    matrix_stride: int
    gather: Gather
    block_rows: int


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
    left, right = Side(product.left, on_left, product.L), Side(product.right, on_right, product.R)
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
