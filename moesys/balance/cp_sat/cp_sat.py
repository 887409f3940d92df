"""CpSat: replicas, placement, split and traffic at once, by OR-Tools CP-SAT, begun from Greedy's layout.

The busiest rank comes first, the tokens between nodes second. Small instances are solved as a whole and come with
bounds; larger ones are improved a few ranks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from moesys.balance.certificate import greatest_bound
from moesys.balance.cp_sat.components import MOST_EXPERTS, fill_components, least_by_components
from moesys.balance.cp_sat.cp_sat_model import CpSatProblem, filled_up, solve
from moesys.balance.cp_sat.cp_sat_seconds import SecondsPlan, least_seconds
from moesys.balance.flow.max_load import min_max_load, tight_set
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.planning_problem import PlanningProblem
from moesys.config.balance import Balance, MinReplicas, ReplicasWithin
from moesys.layout import ExpertLayout

# ranks × experts up to which all ranks are planned at once, up to which planning some of them anew still helps, and
# of those that are
SOLVED_WHOLE = 256
LARGEST_INSTANCE = 4096
FREED_AT_ONCE = 64
# turns that would spend all the time, and turns at most, for many end early; an odd number that mixes their ranks
TURNS = 16
MOST_TURNS = 64
MIXER = 0x9E3779B1
# CP-SAT adds in int64, with room for sums of a few times all tokens
MOST_TOKENS = 1 << 50


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
    min_replicas: MinReplicas = 1
    replicas_within: ReplicasWithin = "cluster"

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Returns the layout of ``solve_cp_sat``; of ``solve_by_seconds`` where model and sharding are known."""
        if problem.model is not None and problem.sharding is not None:
            return solve_by_seconds(problem, self).layout
        return solve_cp_sat(problem, self).layout


def solve_by_seconds(planning: PlanningProblem, config: CpSat) -> SecondsPlan:
    """Returns the layout whose step costs the fewest seconds of those that are found in the time: ``Greedy``'s by
    seconds, ``solve_cp_sat``'s, and up to R·E = 256 what CP-SAT makes of the better, with a bound for all layouts.

    Raises ValueError as ``solve_cp_sat``. The problem knows its model and sharding.
    """
    time = config.deterministic_time
    whole = planning.load.num_ranks * planning.load.num_experts <= SOLVED_WHOLE
    by_counts = solve_cp_sat(planning, config.replace(deterministic_time=time / 2) if whole else config).layout
    start = _as_greedy(config).layout(planning)
    problem = CpSatProblem.of(planning, config.min_replicas, config.replicas_within)
    return least_seconds(problem, [start, by_counts], whole, time / 2)


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
    # Without a model Greedy counts tokens, as this does.
    start = _as_greedy(config).layout(replace(planning, model=None))
    problem = CpSatProblem.of(planning, config.min_replicas, config.replicas_within)
    bound, layout = _by_bounds(problem, start)
    time = config.deterministic_time
    if min_max_load(load, layout) > bound:
        layout, bound, spent = _less_busy(problem, layout, bound, time / 2)
        time -= spent
    inter_node_bound = 0
    if len(set(problem.node_R)) > 1:
        layout, inter_node_bound = _less_traffic(problem, layout, time)
    if problem.cost(layout) >= problem.cost(start):
        layout = start
    busiest, inter_node = problem.cost(layout)
    status: Literal["optimal", "balanced", "feasible"] = "feasible"
    if busiest == bound:
        status = "optimal" if inter_node == inter_node_bound else "balanced"
    return CpSatPlan(layout, bound, inter_node_bound, status)


def _by_bounds(problem: CpSatProblem, start: ExpertLayout) -> tuple[int, ExpertLayout]:
    """What counting alone proves of the busiest rank, and the better of ``start`` and a layout made from the proof."""
    bound, _ = greatest_bound(problem.tokens_E, problem.planning.slots_R, problem.domain_R, problem.min_replicas)
    high = min_max_load(problem.planning.load, start)
    if bound >= high or len(problem.tokens_E) > MOST_EXPERTS:
        return bound, start
    bound, components = least_by_components(problem.tokens_E, problem.usable_R, bound, high)
    if not problem.one_domain or problem.min_replicas > 1:
        return bound, start
    rows = fill_components(components, problem.tokens_E, problem.usable_R, bound)
    if bound == high or rows is None:
        return bound, start
    return bound, _relabelled(problem, problem.layout(filled_up(problem, rows)))


def _relabelled(problem: CpSatProblem, layout: ExpertLayout) -> ExpertLayout:
    """The same rows on ranks with equally many slots, where the most of their tokens are at home on the node.

    The layout itself where that is no better, for the split may answer with other tokens.
    """
    assigned_RE, node_R = problem.assigned(layout), np.asarray(problem.node_R)
    at_home_NR = np.minimum(problem.supply_NE[:, None], assigned_RE[None]).sum(axis=2)
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    assignment = SimpleLinearSumAssignment()
    for row, rank in np.ndindex(layout.num_ranks, layout.num_ranks):
        if problem.usable_R[row] == problem.usable_R[rank]:
            assignment.add_arc_with_cost(row, rank, -int(at_home_NR[node_R[rank], row]))
    status = assignment.solve()
    assert status == assignment.OPTIMAL, f"linear assignment ended with {status}"
    rows: list[Sequence[int]] = [()] * layout.num_ranks
    for row in range(layout.num_ranks):
        rows[assignment.right_mate(row)] = layout.experts_of(row)
    return min(layout, problem.layout(rows), key=problem.cost)


def _less_busy(
    problem: CpSatProblem, layout: ExpertLayout, bound: int, seconds: float
) -> tuple[ExpertLayout, int, float]:
    """A layout whose busiest rank has fewer tokens, if one is found; the bound; deterministic seconds spent."""
    busiest, spent, turn = min_max_load(problem.planning.load, layout), 0.0, 0
    while busiest > bound and spent < seconds and turn < MOST_TURNS:
        free, share = _freed(problem, layout, turn)
        answer = solve(problem, layout, free, (bound, busiest), "busiest", share * seconds)
        if len(free) == layout.num_ranks:
            bound = max(bound, answer.bound)
        if answer.layout is not None and (found := min_max_load(problem.planning.load, answer.layout)) < busiest:
            busiest, layout = found, answer.layout
        spent, turn = spent + answer.seconds, turn + 1
    return (_relabelled(problem, layout) if problem.one_domain else layout), bound, spent


def _less_traffic(problem: CpSatProblem, layout: ExpertLayout, seconds: float) -> tuple[ExpertLayout, int]:
    """A layout as good in the busiest rank with fewer tokens between nodes, if one is found; the bound on these."""
    (busiest, inter_node), bound, spent, turn = problem.cost(layout), 0, 0.0, 0
    while inter_node > bound and spent < seconds and turn < MOST_TURNS:
        free, share = _freed(problem, layout, turn)
        answer = solve(problem, layout, free, (busiest, busiest), "traffic", share * seconds)
        if len(free) == layout.num_ranks:
            bound = max(bound, answer.bound)
        if answer.layout is not None and (found := problem.cost(answer.layout)) < (busiest, inter_node):
            (busiest, inter_node), layout = found, answer.layout
        spent, turn = spent + answer.seconds, turn + 1
    return layout, bound


def _freed(problem: CpSatProblem, layout: ExpertLayout, turn: int) -> tuple[tuple[int, ...], float]:
    """Ranks to plan anew, and the part of the time for it.

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
