"""From quotas, tokens of each expert for each rank, to the sources that fill them with the fewest tokens on wires."""

from __future__ import annotations

import numpy as np

from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray, LoadMatrix


def fill_quotas(quota_RE: IntArray, load: LoadMatrix, layout: ExpertLayout, node_of_rank: tuple[int, ...]) -> TokenPlan:
    """Every rank d gets ``quota_RE[d, e]`` tokens of expert e: its own first, then of its node, then of other nodes.

    Quotas of an expert sum to its tokens. Ranks in nodes form a tree, and on a tree whatever is matched below a link
    never needs to cross it: so for these quotas no plan sends fewer tokens between nodes, and none of those fewer
    between ranks. Where there is a choice, sources in rank order fill destinations in rank order.
    """
    node_R = np.asarray(node_of_rank)
    num_nodes = int(node_R[-1]) + 1
    own_RE = np.minimum(load.tokens_RE, quota_RE)
    rank, expert = np.nonzero(own_RE)
    entries = [np.column_stack([rank, expert, rank, own_RE[rank, expert]])]

    supply, demand = _listed(load.tokens_RE - own_RE), _listed(quota_RE - own_RE)
    if num_nodes > 1:
        supply, demand, inside = _match_inside_nodes(supply, demand, node_R, load.num_experts)
        entries.append(inside)
    # what is left of an expert's tokens equals what is left of its quotas
    entries.append(_pair(supply, demand))
    plan = np.concatenate(entries)
    key = (plan[:, 0] * load.num_experts + plan[:, 1]) * load.num_ranks + plan[:, 2]
    return TokenPlan(plan[np.argsort(key)], load, layout)


def _listed(tokens_RE: IntArray) -> IntArray:
    """Rows (expert, rank, tokens) with tokens > 0, sorted by expert, then rank."""
    expert, rank = np.nonzero(tokens_RE.T)
    return np.column_stack([expert, rank, tokens_RE[rank, expert]])


def _pair(supply: IntArray, demand: IntArray) -> IntArray:
    """Rows (source, expert, destination, tokens) of two lists of (expert, rank, tokens) whose sums agree.

    Both lists are laid end to end on one line of tokens, and wherever either has a boundary a new row begins.
    """
    ends_of_supply, ends_of_demand = np.cumsum(supply[:, 2]), np.cumsum(demand[:, 2])
    end = np.union1d(ends_of_supply, ends_of_demand)
    source, destination = np.searchsorted(ends_of_supply, end), np.searchsorted(ends_of_demand, end)
    return np.column_stack([supply[source, 1], supply[source, 0], demand[destination, 1], np.diff(end, prepend=0)])


def _match_inside_nodes(
    supply: IntArray, demand: IntArray, node_R: IntArray, num_experts: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Pairs what supply and demand of an expert have in common on a node; gives what is left of both, and the pairs."""
    num_groups = num_experts * (int(node_R[-1]) + 1)
    groups = [rows[:, 0] * (int(node_R[-1]) + 1) + node_R[rows[:, 1]] for rows in (supply, demand)]
    # bincount adds in float64, which is exact up to 2**53 tokens
    totals = [
        np.bincount(group, rows[:, 2], num_groups).astype(np.int64)
        for group, rows in zip(groups, (supply, demand), strict=True)
    ]
    common = np.minimum(*totals)
    (supply_in, supply_left), (demand_in, demand_left) = (
        _cut(rows, group, total, common) for rows, group, total in zip((supply, demand), groups, totals, strict=True)
    )
    return supply_left, demand_left, _pair(supply_in, demand_in)


def _cut(rows: IntArray, group: IntArray, total: IntArray, common: IntArray) -> tuple[IntArray, IntArray]:
    """Rows cut in two: of each group the first ``common`` tokens, and the rest. Rows are sorted by group."""
    start = np.cumsum(total) - total
    before = np.cumsum(rows[:, 2]) - rows[:, 2] - start[group]
    taken = np.clip(common[group] - before, 0, rows[:, 2])
    inside, left = rows.copy(), rows.copy()
    inside[:, 2] = taken
    left[:, 2] -= taken
    return inside[taken > 0], left[left[:, 2] > 0]
