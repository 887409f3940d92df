"""The table of a layout's replicas: which ranks hold which experts, listed both ways, for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import compiled
from moesys.layout import EMPTY
from moesys.load import IntArray

Indices = npt.NDArray[np.uint32]


class ReplicaTable(NamedTuple):
    """The replicas of a layout: pairs of an expert and a rank that holds it, by expert, then rank. P of them.

    A second slot of a rank for the same expert is no second replica. Fields are int64, but for ``holds_R`` and
    ``Indices``, of which numba need not ask whether they count from the end: never subtract these. With int64 a split
    of 32 ranks and 128 experts took 88 us instead of 79.

    - ``first_E`` [E + 1]: expert e's replicas are ``first_E[e]`` up to ``first_E[e + 1]``;
    - ``rank_P``, ``expert_P`` [P]: whose they are;
    - ``holds_R`` bool [R]: ranks with a replica;
    - ``shared_F`` [F]: experts with several replicas, those with the fewest first;
    - ``first_R`` [R + 1], ``shared_Q`` [Q]: rank r's replicas of shared experts are
      ``shared_Q[first_R[r]:first_R[r + 1]]``, by expert. By others no tokens can give way.
    """

    first_E: IntArray
    rank_P: Indices
    expert_P: Indices
    holds_R: npt.NDArray[np.bool_]
    shared_F: IntArray
    first_R: IntArray
    shared_Q: Indices


@compiled
def list_replicas(expert_RS, num_experts):  # type: ignore[no-untyped-def]
    """Returns the ``ReplicaTable`` of ``expert_RS`` int64 [R, S], -1 for an empty slot."""
    num_ranks, num_slots = expert_RS.shape
    first_E = np.zeros(num_experts + 1, np.int64)
    last_rank_E = np.full(num_experts, -1, np.int64)
    holds_R = np.zeros(num_ranks, np.bool_)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = expert_RS[rank, slot]
            if expert != EMPTY and last_rank_E[expert] != rank:
                last_rank_E[expert] = rank
                first_E[expert + 1] += 1
                holds_R[rank] = True
    # how many experts have so many replicas, and then where those begin in shared_F
    first_W = np.zeros(num_ranks + 2, np.int64)
    num_shared_replicas = 0
    for expert in range(num_experts):
        width = first_E[expert + 1]
        if width > 1:
            first_W[width + 1] += 1
            num_shared_replicas += width
        first_E[expert + 1] += first_E[expert]
    for width in range(num_ranks + 1):
        first_W[width + 1] += first_W[width]
    num_replicas = first_E[num_experts]

    rank_P, expert_P = np.empty(num_replicas, np.uint32), np.empty(num_replicas, np.uint32)
    shared_F, shared_Q = np.empty(first_W[num_ranks + 1], np.int64), np.empty(num_shared_replicas, np.uint32)
    first_R, next_E = np.zeros(num_ranks + 1, np.int64), first_E[:-1].copy()
    last_rank_E[:] = -1
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = expert_RS[rank, slot]
            if expert != EMPTY and last_rank_E[expert] != rank:
                last_rank_E[expert] = rank
                rank_P[next_E[expert]] = rank
                expert_P[next_E[expert]] = expert
                next_E[expert] += 1
                first_R[rank + 1] += first_E[expert + 1] - first_E[expert] > 1
    for rank in range(num_ranks):
        first_R[rank + 1] += first_R[rank]
    next_R = first_R[:-1].copy()
    for expert in range(num_experts):
        width = first_E[expert + 1] - first_E[expert]
        if width > 1:
            shared_F[first_W[width]] = expert
            first_W[width] += 1
            for replica in range(first_E[expert], first_E[expert + 1]):
                shared_Q[next_R[rank_P[replica]]] = replica
                next_R[rank_P[replica]] += 1
    return ReplicaTable(first_E, rank_P, expert_P, holds_R, shared_F, first_R, shared_Q)


class NodeGroups(NamedTuple):
    """The replicas of a ``ReplicaTable`` by node: a group is a shared expert's on one node. G of them.

    An expert with one replica has no group, for its tokens have no choice: with groups of all experts a split of 64
    ranks and 256 experts took 134 us instead of 98.

    - ``expert_F`` [F]: the shared experts, in order;
    - ``first_E`` [E + 1]: expert e's groups are ``first_E[e]`` up to ``first_E[e + 1]``, by node;
    - ``first_G``, ``end_G`` [G]: group g's replicas are ``first_G[g]`` up to ``end_G[g]``;
    - ``expert_G`` [G]: whose groups they are;
    - ``group_P`` int64 [P]: the group of each replica, -1 for an expert's only one.
    """

    expert_F: Indices
    first_E: Indices
    first_G: Indices
    end_G: Indices
    expert_G: Indices
    group_P: IntArray


@compiled
def group_by_node(table, node_R):  # type: ignore[no-untyped-def]
    """Returns the ``NodeGroups`` of a table, for the node of each rank, int64 [R]."""
    num_experts, num_replicas = table.first_E.size - 1, table.rank_P.size
    first_E, group_P = np.empty(num_experts + 1, np.uint32), np.full(num_replicas, -1)
    first_G, end_G = np.empty(num_replicas, np.uint32), np.empty(num_replicas, np.uint32)
    expert_G = np.empty(num_replicas, np.uint32)
    group = 0
    for expert in range(num_experts):
        first_E[expert] = group
        if table.first_E[expert + 1] - table.first_E[expert] == 1:
            continue
        node = -1
        for replica in range(table.first_E[expert], table.first_E[expert + 1]):
            if node_R[table.rank_P[replica]] != node:
                node = node_R[table.rank_P[replica]]
                first_G[group], expert_G[group] = replica, expert
                group += 1
            group_P[replica], end_G[group - 1] = group - 1, replica + 1
    first_E[num_experts] = group
    return NodeGroups(
        np.sort(table.shared_F).astype(np.uint32), first_E, first_G[:group], end_G[:group], expert_G[:group], group_P
    )
