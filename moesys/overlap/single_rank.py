"""One rank alone, by kernels: nothing travels, and the host is asked nothing.

Every choice of a token goes to its expert here, so routes are what a counting sort on the device makes of the choices:
rows in order of (expert, token, k), which is the order that ``routes`` gives one rank. Chunks have nothing to overlap
with: whatever the strategy, the batch is one.

T tokens, H hidden, I expert width, K top-k, P = T·K rows, E experts, all of them here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moesys.kernels.experts.experts import (
    ExpertMatrices,
    Kept,
    experts_backward,
    experts_forward,
    experts_recomputed,
    hidden_gradients,
    input_gradient,
)
from moesys.kernels.experts.tile_config import ShapeClass, TileConfigs
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import groups_by_size
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, block_gradient
from moesys.kernels.routing.routing import Routing
from moesys.overlap.block_sums import BlockSums, largest_by_slot
from moesys.overlap.exact_sum import row_sizes_on_device
from moesys.overlap.executor import Saved, WaitForExperts
from moesys.overlap.held_experts import ExpertGradients

ACTIVATION = "swiglu"


@dataclass(frozen=True)
class SingleRankExecutor:
    """Runs one micro-batch of one layer, whose rows are ``routing``'s, one group an expert. ``sums``: of weight
    gradients, where nothing may show that it is one rank.

    It records no spans: the host only launches, and does not know when the device computes.
    """

    routing: Routing
    sums: BlockSums | None = None

    @property
    def tokens_E(self) -> Tensor:
        """Choices of each expert, int64 [E], on the device."""
        return self.routing.first_G1.diff().long()

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Returns the output [T, H] in x's dtype."""
        x_TH = x_TH.contiguous()
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        y_TH, kept = experts_forward(
            x_TH,
            self.routing,
            weight_TK.contiguous(),
            self._matrices(gate_up_S2IH, down_SHI),
            self._blocks(x_TH, down_SHI),
        )
        return y_TH, Saved(x_TH, kept.h_PU, weight_TK)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, Saved]:
        """Returns what ``forward`` does, but no output that is not ``read``."""
        if read:
            return self.forward(x_TH, weight_TK, wait_for_experts)
        x_TH = x_TH.contiguous()
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        experts, blocks = self._matrices(gate_up_S2IH, down_SHI), self._blocks(x_TH, down_SHI)
        kept = experts_recomputed(x_TH, self.routing, weight_TK.shape[1], experts, blocks)
        return None, Saved(x_TH, kept.h_PU, weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: Saved, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); every expert's weight gradients are written into ``gradients``,
        or not computed where that is None.
        """
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        weight_TK, experts = saved.weight_TK.contiguous(), self._matrices(gate_up_S2IH, down_SHI)
        kept, blocks = Kept(saved.h_P2I, self.routing), self._blocks(dy_TH, down_SHI)
        if gradients is not None and self.sums is not None:
            return self._backward_in_blocks(dy_TH, saved.arrivals_MH, weight_TK, experts, kept, blocks, gradients)
        found = experts_backward(
            dy_TH,
            saved.arrivals_MH,
            weight_TK,
            experts,
            kept,
            blocks,
            None if gradients is None else torch.float32,
            (None, None) if gradients is None else gradients[:2],
        )
        return found.dx_TH, found.dweight_TK

    def _backward_in_blocks(
        self,
        dy_TH: Tensor,
        x_TH: Tensor,
        weight_TK: Tensor,
        experts: ExpertMatrices,
        kept: Kept,
        blocks: TileConfigs,
        gradients: ExpertGradients,
    ) -> tuple[Tensor, Tensor]:
        """``experts_backward``, but for how rows are summed."""
        assert self.sums is not None
        routing, top_k, tile = self.routing, weight_TK.shape[1], blocks.weight_gradient
        dh_PU, wa_PI, dweight_TK, tiles = hidden_gradients(dy_TH, weight_TK, experts, kept, blocks)
        groups = OrderedGroups(routing.entry_P, routing.first_G1, groups_by_size(routing.first_G1))
        of_up, of_down = agreed_blocks(self.sums, groups, top_k, (x_TH, dy_TH), (dh_PU, wa_PI))
        block_gradient(dy_TH, wa_PI, groups, top_k, "left", of_down, tile, gradients.down)
        del wa_PI
        dx_TH = input_gradient(dh_PU, experts, routing, tiles, blocks)
        block_gradient(dh_PU, x_TH, groups, top_k, "right", of_up, tile, gradients.gate_up)
        return dx_TH, dweight_TK

    def _matrices(self, gate_up_S2IH: Tensor, down_SHI: Tensor) -> ExpertMatrices:
        """The expert of each group: itself."""
        first_G1 = self.routing.first_G1
        expert_G = torch.arange(len(first_G1) - 1, dtype=torch.int32, device=first_G1.device)
        return ExpertMatrices(gate_up_S2IH, down_SHI, expert_G, ACTIVATION)

    def _blocks(self, like: Tensor, down_SHI: Tensor) -> TileConfigs:
        return blocks_of(ShapeClass.of(like, down_SHI, len(self.routing.entry_P), ACTIVATION), like.device)


def agreed_blocks(
    sums: BlockSums, groups: OrderedGroups, top_k: int, by_token: tuple[Tensor, Tensor], by_row: tuple[Tensor, Tensor]
) -> tuple[RowBlocks, RowBlocks]:
    """Returns how the gradients of ``gate_up`` and ``down`` are summed. A collective. ``by_token``: x and dy [T, H];
    ``by_row``: gradients of pre-activations and weighted activations, in order of ``groups``.
    """
    token_P = (groups.entry_P // top_k).clamp_min(0)
    of_tokens, of_rows = ([row_sizes_on_device(rows) for rows in sides] for sides in (by_token, by_row))
    sizes_P = [*(sizes[token_P] for sizes in of_tokens), *of_rows]
    # Kernels know no biases, and so ask nothing about routing weights.
    largest_S5 = functional.pad(largest_by_slot(groups.first_G1, *sizes_P), (0, 1))
    up_S, down_S, *_ = sums.agree(largest_S5).unbind(dim=1)
    return RowBlocks(sums.block_rows, up_S.contiguous()), RowBlocks(sums.block_rows, down_S.contiguous())
