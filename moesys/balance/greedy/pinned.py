"""Layouts of experts that stay at home: what owners hold never travels, and few copies go where they are wanted most.

For experts that stay whole on their owners (``Ep`` with slots): all but a rank's own have to be lent, in every
micro-batch, so a layout that moves homes pays for all of its slots.
"""

from __future__ import annotations

import numpy as np

from moesys.compiled import compiled


@compiled
def pin_homes(supply_NE, owner_E, slots_R, node_R, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` [R, S], empty before, with every expert on its owner; free slots of a node then take the
    experts that its own ranks want most of those that live elsewhere, each on the rank with least to do. Returns
    whether owners have slots for what they own.

    ``supply_NE``: tokens of each node for each expert; what a node wants of an expert that it lacks is computed at its
    home.
    """
    num_nodes, num_experts = supply_NE.shape
    filled_R, load_R = np.zeros(slots_R.size, np.int64), np.zeros(slots_R.size, np.int64)
    free_N, has_NE = np.zeros(num_nodes, np.int64), np.zeros((num_nodes, num_experts), np.bool_)
    for expert in range(num_experts):
        rank = owner_E[expert]
        if filled_R[rank] == slots_R[rank]:
            return False
        expert_RS[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
        has_NE[node_R[rank], expert] = True
    for rank in range(slots_R.size):
        free_N[node_R[rank]] += slots_R[rank] - filled_R[rank]
    lendable_N = np.full(num_nodes, -(-free_N.sum() // num_nodes))
    for wanted in np.argsort(-supply_NE.ravel(), kind="mergesort"):
        node, expert = wanted // num_experts, wanted % num_experts
        home = node_R[owner_E[expert]]
        if free_N[node] and lendable_N[home] and supply_NE[node, expert] and not has_NE[node, expert]:
            has_NE[node, expert] = True
            free_N[node] -= 1
            lendable_N[home] -= 1
    for expert in range(num_experts):
        for node in range(num_nodes):
            if not has_NE[node, expert] or node == node_R[owner_E[expert]]:
                load_R[owner_E[expert]] += supply_NE[node, expert]
    for node in range(num_nodes):
        for expert in np.argsort(-supply_NE[node], kind="mergesort"):
            if not has_NE[node, expert] or node == node_R[owner_E[expert]]:
                continue
            least = -1
            for rank in range(slots_R.size):
                is_open = node_R[rank] == node and filled_R[rank] < slots_R[rank]
                if is_open and (least < 0 or load_R[rank] < load_R[least]):
                    least = rank
            expert_RS[least, filled_R[least]] = expert
            filled_R[least] += 1
            load_R[least] += supply_NE[node, expert]
    return True
