"""Every token at home, compiled: on its own rank, or else its own node, where these hold its expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import borrowing, compiled
from moesys.load import IntArray


class Assignment(NamedTuple):
    """Tokens of the replicas of a ``ReplicaTable`` and its ``NodeGroups``; all int64.

    ``tokens_P``: what each replica gets; ``here_G``: what a group's replicas get; ``supply_G``: what the sources on the
    group's node have for its expert; ``load_R``: tokens of each rank, of all experts.
    """

    tokens_P: IntArray
    here_G: IntArray
    supply_G: IntArray
    load_R: IntArray


@compiled
def local_first(tokens_RE, supply_NE, tokens_E, node_R, table, groups, turn):  # type: ignore[no-untyped-def]
    """Returns the ``Assignment`` with every token at home.

    A rank keeps its own tokens of what it holds; what else its node has is shared evenly by the node's replicas, and
    what comes from nodes without one by all. Remainders begin at replica ``turn``.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_replicas, num_groups = groups.group_P.size, groups.expert_G.size
    tokens_P, load_R = np.empty(num_replicas, np.int64), np.zeros(num_ranks, np.int64)
    here_G, supply_G = np.zeros(num_groups, np.int64), np.empty(num_groups, np.int64)
    for expert in range(num_experts):
        if groups.first_E[expert] == groups.first_E[expert + 1]:
            tokens_P[table.first_E[expert]] = tokens_E[expert]
            continue
        away = tokens_E[expert]
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            first, end = np.int64(groups.first_G[group]), np.int64(groups.end_G[group])
            left = supply_G[group] = supply_NE[node_R[table.rank_P[first]], expert]
            away -= left
            for replica in range(first, end):
                tokens_P[replica] = tokens_RE[table.rank_P[replica], expert]
                left -= tokens_P[replica]
            _share_evenly(left, first, end, turn, tokens_P)
        _share_evenly(away, table.first_E[expert], table.first_E[expert + 1], turn, tokens_P)
    for replica in range(num_replicas):
        if groups.group_P[replica] >= 0:
            here_G[groups.group_P[replica]] += tokens_P[replica]
        load_R[table.rank_P[replica]] += tokens_P[replica]
    return Assignment(tokens_P, here_G, supply_G, load_R)


@borrowing
def _share_evenly(tokens, first, end, turn, tokens_P):  # type: ignore[no-untyped-def]
    if not tokens:
        return
    each, left = tokens // (end - first), tokens % (end - first)
    for index in range(end - first):
        tokens_P[first + index] += each + ((index - turn) % (end - first) < left)
