"""Greedy: ours. Proportional replicas on distinct ranks, spread over nodes, then improved by local search."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moesys.balance.local_search import improved, water_filled
from moesys.balance.replicas import common_shares, layout_from_rows, share_key, usable_slots
from moesys.config import ClusterSpec
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix


def greedy_layout(
    load: LoadMatrix,
    cluster: ClusterSpec,
    slots_R: tuple[int, ...],
    search_moves: int,
    previous: ExpertLayout | None,
) -> ExpertLayout:
    """A layout that fills every usable slot, holds no expert twice on a rank, and is hard to improve.

    Replicas go to the expert with the most tokens a replica, at most one a rank; they are placed heaviest first, on
    the node with the fewest replicas of that expert and there on the least loaded rank. Local search then accepts at
    most ``search_moves`` moves that lower, with tokens split as well as replicas allow, the busiest rank's load, or
    at an equal one the sum of squared loads. ``previous`` is returned if by this measure it is as good, and holds no
    expert twice.
    """
    tokens_E = load.tokens_E.tolist()
    slots = usable_slots(slots_R, load.num_experts)
    holders_E = _place(tokens_E, _capped_replicas(tokens_E, slots), slots, cluster)
    holders_E = improved(holders_E, tokens_E, load.num_ranks, search_moves)
    if previous is not None and previous.num_duplicates == 0:
        before_E = [tuple(previous.replicas_RE[:, expert].nonzero()[0].tolist()) for expert in range(load.num_experts)]
        before = water_filled(before_E, tokens_E, load.num_ranks)
        if before.cost() <= water_filled(holders_E, tokens_E, load.num_ranks).cost():
            return previous
    rows: list[list[int]] = [[] for _ in slots_R]
    for expert, holders in enumerate(holders_E):
        for rank in holders:
            rows[rank].append(expert)
    return layout_from_rows(rows, slots_R, load.num_experts)


def _capped_replicas(tokens_E: Sequence[int], slots_R: Sequence[int]) -> list[int]:
    """One replica each, then more to the most tokens a replica (at a tie, the fewest replicas), one a rank at most."""
    left, most = sum(slots_R) - len(tokens_E), sum(slots > 0 for slots in slots_R)
    replicas_E = [1] * len(tokens_E)
    heap = [(-share_key(tokens, 1, most), 1, expert) for expert, tokens in enumerate(tokens_E)]
    heapq.heapify(heap)
    while left and heap:
        _, count, expert = heapq.heappop(heap)
        if count < most:
            replicas_E[expert] = count + 1
            left -= 1
            heapq.heappush(heap, (-share_key(tokens_E[expert], count + 1, most), count + 1, expert))
    return replicas_E


def _place(
    tokens_E: Sequence[int], replicas_E: Sequence[int], slots_R: Sequence[int], cluster: ClusterSpec
) -> list[tuple[int, ...]]:
    """The ranks that hold each expert, ascending.

    An expert's first replica always finds a slot, for replicas are as many as slots. A later one may find free slots
    only where the expert already is; its slot then goes to the heaviest expert that the rank has not.
    """
    share_E = common_shares(tokens_E, replicas_E)
    rows: list[list[int]] = [[] for _ in slots_R]
    free_by_node: list[list[tuple[int, int]]] = [[] for _ in range(cluster.num_nodes)]
    for rank, node in enumerate(cluster.node_of_rank):
        if slots_R[rank]:
            free_by_node[node].append((0, rank))
    for expert in sorted(range(len(tokens_E)), key=lambda expert: -share_E[expert]):
        taken_by_node: list[list[tuple[int, int]]] = [[] for _ in free_by_node]
        for _ in range(replicas_E[expert]):
            free = [node for node, ranks in enumerate(free_by_node) if ranks]
            if not free:
                break
            node = min(free, key=lambda node: (len(taken_by_node[node]), free_by_node[node][0]))
            # a rank that is taken comes back after the expert's last replica, so it cannot be taken twice
            taken_by_node[node].append(heapq.heappop(free_by_node[node]))
        for node, taken in enumerate(taken_by_node):
            for tokens, rank in taken:
                rows[rank].append(expert)
                if len(rows[rank]) < slots_R[rank]:
                    heapq.heappush(free_by_node[node], (tokens + share_E[expert], rank))
    _fill_up(rows, tokens_E, slots_R)
    holders_E: list[list[int]] = [[] for _ in tokens_E]
    for rank, experts in enumerate(rows):
        for expert in experts:
            holders_E[expert].append(rank)
    return [tuple(holders) for holders in holders_E]


def _fill_up(rows: list[list[int]], tokens_E: Sequence[int], slots_R: Sequence[int]) -> None:
    """Gives free slots to the experts with the most tokens a replica among those that their rank has not."""
    replicas_E = [0] * len(tokens_E)
    for experts in rows:
        for expert in experts:
            replicas_E[expert] += 1
    for rank, experts in enumerate(rows):
        while len(experts) < slots_R[rank]:
            expert = min(
                (expert for expert in range(len(tokens_E)) if expert not in experts),
                key=lambda expert: (-share_key(tokens_E[expert], replicas_E[expert], len(rows)), replicas_E[expert]),
            )
            experts.append(expert)
            replicas_E[expert] += 1
