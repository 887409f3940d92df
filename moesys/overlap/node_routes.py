"""Node routes: how a token crosses to a node once, however many of its experts are there, and spreads inside.

Every rank has a *gate* in each other node (``row_traffic.gates``). One row a token and node
goes to the gate, which passes on a row a choice to the ranks of its node; rows of the own node go to their experts at
once (DeepSeek's DeepEP, two-stage dispatch). Results may come home the same way: each gate sums those of a token, in
the order of k, and sends one row.

A gate learns what it passes on, and sums, from *visits*: for each choice that comes through it, in the source's wire
order, the token's number among those that its source sends to the node, times K, plus k.

R ranks, N nodes, g ranks of this node, C chunks, T tokens of a chunk, K top-k, U rows that a rank is the gate for, S
sources whose gate it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moesys.load import IntArray
from moesys.overlap.comm.channel import Channel
from moesys.overlap.routes import Routes, exclusive, ranges, totals
from moesys.row_traffic import gates, num_parts

Counts = tuple[int, ...]


@dataclass(frozen=True)
class NodeSums:
    """How one chunk's results are summed in order, rows of zeros and weights of 0 where a token has fewer than K.

    gate_place_UK, gate_weight_UK: of the rows that this rank is the gate for, which of the collected each is the sum
        of, and which arrived weights belong to these. Behind the last of both stands a zero.
    home_place_TK, home_weight_TK: of this rank's tokens, which of the rows of its node, behind which stand the sums of
        others and a row of zeros; which of the chunk's routing weights, behind which stand 1, of sums that are weighted
        already, and 0.
    """

    gate_place_UK: Tensor
    gate_weight_UK: Tensor
    home_place_TK: Tensor
    home_weight_TK: Tensor


@dataclass(frozen=True)
class NodeChunk:
    """One chunk's way. Counts are [R], of rows.

    inside: rows of the chunk's wire order, [first, last), that stay in this node; inside_send_R, inside_arrive_R.
    across_token_U: the tokens that cross, node by node; across_send_R to gates, across_arrive_R at this one.
    spread_row_N: which of the rows that arrived here each row passed on is; spread_send_R, spread_arrive_R.
    sums: None where every row goes home.
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
    """All chunks', whose rows cross in ``parts``. visit_row_N: of each visit that this rank tells, its index
    token·K + k; visits_send_R, visits_arrive_R: how many go to gates, and how many have come to this one.
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

    ``rows_CRR``: rows of each chunk from each rank to each. ``sums``: whether one row a (token, node) comes home.
    """
    mine = _Visits(routes, top_k, channel)
    sent = torch.from_numpy(np.concatenate(mine.numbers).astype(np.int32)).to(routes.send_row_N.device)
    gate = _Gate(rows_CRR, channel)
    told = sent.new_empty(sum(gate.visits_arrive_R))
    channel.all_to_all(told, sent, gate.visits_arrive_R, mine.send_R, lane="counts", detail="visits").wait()
    number_N = told.cpu().numpy().astype(np.int64)
    chunks = tuple(_chunk(mine, gate, number_N, chunk, sums) for chunk in range(len(rows_CRR)))
    visit_row_N = torch.from_numpy(np.concatenate(mine.rows)).to(sent.device)
    parts = num_parts(rows_CRR.sum(axis=0), channel.node_of_rank, row_bytes, len(rows_CRR))
    return NodeRoutes(chunks, parts, visit_row_N, mine.send_R, gate.visits_arrive_R)


class _Visits:
    """What this rank sends to other nodes. ``numbers``, ``rows``: of its visits, node by node and in each chunk by
    chunk, their numbers and indices token·K + k.
    """

    def __init__(self, routes: Routes, top_k: int, channel: Channel) -> None:
        self.routes, self.top_k, self.rank, self.device = routes, top_k, channel.rank, routes.send_row_N.device
        node_R = np.asarray(channel.node_of_rank)
        self.own, self.num_ranks = int(node_R[channel.rank]), len(node_R)
        self.gate_N = gates(channel.node_of_rank)[channel.rank]
        self.num_nodes = len(self.gate_N)
        row_N = routes.send_row_N.cpu().numpy()
        # Of each chunk: rows in wire order, their nodes, and which tokens go to which node.
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
    """What comes through this rank: of the ``sources`` [S], to the ranks of its node, ``here`` [g]."""

    def __init__(self, rows_CRR: IntArray, channel: Channel) -> None:
        self.rows_CRR, self.rank = rows_CRR, channel.rank
        node_R = np.asarray(channel.node_of_rank)
        self.num_ranks = len(node_R)
        self.here = np.flatnonzero(node_R == node_R[self.rank])
        self.gate_R = gates_of(self.rank, node_R.tolist())
        self.sources = np.flatnonzero(self.gate_R == self.rank)
        # [C, S, g], and the visits of each source and chunk, as they have come: source by source.
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

    # Rows from each rank of the node to each, and those that pass each on their way to each.
    own_GG = rows_RR[np.ix_(here, here)]
    passed_GG = np.array([rows_RR[gate.gate_R == via][:, here].sum(axis=0) for via in here])

    node_sums = None
    if sums:
        # What is collected lies rank by rank, as it was passed on.
        collected_V = np.empty(len(by_rank_V), dtype=np.int64)
        collected_V[by_rank_V] = np.arange(len(by_rank_V))
        gate_place, gate_weight = _table(
            row_V, number_V % K, (collected_V, place_V), (int(arrived_S.sum()), K), (len(collected_V), len(number_N))
        )
        # Of a token at home: its own node's results in the order of k, then the sums, node by node.
        first_token, num_tokens = mine.routes.chunks[chunk].tokens[0], mine.seen[chunk].shape[1]
        row_N = mine.row_of[chunk][inside] - first_token * K
        num_across = len(across_token_U)
        place_N = np.arange(len(row_N) + num_across)
        home_place, home_weight = _table(
            np.concatenate([row_N // K, across_token_U - first_token]),
            np.concatenate([row_N % K, np.full(num_across, K)]),
            (place_N, np.concatenate([row_N, np.full(num_across, num_tokens * K)])),
            (num_tokens, K),
            (len(place_N), num_tokens * K + 1),
        )
        node_sums = NodeSums(*map(to_device, (gate_place, gate_weight, home_place, home_weight)))

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
    """Returns a table of ``shape`` of each of ``values``: in a row what belongs to it, in order, then ``fill``."""
    in_order = np.lexsort((order_V, row_V))
    row_V = row_V[in_order]
    column_V = np.arange(len(row_V)) - np.searchsorted(row_V, row_V)
    tables = [np.full(shape, value) for value in fill]
    for table, value_V in zip(tables, values, strict=True):
        table[row_V, column_V] = value_V[in_order]
    return tables
