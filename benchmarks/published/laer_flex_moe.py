"""FlexMoE as LAER-MoE's evaluation has it: the baseline of its rows, which moves replicas inside nodes.

``FlexMoe`` of this project is our reading of FlexMoE itself, which knows no nodes. The one of LAER-MoE's artifact
(arXiv 2602.11686) differs, and leaves other ranks busiest; to judge its rows, its rule is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.balance.layout_schedule import PlanRequest, SolvedPlan
from moesys.balance.splits import split_tokens
from moesys.config import ClusterSpec, EvenSplit
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix

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
    nodes = [np.flatnonzero(np.asarray(cluster.node_of_rank) == node) for node in range(cluster.num_nodes)]
    load, layout = LoadMatrix(tokens_RE), previous
    rows_R = split_tokens(load, layout, cluster, EvenSplit()).tokens_R
    for _ in range(MAX_MOVES):
        moved_RE = _moved(load.tokens_RE.sum(axis=0), layout.replicas_RE, rows_R, nodes, previous.num_slots)
        if moved_RE is None:
            break
        expert_RS = [np.repeat(np.arange(len(held_E)), held_E) for held_E in moved_RE]
        moved = ExpertLayout(np.stack(expert_RS), load.num_experts)
        moved_rows_R = split_tokens(load, moved, cluster, EvenSplit()).tokens_R
        if not (moved_rows_R.max() < rows_R.max() or _ratio(moved_rows_R) < _ratio(rows_R)):
            break
        layout, rows_R = moved, moved_rows_R
    return layout


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


def _ratio(rows_R: IntArray) -> float:
    return float(rows_R.max() / max(rows_R.min(), 1))
