"""FlexMoE as LAER-MoE's evaluation has it: the baseline of its rows, which moves replicas inside nodes.

``FlexMoe`` of this project is our reading of FlexMoE itself, which knows no nodes. The one of LAER-MoE's artifact
(arXiv 2602.11686) differs, and leaves other ranks busiest; to judge its rows, its rule is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.layout import ExpertLayout
from moesys.load import IntArray
from moesys.moe.planning import PlanRequest, SolvedPlan

MAX_MOVES = 10


@dataclass(frozen=True)
class LaerFlexMoePlanner:
    """Plans at once, step by step: it is to be asked after every micro-batch."""

    def submit(self, request: PlanRequest) -> SolvedPlan:
        return SolvedPlan(laer_flex_moe_layout(request.load.tokens_RE, request.previous, request.cluster))


def laer_flex_moe_layout(tokens_RE: IntArray, previous: ExpertLayout, cluster: ClusterSpec) -> ExpertLayout:
    """At most 10 moves from ``previous``, each of them made in all nodes at once.

    A move takes a replica from the expert with the fewest tokens a replica that has more than one a node, and gives it
    to the one with the most. In each node it is taken from the idlest rank that holds it; it goes to the first rank
    that holds the hot expert and something else, in place of the heaviest other expert there, which goes where the
    taken one was; if there is none, it goes where the taken one was. It is kept if the busiest rank falls, or the ratio
    of busiest to idlest; else the plan ends. Loads are those of an even split inside nodes, in whole tokens: a token
    more or less decides where two layouts are alike but for that.
    """
    slots, nodes = previous.num_slots, _nodes(cluster)
    held_RE = previous.replicas_RE.copy()
    tokens_E = tokens_RE.sum(axis=0)
    rows_R = even_rows(tokens_RE, held_RE, nodes)
    for _ in range(MAX_MOVES):
        moved_RE = _moved(tokens_E, held_RE, rows_R, nodes, slots)
        if moved_RE is None:
            break
        moved_rows_R = even_rows(tokens_RE, moved_RE, nodes)
        if not (moved_rows_R.max() < rows_R.max() or _ratio(moved_rows_R) < _ratio(rows_R)):
            break
        held_RE, rows_R = moved_RE, moved_rows_R
    expert_RS = [np.repeat(np.arange(len(held_E)), held_E) for held_E in held_RE]
    return ExpertLayout(np.stack(expert_RS), held_RE.shape[1])


def _moved(
    tokens_E: IntArray, held_RE: IntArray, rows_R: IntArray, nodes: list[IntArray], slots: int
) -> IntArray | None:
    """Replicas after one move; None where no expert has one to give."""
    replicas_E = held_RE.sum(axis=0)
    share_E = tokens_E // replicas_E
    hottest_first = np.argsort(-share_E, kind="stable")
    hot = hottest_first[0]
    cold = next((expert for expert in hottest_first[::-1] if replicas_E[expert] != len(nodes)), hot)
    if hot == cold:
        return None
    moved_RE = held_RE.copy()
    for ranks in nodes:
        holders = ranks[moved_RE[ranks, cold] > 0]
        if not len(holders):
            continue
        loser = holders[np.argmin(rows_R[holders])]
        gainers = ranks[(moved_RE[ranks, hot] > 0) & (moved_RE[ranks, hot] < slots)]
        moved_RE[loser, cold] -= 1
        if len(gainers) and (gainer := gainers[0]) != loser:
            others = np.flatnonzero(moved_RE[gainer])
            others = others[others != hot]
            exchanged = others[np.argmax(share_E[others])]
            moved_RE[gainer, exchanged] -= 1
            moved_RE[loser, exchanged] += 1
            moved_RE[gainer, hot] += 1
        else:
            moved_RE[loser, hot] += 1
    return moved_RE


def even_rows(tokens_RE: IntArray, held_RE: IntArray, nodes: list[IntArray]) -> IntArray:
    """Rows of each rank, [R], when a rank's tokens are shared by the replicas of its node, or by all where its node has
    none: evenly, and what is left over goes one each to the first of them.
    """
    rows_R = np.zeros(len(tokens_RE), dtype=np.int64)
    missing_NE = np.array([held_RE[ranks].sum(axis=0) == 0 for ranks in nodes])
    for ranks, missing_E in zip(nodes, missing_NE, strict=True):
        rows_R[ranks] += _shared(tokens_RE[ranks], held_RE[ranks])
        if missing_E.any():
            rows_R += _shared(tokens_RE[ranks] * missing_E, held_RE)
    return rows_R


def _shared(tokens_SE: IntArray, held_RE: IntArray) -> IntArray:
    """Rows [R] that sources S bring to the replicas of R ranks; none of an expert without replicas."""
    most = held_RE.sum(axis=0)
    each_SE, extra_SE = np.divmod(tokens_SE, np.maximum(most, 1))
    last_RE = held_RE.cumsum(axis=0)
    # Of a source's extra tokens, those that fall to replicas up to and including each rank's.
    extras_RE = np.minimum(extra_SE[:, None], last_RE).sum(axis=0)
    rows_RE = held_RE * each_SE.sum(axis=0) + np.diff(extras_RE, axis=0, prepend=0)
    return rows_RE.sum(axis=1)


def _ratio(rows_R: IntArray) -> float:
    return float(rows_R.max() / max(rows_R.min(), 1))


def _nodes(cluster: ClusterSpec) -> list[IntArray]:
    node_R = np.asarray(cluster.node_of_rank)
    return [np.flatnonzero(node_R == node) for node in range(cluster.num_nodes)]
