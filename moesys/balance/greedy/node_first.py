"""Deals experts to nodes, compiled: each node takes what its own ranks want most, so that few rows leave it.

A node has as many places as its ranks have slots. A place of an expert on a node is worth the tokens that it keeps
there: of the node's own demand as much as a rank computes on average, and what is left over another place keeps. Places
are given by worth, the most first, as long as every expert can still have as many as its load needs somewhere, and as
no node becomes the only one of more than its share. Experts that come too short are then dealt so that nodes are level.
"""

from __future__ import annotations

import numpy as np

from moesys.compiled import borrowing, compiled

# A node that takes an expert alone may so have at most so many tenths of its share: the rest levels nodes.
FILLED_TENTHS = 9


@compiled
def deal_to_nodes(supply_NE, slots_N, ranks_N, parts):  # type: ignore[no-untyped-def]
    """Returns each node's places for each expert, int64 [N, E], and the tokens that it is to compute, int64 [N, E].

    ``supply_NE``: tokens by source node; ``slots_N``, ``ranks_N``: of each node, those of ranks that have slots. There
    are as many places as slots, and none of an expert more than ranks.
    """
    num_nodes, num_experts = supply_NE.shape
    tokens_E = supply_NE.sum(axis=0)
    mean = max(tokens_E.sum() // ranks_N.sum(), 1)
    place = max(mean // parts, 1)
    lacking_E = _needed(tokens_E, place, slots_N.sum())
    places_NE = np.zeros((num_nodes, num_experts), np.int64)
    free_N = slots_N.copy()
    _take_own(supply_NE, tokens_E, ranks_N, mean, place, lacking_E, places_NE, free_N)
    tokens_NE = level(supply_NE, places_NE, ranks_N)
    load_N = tokens_NE.sum(axis=1)
    for expert in np.argsort(-tokens_E, kind="mergesort"):
        while lacking_E[expert]:
            best = -1
            for node in range(num_nodes):
                if not free_N[node] or places_NE[node, expert] == ranks_N[node]:
                    continue
                if best < 0 or load_N[node] * ranks_N[best] < load_N[best] * ranks_N[node]:
                    best = node
            if best < 0:
                break
            places_NE[best, expert] += 1
            free_N[best] -= 1
            load_N[best] += min(place, tokens_E[expert])
            lacking_E[expert] -= 1
    _fill(supply_NE, ranks_N, places_NE, free_N)
    return places_NE, level(supply_NE, places_NE, ranks_N)


@compiled
def _needed(tokens_E, mean, num_slots):  # type: ignore[no-untyped-def]
    """Returns how many places each expert needs, int64 [E]: one for each rank's mean, or part of one."""
    needed_E = -(-tokens_E // mean) + (tokens_E == 0)
    while needed_E.sum() > num_slots:
        # of those with several, the one that misses its last one the least
        best = -1
        for expert in range(tokens_E.size):
            if needed_E[expert] > 1 and (
                best < 0 or tokens_E[expert] * (needed_E[best] - 1) < tokens_E[best] * (needed_E[expert] - 1)
            ):
                best = expert
        needed_E[best] -= 1
    return needed_E


@compiled
def _take_own(supply_NE, tokens_E, ranks_N, mean, place, lacking_E, places_NE, free_N):  # type: ignore[no-untyped-def]
    num_nodes, num_experts = supply_NE.shape
    worth_P, place_P = _places_by_worth(supply_NE, place)
    owner_E, alone_N = np.full(num_experts, -1), np.zeros(num_nodes, np.int64)
    num_ranks, num_free, num_lacking = ranks_N.sum(), free_N.sum(), lacking_E.sum()
    for index in np.argsort(-worth_P, kind="mergesort"):
        node, expert = place_P[index] // num_experts, place_P[index] % num_experts
        still_lacking = num_lacking - (lacking_E[expert] > 0)
        reserved = max(still_lacking * ranks_N[node] // num_ranks, 0)
        if free_N[node] - 1 < reserved or num_free - 1 < still_lacking or places_NE[node, expert] == ranks_N[node]:
            continue
        if owner_E[expert] < 0:
            if (alone_N[node] + tokens_E[expert]) * 10 > mean * ranks_N[node] * FILLED_TENTHS:
                continue
            owner_E[expert] = node
            alone_N[node] += tokens_E[expert]
        elif not places_NE[node, expert]:
            alone_N[node] += supply_NE[node, expert]
            alone_N[owner_E[expert]] -= supply_NE[node, expert]
        places_NE[node, expert] += 1
        free_N[node] -= 1
        num_free -= 1
        num_lacking = still_lacking
        lacking_E[expert] = max(lacking_E[expert] - 1, 0)


@compiled
def _places_by_worth(supply_NE, mean):  # type: ignore[no-untyped-def]
    """Returns what each place would keep, int64 [P], and its node and expert as node · E + expert, int64 [P]."""
    num_nodes, num_experts = supply_NE.shape
    num_places = (-(-supply_NE // mean)).sum()
    worth_P, place_P = np.empty(num_places, np.int64), np.empty(num_places, np.int64)
    place = 0
    for node in range(num_nodes):
        for expert in range(num_experts):
            left = supply_NE[node, expert]
            while left > 0:
                worth_P[place], place_P[place] = min(left, mean), node * num_experts + expert
                left -= mean
                place += 1
    return worth_P, place_P


@borrowing
def _fill(supply_NE, ranks_N, places_NE, free_N):  # type: ignore[no-untyped-def]
    """Gives places that are left to the experts of the node with the most tokens a place."""
    num_nodes, num_experts = supply_NE.shape
    for node in range(num_nodes):
        while free_N[node]:
            best = -1
            for expert in range(num_experts):
                if places_NE[node, expert] == ranks_N[node]:
                    continue
                if best < 0 or supply_NE[node, expert] * (places_NE[node, best] + 1) > supply_NE[node, best] * (
                    places_NE[node, expert] + 1
                ):
                    best = expert
            if best < 0:
                break
            places_NE[node, best] += 1
            free_N[node] -= 1


@compiled
def level(supply_NE, places_NE, ranks_N):  # type: ignore[no-untyped-def]
    """Returns the tokens of each node and expert, int64 [N, E]: nodes keep their own, and others' go to level them.

    Experts with the fewest nodes come first, and of these those with the most tokens.
    """
    num_nodes = supply_NE.shape[0]
    tokens_NE = supply_NE * (places_NE > 0)
    load_N = tokens_NE.sum(axis=1)
    away_E = supply_NE.sum(axis=0) - tokens_NE.sum(axis=0)
    width_E = (places_NE > 0).sum(axis=0)
    by_tokens_E = np.argsort(-away_E, kind="mergesort")
    for expert in by_tokens_E[np.argsort(width_E[by_tokens_E], kind="mergesort")]:
        away = away_E[expert]
        while away > 0 and width_E[expert]:
            # to the lowest, up to the next one, or all there is
            lowest = next_load = -1
            for node in range(num_nodes):
                if not places_NE[node, expert]:
                    continue
                if lowest < 0 or load_N[node] * ranks_N[lowest] < load_N[lowest] * ranks_N[node]:
                    lowest = node
            for node in range(num_nodes):
                if places_NE[node, expert] and load_N[node] * ranks_N[lowest] > load_N[lowest] * ranks_N[node]:
                    up_to = load_N[node] * ranks_N[lowest] // ranks_N[node]
                    if next_load < 0 or up_to < next_load:
                        next_load = up_to
            step = away if next_load < 0 else max(min(next_load - load_N[lowest], away), 1)
            if next_load < 0 and width_E[expert] > 1:
                # all are level: an equal share each, the rest to the first
                step = -(-away // width_E[expert])
            tokens_NE[lowest, expert] += step
            load_N[lowest] += step
            away -= step
    return tokens_NE
