"""Dispatch, experts and combine, chunk by chunk, by messages; sequential is one chunk.

``schedule_of`` returns the stages in their order, and the code below runs each stage. Chunks change when a row is
computed and never its result, which does not depend on the rows beside it; weight gradients sum over all rows at once
in expert order (``overlap.executor``). Where tokens cross to a node once, ``overlap.node_routes`` has more stages.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, N rows in wire order, P expert rows, C chunks, R
ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.config import LayoutInvariant, Overlap
from moesys.frames import Position
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.launch import to_device
from moesys.layout import ExpertLayout
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.exact_sum import BlockSums
from moesys.overlap.executor import (
    Arrivals,
    BackwardInputs,
    BackwardPass,
    DeviceLaunch,
    Executor,
    ExpertCompute,
    ExpertGradients,
    ForwardPass,
    HostPlan,
    LayerContext,
    SavedTensors,
    WaitForExperts,
)
from moesys.overlap.routes import ChunkRoutes, Routes, build_routes
from moesys.schedule import Direction, Schedule, Stage, schedule_of

Counts = tuple[int, ...]


class Summands(NamedTuple):
    """Rows [N, H], the places of the rows of which each token is the sum, [T, K], and their weights, if any."""

    rows_NH: Tensor
    place_TK: Tensor
    weight_TK: Tensor | None


class RowMessages:
    """The messages of one direction: a stage issues each, and the stages that need it wait for it."""

    def __init__(
        self, routes: Routes, channel: Channel, memory: PagePool, source_TH: Tensor, direction: Direction
    ) -> None:
        self._routes, self._channel, self._memory, self._direction = routes, channel, memory, direction
        self._source_TH = source_TH
        self._under_way: dict[Stage, tuple[Transfer, ...]] = {}
        # The results of each chunk return here, and stay until they are taken.
        self._returned: dict[int, Tensor] = {}
        self.arrivals = Arrivals(self._new(routes.num_arrivals, source_TH))

    def wait(self, stages: Iterable[Stage]) -> None:
        """Waits for those of ``stages`` that are messages."""
        for stage in stages:
            for transfer in self._under_way.pop(stage, ()):
                transfer.wait()

    def put_in_place(self) -> None:
        """Copies rows that have arrived in parts to their places; messages of whole rows have no parts."""

    def dispatch(self, stage: Stage) -> None:
        """Sends a chunk's rows to the ranks of their experts, which receive them as ``arrivals``."""
        chunk = self._routes.chunks[stage.chunk]
        rows_NH = self._rows(self._source_TH, self._routes.send_token_N[slice(*chunk.sent)])
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)]
        self._send(stage, here_MH, rows_NH, chunk.arrive_counts_R, chunk.send_counts_R)

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows back to the ranks of their tokens."""
        chunk = self._routes.chunks[stage.chunk]
        returned_NH = self._new(chunk.sent[1] - chunk.sent[0], rows_PH)
        self._send(stage, returned_NH, self._rows(rows_PH, chunk.combine_M), chunk.send_counts_R, chunk.arrive_counts_R)
        self._returned[stage.chunk] = returned_NH

    def _send(
        self, stage: Stage, out_NH: Tensor, in_NH: Tensor, out_counts_R: Counts, in_counts_R: Counts, where: str = ""
    ) -> None:
        lane = "dispatch" if stage.kind in ("dispatch", "spread") else "combine"
        detail = f"{self._direction} {stage.chunk}{where}"
        transfer = self._channel.all_to_all(out_NH, in_NH, out_counts_R, in_counts_R, lane=lane, detail=detail)
        self._under_way[stage] = (*self._under_way.get(stage, ()), transfer)

    def _new(self, num_rows: int, like_NH: Tensor) -> Tensor:
        return self._memory.new(like_NH, num_rows, *like_NH.shape[1:])

    def _rows(self, rows_NH: Tensor, index_M: Tensor) -> Tensor:
        return torch.index_select(rows_NH, 0, index_M, out=self._new(len(index_M), rows_NH))

    def take_returned(self, stage: Stage, weight_TK: Tensor | None) -> Summands:
        """Returns the rows of a chunk that have returned, once: each token is the sum of some of them. ``weight_TK``:
        the chunk's routing weights, where rows are to be weighted.
        """
        return Summands(self._returned.pop(stage.chunk), self._routes.chunks[stage.chunk].wire_place_TK, weight_TK)

    # Routing weights and their gradients are sent in one message each: messages of chunks would be mostly latency.

    def send_weights(self, stage: Stage, values: Tensor, *, back: bool) -> None:
        """Sends routing weights, in wire order, to the experts of their rows; or their gradients, by arrival, back."""
        routes, chunks = self._routes, self._routes.chunks
        sent_R = [sum(counts) for counts in zip(*(chunk.send_counts_R for chunk in chunks), strict=True)]
        arrived_R = [sum(counts) for counts in zip(*(chunk.arrive_counts_R for chunk in chunks), strict=True)]
        wire, arrival = (routes.by_destination_N, sent_R), (routes.by_source_M, arrived_R)
        (sent, in_R), (self._arrives, out_R) = (arrival, wire) if back else (wire, arrival)
        self._weights, lane = values.new_empty(sum(out_R)), "combine" if back else "dispatch"
        transfer = self._channel.all_to_all(self._weights, values[sent], out_R, in_R, lane=lane, detail="weights")
        self._under_way[stage] = (transfer,)

    def arrived_weights(self) -> Tensor:
        """Returns what was sent last: by arrival, [M]; or in wire order, [N], where it was sent back."""
        return torch.empty_like(self._weights).index_copy_(0, self._arrives, self._weights)


@dataclass(frozen=True)
class ChunkedRun:
    """Runs one micro-batch of one layer on one rank.

    ``overlap``: whose schedule is run; ``planned``: returns the routes of its chunks, for which the host waits where
    devices plan. ``compute``: how experts are computed; routes are padded for it. ``memory``: where large tensors lie.
    ``sums``: how weight gradients are summed under ``LayoutInvariant``.
    """

    overlap: Overlap
    planned: Callable[[], Routes]
    channel: Channel
    compute: ExpertCompute
    memory: PagePool
    sums: BlockSums | None = None

    @property
    def routes(self) -> Routes:
        """The routes. Where devices plan, the host waits once, for the number of rows from rank to rank."""
        return self.planned()

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, SavedTensors]:
        """Returns the output [T, H] in x's dtype, and what backward needs. ``wait_for_experts`` is called once, when
        the first chunk has arrived.
        """
        y_TH = self.memory.empty_like(x_TH)
        return y_TH, self._run_forward("forward", x_TH, weight_TK, wait_for_experts, y_TH)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, SavedTensors]:
        """Returns what ``forward`` does; where no rank reads the output, no row returns and it is None."""
        # Ranks may differ in whether they read the output, and rows return to all of them or to none.
        reads, at = to_device([read], x_TH.device), Position("recomputation", self.channel.generation)
        if self.channel.all_gather(reads, lane="counts", at=at).any():
            return self.forward(x_TH, weight_TK, wait_for_experts)
        return None, self._run_forward("recomputation", x_TH, weight_TK, wait_for_experts, None)

    def _run_forward(
        self,
        direction: Direction,
        x_TH: Tensor,
        weight_TK: Tensor,
        wait_for_experts: WaitForExperts,
        y_TH: Tensor | None,
    ) -> SavedTensors:
        """Writes the output into ``y_TH``, unless that is None."""
        routes = self.routes
        messages = self._messages(routes, x_TH, direction)
        scratch = Scratch(self.memory, x_TH.device)
        forward_pass: ForwardPass
        for stage, earlier in self._schedule(direction).items():
            messages.wait(earlier)
            chunk = routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch":
                    messages.dispatch(stage)
                case "wait_for_experts":
                    messages.put_in_place()
                    forward_pass = self.compute.forward(routes, messages.arrivals, wait_for_experts(), scratch)
                case "experts":
                    with self._span("experts", f"forward {stage.chunk}"):
                        y_PH = forward_pass.experts(chunk)
                    self._clear_behind_last(chunk, routes, scratch)
                case "pre_activations":
                    with self._span("experts", f"recomputation {stage.chunk}"):
                        forward_pass.first_product(chunk)
                case "combine":
                    self._combine(messages, stage, y_PH, scratch, weighted=True)
                case "sum":
                    assert y_TH is not None
                    tokens = slice(*chunk.tokens)
                    summands = messages.take_returned(stage, weight_TK[tokens])
                    with self._span("combine", f"forward {stage.chunk}"):
                        self.compute.combine(*summands, y_TH[tokens], scratch)
                case _:
                    self._cross_nodes(messages, stage, scratch, weight_TK)
        return SavedTensors(messages.arrivals.rows, forward_pass.pre_activations(), weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]). Each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None.
        """
        routes, weight_TK = self.routes, saved.weight_TK
        messages = self._messages(routes, dy_TH, "backward")
        scratch = Scratch(self.memory, dy_TH.device)
        dx_TH, dweight_TK = self.memory.empty_like(dy_TH), torch.empty_like(weight_TK)
        backward_pass: BackwardPass
        for stage, earlier in self._schedule("backward").items():
            messages.wait(earlier)
            chunk = routes.chunks[stage.chunk]
            match stage.kind:
                case "dispatch_weights":
                    messages.send_weights(stage, weight_TK.reshape(-1)[routes.send_row_N], back=False)
                case "dispatch":
                    messages.dispatch(stage)
                case "wait_for_experts":
                    messages.put_in_place()
                    weight_M = messages.arrived_weights()
                    dweight_M = torch.empty_like(weight_M)
                    given = (messages.arrivals, Arrivals(saved.arrivals_MH), saved.h_P2I, weight_M, gradients)
                    inputs = BackwardInputs(*given, self.sums if gradients is not None else None)
                    backward_pass = self.compute.backward(routes, inputs, wait_for_experts(), scratch)
                case "experts":
                    with self._span("experts", f"backward {stage.chunk}"):
                        dx_PH, dweight_M[slice(*chunk.arrivals)] = backward_pass.experts(chunk)
                    self._clear_behind_last(chunk, routes, scratch)
                case "combine":
                    self._combine(messages, stage, dx_PH, scratch, weighted=False)
                case "sum":
                    tokens = slice(*chunk.tokens)
                    summands = messages.take_returned(stage, None)
                    with self._span("combine", f"backward {stage.chunk}"):
                        self.compute.combine(*summands, dx_TH[tokens], scratch)
                case "combine_dweights":
                    messages.send_weights(stage, dweight_M, back=True)
                case "weight_gradients":
                    if gradients is not None:
                        with self._span("weight_gradients", "backward"):
                            backward_pass.weight_gradients()
                case "gather_dweights":
                    dweight_TK.view(-1)[routes.send_row_N] = messages.arrived_weights()
                case _:
                    self._cross_nodes(messages, stage, scratch, None)
        return dx_TH, dweight_TK

    def _schedule(self, direction: Direction) -> Schedule:
        return _schedule_of(self.overlap, direction)

    def _messages(self, routes: Routes, source_TH: Tensor, direction: Direction) -> RowMessages:
        return RowMessages(routes, self.channel, self.memory, source_TH, direction)

    def _combine(self, messages: Any, stage: Stage, rows_PH: Tensor, scratch: Scratch, *, weighted: bool) -> None:
        """Sends a chunk's expert rows back. ``weighted``: whether sums that are made for other nodes are weighted."""
        messages.combine(stage, rows_PH)

    def _cross_nodes(self, messages: Any, stage: Stage, scratch: Scratch, weight_TK: Tensor | None) -> None:
        """Runs a stage that exists only where tokens cross to a node once; ``weight_TK`` is given in forward."""
        raise AssertionError(f"no stage of tokens in chunks: {stage}")

    def _clear_behind_last(self, chunk: ChunkRoutes, routes: Routes, scratch: Scratch) -> None:
        """Frees buffers after the last chunk is computed, so that rows that return can use their memory."""
        if chunk is routes.chunks[-1]:
            scratch.clear()

    def _span(self, kind: str, detail: str) -> AbstractContextManager[None]:
        return self.channel.recorder.span("compute", kind, detail)


@cache
def _schedule_of(overlap: Overlap, direction: Direction) -> Schedule:
    return schedule_of(overlap, direction, num_nodes=1)


class ChunkedExecutor(Executor):
    """Runs plans of hosts, or of devices where kernels compute and the strategy allows it (``routes_on_device``)."""

    def __init__(self, layer: LayerContext, compute: ExpertCompute) -> None:
        super().__init__(layer, compute)
        self.num_chunks = layer.strategy.overlap.chunks
        self._sums_in_blocks = isinstance(layer.strategy.reduction, LayoutInvariant)
        if self.compute.by_tables and layer.strategy.routes_on_device(layer.channel.num_nodes):
            self.planned_by = "devices"
        # Tables of the newest layout, and chunks of as many tokens as there were last.
        self._tables: tuple[ExpertLayout, Any, Any] | None = None
        self._chunk_T1: Tensor | None = None

    def run(self, expert_TK: Tensor, planned: HostPlan) -> ChunkedRun:
        layer, plan = self.layer, planned.plan
        channel = layer.channel.tagged(layer.channel.generation)
        tokens_CRE = np.ascontiguousarray(planned.tokens_RCE.swapaxes(0, 1))
        routes = build_routes(expert_TK, tokens_CRE, plan.tokens, channel.rank, self.compute.min_rows)
        sums = layer.sums_of(plan, expert_TK.device) if self._sums_in_blocks else None
        return ChunkedRun(layer.strategy.overlap, lambda: routes, channel, self.compute, layer.memory, sums)

    def launch(self, expert_TK: Tensor, layout: ExpertLayout, at: Position) -> DeviceLaunch:
        # Imported here, so that Triton is loaded only where it runs.
        from moesys.overlap.device_routes import chunk_numbers, device_split, own_replicas, route_on_device

        layer, channel, chunks = self.layer, self.layer.channel, self.num_chunks
        if self._tables is None or self._tables[0] is not layout:
            split = device_split(layout, layer.cluster, layer.strategy.split, expert_TK.device)
            self._tables = layout, split, own_replicas(layout, channel.rank)
        if chunks > 1 and (self._chunk_T1 is None or len(self._chunk_T1) != len(expert_TK)):
            self._chunk_T1 = chunk_numbers(len(expert_TK), chunks, expert_TK.device)
        _, split, own = self._tables
        at = replace(at, choices=expert_TK.numel())
        pending = route_on_device(expert_TK, self._chunk_T1, chunks, split, own, at.number, at, channel)
        run = ChunkedRun(layer.strategy.overlap, lambda: pending.routes, pending.channel, self.compute, layer.memory)
        # No check is left: the host reads sizes and headers before it sends a message.
        return DeviceLaunch(run, pending.plan)
