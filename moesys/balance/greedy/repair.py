"""Mending a layout in force, compiled: replicas go where ranks have room, until a load needs no more than the mean.

Tokens are poured onto the replicas there are, no rank above the mean (``levelling``): what then has no place, the
overflow, is as much as other ranks have room, but no replica leads there. Each move puts a replica of an expert with
much to shed onto a rank with much room, in the place of the one that it misses least. It is the one of least overflow
among a few, measured. So about as many replicas move as there are ranks with room, and no more.
"""

from __future__ import annotations

import numpy as np

from moesys.balance.flow.holders import list_holders
from moesys.balance.flow.min_max_flow import least_max, new_level
from moesys.balance.greedy.search import row_holds
from moesys.compiled import borrowing, compiled

# Ranks and experts that are tried with one another for a move: those with most room, those with most to shed.
ROOMS, SHEDDERS = 4, 3


@compiled
def mend(tokens_E, fence, expert_RS, evaluations, most_moves):  # type: ignore[no-untyped-def]
    """Changes ``expert_RS`` by at most ``most_moves`` replicas, as ``fence`` allows; gives how many.

    Every move lowers the overflow of ``tokens_E`` int64 [E]. It ends where there is none, where nothing that is tried
    lowers it, or after ``evaluations`` measurements.
    """
    num_ranks, num_experts = expert_RS.shape[0], tokens_E.size
    replicas_GE = np.zeros((fence.group_R.max() + 1, num_experts), np.int64)
    for rank in range(num_ranks):
        for slot in range(fence.slots_R[rank]):
            replicas_GE[fence.group_R[rank], expert_RS[rank, slot]] += 1
    room_R, shed_GE = np.zeros(num_ranks, np.int64), np.zeros_like(replicas_GE)
    rooms, shedders = np.empty(ROOMS, np.int64), np.empty(SHEDDERS, np.int64)
    moves, overflow, changed = 0, np.int64(1), True
    while overflow > 0 and moves < most_moves and evaluations > 0:
        if changed:
            holders = list_holders(expert_RS, num_experts)
            level = new_level(holders)
            least_max(tokens_E, holders, level)
            overflow = level.overflow[0]
            _measure(tokens_E, fence, holders, level, room_R, shed_GE)
        num_rooms = _greatest(room_R, rooms)
        if num_rooms == 0:
            break
        least, best_rank, best_slot, best_expert = overflow, np.int64(-1), np.int64(0), np.int64(0)
        for rank in rooms[:num_rooms]:
            slot = _least_missed(rank, replicas_GE, fence, expert_RS, holders, level)
            num_shedders = _greatest(shed_GE[fence.group_R[rank]], shedders)
            for expert in shedders[:num_shedders]:
                if slot < 0 or row_holds(expert_RS, rank, expert):
                    continue
                leaving = expert_RS[rank, slot]
                expert_RS[rank, slot] = expert
                trial = list_holders(expert_RS, num_experts)
                trial_level = new_level(trial)
                least_max(tokens_E, trial, trial_level)
                evaluations -= 1
                expert_RS[rank, slot] = leaving
                if trial_level.overflow[0] < least:
                    least, best_rank, best_slot, best_expert = trial_level.overflow[0], rank, slot, expert
            # good enough, where nearly all of the room is used
            if (overflow - least) * 4 >= room_R[rank] * 3:
                break
            # not again before something has changed
            room_R[rank] = 0
        changed = bool(best_rank >= 0)
        if changed:
            replicas_GE[fence.group_R[best_rank], expert_RS[best_rank, best_slot]] -= 1
            replicas_GE[fence.group_R[best_rank], best_expert] += 1
            expert_RS[best_rank, best_slot] = best_expert
            moves += 1
    return moves


@borrowing
def _measure(tokens_E, fence, holders, level, room_R, shed_GE):  # type: ignore[no-untyped-def]
    """What each rank lacks of the mean, and what each expert could take away from ranks of each group above it."""
    total = num_holding = 0
    for expert in range(tokens_E.size):
        total += tokens_E[expert]
        shed_GE[:, expert] = 0
    for rank in range(room_R.size):
        num_holding += holders.holds_R[rank]
    mean = -(-total // num_holding)
    for rank in range(room_R.size):
        room_R[rank] = mean - level.load_R[rank] if fence.slots_R[rank] else 0
    for replica in range(holders.rank_P.size):
        above = level.load_R[holders.rank_P[replica]] - mean
        if above > 0:
            group = fence.group_R[holders.rank_P[replica]]
            shed_GE[group, holders.expert_P[replica]] += min(above, level.tokens_P[replica])


@borrowing
def _greatest(values, found):  # type: ignore[no-untyped-def]
    """Fills ``found`` with the indices of the greatest positive values, the greatest first; gives how many."""
    num_found = 0
    for index in range(values.size):
        place = min(num_found, found.size - 1)
        if values[index] <= 0 or (num_found == found.size and values[index] <= values[found[place]]):
            continue
        while place and values[found[place - 1]] < values[index]:
            found[place] = found[place - 1]
            place -= 1
        found[place] = index
        num_found = min(num_found + 1, found.size)
    return num_found


@borrowing
def _least_missed(rank, replicas_GE, fence, expert_RS, holders, level):  # type: ignore[no-untyped-def]
    """The slot of a rank's replica with the fewest tokens, of those that can be spared; -1 for none."""
    leaving, least = np.int64(-1), np.int64(0)
    for position in range(holders.first_R[rank], holders.first_R[rank + 1]):
        replica = holders.shared_Q[position]
        expert = holders.expert_P[replica]
        replicas = np.int64(0)
        for group in range(replicas_GE.shape[0]):
            replicas += replicas_GE[group, expert]
        if replicas <= fence.least_replicas[0] or replicas_GE[fence.group_R[rank], expert] == 1:
            continue
        if leaving < 0 or level.tokens_P[replica] < least:
            leaving, least = expert, level.tokens_P[replica]
    for slot in range(fence.slots_R[rank]):
        if expert_RS[rank, slot] == leaving:
            return slot
    return -1
