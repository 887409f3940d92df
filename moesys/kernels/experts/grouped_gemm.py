"""The grouped GEMM: multiplies the rows of each group by the matrix of the group, transposed or not.

The product by ``down``, transposed, is one, and so is the gradient of the input of ``gate_up``: gradients of h times
``gate_up``, not transposed.

P rows in order of groups, of width L; G groups, E matrices, N the width of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.products import (
    LowRankRows,
    dot,
    matrices_by_tma,
    plus_low_rank,
    readable_by_tma,
    rounded,
    rows_by_matrix,
    rows_by_tma,
    run_with_descriptors,
)
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, Tiles, require_contiguous, require_matrices, rows_of_tile, tile_of
from moesys.kernels.launch import kernel


def grouped_gemm(
    rows_PL: Tensor,
    matrices: Tensor,
    first_G1: Tensor,
    tiles: Tiles,
    block: TileConfig,
    *,
    transposed: bool,
    low_rank: LowRankRows | None = None,
    gather: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Returns out [P, N]: row p is ``rows[p] @ matrices[g]`` for the group g that it lies in, plus its ``low_rank``
    product. With ``gather``, entries int32 [P] and K, row p is ``rows[entries[p] // K]``.

    ``matrices`` are [E, L, N], or [E, N, L] where they are ``transposed`` for the product; each is contiguous, and
    between two of them may be a gap. Sums are float32 and rounded
    once to the dtype of the rows (float32, float16 or bfloat16, that of the matrices too). Rows behind the last
    group's are left unwritten.

    Reads P·L elements of the rows for each column of tiles and L·N of matrices for each row of them, less what the L2
    cache keeps; writes P·N. ``block.operands`` but for "pointers": rows and matrices come by TMA where it can read
    them (``products.readable_by_tma``).

    Source: the grouped GEMM of MegaBlocks (arXiv:2211.15841), over tiles instead of blocks of a sparse matrix.
    """
    tiles.require(block)
    require_contiguous(rows=rows_PL)
    require_matrices(matrices=matrices)
    entry_P, top_k = gather or (None, 1)
    P, L = len(rows_PL if entry_P is None else entry_P), rows_PL.shape[1]
    N = matrices.shape[1 if transposed else 2]
    out_PN = torch.empty(P, N, dtype=rows_PL.dtype, device=rows_PL.device)
    groups, E = RowGroups(first_G1, tiles), len(matrices)
    sizes = GemmSizes(L, N, matrices.stride(0), transposed, top_k)
    operands = block.operands if entry_P is None and readable_by_tma(rows_PL, matrices) else "pointers"
    arguments = (rows_PL, entry_P, matrices, low_rank, groups, out_PN, P, E, sizes)
    launch = _grouped_gemm[(block.num_programs(rows_PL.device),)]
    run_with_descriptors(lambda: launch(*arguments, **block.options(operands, low_rank)), rows_PL.device)
    return out_PN


class GemmSizes(NamedTuple):
    """The constants of the kernel: see ``grouped_gemm``. ``matrix_stride``: elements between two matrices."""

    L: int
    N: int
    matrix_stride: int
    transposed: bool
    top_k: int


@kernel(do_not_specialize=["P", "E"])
def _grouped_gemm(  # type: ignore[no-untyped-def]
    rows, entry_ptr, matrices, low_rank, groups, out_ptr, P, E, sizes: tl.constexpr, tiling: tl.constexpr
):
    L: tl.constexpr = sizes.L
    N: tl.constexpr = sizes.N
    matrix_stride: tl.constexpr = sizes.matrix_stride
    transposed: tl.constexpr = sizes.transposed
    pointers: tl.constexpr = tiling.operands == "pointers"
    specialised: tl.constexpr = tiling.operands == "specialised"
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    num_column_tiles: tl.constexpr = (N + tiling.columns - 1) // tiling.columns
    num_row_tiles = tl.load(groups.tiles.count_1)
    in_rows = tl.arange(0, tiling.rows)
    in_columns = tl.arange(0, tiling.columns)
    if not pointers:
        rows = rows_by_tma(rows, P, L, tiling.rows, tiling.contraction)
        if transposed:
            matrices = matrices_by_tma(matrices, E, matrix_stride, N, L, tiling.columns, tiling.contraction)
        else:
            matrices = matrices_by_tma(matrices, E, matrix_stride, L, N, tiling.contraction, tiling.columns)
    # Flat, so that the next tile's first operands are on their way while this one is stored. In a flat loop Triton
    # specialises no warps.
    for task in tl.range(
        tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0), flatten=not specialised
    ):
        row_tile, column_tile = tile_of(task, num_row_tiles, num_column_tiles, tiling.raster)
        row, num_rows, matrix = rows_of_tile(groups, row_tile, tiling.rows)
        column = column_tile * tiling.columns

        if pointers:
            # Rows that a tile lacks are computed from another's operands, and not stored.
            left_row = rows + row.to(tl.int64) * L + tl.minimum(in_rows, num_rows - 1)[:, None] * L
            if entry_ptr is not None:
                entry = tl.load(entry_ptr + row + tl.minimum(in_rows, num_rows - 1))
                left_row = rows + (entry // sizes.top_k).to(tl.int64)[:, None] * L
            base = matrices + matrix.to(tl.int64) * matrix_stride
            out = rows_by_matrix(left_row, base, column, L, N, transposed, tiling)
        else:
            out = tl.zeros((in_rows.shape[0], in_columns.shape[0]), tl.float32)
            for start in tl.range(0, L, tiling.contraction, num_stages=tiling.stages, warp_specialize=specialised):
                left = rows.load([row, start])
                if transposed:
                    right = matrices.load([matrix, column, start]).reshape(tiling.columns, tiling.contraction).T
                else:
                    right = matrices.load([matrix, start, column]).reshape(tiling.contraction, tiling.columns)
                out = dot(left, right, out)
        out = plus_low_rank(out, low_rank, row, num_rows, matrix, column, N, 1, transposed, tiling)

        mask = (in_rows < num_rows)[:, None] & (column + in_columns < N)[None, :]
        out_tile = out_ptr + row.to(tl.int64) * N + column + in_rows[:, None] * N + in_columns[None, :]
        tl.store(out_tile, rounded(out, dtype), mask=mask)
