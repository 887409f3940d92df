"""From quotas, tokens of each expert for each rank, to the sources that fill them with the fewest tokens on wires."""

from __future__ import annotations

import numpy as np

from moesys.balance.compiled import compiled
from moesys.config import ClusterSpec
from moesys.load import IntArray


def nodes_of(cluster: ClusterSpec) -> IntArray:
    """The node of each rank, int64 [R]: ``node_of_rank``, but fast enough for every micro-batch."""
    return np.repeat(np.arange(cluster.num_nodes), cluster.node_sizes)


def levels_of(cluster: ClusterSpec) -> IntArray:
    """Which part of the cluster each rank is in, int64 [L, R], the finest parts first: domains and nodes, each once."""
    node_R, domain_sizes = nodes_of(cluster), cluster.domain_sizes
    if domain_sizes == cluster.node_sizes:
        return node_R[None]
    domain_R = np.repeat(np.arange(len(domain_sizes)), domain_sizes)
    return np.stack([domain_R, node_R] if len(domain_sizes) > cluster.num_nodes else [node_R, domain_R])


@compiled
def fill_quotas(tokens_RE, tokens_P, holders, level_LR):  # type: ignore[no-untyped-def]
    """Rows (source, expert, destination, tokens) int64 [N, 4], sorted, by which every replica gets ``tokens_P``.

    A rank's own tokens come first, then those of its parts of the cluster, the finest first, then all others. Parts
    form a tree, and on a tree whatever is matched below a link never needs to cross it: so for these quotas no plan
    sends fewer tokens between nodes, and none of those fewer between ranks. Where there is a choice, sources in rank
    order fill destinations in rank order. Quotas of an expert sum to its tokens.
    """
    num_ranks, num_experts = tokens_RE.shape
    # of a shared expert, every row ends a source's tokens or a replica's at some level
    num_shared = most = 0
    for expert in range(num_experts):
        width = holders.first_E[expert + 1] - holders.first_E[expert]
        if width > 1:
            num_shared += 1
            most += num_ranks + (level_LR.shape[0] + 2) * width
    # the only holder of an expert, -1 where there are several
    only_E, shared_F = np.full(num_experts, -1), np.empty(num_shared, np.int64)
    found = 0
    for expert in range(num_experts):
        if holders.first_E[expert + 1] - holders.first_E[expert] > 1:
            shared_F[found] = expert
            found += 1
        else:
            only_E[expert] = holders.rank_P[holders.first_E[expert]]
    supply_FR = np.empty((num_shared, num_ranks), np.int64)
    for source in range(num_ranks):
        for shared in range(num_shared):
            supply_FR[shared, source] = tokens_RE[source, shared_F[shared]]
    # the first rank of each rank's part
    first_LR = np.zeros_like(level_LR)
    for level in range(level_LR.shape[0]):
        for rank in range(1, num_ranks):
            same = level_LR[level, rank] == level_LR[level, rank - 1]
            first_LR[level, rank] = first_LR[level, rank - 1] if same else rank
    shared_N3 = np.empty((most, 3), np.int64)
    next_F, end_F = np.zeros(num_shared, np.int64), np.zeros(num_shared, np.int64)
    num_rows = 0
    for shared in range(num_shared):
        next_F[shared] = num_rows
        expert = shared_F[shared]
        num_rows = _fill_expert(supply_FR[shared], tokens_P, expert, holders, level_LR, first_LR, shared_N3, num_rows)
        end_F[shared] = num_rows

    entries = np.empty((num_ranks * num_experts + num_rows, 4), np.int64)
    # unsigned, so that numba need not ask whether it counts from the end
    row, one = np.uint64(0), np.uint64(1)
    for source in range(num_ranks):
        place = np.uint64(0)
        for expert in range(num_experts):
            tokens = tokens_RE[source, expert]
            if only_E[expert] >= 0:
                if tokens > 0:
                    entries[row, 0] = source
                    entries[row, 1] = expert
                    entries[row, 2] = only_E[expert]
                    entries[row, 3] = tokens
                    row += one
                continue
            next_row = next_F[place]
            while next_row < end_F[place] and shared_N3[next_row, 0] == source:
                entries[row, 0] = source
                entries[row, 1] = expert
                entries[row, 2] = shared_N3[next_row, 1]
                entries[row, 3] = shared_N3[next_row, 2]
                row += one
                next_row += 1
            next_F[place] = next_row
            place += one
    return entries[:row]


@compiled
def _fill_expert(supply_R, tokens_P, expert, holders, level_LR, first_LR, rows_N3, first_row):  # type: ignore[no-untyped-def]
    """Appends an expert's rows (source, destination, tokens), sorted; gives their end. Uses up ``supply_R``."""
    num_ranks, num_levels = supply_R.size, level_LR.shape[0]
    first, end = holders.first_E[expert], holders.first_E[expert + 1]
    rank_P, demand_P = holders.rank_P[first:end], tokens_P[first:end].copy()
    row = first_row
    for index in range(end - first):
        rank = rank_P[index]
        tokens = min(supply_R[rank], demand_P[index])
        if tokens:
            rows_N3[row, 0], rows_N3[row, 1], rows_N3[row, 2] = rank, rank, tokens
            supply_R[rank] -= tokens
            demand_P[index] -= tokens
            row += 1
    for level in range(num_levels + 1):
        first_index = 0
        while first_index < end - first:
            # the replicas of one part, and its ranks
            end_index, source, end_source = end - first, 0, num_ranks
            if level < num_levels:
                part = level_LR[level, rank_P[first_index]]
                end_index = first_index + 1
                while end_index < end - first and level_LR[level, rank_P[end_index]] == part:
                    end_index += 1
                source, end_source = first_LR[level, rank_P[first_index]], rank_P[first_index] + 1
                while end_source < num_ranks and level_LR[level, end_source] == part:
                    end_source += 1
            index = first_index
            while source < end_source and index < end_index:
                tokens = min(supply_R[source], demand_P[index])
                if tokens:
                    rows_N3[row, 0], rows_N3[row, 1], rows_N3[row, 2] = source, rank_P[index], tokens
                    supply_R[source] -= tokens
                    demand_P[index] -= tokens
                    row += 1
                if supply_R[source] == 0:
                    source += 1
                else:
                    index += 1
            first_index = end_index
    _sort_rows(rows_N3[first_row:row], num_ranks)
    return row


@compiled
def _sort_rows(rows_N3, num_ranks):  # type: ignore[no-untyped-def]
    """By source, counting them, then by destination, of which a source has few."""
    first_R = np.zeros(num_ranks + 1, np.int64)
    for row in range(rows_N3.shape[0]):
        first_R[rows_N3[row, 0] + 1] += 1
    for rank in range(num_ranks):
        first_R[rank + 1] += first_R[rank]
    end_R, unsorted_N3 = first_R[:-1].copy(), rows_N3.copy()
    for row in range(unsorted_N3.shape[0]):
        source, destination, tokens = unsorted_N3[row, 0], unsorted_N3[row, 1], unsorted_N3[row, 2]
        place = end_R[source]
        end_R[source] += 1
        while place > first_R[source] and rows_N3[place - 1, 1] > destination:
            rows_N3[place, 0], rows_N3[place, 1], rows_N3[place, 2] = (
                source,
                rows_N3[place - 1, 1],
                rows_N3[place - 1, 2],
            )
            place -= 1
        rows_N3[place, 0], rows_N3[place, 1], rows_N3[place, 2] = source, destination, tokens
