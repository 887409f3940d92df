"""Construction of a layout, compiled: the heaviest experts are cut so that every rank is filled exactly.

Experts are *hot*, which may have many replicas, or *single*, with one. Single experts go to the lightest rank, heaviest
first, and leave a slot for a hot one free on every rank. What they leave of a rank's fair share, its room, the hot ones
fill to the token. A rank with one slot for hot experts is that expert's *own*; one with two is *shared*: two hot
experts divide the room. Shared ranks join the hot experts to a tree in which heavier ones have more neighbours, so that
on later counts what one expert has more than foreseen can flow to every rank: with one redundant slot a rank there are
just as many shared ranks as a tree needs.

On exact counts this is the wrap-around rule of McNaughton (1959), with a choice of who is cut where; that choice is
what makes it robust, and keeps tokens in their node. Several numbers of hot experts are tried, and the layout of the
least robust cost is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moesys.balance.greedy.robust_cost import NO_LIMIT, draw_scenarios, robust_cost
from moesys.balance.planning_problem import experts_with_room
from moesys.compiled import borrowing, compiled
from moesys.layout import EMPTY
from moesys.load import IntArray

# Numbers of hot experts to try: all with at least so many eighths of a rank's mean, and as many of the heaviest as have
# so many tenths of all tokens.
HOT_EIGHTHS = (16, 12, 8, 6, 4, 3, 2, 1)
HOT_TENTHS = (1, 2, 3, 4)
# From so many experts on, if each has one slot, a layout without hot ones is as good: for 157 of 160 nodes with 24
# experts it was the best.
MANY_SINGLE = 16
# A hot expert's last tokens go to a shared rank if they fill at most so many sixteenths of its room: the rest is what
# its neighbour in the tree can give way by.
FULLEST_SHARED_RANK = 14


class ConstructionProblem(NamedTuple):
    """Where experts are to be placed. R ranks, N nodes, E experts; all int64.

    ``slots_R``: usable slots, 0 for ranks that are left alone; ``node_R``; ``rank_A``: ranks with slots, in the order
    that goes round the nodes, where those of node n have the places ``place_A[first_N[n]:first_N[n + 1]]``;
    ``tokens_E``: what is to be balanced; ``supply_NE``: of it, what each node's ranks send; ``expert_D``: the D experts
    to place, heaviest first; ``before_RS``: what ranks hold now, all EMPTY for nothing. Single experts stay
    there as long as they leave hot ones room, and hot ones where their tokens have no longer way.
    """

    slots_R: IntArray
    node_R: IntArray
    rank_A: IntArray
    tokens_E: IntArray
    supply_NE: IntArray
    expert_D: IntArray
    before_RS: IntArray
    place_A: IntArray
    first_N: IntArray


class PartialLayout(NamedTuple):
    """A layout under construction; all int64.

    ``expert_RS``: what stands; ``filled_R``: slots in use; ``open_R``: free slots for hot experts; ``room_R``:
    tokens that a rank still takes; for hot expert j ``rest_J``: tokens not placed, ``placed_J``: replicas,
    ``lacking_NJ``: tokens that a node's ranks send beyond what it got there.
    """

    expert_RS: IntArray
    filled_R: IntArray
    open_R: IntArray
    room_R: IntArray
    rest_J: IntArray
    placed_J: IntArray
    lacking_NJ: IntArray


@compiled
def build_each_node(slots_R, node_R, rank_A, supply_NE, scenarios_each, before_RS, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS``, node by node, with all experts, balanced for what the node's ranks send; False where some
    node's layout cannot be built.
    """
    for node in range(supply_NE.shape[0]):
        tokens_E, ranks = supply_NE[node], rank_A[node_R[rank_A] == node]
        expert_E = np.argsort(-tokens_E, kind="mergesort")
        # a node's own loads vary more than those of all
        drawn = (scenarios_each, 3 * scenarios_each)
        if not build_part(slots_R, node_R, ranks, tokens_E, supply_NE, expert_E, drawn, before_RS, expert_RS):
            return False
    return True


@compiled
def build_part(slots_R, node_R, rank_A, tokens_E, supply_NE, expert_D, drawn, before_RS, expert_RS):  # type: ignore[no-untyped-def]
    """Fills the rows of ``rank_A`` in ``expert_RS`` [R, S] with the experts ``expert_D``, heaviest first, balanced for
    ``tokens_E`` and for so many later loads that drift and that jump (``drawn``); False where no layout can be built.

    Only these ranks and experts, numbered in the same order, are looked at, so that time does not depend on others.
    """
    part_R, part_E, num_slots = np.sort(rank_A), np.sort(expert_D), expert_RS.shape[1]
    first_node, last_node = node_R[part_R[0]], node_R[part_R[-1]]
    new_R, new_E = np.empty(node_R.size, np.int64), np.full(tokens_E.size, EMPTY)
    new_R[part_R], new_E[part_E] = np.arange(part_R.size), np.arange(part_E.size)
    before_PS = np.full((part_R.size, num_slots), EMPTY)
    for place in range(part_R.size):
        for slot in range(num_slots):
            if before_RS[part_R[place], slot] != EMPTY:
                before_PS[place, slot] = new_E[before_RS[part_R[place], slot]]
    part_A = node_R[rank_A] - first_node
    first_N = np.zeros(last_node - first_node + 2, np.int64)
    first_N[1:] = np.bincount(part_A, minlength=first_N.size - 1).cumsum()
    problem = ConstructionProblem(
        np.minimum(slots_R[part_R], part_E.size),
        node_R[part_R] - first_node,
        new_R[rank_A],
        tokens_E[part_E],
        np.ascontiguousarray(supply_NE[first_node : last_node + 1][:, part_E]),
        new_E[expert_D],
        before_PS,
        np.argsort(part_A, kind="mergesort"),
        first_N,
    )
    scenarios = draw_scenarios(tokens_E, part_E, drawn[0], drawn[1])
    found_PS = np.full((part_R.size, num_slots), EMPTY)
    if not build_best(problem, scenarios, found_PS):
        return False
    for place in range(part_R.size):
        for slot in range(num_slots):
            expert = found_PS[place, slot]
            expert_RS[part_R[place], slot] = EMPTY if expert == EMPTY else part_E[expert]
    return True


@compiled
def build_best(problem, scenarios, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` with the layout of least robust cost over several numbers of hot experts; False for none."""
    num_experts, num_ranks = problem.expert_D.size, problem.rank_A.size
    total, num_slots = problem.tokens_E[problem.expert_D].sum(), problem.slots_R[problem.rank_A].sum()
    wanted = np.zeros(num_experts + 1, np.bool_)
    # none, the fewest that can be, which is one or two, and all
    wanted[:3] = wanted[num_experts] = True
    for eighth in HOT_EIGHTHS:
        count = 0
        while count < num_experts and problem.tokens_E[problem.expert_D[count]] * 8 * num_ranks >= eighth * total:
            count += 1
        wanted[count] = True
    for tenth in HOT_TENTHS:
        count = tokens = 0
        while count < num_experts and tokens * 10 < tenth * total:
            tokens += problem.tokens_E[problem.expert_D[count]]
            count += 1
        wanted[count] = True
    if num_slots == num_experts >= MANY_SINGLE:
        wanted[1:] = False
    trial_RS = expert_RS.copy()
    cost_K = np.zeros(scenarios.weight_K.size, np.int64)
    least = np.int64(NO_LIMIT)
    for num_hot in range(num_experts + 1):
        if wanted[num_hot] and least > 0 and build_layout(problem, num_hot, trial_RS):
            cost = robust_cost(scenarios, trial_RS, least - 1, cost_K)
            if cost < least:
                least = cost
                expert_RS[:] = trial_RS
    return least < NO_LIMIT


@compiled
def build_layout(problem, num_hot, expert_RS):  # type: ignore[no-untyped-def]
    """Fills the slots of ``problem``'s ranks in ``expert_RS`` [R, S] with the first ``num_hot`` experts as hot ones.

    Every slot is filled, no rank holds an expert twice. False, with ``expert_RS`` in disorder, where so few hot
    experts cannot fill the slots, or so many do not fit.
    """
    num_single = problem.expert_D.size - num_hot
    num_slots = most_hot_slots = total = 0
    for rank in problem.rank_A:
        num_slots += problem.slots_R[rank]
        most_hot_slots += min(problem.slots_R[rank], num_hot)
        expert_RS[rank, :] = EMPTY
    for expert in problem.expert_D:
        total += problem.tokens_E[expert]
    hot_slots = num_slots - num_single
    if not num_hot <= hot_slots <= most_hot_slots:
        return False
    num_ranks, num_active = problem.slots_R.size, problem.rank_A.size
    partial = PartialLayout(
        expert_RS,
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.empty(num_hot, np.int64),
        np.zeros(num_hot, np.int64),
        np.empty((problem.supply_NE.shape[0], num_hot), np.int64),
    )
    for index in range(num_active):
        partial.room_R[problem.rank_A[index]] = total // num_active + (index < total % num_active)
    for hot in range(num_hot):
        partial.rest_J[hot] = problem.tokens_E[problem.expert_D[hot]]
        partial.lacking_NJ[:, hot] = problem.supply_NE[:, problem.expert_D[hot]]
    _deal_hot_slots(problem, num_hot, hot_slots, partial.open_R)
    _place_single(problem, num_hot, partial)
    parent_J = _grow_tree(problem, num_hot)
    spare_ranks = hot_slots - num_active - (num_hot - 1)
    for hot in range(num_hot - 1, 0, -1):
        spare_ranks = _place_hot(problem, hot, parent_J[hot], spare_ranks, partial)
    return _place_missing(problem, num_hot, partial) and _fill_up(problem, num_hot, partial)


@borrowing
def _deal_hot_slots(problem, num_hot, hot_slots, open_R):  # type: ignore[no-untyped-def]
    """Gives every rank in turn one slot for hot experts, then a second one, and so on."""
    while hot_slots:
        for rank in problem.rank_A:
            if hot_slots and open_R[rank] < min(problem.slots_R[rank], num_hot):
                open_R[rank] += 1
                hot_slots -= 1


@compiled
def _place_single(problem, num_hot, partial):  # type: ignore[no-untyped-def]
    """Places single experts, heaviest first, each where it is, or on the rank with most room of those with a slot for
    it.
    """
    filled_R, open_R, room_R = partial.filled_R, partial.open_R, partial.room_R
    single_E = np.zeros(problem.tokens_E.size, np.bool_)
    single_E[problem.expert_D[num_hot:]] = True
    hot_tokens = np.int64(0)
    for expert in problem.expert_D[:num_hot]:
        hot_tokens += problem.tokens_E[expert]
    # half of what hot experts take of a rank on average: where they have less room, less can give way
    least_room = hot_tokens // problem.rank_A.size // 2
    for rank in problem.rank_A:
        for slot in range(problem.before_RS.shape[1]):
            expert = problem.before_RS[rank, slot]
            if expert == EMPTY or not single_E[expert] or filled_R[rank] + open_R[rank] == problem.slots_R[rank]:
                continue
            if room_R[rank] - problem.tokens_E[expert] >= least_room:
                single_E[expert] = False
                partial.expert_RS[rank, filled_R[rank]] = expert
                filled_R[rank] += 1
                room_R[rank] -= problem.tokens_E[expert]
    heap = [
        (-room_R[rank], place)
        for place, rank in enumerate(problem.rank_A)
        if filled_R[rank] + open_R[rank] < problem.slots_R[rank]
    ]
    heapq.heapify(heap)
    for expert in problem.expert_D[num_hot:]:
        if not single_E[expert]:
            continue
        place = heap[0][1]
        rank = problem.rank_A[place]
        partial.expert_RS[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
        room_R[rank] -= problem.tokens_E[expert]
        if filled_R[rank] + open_R[rank] < problem.slots_R[rank]:
            heapq.heapreplace(heap, (-room_R[rank], place))
        else:
            heapq.heappop(heap)


@compiled
def _grow_tree(problem, num_hot):  # type: ignore[no-untyped-def]
    """Returns each hot expert's neighbour among heavier ones: that with the most tokens a neighbour."""
    parent_J = np.zeros(num_hot, np.int64)
    degree_J = np.ones(num_hot, np.int64)
    for hot in range(1, num_hot):
        best = 0
        for other in range(1, hot):
            tokens, best_tokens = problem.tokens_E[problem.expert_D[other]], problem.tokens_E[problem.expert_D[best]]
            if tokens * degree_J[best] > best_tokens * degree_J[other]:
                best = other
        parent_J[hot] = best
        degree_J[best] += 1
        degree_J[hot] += 1
    return parent_J


@borrowing
def row_holds(expert_RS, rank, expert):  # type: ignore[no-untyped-def]
    """Returns whether a rank holds an expert."""
    held = False
    for slot in range(expert_RS.shape[1]):
        held = held or expert_RS[rank, slot] == expert
    return held


@borrowing
def _put(problem, partial, rank, hot, tokens):  # type: ignore[no-untyped-def]
    """Puts a replica of a hot expert, and so many of its tokens, onto a rank with a free slot for it."""
    partial.expert_RS[rank, partial.filled_R[rank]] = problem.expert_D[hot]
    partial.filled_R[rank] += 1
    partial.open_R[rank] -= 1
    partial.room_R[rank] -= tokens
    partial.rest_J[hot] -= tokens
    partial.placed_J[hot] += 1
    partial.lacking_NJ[problem.node_R[rank], hot] -= tokens


@borrowing
def _find_rank(problem, hot, parent, partial):  # type: ignore[no-untyped-def]
    """Returns the rank nearest to a hot expert's tokens, of these one that holds it now, of these the first in turn;
    -1 for none. Looked at are ranks that can take the expert and its ``parent``; without one, -1, those with one slot
    for hot experts that it can fill.
    """
    expert, lacking_N = problem.expert_D[hot], partial.lacking_NJ[:, hot]
    slots, most_room = (np.int64(1), partial.rest_J[hot]) if parent < 0 else (np.int64(2), np.int64(NO_LIMIT))
    best = best_place = np.int64(-1)
    most, holds_now = np.int64(0), False
    # the node that lacks most comes first, so that of most others no rank is looked at
    for node in range(-1, lacking_N.size):
        if node < 0:
            for other in range(lacking_N.size):
                node = other if node < 0 or lacking_N[other] > lacking_N[node] else node
        if best >= 0 and lacking_N[node] < most:
            continue
        for place in problem.place_A[problem.first_N[node] : problem.first_N[node + 1]]:
            rank = problem.rank_A[place]
            open_slots, room = partial.open_R[rank], partial.room_R[rank]
            if open_slots < slots or (parent < 0 and open_slots > 1) or not 0 < room <= most_room:
                continue
            if row_holds(partial.expert_RS, rank, expert):
                continue
            if parent >= 0 and row_holds(partial.expert_RS, rank, problem.expert_D[parent]):
                continue
            here = row_holds(problem.before_RS, rank, expert)
            if best < 0 or lacking_N[node] > most or (here, -place) > (holds_now, -best_place):
                best, best_place, most, holds_now = rank, place, lacking_N[node], here
    return best


@borrowing
def _place_hot(problem, hot, parent, spare_ranks, partial):  # type: ignore[no-untyped-def]
    """Fills ranks with a hot expert until what is left fits a rank shared with its parent; returns the shared ranks
    still to spare.
    """
    rest_J, room_R = partial.rest_J, partial.room_R
    shared = _find_rank(problem, hot, parent, partial)
    while shared < 0 or rest_J[hot] * 16 > room_R[shared] * FULLEST_SHARED_RANK:
        own = _find_rank(problem, hot, -1, partial)
        if own < 0:
            break
        # too much for one shared rank, and after an own one too little for a shared one that gives way
        after_own = rest_J[hot] - room_R[own]
        if spare_ranks > 0 and shared >= 0 and rest_J[hot] <= 2 * room_R[shared] and after_own < room_R[shared] // 4:
            spare_ranks -= 1
            _share(problem, partial, shared, hot, parent, rest_J[hot] // 2)
            shared = _find_rank(problem, hot, parent, partial)
        else:
            _put(problem, partial, own, hot, room_R[own])
    if shared >= 0:
        _share(problem, partial, shared, hot, parent, min(rest_J[hot], room_R[shared]))
    return spare_ranks


@borrowing
def _share(problem, partial, rank, hot, parent, tokens):  # type: ignore[no-untyped-def]
    """Puts so many of a hot expert's tokens onto a rank, and as many of its parent's as fill it."""
    _put(problem, partial, rank, hot, tokens)
    _put(problem, partial, rank, parent, min(max(partial.rest_J[parent], 0), partial.room_R[rank]))


@borrowing
def _place_missing(problem, num_hot, partial):  # type: ignore[no-untyped-def]
    """Places hot experts without a replica, heaviest first, on the rank with the most room; False without a slot."""
    for hot in range(num_hot):
        if partial.placed_J[hot]:
            continue
        best = -1
        for rank in problem.rank_A:
            if partial.open_R[rank] and (best < 0 or partial.room_R[rank] > partial.room_R[best]):
                best = rank
        if best < 0:
            return False
        _put(problem, partial, best, hot, max(min(partial.rest_J[hot], partial.room_R[best]), 0))
    return True


@borrowing
def _fill_up(problem, num_hot, partial):  # type: ignore[no-untyped-def]
    """Fills free slots, one a rank in turn, with the hot expert that fills most of the room; without room, with the one
    of the most tokens a replica.
    """
    rest_J, placed_J, room_R = partial.rest_J, partial.placed_J, partial.room_R
    left = partial.open_R.sum()
    while left:
        for rank in problem.rank_A:
            if not partial.open_R[rank]:
                continue
            best = -1
            for hot in range(num_hot):
                if row_holds(partial.expert_RS, rank, problem.expert_D[hot]):
                    continue
                if best < 0:
                    best = hot
                    continue
                fills = max(min(rest_J[hot], room_R[rank]), 0)
                most = max(min(rest_J[best], room_R[rank]), 0)
                tokens, best_tokens = problem.tokens_E[problem.expert_D[hot]], problem.tokens_E[problem.expert_D[best]]
                heavier = tokens * (placed_J[best] + 1) > best_tokens * (placed_J[hot] + 1)
                if fills > most or (fills == most and heavier):
                    best = hot
            if best < 0:
                return False
            _put(problem, partial, rank, best, max(min(rest_J[best], room_R[rank]), 0))
            left -= 1
    return True


# --- replicas that keep to parts of the cluster, or are at least a given number --------------------------------


def part_of_experts(tokens_E: IntArray, slots_R: IntArray, part_R: IntArray, replicas: int) -> IntArray:
    """Returns the part of the cluster that holds each expert, int64 [E]: in turn, each goes to the part with the fewest
    tokens a rank that still has room for an expert with so many replicas. Give the heaviest first.
    """
    num_parts = int(part_R.max()) + 1
    room = [
        experts_with_room(replicas, tuple(slots_R[part_R == part].tolist()), len(tokens_E)) for part in range(num_parts)
    ]
    ranks = [int((slots_R[part_R == part] > 0).sum()) for part in range(num_parts)]
    tokens, part_E = [0] * num_parts, np.empty(len(tokens_E), dtype=np.int64)
    for expert in range(len(tokens_E)):
        open_parts = [part for part in range(num_parts) if room[part]]
        part = min(open_parts, key=lambda part: ((tokens[part] + int(tokens_E[expert])) // ranks[part], part))
        part_E[expert] = part
        room[part] -= 1
        tokens[part] += int(tokens_E[expert])
    return part_E


def spread_replicas(
    tokens_E: IntArray, slots_R: IntArray, replicas: int, experts: Sequence[int], ranks: Sequence[int]
) -> list[list[int]]:
    """Returns the experts of each of ``ranks``: every slot filled, ``replicas`` or more of each, none twice on a rank.

    Heaviest first, each expert goes to the ranks with the most free slots, of those the ones with the fewest tokens
    (so there is room for all if there can be: Gale and Ryser). What slots are left go to the most tokens a replica.
    """
    rows: list[list[int]] = [[] for _ in ranks]
    load, count = [0] * len(ranks), dict.fromkeys(experts, replicas)
    free = [min(int(slots_R[rank]), len(experts)) for rank in ranks]
    for expert in experts:
        share = int(tokens_E[expert]) // replicas
        for place in sorted(range(len(ranks)), key=lambda place: (-free[place], load[place], place))[:replicas]:
            rows[place].append(expert)
            free[place] -= 1
            load[place] += share
    for place in range(len(ranks)):
        while free[place]:
            expert = max(
                (expert for expert in experts if expert not in rows[place]),
                key=lambda expert: (int(tokens_E[expert]) // count[expert], -count[expert], -expert),
            )
            rows[place].append(expert)
            count[expert] += 1
            free[place] -= 1
    return rows
