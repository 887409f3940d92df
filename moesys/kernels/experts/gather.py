"""Rows in expert order: what GEMMs read by TMA, which on Hopper cannot gather.

T tokens or entries' sources, K choices of each, P = T·K rows, H their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel

# Columns of a step: with 4 warps, 16 bytes for each thread in 16 bits.
MOST_COLUMNS = 1024


def gather_rows(x_TH: Tensor, entry_P: Tensor, first_G1: Tensor, top_k: int) -> Tensor:
    """[P, H]: row p is ``x[entry_P[p] // top_k]``; rows behind the last group's are left unwritten.

    ``x_TH`` of any dtype, contiguous; ``entry_P`` int32 [P] and ``first_G1`` int32 [G + 1] as in ``routing.Routing``.
    Reads and writes P·H elements.
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


def gather_rows_reference(x_TH: Tensor, entry_P: Tensor, first_G1: Tensor, top_k: int) -> Tensor:
    """The same in plain torch; rows behind the last group's are zero."""
    x_PH = x_TH[(entry_P // top_k).clamp_min(0).long()]
    x_PH[int(first_G1[-1]) :] = 0
    return x_PH
