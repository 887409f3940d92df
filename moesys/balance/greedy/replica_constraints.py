"""Replica constraints: experts whose replicas stay in one part of the cluster, or are at least a given number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.topology import domains_of, experts_with_room
from moesys.config import Within
from moesys.load import IntArray


def check_replicas(problem: PlanningProblem, wanted: int, within: Within) -> None:
    """Raises ValueError where not all experts at once can have ``wanted`` replicas, each expert on distinct ranks of
    one place ``within`` the cluster.
    """
    cluster, slots_R, num_experts = problem.cluster, problem.slots_R, problem.load.num_experts
    if wanted == 1 and within == "cluster":
        return  # slots are enough
    slots_by_place: dict[int, list[int]] = {}
    for slots, place in zip(slots_R, domains_of(cluster, within), strict=True):
        slots_by_place.setdefault(place, []).append(slots)
    most = max(sum(slots > 0 for slots in place) for place in slots_by_place.values())
    if wanted > most:
        if within == "cluster":
            raise ValueError(
                f"min_replicas={wanted} needs as many ranks with slots, and there are {most}; "
                f"use min_replicas <= {most} or give more ranks slots"
            )
        raise ValueError(
            f"min_replicas={wanted} with replicas_within={within!r} needs as many ranks with slots in one {within}, "
            f"and the most are {most}; use min_replicas <= {most} or replicas_within='cluster'"
        )
    room = [experts_with_room(wanted, place, num_experts) for place in slots_by_place.values()]
    if sum(room) >= num_experts:
        return
    if within == "cluster":
        usable = sum(min(slots, num_experts) for slots in slots_R)
        raise ValueError(
            f"min_replicas={wanted} for {num_experts} experts takes {wanted * num_experts} slots, at most "
            f"{num_experts} of them on a rank, and there are {usable}; add at least {wanted * num_experts - usable} or "
            "use a smaller min_replicas"
        )
    raise ValueError(
        f"replicas_within={within!r} with min_replicas={wanted} has room for {room} experts by {within}, in all "
        f"{sum(room)} of {num_experts}; add slots, use a smaller min_replicas or replicas_within='cluster'"
    )


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
