"""Every token at home, compiled: on its own rank, or else its own node, where these hold its expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import borrowing, compiled
from moesys.load import IntArray

Indices = npt.NDArray[np.uint32]


class Shared(NamedTuple):
    """Experts with several replicas and some tokens: F of them, Q replicas, G groups of an expert's replicas on a node.

    By expert, then rank; tokens are int64, indices uint32, of which numba need not ask whether they count from the end:
    never subtract them. ``replica_Q``: index in ``Holders``; ``rank_Q``, ``group_Q``; ``tokens_Q``: what
    each gets; ``first_G`` [G + 1] and ``expert_G``: a group's replicas and its expert, counted in F; ``supply_G``:
    tokens that the group's node has for the expert; ``here_G``: those its replicas get; ``first_F`` [F + 1]: the groups
    of an expert; ``first_R`` [R + 1], ``of_rank_Q``: a rank's replicas; ``load_R``: tokens of a rank, of all experts.
    """

    replica_Q: Indices
    rank_Q: Indices
    group_Q: Indices
    tokens_Q: IntArray
    first_G: Indices
    expert_G: Indices
    supply_G: IntArray
    here_G: IntArray
    first_F: Indices
    first_R: Indices
    of_rank_Q: Indices
    load_R: IntArray


@compiled
def share_out(tokens_RE, supply_NE, tokens_E, node_R, holders, turn):  # type: ignore[no-untyped-def]
    """``Shared`` with every token at home.

    A rank keeps its own tokens of what it holds; what else its node has is shared evenly by the node's replicas, and
    what comes from nodes without one by all. Remainders begin at replica ``turn``.
    """
    num_ranks, num_experts = tokens_RE.shape
    load_R = np.zeros(num_ranks, np.int64)
    num_shared = num_replicas = 0
    for expert in range(num_experts):
        first, end = holders.first_E[expert], holders.first_E[expert + 1]
        if end - first == 1:
            load_R[holders.rank_P[first]] += tokens_E[expert]
        elif tokens_E[expert]:
            num_shared += 1
            num_replicas += end - first
    replica_Q, rank_Q = np.empty(num_replicas, np.uint32), np.empty(num_replicas, np.uint32)
    group_Q, tokens_Q = np.empty(num_replicas, np.uint32), np.empty(num_replicas, np.int64)
    first_G, expert_G = np.empty(num_replicas + 1, np.uint32), np.empty(num_replicas, np.uint32)
    supply_G, here_G = np.empty(num_replicas, np.int64), np.empty(num_replicas, np.int64)
    first_F = np.empty(num_shared + 1, np.uint32)
    # typed, for numba compiles functions anew for constants
    shared, replica, group = np.int64(0), np.int64(0), np.int64(0)
    for expert in range(num_experts):
        first, end = holders.first_E[expert], holders.first_E[expert + 1]
        if end - first == 1 or not tokens_E[expert]:
            continue
        first_F[shared], first_Q, away = group, replica, tokens_E[expert]
        node = -1
        for index in range(first, end):
            rank = holders.rank_P[index]
            if node_R[rank] != node:
                node = node_R[rank]
                first_G[group], expert_G[group] = replica, shared
                supply_G[group] = here_G[group] = supply_NE[node, expert]
                away -= supply_NE[node, expert]
                group += 1
            replica_Q[replica], rank_Q[replica], group_Q[replica] = index, rank, group - 1
            tokens_Q[replica] = tokens_RE[rank, expert]
            replica += 1
        first_G[group] = replica
        for each in range(first_F[shared], group):
            left = supply_G[each]
            for index in range(first_G[each], first_G[each + 1]):
                left -= tokens_Q[index]
            _share_evenly(left, np.int64(first_G[each]), np.int64(first_G[each + 1]), turn, tokens_Q)
        _share_evenly(away, first_Q, replica, turn, tokens_Q)
        for each in range(first_F[shared], group):
            here_G[each] = 0
            for index in range(first_G[each], first_G[each + 1]):
                here_G[each] += tokens_Q[index]
        shared += 1
    first_F[shared] = group

    first_R = np.zeros(num_ranks + 1, np.uint32)
    for index in range(num_replicas):
        first_R[rank_Q[index] + 1] += 1
        load_R[rank_Q[index]] += tokens_Q[index]
    for rank in range(num_ranks):
        first_R[rank + 1] += first_R[rank]
    next_R, of_rank_Q = first_R[:-1].copy(), np.empty(num_replicas, np.uint32)
    for index in range(num_replicas):
        of_rank_Q[next_R[rank_Q[index]]] = index
        next_R[rank_Q[index]] += 1
    return Shared(
        replica_Q,
        rank_Q,
        group_Q,
        tokens_Q,
        first_G[: group + 1],
        expert_G[:group],
        supply_G[:group],
        here_G[:group],
        first_F,
        first_R,
        of_rank_Q,
        load_R,
    )


@borrowing
def _share_evenly(tokens, first, end, turn, tokens_Q):  # type: ignore[no-untyped-def]
    each, left = tokens // (end - first), tokens % (end - first)
    for index in range(end - first):
        tokens_Q[first + index] += each + ((index - turn) % (end - first) < left)
