"""Which rows travel in which stage of a schedule, from counts: what executors send, and the simulator times.

Tokens that cross to a node once are spread there part by part, each part a share of the columns of every row: as many
parts as leave messages large.

Counts do not say which experts a token chose together, so how many tokens cross to a node is expected, not known: the
choices of a token are drawn independently, each with its source's share of rows for the node. Of uniform routing over E
experts that is 1 - (1 - 1/N)^K of N nodes, where without putting back it is 1 - C(E - E/N, K) / C(E, K).

R ranks, N nodes, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec, ModelShape, Overlap
from moesys.cost import FloatArray, LinkLoad, link_load
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.schedule import StageKind

# Rows of one chunk cross in so many parts, where each is still of so many bytes a rank.
MOST_PARTS, LEAST_PART_BYTES = 4, 4e6
# The stage in which a part is sent on while the next part crosses.
_GOES_ON: dict[StageKind, StageKind] = {"dispatch": "spread", "combine": "send_sums"}


@dataclass(frozen=True, eq=False)
class RowTraffic:
    """The rows of one direction.

    rows_RR: for each stage that sends rows, all parts together, the rows from each rank to each, float64; the diagonal
        has those that a rank keeps.
    summed_R: rows that each rank reads for the sums of its own tokens.
    gate_summed_R: rows that each rank reads as a gate, for the sums of other nodes' tokens.
    inside_RR: rows of dispatch that stay in their node; others cross in ``parts``.
    """

    rows_RR: dict[StageKind, FloatArray]
    summed_R: FloatArray
    gate_summed_R: FloatArray
    inside_RR: FloatArray
    parts: int = 1

    def bytes_RR(self, kind: StageKind, model: ModelShape) -> FloatArray:
        """Returns the bytes of all stages of ``kind``; what a rank keeps is free."""
        return _bytes_RR(self.rows_RR[kind], model)

    def in_stage(self, kind: StageKind, part: int) -> FloatArray:
        """Returns the rows from rank to rank in a stage of one chunk, [R, R], of which a part is a fraction: those of
        the part, and those of the part before it that are sent on meanwhile.
        """
        rows_RR = self.rows_RR[kind]
        if part:
            rows_RR = rows_RR + self.rows_RR[_GOES_ON[kind]]
        return rows_RR / self.parts_of(kind)

    def put_in_place_R(self, kind: StageKind, part: int) -> FloatArray:
        """Returns how many rows of one chunk each rank copies to their places, [R], because they arrived in parts."""
        came_R = np.zeros_like(self.summed_R)
        if self.parts == 1:
            return came_R
        if kind == "dispatch":
            came_R = came_R + self.inside_RR.sum(axis=0)
        goes_on = _GOES_ON[kind] if part else kind
        if goes_on in _GOES_ON.values():
            came_R = came_R + self.rows_RR[goes_on].sum(axis=0)
        return came_R / self.parts

    def parts_of(self, kind: StageKind) -> int:
        """Returns the parts in which stages of ``kind`` send rows; results have parts only if gates sum them."""
        return self.parts if kind in ("dispatch", "spread") or "send_sums" in self.rows_RR else 1

    def loads(self, model: ModelShape, cluster: ClusterSpec) -> dict[StageKind, LinkLoad]:
        """Returns the load of the links by all stages of each kind."""
        return {kind: link_load(self.bytes_RR(kind, model), cluster) for kind in self.rows_RR}

    def stage_loads(self, model: ModelShape, cluster: ClusterSpec) -> dict[tuple[StageKind, int], LinkLoad]:
        """Returns the load of the links by each stage and part, if there is one chunk."""
        return {
            (kind, part): link_load(_bytes_RR(self.in_stage(kind, part), model), cluster)
            for kind in self.rows_RR
            for part in range(self.parts_of(kind) if kind in _GOES_ON else 1)
        }


def _bytes_RR(rows_RR: FloatArray, model: ModelShape) -> FloatArray:
    bytes_RR = rows_RR * float(model.row_bytes)
    np.fill_diagonal(bytes_RR, 0.0)
    return bytes_RR


def row_traffic(plan: TokenPlan, model: ModelShape, cluster: ClusterSpec, overlap: Overlap) -> RowTraffic:
    """Returns the rows of one direction; backward sends as many."""
    R = plan.load.num_ranks
    source, _, destination, tokens = plan.entries.T
    rows_RR = np.bincount(source * R + destination, weights=tokens, minlength=R * R).astype(np.float64).reshape(R, R)
    chosen_R, none_R = rows_RR.sum(axis=1), np.zeros(R)
    direct: dict[StageKind, FloatArray] = {"dispatch": rows_RR, "combine": rows_RR.T.copy()}
    if not overlap.crosses_once(cluster.num_nodes):
        return RowTraffic(direct, chosen_R, none_R, rows_RR)
    node_R = np.asarray(cluster.node_of_rank)
    inside_RR = np.where(node_R[:, None] == node_R, rows_RR, 0.0)
    groups_N = groups_of_nodes(plan, model, cluster)
    gate_RN, crossing_RN = gates(cluster.node_of_rank), expected_crossing(rows_RR, cluster, model, groups_N)
    across_RR, spread_RR = np.zeros((R, R)), np.zeros((R, R))
    np.add.at(across_RR, (np.arange(R)[:, None], gate_RN), crossing_RN)
    np.add.at(spread_RR, (gate_RN[:, node_R], np.arange(R)), rows_RR - inside_RR)
    once: dict[StageKind, FloatArray] = {"dispatch": inside_RR + across_RR, "spread": spread_RR}
    parts = num_parts(rows_RR, cluster.node_of_rank, model.row_bytes, overlap.chunks)
    if not overlap.sums_by_node(cluster.num_nodes):
        return RowTraffic(once | {"combine": direct["combine"]}, chosen_R, none_R, inside_RR, parts)
    home: dict[StageKind, FloatArray] = {"combine": spread_RR.T, "send_sums": (inside_RR + across_RR).T}
    summed_R, gate_summed_R = (inside_RR + across_RR).sum(axis=1), spread_RR.sum(axis=1)
    return RowTraffic(once | home, summed_R, gate_summed_R, inside_RR, parts)


def num_parts(rows_RR: npt.NDArray[np.generic], node_of_rank: Sequence[int], row_bytes: int, chunks: int) -> int:
    """Returns in how many parts rows cross to nodes. As large as counts say: by rows a choice, of the rank that has
    most of them for other nodes.
    """
    node_R = np.asarray(node_of_rank)
    most = np.where(node_R[:, None] == node_R, 0, rows_RR).sum(axis=1).max()
    return parts_of_bytes(float(most * row_bytes), chunks)


def parts_of_bytes(most: float, chunks: int) -> int:
    """Returns in how many parts a rank's rows cross, of at ``most`` so many bytes: several chunks hide it already."""
    return int(min(max(most // LEAST_PART_BYTES, 1), MOST_PARTS)) if chunks == 1 else 1


def gates(node_of_rank: Sequence[int]) -> IntArray:
    """Returns the *gate* of each rank in each node, int64 [R, N], through which its rows come there: the rank with its
    own place, modulo the node's size; so in its own node itself.
    """
    first_N, sizes_N = np.unique(node_of_rank, return_index=True, return_counts=True)[1:]
    place_R = np.arange(len(node_of_rank)) - first_N[np.asarray(node_of_rank)]
    return first_N + place_R[:, None] % sizes_N


def groups_of_nodes(plan: TokenPlan, model: ModelShape, cluster: ClusterSpec) -> IntArray:
    """Returns of how many of the router's groups each node computes rows, [N]."""
    group, node = plan.entries[:, 1] // (model.num_experts // model.n_group), np.asarray(cluster.node_of_rank)
    seen_NG = np.zeros((cluster.num_nodes, model.n_group), dtype=bool)
    seen_NG[node[plan.entries[:, 2]], group] = True
    return seen_NG.sum(axis=1)


def expected_crossing(rows_RR: FloatArray, cluster: ClusterSpec, model: ModelShape, groups_N: IntArray) -> FloatArray:
    """Returns how many tokens of each rank go to each other node, [R, N], as choices of a token were independent in the
    groups that are left to it. ``groups_N``: of how many groups each node has experts.
    """
    node_R = np.asarray(cluster.node_of_rank)
    rows_RN = np.zeros((len(rows_RR), cluster.num_nodes))
    np.add.at(rows_RN.T, node_R, rows_RR.T)
    chosen_R = rows_RR.sum(axis=1, keepdims=True)
    share_RN = rows_RN / np.maximum(chosen_R, 1)
    G, M, K = model.n_group, model.topk_group, model.top_k
    reached_RN = np.zeros_like(share_RN)
    for node, held in enumerate(groups_N):
        for left in range(1, min(int(held), M) + 1):
            # With ``left`` of its groups among M, a node has so much more of a token's choices than its share.
            share_R = np.minimum(share_RN[:, node] * (left * G) / (M * held), 1.0)
            drawn = comb(held, left) * comb(G - held, M - left) / comb(G, M)
            reached_RN[:, node] += drawn * (1 - (1 - share_R) ** K)
    crossing_RN = chosen_R / K * reached_RN
    crossing_RN[np.arange(len(node_R)), node_R] = 0.0
    return crossing_RN
