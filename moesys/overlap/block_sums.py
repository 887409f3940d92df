"""BlockSums: how weight gradients are summed where neither layout nor number of ranks may show (``LayoutInvariant``).

An expert's rows are cut into blocks, the same whoever computes them (``balance.blocks``); a block's gradient is one
product, and blocks are added on a grid (``overlap.exact_sum``). The grid follows from the largest of what is
multiplied, over all ranks: of a sum of n products of a and b no partial sum exceeds n · max|a| · max|b|. A sum of B
blocks is off theirs by B · 2⁻⁵¹ of that at most, half a grid a block, and is rounded once, to float32.

S slots, E experts, R ranks, P rows in expert order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moesys.kernels.host_copies import to_device
from moesys.layout import TokenPlan
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position
from moesys.overlap.exact_sum import grid_below
from moesys.overlap.routes import held_experts


@dataclass
class BlockSums:
    """Of one micro-batch of a layer, on one rank.

    ``expert_S``: what its slots hold; ``rows_E`` int64: of each expert on all ranks, on the device that computes.
    ``tell``: takes a sentence about experts whose sums cannot be made, if anybody does; on a GPU the host does not know
    of them.
    """

    block_rows: int
    expert_S: tuple[int, ...]
    rows_E: Tensor
    channel: Channel
    tell: Callable[[str], None] | None

    @classmethod
    def of(
        cls, plan: TokenPlan, block_rows: int, channel: Channel, tell: Callable[[str], None], device: torch.device
    ) -> BlockSums:
        held = held_experts(plan.layout.experts_of(channel.rank))
        return cls(block_rows, tuple(held), to_device(plan.load.tokens_E, device), channel, tell)

    def agree(self, largest_S5: Tensor) -> Tensor:
        """Returns the grids of the gradients of ``gate_up``, ``down`` and their biases in each slot, float64 [S, 4], on
        the device of ``largest_S5``, where the host waits for none. A collective.

        ``largest_S5``: of a slot's rows here the largest x, dy, gradient of a pre-activation, weighted activation, and
        routing weight; 0 where there are none.
        """
        device = largest_S5.device
        held_S = to_device(self.expert_S, device)
        largest_E5 = torch.zeros(len(self.rows_E), 5, dtype=torch.float64, device=device)
        largest_E5[held_S] = largest_S5.double()
        at = Position("bounds of expert gradients in backward", self.channel.generation)
        largest_E5 = self.channel.all_gather(largest_E5, lane="counts", at=at, read=device.type == "cpu").amax(dim=0)
        if self.tell is not None and device.type == "cpu" and not (kept_E := largest_E5.isfinite().all(dim=1)).all():
            lost = ", ".join(str(expert) for expert, kept in enumerate(kept_E.tolist()) if not kept)
            self.tell(f"gradients of experts {lost} are NaN: what they are products of is not finite")
        x, dy, dh, activated, weight = largest_E5.unbind(dim=1)
        bound_E4 = self.rows_E[:, None] * torch.stack([dh * x, dy * activated, dh, dy * weight], dim=1)
        return grid_below(bound_E4)[held_S]

    def is_one_block(self, slot: int) -> bool:
        """Whether there is nothing to add up: all rows of the slot's expert, on all ranks, are one block."""
        return len(self.blocks(int(self.rows_E[self.expert_S[slot]]))) <= 1

    def blocks(self, num_rows: int) -> list[slice]:
        """Returns the blocks of a slot's rows, which begin where a block does (``balance.blocks``)."""
        num_blocks = (2 * num_rows + self.block_rows) // (2 * self.block_rows)
        firsts = [self.block_rows * number for number in range(max(num_blocks, int(num_rows > 0)))]
        return [slice(first, last) for first, last in pairwise([*firsts, num_rows])]


def largest_by_slot(first_S1: Tensor, *sizes_P: Tensor) -> Tensor:
    """Returns the largest of each of ``sizes_P`` in each slot, whose rows begin at ``first_S1`` [S + 1]; 0 in one
    without rows. Rows behind the last slot's are none's. On a device, where the host waits for nothing.
    """
    num_slots, of_row = len(first_S1) - 1, torch.stack(sizes_P, dim=1)
    row_P = torch.arange(len(of_row), dtype=first_S1.dtype, device=of_row.device)
    slot_P = torch.searchsorted(first_S1[1:], row_P, right=True)
    largest = of_row.new_zeros(num_slots + 1, of_row.shape[1])
    return largest.scatter_reduce_(0, slot_P[:, None].expand_as(of_row), of_row, "amax")[:num_slots]
