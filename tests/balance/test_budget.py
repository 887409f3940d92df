"""The budget of slots over layers, against every budget there is."""

from itertools import product

import numpy as np
import pytest
from balance_cases import zipf_load
from hypothesis import given
from hypothesis import strategies as st

from moesys.config import ClusterSpec
from moesys.load import LoadMatrix
from moesys.planning import greedy_busiest, replica_budget

CLUSTER = ClusterSpec(ranks_per_node=2)


@st.composite
def tables(draw):
    """Up to five layers of up to six experts, choices of slots, and the busiest rank of every layer and choice."""
    experts_L = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    choices = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True))
    choices.append(max(3, max(choices)))
    # few different costs, so that ties abound
    cost_LC = draw(
        st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=len(experts_L), max_size=len(experts_L))
    )
    return experts_L, choices, cost_LC


@given(table=tables(), total_slots=st.integers(1, 60))
def test_the_budget_is_the_best_of_all_and_settles_ties_as_promised(table, total_slots):
    experts_L, choices, cost_LC = table
    loads = [LoadMatrix(np.full((2, experts), layer)) for layer, experts in enumerate(experts_L)]

    def cost(load, cluster, slots):
        assert cluster is CLUSTER
        return cost_LC[int(load.tokens_RE[0, 0])][slots]

    every = [
        (sum(costs[slots] for costs, slots in zip(cost_LC, budget, strict=True)), sum(budget), budget)
        for budget in product(choices, repeat=len(loads))
        if 2 * sum(budget) <= total_slots
        and all(2 * slots >= experts for slots, experts in zip(budget, experts_L, strict=True))
    ]
    if every:
        assert replica_budget(loads, CLUSTER, total_slots, choices, cost) == min(every)[2]
    else:
        with pytest.raises(ValueError, match="give at least so many"):
            replica_budget(loads, CLUSTER, total_slots, choices, cost)


def test_a_skewed_layer_gets_the_slots_that_a_flat_one_does_not_need():
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=4)
    flat, skewed = LoadMatrix(np.full((8, 16), 256)), zipf_load(8, 16, 1.5)
    loads = [flat, skewed, flat]
    budget = replica_budget(loads, cluster, 9 * 8, (2, 3, 4, 5))
    assert budget == (2, 3, 2)
    uniform = sum(greedy_busiest(load, cluster, 3) for load in loads)
    assert sum(greedy_busiest(load, cluster, slots) for load, slots in zip(loads, budget, strict=True)) <= uniform
    assert replica_budget(loads, cluster, 9 * 8, (5, 2, 4, 3, 2)) == budget
