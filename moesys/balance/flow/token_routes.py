"""Token routes: which sources fill the tokens of each replica, with the fewest tokens on wires; compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import borrowing, compiled
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


class TokenRoutes(NamedTuple):
    """An expert's tokens from rank to rank, sorted; int64. ``route_N``: source * R + destination; ``tokens_N``."""

    route_N: IntArray
    tokens_N: IntArray


@compiled
def _new_routes(size):  # type: ignore[no-untyped-def]
    return TokenRoutes(np.empty(size, np.int64), np.empty(size, np.int64))


@compiled
def route_tokens(tokens_RE, tokens_P, table, level_LR):  # type: ignore[no-untyped-def]
    """Returns rows (source, expert, destination, tokens) int64 [N, 4], sorted, by which replicas get ``tokens_P``.

    A rank's own tokens come first, then those of its parts of the cluster, the finest first, then all others. Parts
    form a tree, and on a tree whatever is matched below a link never needs to cross it: so for these tokens no plan
    sends fewer tokens between nodes, and none of those fewer between ranks. Where there is a choice, sources in rank
    order fill destinations in rank order. Replicas of an expert get its tokens exactly.
    """
    num_ranks, num_experts = tokens_RE.shape
    # of a shared expert, every row ends a source's tokens or a replica's at some level
    num_shared = most = most_of_one = 0
    for expert in range(num_experts):
        width = table.first_E[expert + 1] - table.first_E[expert]
        if width > 1:
            num_shared += 1
            most += num_ranks + (level_LR.shape[0] + 2) * width
            most_of_one = max(most_of_one, num_ranks + (level_LR.shape[0] + 2) * width)
    # the only holder of an expert, -1 where there are several
    only_E, shared_F = np.full(num_experts, -1), np.empty(num_shared, np.int64)
    found = 0
    for expert in range(num_experts):
        if table.first_E[expert + 1] - table.first_E[expert] > 1:
            shared_F[found] = expert
            found += 1
        else:
            only_E[expert] = table.rank_P[table.first_E[expert]]
    # a line of the cache longer than a rank's row: at a power of two apart, rows would take the same places in it
    supply_FR = np.empty((num_shared, num_ranks + 8), np.int64)
    for source in range(num_ranks):
        for shared in range(num_shared):
            supply_FR[shared, source] = tokens_RE[source, shared_F[shared]]
    # the first rank of each rank's part
    first_LR = np.zeros_like(level_LR)
    for level in range(level_LR.shape[0]):
        for rank in range(1, num_ranks):
            same = level_LR[level, rank] == level_LR[level, rank - 1]
            first_LR[level, rank] = first_LR[level, rank - 1] if same else rank
    routes, scratch = _new_routes(most), (_new_routes(most_of_one), _new_routes(most_of_one), _new_routes(most_of_one))
    demand_P = tokens_P.copy()
    next_F, end_F = np.zeros(num_shared, np.int64), np.zeros(num_shared, np.int64)
    num_rows = 0
    for shared in range(num_shared):
        next_F[shared] = num_rows
        first, end = table.first_E[shared_F[shared]], table.first_E[shared_F[shared] + 1]
        num_rows += _route_expert(
            supply_FR[shared, :num_ranks],
            demand_P[first:end],
            table.rank_P[first:end],
            level_LR,
            first_LR,
            scratch,
            TokenRoutes(routes.route_N[num_rows:], routes.tokens_N[num_rows:]),
        )
        end_F[shared] = num_rows
    entries = np.empty((num_ranks * num_experts + num_rows, 4), np.int64)
    # unsigned, so that numba need not ask whether it counts from the end
    row, one = np.uint64(0), np.uint64(1)
    for source in range(num_ranks):
        place, first_route = np.uint64(0), source * num_ranks
        for expert in range(num_experts):
            if only_E[expert] >= 0:
                tokens = tokens_RE[source, expert]
                if tokens > 0:
                    entries[row, 0] = source
                    entries[row, 1] = expert
                    entries[row, 2] = only_E[expert]
                    entries[row, 3] = tokens
                    row += one
                continue
            next_row = next_F[place]
            while next_row < end_F[place] and routes.route_N[next_row] < first_route + num_ranks:
                entries[row, 0] = source
                entries[row, 1] = expert
                entries[row, 2] = routes.route_N[next_row] - first_route
                entries[row, 3] = routes.tokens_N[next_row]
                row += one
                next_row += 1
            next_F[place] = next_row
            place += one
    return entries[:row]


@borrowing
def _route_expert(supply_R, demand_P, rank_P, level_LR, first_LR, scratch, routes):  # type: ignore[no-untyped-def]
    """Lists an expert's routes in ``routes``; gives their number.

    Uses up ``supply_R`` and ``demand_P``. Those of a level are found in order, so the levels are merged.
    """
    num_ranks, num_levels, width = supply_R.size, level_LR.shape[0], rank_P.size
    kept, found, merged = scratch
    num_kept = np.int64(0)
    for index in range(width):
        rank = rank_P[index]
        tokens = min(supply_R[rank], demand_P[index])
        if tokens:
            kept.route_N[num_kept], kept.tokens_N[num_kept] = rank * num_ranks + rank, tokens
            supply_R[rank] -= tokens
            demand_P[index] -= tokens
            num_kept += 1
    for level in range(num_levels + 1):
        first_index, num_found, one = 0, np.uint64(0), np.uint64(1)
        while first_index < width:
            # the replicas of one part, and its ranks
            end_index, source, end_source = width, 0, num_ranks
            if level < num_levels:
                part = level_LR[level, rank_P[first_index]]
                end_index = first_index + 1
                while end_index < width and level_LR[level, rank_P[end_index]] == part:
                    end_index += 1
                source, end_source = first_LR[level, rank_P[first_index]], rank_P[first_index] + 1
                while end_source < num_ranks and level_LR[level, end_source] == part:
                    end_source += 1
            sender, receiver = np.uint64(source), np.uint64(first_index)
            while sender < end_source and receiver < end_index:
                tokens = min(supply_R[sender], demand_P[receiver])
                if tokens:
                    found.route_N[num_found] = np.int64(sender) * num_ranks + rank_P[receiver]
                    found.tokens_N[num_found] = tokens
                    supply_R[sender] -= tokens
                    demand_P[receiver] -= tokens
                    num_found += one
                if supply_R[sender] == 0:
                    sender += one
                else:
                    receiver += one
            first_index = end_index
        _merge(kept, num_kept, found, num_found, routes if level == num_levels else merged)
        num_kept += np.int64(num_found)
        kept, merged = merged, kept
    return num_kept


@borrowing
def _merge(ones, num_ones, others, num_others, merged):  # type: ignore[no-untyped-def]
    """Merges two sorted lists into one."""
    index, row, one = np.uint64(0), np.uint64(0), np.uint64(1)
    for place in range(np.uint64(num_ones)):
        while index < num_others and others.route_N[index] < ones.route_N[place]:
            merged.route_N[row], merged.tokens_N[row] = others.route_N[index], others.tokens_N[index]
            index += one
            row += one
        merged.route_N[row], merged.tokens_N[row] = ones.route_N[place], ones.tokens_N[place]
        row += one
    while index < num_others:
        merged.route_N[row], merged.tokens_N[row] = others.route_N[index], others.tokens_N[index]
        index += one
        row += one
