"""Local search: a layout is changed as long as that lowers what it costs; its moves are compiled.

A layout in force is repaired for a load by three kinds of moves:

- a *relocation* puts a replica of an expert with much to shed onto a rank with much room, in the place of the replica
  that the rank needs least. It lowers the overflow: what ranks filled to the mean have no room for. The best of a few
  is taken; so about as many replicas move as there are ranks with room, and no more;
- a *swap* exchanges an expert of the tight set, the ranks that nothing leads out of, for one outside: two experts with
  one replica each, whose difference is nearest to what the set has too much;
- a *drawn move* gives an expert of the tight set to a rank outside, in exchange for one of its experts or in the place
  of a replica that has others.

``climbed`` draws *neighbours* of a layout at random, and keeps those that lower any cost that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moesys.balance.flow.max_load import min_max_flow, new_flow
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.greedy.construction import row_holds
from moesys.balance.greedy.robust_cost import NO_LIMIT, mixed_bits
from moesys.compiled import borrowing, compiled
from moesys.layout import EMPTY
from moesys.load import IntArray

# Ranks and experts that are tried with one another for a relocation: those with most room, those with most to shed.
ROOMS, SHEDDERS = 4, 3
# Swaps that are tried before any move is drawn.
NEAREST_SWAPS = 6
# Draws for each slot of the layout: most are refused without being measured, and where nothing else is left all are.
DRAWS_A_SLOT = 40
# Draws of a neighbour, of which most are of none in small layouts.
DRAWS_A_NEIGHBOUR = 16


class MoveConstraints(NamedTuple):
    """Moves respect these. ``slots_R`` are the filled slots of each rank, int64. Replicas move only between ranks of
    one ``group_R``, int64, which keeps a replica of each expert that it has. An expert keeps ``least_replicas``.
    """

    slots_R: IntArray
    group_R: IntArray
    least_replicas: int


class SearchState(NamedTuple):
    """The state of a search; all int64.

    ``expert_RS``: the layout; ``replicas_E`` and ``replicas_GE``: replicas of each expert in all and by group; ``cost``
    [1]: what the layout costs; ``evaluations`` and ``moves`` [1]: layouts and replicas that may still be measured and
    moved; ``draw`` [1]: the number of the next draw.
    """

    expert_RS: IntArray
    replicas_E: IntArray
    replicas_GE: IntArray
    cost: IntArray
    evaluations: IntArray
    moves: IntArray
    draw: IntArray


@compiled
def local_search(tokens_E, constraints, relocates, expert_RS, evaluations, most_moves, unit):  # type: ignore[no-untyped-def]
    """Changes ``expert_RS`` for a load ``tokens_E`` int64 [E], by relocations, or else by swaps and drawn moves.
    Returns the number of replicas that changed, at most ``most_moves``. About ``evaluations`` layouts are measured.

    A pure function of its arguments: what is drawn comes from a counter, of which each ``unit`` has its own range.
    """
    search = SearchState(
        expert_RS,
        np.zeros(tokens_E.size, np.int64),
        np.zeros((constraints.group_R.max() + 1, tokens_E.size), np.int64),
        np.full(1, _cost(tokens_E, expert_RS), np.int64),
        np.full(1, evaluations, np.int64),
        np.full(1, most_moves, np.int64),
        np.full(1, unit * evaluations * DRAWS_A_SLOT * expert_RS.size, np.int64),
    )
    for rank in range(expert_RS.shape[0]):
        for slot in range(constraints.slots_R[rank]):
            search.replicas_E[expert_RS[rank, slot]] += 1
            search.replicas_GE[constraints.group_R[rank], expert_RS[rank, slot]] += 1
    moved = True
    while moved and search.evaluations[0] > 0 and search.moves[0] > 0:
        if relocates:
            moved = _relocate(tokens_E, constraints, search)
        else:
            moved = search.cost[0] > 0 and _swap_or_draw(tokens_E, constraints, search)
    return most_moves - search.moves[0]


@compiled
def _cost(tokens_E, expert_RS):  # type: ignore[no-untyped-def]
    """Returns the tokens that the best split leaves above the mean, on the busiest rank and, divided by the number of
    ranks, on all of them.
    """
    table = list_replicas(expert_RS, tokens_E.size)
    flow, num_ranks = new_flow(table), table.holds_R.sum()
    above = min_max_flow(tokens_E, table, flow) + -tokens_E.sum() // num_ranks
    return above - -flow.overflow[0] // num_ranks


@borrowing
def _can_spare(constraints, search, rank, expert):  # type: ignore[no-untyped-def]
    """Returns whether a rank may lose its replica of an expert: enough others are left, and one in its group."""
    enough = search.replicas_E[expert] > constraints.least_replicas
    return enough and search.replicas_GE[constraints.group_R[rank], expert] > 1


@borrowing
def _count_replaced(search, group, leaving, expert):  # type: ignore[no-untyped-def]
    search.replicas_E[leaving] -= 1
    search.replicas_E[expert] += 1
    search.replicas_GE[group, leaving] -= 1
    search.replicas_GE[group, expert] += 1


# --- relocations


@compiled
def _relocate(tokens_E, constraints, search):  # type: ignore[no-untyped-def]
    """Makes one relocation, if one lowers the overflow of ``tokens_E`` int64 [E]; returns whether it did."""
    expert_RS = search.expert_RS
    table = list_replicas(expert_RS, tokens_E.size)
    flow = new_flow(table)
    min_max_flow(tokens_E, table, flow)
    overflow = flow.overflow[0]
    room_R, shed_GE = np.zeros(expert_RS.shape[0], np.int64), np.zeros_like(search.replicas_GE)
    _measure_room(tokens_E, constraints, table, flow, room_R, shed_GE)
    rooms, shedders = np.empty(ROOMS, np.int64), np.empty(SHEDDERS, np.int64)
    while overflow > 0 and search.evaluations[0] > 0:
        num_rooms = _greatest(room_R, rooms)
        if num_rooms == 0:
            return False
        least, best_rank, best_slot, best_expert = overflow, np.int64(-1), np.int64(0), np.int64(0)
        for rank in rooms[:num_rooms]:
            slot = _least_needed(rank, constraints, search, table, flow)
            num_shedders = _greatest(shed_GE[constraints.group_R[rank]], shedders)
            for expert in shedders[:num_shedders]:
                if slot < 0 or row_holds(expert_RS, rank, expert):
                    continue
                leaving = expert_RS[rank, slot]
                expert_RS[rank, slot] = expert
                trial = list_replicas(expert_RS, tokens_E.size)
                trial_flow = new_flow(trial)
                min_max_flow(tokens_E, trial, trial_flow)
                search.evaluations[0] -= 1
                expert_RS[rank, slot] = leaving
                if trial_flow.overflow[0] < least:
                    least, best_rank, best_slot, best_expert = trial_flow.overflow[0], rank, slot, expert
            # good enough, where nearly all of the room is used
            if (overflow - least) * 4 >= room_R[rank] * 3:
                break
            # not again before something has changed
            room_R[rank] = 0
        if best_rank >= 0:
            _count_replaced(search, constraints.group_R[best_rank], expert_RS[best_rank, best_slot], best_expert)
            expert_RS[best_rank, best_slot] = best_expert
            search.moves[0] -= 1
            return True
    return False


@borrowing
def _measure_room(tokens_E, constraints, table, flow, room_R, shed_GE):  # type: ignore[no-untyped-def]
    """Writes what each rank lacks of the mean, and what each expert could shed from ranks of each group above it."""
    total = num_holding = 0
    for expert in range(tokens_E.size):
        total += tokens_E[expert]
        shed_GE[:, expert] = 0
    for rank in range(room_R.size):
        num_holding += table.holds_R[rank]
    mean = -(-total // num_holding)
    for rank in range(room_R.size):
        room_R[rank] = mean - flow.load_R[rank] if constraints.slots_R[rank] else 0
    for replica in range(table.rank_P.size):
        above = flow.load_R[table.rank_P[replica]] - mean
        if above > 0:
            group = constraints.group_R[table.rank_P[replica]]
            shed_GE[group, table.expert_P[replica]] += min(above, flow.tokens_P[replica])


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
def _least_needed(rank, constraints, search, table, flow):  # type: ignore[no-untyped-def]
    """Returns the slot of a rank's replica with the fewest tokens, of those that can be spared; -1 for none."""
    leaving, least = np.int64(-1), np.int64(0)
    for position in range(table.first_R[rank], table.first_R[rank + 1]):
        replica = table.shared_Q[position]
        expert = table.expert_P[replica]
        if _can_spare(constraints, search, rank, expert) and (leaving < 0 or flow.tokens_P[replica] < least):
            leaving, least = expert, flow.tokens_P[replica]
    for slot in range(constraints.slots_R[rank]):
        if search.expert_RS[rank, slot] == leaving:
            return slot
    return -1


# --- swaps and drawn moves


@compiled
def _swap_or_draw(tokens_E, constraints, search):  # type: ignore[no-untyped-def]
    """Makes one swap or drawn move between the tight set and the other ranks, if one lowers the cost. Returns whether
    it did.
    """
    inside_R, outside_R, too_much = _tight_sides(tokens_E, constraints, search.expert_RS)
    if inside_R.size == 0 or outside_R.size == 0:
        return False
    swaps_A4 = _nearest_swaps(tokens_E, constraints, search, inside_R, outside_R, too_much)
    for index in range(swaps_A4.shape[0]):
        tight, slot, other, other_slot = swaps_A4[index]
        if _try(tokens_E, constraints, search, (tight, slot), (other, other_slot), True):
            return True
        if search.evaluations[0] <= 0:
            return False
    for _ in range(DRAWS_A_SLOT * search.expert_RS.size):
        bits = mixed_bits(search.draw[0], 0)
        search.draw[0] += 1
        tight = inside_R[np.int64(bits & np.uint64(0xFFFF)) % inside_R.size]
        other = outside_R[np.int64((bits >> np.uint64(16)) & np.uint64(0xFFFF)) % outside_R.size]
        slot = np.int64((bits >> np.uint64(32)) & np.uint64(0xFFF)) % constraints.slots_R[tight]
        other_slot = np.int64((bits >> np.uint64(44)) & np.uint64(0xFFF)) % constraints.slots_R[other]
        swaps = (bits >> np.uint64(63)) == np.uint64(1)
        if _try(tokens_E, constraints, search, (tight, slot), (other, other_slot), swaps):
            return True
        if search.evaluations[0] <= 0:
            return False
    return False


@compiled
def _try(tokens_E, constraints, search, place, other_place, swaps):  # type: ignore[no-untyped-def]
    """Moves the expert of one place (rank, slot) to another one, and that one's to the first if it ``swaps``; takes it
    back where the cost is no lower. Returns whether the move was made.
    """
    (tight, slot), (other, other_slot) = place, other_place
    expert_RS, group_R = search.expert_RS, constraints.group_R
    expert, leaving = expert_RS[tight, slot], expert_RS[other, other_slot]
    if tokens_E[expert] == 0 or search.moves[0] < 1 + swaps:
        return False
    if group_R[tight] != group_R[other] or row_holds(expert_RS, other, expert):
        return False
    if swaps:
        if row_holds(expert_RS, tight, leaving):
            return False
        expert_RS[tight, slot] = leaving
    elif not _can_spare(constraints, search, other, leaving):
        return False
    expert_RS[other, other_slot] = expert
    search.evaluations[0] -= 1
    cost = _cost(tokens_E, expert_RS)
    if cost >= search.cost[0]:
        expert_RS[tight, slot] = expert
        expert_RS[other, other_slot] = leaving
        return False
    search.cost[0] = cost
    search.moves[0] -= 1 + swaps
    if not swaps:
        _count_replaced(search, group_R[other], leaving, expert)
    return True


@compiled
def _nearest_swaps(tokens_E, constraints, search, inside_R, outside_R, too_much):  # type: ignore[no-untyped-def]
    """Returns the swaps (rank, slot, rank outside, slot), int64 [A, 4], whose difference in tokens is nearest to
    ``too_much``, nearest first. Only experts with one replica, the best partner of each.
    """
    expert_RS, replicas_E = search.expert_RS, search.replicas_E
    swaps_A4 = np.empty((NEAREST_SWAPS, 4), np.int64)
    partners = 0
    for rank in outside_R:
        partners += constraints.slots_R[rank]
    partner_tokens, partner_place = np.empty(partners, np.int64), np.empty(partners, np.int64)
    partners = 0
    for rank in outside_R:
        for slot in range(constraints.slots_R[rank]):
            if replicas_E[expert_RS[rank, slot]] == 1:
                partner_tokens[partners] = tokens_E[expert_RS[rank, slot]]
                partner_place[partners] = rank * expert_RS.shape[1] + slot
                partners += 1
    if partners == 0:
        return swaps_A4[:0]
    order = np.argsort(partner_tokens[:partners], kind="mergesort")
    sorted_tokens = partner_tokens[order]
    misfit_A = np.full(NEAREST_SWAPS, NO_LIMIT)
    num_swaps = 0
    for rank in inside_R:
        for slot in range(constraints.slots_R[rank]):
            expert = expert_RS[rank, slot]
            if replicas_E[expert] != 1:
                continue
            above = np.searchsorted(sorted_tokens, tokens_E[expert] - too_much)
            for partner in range(max(above - 1, 0), min(above + 1, partners)):
                # a swap that takes no tokens away is of no use
                if sorted_tokens[partner] >= tokens_E[expert]:
                    continue
                misfit = abs(tokens_E[expert] - too_much - sorted_tokens[partner])
                place = partner_place[order[partner]]
                index = min(num_swaps, NEAREST_SWAPS - 1)
                if misfit >= misfit_A[index] and num_swaps == NEAREST_SWAPS:
                    continue
                while index and misfit_A[index - 1] > misfit:
                    misfit_A[index] = misfit_A[index - 1]
                    for column in range(4):
                        swaps_A4[index, column] = swaps_A4[index - 1, column]
                    index -= 1
                misfit_A[index] = misfit
                swaps_A4[index, 0], swaps_A4[index, 1] = rank, slot
                swaps_A4[index, 2], swaps_A4[index, 3] = place // expert_RS.shape[1], place % expert_RS.shape[1]
                num_swaps = min(num_swaps + 1, NEAREST_SWAPS)
    return swaps_A4[:num_swaps]


@compiled
def _tight_sides(tokens_E, constraints, expert_RS):  # type: ignore[no-untyped-def]
    """Returns the ranks with slots in the tight set of ``tokens_E``, those outside of it, and what the set has above
    the mean.
    """
    table = list_replicas(expert_RS, tokens_E.size)
    flow = new_flow(table)
    min_max_flow(tokens_E, table, flow)
    inside_R = np.flatnonzero(flow.tight_R)
    outside_R = np.flatnonzero(~flow.tight_R & (constraints.slots_R > 0))
    mean = -(-flow.load_R.sum() // max(inside_R.size + outside_R.size, 1))
    return inside_R, outside_R, flow.load_R[inside_R].sum() - inside_R.size * mean


def climbed(
    expert_RS: IntArray,
    slots_R: IntArray,
    num_experts: int,
    cost: Callable[[IntArray, int], int],
    draws: range,
    empties: bool = True,
) -> IntArray:
    """Returns the layout after as many trials as ``draws`` has numbers: of its neighbours, those that cost less.

    cost: of a layout; it may stop at the given limit, and return anything above. empties: whether slots may be left
    empty.
    """
    least = cost(expert_RS, NO_LIMIT)
    for draw in draws:
        trial_RS = neighbour(expert_RS, slots_R, num_experts, empties, draw)
        found = cost(trial_RS, least)
        if found < least:
            expert_RS, least = trial_RS, found
    return expert_RS


@compiled
def neighbour(expert_RS, slots_R, num_experts, empties, draw):  # type: ignore[no-untyped-def]
    """Returns the layout with one slot changed, to another expert or with ``empties`` to none, or with the experts of
    two ranks' slots exchanged: by ``draw``, a pure function. Every expert keeps a replica, and no rank gets two of one.
    The same layout where no draw finds another.
    """
    trial_RS, num_ranks = expert_RS.copy(), np.uint64(slots_R.size)
    for attempt in range(DRAWS_A_NEIGHBOUR):
        bits, others = mixed_bits(draw, 2 * attempt), mixed_bits(draw, 2 * attempt + 1)
        exchanges, others = others % np.uint64(2) == 1, others // np.uint64(2)
        rank = np.int64(bits % num_ranks)
        other = np.int64(others % num_ranks) if exchanges else rank
        if not slots_R[rank] or not slots_R[other]:
            continue
        slot = np.int64(bits // num_ranks % np.uint64(slots_R[rank]))
        before = expert_RS[rank, slot]
        if exchanges:
            place = np.int64(others // num_ranks % np.uint64(slots_R[other]))
            after, stays = expert_RS[other, place], before == EMPTY or not row_holds(expert_RS, other, before)
        else:
            after = np.int64(others % np.uint64(num_experts + empties)) - empties
            stays = before == EMPTY or (expert_RS == before).sum() > 1
        if stays and after != before and (after == EMPTY or not row_holds(expert_RS, rank, after)):
            trial_RS[rank, slot] = after
            if exchanges:
                trial_RS[other, place] = before
            break
    return trial_RS
