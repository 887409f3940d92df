"""BlockSums: how weight gradients are summed where neither layout nor number of ranks may show (``LayoutInvariant``).

An expert's rows are cut into blocks, the same whoever computes them (``balance.blocks``); a block's gradient is one
product, and blocks are added on a grid (``overlap.exact_sum``). The grid follows from the largest of what is
multiplied, over all ranks: of a sum of n products of a and b no partial sum exceeds n · max|a| · max|b|.

S slots, E experts, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from moesys.layout import TokenPlan
from moesys.overlap.comm.channel import Channel
from moesys.overlap.exact_sum import grid_of
from moesys.overlap.routes import held_experts


@dataclass
class BlockSums:
    """Of one micro-batch of a layer, on one rank.

    ``expert_S``: what its slots hold; ``rows_E``: of each expert on all ranks. ``largest_E5``: of each expert's rows on
    all ranks the largest x, dy, gradient of a pre-activation, weighted activation, and routing weight, after ``agree``.
    ``tell``: takes a sentence about experts whose sums cannot be made.
    """

    block_rows: int
    expert_S: tuple[int, ...]
    rows_E: list[int]
    channel: Channel
    tell: Callable[[str], None]
    largest_E5: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, plan: TokenPlan, block_rows: int, channel: Channel, tell: Callable[[str], None]) -> BlockSums:
        held = held_experts(plan.layout.experts_of(channel.rank))
        return cls(block_rows, tuple(held), plan.load.tokens_E.tolist(), channel, tell)

    def agree(self, largest: Mapping[int, Tensor]) -> None:
        """Takes the largest of all ranks. A collective. ``largest``: of this rank's rows, [5] of each slot with any."""
        largest_E5 = torch.zeros(len(self.rows_E), 5, dtype=torch.float64)
        for slot, largest_5 in largest.items():
            largest_E5[self.expert_S[slot]] = largest_5
        self.largest_E5 = self.channel.all_gather(largest_E5, lane="counts").amax(dim=0).tolist()
        lost = [str(expert) for expert, largest in enumerate(self.largest_E5) if not all(map(math.isfinite, largest))]
        if lost:
            self.tell(f"gradients of experts {', '.join(lost)} are NaN: what they are products of is not finite")

    def grids(self, slot: int) -> tuple[float, float, float, float]:
        """Returns those of the gradients of ``gate_up``, ``down`` and their biases."""
        rows = self.rows_E[self.expert_S[slot]]
        x, dy, dh, activated, weight = self.largest_E5[self.expert_S[slot]]
        up, down, up_bias, down_bias = (grid_of(rows * bound) for bound in (dh * x, dy * activated, dh, dy * weight))
        return up, down, up_bias, down_bias

    def is_one_block(self, slot: int) -> bool:
        """Whether there is nothing to add up: all rows of the slot's expert, on all ranks, are one block."""
        return len(self.blocks(int(self.rows_E[self.expert_S[slot]]))) <= 1

    def blocks(self, num_rows: int) -> list[slice]:
        """Returns the blocks of a slot's rows, which begin where a block does (``balance.blocks``)."""
        num_blocks = (2 * num_rows + self.block_rows) // (2 * self.block_rows)
        firsts = [self.block_rows * number for number in range(max(num_blocks, int(num_rows > 0)))]
        return [slice(first, last) for first, last in pairwise([*firsts, num_rows])]
