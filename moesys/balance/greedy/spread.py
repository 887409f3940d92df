"""Layouts that spread every expert, compiled: many small replicas of each, which give way whatever later loads want.

They are LAER-MoE's (arXiv 2602.11686): replicas in proportion to tokens, in steps of one a node, or the same number of
each; heaviest replica first onto the least loaded rank, of nodes with the fewest of that expert. Unlike there, no
expert is twice on a rank, and no slot stays free.
"""

from __future__ import annotations

import numpy as np

from moesys.compiled import borrowing, compiled

# Parts of a token in which ranks are levelled.
PARTS_BITS = 16


@compiled
def spread(tokens_E, slots_R, node_R, rank_A, evenly, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` [R, S], empty before. ``slots_R``: usable slots, for all experts of ``tokens_E``, which come
    heaviest first; ``rank_A``: ranks with slots, in the order that goes round the nodes; ``evenly``: as many replicas
    of each as of every other, or one more.
    """
    num_experts, num_ranks = tokens_E.size, slots_R.size
    num_nodes = node_R[num_ranks - 1] + 1
    left, num_holders = slots_R.sum(), (slots_R > 0).sum()
    replicas_E = np.ones(num_experts, np.int64)
    if evenly:
        replicas_E[:] = min(left // num_experts, num_holders)
    elif num_nodes * num_experts <= left:
        replicas_E[:] = min(num_nodes, num_holders)
    left -= replicas_E.sum()
    done_E = np.zeros(num_experts, np.bool_)
    done_E[:] = evenly
    while left > 0:
        best = -1
        for expert in range(num_experts):
            if not done_E[expert] and (
                best < 0 or tokens_E[expert] * replicas_E[best] > tokens_E[best] * replicas_E[expert]
            ):
                best = expert
        if best < 0:
            break
        step = num_nodes if replicas_E[best] >= num_nodes else 1
        if step > left or replicas_E[best] + step > num_holders:
            done_E[best] = True
            continue
        replicas_E[best] += step
        left -= step
    filled_R, load_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    holds_RE, placed_NE = np.zeros((num_ranks, num_experts), np.bool_), np.zeros((num_nodes, num_experts), np.int64)
    share_E = (tokens_E << PARTS_BITS) // replicas_E
    of_node_N = np.zeros(num_nodes, np.int64)
    state = (slots_R, node_R, rank_A, of_node_N, filled_R, load_R, holds_RE, placed_NE, expert_RS)
    for expert in np.argsort(-share_E, kind="mergesort"):
        for _ in range(replicas_E[expert]):
            _place(expert, share_E[expert], state)
    # what is left takes the most tokens a replica, rank by rank
    for rank in range(num_ranks):
        while filled_R[rank] < slots_R[rank]:
            best = -1
            for expert in range(num_experts):
                if not holds_RE[rank, expert] and (
                    best < 0 or tokens_E[expert] * replicas_E[best] > tokens_E[best] * replicas_E[expert]
                ):
                    best = expert
            _put(rank, best, np.int64(0), state)
            replicas_E[best] += 1


@borrowing
def _place(expert, share, state):  # type: ignore[no-untyped-def]
    slots_R, node_R, rank_A, of_node_N, filled_R, load_R, holds_RE, placed_NE, _ = state
    best = -1
    for rank in rank_A:
        if filled_R[rank] == slots_R[rank] or holds_RE[rank, expert]:
            continue
        if best >= 0:
            node, other = node_R[rank], node_R[best]
            if placed_NE[node, expert] > placed_NE[other, expert]:
                continue
            if placed_NE[node, expert] == placed_NE[other, expert]:
                if load_R[rank] > load_R[best]:
                    continue
                if load_R[rank] == load_R[best] and of_node_N[node] >= of_node_N[other]:
                    continue
        best = rank
    if best >= 0:
        _put(best, expert, share, state)


@borrowing
def _put(rank, expert, share, state):  # type: ignore[no-untyped-def]
    _, node_R, _, of_node_N, filled_R, load_R, holds_RE, placed_NE, expert_RS = state
    expert_RS[rank, filled_R[rank]] = expert
    filled_R[rank] += 1
    load_R[rank] += share
    of_node_N[node_R[rank]] += share
    holds_RE[rank, expert] = True
    placed_NE[node_R[rank], expert] += 1
