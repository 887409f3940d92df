"""What travels in one direction of a micro-batch: rows to their experts and home, and routing weights.

T tokens of this rank, H hidden, K top-k, M arrivals, N rows in wire order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import PagePool
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.expert_compute import Arrivals
from moesys.overlap.routes import Routes
from moesys.schedule import Direction, Stage

Counts = tuple[int, ...]


class Summands(NamedTuple):
    """Rows [N, H], and of which of them each token is the sum, [T, K], with which weights, if any."""

    rows_NH: Tensor
    place_TK: Tensor
    weight_TK: Tensor | None


class RowMessages:
    """What travels in one direction: issued by a stage, waited for by those that need it. On one rank nothing does."""

    def __init__(
        self, routes: Routes, channel: Channel, memory: PagePool, source_TH: Tensor, direction: Direction
    ) -> None:
        self._routes, self._channel, self._memory, self._direction = routes, channel, memory, direction
        self._alone = channel.num_ranks == 1
        self._under_way: dict[Stage, tuple[Transfer, ...]] = {}
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
            for transfer in self._under_way.pop(stage, ()):
                transfer.wait()

    def put_in_place(self) -> None:
        """Puts what has come in parts where it belongs; here nothing has."""

    def dispatch(self, stage: Stage) -> None:
        """Sends a chunk's rows to their experts, where they are ``arrivals``."""
        source, send_index = self.arrivals.source, self.arrivals.send_index
        if source is None or send_index is None:
            return
        chunk = self._routes.chunks[stage.chunk]
        rows_NH = self._rows(source, send_index[slice(*chunk.sent)])
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)]
        self._send(stage, here_MH, rows_NH, chunk.arrive_counts_R, chunk.send_counts_R)

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows home."""
        if self._alone:
            self._home[stage.chunk] = rows_PH
            return
        chunk = self._routes.chunks[stage.chunk]
        home_NH = self._new(chunk.sent[1] - chunk.sent[0], rows_PH)
        self._send(stage, home_NH, self._rows(rows_PH, chunk.combine_M), chunk.send_counts_R, chunk.arrive_counts_R)
        self._home[stage.chunk] = home_NH

    def _send(
        self, stage: Stage, out_NH: Tensor, in_NH: Tensor, out_counts_R: Counts, in_counts_R: Counts, where: str = ""
    ) -> None:
        lane = "dispatch" if stage.kind in ("dispatch", "spread") else "combine"
        detail = f"{self._direction} {stage.chunk}{where}"
        transfer = self._channel.all_to_all(out_NH, in_NH, out_counts_R, in_counts_R, lane=lane, detail=detail)
        self._under_way[stage] = (*self._under_way.get(stage, ()), transfer)

    def _new(self, num_rows: int, like_NH: Tensor) -> Tensor:
        return self._memory.empty((num_rows, *like_NH.shape[1:]), like_NH.dtype, like_NH.device)

    def _rows(self, rows_NH: Tensor, index_M: Tensor) -> Tensor:
        return torch.index_select(rows_NH, 0, index_M, out=self._new(len(index_M), rows_NH))

    def take_home(self, stage: Stage, weight_TK: Tensor | None) -> Summands:
        """Returns the rows of a chunk that are home, once: what each token is the sum of. ``weight_TK``: the chunk's
        routing weights, where rows are to be weighted.
        """
        chunk, home_NH = self._routes.chunks[stage.chunk], self._home.pop(stage.chunk)
        # On one rank nothing has put the rows in wire order.
        place_TK = chunk.return_M[chunk.home_TK] if self._alone else chunk.home_TK
        return Summands(home_NH, place_TK, weight_TK)

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
        transfer = self._channel.all_to_all(received, values, out_R, in_R, lane=lane, detail="weights")
        self._under_way[stage] = (transfer,)
        return received
