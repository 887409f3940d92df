"""The least load of the busiest rank over all splits of a layout, compiled: loads are levelled until a cut proves it.

The problem is a transport: tokens of an expert may go to any of its ranks, and no rank shall get more than a limit.
Where some rank has more, tokens are pushed towards ranks that have room, along shortest paths of shared experts, all
of one distance before any greater (Dinic's order). Where no path is left, the ranks that reach no room are a tight
set: their experts are held nowhere else, so their mean is a lower bound, and the next limit (discrete Newton).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import borrowing, compiled
from moesys.load import IntArray


class MinMaxFlow(NamedTuple):
    """Scratch of ``min_max_flow`` for P replicas, R ranks and E experts, and the state it leaves.

    ``tokens_P`` int64: what each replica gets; ``load_R`` int64: its sums; ``tight_R`` bool: the ranks of the set that
    proves the limit, none where that is the mean; ``overflow`` int64 [1]: tokens for which ranks filled to the mean
    have no room.
    """

    tokens_P: IntArray
    load_R: IntArray
    tight_R: IntArray
    overflow: IntArray
    distance_R: IntArray
    queue_R: IntArray
    met_E: IntArray


@compiled
def new_flow(table):  # type: ignore[no-untyped-def]
    """A ``MinMaxFlow`` for these table."""
    num_ranks, num_experts = table.holds_R.size, table.first_E.size - 1
    return MinMaxFlow(
        np.zeros(table.rank_P.size, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.bool_),
        np.zeros(1, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_experts, np.bool_),
    )


@borrowing
def min_max_flow(tokens_E, table, flow):  # type: ignore[no-untyped-def]
    """The least tokens of the busiest rank, for ``tokens_E`` int64 [E]; the split and its proof are in ``flow``."""
    mean = limit = _water_fill_all(tokens_E, table, flow)
    flow.tight_R[:] = False
    flow.overflow[0] = 0
    while True:
        num_queued, excess, reaches = _measure_distances(limit, table, flow)
        if not excess:
            return limit
        if reaches:
            _push_all(limit, num_queued, table, flow)
            continue
        tokens = num_tight = 0
        for rank in range(flow.load_R.size):
            if limit == mean:
                flow.overflow[0] += max(flow.load_R[rank] - mean, 0)
            flow.tight_R[rank] = flow.distance_R[rank] < 0 and table.holds_R[rank]
            if flow.tight_R[rank]:
                tokens += flow.load_R[rank]
                num_tight += 1
        limit = -(-tokens // num_tight)


@borrowing
def _water_fill_all(tokens_E, table, flow):  # type: ignore[no-untyped-def]
    """A first split: experts with the fewest ranks first, each poured onto its ranks up to one flow. Gives the mean
    of loads.
    """
    first_E, rank_P = table.first_E, table.rank_P
    tokens_P, load_R = flow.tokens_P, flow.load_R
    load_R[:] = 0
    total = num_holding = 0
    for expert in range(tokens_E.size):
        total += tokens_E[expert]
        first = first_E[expert]
        if first_E[expert + 1] - first == 1:
            tokens_P[first] = tokens_E[expert]
            load_R[rank_P[first]] += tokens_E[expert]
    for expert in table.shared_F:
        water_fill(tokens_E[expert], first_E[expert], first_E[expert + 1], rank_P, tokens_P, load_R)
    for rank in range(load_R.size):
        num_holding += table.holds_R[rank]
    return -(-total // num_holding)


@borrowing
def water_fill(tokens, first, end, rank_P, tokens_P, load_R):  # type: ignore[no-untyped-def]
    """Gives tokens to the lowest of the ranks ``rank_P[first:end]``, up to one flow; higher ranks drop out."""
    width, water = end - first, tokens
    for replica in range(first, end):
        tokens_P[replica] = 0
        water += load_R[rank_P[replica]]
    height, dropped = 0, True
    while dropped:
        dropped = False
        height = water // width
        for replica in range(first, end):
            if tokens_P[replica] == 0 and load_R[rank_P[replica]] > height:
                tokens_P[replica] = -1
                water -= load_R[rank_P[replica]]
                width -= 1
                dropped = True
    left = water - height * width
    for replica in range(first, end):
        if tokens_P[replica] < 0:
            tokens_P[replica] = 0
        else:
            tokens_P[replica] = height - load_R[rank_P[replica]] + (left > 0)
            load_R[rank_P[replica]] += tokens_P[replica]
            left -= left > 0


@borrowing
def _measure_distances(limit, table, flow):  # type: ignore[no-untyped-def]
    """Steps from each rank to the nearest with room, -1 where none is reached; ranks queued by distance."""
    num_ranks = flow.load_R.size
    num_queued, excess = 0, False
    for rank in range(num_ranks):
        excess = excess or flow.load_R[rank] > limit
        flow.distance_R[rank] = -1
        if flow.load_R[rank] < limit and table.holds_R[rank]:
            flow.distance_R[rank] = 0
            flow.queue_R[num_queued] = rank
            num_queued += 1
    if not excess:
        return num_queued, False, False
    reaches = False
    flow.met_E[:] = False
    done = 0
    while done < num_queued:
        target = flow.queue_R[done]
        done += 1
        for index in range(table.first_R[target], table.first_R[target + 1]):
            expert = table.expert_P[table.shared_Q[index]]
            if flow.met_E[expert]:
                continue
            flow.met_E[expert] = True
            for replica in range(table.first_E[expert], table.first_E[expert + 1]):
                rank = table.rank_P[replica]
                if flow.distance_R[rank] < 0 and flow.tokens_P[replica] > 0:
                    flow.distance_R[rank] = flow.distance_R[target] + 1
                    reaches = reaches or flow.load_R[rank] > limit
                    flow.queue_R[num_queued] = rank
                    num_queued += 1
    return num_queued, True, reaches


@borrowing
def _push_all(limit, num_queued, table, flow):  # type: ignore[no-untyped-def]
    """Pushes what ranks have above the limit one step nearer, the farthest ranks first, so that it travels on."""
    for position in range(num_queued - 1, -1, -1):
        rank = flow.queue_R[position]
        if flow.distance_R[rank] == 0:
            return
        for index in range(table.first_R[rank], table.first_R[rank + 1]):
            if flow.load_R[rank] <= limit:
                break
            replica = table.shared_Q[index]
            expert = table.expert_P[replica]
            for other in range(table.first_E[expert], table.first_E[expert + 1]):
                if flow.load_R[rank] <= limit or flow.tokens_P[replica] == 0:
                    break
                target = table.rank_P[other]
                if flow.distance_R[target] != flow.distance_R[rank] - 1:
                    continue
                tokens = min(flow.load_R[rank] - limit, flow.tokens_P[replica])
                if flow.distance_R[target] == 0:
                    tokens = min(tokens, limit - flow.load_R[target])
                if tokens > 0:
                    flow.tokens_P[replica] -= tokens
                    flow.load_R[rank] -= tokens
                    flow.tokens_P[other] += tokens
                    flow.load_R[target] += tokens
