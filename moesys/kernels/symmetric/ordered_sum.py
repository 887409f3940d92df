"""Sums of rows in a given order: what each owner does with the gradients of its experts, one from each rank that
computed them.

``parts`` [N, P], float32 or float64; ``row_N`` int: the row of the result that each is added to, 0 ≤ row <
``num_rows``. A row is 0 + its first part + its second …, by n, so that its bits depend on the order of ranks and on
nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel

COLUMNS = 1024
WARPS = 4


def ordered_sum(parts_NP: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Returns the sums [num_rows, P] in the dtype of the parts; rows without parts are zeros."""
    num_columns = parts_NP.shape[1]
    out_EP = torch.empty(num_rows, num_columns, dtype=parts_NP.dtype, device=parts_NP.device)
    if not out_EP.numel():
        return out_EP
    order_N = torch.argsort(row_N, stable=True)
    first_E1 = torch.searchsorted(row_N[order_N], torch.arange(num_rows + 1, device=row_N.device))
    # A flat grid: CUDA has at most 65,535 programs in the second of its directions.
    _ordered_sum[(num_rows * triton.cdiv(num_columns, COLUMNS),)](
        parts_NP, order_N, first_E1, out_EP, parts_NP.stride(0), num_columns, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return out_EP


@kernel
def _ordered_sum(parts_ptr, order_ptr, first_ptr, out_ptr, part_stride, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    programs_of_row = (num_columns - 1) // COLUMNS + 1
    row = (tl.program_id(0) // programs_of_row).to(tl.int64)
    column = (tl.program_id(0) % programs_of_row).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    # The sum of one part is that part, zeros' signs too.
    total = tl.full([COLUMNS], -0.0, dtype=parts_ptr.dtype.element_ty)
    for place in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        part = tl.load(order_ptr + place)
        total += tl.load(parts_ptr + part * part_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * num_columns + column, total, mask=inside)
