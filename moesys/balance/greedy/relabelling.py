"""Which rank becomes which, so that a new layout moves the fewest replicas: linear assignment (scipy)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from moesys.config import ClusterSpec
from moesys.load import IntArray


def num_moves(before_RE: IntArray, after_RE: IntArray) -> int:
    """Counts replicas that are where they were not before; both int64 [R, E], replicas of each expert on each rank."""
    return int(np.maximum(after_RE - before_RE, 0).sum())


def relabelled(after_RE: IntArray, before_RE: IntArray, slots_R: IntArray, cluster: ClusterSpec) -> IntArray:
    """Returns for each rank the row of ``after_RE`` that it shall hold, int64 [R]: with the fewest moves of all ways to
    map ranks to ranks of as many slots and domains to domains of as many ranks.

    Both levels are assignments: of rows to the ranks of a domain, for every two, and, by what those save, of domains to
    domains. On one domain this is the optimum over all permutations. One that leaves domains where they are is taken
    where it is as good.
    """
    starts = np.cumsum((0, *cluster.domain_sizes))
    ranks_by_node = [np.arange(*bounds) for bounds in pairwise(starts)]
    kept_RR = (after_RE > 0).astype(np.int32) @ (before_RE > 0).astype(np.int32).T
    # a row may not go where slots differ: less than any number of replicas kept
    kept_RR[slots_R[:, None] != slots_R[None, :]] = -(kept_RR.sum() + 1)
    num_nodes = len(ranks_by_node)
    # and nodes not where sizes differ
    kept_NN = np.full((num_nodes, num_nodes), -(int(np.abs(kept_RR).sum()) + 1))
    row_NN: dict[tuple[int, int], IntArray] = {}
    for old, new in np.ndindex(num_nodes, num_nodes):
        if len(ranks_by_node[old]) == len(ranks_by_node[new]):
            inside = kept_RR[np.ix_(ranks_by_node[new], ranks_by_node[old])]
            rows, ranks = linear_sum_assignment(inside, maximize=True)
            kept_NN[new, old] = inside[rows, ranks].sum()
            row_NN[new, old] = ranks_by_node[new][rows[np.argsort(ranks)]]
    # scaled, so that staying breaks ties
    new_N, old_N = linear_sum_assignment(kept_NN * (num_nodes + 1) + np.eye(num_nodes, dtype=np.int64), maximize=True)
    row_R = np.empty(len(slots_R), dtype=np.int64)
    for new, old in zip(new_N.tolist(), old_N.tolist(), strict=True):
        row_R[ranks_by_node[old]] = row_NN[new, old]
    return row_R


def relabelled_inside(
    after_RE: IntArray, before_RE: IntArray, slots_R: IntArray, part_sizes: tuple[int, ...]
) -> IntArray:
    """Returns the same where every rank stays in its part of the cluster, of so many consecutive ranks each."""
    row_R = np.empty(len(slots_R), dtype=np.int64)
    for end, size in zip(np.cumsum(part_sizes).tolist(), part_sizes, strict=True):
        part = slice(end - size, end)
        one = ClusterSpec(ranks_per_node=size)
        row_R[part] = relabelled(after_RE[part], before_RE[part], slots_R[part], one) + end - size
    return row_R
