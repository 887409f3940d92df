"""CpSat: replicas, placement, split and traffic at once, by OR-Tools CP-SAT, begun from Greedy's layout.

The busiest rank comes first, the tokens between nodes second. Small instances are solved as a whole and come with
bounds; larger ones are improved a few ranks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy.optimize import linear_sum_assignment

from moesys.balance.certificate import greatest_bound
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load, tight_set
from moesys.balance.flow.step_cost import plan_seconds
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.planning_problem import (
    PlanningProblem,
    domains_of,
    layout_from_rows,
    link_domains_of,
    share_key,
    tokens_by_node,
    usable_slots,
)
from moesys.config import Within
from moesys.config.member import Balance, MinReplicas, ReplicasWithin
from moesys.layout import ExpertLayout
from moesys.load import IntArray

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

Objective = Literal["busiest", "traffic"]
Rows = Sequence[Sequence[int]]

# The most ranks × experts that are planned at once, that are planned at all, and of the ranks that are planned anew.
SOLVED_WHOLE = 256
LARGEST_INSTANCE = 4096
FREED_AT_ONCE = 64
# The turns that would spend all the time, the most turns, since many end early, and an odd number that mixes the ranks.
TURNS = 16
MOST_TURNS = 64
MIXER = 0x9E3779B1
# CP-SAT adds in int64, which has room for sums of a few times all tokens.
MOST_TOKENS = 1 << 50
RANDOM_SEED = 1
# The number of experts that distinguish equal ranks; their weights are powers of two.
SYMMETRY_EXPERTS = 14


@dataclass(frozen=True)
class CpSatPlan:
    """A layout, and what no layout can beat.

    ``bound``: tokens of the busiest rank, over all layouts. ``inter_node_bound``: tokens between nodes, over all
    layouts whose busiest rank has no more than this one's. ``status``: "optimal" when both are reached, "balanced" when
    the first is, "feasible" otherwise.
    """

    layout: ExpertLayout
    bound: int
    inter_node_bound: int
    status: Literal["optimal", "balanced", "feasible"]


class CpSat(Balance):
    """OR-Tools CP-SAT on the joint placement and split, hinted by ``Greedy`` and never worse than it; R × E <= 4096."""

    kind: Literal["cp_sat"] = "cp_sat"
    is_compiled: ClassVar[bool] = True
    deterministic_time: float = Field(2.0, gt=0, description="CP-SAT's work limit, in its deterministic seconds")
    min_replicas: MinReplicas = Field(1, description="least number of replicas of every expert")
    replicas_within: ReplicasWithin = Field("cluster", description="part of the cluster with all replicas of an expert")

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Returns the layout of ``solve_cp_sat``; where model and sharding are known, that or ``Greedy``'s by seconds,
        whichever costs a step less.
        """
        by_counts = solve_cp_sat(problem, self).layout
        if problem.model is None or problem.sharding is None:
            return by_counts
        by_seconds = _as_greedy(self).layout(problem)
        return min(by_seconds, by_counts, key=lambda layout: _step_seconds(problem.over(layout)))


def _step_seconds(problem: PlanningProblem) -> float:
    """Returns what a step costs with the layout in force and its split by seconds."""
    assert problem.model is not None
    assert problem.sharding is not None
    plan = FlowSplit(max_inter_node="seconds").split(problem)
    units = problem.units_per_token
    return plan_seconds(plan, problem.cluster, problem.model, problem.sharding, problem.overlap, units)


def _as_greedy(config: CpSat) -> Greedy:
    return Greedy(min_replicas=config.min_replicas, replicas_within=config.replicas_within)


def solve_cp_sat(planning: PlanningProblem, config: CpSat) -> CpSatPlan:
    """Returns the layout of least ``min_max_load``, then fewest tokens between nodes, that is found in the time.

    Greedy's, unless one is better by that order. With y[r, e], whether rank r holds expert e, x[r, e] of its tokens,
    s[n, e] the tokens of e whose sources are on node n:

        minimise the busiest rank's load, then  Σ max(0, x[n, e] - s[n, e]),
        with  Σ_r x[r, e] = tokens of e,  x[r, e] <= tokens of e · y[r, e],  Σ_e y[r, e] <= slots of r,
        Σ_r y[r, e] >= replicas of e at least, and y[r, e] inside one domain.

    One worker, fixed seeds and a limit in deterministic seconds, which both objectives share, give the same layout in
    every run. Raises ValueError where ranks × experts exceed 4096 or tokens 2^50.
    """
    load = planning.load
    num_ranks, num_experts = load.num_ranks, load.num_experts
    if num_ranks * num_experts > LARGEST_INSTANCE:
        raise ValueError(
            f"balance=CpSat() plans {num_ranks} ranks × {num_experts} experts = {num_ranks * num_experts} placements, "
            f"more than {LARGEST_INSTANCE}; use balance=Greedy()"
        )
    if load.total > MOST_TOKENS:
        raise ValueError(
            f"balance=CpSat() plans {load.total} tokens, more than 2^50; scale the load down, for only its proportions "
            "matter, or use balance=Greedy()"
        )
    # Without a model Greedy minimises tokens, as this planner does.
    start = _as_greedy(config).layout(replace(planning, model=None))
    problem = CpSatProblem.of(planning, config.min_replicas, config.replicas_within)
    bound, _ = greatest_bound(problem.tokens_E, planning.slots_R, problem.domain_R, problem.min_replicas)
    layout, time, inter_node_bound = start, config.deterministic_time, 0
    if min_max_load(load, layout) > bound:
        layout, bound, spent = _improved(problem, layout, "busiest", bound, time / 2)
        layout = _relabelled(problem, layout) if problem.one_domain else layout
        time -= spent
    if len(set(problem.node_R)) > 1:
        layout, inter_node_bound, _ = _improved(problem, layout, "traffic", 0, time)
    if problem.cost(layout) >= problem.cost(start):
        layout = start
    busiest, inter_node = problem.cost(layout)
    status: Literal["optimal", "balanced", "feasible"] = "feasible"
    if busiest == bound:
        status = "optimal" if inter_node == inter_node_bound else "balanced"
    return CpSatPlan(layout, bound, inter_node_bound, status)


def _relabelled(problem: CpSatProblem, layout: ExpertLayout) -> ExpertLayout:
    """Returns a layout whose rows are exchanged between ranks with equally many slots, so that most tokens stay on
    their node; the given layout if that is no better, because the split may move other tokens.
    """
    assigned_RE, node_R, usable_R = problem.assigned(layout), np.asarray(problem.node_R), np.asarray(problem.usable_R)
    at_home_NR = np.minimum(problem.supply_NE[:, None], assigned_RE[None]).sum(axis=2)
    gain_RR = np.where(usable_R[:, None] == usable_R, at_home_NR[node_R], -1 - at_home_NR.sum())
    _, row_R = linear_sum_assignment(gain_RR, maximize=True)
    moved = problem.layout([layout.experts_of(row) for row in row_R.tolist()])
    return min(layout, moved, key=problem.cost)


def _improved(
    problem: CpSatProblem, layout: ExpertLayout, objective: Objective, bound: int, seconds: float
) -> tuple[ExpertLayout, int, float]:
    """Returns a layout with fewer tokens on the busiest rank or, with as many there, fewer between nodes, if one is
    found; the bound on these tokens, at least ``bound``; and the deterministic seconds spent.
    """

    def measured(layout: ExpertLayout) -> tuple[int, ...]:
        return (min_max_load(problem.planning.load, layout),) if objective == "busiest" else problem.cost(layout)

    best, spent, turn = measured(layout), 0.0, 0
    while best[-1] > bound and spent < seconds and turn < MOST_TURNS:
        free, share = _freed(problem, layout, turn)
        limits = (bound if objective == "busiest" else best[0], best[0])
        answer = solve(problem, layout, free, limits, objective, share * seconds)
        if len(free) == layout.num_ranks:
            bound = max(bound, answer.bound)
        if answer.layout is not None and (found := measured(answer.layout)) < best:
            best, layout = found, answer.layout
        spent, turn = spent + answer.seconds, turn + 1
    return layout, bound, spent


def _freed(problem: CpSatProblem, layout: ExpertLayout, turn: int) -> tuple[tuple[int, ...], float]:
    """Returns the ranks to plan anew, and the part of the time for it.

    At first all, where they are few enough: only that proves a bound. Then half from the tight set and half from
    anywhere, others in every turn. Where replicas keep together, every other turn frees whole families: each rank with
    the one that has the most experts in common with it.
    """
    if turn == 0 and layout.num_ranks * layout.num_experts <= SOLVED_WHOLE:
        return tuple(range(layout.num_ranks)), 1 / 2
    ranks = [rank for rank, usable in enumerate(problem.usable_R) if usable]
    size = max(2, isqrt(FREED_AT_ONCE // max(problem.usable_R)))
    mixed = sorted(ranks, key=lambda rank: ((rank + 1) * (2 * turn + 1) * MIXER % 2**32, rank))
    tight = set(tight_set(problem.planning.load, layout).ranks)
    picks = [*[rank for rank in mixed if rank in tight][: size // 2], *mixed]
    if turn % 2 and not problem.one_domain:
        shared_RR = layout.replicas_RE @ layout.replicas_RE.T
        np.fill_diagonal(shared_RR, -1)
        picks = [rank for pick in picks for rank in (pick, int(shared_RR[pick].argmax()))]
        size = max(size, 4)
    return tuple(sorted(list(dict.fromkeys(picks))[:size])), 1 / TURNS


@dataclass(frozen=True)
class CpSatProblem:
    """A ``PlanningProblem`` with its limits as CP-SAT needs them.

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
        """Returns the tokens [R, E] that each rank computes of each expert under the exact split."""
        return FlowSplit(traffic="exact").split(self.planning.over(layout)).computed_RE

    def inter_node(self, assigned_RE: IntArray) -> int:
        """Returns the tokens between nodes: what a node computes of an expert beyond what its own sources have."""
        assigned_NE = np.zeros_like(self.supply_NE)
        np.add.at(assigned_NE, np.asarray(self.node_R), assigned_RE)
        return int(np.maximum(assigned_NE - self.supply_NE, 0).sum())

    def cost(self, layout: ExpertLayout) -> tuple[int, int]:
        """Returns what is minimised: tokens of the busiest rank, then tokens between nodes."""
        assigned_RE = self.assigned(layout)
        return int(assigned_RE.sum(axis=1).max()), self.inter_node(assigned_RE)

    def layout(self, rows: Rows) -> ExpertLayout:
        return layout_from_rows(rows, self.planning.slots_R, len(self.tokens_E))


def filled_up(problem: CpSatProblem, rows: Rows) -> list[list[int]]:
    """Returns rows whose free slots have the experts with the most tokens per replica of those that the rank lacks.

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


# --- the CP-SAT model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The result of a solve: the solution, or None; the bound of the objective; the deterministic seconds it took."""

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
    """Searches new experts for the ``free`` ranks; the others keep theirs, and tokens are divided over all ranks again.

    Minimises the busiest rank's tokens, which lie in ``limits``, or within the same limits the tokens between nodes.
    Free ranks may hold what any of them holds now.
    """
    # imported here because it brings pandas along, which no other planner needs
    from ortools.sat.python import cp_model

    tokens_E, high = problem.tokens_E, limits[1]
    whole = len(free) == layout.num_ranks
    exchangeable = _exchangeable(problem, by_node=objective == "traffic") if whole else []
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
    model.minimize(busiest if objective == "busiest" else _imports(model, problem, tokens))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = RANDOM_SEED
    solver.parameters.max_deterministic_time = seconds
    # It would leave Ctrl-C to the system, which ends a process without a word.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, 0, spent)
    # A whole number of tokens, which a float holds exactly, as it is at most 2^50.
    bound = int(solver.best_objective_bound)
    rows = [
        [expert for expert in movable if solver.boolean_value(holds[rank, expert])] if rank in free else row
        for rank, row in enumerate(hint_rows)
    ]
    return Answer(problem.layout(filled_up(problem, rows)), bound, spent)


def _keep_inside_one_domain(
    model: CpModel, problem: CpSatProblem, holds_by_rank: dict[int, IntVar], kept: Sequence[int]
) -> None:
    """Keeps one expert inside one domain: that of the ranks that keep it, if any do."""
    home = {problem.domain_R[rank] for rank in kept}
    here = {domain: model.new_bool_var("") for domain in sorted({problem.domain_R[rank] for rank in holds_by_rank})}
    model.add_at_most_one(here.values())
    for rank, holds in holds_by_rank.items():
        domain = problem.domain_R[rank]
        model.add_implication(holds, here[domain])
        if home and domain not in home:
            model.add(holds == 0)


def _imports(model: CpModel, problem: CpSatProblem, tokens: dict[tuple[int, int], IntVar]) -> LinearExprT:
    """Returns the tokens between nodes: what each node computes of each expert beyond what its sources have."""
    imports = []
    for (node, expert), supply in np.ndenumerate(problem.supply_NE):
        computed = [tokens[rank, e] for rank, e in tokens if e == expert and problem.node_R[rank] == node]
        if computed and supply < problem.tokens_E[expert]:
            imports.append(model.new_int_var(0, problem.tokens_E[expert] - int(supply), f"i[{node},{expert}]"))
            model.add(imports[-1] >= sum(computed) - int(supply))
    return sum(imports)


def _exchangeable(problem: CpSatProblem, by_node: bool) -> list[list[int]]:
    """Returns the ranks that could change places in any solution: of equal slots and domain and, ``by_node``, node."""
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank, usable in enumerate(problem.usable_R):
        of_links = problem.node_R[rank], problem.planning.cluster.node_of_rank[rank]
        classes.setdefault((usable, problem.domain_R[rank], *(of_links if by_node else ())), []).append(rank)
    return list(classes.values())


def _codes(tokens_E: Sequence[int]) -> dict[int, int]:
    """Returns weights of the heaviest experts; ranks that hold different ones of them have different sums."""
    heaviest = sorted(range(len(tokens_E)), key=lambda expert: (-tokens_E[expert], expert))[:SYMMETRY_EXPERTS]
    return {expert: 1 << (SYMMETRY_EXPERTS - place) for place, expert in enumerate(heaviest)}


def _order(
    model: CpModel, problem: CpSatProblem, holds: dict[tuple[int, int], IntVar], exchangeable: Sequence[Sequence[int]]
) -> None:
    """Keeps those solutions with codes in falling order, of those that differ by an exchange of ranks."""
    codes = _codes(problem.tokens_E)
    for ranks in exchangeable:
        for before, after in pairwise(ranks):
            model.add(sum(code * (holds[before, expert] - holds[after, expert]) for expert, code in codes.items()) >= 0)


def _in_order(
    problem: CpSatProblem, layout: ExpertLayout, exchangeable: Sequence[Sequence[int]]
) -> tuple[list[Sequence[int]], IntArray]:
    """Returns rows and assigned tokens [R, E] of a layout, with ranks exchanged so that ``_order`` keeps it."""
    assigned_RE, codes = problem.assigned(layout), _codes(problem.tokens_E)
    source_R = list(range(layout.num_ranks))
    for ranks in exchangeable:
        by_code = sorted(ranks, key=lambda rank: -sum(codes.get(expert, 0) for expert in layout.experts_of(rank)))
        for rank, source in zip(ranks, by_code, strict=True):
            source_R[rank] = source
    return [layout.experts_of(source) for source in source_R], assigned_RE[source_R]
