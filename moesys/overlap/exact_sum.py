"""Sums without an order: addends are rounded to multiples of a grid, so coarse that float64 adds them exactly.

A grid follows from a bound of the sum of all addends' sizes (``grid_of``), so whoever knows the same bound rounds the
same addend alike. J. Demmel and H. D. Nguyen, "Fast Reproducible Floating-Point Summation" (2013), section 3, pre-round
so with bounds that come from the addends' largest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from moesys.compiled import borrowing

# Of the 53 bits of a float64: one for what rounding adds, and one for the sign of the last partial sum.
GRID_BITS = 51
# Of a grid over which one can still be divided.
_LEAST_EXPONENT = -1021


def grid_of(bound: float) -> float:
    """Returns the power of two on which addends are rounded whose sizes add up to ``bound`` at most: 2⁻⁵¹ to 2⁻⁵⁰ of
    it. NaN for a bound that is none, and so are then all sums.
    """
    if not math.isfinite(bound):
        return math.nan
    _, exponent = math.frexp(bound)
    return math.ldexp(1.0, max(exponent - GRID_BITS, _LEAST_EXPONENT))


def grid_below(bound: Tensor) -> Tensor:
    """Returns ``grid_of`` of each float64, which may be on a device; the host waits for none."""
    exponent = torch.frexp(bound).exponent - GRID_BITS
    grid = torch.ldexp(torch.ones_like(bound), exponent.clamp(min=_LEAST_EXPONENT))
    return torch.where(bound.isfinite(), grid, torch.nan)


def row_sizes(rows_NA: Tensor) -> Tensor:
    """Returns ``largest_size`` of each row, [N]."""
    wide = torch.promote_types(rows_NA.dtype, torch.float32)
    if not rows_NA.numel():
        return rows_NA.new_zeros(len(rows_NA), dtype=wide)
    least_N, most_N = (of.to(wide) for of in torch.aminmax(rows_NA, dim=1))
    return torch.maximum(-least_N, most_N).nan_to_num(nan=torch.inf, posinf=torch.inf)


def largest_size(elements: Tensor) -> Tensor:
    """Returns the largest size of any element, in float32 or what is wider; infinity where one is not finite, 0 of
    none.
    """
    wide = torch.promote_types(elements.dtype, torch.float32)
    if not elements.numel():
        return elements.new_zeros((), dtype=wide)
    least, most = (of.to(wide) for of in torch.aminmax(elements.detach()))
    return torch.maximum(-least, most).nan_to_num(nan=torch.inf, posinf=torch.inf)


def add_on_grid(total: Tensor, addend: Tensor, grid: float) -> None:
    """Adds ``addend``, of any shape and float, rounded to the grid, half to even, to ``total``, float64 and contiguous,
    on the CPU. Exact, and so in any order the same, while sizes add up to the bound that ``grid`` is of.
    """
    wide = addend if addend.dtype in (torch.float32, torch.float64) else addend.float()
    _add_on_grid(total.view(-1).numpy(), wide.contiguous().view(-1).numpy(), grid)


@borrowing
def _add_on_grid(total_N, addend_N, grid):  # type: ignore[no-untyped-def]
    scale = 1.0 / grid
    for place in range(len(total_N)):
        total_N[place] += np.rint(addend_N[place] * scale) * grid
