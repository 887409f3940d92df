"""Gradients of the experts' matrices: for every group, the sum over its rows of an outer product.

One program at a time owns one tile of one group's matrix and adds the group's rows in their order, so the sum does not
depend on which program does it, on how many there are, or on the size of the tile; only on ``block.contraction``, which
says how many rows one product takes. One side of the product is not stored by rows: it is read from its token, whose
index is loaded in the loop (ScatterMoE, arXiv 2403.08245, reads so without a permuted copy).

G groups, P rows in order of groups, T tokens, L and R the widths of both sides.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.numerics import rounded
from moesys.kernels.experts.products import Gather, Side, columns_by_columns
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import require_contiguous, tile_of
from moesys.kernels.launch import kernel


class OrderedGroups(NamedTuple):
    """Which rows each group has, int32.

    ``entry_P``, ``first_G1`` [G + 1]: each row's choice, and where each group's rows begin (``routing.Routing``).
    ``order_G``: every group once, in which order they are begun, best the largest first (``tiles.groups_by_size``), so
    that none is left for the end; changes no bit.
    """

    entry_P: Tensor
    first_G1: Tensor
    order_G: Tensor


def weight_gradient(
    left: Tensor,
    right: Tensor,
    groups: OrderedGroups,
    top_k: int,
    gathered: Literal["left", "right"],
    block: TileConfig,
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
        block: ``rows`` and ``columns`` are those of a tile of the result.
        dtype: of the result.
        out_GLR: where it is written, in place of a new tensor: of ``dtype``, each matrix contiguous; between two of
            them may be a gap.

    Returns:
        [G, L, R], zeros for a group without rows.
    """
    require_contiguous(left=left, right=right)
    num_groups, L, R = len(groups.first_G1) - 1, left.shape[1], right.shape[1]
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
        groups,
        out_GLR,
        num_tiles,
        OuterSizes(L, R, out_GLR.stride(0), Gather(gathered == "left", top_k)),
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
    left_PL, right_PR = by_rows(left, right, entry_P, top_k, gathered)
    first = first_G1.tolist()
    groups = [slice(*bounds) for bounds in pairwise(first)]
    return torch.stack([left_PL[rows].float().t() @ right_PR[rows].float() for rows in groups]).to(dtype)


def by_rows(
    left: Tensor, right: Tensor, entry_P: Tensor, top_k: int, gathered: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    """Both sides, [P, L] and [P, R]."""
    token_P = (entry_P // top_k).clamp_min(0)
    return (left[token_P], right) if gathered == "left" else (left, right[token_P])


class OuterSizes(NamedTuple):
    """What the kernel is compiled for; ``matrix_stride``: elements between two matrices of the result."""

    L: int
    R: int
    matrix_stride: int
    gather: Gather


class OuterProduct(NamedTuple):
    """Pointers to both sides, rows of L and R elements, and to matrices [L, R], ``matrix_stride`` elements apart."""

    left: Any
    right: Any
    out: Any
    L: Any
    R: Any
    matrix_stride: Any


@kernel(do_not_specialize=["num_tiles"])
def _weight_gradient(  # type: ignore[no-untyped-def]
    left_ptr, right_ptr, groups, out_ptr, num_tiles, sizes: tl.constexpr, tiling: tl.constexpr
):
    gather: tl.constexpr = sizes.gather
    tiles_along_L: tl.constexpr = (sizes.L + tiling.rows - 1) // tiling.rows
    tiles_along_R: tl.constexpr = (sizes.R + tiling.columns - 1) // tiling.columns
    for task in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.load(groups.order_G + task // (tiles_along_L * tiles_along_R))
        tile = tile_of(task % (tiles_along_L * tiles_along_R), tiles_along_L, tiles_along_R, tiling.raster)
        product = OuterProduct(left_ptr, right_ptr, out_ptr, sizes.L, sizes.R, sizes.matrix_stride)
        store_outer_product(product, groups.entry_P, groups.first_G1, group, tile, gather, tiling)


@triton.jit
def store_outer_product(  # type: ignore[no-untyped-def]
    product, entry_ptr, first_ptr, group, tile, gather: tl.constexpr, tiling: tl.constexpr
):
    """A tile, numbered along both sides, of one group's matrix. ``entry_ptr``: see ``columns_by_columns``."""
    first, end = tl.load(first_ptr + group), tl.load(first_ptr + group + 1)
    on_left = tile[0] * tiling.rows + tl.arange(0, tiling.rows)
    on_right = tile[1] * tiling.columns + tl.arange(0, tiling.columns)
    left, right = Side(product.left, on_left, product.L), Side(product.right, on_right, product.R)
    total = columns_by_columns(left, right, first, end, entry_ptr, gather, tiling)
    out_matrix = product.out + tl.cast(group, tl.int64) * product.matrix_stride
    tl.store(
        out_matrix + (on_left.to(tl.int64) * product.R)[:, None] + on_right[None, :],
        rounded(total, product.out.dtype.element_ty),
        mask=(on_left < product.L)[:, None] & (on_right < product.R)[None, :],
    )
