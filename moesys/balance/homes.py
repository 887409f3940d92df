"""Homes: which rank shall own which expert, where experts stay whole."""

from __future__ import annotations

import numpy as np

from moesys.balance.topology import link_domains_of, tokens_by_node
from moesys.config import ClusterSpec
from moesys.layout import owner_of_experts
from moesys.load import IntArray, LoadMatrix


def planned_homes(load: LoadMatrix, cluster: ClusterSpec) -> IntArray:
    """Returns a rank for each expert, int64 [E], so that nodes are level and have what their own ranks want.

    Ranks own as many experts as by ``owner_of_experts``. The heaviest comes first, to the node that wants it most of
    those with room that have no more than it above the one with least; there to the rank with least. A *node* is a
    domain of the links. Ties go to the lower number.
    """
    R, E, node_R = load.num_ranks, load.num_experts, link_domains_of(cluster)
    supply_NE, tokens_E = tokens_by_node(load.tokens_RE, node_R)
    ranks_N = np.bincount(node_R)
    room_R, load_R = np.bincount(owner_of_experts(E, R), minlength=R), np.zeros(R, np.int64)
    home_E = np.empty(E, np.int64)
    for expert in np.argsort(-tokens_E, kind="stable"):
        # of each rank there, so that nodes of any size compare
        load_N = np.where(np.bincount(node_R, room_R) > 0, np.bincount(node_R, load_R) / ranks_N, np.inf)
        near_N = load_N <= load_N.min() + tokens_E[expert] / ranks_N
        node = np.where(near_N, supply_NE[:, expert], -1).argmax()
        ranks = np.flatnonzero((node_R == node) & (room_R > 0))
        home = ranks[load_R[ranks].argmin()]
        home_E[expert] = home
        room_R[home] -= 1
        load_R[home] += tokens_E[expert]
    return home_E


def numbered_by_home(load: LoadMatrix, home_E: IntArray) -> LoadMatrix:
    """Returns the load of the same experts, numbered so that ``home_E`` are the ranks of ``owner_of_experts``."""
    return LoadMatrix(np.ascontiguousarray(load.tokens_RE[:, np.argsort(home_E, kind="stable")]))
