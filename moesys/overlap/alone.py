"""One rank alone on the CPU: sort, compute, combine. Nothing is planned and nothing travels.

Rows are in the order of (expert, token, k), which is the order that ``routes`` gives one rank, so that every bit is the
same as through routes. Chunks would have nothing to overlap with: whatever the strategy, the batch is one chunk.

T tokens, H hidden, I expert width, K top-k, P expert rows, E experts, all of them here; arrival t·K + k is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import Scratch
from moesys.overlap.exact_sum import BlockSums
from moesys.overlap.executor import (
    Arrivals,
    BackwardInputs,
    Executor,
    ExpertGradients,
    LayerContext,
    SavedTensors,
    WaitForExperts,
)
from moesys.overlap.experts_cpu import CpuExperts, CpuForward
from moesys.overlap.routes import SortedRoutes, invalid_id, no_expert, sort_rows


class AloneExecutor(Executor):
    """Runs the micro-batches of one rank by a GEMM for each expert.

    Experts without kernels are computed so on a GPU too. The host then sorts the choices: it waits for them, and copies
    them and their order through pageable memory.
    """

    planned_by = "nobody"

    def sort(self, expert_TK: Tensor, turn: int) -> AloneRun:
        layer, num_experts = self.layer, self.layer.shape.num_experts
        channel = layer.channel
        with channel.meter.planning():
            if (invalid := invalid_id(expert_TK, num_experts)) is not None:
                found = f"expert_TK of rank {channel.members[0]} has the id {invalid}"
                raise no_expert(found, num_experts, channel.identity.layer)
            routes = sort_rows(expert_TK, num_experts, self.compute.min_rows)
            tokens_E = torch.from_numpy(routes.tokens_E)
        sums = layer.sums(tuple(range(num_experts)), routes.tokens_E, turn, expert_TK.device)
        return AloneRun(layer, cast(CpuExperts, self.compute), routes, tokens_E, sums)


@dataclass(frozen=True)
class AloneRun:
    """Runs one micro-batch of one layer on one rank. ``sums``: of weight gradients, where nothing may show that it is
    one rank.
    """

    layer: LayerContext
    compute: CpuExperts
    routes: SortedRoutes
    tokens_E: Tensor
    sums: BlockSums | None
    # The host knows all errors.
    check = None

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, SavedTensors]:
        """Returns the output [T, H] in x's dtype, and what backward needs."""
        forward_pass, y_TH = self._forward_pass(x_TH, wait_for_experts), self.layer.memory.empty_like(x_TH)
        recorder = self.layer.channel.recorder
        with recorder.span("compute", "experts", "forward 0"):
            y_PH = forward_pass.experts(self.routes.chunk)
        with recorder.span("compute", "combine", "forward 0"):
            self.compute.combine(y_PH, self._place_TK(weight_TK), weight_TK, y_TH, forward_pass.scratch)
        return y_TH, SavedTensors(x_TH, forward_pass.pre_activations(), weight_TK)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, SavedTensors]:
        """Returns what ``forward`` does, but no output that is not ``read``."""
        if read:
            return self.forward(x_TH, weight_TK, wait_for_experts)
        forward_pass = self._forward_pass(x_TH, wait_for_experts)
        with self.layer.channel.recorder.span("compute", "experts", "recomputation 0"):
            forward_pass.first_product(self.routes.chunk)
        return None, SavedTensors(x_TH, forward_pass.pre_activations(), weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); weight gradients are written into ``gradients``, or not computed
        where that is None.
        """
        weight_TK, recorder = saved.weight_TK, self.layer.channel.recorder
        scratch = Scratch(self.layer.memory, dy_TH.device)
        dx_TH = self.layer.memory.empty_like(dy_TH)
        dy, x = Arrivals(dy_TH, self._token_M), Arrivals(saved.arrivals_MH, self._token_M)
        sums = None if gradients is None else self.sums
        inputs = BackwardInputs(dy, x, saved.h_P2I, weight_TK.reshape(-1), gradients, sums)
        backward_pass = self.compute.backward(self.routes, inputs, wait_for_experts(), scratch)
        with recorder.span("compute", "experts", "backward 0"):
            dx_PH, dweight_M = backward_pass.experts(self.routes.chunk)
        with recorder.span("compute", "combine", "backward 0"):
            self.compute.combine(dx_PH, self._place_TK(weight_TK), None, dx_TH, scratch)
        if gradients is not None:
            with recorder.span("compute", "weight_gradients", "backward"):
                backward_pass.weight_gradients()
        return dx_TH, dweight_M.view_as(weight_TK)

    def _forward_pass(self, x_TH: Tensor, wait_for_experts: WaitForExperts) -> CpuForward:
        scratch = Scratch(self.layer.memory, x_TH.device)
        return self.compute.forward(self.routes, Arrivals(x_TH, self._token_M), wait_for_experts(), scratch)

    def _place_TK(self, weight_TK: Tensor) -> Tensor:
        return self.routes.chunk.return_M.view_as(weight_TK)

    @cached_property
    def _token_M(self) -> Tensor:
        """The token of each choice."""
        return_M, top_k = self.routes.chunk.return_M, self.routes.top_k
        return torch.arange(len(return_M), device=return_M.device).div_(top_k, rounding_mode="floor")
