"""Numbers of experts and ranks inside of ``Greedy``, so that nothing depends on how a caller numbers them.

Experts are numbered from the heaviest on, and the ranks of a node, or of a domain where it has several, from the one
with the most slots on. A *node* is what rows are dear to leave: a domain of the links.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from moesys.balance.planning_problem import (
    PlanningProblem,
    levels_of,
    link_domains_of,
    nodes_of,
    tokens_by_node,
    usable_slots,
)
from moesys.config import ClusterSpec
from moesys.layout import EMPTY, ExpertLayout, owner_of_experts
from moesys.load import IntArray

# Compiled loops multiply twice what a scenario's experts have, up to 2.55 times as much each, by a million.
MOST_TOKENS = 2**39


class Numbers:
    """A problem in the planner's numbers, int64: ``slots_R``; ``node_R``, and ``nics_R`` of the node whose NICs a rank
    has; ``tokens_E``, and ``supply_NE`` by source's node, of which 2^``scale`` were one token; ``rank_A``: ranks with
    slots, in turn from every node; ``mean``: tokens of one.

    ``rank_R``, ``expert_E``: the caller's numbers. Ranks with the same ``finest_R`` may stand for one another.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        load, cluster, slots_R = problem.load, problem.cluster, problem.slots_R
        self.load, self.width = load, max(slots_R)
        self.node_R = link_domains_of(cluster)
        self.num_nodes = int(self.node_R[-1]) + 1
        self.finest_R = levels_of(cluster, nodes_of(cluster))[0]
        usable_R = np.array(usable_slots(slots_R, load.num_experts))
        self.rank_R = np.lexsort((-usable_R, self.finest_R))
        self.slots_R = usable_R[self.rank_R]
        supply_NE, tokens_E = tokens_by_node(load.tokens_RE, self.node_R)
        self.scale = max(0, int(tokens_E.sum()).bit_length() - MOST_TOKENS.bit_length())
        self.expert_E = np.argsort(-tokens_E, kind="stable")
        if (np.diff(tokens_E[self.expert_E]) == 0).any():
            self.expert_E = np.lexsort((*-supply_NE, -tokens_E))
        # rows of it are read, and compiled loops are compiled anew for another order of memory
        self.supply_NE = np.ascontiguousarray(supply_NE[:, self.expert_E]) >> self.scale
        self.tokens_E = self.supply_NE.sum(axis=0)

        # of a domain of several nodes round these, too
        self.nics_R = nics_R = nodes_of(cluster)
        index_in_node_R = np.arange(len(slots_R)) - np.searchsorted(nics_R, nics_R)
        rank_A = np.lexsort((nics_R, index_in_node_R))
        self.rank_A = rank_A[self.slots_R[rank_A] > 0]
        self.mean = max(int(self.tokens_E.sum()) // len(self.rank_A), 1)

    @cached_property
    def tokens_RE(self) -> IntArray:
        # as a split's arrays are: for others it would be compiled anew
        tokens_RE = self.of_load(self.load.tokens_RE)
        tokens_RE.setflags(write=False)
        return tokens_RE

    def of_load(self, tokens_RE: IntArray) -> IntArray:
        """Returns another load of the problem's units in these numbers."""
        return np.ascontiguousarray(tokens_RE[self.rank_R][:, self.expert_E]) >> self.scale

    @property
    def owner_E(self) -> IntArray:
        """The rank that owns each expert, where experts stay whole."""
        owner_E = owner_of_experts(len(self.expert_E), len(self.rank_R))[self.expert_E]
        return np.argsort(self.rank_R)[owner_E]

    def named(self, expert_RS: IntArray) -> ExpertLayout:
        """Returns a layout in the caller's numbers, experts in order on every rank, S of the widest rank."""
        last = len(self.expert_E)
        named_RS = np.append(self.expert_E, last)[expert_RS]  # EMPTY is -1: the last
        named_RS.sort(axis=1)
        named_RS[named_RS == last] = EMPTY
        layout_RS = np.full((len(self.slots_R), self.width), EMPTY)
        layout_RS[self.rank_R, : named_RS.shape[1]] = named_RS
        return ExpertLayout(layout_RS, len(self.tokens_E))

    def numbered(self, layout: ExpertLayout) -> IntArray:
        """Returns a layout's rows in the planner's numbers, every expert once per rank."""
        new_E = np.empty_like(self.expert_E)
        new_E[self.expert_E] = np.arange(len(new_E))
        expert_RS = self.empty()
        for row_S, rank in zip(expert_RS, self.rank_R.tolist(), strict=True):
            experts = sorted(set(new_E[list(layout.experts_of(rank))].tolist()))
            row_S[: len(experts)] = experts
        return expert_RS

    def empty(self) -> IntArray:
        """Returns a layout without experts, [R, S]."""
        return np.full((len(self.slots_R), int(self.slots_R.max())), EMPTY)


def num_moves(before_RE: IntArray, after_RE: IntArray) -> int:
    """Returns how many replicas are where they were not before; both int64 [R, E], replicas of each expert on each
    rank.
    """
    return int(np.maximum(after_RE - before_RE, 0).sum())


def relabelled(after_RE: IntArray, before_RE: IntArray, slots_R: IntArray, cluster: ClusterSpec) -> IntArray:
    """Returns for each rank the row of ``after_RE`` that it shall hold, int64 [R]: with the fewest moves of all ways to
    map ranks to ranks of as many slots and domains to domains of as many ranks.

    Both levels are assignments: of rows to the ranks of a domain, for every two, and, by what those save, of domains to
    domains. On one domain this is the optimum over all permutations. One that leaves domains where they are is taken
    where it is as good.
    """
    # scipy takes a third of a second to import, and a rank alone relabels nothing.
    from scipy.optimize import linear_sum_assignment

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
