"""Homes: layouts in which all replicas of an expert stay in one part of the cluster, or are at least a given number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesys.balance.replicas import experts_with_room
from moesys.load import IntArray


def home_of_experts(tokens_E: IntArray, slots_R: IntArray, part_R: IntArray, replicas: int) -> IntArray:
    """The part of the cluster that holds each expert, int64 [E]: in turn, each goes to the part with the fewest tokens
    a rank that still has room for an expert with so many replicas. Give the heaviest first.
    """
    num_parts = int(part_R.max()) + 1
    room = [
        experts_with_room(replicas, tuple(slots_R[part_R == part].tolist()), len(tokens_E)) for part in range(num_parts)
    ]
    ranks = [int((slots_R[part_R == part] > 0).sum()) for part in range(num_parts)]
    tokens, home_E = [0] * num_parts, np.empty(len(tokens_E), dtype=np.int64)
    for expert in range(len(tokens_E)):
        open_parts = [part for part in range(num_parts) if room[part]]
        part = min(open_parts, key=lambda part: ((tokens[part] + int(tokens_E[expert])) // ranks[part], part))
        home_E[expert] = part
        room[part] -= 1
        tokens[part] += int(tokens_E[expert])
    return home_E


def spread_replicas(
    tokens_E: IntArray, slots_R: IntArray, replicas: int, experts: Sequence[int], ranks: Sequence[int]
) -> list[list[int]]:
    """Experts of each of ``ranks``, every slot filled, ``replicas`` or more of each expert, none twice on a rank.

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
