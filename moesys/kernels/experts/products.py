"""Tiles of products of rows that lie one behind the other, with operands read through pointers.

The order in which a row's products are summed depends on the contraction width of a step and on nothing else. Grouped
GEMMs and MegaKernels multiply here, so that both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesys.kernels.experts.numerics import dot


@triton.jit
def rows_by_matrix(  # type: ignore[no-untyped-def]
    left_row,
    matrix,
    column,
    L: tl.constexpr,
    N: tl.constexpr,
    transposed: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    stages: tl.constexpr,
):
    """float32 [rows, block_columns], from ``column`` on: ``left_row`` [rows, 1] points to rows of L elements,
    ``matrix`` to [L, N], or to [N, L] where it is ``transposed`` for the product.
    """
    step = tl.arange(0, block_contraction)
    in_columns = tl.arange(0, block_columns)
    if transposed:
        # Columns that the last tile lacks are its last one, so that no mask is needed.
        in_columns = tl.minimum(in_columns, N - 1 - column)
        right_tile = matrix + column.to(tl.int64) * L + (in_columns[None, :] * L + step[:, None])
        return rows_by_tiles(left_row, right_tile, block_contraction, None, L, block_contraction, stages)
    else:
        right_tile = matrix + column + (step[:, None] * N + in_columns[None, :])
        if N % block_columns == 0:
            return rows_by_tiles(left_row, right_tile, block_contraction * N, None, L, block_contraction, stages)
        else:
            in_matrix = column + in_columns < N
            return rows_by_tiles(left_row, right_tile, block_contraction * N, in_matrix, L, block_contraction, stages)


@triton.jit
def rows_by_tiles(  # type: ignore[no-untyped-def]
    left_row,
    right_tile,
    right_step: tl.constexpr,
    column_mask,
    L: tl.constexpr,
    block_contraction: tl.constexpr,
    stages: tl.constexpr,
):
    """float32 [rows, columns]: ``left_row`` as above, ``right_tile`` [contraction, columns] points to the first step's
    part of a matrix, ``right_step`` elements before the next one's. ``column_mask`` is None where every column may be
    read.
    """
    in_contraction = tl.arange(0, block_contraction)
    whole: tl.constexpr = L % block_contraction == 0
    out = tl.zeros((left_row.shape[0], right_tile.shape[1]), tl.float32)
    for start in tl.range(0, L, block_contraction, num_stages=stages):
        at = start + in_contraction
        if whole:
            left = tl.load(left_row + at[None, :])
        else:
            left = tl.load(left_row + at[None, :], mask=at[None, :] < L, other=0.0)
        if whole and column_mask is None:
            right = tl.load(right_tile)
        elif column_mask is None:
            right = tl.load(right_tile, mask=at[:, None] < L, other=0.0)
        else:
            right = tl.load(right_tile, mask=(at < L)[:, None] & column_mask[None, :], other=0.0)
        right_tile += right_step
        out = dot(left, right, out)
    return out


@triton.jit
def columns_by_columns(  # type: ignore[no-untyped-def]
    left_ptr,
    right_ptr,
    entry_ptr,
    top_k: tl.constexpr,
    gather_left: tl.constexpr,
    first,
    end,
    left_column,
    right_column,
    L,
    R,
    block_contraction: tl.constexpr,
    stages: tl.constexpr,
):
    """float32 [left columns, right columns]: the sum over rows ``first`` to ``end`` of the outer products of these
    columns of ``left`` [rows, L] and ``right`` [rows, R]. Row p of the side that is gathered is its row
    ``entry[p] // top_k``; none is where ``entry_ptr`` is None.
    """
    gathers: tl.constexpr = entry_ptr is not None
    step = tl.arange(0, block_contraction)
    total = tl.zeros((left_column.shape[0], right_column.shape[0]), tl.float32)
    if gathers:
        # Entries are loaded one step ahead. Loaded in their own step they would be pipelined like the rows that wait
        # for them, and each stage of the pipeline would do for half a step.
        next_entry = tl.load(entry_ptr + first + step, mask=step < end - first, other=0)
    for row in tl.range(first, end, block_contraction, num_stages=stages):
        in_group = step < end - row
        token = None
        if gathers:
            token = (next_entry // top_k).to(tl.int64)
            next_entry = tl.load(
                entry_ptr + row + block_contraction + step, mask=step < end - row - block_contraction, other=0
            )
        # A step behind the group's end is zero on both sides, since zero times NaN would be NaN.
        left = tl.load(
            _rows(left_ptr, row, step, token, L, gathers and gather_left) + left_column[None, :],
            mask=in_group[:, None] & (left_column < L)[None, :],
            other=0.0,
        )
        right = tl.load(
            _rows(right_ptr, row, step, token, R, gathers and not gather_left) + right_column[None, :],
            mask=in_group[:, None] & (right_column < R)[None, :],
            other=0.0,
        )
        total = dot(left.trans(), right, total)
    return total


@triton.jit
def _rows(ptr, row, step, token, width, gathered: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows of one step begin."""
    if gathered:
        return ptr + (token * width)[:, None]
    else:
        return ptr + tl.cast(row, tl.int64) * width + (step * width)[:, None]
