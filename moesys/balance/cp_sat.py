"""CpSat: replicas, placement, split and traffic at once, by OR-Tools CP-SAT, begun from Greedy's layout.

The busiest rank comes first, the tokens between nodes second. Small instances are solved as a whole and come with
bounds; larger ones are improved a few ranks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Literal

import numpy as np
from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

from moesys.balance.certificate import domains_of, greatest_bound
from moesys.balance.components import MOST_EXPERTS, fill_components, least_by_components
from moesys.balance.greedy import greedy_layout
from moesys.balance.max_load import min_max_load, tight_set
from moesys.balance.replicas import layout_from_rows, share_key, usable_slots
from moesys.balance.splits import split_tokens
from moesys.config import ClusterSpec, CpSat, FlowSplit, Greedy
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

Rows = Sequence[Sequence[int]]

# ranks × experts up to which all ranks are planned at once, up to which planning some of them anew still helps, and
# of those that are
SOLVED_WHOLE = 256
LARGEST_INSTANCE = 4096
FREED_AT_ONCE = 64
# turns that would spend all the time, and turns at most, for many end early; an odd number that mixes their ranks
TURNS = 16
MOST_TURNS = 64
MIXER = 0x9E3779B1
RANDOM_SEED = 1
# CP-SAT adds in int64, with room for sums of a few times all tokens
MOST_TOKENS = 1 << 50
# experts that tell equal ranks apart; their weights are powers of two
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


def cp_sat_layout(
    load: LoadMatrix, cluster: ClusterSpec, slots_R: tuple[int, ...], config: CpSat, previous: ExpertLayout | None
) -> ExpertLayout:
    """The layout of ``solve_cp_sat``."""
    return solve_cp_sat(load, cluster, slots_R, config, previous).layout


def solve_cp_sat(
    load: LoadMatrix, cluster: ClusterSpec, slots_R: tuple[int, ...], config: CpSat, previous: ExpertLayout | None
) -> CpSatPlan:
    """The layout with the least ``min_max_load``, then the fewest tokens between nodes, that is found in the time.

    Greedy's, unless one is better by that order. With y[r, e], whether rank r holds expert e, x[r, e] of its tokens,
    s[n, e] the tokens of e whose sources are on node n:

        minimise the busiest rank's load, then  Σ max(0, x[n, e] - s[n, e]),
        with  Σ_r x[r, e] = tokens of e,  x[r, e] <= tokens of e · y[r, e],  Σ_e y[r, e] <= slots of r,
        Σ_r y[r, e] >= replicas of e at least, and y[r, e] inside one domain.

    One worker, fixed seeds and a limit in deterministic seconds, which both objectives share, give the same layout in
    every run. Raises ValueError where ranks × experts exceed 4096 or tokens 2^50.
    """
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
    start = _greedy(load, cluster, slots_R, config, previous)
    problem = _Problem.of(load, cluster, slots_R, config)
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


def _greedy(
    load: LoadMatrix, cluster: ClusterSpec, slots_R: tuple[int, ...], config: CpSat, previous: ExpertLayout | None
) -> ExpertLayout:
    same = Greedy(min_replicas=config.min_replicas, replicas_within=config.replicas_within)
    return greedy_layout(load, cluster, slots_R, same, previous)


@dataclass(frozen=True)
class _Problem:
    load: LoadMatrix
    cluster: ClusterSpec
    slots_R: tuple[int, ...]
    usable_R: list[int]
    domain_R: tuple[int, ...]
    min_replicas: int
    tokens_E: list[int]
    supply_NE: IntArray

    @classmethod
    def of(cls, load: LoadMatrix, cluster: ClusterSpec, slots_R: tuple[int, ...], config: CpSat) -> _Problem:
        supply_NE = np.zeros((cluster.num_nodes, load.num_experts), dtype=np.int64)
        np.add.at(supply_NE, np.asarray(cluster.node_of_rank), load.tokens_RE)
        return cls(
            load=load,
            cluster=cluster,
            slots_R=slots_R,
            usable_R=usable_slots(slots_R, load.num_experts),
            domain_R=domains_of(cluster, config.replicas_within),
            min_replicas=config.min_replicas,
            tokens_E=load.tokens_E.tolist(),
            supply_NE=supply_NE,
        )

    @property
    def node_R(self) -> tuple[int, ...]:
        return self.cluster.node_of_rank

    @property
    def one_domain(self) -> bool:
        return len(set(self.domain_R)) == 1

    def quotas(self, layout: ExpertLayout) -> IntArray:
        """Tokens [R, E] that each rank computes of each expert under the exact split."""
        plan = split_tokens(self.load, layout, self.cluster, FlowSplit(traffic="exact"))
        quota_RE = np.zeros_like(self.load.tokens_RE)
        np.add.at(quota_RE, (plan.entries[:, 2], plan.entries[:, 1]), plan.entries[:, 3])
        return quota_RE

    def inter_node(self, quota_RE: IntArray) -> int:
        """Tokens between nodes: what a node computes of an expert beyond what its own sources have."""
        quota_NE = np.zeros_like(self.supply_NE)
        np.add.at(quota_NE, np.asarray(self.node_R), quota_RE)
        return int(np.maximum(quota_NE - self.supply_NE, 0).sum())

    def cost(self, layout: ExpertLayout) -> tuple[int, int]:
        """What is minimised: tokens of the busiest rank, then tokens between nodes."""
        quota_RE = self.quotas(layout)
        return int(quota_RE.sum(axis=1).max()), self.inter_node(quota_RE)

    def layout(self, rows: Rows) -> ExpertLayout:
        return layout_from_rows(rows, self.slots_R, len(self.tokens_E))


def _by_bounds(problem: _Problem, start: ExpertLayout) -> tuple[int, ExpertLayout]:
    """What counting alone proves of the busiest rank, and the better of ``start`` and a layout made from the proof."""
    bound, _ = greatest_bound(problem.tokens_E, problem.slots_R, problem.domain_R, problem.min_replicas)
    high = min_max_load(problem.load, start)
    if bound >= high or len(problem.tokens_E) > MOST_EXPERTS:
        return bound, start
    bound, components = least_by_components(problem.tokens_E, problem.usable_R, bound, high)
    if not problem.one_domain or problem.min_replicas > 1:
        return bound, start
    rows = fill_components(components, problem.tokens_E, problem.usable_R, bound)
    if bound == high or rows is None:
        return bound, start
    return bound, _relabelled(problem, problem.layout(_filled_up(problem, rows)))


def _filled_up(problem: _Problem, rows: Rows) -> list[list[int]]:
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


def _relabelled(problem: _Problem, layout: ExpertLayout) -> ExpertLayout:
    """The same rows on ranks with equally many slots, where the most of their tokens are at home on the node.

    The layout itself where that is no better, for the split may answer with other tokens.
    """
    quota_RE, node_R = problem.quotas(layout), np.asarray(problem.node_R)
    at_home_NR = np.minimum(problem.supply_NE[:, None], quota_RE[None]).sum(axis=2)
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


def _less_busy(problem: _Problem, layout: ExpertLayout, bound: int, seconds: float) -> tuple[ExpertLayout, int, float]:
    """A layout whose busiest rank has fewer tokens, if one is found; the bound; deterministic seconds spent."""
    busiest, spent, turn = min_max_load(problem.load, layout), 0.0, 0
    while busiest > bound and spent < seconds and turn < MOST_TURNS:
        free, share = _freed(problem, layout, turn)
        answer = _solve(problem, layout, free, (bound, busiest), False, share * seconds)
        if len(free) == layout.num_ranks:
            bound = max(bound, answer.bound)
        if answer.layout is not None and (found := min_max_load(problem.load, answer.layout)) < busiest:
            busiest, layout = found, answer.layout
        spent, turn = spent + answer.seconds, turn + 1
    return (_relabelled(problem, layout) if problem.one_domain else layout), bound, spent


def _less_traffic(problem: _Problem, layout: ExpertLayout, seconds: float) -> tuple[ExpertLayout, int]:
    """A layout as good in the busiest rank with fewer tokens between nodes, if one is found; the bound on these."""
    (busiest, inter_node), bound, spent, turn = problem.cost(layout), 0, 0.0, 0
    while inter_node > bound and spent < seconds and turn < MOST_TURNS:
        free, share = _freed(problem, layout, turn)
        answer = _solve(problem, layout, free, (busiest, busiest), True, share * seconds)
        if len(free) == layout.num_ranks:
            bound = max(bound, answer.bound)
        if answer.layout is not None and (found := problem.cost(answer.layout)) < (busiest, inter_node):
            (busiest, inter_node), layout = found, answer.layout
        spent, turn = spent + answer.seconds, turn + 1
    return layout, bound


def _freed(problem: _Problem, layout: ExpertLayout, turn: int) -> tuple[tuple[int, ...], float]:
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
    tight = set(tight_set(problem.load, layout).ranks)
    picks = [*[rank for rank in mixed if rank in tight][: size // 2], *mixed]
    if turn % 2 and not problem.one_domain:
        shared_RR = layout.replicas_RE @ layout.replicas_RE.T
        np.fill_diagonal(shared_RR, -1)
        picks = [rank for pick in picks for rank in (pick, int(shared_RR[pick].argmax()))]
        size = max(size, 4)
    return tuple(sorted(list(dict.fromkeys(picks))[:size])), 1 / TURNS


@dataclass(frozen=True)
class _Answer:
    """What a solve found, None without a solution; the bound of its objective; deterministic seconds it took."""

    layout: ExpertLayout | None
    bound: int
    seconds: float


def _solve(
    problem: _Problem,
    layout: ExpertLayout,
    free: tuple[int, ...],
    limits: tuple[int, int],
    least_traffic: bool,
    seconds: float,
) -> _Answer:
    """Plans the ``free`` ranks anew; the others keep their experts, and all ranks share the tokens anew.

    Minimises the busiest rank's tokens, which lie in ``limits``, or within the same limits the tokens between nodes.
    Free ranks may hold what any of them holds now.
    """
    # imported here because it brings pandas along, which no other planner needs
    from ortools.sat.python import cp_model

    tokens_E, high = problem.tokens_E, limits[1]
    whole = len(free) == layout.num_ranks
    exchangeable = _exchangeable(problem, least_traffic) if whole else []
    hint_rows, hint_quota_RE = _in_order(problem, layout, exchangeable)
    movable = range(len(tokens_E)) if whole else sorted({expert for rank in free for expert in hint_rows[rank]})
    model = cp_model.CpModel()
    holds: dict[tuple[int, int], IntVar] = {}
    tokens: dict[tuple[int, int], IntVar] = {}
    for rank, row in enumerate(hint_rows):
        for expert in movable if rank in free else row:
            most = min(tokens_E[expert], high)
            tokens[rank, expert] = model.new_int_var(0, most, f"x[{rank},{expert}]")
            model.add_hint(tokens[rank, expert], int(hint_quota_RE[rank, expert]))
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
    model.minimize(_imports(model, problem, tokens) if least_traffic else busiest)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = RANDOM_SEED
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _Answer(None, 0, spent)
    # a whole number, held exactly: tokens are at most 2^50
    bound = int(solver.best_objective_bound)
    rows = [
        [expert for expert in movable if solver.boolean_value(holds[rank, expert])] if rank in free else row
        for rank, row in enumerate(hint_rows)
    ]
    return _Answer(problem.layout(_filled_up(problem, rows)), bound, spent)


def _keep_inside_one_domain(
    model: CpModel, problem: _Problem, holds_by_rank: dict[int, IntVar], kept: Sequence[int]
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


def _imports(model: CpModel, problem: _Problem, tokens: dict[tuple[int, int], IntVar]) -> LinearExprT:
    """Tokens between nodes: for each node and expert, what its ranks compute beyond what its sources have."""
    imports = []
    for (node, expert), supply in np.ndenumerate(problem.supply_NE):
        computed = [tokens[rank, e] for rank, e in tokens if e == expert and problem.node_R[rank] == node]
        if computed and supply < problem.tokens_E[expert]:
            imports.append(model.new_int_var(0, problem.tokens_E[expert] - int(supply), f"i[{node},{expert}]"))
            model.add(imports[-1] >= sum(computed) - int(supply))
    return sum(imports)


def _exchangeable(problem: _Problem, least_traffic: bool) -> list[list[int]]:
    """Ranks that could change places in any solution: equal slots and domain, and for the traffic one node."""
    classes: dict[tuple[int, int, int], list[int]] = {}
    for rank, usable in enumerate(problem.usable_R):
        node = problem.node_R[rank] if least_traffic else 0
        classes.setdefault((usable, problem.domain_R[rank], node), []).append(rank)
    return list(classes.values())


def _codes(tokens_E: Sequence[int]) -> dict[int, int]:
    """Weights of the heaviest experts, whose sum tells the ranks that hold them apart."""
    heaviest = sorted(range(len(tokens_E)), key=lambda expert: (-tokens_E[expert], expert))[:SYMMETRY_EXPERTS]
    return {expert: 1 << (SYMMETRY_EXPERTS - place) for place, expert in enumerate(heaviest)}


def _order(
    model: CpModel, problem: _Problem, holds: dict[tuple[int, int], IntVar], exchangeable: Sequence[Sequence[int]]
) -> None:
    """Of solutions that differ by an exchange of ranks, keeps those with codes in falling order."""
    codes = _codes(problem.tokens_E)
    for ranks in exchangeable:
        for before, after in pairwise(ranks):
            model.add(sum(code * (holds[before, expert] - holds[after, expert]) for expert, code in codes.items()) >= 0)


def _in_order(
    problem: _Problem, layout: ExpertLayout, exchangeable: Sequence[Sequence[int]]
) -> tuple[list[Sequence[int]], IntArray]:
    """Rows and quotas [R, E] of a layout, ranks exchanged so that ``_order`` keeps it."""
    quota_RE, codes = problem.quotas(layout), _codes(problem.tokens_E)
    source_R = list(range(layout.num_ranks))
    for ranks in exchangeable:
        by_code = sorted(ranks, key=lambda rank: -sum(codes.get(expert, 0) for expert in layout.experts_of(rank)))
        for rank, source in zip(ranks, by_code, strict=True):
            source_R[rank] = source
    return [layout.experts_of(source) for source in source_R], quota_RE[source_R]
