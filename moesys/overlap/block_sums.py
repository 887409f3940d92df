"""BlockSums: how weight gradients are summed where neither layout nor number of ranks may show (``LayoutInvariant``).

An expert's rows are cut into blocks, the same whoever computes them (``balance.blocks``); a block's gradient is one
product, and blocks are added on a grid (``overlap.exact_sum``). The grid follows from the largest of what is
multiplied, over all ranks: of a sum of n products of a and b no partial sum exceeds n · max|a| · max|b|.

S slots, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesys.kernels.cpu.row_invariant_ops import row_blocks
from moesys.layout import TokenPlan
from moesys.overlap.comm.channel import Channel
from moesys.overlap.exact_sum import grid_of, largest_size
from moesys.overlap.routes import held_experts


@dataclass
class BlockSums:
    """Of one micro-batch of a layer, on one rank.

    ``expert_S``: what its slots hold; ``rows_E``: of each expert on all ranks. After ``agree``, the largest sizes:
    ``largest_E2`` of gradients of pre-activations and of weighted activations, and those of x, dy and routing weights.
    """

    block_rows: int
    expert_S: tuple[int, ...]
    rows_E: list[int]
    channel: Channel
    largest_E2: list[list[float]] = field(default_factory=list)
    largest_x: float = 0.0
    largest_dy: float = 0.0
    largest_weight: float = 0.0

    @classmethod
    def of(cls, plan: TokenPlan, block_rows: int, channel: Channel) -> BlockSums:
        held = held_experts(plan.layout.experts_of(channel.rank))
        return cls(block_rows, tuple(held), plan.load.tokens_E.tolist(), channel)

    @property
    def num_slots(self) -> int:
        return len(self.expert_S)

    def agree(self, largest_S2: Tensor, x: Tensor, dy: Tensor, weight: Tensor) -> None:
        """Takes the largest of all ranks. A collective. ``largest_S2``: of this rank's rows of each slot; ``x``,
        ``dy``, ``weight``: of all its rows.
        """
        largest_E2 = largest_S2.new_zeros(len(self.rows_E), 2)
        largest_E2[list(self.expert_S)] = largest_S2
        of_all_3 = torch.stack([largest_size(rows).to(largest_E2) for rows in (x, dy, weight)])
        mine_N = torch.cat([largest_E2.flatten(), of_all_3])
        all_N = self.channel.all_gather(mine_N, lane="counts").amax(dim=0)
        self.largest_E2 = all_N[:-3].view(-1, 2).tolist()
        self.largest_x, self.largest_dy, self.largest_weight = all_N[-3:].tolist()

    def grids(self, slot: int) -> tuple[float, float, float, float]:
        """Returns those of the gradients of ``gate_up``, ``down`` and their biases."""
        rows = self.rows_E[self.expert_S[slot]]
        largest_dh, largest_wa = self.largest_E2[self.expert_S[slot]]
        bounds = (
            largest_dh * self.largest_x,
            self.largest_dy * largest_wa,
            largest_dh,
            self.largest_dy * self.largest_weight,
        )
        up, down, up_bias, down_bias = (grid_of(rows * bound) for bound in bounds)
        return up, down, up_bias, down_bias

    def blocks(self, num_rows: int) -> Iterator[slice]:
        """Yields the blocks of a slot's rows, which begin where a block does."""
        return row_blocks(num_rows, self.block_rows)
