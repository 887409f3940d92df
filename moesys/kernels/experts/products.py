"""Products of tiles of consecutive rows, with operands read through pointers or by TMA.

The order in which a row's products are summed depends on the contraction width of a step and on nothing else. Grouped
GEMMs and MegaKernels multiply here, so that both give the same bits.

TMA reads tiles by tensor descriptors, which kernels make themselves: where warps are specialised, Triton splits tiles
between two groups of warps, and descriptors with them. Descriptors from the host stay whole, which Triton 3.9 refuses
and Triton 3.6 compiles into loads that write behind their buffers.

Products and rounding are the same in Triton's interpreter, which cannot compute in bfloat16: it multiplies the bit
patterns as if they were integers, and cuts float32 off where bfloat16 should round. So there operands are converted to
float32 first, which changes no product, and results are rounded by hand. It multiplies tiles by numpy's BLAS, whose
sums depend on how large the tile is on some processors (OpenBLAS on those without AVX-512). So there products are
summed element by element. On a GPU all is what Triton does by itself.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TMA_BYTES = 16


@triton.jit
def dot(left, right, total):  # type: ignore[no-untyped-def]
    """Returns ``total`` + ``left`` [M, K] @ ``right`` [K, N] in float32. M and N change no element's bits."""
    if INTERPRETED:
        return total + tl.sum(left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :], axis=1)
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 ``x`` in ``dtype``, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        # NaN has no neighbour to be rounded to
        kept = tl.where(x == x, even, bits)
        return (kept & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(dtype)


class Side(NamedTuple):
    """One side of an outer product: ``first`` points into rows of ``width`` elements, of which ``columns`` below
    ``limit`` are read; None: all of them.
    """

    first: Any
    columns: Any
    width: Any
    limit: Any


class LowRankRows(NamedTuple):
    """What LoRA adds to a product: rows [P, r] in order of groups, times the matrix of their group, which lies as that
    of the product does: [r, N], or [N, r] where that is transposed. r is a multiple of 16, and that of the ``tiling``.
    """

    rows_PR: Any
    matrices: Any


class Gather(NamedTuple):
    """The side of an outer product that is read by token, and the number of choices of a token."""

    left: bool
    top_k: int


@triton.jit
def rows_by_matrix(  # type: ignore[no-untyped-def]
    left_row, matrix, column, L: tl.constexpr, N: tl.constexpr, transposed: tl.constexpr, tiling: tl.constexpr
):
    """Returns float32 [rows, tiling.columns], from ``column`` on: ``left_row`` [rows, 1] points to rows of L elements,
    ``matrix`` to [L, N], or to [N, L] where it is ``transposed`` for the product.
    """
    step = tl.arange(0, tiling.contraction)
    in_columns = tl.arange(0, tiling.columns)
    if transposed:
        # Columns that the last tile lacks are its last one, so that no mask is needed.
        in_columns = tl.minimum(in_columns, N - 1 - column)
        right_tile = matrix + column.to(tl.int64) * L + (in_columns[None, :] * L + step[:, None])
        return rows_by_tiles(left_row, right_tile, tiling.contraction, None, L, tiling)
    else:
        right_tile = matrix + column + (step[:, None] * N + in_columns[None, :])
        if N % tiling.columns == 0:
            return rows_by_tiles(left_row, right_tile, tiling.contraction * N, None, L, tiling)
        else:
            in_matrix = column + in_columns < N
            return rows_by_tiles(left_row, right_tile, tiling.contraction * N, in_matrix, L, tiling)


@triton.jit
def rows_by_tiles(  # type: ignore[no-untyped-def]
    left_row, right_tile, right_step: tl.constexpr, column_mask, L: tl.constexpr, tiling: tl.constexpr
):
    """Returns float32 [rows, columns]: ``left_row`` as above, ``right_tile`` [contraction, columns] points to the first
    step's part of a matrix, ``right_step`` elements before the next one's. ``column_mask`` is None where every column
    may be read.
    """
    in_contraction = tl.arange(0, tiling.contraction)
    whole: tl.constexpr = L % tiling.contraction == 0
    out = tl.zeros((left_row.shape[0], right_tile.shape[1]), tl.float32)
    for start in tl.range(0, L, tiling.contraction, num_stages=tiling.stages):
        at = start + in_contraction
        left = left_step(left_row, 0, start, L, False, tiling.contraction)
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
def plus_low_rank(  # type: ignore[no-untyped-def]
    total, low_rank, row, num_rows, matrix, column, N: tl.constexpr, halves: tl.constexpr, transposed: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Returns a float32 tile of a product plus that of ``LowRankRows``; of a matrix with ``halves`` of N columns, the
    tile has ``tiling.columns`` of each. Returns ``total`` where ``low_rank`` is None.
    """
    if low_rank is None:
        return total
    else:
        rank: tl.constexpr = tiling.rank
        step = tl.arange(0, 16)
        # Rows and columns that a tile lacks are its last ones, so that no mask is needed.
        of_row = row + tl.minimum(tl.arange(0, tiling.rows), num_rows - 1)
        of_column = tl.arange(0, halves * tiling.columns)
        of_column = tl.minimum(column + of_column % tiling.columns, N - 1) + of_column // tiling.columns * N
        left = low_rank.rows_PR + of_row.to(tl.int64)[:, None] * rank + step[None, :]
        right = low_rank.matrices + matrix.to(tl.int64) * (halves * N * rank)
        along: tl.constexpr = 1 if transposed else halves * N
        right += of_column[None, :] * (rank if transposed else 1) + step[:, None] * along
        for start in tl.static_range(0, rank, 16):
            total = dot(tl.load(left + start), tl.load(right + start * along), total)
        return total


@triton.jit
def left_step(  # type: ignore[no-untyped-def]
    left, row, start, L: tl.constexpr, by_tma: tl.constexpr, contraction: tl.constexpr
):
    """Returns [rows, contraction] of the left operand, from ``start`` of L on: ``left`` is a descriptor of rows, of
    which ``row`` is the first, or [rows, 1] pointers to rows.
    """
    at = start + tl.arange(0, contraction)
    if by_tma:
        return left.load([row, start])
    elif L % contraction == 0:
        return tl.load(left + at[None, :])
    else:
        return tl.load(left + at[None, :], mask=at[None, :] < L, other=0.0)


@triton.jit
def columns_by_columns(  # type: ignore[no-untyped-def]
    left, right, first, end, entry_ptr, gather: tl.constexpr, tiling: tl.constexpr
):
    """Returns float32 [left columns, right columns]: the sum over rows ``first`` to ``end`` of the outer products of
    the columns of both ``Side``. Row p of the side that is gathered is its row ``entry[p] // top_k``; none is where
    ``entry_ptr`` is None.
    """
    gathers: tl.constexpr = entry_ptr is not None
    step = tl.arange(0, tiling.contraction)
    total = tl.zeros((left.columns.shape[0], right.columns.shape[0]), tl.float32)
    if gathers:
        # Entries are loaded one step ahead. Loaded in their own step they would be pipelined like the rows that need
        # them, and each stage of the pipeline would cover half a step only.
        next_entry = tl.load(entry_ptr + first + step, mask=step < end - first, other=0)
    for row in tl.range(first, end, tiling.contraction, num_stages=tiling.stages):
        token = None
        if gathers:
            token = (next_entry // gather.top_k).to(tl.int64)
            next_entry = tl.load(
                entry_ptr + row + tiling.contraction + step, mask=step < end - row - tiling.contraction, other=0
            )
        left_rows, right_rows = outer_step(left, right, row, step < end - row, token, gather, tiling)
        total = dot(left_rows.trans(), right_rows, total)
    return total


@triton.jit
def outer_step(left, right, row, inside, token, gather: tl.constexpr, tiling: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the columns of both ``Side`` in the rows from ``row`` on, [tiling.contraction, columns] each, zeros where
    a row is not ``inside``. ``token``: which row the gathered side has, None where none is.
    """
    step = tl.arange(0, tiling.contraction)
    gathers: tl.constexpr = token is not None
    # Zero on both sides, since zero times NaN would be NaN.
    left_at = _rows(left.first, row, step, token, left.width, gathers and gather.left) + left.columns[None, :]
    right_at = _rows(right.first, row, step, token, right.width, gathers and not gather.left) + right.columns[None, :]
    left_rows = tl.load(left_at, mask=_read(left, inside), other=0.0)
    right_rows = tl.load(right_at, mask=_read(right, inside), other=0.0)
    return left_rows, right_rows


@triton.jit
def _read(side, inside):  # type: ignore[no-untyped-def]
    """Returns which elements of the rows of one step are read."""
    if side.limit is None:
        return inside[:, None]
    else:
        return inside[:, None] & (side.columns < side.limit)[None, :]


@triton.jit
def _rows(ptr, row, step, token, width, gathered: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns pointers to the first elements of the rows of one step."""
    if gathered:
        return ptr + (token * width)[:, None]
    else:
        return ptr + tl.cast(row, tl.int64) * width + (step * width)[:, None]


def readable_by_tma(*tensors: Tensor) -> bool:
    """Returns whether TMA can read all tensors: two-byte elements, not empty, addresses and strides multiples of 16
    bytes.
    """
    return all(
        tensor.element_size() == 2
        and tensor.numel() > 0
        and tensor.data_ptr() % TMA_BYTES == 0
        and all(2 * stride % TMA_BYTES == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def run_with_descriptors(launch: Callable[[], object], device: torch.device) -> None:
    """Calls ``launch``, whose kernels may make descriptors, in memory that torch allocates on ``device``.

    Triton has one allocator per context, so ``launch`` runs in a context of its own and changes no other allocator.
    """

    def allocate(num_bytes: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.int8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(launch)


@triton.jit
def matrices_by_tma(  # type: ignore[no-untyped-def]
    ptr, E, stride: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, box_rows: tl.constexpr,
    box_width: tl.constexpr,
):  # fmt: skip
    """Returns a descriptor of [E, rows, width], ``stride`` elements from matrix to matrix, that gives [1, box_rows,
    box_width], zeros beyond an edge.
    """
    return tl.make_tensor_descriptor(ptr, [E, rows, width], [stride, width, 1], [1, box_rows, box_width])


@triton.jit
def halves_by_tma(  # type: ignore[no-untyped-def]
    ptr, E, stride: tl.constexpr, halves: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    box_rows: tl.constexpr, box_width: tl.constexpr,
):  # fmt: skip
    """Returns a descriptor of [E, halves, rows, width] that gives the same [box_rows, box_width] of all halves of a
    matrix.
    """
    return tl.make_tensor_descriptor(
        ptr, [E, halves, rows, width], [stride, rows * width, width, 1], [1, halves, box_rows, box_width]
    )


@triton.jit
def rows_by_tma(ptr, P, width: tl.constexpr, box_rows: tl.constexpr, box_width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a descriptor of [P, width] that gives [box_rows, box_width], zeros beyond an edge."""
    return tl.make_tensor_descriptor(ptr, [P, width], [width, 1], [box_rows, box_width])
