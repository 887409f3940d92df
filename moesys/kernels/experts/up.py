"""Up: every token's rows through the first projection of its experts, and the activation.

T tokens of width H, K choices each, P = T·K rows in expert order, G groups, E matrices, U = 2I with a gate and U = I
without.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.activations import GATED, activate, activate_one
from moesys.kernels.experts.products import (
    LowRankRows,
    dot,
    halves_by_tma,
    left_step,
    plus_low_rank,
    readable_by_tma,
    rounded,
    rows_by_tiles,
    rows_by_tma,
    run_with_descriptors,
)
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, Tiles, require_contiguous, require_matrices, rows_of_tile, tile_of
from moesys.kernels.experts.token_rows import gather_rows
from moesys.kernels.launch import kernel
from moesys.kernels.routing import SortedRouting


def up(
    x_TH: Tensor,
    gate_up_EUH: Tensor,
    routing: SortedRouting,
    tiles: Tiles,
    top_k: int,
    activation: str,
    block: TileConfig,
    low_rank: LowRankRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (h [P, U], a [P, I]): row p of h is ``gate_up[g] @ x[entry_P[p] // K]``, plus its ``low_rank`` product,
    and a its activation.

    The gather is part of the product, no gathered copy of x is written. Sums are float32; h is rounded once to the
    dtype of x (float32, float16 or bfloat16, that of the weights too), and a is the activation, in float32, of the
    rounded h, rounded once: what backward computes again from h is a to the bit. With a gate the weights are
    [gate; up] along U, as in transformers; each matrix is contiguous, and between two of them may be a gap. Rows behind
    the last group's are left unwritten.

    A tile is ``block.rows`` x ``block.columns`` of a, which with a gate are twice as many columns of h. Reads P·H
    elements of x for each column of tiles and U·H of weights for each row of them, less what the L2 cache keeps;
    writes P·(U + I). ``block.operands`` "tma": weights come by TMA where it can read them. "specialised": x does so
    too, from a copy in expert order that costs 2·P·H elements more; with a gate, Triton 3.6 cannot compile it.

    Source: the fusion of gather, product and activation of SonicMoE (arXiv:2512.14080) and ScatterMoE
    (arXiv:2403.08245).
    """
    num_matrices, U, H = gate_up_EUH.shape
    gated = GATED[activation]
    I = U // 2 if gated else U
    tiles.require(block)
    require_contiguous(x=x_TH)
    require_matrices(gate_up=gate_up_EUH)
    P = routing.entry_P.numel()
    h_PU = torch.empty(P, U, dtype=x_TH.dtype, device=x_TH.device)
    a_PI = torch.empty(P, I, dtype=x_TH.dtype, device=x_TH.device)
    operands = block.operands if readable_by_tma(x_TH, gate_up_EUH) and P else "pointers"
    x = gather_rows(x_TH, routing.entry_P, routing.first_G1, top_k) if operands == "specialised" else x_TH
    rows, groups = UpRows(routing.entry_P, h_PU, a_PI, low_rank), RowGroups(routing.first_G1, tiles)
    sizes = UpSizes(H, I, top_k, gate_up_EUH.stride(0), activation, 2 if gated else 1)
    arguments = (x, gate_up_EUH, rows, groups, P, num_matrices, sizes)
    launch = _up[(block.num_programs(x_TH.device),)]
    run_with_descriptors(lambda: launch(*arguments, **block.options(operands, low_rank)), x_TH.device)
    return h_PU, a_PI


class UpRows(NamedTuple):
    """The choice of each row, the tensors that the kernel writes, and what is added to h: see ``up``."""

    entry_P: Tensor
    h_PU: Tensor
    a_PI: Tensor
    low_rank: LowRankRows | None


class UpSizes(NamedTuple):
    """The constants of the kernel. ``matrix_stride``: elements between two matrices; ``halves``: 2 with a gate."""

    H: int
    I: int
    top_k: int
    matrix_stride: int
    activation: str
    halves: int


@kernel(do_not_specialize=["P", "E"])
def _up(  # type: ignore[no-untyped-def]
    x, weights, rows, groups, P, E, sizes: tl.constexpr, tiling: tl.constexpr
):
    H: tl.constexpr = sizes.H
    I: tl.constexpr = sizes.I
    halves: tl.constexpr = sizes.halves
    activation: tl.constexpr = sizes.activation
    pointers: tl.constexpr = tiling.operands == "pointers"
    specialised: tl.constexpr = tiling.operands == "specialised"
    U: tl.constexpr = halves * I
    num_column_tiles: tl.constexpr = (I + tiling.columns - 1) // tiling.columns
    num_row_tiles = tl.load(groups.tiles.count_1)
    in_rows = tl.arange(0, tiling.rows)
    if not pointers:
        weights = halves_by_tma(weights, E, sizes.matrix_stride, halves, I, H, tiling.columns, tiling.contraction)
    if specialised:
        x = rows_by_tma(x, P, H, tiling.rows, tiling.contraction)
    # Flat, so that the next tile's first operands are on their way while this one is stored. In a flat loop Triton
    # specialises no warps.
    for task in tl.range(
        tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0), flatten=not specialised
    ):
        row_tile, column_tile = tile_of(task, num_row_tiles, num_column_tiles, tiling.raster)
        row, num_rows, matrix = rows_of_tile(groups, row_tile, tiling.rows)
        column = column_tile * tiling.columns

        # Rows that a tile lacks are computed from another's operands, and not stored.
        if not specialised:
            entry = tl.load(rows.entry_P + row + tl.minimum(in_rows, num_rows - 1))
            x_row = x + (entry // sizes.top_k).to(tl.int64)[:, None] * H
        if pointers:
            matrix_base = weights + matrix.to(tl.int64) * sizes.matrix_stride
            h = rows_by_halves(x_row, matrix_base, column, H, I, halves, tiling)
        else:
            h = tl.zeros((in_rows.shape[0], tl.arange(0, halves * tiling.columns).shape[0]), tl.float32)
            for start in tl.range(0, H, tiling.contraction, num_stages=tiling.stages, warp_specialize=specialised):
                left = left_step(x if specialised else x_row, row, start, H, specialised, tiling.contraction)
                weight = weights.load([matrix, 0, column, start])
                weight = weight.reshape(halves * tiling.columns, tiling.contraction).T
                h = dot(left, weight, h)
        h = plus_low_rank(h, rows.low_rank, row, num_rows, matrix, column, I, halves, True, tiling)
        base = row.to(tl.int64)
        store_activations(h, rows.h_PU + base * U, rows.a_PI + base * I, num_rows, column, I, activation, halves)


@triton.jit
def rows_by_halves(  # type: ignore[no-untyped-def]
    left_row, matrix, column, H: tl.constexpr, I: tl.constexpr, halves: tl.constexpr, tiling: tl.constexpr
):
    """Returns float32 [rows, halves · tiling.columns] of h, from ``column`` of each half on; ``left_row`` [rows, 1]
    points to rows of x, ``matrix`` to [halves · I, H].
    """
    # A tile needs rows of the gate and of up, which lie I apart in the matrix. Columns beyond I load row I - 1 of their
    # half.
    in_both = tl.arange(0, halves * tiling.columns)
    matrix_row = tl.minimum(column + in_both % tiling.columns, I - 1) + in_both // tiling.columns * I
    right_tile = matrix + matrix_row.to(tl.int64)[None, :] * H + tl.arange(0, tiling.contraction)[:, None]
    return rows_by_tiles(left_row, right_tile, tiling.contraction, None, H, tiling)


@triton.jit
def store_activations(  # type: ignore[no-untyped-def]
    h, h_ptr, a_ptr, num_rows, column, I: tl.constexpr, activation: tl.constexpr, halves: tl.constexpr
):
    """Stores a tile of h, float32 [rows, halves · columns], and its activation; pointers are to the first of its
    rows.
    """
    rows: tl.constexpr = h.shape[0]
    columns: tl.constexpr = h.shape[1] // halves
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    in_rows = tl.arange(0, rows)
    in_columns = tl.arange(0, columns)
    mask = (in_rows < num_rows)[:, None] & (column + in_columns < I)[None, :]
    h_tile = h_ptr + column + in_rows[:, None] * (halves * I) + in_columns[None, :]
    a_tile = a_ptr + column + in_rows[:, None] * I + in_columns[None, :]
    if halves == 2:
        gate, up = h.reshape(rows, 2, columns).permute(0, 2, 1).split()
        gate, up = rounded(gate, dtype), rounded(up, dtype)
        tl.store(h_tile, gate, mask=mask)
        tl.store(h_tile + I, up, mask=mask)
        a = activate(gate.to(tl.float32), up.to(tl.float32), activation)
    else:
        h = rounded(h, dtype)
        tl.store(h_tile, h, mask=mask)
        a = activate_one(h.to(tl.float32), activation)
    tl.store(a_tile, rounded(a, dtype), mask=mask)
