"""What CpSat solves: a load, the slots it may fill, and what a layout costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.replicas import layout_from_rows, share_key, usable_slots
from moesys.balance.topology import domains_of, link_domains_of, tokens_by_node
from moesys.config import Within
from moesys.layout import ExpertLayout
from moesys.load import IntArray

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class CpSatProblem:
    """A ``PlanningProblem``, and what its limits come to.

    ``usable_R``: slots of a rank that can hold distinct experts; ``domain_R``: the domain of each rank, inside one of
    which all replicas of an expert lie; ``tokens_E``: of all sources; ``supply_NE``: of the sources on a node.
    """

    planning: PlanningProblem
    usable_R: list[int]
    domain_R: tuple[int, ...]
    min_replicas: int
    tokens_E: list[int]
    supply_NE: IntArray

    @classmethod
    def of(cls, planning: PlanningProblem, min_replicas: int, replicas_within: Within) -> CpSatProblem:
        supply_NE, tokens_E = tokens_by_node(planning.load.tokens_RE, link_domains_of(planning.cluster))
        return cls(
            planning=planning,
            usable_R=usable_slots(planning.slots_R, planning.load.num_experts),
            domain_R=domains_of(planning.cluster, replicas_within),
            min_replicas=min_replicas,
            tokens_E=tokens_E.tolist(),
            supply_NE=supply_NE,
        )

    @property
    def node_R(self) -> tuple[int, ...]:
        return self.planning.cluster.domain_of_rank

    @property
    def one_domain(self) -> bool:
        return len(set(self.domain_R)) == 1

    def assigned(self, layout: ExpertLayout) -> IntArray:
        """Tokens [R, E] that each rank computes of each expert under the exact split."""
        plan = FlowSplit(traffic="exact").split(self.planning.over(layout))
        assigned_RE = np.zeros_like(plan.load.tokens_RE)
        np.add.at(assigned_RE, (plan.entries[:, 2], plan.entries[:, 1]), plan.entries[:, 3])
        return assigned_RE

    def inter_node(self, assigned_RE: IntArray) -> int:
        """Tokens between nodes: what a node computes of an expert beyond what its own sources have."""
        assigned_NE = np.zeros_like(self.supply_NE)
        np.add.at(assigned_NE, np.asarray(self.node_R), assigned_RE)
        return int(np.maximum(assigned_NE - self.supply_NE, 0).sum())

    def cost(self, layout: ExpertLayout) -> tuple[int, int]:
        """What is minimised: tokens of the busiest rank, then tokens between nodes."""
        assigned_RE = self.assigned(layout)
        return int(assigned_RE.sum(axis=1).max()), self.inter_node(assigned_RE)

    def layout(self, rows: Rows) -> ExpertLayout:
        return layout_from_rows(rows, self.planning.slots_R, len(self.tokens_E))


def filled_up(problem: CpSatProblem, rows: Rows) -> list[list[int]]:
    """Rows whose free slots have gone to the experts with the most tokens a replica that their rank has not.

    A slot stays free where all experts of the domain are on the rank already.
    """
    filled = [list(row) for row in rows]
    replicas_E = [sum(expert in row for row in rows) for expert in range(len(problem.tokens_E))]
    home_E = {expert: problem.domain_R[rank] for rank, row in enumerate(rows) for expert in row}
    for rank, row in enumerate(filled):
        absent = {expert for expert, home in home_E.items() if home == problem.domain_R[rank]} - set(row)
        while len(row) < problem.usable_R[rank] and absent:
            expert = min(
                absent, key=lambda e: (-share_key(problem.tokens_E[e], replicas_E[e], len(rows)), replicas_E[e], e)
            )
            row.append(expert)
            absent.remove(expert)
            replicas_E[expert] += 1
    return filled
