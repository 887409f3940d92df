"""The CP-SAT model that plans some ranks anew, and its solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.topology import (
    domains_of,
    layout_from_rows,
    link_domains_of,
    share_key,
    tokens_by_node,
    usable_slots,
)
from moesys.config import Within
from moesys.layout import ExpertLayout
from moesys.load import IntArray

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

    Expression = Callable[[CpModel, dict[tuple[int, int], IntVar], dict[tuple[int, int], IntVar]], LinearExprT]
    Objective = Expression | Literal["busiest", "traffic"]

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


RANDOM_SEED = 1
# experts that tell equal ranks apart; their weights are powers of two
SYMMETRY_EXPERTS = 14


@dataclass(frozen=True)
class Answer:
    """What a solve found, None without a solution; the bound of its objective; deterministic seconds it took."""

    layout: ExpertLayout | None
    bound: int
    seconds: float


def solve(
    problem: CpSatProblem,
    layout: ExpertLayout,
    free: tuple[int, ...],
    limits: tuple[int, int],
    objective: Objective,
    seconds: float,
) -> Answer:
    """Plans the ``free`` ranks anew; the others keep their experts, and all ranks share the tokens anew.

    Minimises the busiest rank's tokens, which lie in ``limits``, or within the same limits the tokens between nodes, or
    an expression of tokens and holders by rank and expert. Free ranks may hold what any of them holds now.
    """
    # imported here because it brings pandas along, which no other planner needs
    from ortools.sat.python import cp_model

    tokens_E, high = problem.tokens_E, limits[1]
    whole = len(free) == layout.num_ranks
    exchangeable = _exchangeable(problem, by_node=objective != "busiest") if whole else []
    hint_rows, hint_assigned_RE = _in_order(problem, layout, exchangeable)
    movable = range(len(tokens_E)) if whole else sorted({expert for rank in free for expert in hint_rows[rank]})
    model = cp_model.CpModel()
    holds: dict[tuple[int, int], IntVar] = {}
    tokens: dict[tuple[int, int], IntVar] = {}
    for rank, row in enumerate(hint_rows):
        for expert in movable if rank in free else row:
            most = min(tokens_E[expert], high)
            tokens[rank, expert] = model.new_int_var(0, most, f"x[{rank},{expert}]")
            model.add_hint(tokens[rank, expert], int(hint_assigned_RE[rank, expert]))
            if rank in free:
                holds[rank, expert] = model.new_bool_var(f"y[{rank},{expert}]")
                model.add_hint(holds[rank, expert], expert in row)
                model.add(tokens[rank, expert] <= most * holds[rank, expert])

    for expert, amount in enumerate(tokens_E):
        model.add(sum(tokens[rank, expert] for rank in range(len(hint_rows)) if (rank, expert) in tokens) == amount)
        kept = [rank for rank, row in enumerate(hint_rows) if rank not in free and expert in row]
        needed = max(problem.min_replicas, -(-amount // high) if high else 1)
        model.add(sum(holds[rank, expert] for rank in free if expert in movable) + len(kept) >= needed)
        if not problem.one_domain and expert in movable:
            _keep_inside_one_domain(model, problem, {rank: holds[rank, expert] for rank in free}, kept)
    busiest = model.new_int_var(*limits, "busiest")
    for rank, row in enumerate(hint_rows):
        model.add(sum(tokens[rank, expert] for expert in (movable if rank in free else row)) <= busiest)
    for rank in free:
        model.add(sum(holds[rank, expert] for expert in movable) <= problem.usable_R[rank])
    _order(model, problem, holds, exchangeable)
    if objective == "busiest":
        model.minimize(busiest)
    elif objective == "traffic":
        model.minimize(_imports(model, problem, tokens))
    else:
        model.minimize(objective(model, tokens, holds))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = RANDOM_SEED
    solver.parameters.max_deterministic_time = seconds
    if callable(objective):
        # with large prices and domains, probing made 9.15 call layouts optimal that are not
        solver.parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, 0, spent)
    # a whole number, of tokens held exactly: they are at most 2^50
    bound = int(solver.best_objective_bound)
    rows = [
        [expert for expert in movable if solver.boolean_value(holds[rank, expert])] if rank in free else row
        for rank, row in enumerate(hint_rows)
    ]
    # by seconds, slots that stay empty do so for a reason
    return Answer(problem.layout(rows if callable(objective) else filled_up(problem, rows)), bound, spent)


def _keep_inside_one_domain(
    model: CpModel, problem: CpSatProblem, holds_by_rank: dict[int, IntVar], kept: Sequence[int]
) -> None:
    """One expert: of the domains where free ranks could hold it, one; the domain of ranks that keep it, if any do."""
    home = {problem.domain_R[rank] for rank in kept}
    here = {domain: model.new_bool_var("") for domain in sorted({problem.domain_R[rank] for rank in holds_by_rank})}
    model.add_at_most_one(here.values())
    for rank, holds in holds_by_rank.items():
        domain = problem.domain_R[rank]
        model.add_implication(holds, here[domain])
        if home and domain not in home:
            model.add(holds == 0)


def _imports(model: CpModel, problem: CpSatProblem, tokens: dict[tuple[int, int], IntVar]) -> LinearExprT:
    """Tokens between nodes: for each node and expert, what its ranks compute beyond what its sources have."""
    imports = []
    for (node, expert), supply in np.ndenumerate(problem.supply_NE):
        computed = [tokens[rank, e] for rank, e in tokens if e == expert and problem.node_R[rank] == node]
        if computed and supply < problem.tokens_E[expert]:
            imports.append(model.new_int_var(0, problem.tokens_E[expert] - int(supply), f"i[{node},{expert}]"))
            model.add(imports[-1] >= sum(computed) - int(supply))
    return sum(imports)


def _exchangeable(problem: CpSatProblem, by_node: bool) -> list[list[int]]:
    """Ranks that could change places in any solution: equal slots and domain, and where traffic counts one node."""
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank, usable in enumerate(problem.usable_R):
        of_links = problem.node_R[rank], problem.planning.cluster.node_of_rank[rank]
        classes.setdefault((usable, problem.domain_R[rank], *(of_links if by_node else ())), []).append(rank)
    return list(classes.values())


def _codes(tokens_E: Sequence[int]) -> dict[int, int]:
    """Weights of the heaviest experts, whose sum tells the ranks that hold them apart."""
    heaviest = sorted(range(len(tokens_E)), key=lambda expert: (-tokens_E[expert], expert))[:SYMMETRY_EXPERTS]
    return {expert: 1 << (SYMMETRY_EXPERTS - place) for place, expert in enumerate(heaviest)}


def _order(
    model: CpModel, problem: CpSatProblem, holds: dict[tuple[int, int], IntVar], exchangeable: Sequence[Sequence[int]]
) -> None:
    """Of solutions that differ by an exchange of ranks, keeps those with codes in falling order."""
    codes = _codes(problem.tokens_E)
    for ranks in exchangeable:
        for before, after in pairwise(ranks):
            model.add(sum(code * (holds[before, expert] - holds[after, expert]) for expert, code in codes.items()) >= 0)


def _in_order(
    problem: CpSatProblem, layout: ExpertLayout, exchangeable: Sequence[Sequence[int]]
) -> tuple[list[Sequence[int]], IntArray]:
    """Rows and assigned tokens [R, E] of a layout, ranks exchanged so that ``_order`` keeps it."""
    assigned_RE, codes = problem.assigned(layout), _codes(problem.tokens_E)
    source_R = list(range(layout.num_ranks))
    for ranks in exchangeable:
        by_code = sorted(ranks, key=lambda rank: -sum(codes.get(expert, 0) for expert in layout.experts_of(rank)))
        for rank, source in zip(ranks, by_code, strict=True):
            source_R[rank] = source
    return [layout.experts_of(source) for source in source_R], assigned_RE[source_R]
