"""Gradient of up's input: what every expert's rows want of the token that they are, before tokens sum it.

P rows in expert order, G groups of them, E matrices, H hidden, U = 2I with a gate and U = I without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesys.kernels.numerics import operand, rounded
from moesys.kernels.tiles import Block, Tiles, tile_of


def input_gradient(
    dh_PU: Tensor,
    gate_up_EUH: Tensor,
    first_G1: Tensor,
    tiles: Tiles,
    matrix_G: Tensor,
    block: Block,
    descriptor: bool = False,
) -> Tensor:
    """dx [P, H]: row p is ``dh[p] @ gate_up[matrix_G[g]]`` for the group g that it lies in.

    Sums are float32 and rounded once to the dtype of dh (float32, float16 or bfloat16, that of the weights too). Rows
    behind the last group's are left unwritten; ``combine`` without weights sums a token's rows.

    Reads P·U elements of dh for each column of tiles and U·H of weights for each row of them, less what the L2 cache
    keeps; writes P·H. ``descriptor``: dh and the weights, if of two bytes, come by TMA where their rows
    are multiples of 16 bytes.

    Source: the grouped GEMM of MegaBlocks (arXiv:2211.15841), over tiles instead of blocks of a sparse matrix.
    """
    _, U, H = gate_up_EUH.shape
    if tiles.block_rows != block.rows:
        raise ValueError(f"tiles of {tiles.block_rows} rows for blocks of {block.rows}")
    if not (dh_PU.is_contiguous() and gate_up_EUH.is_contiguous()):
        raise ValueError("dh and the weights must be contiguous")
    P = len(dh_PU)
    dx_PH = torch.empty(P, H, dtype=dh_PU.dtype, device=dh_PU.device)
    dh, weights = dh_PU, gate_up_EUH
    size = dh_PU.element_size()
    aligned = all(place % 16 == 0 for place in (U * size, H * size, dh_PU.data_ptr(), gate_up_EUH.data_ptr()))
    descriptor = descriptor and size == 2 and P > 0 and aligned
    if descriptor:
        dh = TensorDescriptor.from_tensor(dh_PU, [block.rows, block.contraction])
        weights = TensorDescriptor.from_tensor(gate_up_EUH, [1, block.contraction, block.columns])
    _input_gradient[(block.num_programs(dh_PU.device),)](
        dh,
        weights,
        first_G1,
        tiles.group_M,
        tiles.row_M,
        tiles.count_1,
        matrix_G,
        dx_PH,
        H=H,
        U=U,
        block_rows=block.rows,
        block_columns=block.columns,
        block_contraction=block.contraction,
        raster=block.raster,
        stages=block.stages,
        descriptor=descriptor,
        num_warps=block.warps,
        num_stages=block.stages,
        enable_fp_fusion=True,
    )
    return dx_PH


@triton.jit
def _input_gradient(  # type: ignore[no-untyped-def]
    dh,
    weights,
    first_ptr,
    group_ptr,
    row_ptr,
    count_ptr,
    matrix_ptr,
    dx_ptr,
    H: tl.constexpr,
    U: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    raster: tl.constexpr,
    stages: tl.constexpr,
    descriptor: tl.constexpr,
):
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    whole_contraction: tl.constexpr = U % block_contraction == 0
    whole: tl.constexpr = whole_contraction and H % block_columns == 0
    num_column_tiles: tl.constexpr = (H + block_columns - 1) // block_columns
    num_row_tiles = tl.load(count_ptr)
    in_rows = tl.arange(0, block_rows)
    in_columns = tl.arange(0, block_columns)
    in_contraction = tl.arange(0, block_contraction)
    # Flat, so that the next tile's first operands are on their way while this one is stored.
    for task in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(task, num_row_tiles, num_column_tiles, raster)
        group = tl.load(group_ptr + row_tile)
        row = tl.load(row_ptr + row_tile)
        num_rows = tl.minimum(tl.load(first_ptr + group + 1) - row, block_rows)
        matrix = tl.load(matrix_ptr + group)
        column = column_tile * block_columns
        column_mask = column + in_columns < H

        if not descriptor:
            # Rows that a tile lacks are computed from another's operands, and not stored.
            dh_row = dh + row.to(tl.int64) * U + tl.minimum(in_rows, num_rows - 1)[:, None] * U
            weight_tile = weights + matrix.to(tl.int64) * (U * H) + column
            weight_tile += in_contraction[:, None] * H + in_columns[None, :]
        dx = tl.zeros((block_rows, block_columns), tl.float32)
        for start in tl.range(0, U, block_contraction, num_stages=stages):
            at = start + in_contraction
            if descriptor:
                left = dh.load([row, start])
                right = weights.load([matrix, start, column]).reshape(block_contraction, block_columns)
            else:
                if whole_contraction:
                    left = tl.load(dh_row + at[None, :])
                else:
                    left = tl.load(dh_row + at[None, :], mask=at[None, :] < U, other=0.0)
                if whole:
                    right = tl.load(weight_tile)
                else:
                    right = tl.load(weight_tile, mask=(at < U)[:, None] & column_mask[None, :], other=0.0)
                weight_tile += block_contraction * H
            dx = tl.dot(operand(left), operand(right), dx, input_precision="ieee")

        mask = (in_rows < num_rows)[:, None] & column_mask[None, :]
        dx_tile = dx_ptr + row.to(tl.int64) * H + column + in_rows[:, None] * H + in_columns[None, :]
        tl.store(dx_tile, rounded(dx, dtype), mask=mask)


def input_gradient_reference(dh_PU: Tensor, gate_up_EUH: Tensor, first_G1: Tensor, matrix_G: Tensor) -> Tensor:
    """The same in plain torch, in the dtype of dh; rows behind the last group's are zero."""
    dx_PH = dh_PU.new_zeros(len(dh_PU), gate_up_EUH.shape[2])
    first = first_G1.tolist()
    for group, matrix in enumerate(matrix_G.tolist()):
        rows = slice(first[group], first[group + 1])
        dx_PH[rows] = dh_PU[rows] @ gate_up_EUH[matrix]
    return dx_PH
