"""Dispatch, experts and combine, chunk by chunk; sequential is one chunk.

``schedule_of`` says what comes when, and here is what each stage does. Chunks change when things happen and
never what is computed: a row comes out the same in any company, and weight gradients sum over all rows at once in
expert order (``expert_compute``).

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, N rows in wire order, P expert rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.config import Overlap
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.overlap.comm.channel import Channel, Transfer
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
from moesys.overlap.routes import Routes
from moesys.schedule import Direction, Stage, schedule_of


@dataclass(frozen=True)
class ChunkedExecutor:
    """Runs one micro-batch of one layer on one rank.

    ``overlap``: whose schedule is run; ``routes`` have its chunks. ``compute``: how experts are computed; ``routes``
    are padded for it. ``memory``: where large tensors lie.
    """

    overlap: Overlap
    routes: Routes
    channel: Channel
    compute: ExpertCompute
    memory: PagePool

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Returns the output [T, H] in x's dtype, and what backward needs. ``wait_for_experts`` is called once, when
        the first chunk has arrived.
        """
        messages = _Messages(self.routes, self.channel, self.memory, x_TH, "forward")
        at = Workplace(self.memory, Scratch(self.memory, x_TH.device))
        y_TH = self.memory.empty_like(x_TH)
        forward_pass: ForwardPass
        for stage, earlier in schedule_of(self.overlap, "forward").items():
            messages.wait(earlier)
            chunk = self.routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch":
                    messages.dispatch(stage)
                case "wait_for_experts":
                    forward_pass = self.compute.forward(self.routes, messages.arrivals, wait_for_experts(), at)
                case "experts":
                    with self._span("experts", f"forward {stage.chunk}"):
                        y_PH = forward_pass.experts(chunk)
                case "combine":
                    messages.combine(stage, y_PH)
                case "sum":
                    tokens = slice(*chunk.tokens)
                    home_NH, home_TK = messages.take_home(stage)
                    with self._span("combine", f"forward {stage.chunk}"):
                        place_TK = home_TK.view_as(weight_TK[tokens])
                        self.compute.combine(home_NH, place_TK, weight_TK[tokens], y_TH[tokens], at.scratch)
                case _:
                    raise AssertionError(f"no stage of tokens in chunks: {stage}")
        return y_TH, Saved(messages.arrivals.rows, forward_pass.pre_activations(), weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: Saved, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]). Each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None.
        """
        routes, weight_TK = self.routes, saved.weight_TK
        messages = _Messages(routes, self.channel, self.memory, dy_TH, "backward")
        saved_arrivals = Arrivals(saved.arrivals_MH, messages.arrivals.index)
        at = Workplace(self.memory, Scratch(self.memory, dy_TH.device))
        dx_TH, dweight_TK = self.memory.empty_like(dy_TH), torch.empty_like(weight_TK)
        backward_pass: BackwardPass
        for stage, earlier in schedule_of(self.overlap, "backward").items():
            messages.wait(earlier)
            chunk = routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch_weights":
                    messages.send_weights(stage, weight_TK.reshape(-1)[routes.send_row_N], home=False)
                case "dispatch":
                    messages.dispatch(stage)
                case "wait_for_experts":
                    weight_M = messages.arrived_weights()
                    dweight_M = torch.empty_like(weight_M)
                    inputs = BackwardInputs(messages.arrivals, saved_arrivals, saved.h_P2I, weight_M, gradients)
                    backward_pass = self.compute.backward(routes, inputs, wait_for_experts(), at)
                case "experts":
                    with self._span("experts", f"backward {stage.chunk}"):
                        dx_PH, dweight_M[slice(*chunk.arrivals)] = backward_pass.experts(chunk)
                case "combine":
                    messages.combine(stage, dx_PH)
                case "sum":
                    tokens = slice(*chunk.tokens)
                    home_NH, home_TK = messages.take_home(stage)
                    with self._span("combine", f"backward {stage.chunk}"):
                        place_TK = home_TK.view_as(weight_TK[tokens])
                        self.compute.combine(home_NH, place_TK, None, dx_TH[tokens], at.scratch)
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

    def _span(self, kind: str, detail: str) -> AbstractContextManager[None]:
        return self.channel.recorder.span("compute", kind, detail)


class _Messages:
    """What travels in one direction: issued by a stage, waited for by those that need it. On one rank nothing does."""

    def __init__(
        self, routes: Routes, channel: Channel, memory: PagePool, source_TH: Tensor, direction: Direction
    ) -> None:
        self._routes, self._channel, self._memory, self._direction = routes, channel, memory, direction
        self._alone = channel.num_ranks == 1
        self._under_way: dict[Stage, Transfer] = {}
        # Rows of each chunk that are home, or on their way.
        self._home: dict[int, Tensor] = {}
        if self._alone:
            self.arrivals = Arrivals(source_TH, routes.send_token_N)
        else:
            rows_MH = memory.empty((routes.num_arrivals, *source_TH.shape[1:]), source_TH.dtype, source_TH.device)
            self.arrivals = Arrivals(rows_MH, None, source_TH, routes.send_token_N)

    def wait(self, stages: Iterable[Stage]) -> None:
        """Waits for those of ``stages`` that are messages."""
        for stage in stages:
            if (transfer := self._under_way.pop(stage, None)) is not None:
                transfer.wait()

    def dispatch(self, stage: Stage) -> None:
        """Sends a chunk's rows to their experts, where they are ``arrivals``."""
        source, send_index = self.arrivals.source, self.arrivals.send_index
        if source is None or send_index is None:
            return
        chunk = self._routes.chunks[stage.chunk]
        self._under_way[stage] = self._channel.all_to_all(
            self.arrivals.rows[slice(*chunk.arrivals)],
            self._rows(source, send_index[slice(*chunk.sent)]),
            chunk.arrive_counts_R,
            chunk.send_counts_R,
            lane="dispatch",
            detail=f"{self._direction} {stage.chunk}",
        )

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows home."""
        if self._alone:
            self._home[stage.chunk] = rows_PH
            return
        chunk = self._routes.chunks[stage.chunk]
        num_rows = chunk.sent[1] - chunk.sent[0]
        home_NH = self._memory.empty((num_rows, *rows_PH.shape[1:]), rows_PH.dtype, rows_PH.device)
        self._under_way[stage] = self._channel.all_to_all(
            home_NH,
            self._rows(rows_PH, chunk.return_M),
            chunk.send_counts_R,
            chunk.arrive_counts_R,
            lane="combine",
            detail=f"{self._direction} {stage.chunk}",
        )
        self._home[stage.chunk] = home_NH

    def _rows(self, rows_NH: Tensor, index_M: Tensor) -> Tensor:
        size = (len(index_M), *rows_NH.shape[1:])
        return torch.index_select(rows_NH, 0, index_M, out=self._memory.empty(size, rows_NH.dtype, rows_NH.device))

    def take_home(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """Returns the rows of a chunk that are home, once, and which of them is each (token, k)'s."""
        chunk, home_NH = self._routes.chunks[stage.chunk], self._home.pop(stage.chunk)
        # On one rank nothing has put the rows in wire order.
        return home_NH, chunk.return_M[chunk.home_TK] if self._alone else chunk.home_TK

    # Routing weights and their gradients travel in one message each: chunks of them would be all latency.

    def send_weights(self, stage: Stage, values: Tensor, *, home: bool) -> None:
        """Sends routing weights, in wire order, to the experts of their rows; or their gradients, by arrival, home."""
        wire_order_N, arrival_order_M = self._routes.by_destination_N, self._routes.by_source_M
        sent, self._arrives = (arrival_order_M, wire_order_N) if home else (wire_order_N, arrival_order_M)
        self._weights = values if self._alone else self._exchange(stage, values[sent], home=home)

    def arrived_weights(self) -> Tensor:
        """Returns what was sent last: by arrival, [M]; or in wire order, [N], where it went home."""
        if self._alone:
            return self._weights
        return torch.empty_like(self._weights).index_copy_(0, self._arrives, self._weights)

    def _exchange(self, stage: Stage, values: Tensor, *, home: bool) -> Tensor:
        """Sends one number a row of all chunks to the experts or home. Returns what will have arrived."""
        chunks = self._routes.chunks
        sent_R = [sum(counts) for counts in zip(*(chunk.send_counts_R for chunk in chunks), strict=True)]
        arrived_R = [sum(counts) for counts in zip(*(chunk.arrive_counts_R for chunk in chunks), strict=True)]
        out_R, in_R = (sent_R, arrived_R) if home else (arrived_R, sent_R)
        received = values.new_empty(sum(out_R))
        lane = "combine" if home else "dispatch"
        self._under_way[stage] = self._channel.all_to_all(received, values, out_R, in_R, lane=lane, detail="weights")
        return received
