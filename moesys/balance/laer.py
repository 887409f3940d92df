"""LAER: the planner of LAER-MoE (arXiv 2602.11686), as its published code has it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import Field

from moesys.balance.even_split import EvenSplit
from moesys.balance.planning_problem import PlanningProblem, common_shares, layout_from_rows, share_key
from moesys.config import ClusterSpec
from moesys.config.member import Balance
from moesys.layout import ExpertLayout

# Both constants are the defaults of the published C++ planner (greedy_balancer.cpp): hidden size 4096 in bfloat16, and
# the time of one Mixtral-8x7B expert for one token on an A100, 6.08 ms a 4096 tokens.
BYTES_PER_TOKEN = 8192
SECONDS_PER_ASSIGNMENT = Fraction(1_484_375, 10**12)

# Dispatch and combine, forward and backward; forward, two of backward and one of recomputation.
PASSES_OF_COMMUNICATION = 4
PASSES_OF_COMPUTATION = 4


class Laer(Balance):
    """LAER-MoE's planner: candidate replica counts, placement that spreads over nodes, the cheaper one by its cost."""

    kind: Literal["laer"] = "laer"
    candidates: tuple[Literal["even", "proportional"], ...] = Field(("even", "proportional"), min_length=1)
    """Rules for the number of replicas, of which the cheaper result is used."""

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Places and scores each candidate's replica counts; returns the cheapest layout, the first one at equal cost.

        ``even`` gives every expert the same count and is a candidate only where experts divide the slots;
        ``proportional`` always is one, so it is the fall-back when no listed candidate can be used. Placement knows
        loads and nodes, not where tokens come from; two replicas of an expert may be on one rank. Unlike the
        original, any number of nodes, ranks a node and slots is planned for (it hangs below 8 ranks), and the score
        counts tokens exactly (it emits up to 0.2 % more than there are).
        """
        load, cluster, slots_R = problem.load, problem.cluster, problem.slots_R
        tokens_E = load.tokens_E.tolist()
        counts = []
        for candidate in self.candidates:
            if candidate == "proportional":
                counts.append(proportional_replicas(tokens_E, sum(slots_R), cluster.num_nodes))
            elif sum(slots_R) % load.num_experts == 0:
                counts.append([sum(slots_R) // load.num_experts] * load.num_experts)
        if not counts:
            counts.append(proportional_replicas(tokens_E, sum(slots_R), cluster.num_nodes))
        layouts = [_place(tokens_E, replicas_E, slots_R, cluster) for replicas_E in counts]
        if len(layouts) == 1:
            return layouts[0]
        return min(layouts, key=lambda layout: laer_seconds(problem.over(layout)))


def proportional_replicas(tokens_E: Sequence[int], num_slots: int, num_nodes: int) -> list[int]:
    """Returns the replicas of each expert, at least 1: to the most tokens a replica, in steps of a replica a node.

    Starts at one a node where that fits, else at one. An expert below one a node grows by one, others by ``num_nodes``
    at once; an expert that finds fewer slots left is retired, so that some slots may stay empty.
    """
    num_experts = len(tokens_E)
    start = num_nodes if num_nodes * num_experts <= num_slots else 1
    replicas_E = [start] * num_experts
    left = num_slots - start * num_experts
    heap = [(-share_key(tokens, start, num_slots), expert) for expert, tokens in enumerate(tokens_E)]
    heapq.heapify(heap)
    while left and heap:
        _, expert = heap[0]
        step = num_nodes if replicas_E[expert] >= num_nodes else 1
        if step > left:
            heapq.heappop(heap)
            continue
        replicas_E[expert] += step
        left -= step
        heapq.heapreplace(heap, (-share_key(tokens_E[expert], replicas_E[expert], num_slots), expert))
    return replicas_E


def _place(
    tokens_E: Sequence[int], replicas_E: Sequence[int], slots_R: tuple[int, ...], cluster: ClusterSpec
) -> ExpertLayout:
    """Places the heaviest replica first, onto the least loaded rank with a free slot.

    Only nodes with the fewest replicas of that expert are considered, if one of those has a free slot.
    """
    share_E = common_shares(tokens_E, replicas_E)
    rows: list[list[int]] = [[] for _ in slots_R]
    free_by_node: list[list[tuple[int, int]]] = [[] for _ in range(cluster.num_nodes)]
    for rank, node in enumerate(cluster.node_of_rank):
        if slots_R[rank]:
            free_by_node[node].append((0, rank))
    for expert in sorted(range(len(tokens_E)), key=lambda expert: -share_E[expert]):
        replicas_N = [0] * cluster.num_nodes
        for _ in range(replicas_E[expert]):
            fewest = min(replicas_N)
            free = [node for node in range(cluster.num_nodes) if free_by_node[node]]
            spread = [node for node in free if replicas_N[node] == fewest]
            node = min(spread or free, key=lambda node: free_by_node[node][0])
            tokens, rank = heapq.heappop(free_by_node[node])
            rows[rank].append(expert)
            replicas_N[node] += 1
            if len(rows[rank]) < slots_R[rank]:
                heapq.heappush(free_by_node[node], (tokens + share_E[expert], rank))
    return layout_from_rows(rows, slots_R, len(tokens_E))


def laer_seconds(problem: PlanningProblem) -> Fraction:
    """Returns LAER's cost of the layout in force, in seconds a layer: 4·Σ_i T_comm[i] + (3 + 1)·max_k T_comp[k].

    Communication is summed over all sources while computation takes the busiest rank, and every source is given its
    node's whole bandwidth: the original's objective, kept as it is. Exact, so that no rounding picks a layout.
    """
    cluster, plan = problem.cluster, EvenSplit().split(problem)
    source, _, destination, tokens = plan.entries.T
    inter_tokens = plan.inter_node_tokens(cluster.node_of_rank)
    intra_tokens = int(tokens[source != destination].sum()) - inter_tokens
    bytes_per_gb = 10**9
    communication = Fraction(BYTES_PER_TOKEN, bytes_per_gb) * (
        intra_tokens / Fraction(cluster.intra_node_gb_per_s) + inter_tokens / Fraction(cluster.inter_node_gb_per_s)
    )
    computation = SECONDS_PER_ASSIGNMENT * int(plan.tokens_R.max())
    return PASSES_OF_COMMUNICATION * communication + PASSES_OF_COMPUTATION * computation
