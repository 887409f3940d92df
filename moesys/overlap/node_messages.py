"""Rows that cross to a node once, and sums that come home from it: messages by way of gates (``node_routes``)."""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import PagePool
from moesys.overlap.comm.channel import Channel
from moesys.overlap.node_routes import NodeRoutes
from moesys.overlap.routes import Routes
from moesys.overlap.row_messages import RowMessages, Summands
from moesys.schedule import Direction, Stage


class NodeMessages(RowMessages):
    """Dispatch crosses to gates, and ``spread`` passes on inside the node. Where sums come home, ``combine`` collects
    rows at gates, and ``send_sums`` sends one a token home, and what stayed in the node beside them.
    """

    def __init__(
        self,
        routes: Routes,
        node_routes: NodeRoutes,
        channel: Channel,
        memory: PagePool,
        source_TH: Tensor,
        direction: Direction,
    ) -> None:
        super().__init__(routes, channel, memory, source_TH, direction)
        self._source_TH, self._node_routes = source_TH, node_routes
        # Of each chunk, what this rank is the gate for, until it is passed on.
        self._at_gate: dict[int, Tensor] = {}
        # What was collected there, and what is to go home with its sums.
        self._collected: dict[int, tuple[Tensor, Tensor]] = {}

    def dispatch(self, stage: Stage) -> None:
        """Sends a chunk's rows: to their experts in this node, once to other nodes."""
        chunk, way = self._routes.chunks[stage.chunk], self._node_routes.chunks[stage.chunk]
        at_gate_UH = self._new(sum(way.across_arrive_R), self._source_TH)
        across_UH = self._rows(self._source_TH, way.across_token_U)
        self._send(stage, at_gate_UH, across_UH, way.across_arrive_R, way.across_send_R, " across")
        sent = self._routes.send_token_N[slice(*chunk.sent)][slice(*way.inside)]
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)][: sum(way.inside_arrive_R)]
        self._send(stage, here_MH, self._rows(self._source_TH, sent), way.inside_arrive_R, way.inside_send_R, " inside")
        self._at_gate[stage.chunk] = at_gate_UH

    def spread(self, stage: Stage) -> None:
        """Passes on what has crossed, a row a choice."""
        chunk, way = self._routes.chunks[stage.chunk], self._node_routes.chunks[stage.chunk]
        rows_NH = self._rows(self._at_gate.pop(stage.chunk), way.spread_row_N)
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)][sum(way.inside_arrive_R) :]
        self._send(stage, here_MH, rows_NH, way.spread_arrive_R, way.spread_send_R, " spread")

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows home; where sums come home, those of other nodes' tokens to their gates."""
        way = self._node_routes.chunks[stage.chunk]
        if way.sums is None:
            super().combine(stage, rows_PH)
            return
        # First those of this node's tokens, which go home beside the sums of others.
        num_inside, combine_M = sum(way.inside_arrive_R), self._routes.chunks[stage.chunk].combine_M
        collected_NH = self._with_zeros(sum(way.spread_send_R), rows_PH)
        rows_NH = self._rows(rows_PH, combine_M[num_inside:])
        self._send(stage, collected_NH[:-1], rows_NH, way.spread_send_R, way.spread_arrive_R, " collect")
        self._collected[stage.chunk] = collected_NH, self._rows(rows_PH, combine_M[:num_inside])

    def collected(self, stage: Stage, *, weighted: bool) -> Summands:
        """Returns what was collected here of a chunk for other nodes: for each token what its sum is of."""
        sums = self._node_routes.chunks[stage.chunk].sums
        assert sums is not None
        weight_UK = self._weights_at_gate[sums.gate_weight_UK] if weighted else None
        return Summands(self._collected[stage.chunk][0], sums.gate_place_UK, weight_UK)

    def send_sums(self, stage: Stage, sums_UH: Tensor) -> None:
        """Sends the sums of what was ``collected`` home, and beside them the rows of this node's own tokens."""
        way, (_, rows_NH) = self._node_routes.chunks[stage.chunk], self._collected.pop(stage.chunk)
        num_inside = sum(way.inside_send_R)
        home_NH = self._with_zeros(num_inside + len(way.across_token_U), sums_UH)
        self._send(stage, home_NH[num_inside:-1], sums_UH, way.across_send_R, way.across_arrive_R, " across")
        self._send(stage, home_NH[:num_inside], rows_NH, way.inside_send_R, way.inside_arrive_R, " inside")
        self._home[stage.chunk] = home_NH

    def _with_zeros(self, num_rows: int, like_NH: Tensor) -> Tensor:
        """Returns so many rows, uninitialised, and one of zeros behind them."""
        rows_NH = self._new(num_rows + 1, like_NH)
        rows_NH[-1] = 0
        return rows_NH

    def take_home(self, stage: Stage, weight_TK: Tensor | None) -> Summands:
        """Returns the rows and sums of a chunk that are home: sums are weighted already."""
        sums = self._node_routes.chunks[stage.chunk].sums
        if sums is None:
            return super().take_home(stage, weight_TK)
        if weight_TK is not None:
            weight_TK = torch.cat([weight_TK.reshape(-1), weight_TK.new_tensor([1.0, 0.0])])[sums.home_weight_TK]
        return Summands(self._home.pop(stage.chunk), sums.home_place_TK, weight_TK)

    def send_weights_to_gates(self, stage: Stage, weight_TK: Tensor) -> None:
        """Sends the routing weights of all chunks to where their sums are made."""
        ways = self._node_routes
        # Behind the last stands that of rows that are not there.
        self._weights_at_gate = weight_TK.new_zeros(sum(ways.visits_arrive_R) + 1)
        transfer = self._channel.all_to_all(
            self._weights_at_gate[:-1],
            weight_TK.reshape(-1)[ways.visit_row_N],
            ways.visits_arrive_R,
            ways.visits_send_R,
            lane="dispatch",
            detail="weights",
        )
        self._under_way[stage] = (transfer,)
