"""Dispatch, experts and combine, chunk by chunk; sequential is one chunk.

``schedule_of`` says what comes when, and here is what each stage does. Chunks change when things happen and
never what is computed: a row comes out the same in any company, and weight gradients sum over all rows at once in
expert order (``expert_compute``).

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, N rows in wire order, P expert rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesys.config import Overlap
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.host_copies import to_device
from moesys.overlap.block_sums import BlockSums
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position
from moesys.overlap.executor import Saved, WaitForExperts
from moesys.overlap.expert_compute import (
    Arrivals,
    BackwardInputs,
    BackwardPass,
    ExpertCompute,
    ForwardPass,
    Workplace,
)
from moesys.overlap.held_experts import ExpertGradients
from moesys.overlap.node_messages import NodeMessages
from moesys.overlap.node_routes import NodeRoutes
from moesys.overlap.routes import Routes
from moesys.overlap.row_messages import RowMessages
from moesys.schedule import Direction, Schedule, Stage, schedule_of

if TYPE_CHECKING:
    from moesys.overlap.device_routes import PendingRoutes


@dataclass(frozen=True)
class ChunkedExecutor:
    """Runs one micro-batch of one layer on one rank.

    ``overlap``: whose schedule is run; ``planned`` has its chunks, and may be on its way to the host. ``compute``: how
    experts are computed; routes are padded for it. ``memory``: where large tensors lie. ``node_routes``: where tokens
    cross to a node once. ``sums``: of weight gradients, where layouts may not show.
    """

    overlap: Overlap
    planned: Routes | PendingRoutes
    channel: Channel
    compute: ExpertCompute
    memory: PagePool
    node_routes: NodeRoutes | None = None
    sums: BlockSums | None = None

    @property
    def routes(self) -> Routes:
        """Where devices plan, the host waits here once for how many rows go where."""
        return self.planned if isinstance(self.planned, Routes) else self.planned.routes

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Returns the output [T, H] in x's dtype, and what backward needs. ``wait_for_experts`` is called once, when
        the first chunk has arrived.
        """
        y_TH = self.memory.empty_like(x_TH)
        return y_TH, self._run_forward("forward", x_TH, weight_TK, wait_for_experts, y_TH)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, Saved]:
        """Returns what ``forward`` does; where no rank reads the output, nothing travels home and it is None."""
        if self.channel.num_ranks > 1:
            # Ranks may differ in what they do behind the layer, and rows travel home for all or for none.
            reads, at = to_device([read], x_TH.device), Position("recomputation", self.channel.generation)
            read = bool(self.channel.all_gather(reads, lane="counts", at=at).any())
        if read:
            return self.forward(x_TH, weight_TK, wait_for_experts)
        return None, self._run_forward("recomputation", x_TH, weight_TK, wait_for_experts, None)

    def _run_forward(
        self,
        direction: Direction,
        x_TH: Tensor,
        weight_TK: Tensor,
        wait_for_experts: WaitForExperts,
        y_TH: Tensor | None,
    ) -> Saved:
        """Writes the output into ``y_TH``, where anybody reads it."""
        messages = self._messages(x_TH, direction)
        at = Workplace(self.memory, Scratch(self.memory, x_TH.device))
        forward_pass: ForwardPass
        for stage, earlier in self._schedule(direction).items():
            messages.wait(earlier)
            chunk = self.routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch_weights":
                    assert isinstance(messages, NodeMessages)
                    messages.send_weights_to_gates(stage, weight_TK)
                case "dispatch":
                    messages.dispatch(stage)
                case "spread":
                    assert isinstance(messages, NodeMessages)
                    messages.spread(stage)
                case "wait_for_experts":
                    messages.put_in_place()
                    forward_pass = self.compute.forward(self.routes, messages.arrivals, wait_for_experts(), at)
                case "experts":
                    with self._span("experts", f"forward {stage.chunk}"):
                        y_PH = forward_pass.experts(chunk)
                case "pre_activations":
                    with self._span("experts", f"recomputation {stage.chunk}"):
                        forward_pass.first_product(chunk)
                case "combine":
                    if stage.part:
                        self._send_sums(messages, stage, at, weighted=True)
                    messages.combine(stage, y_PH)
                case "send_sums":
                    self._send_sums(messages, stage, at, weighted=True)
                case "sum":
                    assert y_TH is not None
                    tokens = slice(*chunk.tokens)
                    summands = messages.take_home(stage, weight_TK[tokens])
                    with self._span("combine", f"forward {stage.chunk}"):
                        self.compute.combine(*summands, y_TH[tokens], at.scratch)
                case _:
                    raise AssertionError(f"no stage of tokens in chunks: {stage}")
        return Saved(messages.arrivals.rows, forward_pass.pre_activations(), weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: Saved, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]). Each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None.
        """
        routes, weight_TK = self.routes, saved.weight_TK
        messages = self._messages(dy_TH, "backward")
        saved_arrivals = Arrivals(saved.arrivals_MH, messages.arrivals.index)
        at = Workplace(self.memory, Scratch(self.memory, dy_TH.device))
        dx_TH, dweight_TK = self.memory.empty_like(dy_TH), torch.empty_like(weight_TK)
        backward_pass: BackwardPass
        for stage, earlier in self._schedule("backward").items():
            messages.wait(earlier)
            chunk = routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch_weights":
                    messages.send_weights(stage, weight_TK.reshape(-1)[routes.send_row_N], home=False)
                case "dispatch":
                    messages.dispatch(stage)
                case "spread":
                    assert isinstance(messages, NodeMessages)
                    messages.spread(stage)
                case "wait_for_experts":
                    messages.put_in_place()
                    weight_M = messages.arrived_weights()
                    dweight_M = torch.empty_like(weight_M)
                    given = (messages.arrivals, saved_arrivals, saved.h_P2I, weight_M, gradients)
                    inputs = BackwardInputs(*given, self.sums if gradients is not None else None)
                    backward_pass = self.compute.backward(routes, inputs, wait_for_experts(), at)
                case "experts":
                    with self._span("experts", f"backward {stage.chunk}"):
                        dx_PH, dweight_M[slice(*chunk.arrivals)] = backward_pass.experts(chunk)
                case "combine":
                    if stage.part:
                        self._send_sums(messages, stage, at, weighted=False)
                    messages.combine(stage, dx_PH)
                case "send_sums":
                    self._send_sums(messages, stage, at, weighted=False)
                case "sum":
                    tokens = slice(*chunk.tokens)
                    summands = messages.take_home(stage, None)
                    with self._span("combine", f"backward {stage.chunk}"):
                        self.compute.combine(*summands, dx_TH[tokens], at.scratch)
                case "combine_dweights":
                    messages.send_weights(stage, dweight_M, home=True)
                case "weight_gradients":
                    if gradients is not None:
                        with self._span("weight_gradients", "backward"):
                            backward_pass.weight_gradients()
                case "gather_dweights":
                    dweight_TK.view(-1)[routes.send_row_N] = messages.arrived_weights()
                case _:
                    raise AssertionError(f"no stage of tokens in chunks: {stage}")
        return dx_TH, dweight_TK

    def _schedule(self, direction: Direction) -> Schedule:
        parts = 1 if self.node_routes is None else self.node_routes.parts
        return schedule_of(self.overlap, direction, self.channel.num_nodes, parts)

    def _messages(self, source_TH: Tensor, direction: Direction) -> RowMessages:
        if self.node_routes is None:
            return RowMessages(self.routes, self.channel, self.memory, source_TH, direction)
        return NodeMessages(self.routes, self.node_routes, self.channel, self.memory, source_TH, direction)

    def _send_sums(self, messages: RowMessages, stage: Stage, at: Workplace, *, weighted: bool) -> None:
        """Sums what was collected here for other nodes, and sends it home."""
        assert isinstance(messages, NodeMessages)
        collected = messages.collected(stage.chunk, weighted=weighted)
        like_NH = collected.rows_NH
        sums_UH = self.memory.empty((len(collected.place_TK), like_NH.shape[1]), like_NH.dtype, like_NH.device)
        self.compute.combine(*collected, sums_UH, at.scratch)
        messages.send_sums(stage, sums_UH)

    def _span(self, kind: str, detail: str) -> AbstractContextManager[None]:
        return self.channel.recorder.span("compute", kind, detail)
