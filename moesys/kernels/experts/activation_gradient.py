"""Backward through the down projection and the activation in one grouped GEMM, which nothing but h is kept for.

The gradient of the weighted activation stays in the accumulator. Its epilogue computes the activation again from h, and
with it all that the rest of backward needs: the gradient of h, the weighted activation (the operand of the down
projection's weight gradient) and the routing weight's gradient. That dataflow is SonicMoE's (arXiv 2512.14080), which
so keeps neither the activation nor the output of each expert.

T tokens, H hidden, K choices of a token, P = T·K rows in order of groups, G groups, E matrices, I expert width, U = 2·I
where the activation is gated, else I, M row tiles, N groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.activations import GATED, slope_one, slopes
from moesys.kernels.experts.products import (
    LowRankRows,
    dot,
    left_step,
    matrices_by_tma,
    plus_low_rank,
    readable_by_tma,
    rounded,
    rows_by_matrix,
    rows_by_tma,
    run_with_descriptors,
)
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, require_contiguous, require_matrices, rows_of_tile, tile_of
from moesys.kernels.experts.token_rows import gather_rows
from moesys.kernels.launch import kernel
from moesys.kernels.routing import SortedRouting

# The routing weight's gradient is summed over this many columns at a time in every tile, so that its bits do not
# depend on the width of a tile. The epilogue takes as many at a time, to fit in registers with a 128x256 tile.
SUM_COLUMNS = 32
# Entries of a program that adds partial sums.
SUM_ENTRIES = 128


def activation_gradient(
    dy_TH: Tensor,
    down_EHI: Tensor,
    h_PU: Tensor,
    weight_TK: Tensor,
    routing: SortedRouting,
    groups: RowGroups,
    activation: str,
    block: TileConfig,
    low_rank: LowRankRows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``y[t] += weight · down · activation(h)``, for every row, and its weighted activation.

    For row p of token t with routing weight w, group g and ``a = activation(h[p])``, all in float32:

        da = dy[t] @ down[g]        plus its ``low_rank`` product
        dh[p] = w · da · ∂a/∂h      rounded once
        wa[p] = w · a               rounded once
        dweight = Σ_I da · a        in float32, 32 columns at a time, whose sums are added in order

    Reads P·H elements of dy, gathered, and each group's H·I of down, once for every tile of the other side and mostly
    from the L2 cache; reads P·U of h; writes P·(U + I) and P·⌈I / 32⌉ float32 partial sums, which are read again.

    Bits depend on ``block.contraction``; those of dweight also on ``block.columns`` where it is below 32.

    Args:
        dy_TH: float32, float16 or bfloat16, as are ``down_EHI`` and ``h_PU``; contiguous like all arguments.
        down_EHI: each matrix contiguous; between two of them may be a gap.
        weight_TK: float32.
        routing: where the rows are; groups: of its rows, in tiles of ``block.rows``.
        block: ``block.operands`` "tma": down comes by TMA where it can read it. "specialised": dy does so too, from a
            copy in expert order that costs 2·P·H elements more; it spills at 128x256, and Triton 3.6 cannot compile it.

    Returns:
        (dh [P, U], wa [P, I], both in h's dtype and undefined behind the last group; dweight float32 [T, K], 0 where an
        entry is dropped).
    """
    groups.tiles.require(block)
    require_contiguous(dy=dy_TH, h=h_PU, weight=weight_TK)
    require_matrices(down=down_EHI)
    T, K = weight_TK.shape
    P = len(routing.entry_P)
    H, I = down_EHI.shape[1:]
    device = dy_TH.device
    sum_columns = min(SUM_COLUMNS, block.columns)
    num_sums = triton.cdiv(I, sum_columns)
    operands = block.operands if readable_by_tma(dy_TH, down_EHI) and P else "pointers"
    dy = gather_rows(dy_TH, routing.entry_P, routing.first_G1, K) if operands == "specialised" else dy_TH
    dh_PU = torch.empty_like(h_PU)
    wa_PI = torch.empty((P, I), dtype=h_PU.dtype, device=device)
    partial_PN = torch.empty((P, num_sums), dtype=torch.float32, device=device)
    dweight_TK = torch.empty((T, K), dtype=torch.float32, device=device)
    rows = BackwardRows(routing.entry_P, weight_TK, GradientRows(h_PU, dh_PU, wa_PI, partial_PN), low_rank)
    epilogue = Epilogue(I, activation, GATED[activation], sum_columns)
    sizes = GradientSizes(H, K, down_EHI.stride(0), epilogue)
    arguments = (dy, down_EHI, rows, groups, P, len(down_EHI), sizes)
    launch = _activation_gradient[(block.num_programs(device),)]
    run_with_descriptors(lambda: launch(*arguments, **block.options(operands, low_rank)), device)
    _add_partials[(triton.cdiv(T * K, SUM_ENTRIES),)](
        partial_PN, routing.row_TK, dweight_TK, T * K, N=num_sums, block_entries=SUM_ENTRIES
    )
    return dh_PU, wa_PI, dweight_TK


class GradientRows(NamedTuple):
    """The rows that ``store_gradients`` reads, h, and writes: the gradient of h, the weighted activation, partial sums
    of the routing weight's gradient.
    """

    h_PU: Tensor
    dh_PU: Tensor
    wa_PI: Tensor
    partial_PN: Tensor


class BackwardRows(NamedTuple):
    """Each row's choice, the routing weights of all choices, what the epilogue reads and writes, and what is added to
    the product.
    """

    entry_P: Tensor
    weight_TK: Tensor
    gradients: GradientRows
    low_rank: LowRankRows | None


class Epilogue(NamedTuple):
    """The constants of ``store_gradients``. ``sum_columns``: the columns of one partial sum."""

    I: int
    activation: str
    gated: bool
    sum_columns: int


class GradientSizes(NamedTuple):
    """The constants of the kernel. ``matrix_stride``: elements between two matrices."""

    H: int
    top_k: int
    matrix_stride: int
    epilogue: Epilogue


@kernel(do_not_specialize=["P", "E"])
def _activation_gradient(  # type: ignore[no-untyped-def]
    dy, down, rows, groups, P, E, sizes: tl.constexpr, tiling: tl.constexpr
):
    H: tl.constexpr = sizes.H
    epilogue: tl.constexpr = sizes.epilogue
    I: tl.constexpr = epilogue.I
    pointers: tl.constexpr = tiling.operands == "pointers"
    specialised: tl.constexpr = tiling.operands == "specialised"
    U: tl.constexpr = 2 * I if epilogue.gated else I
    num_column_tiles: tl.constexpr = (I + tiling.columns - 1) // tiling.columns
    num_sums: tl.constexpr = (I + epilogue.sum_columns - 1) // epilogue.sum_columns
    if not pointers:
        down = matrices_by_tma(down, E, sizes.matrix_stride, H, I, tiling.contraction, tiling.columns)
    if specialised:
        dy = rows_by_tma(dy, P, H, tiling.rows, tiling.contraction)
    count = tl.load(groups.tiles.count_1)
    # Flat, as in ``up``: the epilogue moves more bytes than a step does.
    for task in tl.range(tl.program_id(0), count * num_column_tiles, tl.num_programs(0), flatten=not specialised):
        tile, column_tile = tile_of(task, count, num_column_tiles, tiling.raster)
        first_row, num_rows, matrix = rows_of_tile(groups, tile, tiling.rows)
        in_tile = tl.arange(0, tiling.rows) < num_rows
        # Rows behind the tile's end compute what token 0 would, and are not stored.
        entry = tl.load(rows.entry_P + first_row + tl.arange(0, tiling.rows), mask=in_tile, other=0)
        if not specialised:
            dy_row = dy + (entry // sizes.top_k).to(tl.int64)[:, None] * H
        first_column = column_tile * tiling.columns
        if pointers:
            base = down + matrix.to(tl.int64) * sizes.matrix_stride
            da = rows_by_matrix(dy_row, base, first_column, H, I, False, tiling)
        else:
            da = tl.zeros([entry.shape[0], tl.arange(0, tiling.columns).shape[0]], dtype=tl.float32)
            for hidden in tl.range(0, H, tiling.contraction, num_stages=tiling.stages, warp_specialize=specialised):
                left = left_step(dy if specialised else dy_row, first_row, hidden, H, specialised, tiling.contraction)
                right = down.load([matrix, hidden, first_column]).reshape(tiling.contraction, tiling.columns)
                da = dot(left, right, da)
        da = plus_low_rank(da, rows.low_rank, first_row, num_rows, matrix, first_column, I, 1, False, tiling)
        weight = tl.load(rows.weight_TK + entry, mask=in_tile, other=0.0)
        row = first_row.to(tl.int64)
        of = rows.gradients
        here = GradientRows(of.h_PU + row * U, of.dh_PU + row * U, of.wa_PI + row * I, of.partial_PN + row * num_sums)
        store_gradients(da, first_column, weight, num_rows, here, epilogue)


@triton.jit
def store_gradients(  # type: ignore[no-untyped-def]
    da, first_column, weight, num_rows, pointers, sizes: tl.constexpr
):
    """Stores all that follows from ``da`` [rows, columns]; ``pointers``: ``GradientRows``, to the first of its rows.

    A tile is halved until it is as wide as one partial sum, since what a whole one needs does not fit in registers.
    """
    rows: tl.constexpr = da.shape[0]
    columns: tl.constexpr = da.shape[1]
    I: tl.constexpr = sizes.I
    activation: tl.constexpr = sizes.activation
    if columns > sizes.sum_columns:
        left, right = _halves(da)
        store_gradients(left, first_column, weight, num_rows, pointers, sizes)
        store_gradients(right, first_column + columns // 2, weight, num_rows, pointers, sizes)
    else:
        row = tl.arange(0, rows)
        column = first_column + tl.arange(0, columns)
        in_tile = (row < num_rows)[:, None] & (column < I)[None, :]
        at_I = (row * I)[:, None] + column[None, :]
        dtype: tl.constexpr = pointers.wa_PI.dtype.element_ty
        weighted = da * weight[:, None]
        if sizes.gated:
            at_U = (row * (2 * I))[:, None] + column[None, :]
            gate = tl.load(pointers.h_PU + at_U, mask=in_tile, other=0.0).to(tl.float32)
            up = tl.load(pointers.h_PU + at_U + I, mask=in_tile, other=0.0).to(tl.float32)
            a, along_gate, along_up = slopes(gate, up, activation)
            tl.store(pointers.dh_PU + at_U, rounded(weighted * along_gate, dtype), mask=in_tile)
            tl.store(pointers.dh_PU + at_U + I, rounded(weighted * along_up, dtype), mask=in_tile)
        else:
            h = tl.load(pointers.h_PU + at_I, mask=in_tile, other=0.0).to(tl.float32)
            a, along = slope_one(h, activation)
            tl.store(pointers.dh_PU + at_I, rounded(weighted * along, dtype), mask=in_tile)
        tl.store(pointers.wa_PI + at_I, rounded(a * weight[:, None], dtype), mask=in_tile)
        num_sums: tl.constexpr = (I + sizes.sum_columns - 1) // sizes.sum_columns
        sums = _row_sums(tl.where(in_tile, da * a, 0.0))
        # the last tile may be wider than the columns that remain, by whole sums
        rows_to_store = tl.where(first_column < I, num_rows, 0)
        tl.store(
            pointers.partial_PN + row * num_sums + first_column // sizes.sum_columns, sums, mask=row < rows_to_store
        )


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Returns the left and the right half of the columns of ``x`` [rows, columns]."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _row_sums(x):  # type: ignore[no-untyped-def]
    """Returns the sums of the rows of ``x``, neighbours first: the order does not depend on which thread holds what."""
    if x.shape[1] > 1:
        even, odd = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
        return _row_sums(even + odd)
    else:
        return x.reshape(x.shape[0])


@kernel(do_not_specialize=["num_entries"])
def _add_partials(  # type: ignore[no-untyped-def]
    partial_ptr, row_ptr, dweight_ptr, num_entries, N: tl.constexpr, block_entries: tl.constexpr
):
    """Adds up the partial sums of every entry's row, in order; 0 for an entry without a row."""
    entry = tl.program_id(0) * block_entries + tl.arange(0, block_entries)
    row = tl.load(row_ptr + entry, mask=entry < num_entries, other=-1)
    total = sum_of_partials(partial_ptr, row, row >= 0, N)
    tl.store(dweight_ptr + entry, total, mask=entry < num_entries)


@triton.jit
def sum_of_partials(partial_ptr, row, mask, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum over N of each of these rows, in order."""
    first = partial_ptr + row.to(tl.int64) * N
    total = tl.zeros([row.shape[0]], dtype=tl.float32)
    for n in range(N):
        total += tl.load(first + n, mask=mask, other=0.0)
    return total
