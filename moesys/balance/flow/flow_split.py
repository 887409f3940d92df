"""FlowSplit: the exact split. Least load of the busiest rank, then little traffic between nodes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moesys.balance.flow.max_load import min_max_flow, new_flow
from moesys.balance.flow.min_cost_push import min_cost_push
from moesys.balance.flow.step_cost import crosses_once, prices_of, split_cost
from moesys.balance.flow.token_routes import group_by_node, list_replicas, route_tokens
from moesys.balance.planning_problem import (
    PlanningProblem,
    blocks_of_nodes,
    levels_of,
    link_domains_of,
    nodes_of,
    tokens_by_node,
)
from moesys.compiled import borrowing, compiled
from moesys.config import ClusterSpec
from moesys.config.member import Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray, LoadMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from moesys.kernels.split.tables import SplitTables


class Assignment(NamedTuple):
    """Tokens of the replicas of a ``ReplicaTable`` and its ``NodeGroups``; all int64.

    ``tokens_P``: what each replica gets; ``here_G``: what a group's replicas get; ``supply_G``: what the sources on the
    group's node have for its expert; ``load_R``: tokens of each rank, of all experts.
    """

    tokens_P: IntArray
    here_G: IntArray
    supply_G: IntArray
    load_R: IntArray


@compiled
def local_first(tokens_RE, supply_NE, tokens_E, node_R, table, groups, turn):  # type: ignore[no-untyped-def]
    """Returns the ``Assignment`` in which tokens stay at their source where possible.

    A rank keeps its own tokens for experts that it holds. The node's replicas share the other tokens of their node
    evenly, and all replicas share the tokens of nodes without a replica. Remainders begin at replica ``turn``.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_replicas, num_groups = groups.group_P.size, groups.expert_G.size
    tokens_P, load_R = np.empty(num_replicas, np.int64), np.zeros(num_ranks, np.int64)
    here_G, supply_G = np.zeros(num_groups, np.int64), np.empty(num_groups, np.int64)
    for expert in range(num_experts):
        if groups.first_E[expert] == groups.first_E[expert + 1]:
            tokens_P[table.first_E[expert]] = tokens_E[expert]
            continue
        away = tokens_E[expert]
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            first, end = np.int64(groups.first_G[group]), np.int64(groups.end_G[group])
            left = supply_G[group] = supply_NE[node_R[table.rank_P[first]], expert]
            away -= left
            for replica in range(first, end):
                tokens_P[replica] = tokens_RE[table.rank_P[replica], expert]
                left -= tokens_P[replica]
            _share_evenly(left, first, end, turn, tokens_P)
        _share_evenly(away, table.first_E[expert], table.first_E[expert + 1], turn, tokens_P)
    for replica in range(num_replicas):
        if groups.group_P[replica] >= 0:
            here_G[groups.group_P[replica]] += tokens_P[replica]
        load_R[table.rank_P[replica]] += tokens_P[replica]
    return Assignment(tokens_P, here_G, supply_G, load_R)


@borrowing
def _share_evenly(tokens, first, end, turn, tokens_P):  # type: ignore[no-untyped-def]
    if not tokens:
        return
    each, left = tokens // (end - first), tokens % (end - first)
    for index in range(end - first):
        tokens_P[first + index] += each + ((index - turn) % (end - first) < left)


def min_cost_flow(load: LoadMatrix, layout: ExpertLayout, node_of_rank: tuple[int, ...], limit: int) -> IntArray:
    """Returns the tokens [R, E] of each expert for each rank, at most ``limit`` per rank: the plan with the fewest
    tokens between nodes, and among those the fewest that leave their rank. Some split must keep ``limit``.
    """
    holds_RE = layout.replicas_RE > 0
    assigned_RE = np.where(holds_RE, load.tokens_E, 0)
    shared = np.flatnonzero((holds_RE.sum(axis=0) > 1) & (load.tokens_E > 0))
    if not shared.size:
        return assigned_RE
    assigned_RE[:, shared] = 0
    room_R = limit - assigned_RE.sum(axis=1)
    assigned_RE[:, shared] = _cheapest_assignment(
        load.tokens_RE[:, shared], holds_RE[:, shared], room_R, np.asarray(node_of_rank)
    )
    return assigned_RE


def _cheapest_assignment(tokens_RE: IntArray, holds_RE: np.ndarray, room_R: IntArray, node_R: IntArray) -> IntArray:
    """Returns the tokens [R, E] of each expert for each rank, at most ``room_R`` per rank, for the least traffic.

    A minimum-cost flow over sources taken together by node. From (expert e, node n) tokens go

    - to a holder d on n: as many as source d itself has for nothing, more for 1 each (they leave their rank);
    - to the exchange of e, for more than all that could be saved inside nodes, and from it to any holder.

    Sources of a node are not distinguished, and yet the first tokens are d's own: ``route_tokens`` gives d its own
    tokens first.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_nodes = int(node_R[-1]) + 1
    supply_EN = np.zeros((num_experts, num_nodes), dtype=np.int64)
    np.add.at(supply_EN.T, node_R, tokens_RE)
    tokens_E = supply_EN.sum(axis=1)

    num_groups = num_experts * num_nodes
    first_rank, first_exchange = num_groups, num_groups + num_ranks
    sink = first_exchange + num_experts
    # a cycle through the residual graph meets a vertex once, so it saves less than this inside nodes
    between_nodes = sink + 1

    expert, rank = np.nonzero(holds_RE.T)
    group = expert * num_nodes + node_R[rank]
    own = tokens_RE[rank, expert]
    away = supply_EN[expert, node_R[rank]] - own
    arcs = [
        (group, first_rank + rank, own, 0),
        (group, first_rank + rank, away, 1),
        (first_rank + np.arange(num_ranks), np.full(num_ranks, sink), room_R, 0),
    ]
    if num_nodes > 1:
        groups = np.arange(num_groups)
        arcs.append((groups, first_exchange + groups // num_nodes, supply_EN.ravel(), between_nodes))
        arcs.append((first_exchange + expert, first_rank + rank, tokens_E[expert], 0))
    tail, head, capacity = (np.concatenate([arc[field] for arc in arcs]) for field in range(3))
    cost = np.concatenate([np.full(len(arc[0]), arc[3]) for arc in arcs])
    used = capacity > 0

    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    graph = SimpleMinCostFlow()
    numbers = graph.add_arcs_with_capacity_and_unit_cost(
        tail[used].astype(np.int32), head[used].astype(np.int32), capacity[used], cost[used]
    )
    graph.set_nodes_supplies(np.arange(num_groups, dtype=np.int32), supply_EN.ravel())
    graph.set_node_supply(sink, -int(tokens_E.sum()))
    status = graph.solve()
    assert status == SimpleMinCostFlow.OPTIMAL, f"minimum-cost flow ended with {status}"
    flow = np.zeros(len(tail), dtype=np.int64)
    flow[used] = graph.flows(numbers)

    assigned_RE = np.zeros((num_ranks, num_experts), dtype=np.int64)
    num_holders = len(expert)
    assigned_RE[rank, expert] = flow[:num_holders] + flow[num_holders : 2 * num_holders]
    if num_nodes > 1:
        assigned_RE[rank, expert] += flow[-num_holders:]
    return assigned_RE


NO_CAP = -1
# Limits on the busiest rank, over the least there is, that are tried where seconds choose, in percent.
LIMITS_PERCENT = (101, 102, 105, 110, 120, 140)


class FlowSplit(Split):
    """Exact: the least maximum load that the layout allows, then little traffic between nodes."""

    is_compiled: ClassVar[bool] = True

    kind: Literal["flow"] = "flow"
    traffic: Literal["fast", "exact"] = Field("fast", description="tokens between nodes: nearly or exactly the fewest")
    max_inter_node: Annotated[float, Field(ge=0, le=1)] | Literal["seconds"] | None = Field(
        None,
        description="largest share of routed tokens that may leave their node, at the price of balance; None: any; "
        "seconds: what is predicted to be fastest (CPU only)",
    )

    @property
    def on_device(self) -> bool:
        return self.traffic == "fast" and self.max_inter_node is None

    def device_split(
        self, tables: SplitTables, layout: ExpertLayout, cluster: ClusterSpec
    ) -> Callable[[Tensor, int], Tensor]:
        if self.traffic != "fast":
            raise ValueError(
                f"traffic={self.traffic!r} is solved on the host only; use traffic='fast', or ms.planning.split_tokens"
            )
        if self.max_inter_node is not None:
            raise ValueError(
                f"max_inter_node={self.max_inter_node} takes a search over limits, which runs on the host only; "
                "use max_inter_node=None, or ms.planning.split_tokens"
            )
        from moesys.kernels.split.flow import split

        return lambda tokens_RE, turn: split(tokens_RE, tables, turn).tokens_RP

    def split(self, problem: PlanningProblem) -> TokenPlan:
        """Returns, of all plans whose busiest rank has ``min_max_load``, one with few tokens between nodes; with
        ``traffic="exact"`` one with the fewest, and of those the fewest that leave their rank at all.

        ``max_inter_node`` caps the share of tokens between nodes: then the busiest rank has the least load with which
        the pushed tokens keep the cap, or, where no load does, reach the least traffic there is. ``"seconds"`` tries
        several limits on that load, from the least to none, and takes the one that costs a step the least
        (``step_cost``); raises ValueError where the model is not known. ``turn`` rotates remainders. Integers
        throughout: equal arguments give equal bytes.
        """
        load, layout, cluster, turn = problem.load, problem.layout_in_force, problem.cluster, problem.turn
        node_R = link_domains_of(cluster)
        level_LR = levels_of(cluster, nodes_of(cluster))
        if crosses_once(problem.overlap, cluster):
            level_LR = np.concatenate([level_LR, blocks_of_nodes(node_R)])
        if self.max_inter_node == "seconds":
            if problem.model is None:
                raise ValueError("max_inter_node='seconds' is of a layer's shape; give model, or use a share or None")
            prices = prices_of(problem.model, cluster, load.total, problem.overlap, problem.units_per_token)
            entries, limit = split_by_cost(load.tokens_RE, layout.expert_RS, node_R, level_LR, turn, prices)
        else:
            cap = NO_CAP if self.max_inter_node is None else int(Fraction(str(self.max_inter_node)) * load.total)
            entries, limit = split_fast(load.tokens_RE, layout.expert_RS, node_R, level_LR, turn, cap)
        if self.traffic == "exact":
            table = list_replicas(layout.expert_RS, load.num_experts)
            assigned_RE = min_cost_flow(load, layout, cluster.domain_of_rank, limit)
            entries = route_tokens(load.tokens_RE, assigned_RE[table.rank_P, table.expert_P], table, level_LR)
        return TokenPlan.by_construction(entries, load, layout)


@compiled
def split_fast(tokens_RE, expert_RS, node_R, level_LR, turn, cap):  # type: ignore[no-untyped-def]
    """Returns the rows of the plan, int64 [N, 4], and the limit on a rank's load that it keeps; ``cap``: the most
    tokens between nodes, or -1.
    """
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    # the mean is what can be hoped for, and with a good layout it is reached
    limit = -(-demand.tokens_E.sum() // table.holds_R.sum())
    tokens_P, crossing = _assign(demand, table, groups, turn, limit)
    if crossing < 0:
        limit = min_max_flow(demand.tokens_E, table, new_flow(table))
        tokens_P, crossing = _assign(demand, table, groups, turn, limit)
    if cap >= 0 and crossing > cap:
        # the least limit at which no more than the cap cross, or than must at any
        highest = demand.tokens_E.sum()
        cap = max(cap, _assign(demand, table, groups, turn, highest)[1])
        limit = _least_limit(demand, table, groups, turn, cap, limit - 1, highest)
        tokens_P, _ = _assign(demand, table, groups, turn, limit)
    return route_tokens(tokens_RE, tokens_P, table, level_LR), limit


@compiled
def split_by_cost(tokens_RE, expert_RS, node_R, level_LR, turn, prices):  # type: ignore[no-untyped-def]
    """Returns the rows of the cheapest plan of several limits, int64 [N, 4], and its limit on a rank's load."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    supply_NE, tokens_E = demand.supply_NE, demand.tokens_E
    lowest, highest = min_max_flow(tokens_E, table, new_flow(table)), tokens_E.sum()
    best_P, traffic = _assign(demand, table, groups, turn, lowest)
    limit = lowest
    least, _ = split_cost(tokens_RE, supply_NE, node_R, table, best_P, prices)
    free_P, least_traffic = _assign(demand, table, groups, turn, highest)
    cost, least_links = split_cost(tokens_RE, supply_NE, node_R, table, free_P, prices)
    if cost < least:
        limit, best_P, least = highest, free_P, cost
    # between these the least traffic is reached
    below, above = lowest, lowest if traffic <= least_traffic else highest
    for percent in LIMITS_PERCENT:
        higher = lowest * percent // 100
        # about what links cost at least, and that rank
        if higher * prices.row[0] + least_links >= least:
            break
        tokens_P, traffic = _assign(demand, table, groups, turn, higher)
        if traffic > least_traffic:
            below = higher
        else:
            above = min(above, higher)
        cost, _ = split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices)
        if cost < least:
            limit, best_P, least = higher, tokens_P, cost
    # there a rank has all that the limit allows, and a node sends at least its share of the traffic
    least_there = 2 * (least_traffic // prices.beside_22C.shape[2]) * prices.nics[0]
    if below < above and (below + 1) * prices.row[0] + least_there < least:
        higher = _least_limit(demand, table, groups, turn, least_traffic, below, above)
        tokens_P, _ = _assign(demand, table, groups, turn, higher)
        cost, _ = split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices)
        if cost < least:
            limit, best_P = higher, tokens_P
    return route_tokens(tokens_RE, best_P, table, level_LR), limit


@compiled
def split_costs(tokens_KRE, expert_RS, node_R, prices, most):  # type: ignore[no-untyped-def]
    """Returns the sum over loads [K, R, E] of what a step costs: at the least load of the busiest rank, or at the least
    traffic, whichever is less. Ends where it passes ``most``.
    """
    total = np.int64(0)
    for load in range(tokens_KRE.shape[0]):
        demand, table, groups = _prepare(tokens_KRE[load], expert_RS, node_R)
        tokens_RE, supply_NE, tokens_E, _ = demand
        assigned = local_first(tokens_RE, supply_NE, tokens_E, node_R, table, groups, np.int64(0))
        cost, links = split_cost(tokens_RE, supply_NE, node_R, table, assigned.tokens_P, prices)
        lowest = min_max_flow(tokens_E, table, new_flow(table))
        if lowest * prices.row[0] + links < cost:
            min_cost_push(table, groups, assigned, lowest)
            cost = min(cost, split_cost(tokens_RE, supply_NE, node_R, table, assigned.tokens_P, prices)[0])
        total += cost
        if total > most:
            break
    return total


@compiled
def rows_at_least_load(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens of each rank and expert, int64 [R, E], at the least load of the busiest rank."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    limit = min_max_flow(demand.tokens_E, table, new_flow(table))
    tokens_P, _ = _assign(demand, table, groups, np.int64(0), limit)
    rows_RE = np.zeros(tokens_RE.shape, np.int64)
    for replica in range(tokens_P.size):
        rows_RE[table.rank_P[replica], table.expert_P[replica]] = tokens_P[replica]
    return rows_RE


@compiled
def least_crossing(tokens_RE, expert_RS, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens between nodes at the least load of the busiest rank."""
    demand, table, groups = _prepare(tokens_RE, expert_RS, node_R)
    limit = min_max_flow(demand.tokens_E, table, new_flow(table))
    return _assign(demand, table, groups, np.int64(0), limit)[1]


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
def _least_limit(demand, table, groups, turn, cap, low, high):  # type: ignore[no-untyped-def]
    """Bisects for the least limit at which no more than ``cap`` tokens cross; at ``low`` more do, at ``high`` not."""
    while high - low > 1:
        middle = (low + high) // 2
        if _assign(demand, table, groups, turn, middle)[1] <= cap:
            high = middle
        else:
            low = middle
    return high
