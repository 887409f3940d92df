"""Which of the layouts on hubs: several numbers of hubs are tried, and judged on scenarios; compiled."""

from __future__ import annotations

import numpy as np

from moesys.balance.greedy.hubs import Site, build_on_hubs
from moesys.balance.greedy.search import NO_LIMIT, draw_scenarios, weighted_miss
from moesys.compiled import compiled
from moesys.layout import EMPTY

# Numbers of hubs to try: experts with at least so many eighths of a rank's mean, and as many of the heaviest as have
# so many tenths of all tokens.
HUB_EIGHTHS = (16, 12, 8, 6, 4, 3, 2, 1)
HUB_TENTHS = (1, 2, 3, 4)


@compiled
def build_each_node(slots_R, node_R, seat_R, supply_NE, scenarios_each, before_RS, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS``, node by node, with all experts, balanced for what the node's ranks send; False where some
    node's layout cannot be built.
    """
    for node in range(supply_NE.shape[0]):
        tokens_E = supply_NE[node]
        order_E = np.argsort(-tokens_E, kind="mergesort")
        of_node_R = seat_R[node_R[seat_R] == node]
        own_slots_R = np.zeros_like(slots_R)
        own_slots_R[of_node_R] = slots_R[of_node_R]
        site = Site(own_slots_R, node_R, of_node_R, tokens_E, supply_NE, order_E, before_RS)
        # a node's own loads vary more than those of all
        scenarios = draw_scenarios(tokens_E, scenarios_each, 3 * scenarios_each)
        found_RS = np.full(expert_RS.shape, EMPTY)
        if not best_on_hubs(site, scenarios, found_RS):
            return False
        expert_RS[of_node_R] = found_RS[of_node_R]
    return True


@compiled
def best_on_hubs(site, scenarios, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` with the layout of least miss over several numbers of hubs; False where none can be built."""
    num_experts, num_ranks = site.order_D.size, site.seat_R.size
    total = 0
    for expert in site.order_D:
        total += site.tokens_E[expert]
    wanted = np.zeros(num_experts + 1, np.bool_)
    # the fewest hubs: none where every slot is for one expert, else one or two
    wanted[:3] = True
    wanted[num_experts] = True
    for eighth in HUB_EIGHTHS:
        count = 0
        while count < num_experts and site.tokens_E[site.order_D[count]] * 8 * num_ranks >= eighth * total:
            count += 1
        wanted[count] = True
    for tenth in HUB_TENTHS:
        count = tokens = 0
        while count < num_experts and tokens * 10 < tenth * total:
            tokens += site.tokens_E[site.order_D[count]]
            count += 1
        wanted[count] = True
    trial_RS = expert_RS.copy()
    order_K, miss_K = np.arange(scenarios.weight_K.size), np.zeros(scenarios.weight_K.size, np.int64)
    least = np.int64(NO_LIMIT)
    for num_hubs in range(num_experts + 1):
        if wanted[num_hubs] and least > 0 and build_on_hubs(site, num_hubs, trial_RS):
            miss = weighted_miss(scenarios, trial_RS, order_K, least - 1, miss_K)
            if miss < least:
                least = miss
                expert_RS[:] = trial_RS
    return least < NO_LIMIT
