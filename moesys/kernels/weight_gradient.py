"""Gradients of the experts' matrices: for every group, the sum over its rows of an outer product.

One program at a time owns one tile of one group's matrix and adds the group's rows in their order, so the sum does not
depend on which program does it, on how many there are, or on the size of the tile; only on ``block.contraction``, which
says how many rows one product takes. One side of the product is not stored by rows: it is read from its token, whose
index is loaded in the loop (ScatterMoE, arXiv 2403.08245, reads so without a permuted copy).

G groups, P rows in order of groups, T tokens, L and R the widths of both sides.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.numerics import operand, rounded
from moesys.kernels.tiles import Block, require_contiguous, tile_of


def weight_gradient(
    left: Tensor,
    right: Tensor,
    entry_P: Tensor,
    first_G1: Tensor,
    order_G: Tensor,
    top_k: int,
    gathered: Literal["left", "right"],
    block: Block,
    dtype: torch.dtype = torch.float32,
    out_GLR: Tensor | None = None,
) -> Tensor:
    """``out[g] = Σ_p left[p]ᵀ · right[p]`` over the rows p of group g, in order; summed in float32, rounded once.

    The side that is ``gathered`` is [T, width], and its row p is ``side[entry_P[p] // top_k]``; the other is
    [P, width]. For the up projection: left = dh [P, U], right = x [T, H]. For the down projection: left = dy [T, H],
    right = weighted activations [P, I].

    Reads each side once for every tile of the other, mostly from the L2 cache: at least P·(L + R) elements; writes
    G·L·R. Bits depend on ``block.contraction`` and on nothing else of ``block``.

    Args:
        left: [P or T, L], right: [P or T, R]: float32, float16 or bfloat16, the same, contiguous like all arguments.
        entry_P: int32; first_G1: int32 [G + 1], where each group's rows begin (``routing.Routing``).
        order_G: int32, every group once: in which order they are begun, best the largest first
            (``tiles.groups_by_size``), so that none is left for the end; changes no bit.
        block: ``rows`` and ``columns`` are those of a tile of the result.
        dtype: of the result.
        out_GLR: where it is written, in place of a new tensor: of ``dtype``, each matrix contiguous; between two of
            them may be a gap.

    Returns:
        [G, L, R], zeros for a group without rows.
    """
    require_contiguous(left=left, right=right)
    num_groups, L, R = len(first_G1) - 1, left.shape[1], right.shape[1]
    if out_GLR is None:
        out_GLR = torch.empty((num_groups, L, R), dtype=dtype, device=left.device)
    elif (out_GLR.shape, out_GLR.dtype) != ((num_groups, L, R), dtype) or not out_GLR[:1].is_contiguous():
        raise ValueError(
            f"out_GLR is {out_GLR.dtype} of shape {tuple(out_GLR.shape)} and strides {out_GLR.stride()}; "
            f"give contiguous matrices, {dtype} of shape {(num_groups, L, R)}"
        )
    num_tiles = num_groups * triton.cdiv(L, block.rows) * triton.cdiv(R, block.columns)
    _weight_gradient[(min(num_tiles, block.num_programs(left.device)),)](
        left,
        right,
        entry_P,
        first_G1,
        order_G,
        out_GLR,
        num_tiles,
        L=L,
        R=R,
        top_k=top_k,
        matrix_stride=out_GLR.stride(0),
        gather_left=gathered == "left",
        **block.options(),
    )
    return out_GLR


def weight_gradient_reference(
    left: Tensor,
    right: Tensor,
    entry_P: Tensor,
    first_G1: Tensor,
    top_k: int,
    gathered: Literal["left", "right"],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same in plain torch."""
    token_P = (entry_P // top_k).clamp_min(0)
    left_PL = left[token_P] if gathered == "left" else left
    right_PR = right[token_P] if gathered == "right" else right
    first = first_G1.tolist()
    groups = [slice(*bounds) for bounds in pairwise(first)]
    return torch.stack([left_PL[rows].float().t() @ right_PR[rows].float() for rows in groups]).to(dtype)


@triton.jit(do_not_specialize=["num_tiles"])
def _weight_gradient(  # type: ignore[no-untyped-def]
    left_ptr,
    right_ptr,
    entry_ptr,
    first_ptr,
    order_ptr,
    out_ptr,
    num_tiles,
    L: tl.constexpr,
    R: tl.constexpr,
    top_k: tl.constexpr,
    matrix_stride: tl.constexpr,
    gather_left: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    raster: tl.constexpr,
    stages: tl.constexpr,
    operands: tl.constexpr,
):
    tiles_along_L: tl.constexpr = (L + block_rows - 1) // block_rows
    tiles_along_R: tl.constexpr = (R + block_columns - 1) // block_columns
    for task in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.load(order_ptr + task // (tiles_along_L * tiles_along_R))
        tile = tile_of(task % (tiles_along_L * tiles_along_R), tiles_along_L, tiles_along_R, raster)
        first, end = tl.load(first_ptr + group), tl.load(first_ptr + group + 1)
        on_left = tile[0] * block_rows + tl.arange(0, block_rows)
        on_right = tile[1] * block_columns + tl.arange(0, block_columns)
        total = tl.zeros([block_rows, block_columns], dtype=tl.float32)
        step = tl.arange(0, block_contraction)
        # Entries are loaded one step ahead. Loaded in their own step they would be pipelined like the rows that wait
        # for them, and each stage of the pipeline would do for half a step.
        next_entry = tl.load(entry_ptr + first + step, mask=step < end - first, other=0)
        for row in tl.range(first, end, block_contraction, num_stages=stages):
            in_group = step < end - row
            token = (next_entry // top_k).to(tl.int64)
            next_entry = tl.load(
                entry_ptr + row + block_contraction + step, mask=step < end - row - block_contraction, other=0
            )
            # A step behind the group's end is zero on both sides, since zero times NaN would be NaN.
            left = tl.load(
                _rows(left_ptr, row, step, token, L, gather_left) + on_left[None, :],
                mask=in_group[:, None] & (on_left < L)[None, :],
                other=0.0,
            )
            right = tl.load(
                _rows(right_ptr, row, step, token, R, not gather_left) + on_right[None, :],
                mask=in_group[:, None] & (on_right < R)[None, :],
                other=0.0,
            )
            total = tl.dot(operand(left).trans(), operand(right), total, input_precision="ieee")
        out_matrix = out_ptr + tl.cast(group, tl.int64) * matrix_stride
        tl.store(
            out_matrix + (on_left.to(tl.int64) * R)[:, None] + on_right[None, :],
            rounded(total, out_ptr.dtype.element_ty),
            mask=(on_left < L)[:, None] & (on_right < R)[None, :],
        )


@triton.jit
def _rows(ptr, row, step, token, width: tl.constexpr, gathered: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows of one step begin."""
    if gathered:
        return ptr + (token * width)[:, None]
    else:
        return ptr + tl.cast(row, tl.int64) * width + (step * width)[:, None]
