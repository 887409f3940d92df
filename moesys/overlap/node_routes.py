"""Node routes: how a token crosses to a node once, however many of its experts are there, and spreads inside.

Every rank has a *gate* in each other node: the rank there that receives its rows (``row_traffic.gates``). A token is
sent once to the gate of each other node, which passes it on to its experts' ranks, one row for each choice; tokens of
the same node go to their experts directly (the two-stage dispatch of DeepSeek's DeepEP). Results may return the same
way: each gate sums those of a token, in the order of k, and sends one row.

A source sends *visits* to its gates, which thereby know which rows they pass on and sum: for each choice, in the
source's wire order, the token's number among those that the source sends to the node, times K, plus k.

R ranks, N nodes, g ranks of this node, C chunks, T tokens of a chunk, K top-k, U rows that a rank is the gate for, S
sources whose gate it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.load import IntArray
from moesys.overlap.chunked import ChunkedExecutor, ChunkedRun, Counts, RowMessages, Summands
from moesys.overlap.comm.channel import Channel
from moesys.overlap.executor import HostPlan
from moesys.overlap.routes import Routes, build_routes, exclusive, ranges, rows_by_chunk, totals
from moesys.row_traffic import gates, num_parts
from moesys.schedule import Direction, Schedule, Stage, schedule_of


@dataclass(frozen=True)
class NodeSums:
    """Tables by which one chunk's results are summed in order. A token with fewer than K results is filled up with the
    places of a row of zeros and of a weight of zero.

    gate_place_UK: for each row that this rank is the gate for, the collected rows that are summed. A row of zeros
        follows the last collected row.
    gate_weight_UK: the places of these rows' routing weights among those that arrived, which a zero follows.
    own_place_TK: for each of this rank's tokens, the rows that are summed. Rows that return inside this node come
        first, then the sums of other nodes, then a row of zeros.
    own_weight_TK: the places of these rows' weights: the chunk's routing weights, then 1, for sums that are weighted
        already, then 0.
    """

    gate_place_UK: Tensor
    gate_weight_UK: Tensor
    own_place_TK: Tensor
    own_weight_TK: Tensor


@dataclass(frozen=True)
class NodeChunk:
    """The routes of one chunk. Counts are rows by rank, [R].

    inside: the rows [first, last) of the chunk's wire order that stay in this node.
    across_token_U: the tokens that cross to other nodes, node by node.
    spread_row_N: for each row that this gate passes on, the row that it received.
    inside_send_R, across_send_R, spread_send_R: rows that this rank sends inside its node, to gates, and as a gate.
    inside_arrive_R, across_arrive_R, spread_arrive_R: rows that it receives in these three ways.
    sums: None where every row returns.
    """

    inside: tuple[int, int]
    inside_send_R: Counts
    inside_arrive_R: Counts
    across_token_U: Tensor
    across_send_R: Counts
    across_arrive_R: Counts
    spread_row_N: Tensor
    spread_send_R: Counts
    spread_arrive_R: Counts
    sums: NodeSums | None


@dataclass(frozen=True)
class NodeRoutes:
    """The ways of all chunks, whose rows cross in ``parts``. visit_row_N: the index token·K + k of each visit that this
    rank sends; visits_send_R, visits_arrive_R: how many visits go to gates, and how many have come to this one.
    """

    chunks: tuple[NodeChunk, ...]
    parts: int
    visit_row_N: Tensor
    visits_send_R: Counts
    visits_arrive_R: Counts


def gates_of(rank: int, node_of_rank: Sequence[int]) -> IntArray:
    """Returns for each source the rank of ``rank``'s node through which its rows come there, [R]: -1 where none is, as
    they share the node.
    """
    node_R, own = np.asarray(node_of_rank), node_of_rank[rank]
    return np.where(node_R == own, -1, gates(node_of_rank)[:, own])


def build_node_routes(
    routes: Routes, rows_CRR: IntArray, top_k: int, row_bytes: int, channel: Channel, *, sums: bool
) -> NodeRoutes:
    """Builds the node routes of a rank, whose ``routes`` were built with its ``gates_of``; a collective.

    ``rows_CRR``: rows of each chunk from each rank to each. ``sums``: whether one row per (token, node) returns.
    """
    mine = _Visits(routes, top_k, channel)
    sent = torch.from_numpy(np.concatenate(mine.numbers).astype(np.int32)).to(routes.send_row_N.device)
    gate = _Gate(rows_CRR, channel)
    visits_N = sent.new_empty(sum(gate.visits_arrive_R))
    channel.all_to_all(visits_N, sent, gate.visits_arrive_R, mine.send_R, lane="counts", detail="visits").wait()
    number_N = visits_N.cpu().numpy().astype(np.int64)
    chunks = tuple(_chunk(mine, gate, number_N, chunk, sums) for chunk in range(len(rows_CRR)))
    visit_row_N = torch.from_numpy(np.concatenate(mine.rows)).to(sent.device)
    parts = num_parts(rows_CRR.sum(axis=0), channel.node_of_rank, row_bytes, len(rows_CRR))
    return NodeRoutes(chunks, parts, visit_row_N, mine.send_R, gate.visits_arrive_R)


class _Visits:
    """The visits that this rank sends to other nodes. ``numbers``, ``rows``: their numbers and indices token·K + k,
    node by node, and chunk by chunk for each node.
    """

    def __init__(self, routes: Routes, top_k: int, channel: Channel) -> None:
        self.routes, self.top_k, self.rank, self.device = routes, top_k, channel.rank, routes.send_row_N.device
        node_R = np.asarray(channel.node_of_rank)
        self.own, self.num_ranks = int(node_R[channel.rank]), len(node_R)
        self.gate_N = gates(channel.node_of_rank)[channel.rank]
        self.num_nodes = len(self.gate_N)
        row_N = routes.send_row_N.cpu().numpy()
        # For each chunk: its rows in wire order, their nodes, and the tokens that go to each node.
        self.row_of, self.node_of, self.seen = [], [], []
        for chunk in routes.chunks:
            row = row_N[slice(*chunk.sent)]
            node = np.repeat(node_R, chunk.send_counts_R)
            seen_NT = np.zeros((self.num_nodes, chunk.tokens[1] - chunk.tokens[0]), dtype=bool)
            seen_NT[node, row // top_k - chunk.tokens[0]] = True
            seen_NT[self.own] = False
            self.row_of.append(row)
            self.node_of.append(node)
            self.seen.append(seen_NT)
        self.numbers: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        self.rows: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        send_R = np.zeros(self.num_ranks, dtype=np.int64)
        for other in range(self.num_nodes):
            if other == self.own:
                continue
            for chunk, row, of_row, seen_NT in zip(routes.chunks, self.row_of, self.node_of, self.seen, strict=True):
                row = row[of_row == other]
                nth_T = np.cumsum(seen_NT[other]) - 1
                self.numbers.append(nth_T[row // top_k - chunk.tokens[0]] * top_k + row % top_k)
                self.rows.append(row)
                send_R[self.gate_N[other]] += len(row)
        self.send_R: Counts = tuple(send_R.tolist())

    def across(self, chunk: int) -> tuple[IntArray, Counts]:
        """Returns the tokens of a chunk that cross, node by node, and how many go to each gate."""
        node_U, token_U = np.nonzero(self.seen[chunk])
        sent_N = np.bincount(node_U, minlength=self.num_nodes)
        return token_U + self.routes.chunks[chunk].tokens[0], totals(self.gate_N, sent_N, self.num_ranks)


class _Gate:
    """The rows that this rank passes on, from the ``sources`` [S] to the ranks of its node, ``here`` [g]."""

    def __init__(self, rows_CRR: IntArray, channel: Channel) -> None:
        self.rows_CRR, self.rank = rows_CRR, channel.rank
        node_R = np.asarray(channel.node_of_rank)
        self.num_ranks = len(node_R)
        self.here = np.flatnonzero(node_R == node_R[self.rank])
        self.gate_R = gates_of(self.rank, node_R.tolist())
        self.sources = np.flatnonzero(self.gate_R == self.rank)
        # Rows are [C, S, g]; visits of each source and chunk are in the order in which they arrive, source by source.
        self.rows_CSG = rows_CRR[:, self.sources][:, :, self.here]
        visits_SC = self.rows_CSG.sum(axis=2).T
        self.visits_arrive_R = totals(self.sources, visits_SC.sum(axis=1), self.num_ranks)
        self.visits_SC, self.first_SC = visits_SC, exclusive(visits_SC.reshape(-1)).reshape(visits_SC.shape)


def _chunk(mine: _Visits, gate: _Gate, number_N: IntArray, chunk: int, sums: bool) -> NodeChunk:
    def to_device(index: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(mine.device)

    R, here, me = gate.num_ranks, gate.here, gate.rank - int(gate.here[0])
    rows_RR, rows_SG, K = gate.rows_CRR[chunk], gate.rows_CSG[chunk], mine.top_k
    across_token_U, across_send_R = mine.across(chunk)
    inside = np.flatnonzero(mine.node_of[chunk] == mine.own)
    first = int(inside[0]) if len(inside) else 0

    # The visits of this chunk, by (source, rank, wire order).
    place_V = ranges(gate.first_SC[:, chunk], gate.visits_SC[:, chunk])
    source_V, number_V = np.repeat(np.arange(len(gate.sources)), gate.visits_SC[:, chunk]), number_N[place_V]
    arrived_S = np.zeros(len(gate.sources), dtype=np.int64)
    np.maximum.at(arrived_S, source_V, number_V // K + 1)
    row_V = exclusive(arrived_S)[source_V] + number_V // K
    by_rank_V = ranges(exclusive(rows_SG.reshape(-1)).reshape(rows_SG.shape).T.reshape(-1), rows_SG.T.reshape(-1))

    # Rows from each rank of the node to each, and rows of other nodes that each rank passes on to each.
    own_GG = rows_RR[np.ix_(here, here)]
    passed_GG = np.array([rows_RR[gate.gate_R == via][:, here].sum(axis=0) for via in here])

    node_sums = None
    if sums:
        # Collected rows lie rank by rank, as they were passed on.
        collected_V = np.empty(len(by_rank_V), dtype=np.int64)
        collected_V[by_rank_V] = np.arange(len(by_rank_V))
        gate_place, gate_weight = _table(
            row_V, number_V % K, (collected_V, place_V), (int(arrived_S.sum()), K), (len(collected_V), len(number_N))
        )
        # The results for each token of this rank: those of its own node in the order of k, then the sums, node by node.
        first_token, num_tokens = mine.routes.chunks[chunk].tokens[0], mine.seen[chunk].shape[1]
        row_N = mine.row_of[chunk][inside] - first_token * K
        num_across = len(across_token_U)
        place_N = np.arange(len(row_N) + num_across)
        own_place, own_weight = _table(
            np.concatenate([row_N // K, across_token_U - first_token]),
            np.concatenate([row_N % K, np.full(num_across, K)]),
            (place_N, np.concatenate([row_N, np.full(num_across, num_tokens * K)])),
            (num_tokens, K),
            (len(place_N), num_tokens * K + 1),
        )
        node_sums = NodeSums(*map(to_device, (gate_place, gate_weight, own_place, own_weight)))

    return NodeChunk(
        inside=(first, first + len(inside)),
        inside_send_R=totals(here, own_GG[me], R),
        inside_arrive_R=totals(here, own_GG[:, me], R),
        across_token_U=to_device(across_token_U),
        across_send_R=across_send_R,
        across_arrive_R=totals(gate.sources, arrived_S, R),
        spread_row_N=to_device(row_V[by_rank_V]),
        spread_send_R=totals(here, passed_GG[me], R),
        spread_arrive_R=totals(here, passed_GG[:, me], R),
        sums=node_sums,
    )


def _table(
    row_V: IntArray, order_V: IntArray, values: Sequence[IntArray], shape: tuple[int, int], fill: Sequence[int]
) -> list[IntArray]:
    """Returns a table of ``shape`` for each of ``values``: each row has its values in order, and then ``fill``."""
    in_order = np.lexsort((order_V, row_V))
    row_V = row_V[in_order]
    column_V = np.arange(len(row_V)) - np.searchsorted(row_V, row_V)
    tables = [np.full(shape, value) for value in fill]
    for table, value_V in zip(tables, values, strict=True):
        table[row_V, column_V] = value_V[in_order]
    return tables


class NodeMessages(RowMessages):
    """The messages of rows that cross to a node once. ``dispatch`` sends rows to gates, and ``spread`` passes them on
    inside the node. Where sums return, ``combine`` collects rows at gates, and ``send_sums`` returns one sum per token,
    and beside it the rows that stayed in the node. While a part of the columns crosses, the part before it is passed
    on; the last part is passed on by itself.
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
        self._node_routes = node_routes
        # For each chunk, the newest part of the rows that this rank is the gate for, until it is passed on.
        self._at_gate: dict[int, Tensor] = {}
        # The newest part of the rows that were collected there, and of those that return with its sums.
        self._collected: dict[int, Tensor] = {}
        self._inside_returned: dict[int, Tensor] = {}
        # Parts of columns that are being received, with their places, by stage; and those that have arrived.
        self._coming: dict[Stage, list[tuple[Tensor, Tensor]]] = {}
        self._here: list[tuple[Tensor, Tensor]] = []

    def wait(self, stages: Iterable[Stage]) -> None:
        """Waits for those of ``stages`` that are messages."""
        stages = tuple(stages)
        super().wait(stages)
        for stage in stages:
            self._here += self._coming.pop(stage, ())

    def put_in_place(self) -> None:
        """Copies parts that have arrived to their places, while other messages are under way."""
        for place_NH, part_NH in self._here:
            place_NH.copy_(part_NH)
        self._here.clear()

    def dispatch(self, stage: Stage) -> None:
        """Sends a part of a chunk's rows: to their experts in this node, and once to each other node. Rows of the part
        before it that have crossed are passed on.
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
        """Passes on the last part of the rows that have crossed, one row for each choice."""
        self._pass_on(stage, self._node_routes.parts - 1)
        self.put_in_place()

    def _pass_on(self, stage: Stage, part: int) -> None:
        chunk, way = self._routes.chunks[stage.chunk], self._node_routes.chunks[stage.chunk]
        rows_NH = self._rows(self._at_gate.pop(stage.chunk), way.spread_row_N)
        here_MH = self.arrivals.rows[slice(*chunk.arrivals)][sum(way.inside_arrive_R) :]
        arriving_NH = self._arriving(stage, here_MH[:, self._columns(part)])
        self._send(stage, arriving_NH, rows_NH, way.spread_arrive_R, way.spread_send_R, " spread")

    def combine(self, stage: Stage, rows_PH: Tensor) -> None:
        """Sends a chunk's expert rows back; where sums return, a part of those of other nodes' tokens goes to gates."""
        way = self._node_routes.chunks[stage.chunk]
        if way.sums is None:
            super().combine(stage, rows_PH)
            return
        # The rows of this node's tokens come first; they return beside the sums of others.
        num_inside, combine_M = sum(way.inside_arrive_R), self._routes.chunks[stage.chunk].combine_M
        part_PH = rows_PH[:, self._columns(stage.part)]
        rows_NH = self._rows(part_PH, combine_M[num_inside:])
        collected_NH = self._with_zeros(sum(way.spread_send_R), rows_NH)
        self._send(stage, collected_NH[:-1], rows_NH, way.spread_send_R, way.spread_arrive_R, " collect")
        self._collected[stage.chunk] = collected_NH
        self._inside_returned[stage.chunk] = self._rows(part_PH, combine_M[:num_inside])
        self.put_in_place()

    def collected(self, chunk: int, *, weighted: bool) -> Summands:
        """Returns the part of a chunk's results that was collected here: each token's sum is of some of these rows."""
        sums = self._node_routes.chunks[chunk].sums
        assert sums is not None
        weight_UK = self._weights_at_gate[sums.gate_weight_UK] if weighted else None
        return Summands(self._collected.pop(chunk), sums.gate_place_UK, weight_UK)

    def send_sums(self, stage: Stage, sums_UH: Tensor) -> None:
        """Sends back the sums of ``collected`` rows, and beside them the rows of this node's own tokens."""
        way = self._node_routes.chunks[stage.chunk]
        part = self._node_routes.parts - 1 if stage.kind == "send_sums" else stage.part - 1
        num_inside = sum(way.inside_send_R)
        if not part:
            self._returned[stage.chunk] = self._with_zeros(num_inside + len(way.across_token_U), self._source_TH)
        part_NH = self._returned[stage.chunk][:-1, self._columns(part)]
        arriving_UH = self._arriving(stage, part_NH[num_inside:])
        self._send(stage, arriving_UH, sums_UH, way.across_send_R, way.across_arrive_R, " across")
        inside_NH, rows_NH = self._arriving(stage, part_NH[:num_inside]), self._inside_returned.pop(stage.chunk)
        self._send(stage, inside_NH, rows_NH, way.inside_send_R, way.inside_arrive_R, " inside")
        self.put_in_place()

    def _columns(self, part: int) -> slice:
        H, parts = self._source_TH.shape[1], self._node_routes.parts
        return slice(H * part // parts, H * (part + 1) // parts)

    def _arriving(self, stage: Stage, place_NH: Tensor) -> Tensor:
        """Returns where to receive the rows of ``place_NH``: there or, if it is not contiguous, in other memory
        first.
        """
        if place_NH.is_contiguous():
            return place_NH
        part_NH = self._new(len(place_NH), place_NH)
        self._coming.setdefault(stage, []).append((place_NH, part_NH))
        return part_NH

    def _with_zeros(self, num_rows: int, like_NH: Tensor) -> Tensor:
        """Returns uninitialised rows, which one row of zeros follows."""
        rows_NH = self._new(num_rows + 1, like_NH)
        rows_NH[-1] = 0
        return rows_NH

    def take_returned(self, stage: Stage, weight_TK: Tensor | None) -> Summands:
        """Returns the rows and sums of a chunk that have returned: sums are weighted already."""
        self.put_in_place()
        sums = self._node_routes.chunks[stage.chunk].sums
        if sums is None:
            return super().take_returned(stage, weight_TK)
        if weight_TK is not None:
            weight_TK = torch.cat([weight_TK.reshape(-1), weight_TK.new_tensor([1.0, 0.0])])[sums.own_weight_TK]
        return Summands(self._returned.pop(stage.chunk), sums.own_place_TK, weight_TK)

    def send_weights_to_gates(self, stage: Stage, weight_TK: Tensor) -> None:
        """Sends the routing weights of all chunks to where their sums are made."""
        ways = self._node_routes
        # A zero follows the last weight: that of missing rows.
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


@dataclass(frozen=True)
class NodeRun(ChunkedRun):
    """A run whose tokens cross to a node once, by ``node_routes``."""

    node_routes: NodeRoutes = field(kw_only=True)

    def _schedule(self, direction: Direction) -> Schedule:
        return schedule_of(self.overlap, direction, self.channel.num_nodes, self.node_routes.parts)

    def _messages(self, routes: Routes, source_TH: Tensor, direction: Direction) -> NodeMessages:
        return NodeMessages(routes, self.node_routes, self.channel, self.memory, source_TH, direction)

    def _combine(
        self, messages: NodeMessages, stage: Stage, rows_PH: Tensor, scratch: Scratch, *, weighted: bool
    ) -> None:
        if stage.part:
            self._send_sums(messages, stage, scratch, weighted=weighted)
        messages.combine(stage, rows_PH)

    def _cross_nodes(self, messages: NodeMessages, stage: Stage, scratch: Scratch, weight_TK: Tensor | None) -> None:
        match stage.kind:
            case "dispatch_weights":
                assert weight_TK is not None
                messages.send_weights_to_gates(stage, weight_TK)
            case "spread":
                messages.spread(stage)
            case "send_sums":
                self._send_sums(messages, stage, scratch, weighted=weight_TK is not None)
            case _:
                super()._cross_nodes(messages, stage, scratch, weight_TK)

    def _send_sums(self, messages: NodeMessages, stage: Stage, scratch: Scratch, *, weighted: bool) -> None:
        """Adds up the rows that were collected here for other nodes, and sends the sums back."""
        collected = messages.collected(stage.chunk, weighted=weighted)
        like_NH = collected.rows_NH
        sums_UH = self.memory.empty((len(collected.place_TK), like_NH.shape[1]), like_NH.dtype, like_NH.device)
        self.compute.combine(*collected, sums_UH, scratch)
        messages.send_sums(stage, sums_UH)


class NodeExecutor(ChunkedExecutor):
    """Runs plans of hosts whose tokens cross to a node once."""

    def run(self, expert_TK: Tensor, planned: HostPlan) -> NodeRun:
        layer, tokens = self.layer, planned.plan.tokens
        overlap, channel = layer.strategy.overlap, layer.channel.tagged(layer.channel.generation)
        sums = overlap.sums_by_node(channel.num_nodes)
        tokens_CRE = np.ascontiguousarray(planned.tokens_RCE.swapaxes(0, 1))
        gate_R, min_rows = gates_of(channel.rank, channel.node_of_rank), self.compute.min_rows
        routes = build_routes(expert_TK, tokens_CRE, tokens, channel.rank, min_rows, gate_R, collect=sums)
        rows_CRR, row_bytes = rows_by_chunk(tokens_CRE, tokens), layer.shape.row_bytes
        ways = build_node_routes(routes, rows_CRR, expert_TK.shape[1], row_bytes, channel, sums=sums)
        block_sums = layer.sums_of(planned.plan, expert_TK.device)
        return NodeRun(overlap, lambda: routes, channel, self.compute, layer.memory, block_sums, node_routes=ways)
