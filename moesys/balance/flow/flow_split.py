"""FlowSplit: the exact split. Least load of the busiest rank, then little traffic between nodes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from moesys.balance.flow.holders import list_holders
from moesys.balance.flow.local_first import share_out
from moesys.balance.flow.min_cost_flow import cheapest_quotas
from moesys.balance.flow.min_cost_push import push_down
from moesys.balance.flow.min_max_flow import least_max, new_level
from moesys.balance.flow.quotas import fill_quotas
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.topology import levels_of, nodes_of, tokens_by_node
from moesys.compiled import compiled
from moesys.config import FlowSplit
from moesys.layout import TokenPlan

NO_CAP = -1


def flow_split(problem: PlanningProblem, config: FlowSplit) -> TokenPlan:
    """Returns, of all plans whose busiest rank has ``min_max_load``, one with few tokens between nodes; with
    ``traffic="exact"`` one with the fewest, and of those the fewest that leave their rank at all.

    ``max_inter_node`` caps the share of tokens between nodes: then the busiest rank has the least load with which the
    pushed quotas keep the cap, or, where no load does, reach the least traffic there is. ``turn`` rotates remainders.
    Integers throughout: equal arguments give equal bytes.
    """
    load, layout, cluster, turn = problem.load, problem.layout_in_force, problem.cluster, problem.turn
    cap = NO_CAP if config.max_inter_node is None else int(Fraction(str(config.max_inter_node)) * load.total)
    level_LR = levels_of(cluster)
    node_R = nodes_of(cluster)
    if config.traffic == "fast":
        entries = split_fast(load.tokens_RE, layout.expert_RS, node_R, level_LR, turn, cap)
        return TokenPlan.by_construction(entries, load, layout)
    limit = least_limit(load.tokens_RE, layout.expert_RS, node_R, turn, cap)
    holders = list_holders(layout.expert_RS, load.num_experts)
    quota_RE = cheapest_quotas(load, layout, cluster.node_of_rank, limit)
    tokens_P = quota_RE[holders.rank_P, holders.expert_P]
    return TokenPlan.by_construction(fill_quotas(load.tokens_RE, tokens_P, holders, level_LR), load, layout)


@compiled
def split_fast(tokens_RE, expert_RS, node_R, level_LR, turn, cap):  # type: ignore[no-untyped-def]
    """Rows of the plan, int64 [N, 4]; ``cap``: of its tokens between nodes, or -1."""
    holders = list_holders(expert_RS, tokens_RE.shape[1])
    supply_NE, tokens_E = tokens_by_node(tokens_RE, node_R)
    # the mean is what can be hoped for, and with a good layout it is reached
    limit = -(-tokens_E.sum() // holders.holds_R.sum())
    tokens_P, crossing = _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, limit)
    if crossing < 0:
        limit = least_max(tokens_E, holders, new_level(holders))
        tokens_P, crossing = _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, limit)
    if cap >= 0 and crossing > cap:
        limit = _relaxed_limit(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, cap, limit)
        tokens_P, _ = _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, limit)
    return fill_quotas(tokens_RE, tokens_P, holders, level_LR)


@compiled
def least_crossing(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    """Tokens between nodes at the least load of the busiest rank."""
    holders = list_holders(expert_RS, tokens_RE.shape[1])
    supply_NE, tokens_E = tokens_by_node(tokens_RE, node_R)
    limit = least_max(tokens_E, holders, new_level(holders))
    return _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, np.int64(0), limit)[1]


@compiled
def least_limit(tokens_RE, expert_RS, node_R, turn, cap):  # type: ignore[no-untyped-def]
    """The limit on a rank's load that ``split_fast`` keeps."""
    holders = list_holders(expert_RS, tokens_RE.shape[1])
    supply_NE, tokens_E = tokens_by_node(tokens_RE, node_R)
    limit = least_max(tokens_E, holders, new_level(holders))
    return limit if cap < 0 else _relaxed_limit(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, cap, limit)


@compiled
def _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, limit):  # type: ignore[no-untyped-def]
    """Tokens of each replica, int64 [P], so that no rank has more than ``limit``, and how many cross nodes; -1 of those
    where no split keeps the limit.
    """
    shared = share_out(tokens_RE, supply_NE, tokens_E, node_R, holders, turn)
    tokens_P = np.zeros(holders.rank_P.size, np.int64)
    if push_down(shared, limit, holders.holds_R) < 0:
        return tokens_P, -1
    crossing = 0
    for expert in range(tokens_E.size):
        first = holders.first_E[expert]
        if holders.first_E[expert + 1] - first == 1:
            tokens_P[first] = tokens_E[expert]
            crossing += tokens_E[expert] - supply_NE[node_R[holders.rank_P[first]], expert]
    for index in range(shared.replica_Q.size):
        tokens_P[shared.replica_Q[index]] = shared.tokens_Q[index]
    for group in range(shared.here_G.size):
        crossing += max(shared.here_G[group] - shared.supply_G[group], 0)
    return tokens_P, crossing


@compiled
def _relaxed_limit(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, cap, lowest):  # type: ignore[no-untyped-def]
    """The least limit, found by bisection, at which no more than ``cap`` tokens cross, or than must at any limit."""
    highest = tokens_E.sum()
    cap = max(cap, _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, highest)[1])
    # lowest - 1 is too low, highest is enough
    low, high = lowest - 1, highest
    while high - low > 1:
        middle = (low + high) // 2
        if _quotas(tokens_RE, supply_NE, tokens_E, node_R, holders, turn, middle)[1] <= cap:
            high = middle
        else:
            low = middle
    return high
