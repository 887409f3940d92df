"""Rows that cross to a node once, and sums that come home from it: messages by way of gates (``node_routes``).

Parts are columns: each part has a share of every row, so that all have the same counts, and change no bit.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    rows at gates, and ``send_sums`` sends one a token home, and what stayed in the node beside them. What is not the
    last part goes on beside the crossing, or collecting, of the next.
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
        # Of each chunk the newest part of what this rank is the gate for, until it is passed on.
        self._at_gate: dict[int, Tensor] = {}
        # The newest part of what was collected there, and of what is to go home with its sums.
        self._collected: dict[int, Tensor] = {}
        self._inside_home: dict[int, Tensor] = {}
        # Columns that come by themselves, and where they belong: by message, and those that are here.
        self._coming: dict[Stage, list[tuple[Tensor, Tensor]]] = {}
        self._here: list[tuple[Tensor, Tensor]] = []

    def wait(self, stages: Iterable[Stage]) -> None:
        """Waits for those of ``stages`` that are messages."""
        stages = tuple(stages)
        super().wait(stages)
        for stage in stages:
            self._here += self._coming.pop(stage, ())

    def put_in_place(self) -> None:
        """Puts what has come in parts where it belongs: beside what is on its way, where something is."""
        for place_NH, part_NH in self._here:
            place_NH.copy_(part_NH)
        self._here.clear()

    def dispatch(self, stage: Stage) -> None:
        """Sends a part of a chunk's rows: to their experts in this node, once to other nodes. What crossed of the part
        before it is passed on.
        """
        chunk, way = self._routes.chunks[stage.chunk], self._node_routes.chunks[stage.chunk]
        columns = self._columns(stage.part)
        across_UH = self._rows(self._source_TH[:, columns], way.across_token_U)
        at_gate_UH = self._new(sum(way.across_arrive_R), across_UH)
        self._send(stage, at_gate_UH, across_UH, way.across_arrive_R, way.across_send_R, " across")
        if stage.part:
            self._pass_on(stage, stage.part - 1)
        self._at_gate[stage.chunk] = at_gate_UH
        sent = self._routes.send_token_N[slice(*chunk.sent)][slice(*way.inside)]
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)][: sum(way.inside_arrive_R), columns]
        rows_NH = self._rows(self._source_TH[:, columns], sent)
        arriving_MH = self._arriving(stage, here_MH)
        self._send(stage, arriving_MH, rows_NH, way.inside_arrive_R, way.inside_send_R, " inside")
        self.put_in_place()

    def spread(self, stage: Stage) -> None:
        """Passes on the last part of what has crossed, a row a choice."""
        self._pass_on(stage, self._node_routes.parts - 1)
        self.put_in_place()

    def _pass_on(self, stage: Stage, part: int) -> None:
        chunk, way = self._routes.chunks[stage.chunk], self._node_routes.chunks[stage.chunk]
        rows_NH = self._rows(self._at_gate.pop(stage.chunk), way.spread_row_N)
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)][sum(way.inside_arrive_R) :]
        arriving_NH = self._arriving(stage, here_MH[:, self._columns(part)])
        self._send(stage, arriving_NH, rows_NH, way.spread_arrive_R, way.spread_send_R, " spread")

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows home; where sums come home, a part of those of other nodes' tokens to gates."""
        way = self._node_routes.chunks[stage.chunk]
        if way.sums is None:
            super().combine(stage, rows_PH)
            return
        # First those of this node's tokens, which go home beside the sums of others.
        num_inside, combine_M = sum(way.inside_arrive_R), self._routes.chunks[stage.chunk].combine_M
        part_PH = rows_PH[:, self._columns(stage.part)]
        rows_NH = self._rows(part_PH, combine_M[num_inside:])
        collected_NH = self._with_zeros(sum(way.spread_send_R), rows_NH)
        self._send(stage, collected_NH[:-1], rows_NH, way.spread_send_R, way.spread_arrive_R, " collect")
        self._collected[stage.chunk] = collected_NH
        self._inside_home[stage.chunk] = self._rows(part_PH, combine_M[:num_inside])
        self.put_in_place()

    def collected(self, chunk: int, *, weighted: bool) -> Summands:
        """Returns the part that was collected here of a chunk for other nodes: for each token what its sum is of."""
        sums = self._node_routes.chunks[chunk].sums
        assert sums is not None
        weight_UK = self._weights_at_gate[sums.gate_weight_UK] if weighted else None
        return Summands(self._collected.pop(chunk), sums.gate_place_UK, weight_UK)

    def send_sums(self, stage: Stage, sums_UH: Tensor) -> None:
        """Sends the sums of what was ``collected`` home, and beside them the rows of this node's own tokens."""
        way = self._node_routes.chunks[stage.chunk]
        part = self._node_routes.parts - 1 if stage.kind == "send_sums" else stage.part - 1
        num_inside = sum(way.inside_send_R)
        if not part:
            self._home[stage.chunk] = self._with_zeros(num_inside + len(way.across_token_U), self._source_TH)
        part_NH = self._home[stage.chunk][:-1, self._columns(part)]
        sums_home_UH = self._arriving(stage, part_NH[num_inside:])
        self._send(stage, sums_home_UH, sums_UH, way.across_send_R, way.across_arrive_R, " across")
        inside_home_NH, rows_NH = self._arriving(stage, part_NH[:num_inside]), self._inside_home.pop(stage.chunk)
        self._send(stage, inside_home_NH, rows_NH, way.inside_send_R, way.inside_arrive_R, " inside")
        self.put_in_place()

    def _columns(self, part: int) -> slice:
        H, parts = self._source_TH.shape[1], self._node_routes.parts
        return slice(H * part // parts, H * (part + 1) // parts)

    def _arriving(self, stage: Stage, place_NH: Tensor) -> Tensor:
        """Returns where to receive what belongs to ``place_NH``: there, or where it lies until it has come."""
        if place_NH.is_contiguous():
            return place_NH
        part_NH = self._new(len(place_NH), place_NH)
        self._coming.setdefault(stage, []).append((place_NH, part_NH))
        return part_NH

    def _with_zeros(self, num_rows: int, like_NH: Tensor) -> Tensor:
        """Returns so many rows, uninitialised, and one of zeros behind them."""
        rows_NH = self._new(num_rows + 1, like_NH)
        rows_NH[-1] = 0
        return rows_NH

    def take_home(self, stage: Stage, weight_TK: Tensor | None) -> Summands:
        """Returns the rows and sums of a chunk that are home: sums are weighted already."""
        self.put_in_place()
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
