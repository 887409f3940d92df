"""Which rows travel in which stage of a schedule, from counts: what executors send, and the simulator times.

Counts do not say which experts a token chose together, so how many tokens cross to a node is expected, not known: the
choices of a token are drawn independently, each with its source's share of rows for the node. Of uniform routing over E
experts that is 1 - (1 - 1/N)^K of N nodes, where without putting back it is 1 - C(E - E/N, K) / C(E, K).

R ranks, N nodes, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec, ModelShape, Overlap
from moesys.cost import FloatArray, LinkLoad, link_load
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.schedule import StageKind


@dataclass(frozen=True, eq=False)
class RowTraffic:
    """rows_RR: from each rank to each in each stage that sends rows, float64, with those that a rank keeps.
    summed_R: rows that each rank reads for the sums of its tokens at home; gate_summed_R: for those of other nodes.
    """

    rows_RR: dict[StageKind, FloatArray]
    summed_R: FloatArray
    gate_summed_R: FloatArray

    def bytes_RR(self, kind: StageKind, model: ModelShape) -> FloatArray:
        """Returns the bytes of a stage; what a rank keeps is free."""
        bytes_RR = self.rows_RR[kind] * float(model.bytes_per_element * model.hidden_size)
        np.fill_diagonal(bytes_RR, 0.0)
        return bytes_RR

    def loads(self, model: ModelShape, cluster: ClusterSpec) -> dict[StageKind, LinkLoad]:
        """Returns what each stage asks of the links."""
        return {kind: link_load(self.bytes_RR(kind, model), cluster) for kind in self.rows_RR}


def row_traffic(plan: TokenPlan, model: ModelShape, cluster: ClusterSpec, overlap: Overlap) -> RowTraffic:
    """Returns the rows of one direction; backward sends as many."""
    R = plan.load.num_ranks
    source, _, destination, tokens = plan.entries.T
    rows_RR = np.bincount(source * R + destination, weights=tokens, minlength=R * R).astype(np.float64).reshape(R, R)
    chosen_R, none_R = rows_RR.sum(axis=1), np.zeros(R)
    direct: dict[StageKind, FloatArray] = {"dispatch": rows_RR, "combine": rows_RR.T.copy()}
    if not overlap.crosses_once(cluster.num_nodes):
        return RowTraffic(direct, chosen_R, none_R)
    node_R = np.asarray(cluster.node_of_rank)
    inside_RR = np.where(node_R[:, None] == node_R, rows_RR, 0.0)
    gate_RN, crossing_RN = gates(cluster.node_of_rank), expected_crossing(rows_RR, cluster, model.top_k)
    across_RR, spread_RR = np.zeros((R, R)), np.zeros((R, R))
    np.add.at(across_RR, (np.arange(R)[:, None], gate_RN), crossing_RN)
    np.add.at(spread_RR, (gate_RN[:, node_R], np.arange(R)), rows_RR - inside_RR)
    once: dict[StageKind, FloatArray] = {"dispatch": inside_RR + across_RR, "spread": spread_RR}
    if not overlap.sums_by_node(cluster.num_nodes):
        return RowTraffic(once | {"combine": direct["combine"]}, chosen_R, none_R)
    home: dict[StageKind, FloatArray] = {"combine": spread_RR.T, "send_sums": (inside_RR + across_RR).T}
    return RowTraffic(once | home, (inside_RR + across_RR).sum(axis=1), spread_RR.sum(axis=1))


def gates(node_of_rank: Sequence[int]) -> IntArray:
    """Returns the *gate* of each rank in each node, int64 [R, N], through which its rows come there: the rank with its
    own place, modulo the node's size; so in its own node itself.
    """
    first_N, sizes_N = np.unique(node_of_rank, return_index=True, return_counts=True)[1:]
    place_R = np.arange(len(node_of_rank)) - first_N[np.asarray(node_of_rank)]
    return first_N + place_R[:, None] % sizes_N


def expected_crossing(rows_RR: FloatArray, cluster: ClusterSpec, top_k: int) -> FloatArray:
    """Returns how many tokens of each rank go to each other node, [R, N], as choices of a token were independent."""
    node_R = np.asarray(cluster.node_of_rank)
    rows_RN = np.zeros((len(rows_RR), cluster.num_nodes))
    np.add.at(rows_RN.T, node_R, rows_RR.T)
    chosen_R = rows_RR.sum(axis=1, keepdims=True)
    share_RN = rows_RN / np.maximum(chosen_R, 1)
    crossing_RN = chosen_R / top_k * (1 - (1 - share_RN) ** top_k)
    crossing_RN[np.arange(len(node_R)), node_R] = 0.0
    return crossing_RN
