"""EPLB: DeepSeek's expert-parallel load balancer, its global and its hierarchical form."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from moesys.balance.planning_problem import PlanningProblem, common_shares, layout_from_rows, share_key
from moesys.config import ClusterSpec
from moesys.config.member import Balance
from moesys.layout import ExpertLayout


class Eplb(Balance):
    """DeepSeek's EPLB: replicate the heaviest expert per replica, then pack the heaviest first.

    ``hierarchical``: groups of experts are packed to nodes first, and an expert's replicas stay inside one node.
    """

    kind: Literal["eplb"] = "eplb"
    num_groups: int = Field(1, ge=1)
    """Groups of consecutive experts; hierarchical only, a multiple of nodes."""
    hierarchical: bool = Field(False, description="groups to nodes, replicas inside a node, then ranks")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_groups > 1 and not self.hierarchical:
            raise ValueError(
                f"num_groups={self.num_groups} means nothing to EPLB's global form; "
                "use hierarchical=True or num_groups=1"
            )
        return self

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Replicates the expert with the most tokens a replica until the slots are used, then packs the heaviest
        replica first onto the least loaded rank with a free slot.

        ``hierarchical`` first packs the ``num_groups`` groups of consecutive experts onto nodes, heaviest group first,
        equally many a node; then it replicates and packs inside each node as if there were no other.

        The counts of replicas make the heaviest replica as light as it can be; the packing is a heuristic. Where tokens
        come from is ignored, and two replicas of an expert may be on one rank: so does the original
        (https://github.com/deepseek-ai/EPLB, rebalance_experts). It needs equal slots and floating point; here the
        global form takes any slots, and shares are compared exactly, ties by lowest index.

        Raises ValueError where experts, groups, nodes and slots do not divide as the hierarchical form needs it.
        """
        load, cluster, slots_R = problem.load, problem.cluster, problem.slots_R
        tokens_E = load.tokens_E.tolist()
        if not self.hierarchical:
            return layout_from_rows(_replicated_and_packed(tokens_E, slots_R), slots_R, load.num_experts)
        _check_hierarchy(load.num_experts, cluster, slots_R, self.num_groups)
        group_size, ranks_a_node = load.num_experts // self.num_groups, cluster.node_sizes[0]
        tokens_G = [sum(tokens_E[first : first + group_size]) for first in range(0, load.num_experts, group_size)]
        groups_a_node = self.num_groups // cluster.num_nodes
        rows: list[list[int]] = []
        for groups in packed(tokens_G, [groups_a_node] * cluster.num_nodes):
            experts = [expert for group in groups for expert in range(group * group_size, (group + 1) * group_size)]
            tokens = [tokens_E[expert] for expert in experts]
            node_rows = _replicated_and_packed(tokens, slots_R[:ranks_a_node])
            rows += [[experts[local] for local in row] for row in node_rows]
        return layout_from_rows(rows, slots_R, load.num_experts)


def heaviest_replicated(tokens_E: Sequence[int], num_replicas: int) -> list[int]:
    """Returns the expert of each replica in the order of creation: each expert once, then always the one with the most
    tokens per replica.
    """
    expert_P = list(range(len(tokens_E)))
    replicas_E = [1] * len(tokens_E)
    heap = [(-share_key(tokens, 1, num_replicas), expert) for expert, tokens in enumerate(tokens_E)]
    heapq.heapify(heap)
    while len(expert_P) < num_replicas:
        _, expert = heap[0]
        expert_P.append(expert)
        replicas_E[expert] += 1
        heapq.heapreplace(heap, (-share_key(tokens_E[expert], replicas_E[expert], num_replicas), expert))
    return expert_P


def packed(weight_P: Sequence[int], room_B: Sequence[int]) -> list[list[int]]:
    """Returns the items of each bin, in the order they came: the heaviest first, into the lightest bin that has room.

    Equal items come, and equal bins are taken, by lowest index. There must be room for all.
    """
    items_B: list[list[int]] = [[] for _ in room_B]
    free = [(0, index) for index, room in enumerate(room_B) if room]
    # sorted() is stable: items of equal weight keep their order
    for item in sorted(range(len(weight_P)), key=lambda item: -weight_P[item]):
        weight, index = heapq.heappop(free)
        items_B[index].append(item)
        if len(items_B[index]) < room_B[index]:
            heapq.heappush(free, (weight + weight_P[item], index))
    return items_B


def _replicated_and_packed(tokens_E: Sequence[int], slots_R: Sequence[int]) -> list[list[int]]:
    """Returns the experts of each rank, with all slots filled."""
    expert_P = heaviest_replicated(tokens_E, sum(slots_R))
    share_E = common_shares(tokens_E, np.bincount(expert_P, minlength=len(tokens_E)).tolist())
    return [[expert_P[p] for p in row] for row in packed([share_E[expert] for expert in expert_P], slots_R)]


def _check_hierarchy(num_experts: int, cluster: ClusterSpec, slots_R: tuple[int, ...], num_groups: int) -> None:
    way_out = "or hierarchical=False"
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide num_experts={num_experts}; groups hold equally many experts, "
            f"so choose a divisor, {way_out}"
        )
    if num_groups % cluster.num_nodes:
        raise ValueError(
            f"num_groups={num_groups} is no multiple of num_nodes={cluster.num_nodes}; hierarchical EPLB gives every "
            f"node equally many groups, so choose a multiple that divides num_experts={num_experts}, {way_out}"
        )
    if len(set(cluster.node_sizes)) > 1:
        raise ValueError(
            f"nodes have {list(cluster.node_sizes)} ranks; hierarchical EPLB needs equal nodes, so declare them so, "
            f"{way_out}"
        )
    if len(set(slots_R)) > 1:
        raise ValueError(
            f"slots_per_rank={list(slots_R)} differ; hierarchical EPLB needs equal slots, so give one number, {way_out}"
        )
