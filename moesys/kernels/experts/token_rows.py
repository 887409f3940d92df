"""Rows between the order of tokens and that of experts: gathered for the products, and combined behind them.

``gather_rows`` copies rows into expert order for GEMMs that read by TMA, which cannot gather on Hopper. ``combine``
sums the rows that belong to each token, weighted or not: the last step of forward, and of the gradient of x. A program
owns some columns of one token, and adds the token's rows in the order of its choices; no two programs add to one place,
so nothing between them needs an order (SonicMoE, arXiv 2512.14080, aggregates in the same way).

T tokens, K choices of each, P = T·K rows, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.products import rounded
from moesys.kernels.launch import kernel

# Columns of a step, or of a program that combines: with 4 warps, 16 bytes of each row for each thread in 16 bits.
MOST_COLUMNS = 1024
# Rows of a token that are loaded at the same time.
ROWS_IN_FLIGHT = tl.constexpr(8)


def gather_rows(x_TH: Tensor, entry_P: Tensor, first_G1: Tensor, top_k: int) -> Tensor:
    """Returns rows [P, H]: row p is ``x[entry_P[p] // top_k]``; rows behind the last group's are left unwritten.

    ``x_TH`` of any dtype, contiguous; ``entry_P`` int32 [P] and ``first_G1`` int32 [G + 1] as in
    ``routing.SortedRouting``. Reads and writes P·H elements.
    """
    P, H = len(entry_P), x_TH.shape[1]
    x_PH = torch.empty(P, H, dtype=x_TH.dtype, device=x_TH.device)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(H))
    last_1 = first_G1[-1:]
    _gather_rows[(P,)](
        x_TH, entry_P, last_1, x_PH, H=H, K=top_k, block_columns=columns, num_warps=max(1, columns // 256)
    )
    return x_PH


@kernel(do_not_specialize_on_alignment=["last_ptr"])
def _gather_rows(  # type: ignore[no-untyped-def]
    x_ptr, entry_ptr, last_ptr, x_row_ptr, H: tl.constexpr, K: tl.constexpr, block_columns: tl.constexpr
):
    row = tl.program_id(0)
    if row < tl.load(last_ptr):
        token = tl.load(entry_ptr + row) // K
        for start in tl.static_range(0, H, block_columns):
            column = start + tl.arange(0, block_columns)
            x = tl.load(x_ptr + token.to(tl.int64) * H + column, mask=column < H, other=0.0)
            tl.store(x_row_ptr + row.to(tl.int64) * H + column, x, mask=column < H)


def combine(y_PH: Tensor, row_TK: Tensor, weight_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns ``out[t] = Σ_k weight[t, k] · y[row[t, k]]``, added in float32 for k = 0..K-1, rounded once to ``dtype``.

    Reads every row that is named once, at most T·K·H elements, and T·K rows and weights; writes T·H elements.

    Args:
        y_PH: float32, float16 or bfloat16, contiguous like all arguments.
        row_TK: int32; -1 where a choice is dropped, which adds nothing.
        weight_TK: float32, or None for weights of 1.
        dtype: of the result.

    Returns:
        [T, H], zeros where all choices of a token are dropped.
    """
    if not (y_PH.is_contiguous() and row_TK.is_contiguous() and (weight_TK is None or weight_TK.is_contiguous())):
        raise ValueError("y, rows and weights must be contiguous")
    T, K = row_TK.shape
    H = y_PH.shape[1]
    out_TH = torch.empty((T, H), dtype=dtype, device=y_PH.device)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(H))
    _combine[(T * triton.cdiv(H, columns),)](
        y_PH,
        row_TK,
        weight_TK,
        out_TH,
        H=H,
        K=K,
        block_columns=columns,
        num_warps=max(1, columns // 256),
        enable_fp_fusion=True,
    )
    return out_TH


@kernel
def _combine(  # type: ignore[no-untyped-def]
    y_ptr, row_ptr, weight_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr, block_columns: tl.constexpr
):
    num_column_tiles: tl.constexpr = (H + block_columns - 1) // block_columns
    token = (tl.program_id(0) // num_column_tiles).to(tl.int64)
    column = tl.program_id(0) % num_column_tiles * block_columns + tl.arange(0, block_columns)
    total = tl.zeros([block_columns], dtype=tl.float32)
    for k in tl.range(0, K, loop_unroll_factor=ROWS_IN_FLIGHT):
        row = tl.load(row_ptr + token * K + k)
        kept = row >= 0
        in_row = column < tl.where(kept, H, 0)
        y = tl.load(y_ptr + row.to(tl.int64) * H + column, mask=in_row, other=0.0).to(tl.float32)
        weight = None
        if weight_ptr is not None:
            # 0 in place of a dropped choice's weight too, which may be anything
            weight = tl.load(weight_ptr + token * K + k, mask=kept, other=0.0)
        total = plus_term(total, y, weight)
    tl.store(out_ptr + token * H + column, rounded(total, out_ptr.dtype.element_ty), mask=column < H)


@triton.jit
def plus_term(total, y, weight):  # type: ignore[no-untyped-def]
    """Returns float32 ``total`` plus a row's ``y`` times its ``weight`` (None for 1), rounded once."""
    if weight is None:
        return total + y
    else:
        return tl.fma(y, weight, total)
