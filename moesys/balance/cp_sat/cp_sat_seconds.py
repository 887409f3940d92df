"""CpSat by seconds: the layout whose step costs the least, and a bound on what any layout's costs.

CP-SAT minimises what planners count of a step (``flow.step_cost``) but for links inside domains, of which no plan of
tokens by rank says anything, and with rows that cross once taken as rows: so its bound is one of what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from moesys.balance.cp_sat.cp_sat_model import CpSatProblem, solve
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.step_cost import Prices, crosses_once, prices_of
from moesys.balance.seconds_certificate import elements_from_outside, plan_seconds
from moesys.balance.topology import nodes_of
from moesys.config import Fsep
from moesys.cost import GRADIENT_BYTES, restores_per_step
from moesys.layout import ExpertLayout

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

# CP-SAT adds in int64: prices leave room for sums of some hundred times what all tokens cost.
ROOM, MOST = 1 << 10, 1 << 56
# With more tokens prices have too few digits left for a bound.
MOST_PROVED = 1 << 32


@dataclass(frozen=True)
class SecondsPlan:
    """``plan_s``: of the layout and its split by seconds; ``bound_s``: of every layout; 0 where nothing is proved."""

    layout: ExpertLayout
    plan_s: float
    bound_s: float


def least_seconds(problem: CpSatProblem, candidates: list[ExpertLayout], whole: bool, time: float) -> SecondsPlan:
    """Returns the cheapest of ``candidates`` and of what CP-SAT finds, begun from it; all ranks are planned at once,
    so only where these are few, ``whole``.
    """

    def cost(layout: ExpertLayout) -> float:
        planning = problem.planning
        plan = FlowSplit(max_inter_node="seconds").split(planning.over(layout))
        assert planning.model is not None
        assert planning.sharding is not None
        return plan_seconds(
            plan, planning.cluster, planning.model, planning.sharding, planning.overlap, planning.units_per_token
        )

    plan_s, best = min(((cost(each), each) for each in candidates), key=itemgetter(0))
    if not whole:
        return SecondsPlan(best, plan_s, 0.0)
    objective = StepSeconds(problem)
    answer = solve(problem, best, tuple(range(best.num_ranks)), (0, sum(problem.tokens_E)), objective.expression, time)
    if answer.layout is not None and (found_s := cost(answer.layout)) < plan_s:
        plan_s, best = found_s, answer.layout
    direct = not crosses_once(problem.planning.overlap, problem.planning.cluster)
    proves = direct and sum(problem.tokens_E) <= MOST_PROVED
    # planners count whole tokens, and CP-SAT's prices are whole, too
    bound_s = min(answer.bound * objective.prices.unit_s / problem.planning.units_per_token, plan_s) if proves else 0.0
    return SecondsPlan(best, plan_s, bound_s)


class StepSeconds:
    """The objective: what a step costs, in the unit of ``prices``."""

    def __init__(self, problem: CpSatProblem) -> None:
        planning = problem.planning
        assert planning.model is not None
        self.problem = problem
        self.prices: Prices = prices_of(planning.model, planning.cluster, planning.load.total * ROOM)

    def expression(
        self, model: CpModel, tokens: dict[tuple[int, int], IntVar], holds: dict[tuple[int, int], IntVar]
    ) -> LinearExprT:
        """Adds what a step costs to ``model``: of ``tokens`` and ``holds`` by rank and expert."""
        nics_R, prices = nodes_of(self.problem.planning.cluster), self.prices
        restored_R, reduced_R, passes = self._expert_units()
        rows_C = self._rows(model, tokens)
        busiest, gradients = (model.new_int_var(0, MOST, name) for name in ("busiest", "gradients"))
        busiest_link = model.new_int_var(0, MOST, "link")
        model.add_max_equality(busiest_link, rows_C)
        for node, rows in enumerate(rows_C):
            held = [(rank, is_held) for (rank, _), is_held in holds.items() if nics_R[rank] == node]
            model.add(gradients >= sum(reduced_R[rank] * is_held for rank, is_held in held))
            there = 2 * rows + passes * sum(restored_R[rank] * is_held for rank, is_held in held)
            for rank in np.flatnonzero(nics_R == node).tolist():
                computed = sum(of_expert for (by, _), of_expert in tokens.items() if by == rank)
                model.add(busiest >= there + int(prices.row[0]) * computed)
        return busiest + 2 * busiest_link + gradients

    def _rows(self, model: CpModel, tokens: dict[tuple[int, int], IntVar]) -> list[IntVar]:
        """Returns what rows cost each node's NICs at least, those of a domain of several nodes together."""
        problem = self.problem
        nics_R, domain_R = nodes_of(problem.planning.cluster), np.asarray(problem.node_R)
        rows_C = [model.new_int_var(0, MOST, f"rows[{node}]") for node in range(int(nics_R[-1]) + 1)]
        ways: list[list[LinearExprT]] = [[], []]
        for (domain, expert), supply in np.ndenumerate(problem.supply_NE):
            computed = sum(of for (rank, e), of in tokens.items() if e == expert and domain_R[rank] == domain)
            for way, more in zip(ways, (int(supply) - computed, computed - int(supply)), strict=True):
                way.append(model.new_int_var(0, problem.tokens_E[expert], ""))
                model.add(way[-1] >= more)
        coarse_R = min(nics_R, domain_R, key=lambda part_R: part_R[-1])
        num_experts = len(problem.tokens_E)
        for part in range(int(coarse_R[-1]) + 1):
            nodes, domains = (set(of_R[coarse_R == part].tolist()) for of_R in (nics_R, domain_R))
            for way in ways:
                leaving = sum(sum(way[domain * num_experts : (domain + 1) * num_experts]) for domain in domains)
                model.add(sum(rows_C[node] for node in nodes) >= int(self.prices.nics[0]) * leaving)
        return rows_C

    def _expert_units(self) -> tuple[list[int], list[int], int]:
        """Returns what one expert more on a rank costs its node's NICs where it is waited for, and its gradient; and in
        how many of the two passes experts come. Of those that are shared out inside nodes, or lent, nothing is sure.
        """
        planning = self.problem.planning
        cluster, model, sharding = planning.cluster, planning.model, planning.sharding
        assert model is not None
        if not isinstance(sharding, Fsep):
            return [0] * cluster.num_ranks, [0] * cluster.num_ranks, 0
        unit_bytes = self.prices.unit_s * cluster.inter_node_gb_per_s * 1e9
        outside_R = elements_from_outside(model, cluster)[list(cluster.domain_of_rank)].tolist()
        restored = 0 if sharding.prefetch_layers or sharding.restore != "flat" else model.bytes_per_element
        reduced = 0 if sharding.delay_reshard or sharding.reshard != "flat" else GRADIENT_BYTES
        units = planning.units_per_token / unit_bytes
        per_R = [[int(outside * b * units) for outside in outside_R] for b in (restored, reduced)]
        return per_R[0], per_R[1], restores_per_step(sharding)
