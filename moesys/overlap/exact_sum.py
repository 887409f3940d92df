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
# Grids so far above one that what is added to it, and taken away again, is left on the grid: neighbours there are one
# grid apart, to either side.
_ROUNDER = 1.5 * 2.0**52
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of a grid over which one can still be divided.
_LEAST_EXPONENT = -1021


def grid_of(bound: float) -> float:
    """Returns the power of two on which addends are rounded whose sizes add up to ``bound`` at most: 2⁻⁵¹ to 2⁻⁵⁰ of
    it. NaN for a bound that is none, and so are then all sums, as they are of one of 2¹⁰²¹ and more.
    """
    if not math.isfinite(bound):
        return math.nan
    _, exponent = math.frexp(bound)
    return math.ldexp(1.0, max(exponent - GRID_BITS, _LEAST_EXPONENT))


def grid_below(bound: Tensor) -> Tensor:
    """Returns ``grid_of`` of a float64 that may be on a device, of a finite one."""
    exponent = torch.frexp(bound).exponent - GRID_BITS
    return torch.ldexp(torch.ones_like(bound), exponent.clamp(min=_LEAST_EXPONENT))


def row_sizes(rows_NA: Tensor) -> Tensor:
    """Returns ``largest_size`` of each row, [N], on the CPU."""
    bits_NA = rows_NA.contiguous().view(_INTEGERS[rows_NA.element_size()])
    largest_N = torch.zeros(len(rows_NA), dtype=torch.int64)
    # Without their sign, floats lie in the order of their bits as integers, and NaN behind infinity.
    _largest_bits(bits_NA.numpy(), largest_N.numpy(), torch.iinfo(bits_NA.dtype).max)
    sizes_N = largest_N.to(bits_NA.dtype).view(rows_NA.dtype)
    return sizes_N.to(torch.promote_types(rows_NA.dtype, torch.float32)).nan_to_num(nan=torch.inf, posinf=torch.inf)


@borrowing
def _largest_bits(bits_NA, largest_N, mask):  # type: ignore[no-untyped-def]
    for row in range(len(bits_NA)):
        largest = 0
        for place in range(bits_NA.shape[1]):
            largest = max(largest, bits_NA[row, place] & mask)
        largest_N[row] = largest


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
    total_N, addend_N = total.view(-1).numpy(), addend.contiguous().view(-1)
    if addend.dtype == torch.bfloat16:
        _add_bfloat16_on_grid(total_N, addend_N.view(torch.uint16).numpy(), _ROUNDER * grid)
    else:
        wide_N = addend_N.float() if addend.dtype == torch.float16 else addend_N
        _add_on_grid(total_N, wide_N.numpy(), _ROUNDER * grid)


@borrowing
def _add_bfloat16_on_grid(total_N, bits_N, rounder):  # type: ignore[no-untyped-def]
    for place in range(len(total_N)):
        addend = np.uint32(np.uint32(bits_N[place]) << np.uint32(16)).view(np.float32)
        total_N[place] += (addend + rounder) - rounder


@borrowing
def _add_on_grid(total_N, addend_N, rounder):  # type: ignore[no-untyped-def]
    for place in range(len(total_N)):
        total_N[place] += (addend_N[place] + rounder) - rounder
