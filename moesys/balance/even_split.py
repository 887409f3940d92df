"""EvenSplit: LAER-MoE's lite routing, evenly over the slots that are near."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesys.balance.planning_problem import PlanningProblem, nodes_of
from moesys.config import ClusterSpec
from moesys.config.member import Split
from moesys.layout import EMPTY, ExpertLayout, TokenPlan

if TYPE_CHECKING:
    from torch import Tensor

    from moesys.kernels.split.tables import SplitTables


class EvenSplit(Split):
    """LAER-MoE's lite routing: evenly over the replicas on the source's node, or over all if the node has none."""

    kind: Literal["even"] = "even"
    on_device: ClassVar[bool] = True

    def device_split(
        self, tables: SplitTables, layout: ExpertLayout, cluster: ClusterSpec
    ) -> Callable[[Tensor, int], Tensor]:
        from moesys.kernels.split.baselines import even_split, even_tables

        shares = even_tables(layout.expert_RS, nodes_of(cluster), tables.expert_P.device)
        return lambda tokens_RE, turn: even_split(tokens_RE, shares, turn)

    def split(self, problem: PlanningProblem) -> TokenPlan:
        """Divides a source's T tokens for an expert over the expert's c slots on its node, or over all c without any.

        Every slot gets floor(T / c). The T mod c left over go one each to consecutive slots in rank order, the first of
        which is slot ``turn`` mod c: the original always begins at slot 0. Two slots of an expert on one rank count
        twice. Source: laer-moe, fused_kernel.py. P filled slots, N nodes.
        """
        load, layout = problem.load, problem.layout
        assert layout is not None, "tokens are split over a layout, and the problem has none"
        num_experts = load.tokens_RE.shape[1]
        rank_P, slot_P = np.nonzero(layout.expert_RS != EMPTY)
        expert_P = layout.expert_RS[rank_P, slot_P]
        by_expert = np.argsort(expert_P, kind="stable")
        rank_P, expert_P = rank_P[by_expert], expert_P[by_expert]
        node_R = np.asarray(problem.cluster.node_of_rank)
        node_P = node_R[rank_P]
        num_nodes = int(node_R[-1]) + 1

        # slots are sorted by (expert, rank), so those of an expert, and of an expert on a node, are consecutive
        slots_E = np.bincount(expert_P, minlength=num_experts)
        slots_EN = np.bincount(expert_P * num_nodes + node_P, minlength=num_experts * num_nodes)
        index_P = np.arange(len(expert_P))
        index_in_all_P = index_P - (np.cumsum(slots_E) - slots_E)[expert_P]
        index_in_node_P = index_P - (np.cumsum(slots_EN) - slots_EN)[expert_P * num_nodes + node_P]

        near_NP = slots_EN.reshape(num_experts, num_nodes).T[:, expert_P]
        stays_NP = near_NP > 0
        open_NP = ~stays_NP | (node_P == np.arange(num_nodes)[:, None])
        slots_NP = np.where(stays_NP, near_NP, slots_E[expert_P])
        place_NP = (np.where(stays_NP, index_in_node_P, index_in_all_P) - problem.turn) % slots_NP

        share_RP, left_RP = np.divmod(load.tokens_RE[:, expert_P], slots_NP[node_R])
        tokens_RP = np.where(open_NP[node_R], share_RP + (place_NP[node_R] < left_RP), 0)
        source, index = np.nonzero(tokens_RP)
        entries = np.column_stack([source, expert_P[index], rank_P[index], tokens_RP[source, index]])
        if layout.num_duplicates and len(entries):
            first = np.flatnonzero(np.r_[True, (np.diff(entries[:, :3], axis=0) != 0).any(axis=1)])
            tokens = np.add.reduceat(entries[:, 3], first)
            entries = np.column_stack([entries[first, :3], tokens])
        return TokenPlan.by_construction(entries, load, layout)
