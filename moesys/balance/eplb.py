"""EPLB: DeepSeek's expert-parallel load balancer, its global form."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from moesys.balance.replicas import common_shares, layout_from_rows, share_key
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix


def eplb_layout(load: LoadMatrix, slots_R: tuple[int, ...]) -> ExpertLayout:
    """Replicate the expert with the most tokens a replica until the slots are used, then pack the heaviest replica
    first onto the least loaded rank with a free slot.

    The counts of replicas make the heaviest replica as light as it can be; the packing is a heuristic. Where tokens
    come from and where nodes end is ignored, and two replicas of an expert may meet on one rank: so does the
    original, whose one group and one node this is (https://github.com/deepseek-ai/EPLB, rebalance_experts with
    num_groups=1). It needs equal slots and floating point; here any slots do, and shares are compared exactly, ties
    by lowest index.
    """
    tokens_E = load.tokens_E.tolist()
    expert_P = heaviest_replicated(tokens_E, sum(slots_R))
    share_E = common_shares(tokens_E, np.bincount(expert_P).tolist())
    rows: list[list[int]] = [[] for _ in slots_R]
    free = [(0, rank) for rank, slots in enumerate(slots_R) if slots]
    # sorted() is stable: replicas of equal share keep their order of creation
    for expert in sorted(expert_P, key=lambda expert: -share_E[expert]):
        tokens, rank = heapq.heappop(free)
        rows[rank].append(expert)
        if len(rows[rank]) < slots_R[rank]:
            heapq.heappush(free, (tokens + share_E[expert], rank))
    return layout_from_rows(rows, slots_R, load.num_experts)


def heaviest_replicated(tokens_E: Sequence[int], num_replicas: int) -> list[int]:
    """The expert of each replica in order of creation: each once, then always that with the most tokens a replica."""
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
