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

from moesys.kernels.experts.experts import ExpertMatrices, Kept, experts_backward, experts_forward, experts_recomputed
from moesys.kernels.experts.tile_config import ShapeClass, TileConfigs
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.routing.routing import Routing
from moesys.overlap.executor import Saved, WaitForExperts
from moesys.overlap.held_experts import ExpertGradients

ACTIVATION = "swiglu"


@dataclass(frozen=True)
class SingleRankExecutor:
    """Runs one micro-batch of one layer, whose rows are ``routing``'s, one group an expert.

    It records no spans: the host only launches, and does not know when the device computes.
    """

    routing: Routing

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
        found = experts_backward(
            dy_TH,
            saved.arrivals_MH,
            saved.weight_TK.contiguous(),
            self._matrices(gate_up_S2IH, down_SHI),
            Kept(saved.h_P2I, self.routing),
            self._blocks(dy_TH, down_SHI),
            None if gradients is None else torch.float32,
            (None, None) if gradients is None else gradients[:2],
        )
        return found.dx_TH, found.dweight_TK

    def _matrices(self, gate_up_S2IH: Tensor, down_SHI: Tensor) -> ExpertMatrices:
        """The expert of each group: itself."""
        first_G1 = self.routing.first_G1
        expert_G = torch.arange(len(first_G1) - 1, dtype=torch.int32, device=first_G1.device)
        return ExpertMatrices(gate_up_S2IH, down_SHI, expert_G, ACTIVATION)

    def _blocks(self, like: Tensor, down_SHI: Tensor) -> TileConfigs:
        return blocks_of(ShapeClass.of(like, down_SHI, len(self.routing.entry_P), ACTIVATION), like.device)
