"""Down: the activations of every expert's rows through its second projection.

P rows in expert order, G groups of them, E matrices, H hidden, I expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesys.kernels.numerics import operand, rounded
from moesys.kernels.tiles import Block, Tiles, tile_of


def down(
    a_PI: Tensor,
    down_EHI: Tensor,
    first_G1: Tensor,
    tiles: Tiles,
    matrix_G: Tensor,
    block: Block,
    descriptor: bool = False,
) -> Tensor:
    """y [P, H]: row p is ``down[matrix_G[g]] @ a[p]`` for the group g that it lies in.

    Sums are float32 and rounded once to the dtype of a (float32, float16 or bfloat16, that of the weights too). Rows
    behind the last group's are left unwritten; the routing weight comes later, in ``combine``.

    Reads P·I elements of a for each column of tiles and H·I of weights for each row of them, less what the L2 cache
    keeps; writes P·H. ``descriptor``: a and the weights, if of two bytes, come by TMA where their rows are
    multiples of 16 bytes.

    Source: the grouped GEMM of MegaBlocks (arXiv:2211.15841), over tiles instead of blocks of a sparse matrix.
    """
    _, H, I = down_EHI.shape
    if tiles.block_rows != block.rows:
        raise ValueError(f"tiles of {tiles.block_rows} rows for blocks of {block.rows}")
    if not (a_PI.is_contiguous() and down_EHI.is_contiguous()):
        raise ValueError("a and the weights must be contiguous")
    P = len(a_PI)
    y_PH = torch.empty(P, H, dtype=a_PI.dtype, device=a_PI.device)
    a, weights = a_PI, down_EHI
    size = a_PI.element_size()
    aligned = all(place % 16 == 0 for place in (I * size, a_PI.data_ptr(), down_EHI.data_ptr()))
    descriptor = descriptor and size == 2 and P > 0 and aligned
    if descriptor:
        a = TensorDescriptor.from_tensor(a_PI, [block.rows, block.contraction])
        weights = TensorDescriptor.from_tensor(down_EHI, [1, block.columns, block.contraction])
    _down[(block.num_programs(a_PI.device),)](
        a,
        weights,
        first_G1,
        tiles.group_M,
        tiles.row_M,
        tiles.count_1,
        matrix_G,
        y_PH,
        H=H,
        I=I,
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
    return y_PH


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    a,
    weights,
    first_ptr,
    group_ptr,
    row_ptr,
    count_ptr,
    matrix_ptr,
    y_ptr,
    H: tl.constexpr,
    I: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    raster: tl.constexpr,
    stages: tl.constexpr,
    descriptor: tl.constexpr,
):
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    whole: tl.constexpr = I % block_contraction == 0
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

        # Rows and columns that a tile lacks are computed from others' operands, and not stored.
        if not descriptor:
            a_row = a + row.to(tl.int64) * I + tl.minimum(in_rows, num_rows - 1)[:, None] * I
            weight_row = weights + (matrix.to(tl.int64) * H + column) * I
            weight_row += tl.minimum(in_columns, H - 1 - column)[None, :] * I
        y = tl.zeros((block_rows, block_columns), tl.float32)
        for start in tl.range(0, I, block_contraction, num_stages=stages):
            at = start + in_contraction
            if descriptor:
                left = a.load([row, start])
                right = weights.load([matrix, column, start]).reshape(block_columns, block_contraction).T
            elif whole:
                left = tl.load(a_row + at[None, :])
                right = tl.load(weight_row + at[:, None])
            else:
                left = tl.load(a_row + at[None, :], mask=at[None, :] < I, other=0.0)
                right = tl.load(weight_row + at[:, None], mask=at[:, None] < I, other=0.0)
            y = tl.dot(operand(left), operand(right), y, input_precision="ieee")

        mask = (in_rows < num_rows)[:, None] & (column + in_columns < H)[None, :]
        y_tile = y_ptr + row.to(tl.int64) * H + column + in_rows[:, None] * H + in_columns[None, :]
        tl.store(y_tile, rounded(y, dtype), mask=mask)


def down_reference(a_PI: Tensor, down_EHI: Tensor, first_G1: Tensor, matrix_G: Tensor) -> Tensor:
    """The same in plain torch, in the dtype of a; rows behind the last group's are zero."""
    y_PH = a_PI.new_zeros(len(a_PI), down_EHI.shape[1])
    first = first_G1.tolist()
    for group, matrix in enumerate(matrix_G.tolist()):
        rows = slice(first[group], first[group + 1])
        y_PH[rows] = a_PI[rows] @ down_EHI[matrix].t()
    return y_PH
