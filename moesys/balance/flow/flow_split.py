"""FlowSplit: the exact split. Least load of the busiest rank, then little traffic between nodes."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from moesys.balance.flow.local_first import local_first
from moesys.balance.flow.min_cost_flow import min_cost_flow
from moesys.balance.flow.min_cost_push import min_cost_push
from moesys.balance.flow.min_max_flow import min_max_flow, new_flow
from moesys.balance.flow.replica_table import group_by_node, list_replicas
from moesys.balance.flow.token_routes import route_tokens
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.topology import levels_of, link_domains_of, nodes_of, tokens_by_node
from moesys.compiled import compiled
from moesys.config import FlowSplit
from moesys.layout import TokenPlan
from moesys.load import IntArray

NO_CAP = -1


def flow_split(problem: PlanningProblem, config: FlowSplit) -> TokenPlan:
    """Returns, of all plans whose busiest rank has ``min_max_load``, one with few tokens between nodes; with
    ``traffic="exact"`` one with the fewest, and of those the fewest that leave their rank at all.

    ``max_inter_node`` caps the share of tokens between nodes: then the busiest rank has the least load with which the
    pushed tokens keep the cap, or, where no load does, reach the least traffic there is. ``turn`` rotates remainders.
    Integers throughout: equal arguments give equal bytes.
    """
    load, layout, cluster, turn = problem.load, problem.layout_in_force, problem.cluster, problem.turn
    cap = NO_CAP if config.max_inter_node is None else int(Fraction(str(config.max_inter_node)) * load.total)
    node_R = link_domains_of(cluster)
    level_LR = levels_of(cluster, nodes_of(cluster))
    if config.traffic == "fast":
        entries = split_fast(load.tokens_RE, layout.expert_RS, node_R, level_LR, turn, cap)
        return TokenPlan.by_construction(entries, load, layout)
    limit = least_limit(load.tokens_RE, layout.expert_RS, node_R, turn, cap)
    table = list_replicas(layout.expert_RS, load.num_experts)
    assigned_RE = min_cost_flow(load, layout, cluster.domain_of_rank, limit)
    tokens_P = assigned_RE[table.rank_P, table.expert_P]
    return TokenPlan.by_construction(route_tokens(load.tokens_RE, tokens_P, table, level_LR), load, layout)


@compiled
def split_fast(tokens_RE, expert_RS, node_R, level_LR, turn, cap):  # type: ignore[no-untyped-def]
    """Returns the rows of the plan, int64 [N, 4]; ``cap``: of its tokens between nodes, or -1."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    # the mean is what can be hoped for, and with a good layout it is reached
    limit = -(-demand.tokens_E.sum() // table.holds_R.sum())
    tokens_P, crossing = _assign(demand, table, groups, turn, limit)
    if crossing < 0:
        limit = min_max_flow(demand.tokens_E, table, new_flow(table))
        tokens_P, crossing = _assign(demand, table, groups, turn, limit)
    if cap >= 0 and crossing > cap:
        limit = _relaxed_limit(demand, table, groups, turn, cap, limit)
        tokens_P, _ = _assign(demand, table, groups, turn, limit)
    return route_tokens(tokens_RE, tokens_P, table, level_LR)


@compiled
def least_crossing(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens between nodes at the least load of the busiest rank."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    limit = min_max_flow(demand.tokens_E, table, new_flow(table))
    return _assign(demand, table, groups, np.int64(0), limit)[1]


@compiled
def busiest_node_crossing(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens that leave or enter the busiest node, whichever are more, at the least load of the busiest
    rank.
    """
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    limit = min_max_flow(demand.tokens_E, table, new_flow(table))
    tokens_P, _ = _assign(demand, table, groups, np.int64(0), limit)
    here_NE = np.zeros(demand.supply_NE.shape, np.int64)
    for replica in range(tokens_P.size):
        here_NE[node_R[table.rank_P[replica]], table.expert_P[replica]] += tokens_P[replica]
    most = np.int64(0)
    for node in range(here_NE.shape[0]):
        more_E = here_NE[node] - demand.supply_NE[node]
        most = max(most, np.maximum(more_E, 0).sum(), np.maximum(-more_E, 0).sum())
    return most


@compiled
def least_limit(tokens_RE, expert_RS, node_R, turn, cap):  # type: ignore[no-untyped-def]
    """Returns the limit on a rank's load that ``split_fast`` keeps."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    limit = min_max_flow(demand.tokens_E, table, new_flow(table))
    return limit if cap < 0 else _relaxed_limit(demand, table, groups, turn, cap, limit)


class Demand(NamedTuple):
    """What is to be split; all int64: tokens by source ``tokens_RE``, by source's node ``supply_NE``, and ``tokens_E``;
    the node of each rank, ``node_R``.
    """

    tokens_RE: IntArray
    supply_NE: IntArray
    tokens_E: IntArray
    node_R: IntArray


@compiled
def _prepare(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    supply_NE, tokens_E = tokens_by_node(tokens_RE, node_R)
    table = list_replicas(expert_RS, tokens_E.size)
    return Demand(tokens_RE, supply_NE, tokens_E, node_R), table, group_by_node(table, node_R)


@compiled
def _assign(demand, table, groups, turn, limit):  # type: ignore[no-untyped-def]
    """Returns the tokens of each replica, int64 [P], so that no rank has more than ``limit``, and how many cross nodes;
    -1 of those where no split keeps the limit.
    """
    tokens_RE, supply_NE, tokens_E, node_R = demand
    assigned = local_first(tokens_RE, supply_NE, tokens_E, node_R, table, groups, turn)
    if min_cost_push(table, groups, assigned, limit) < 0:
        return assigned.tokens_P, -1
    crossing = np.maximum(assigned.here_G - assigned.supply_G, 0).sum()
    for expert in range(tokens_E.size):
        if groups.first_E[expert] == groups.first_E[expert + 1]:
            crossing += tokens_E[expert] - supply_NE[node_R[table.rank_P[table.first_E[expert]]], expert]
    return assigned.tokens_P, crossing


@compiled
def _relaxed_limit(demand, table, groups, turn, cap, lowest):  # type: ignore[no-untyped-def]
    """Returns the least limit, found by bisection, at which no more than ``cap`` tokens cross, or than must at any."""
    highest = demand.tokens_E.sum()
    cap = max(cap, _assign(demand, table, groups, turn, highest)[1])
    # lowest - 1 is too low, highest is enough
    low, high = lowest - 1, highest
    while high - low > 1:
        middle = (low + high) // 2
        if _assign(demand, table, groups, turn, middle)[1] <= cap:
            high = middle
        else:
            low = middle
    return high
