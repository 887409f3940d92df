"""Sums that do not depend on an order: addends are rounded to multiples of a grid, so coarse that float64 adds them
exactly.

A grid follows from a bound of the sum of all addends' sizes (``grid_below``), so all ranks that know the same bound
round the same addend alike. J. Demmel and H. D. Nguyen, "Fast Reproducible Floating-Point Summation" (2013), section 3,
pre-round in the same way, with bounds that come from the largest addends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moesys.compiled import briefly_borrowing
from moesys.frames import Position
from moesys.kernels.launch import to_device
from moesys.overlap.comm.channel import Channel

# A float64 has 53 bits: one is for what rounding adds, and one for the sign of the last partial sum.
GRID_BITS = 51
# A number, in grids, whose neighbours in float64 are one grid away: to add it and to subtract it again rounds to the
# grid.
_ROUNDER = 1.5 * 2.0**52
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The exponent of the smallest grid by which one can still be divided.
_LEAST_EXPONENT = -1021


def grid_below(bound: Tensor) -> Tensor:
    """Returns for each float64 in ``bound`` the power of two to whose multiples addends are rounded if their sizes add
    up to at most the bound: 2⁻⁵¹ to 2⁻⁵⁰ of it. NaN for a bound that is not finite; then all sums are NaN, as they also
    are for a bound of 2¹⁰²¹ or more. Bounds may be on a device, and the host does not wait for them.
    """
    exponent = torch.frexp(bound).exponent - GRID_BITS
    grid = torch.ldexp(torch.ones_like(bound), exponent.clamp(min=_LEAST_EXPONENT))
    return torch.where(bound.isfinite(), grid, torch.nan)


def row_sizes(rows_NA: Tensor) -> Tensor:
    """Returns ``largest_size`` of each row, [N], on the CPU, where this is faster."""
    bits_NA = rows_NA.contiguous().view(_INTEGERS[rows_NA.element_size()])
    largest_N = torch.zeros(len(rows_NA), dtype=torch.int64)
    # Without their sign, floats lie in the order of their bits as integers, and NaN behind infinity.
    _largest_bits(bits_NA.numpy(), largest_N.numpy(), torch.iinfo(bits_NA.dtype).max)
    sizes_N = largest_N.to(bits_NA.dtype).view(rows_NA.dtype)
    return sizes_N.to(torch.promote_types(rows_NA.dtype, torch.float32)).nan_to_num(nan=torch.inf, posinf=torch.inf)


@briefly_borrowing
def _largest_bits(bits_NA, largest_N, mask):  # type: ignore[no-untyped-def]
    for row in range(len(bits_NA)):
        largest = 0
        for place in range(bits_NA.shape[1]):
            largest = max(largest, bits_NA[row, place] & mask)
        largest_N[row] = largest


def largest_size(elements: Tensor, dim: int | None = None) -> Tensor:
    """Returns the largest absolute value of any element, in float32 or a wider dtype; infinity if one is not finite, 0
    if there are none. With ``dim=1`` that of each row, [N]. The host does not wait for a device.
    """
    wide = torch.promote_types(elements.dtype, torch.float32)
    if not elements.numel():
        return elements.new_zeros(elements.shape[: dim or 0], dtype=wide)
    least, most = (of.to(wide) for of in torch.aminmax(elements.detach(), dim=dim))
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


@briefly_borrowing
def _add_bfloat16_on_grid(total_N, bits_N, rounder):  # type: ignore[no-untyped-def]
    for place in range(len(total_N)):
        addend = np.uint32(np.uint32(bits_N[place]) << np.uint32(16)).view(np.float32)
        total_N[place] += (addend + rounder) - rounder


@briefly_borrowing
def _add_on_grid(total_N, addend_N, rounder):  # type: ignore[no-untyped-def]
    for place in range(len(total_N)):
        total_N[place] += (addend_N[place] + rounder) - rounder


@dataclass
class BlockSums:
    """How the weight gradients of one micro-batch of a layer are summed on one rank.

    ``expert_S``: the experts in its slots; ``rows_E`` int64: the rows of each expert on all ranks, on the device that
    computes. ``add_event``: takes a sentence about experts whose sums cannot be computed, of which the host knows only
    if the CPU computes.
    """

    block_rows: int
    expert_S: tuple[int, ...]
    rows_E: Tensor
    channel: Channel
    add_event: Callable[[str], None]

    def agree(self, largest_S5: Tensor, bounds_E4: Tensor | None = None) -> Tensor:
        """Returns the grids of the gradients of ``gate_up``, ``down`` and their biases in each slot, float64 [S, 4], on
        the device of ``largest_S5``, where the host waits for none. A collective. With ``Adapters.bounds_E4`` [S, 8],
        where the factors of ``gate_up`` and of ``down`` come behind.

        ``largest_S5``: the largest x, dy, gradient of a pre-activation, weighted activation, and routing weight of a
        slot's rows on this rank; 0 where there are none.
        """
        device = largest_S5.device
        held_S = to_device(self.expert_S, device)
        largest_E5 = torch.zeros(len(self.rows_E), 5, dtype=torch.float64, device=device)
        largest_E5[held_S] = largest_S5.double()
        at = Position("bounds of expert gradients in backward", self.channel.generation)
        largest_E5 = self.channel.all_gather(largest_E5, lane="counts", at=at, read=device.type == "cpu").amax(dim=0)
        if device.type == "cpu" and not (kept_E := largest_E5.isfinite().all(dim=1)).all():
            lost = ", ".join(str(expert) for expert, kept in enumerate(kept_E.tolist()) if not kept)
            self.add_event(f"gradients of experts {lost} are NaN: what they are products of is not finite")
        x, dy, dh, activated, weight = largest_E5.unbind(dim=1)
        bound_E4 = self.rows_E[:, None] * torch.stack([dh * x, dy * activated, dh, dy * weight], dim=1)
        of_factors = [] if bounds_E4 is None else [bound_E4[:, [0, 0, 1, 1]] * bounds_E4]
        return grid_below(torch.cat([bound_E4, *of_factors], dim=1))[held_S]

    def is_one_block(self, slot: int) -> bool:
        """Returns whether all rows of the slot's expert, on all ranks, are one block, so that nothing is added up."""
        return len(self.blocks(int(self.rows_E[self.expert_S[slot]]))) <= 1

    def blocks(self, num_rows: int) -> list[slice]:
        """Returns the blocks of a slot's rows, which begin where a block does (``balance.row_blocks``)."""
        num_blocks = (2 * num_rows + self.block_rows) // (2 * self.block_rows)
        firsts = [self.block_rows * number for number in range(max(num_blocks, int(num_rows > 0)))]
        return [slice(first, last) for first, last in pairwise([*firsts, num_rows])]


def largest_by_slot(first_S1: Tensor, *sizes_P: Tensor) -> Tensor:
    """Returns the largest of each of ``sizes_P`` in each slot, whose rows begin at ``first_S1`` [S + 1]; 0 in a slot
    without rows. Rows behind those of the last slot belong to no slot. The host does not wait for a device.
    """
    num_slots, of_row = len(first_S1) - 1, torch.stack(sizes_P, dim=1)
    row_P = torch.arange(len(of_row), dtype=first_S1.dtype, device=of_row.device)
    slot_P = torch.searchsorted(first_S1[1:], row_P, right=True)
    largest = of_row.new_zeros(num_slots + 1, of_row.shape[1])
    return largest.scatter_reduce_(0, slot_P[:, None].expand_as(of_row), of_row, "amax")[:num_slots]
