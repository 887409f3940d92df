"""How well a layout will do on later counts, and local search for one that does better; compiled.

A layout is measured on *scenarios*: the load it is planned for, and loads around it. On each, its miss is what the best
split leaves above the mean on the busiest rank, and, so that a step towards that counts, on all ranks together, divided
by their number; in millionths of the mean. The weighted sum is minimised. Perfection on the load
itself is easy and fragile; what later counts ask for is paths on which tokens can give way, and scenarios measure it.

A move is aimed at the worst scenario's tight set, the ranks that nothing leads out of: it gives one of their experts to
a rank outside, in exchange for one of its experts or for a replica that has others. The first to be tried are the swaps
of experts with one replica whose difference is nearest to what the set has too much; then they are drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.flow.holders import list_holders
from moesys.balance.flow.min_max_flow import least_max, new_level
from moesys.compiled import borrowing, compiled
from moesys.load import IntArray

MILLION = 1_000_000
NO_LIMIT = 1 << 60

# Swaps that are tried before any is drawn.
AIMED = 6

# Standard deviations of experts' loads, in percent: a later sample's, and where they jump.
DRIFT_PERCENT = 15
JUMP_PERCENT = 45
# A miss on the load itself comes first; then one on a jump counts a quarter of one on a drift.
WEIGHTS = (1000, 4, 1)


class Scenarios(NamedTuple):
    """Loads to be ready for: ``tokens_KE`` int64 [K, E], the first one the load itself, and ``weight_K`` int64."""

    tokens_KE: IntArray
    weight_K: IntArray


class Fence(NamedTuple):
    """What moves must respect; all int64. ``group_R``: replicas move between ranks of one group only, and a group keeps
    one of each expert that it has; ``least_replicas`` [1]: replicas that every expert keeps.
    """

    slots_R: IntArray
    group_R: IntArray
    least_replicas: IntArray


@compiled
def draw_scenarios(tokens_E, num_near, num_far):  # type: ignore[no-untyped-def]
    """The load, ``num_near`` loads that drifted, and ``num_far`` that jumped; a pure function, in integers.

    Every expert's tokens are multiplied by 1 + σ·z, at least 0, with a roughly normal z from a hash.
    """
    num_experts = tokens_E.size
    tokens_KE = np.empty((1 + num_near + num_far, num_experts), np.int64)
    weight_K = np.empty(1 + num_near + num_far, np.int64)
    tokens_KE[0] = tokens_E
    weight_K[0] = WEIGHTS[0]
    for scenario in range(1, 1 + num_near + num_far):
        near = scenario <= num_near
        weight_K[scenario] = WEIGHTS[1] if near else WEIGHTS[2]
        percent = DRIFT_PERCENT if near else JUMP_PERCENT
        for expert in range(num_experts):
            factor = max(147_800 + _bell(_mixed(scenario, expert)) * percent * 10, 0)
            tokens_KE[scenario, expert] = tokens_E[expert] * factor // 147_800
    return Scenarios(tokens_KE, weight_K)


@borrowing
def _bell(bits):  # type: ignore[no-untyped-def]
    """A roughly normal number of mean 0 and standard deviation 147.8: the sum of the lowest four bytes, less 510."""
    total = np.int64(0)
    for _ in range(4):
        total += np.int64(bits & np.uint64(255))
        bits >>= np.uint64(8)
    return total - 510


@borrowing
def _mixed(scenario, expert):  # type: ignore[no-untyped-def]
    """64 well-mixed bits (the finaliser of SplitMix64)."""
    bits = np.uint64(scenario) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(expert + 1) * np.uint64(0xD1B54A32D192ED03)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@compiled
def weighted_miss(scenarios, expert_RS, order_K, limit, miss_K):  # type: ignore[no-untyped-def]
    """The weighted sum of misses, and each in ``miss_K``; scenarios in ``order_K``, given up above ``limit``."""
    num_experts = scenarios.tokens_KE.shape[1]
    holders = list_holders(expert_RS, num_experts)
    level = new_level(holders)
    num_ranks = holders.holds_R.sum()
    miss = 0
    for scenario in order_K:
        total = 0
        for expert in range(num_experts):
            total += scenarios.tokens_KE[scenario, expert]
        mean = -(-total // num_ranks)
        above = least_max(scenarios.tokens_KE[scenario], holders, level) - mean
        miss_K[scenario] = (above + -(-level.overflow[0] // num_ranks)) * MILLION // max(mean, 1)
        miss += miss_K[scenario] * scenarios.weight_K[scenario]
        if miss > limit:
            break
    return miss


@compiled
def improve(scenarios, fence, expert_RS, evaluations, most_moves, first_draw):  # type: ignore[no-untyped-def]
    """Changes ``expert_RS`` by moves that lower its weighted miss; gives the miss, the evaluations and moves
    spent, and the draw to go on from.

    At most ``evaluations`` moves are measured, and at most ``most_moves`` replicas change. A pure function of its
    arguments: what is tried is drawn from a counter that begins at ``first_draw``.
    """
    num_ranks, num_experts = expert_RS.shape[0], scenarios.tokens_KE.shape[1]
    num_scenarios = scenarios.weight_K.size
    order_K = np.arange(num_scenarios)
    miss_K, trial_K = np.zeros(num_scenarios, np.int64), np.zeros(num_scenarios, np.int64)
    miss = weighted_miss(scenarios, expert_RS, order_K, np.int64(NO_LIMIT), miss_K)
    replicas_E = np.zeros(num_experts, np.int64)
    for rank in range(num_ranks):
        for slot in range(fence.slots_R[rank]):
            replicas_E[expert_RS[rank, slot]] += 1
    inside_R, outside_R = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    aimed_A4 = np.empty((AIMED, 4), np.int64)
    spent = moves = 0
    draws = np.uint64(first_draw)
    while miss > 0 and spent < evaluations and moves < most_moves:
        _sort_by_miss(order_K, miss_K, scenarios.weight_K)
        num_inside, num_outside, too_much = _tight_sides(scenarios, order_K[0], fence, expert_RS, inside_R, outside_R)
        if num_inside == 0 or num_outside == 0:
            break
        num_aimed = _aim(
            scenarios.tokens_KE[order_K[0]],
            replicas_E,
            fence,
            expert_RS,
            inside_R[:num_inside],
            outside_R[:num_outside],
            too_much,
            aimed_A4,
        )
        better = False
        # most draws are refused without being measured, where nothing else is left all are
        for attempt in range(num_aimed + 40 * expert_RS.size):
            if attempt < num_aimed:
                tight, slot, other, other_slot = aimed_A4[attempt]
                swaps = True
            else:
                bits = _mixed(np.int64(draws), 0)
                draws += np.uint64(1)
                tight = inside_R[np.int64(bits & np.uint64(0xFFFF)) % num_inside]
                other = outside_R[np.int64((bits >> np.uint64(16)) & np.uint64(0xFFFF)) % num_outside]
                slot = np.int64((bits >> np.uint64(32)) & np.uint64(0xFFF)) % fence.slots_R[tight]
                other_slot = np.int64((bits >> np.uint64(44)) & np.uint64(0xFFF)) % fence.slots_R[other]
                swaps = (bits >> np.uint64(63)) == np.uint64(1)
            expert, leaving = expert_RS[tight, slot], expert_RS[other, other_slot]
            if scenarios.tokens_KE[0, expert] == 0 or moves + 1 + swaps > most_moves:
                continue
            if fence.group_R[tight] != fence.group_R[other] or row_holds(expert_RS, other, expert):
                continue
            if swaps:
                if row_holds(expert_RS, tight, leaving):
                    continue
                expert_RS[tight, slot] = leaving
            elif replicas_E[leaving] <= fence.least_replicas[0] or not _stays(expert_RS, fence, other, leaving):
                continue
            expert_RS[other, other_slot] = expert
            spent += 1
            trial = weighted_miss(scenarios, expert_RS, order_K, miss - 1, trial_K)
            if trial < miss:
                miss, better = trial, True
                miss_K[:] = trial_K
                moves += 1 + swaps
                if not swaps:
                    replicas_E[leaving] -= 1
                    replicas_E[expert] += 1
                break
            expert_RS[tight, slot] = expert
            expert_RS[other, other_slot] = leaving
            if spent >= evaluations:
                break
        if not better:
            break
    return miss, spent, moves, np.int64(draws)


@compiled
def _aim(tokens_E, replicas_E, fence, expert_RS, inside_R, outside_R, too_much, aimed_A4):  # type: ignore[no-untyped-def]
    """The swaps (rank, slot, rank outside, slot) whose difference in tokens is nearest to ``too_much``, nearest first;
    how many there are. Only experts with one replica, the best partner of each.
    """
    partners = 0
    for rank in outside_R:
        partners += fence.slots_R[rank]
    partner_tokens, partner_place = np.empty(partners, np.int64), np.empty(partners, np.int64)
    partners = 0
    for rank in outside_R:
        for slot in range(fence.slots_R[rank]):
            if replicas_E[expert_RS[rank, slot]] == 1:
                partner_tokens[partners] = tokens_E[expert_RS[rank, slot]]
                partner_place[partners] = rank * expert_RS.shape[1] + slot
                partners += 1
    if partners == 0:
        return 0
    order = np.argsort(partner_tokens[:partners], kind="mergesort")
    sorted_tokens = partner_tokens[order]
    misfit_A = np.full(aimed_A4.shape[0], NO_LIMIT)
    num_aimed = 0
    for rank in inside_R:
        for slot in range(fence.slots_R[rank]):
            expert = expert_RS[rank, slot]
            if replicas_E[expert] != 1:
                continue
            above = np.searchsorted(sorted_tokens, tokens_E[expert] - too_much)
            for partner in range(max(above - 1, 0), min(above + 1, partners)):
                # a swap that takes nothing away helps nobody
                if sorted_tokens[partner] >= tokens_E[expert]:
                    continue
                misfit = abs(tokens_E[expert] - too_much - sorted_tokens[partner])
                place = partner_place[order[partner]]
                index = min(num_aimed, aimed_A4.shape[0] - 1)
                if misfit >= misfit_A[index] and num_aimed == aimed_A4.shape[0]:
                    continue
                while index and misfit_A[index - 1] > misfit:
                    misfit_A[index] = misfit_A[index - 1]
                    for column in range(4):
                        aimed_A4[index, column] = aimed_A4[index - 1, column]
                    index -= 1
                misfit_A[index] = misfit
                aimed_A4[index, 0], aimed_A4[index, 1] = rank, slot
                aimed_A4[index, 2], aimed_A4[index, 3] = place // expert_RS.shape[1], place % expert_RS.shape[1]
                num_aimed = min(num_aimed + 1, aimed_A4.shape[0])
    return num_aimed


@borrowing
def _sort_by_miss(order_K, miss_K, weight_K):  # type: ignore[no-untyped-def]
    """Scenarios with the greatest weighted miss first, so that a move that fails is given up early."""
    for index in range(1, order_K.size):
        scenario, place = order_K[index], index
        while (
            place and miss_K[order_K[place - 1]] * weight_K[order_K[place - 1]] < miss_K[scenario] * weight_K[scenario]
        ):
            order_K[place] = order_K[place - 1]
            place -= 1
        order_K[place] = scenario


@compiled
def _tight_sides(scenarios, scenario, fence, expert_RS, inside_R, outside_R):  # type: ignore[no-untyped-def]
    """Ranks with slots in the tight set of a scenario, and those outside of it; how many of each, and what the set has
    above the mean.
    """
    holders = list_holders(expert_RS, scenarios.tokens_KE.shape[1])
    level = new_level(holders)
    least_max(scenarios.tokens_KE[scenario], holders, level)
    num_inside = num_outside = tokens_inside = tokens = 0
    for rank in range(level.tight_R.size):
        tokens += level.load_R[rank]
        tokens_inside += level.load_R[rank] if level.tight_R[rank] else 0
        if level.tight_R[rank]:
            inside_R[num_inside] = rank
            num_inside += 1
        elif fence.slots_R[rank]:
            outside_R[num_outside] = rank
            num_outside += 1
    return num_inside, num_outside, tokens_inside - num_inside * (-(-tokens // max(num_inside + num_outside, 1)))


@borrowing
def row_holds(expert_RS, rank, expert):  # type: ignore[no-untyped-def]
    held = False
    for slot in range(expert_RS.shape[1]):
        held = held or expert_RS[rank, slot] == expert
    return held


@borrowing
def _stays(expert_RS, fence, rank, expert):  # type: ignore[no-untyped-def]
    """Whether another rank of the group holds the expert too."""
    for other in range(expert_RS.shape[0]):
        if other != rank and fence.group_R[other] == fence.group_R[rank] and row_holds(expert_RS, other, expert):
            return True
    return False
