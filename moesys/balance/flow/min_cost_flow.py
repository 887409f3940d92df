"""The cheapest tokens of replicas under a limit on loads, by minimum-cost flow (OR-Tools): exact, and far slower."""

from __future__ import annotations

import numpy as np

from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix


def min_cost_flow(load: LoadMatrix, layout: ExpertLayout, node_of_rank: tuple[int, ...], limit: int) -> IntArray:
    """Tokens [R, E] of each expert for each rank, at most ``limit`` a rank: the fewest between nodes, and of those the
    fewest that leave their rank. ``limit`` must be one that some split keeps.
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
    """Tokens [R, E] of each expert for each rank, at most ``room_R`` a rank, for the least traffic.

    A minimum-cost flow over sources taken together by node. From (expert e, node n) tokens go

    - to a holder d on n: as many as source d itself has for nothing, more for 1 each (they leave their rank);
    - to the exchange of e, for more than all that could be saved inside nodes, and from it to any holder.

    That the first tokens are d's own is exact although sources are not told apart: ``route_tokens`` gives d its own
    first.
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
