"""CpSat by seconds, against every layout of tiny clusters, and against Greedy and the certificate."""

from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import pytest
from balance_cases import instances
from hypothesis import given, settings
from hypothesis import strategies as st

import moesys as ms
from moesys.balance.cp_sat.cp_sat import solve_by_seconds
from moesys.balance.planners import plan_layout, split_tokens
from moesys.balance.seconds_certificate import certify_seconds, plan_seconds

WIDE = ms.ModelShape(hidden_size=64, intermediate_size=8, num_experts=4, top_k=1, dtype="bfloat16")
BRIEF = ms.CpSat(deterministic_time=0.5)
BY_SECONDS = ms.FlowSplit(max_inter_node="seconds")


def seconds_of(layout, load, cluster, model, strategy):
    plan = split_tokens(load, layout, cluster, BY_SECONDS, model=model)
    return plan_seconds(plan, cluster, model, strategy.sharding, strategy.overlap)


# Slow and fast links, with 1,200 layouts of three experts; the slow cases have the 9,000 of four, and other loads.
ONE_OF_EACH = [(3, 0, 0.2), (3, 0, 5.0)]
MORE = [pytest.param(4, seed, fast, marks=pytest.mark.slow) for seed, fast in product(range(4), (0.2, 5.0))]


@pytest.mark.parametrize(("num_experts", "seed", "inter_node_gb_per_s"), [*ONE_OF_EACH, *MORE])
def test_no_layout_of_a_tiny_cluster_costs_less(num_experts, seed, inter_node_gb_per_s):
    """With free slots: an expert on its way may cost more than the rows that it saves."""
    links = {"inter_node_gb_per_s": inter_node_gb_per_s, "intra_node_gb_per_s": 1e6}
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, **links)
    model, every_expert = WIDE.replace(num_experts=num_experts), set(range(num_experts))
    load = ms.LoadMatrix(np.random.default_rng(seed).integers(0, 3000, (4, num_experts)))
    strategy = ms.Strategy(name="waits", sharding=ms.Fsep(slots_per_rank=2), balance=ms.CpSat(), split=BY_SECONDS)
    problem = ms.PlanningProblem.of_layout(load, cluster, 2, model, strategy=strategy)
    found = solve_by_seconds(problem, BRIEF)
    rows = [(e, -1) for e in every_expert] + list(combinations(every_expert, 2))
    layouts = (ranks for ranks in product(rows, repeat=4) if {e for row in ranks for e in row} >= every_expert)
    every = [seconds_of(ms.ExpertLayout(ranks, num_experts), load, cluster, model, strategy) for ranks in layouts]
    assert found.plan_s == seconds_of(found.layout, load, cluster, model, strategy)
    # a split by seconds tries some limits, not all
    assert found.plan_s <= min(every) * 1.005
    assert 0 < found.bound_s <= min(every) * (1 + 1e-6)
    planned = plan_layout(load, cluster, BRIEF, 2, model=model, strategy=strategy)
    assert planned == found.layout


@settings(max_examples=15, deadline=None)
@given(
    instance=instances(),
    prefetched=st.booleans(),
    ways=st.tuples(*[st.sampled_from(["flat", "hierarchical"])] * 2),
)
def test_it_is_no_worse_than_greedy_and_proves_no_more_than_there_is(instance, prefetched, ways):
    load, cluster = instance.load, instance.cluster
    model = WIDE.replace(num_experts=load.num_experts)
    restore, reshard = ways
    sharding = ms.Fsep(slots_per_rank=instance.slots, prefetch_layers=int(prefetched), restore=restore, reshard=reshard)
    strategy = ms.Strategy(name="drawn", sharding=sharding, balance=ms.CpSat(), split=BY_SECONDS)
    config = ms.CpSat(deterministic_time=0.1)
    problem = ms.PlanningProblem.of_layout(load, cluster, instance.slots, model, strategy=strategy)
    found = solve_by_seconds(problem, config)
    greedy = plan_layout(load, cluster, ms.Greedy(), instance.slots, model=model, strategy=strategy)
    assert found.plan_s <= seconds_of(greedy, load, cluster, model, strategy)
    assert found.bound_s <= found.plan_s
    plan = split_tokens(load, found.layout, cluster, BY_SECONDS, model=model)
    assert certify_seconds(plan, cluster, model, strategy).plan_s == found.plan_s


@pytest.mark.parametrize("reshard", ["flat", "hierarchical"])
def test_the_bound_is_below_every_layout_whatever_way_gradients_go_home(reshard):
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, inter_node_gb_per_s=0.2, intra_node_gb_per_s=1e6)
    model = WIDE.replace(num_experts=2, intermediate_size=256)
    rows = [(0, -1), (1, -1), (0, 1)]
    layouts = [
        ms.ExpertLayout(ranks, 2) for ranks in product(rows, repeat=4) if {e for row in ranks for e in row} >= {0, 1}
    ]
    for seed in range(4):
        load = ms.LoadMatrix(np.random.default_rng(seed).integers(0, 3000, (4, 2)))
        strategy = ms.Strategy(name="by node", sharding=ms.Fsep(slots_per_rank=2, reshard=reshard), split=BY_SECONDS)
        problem = ms.PlanningProblem.of_layout(load, cluster, 2, model, strategy=strategy)
        found = solve_by_seconds(problem, BRIEF)
        least_s = min(seconds_of(layout, load, cluster, model, strategy) for layout in layouts)
        assert 0 < found.bound_s <= least_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_token_are_no_tokens(seed):
    """As of predictors that count in them: the same seconds, and as many slots."""
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, inter_node_gb_per_s=0.2)
    model = WIDE.replace(num_experts=8, intermediate_size=256)
    load = ms.LoadMatrix(np.random.default_rng(seed).integers(0, 3000, (4, 8)))
    strategy = ms.Strategy(name="waits", sharding=ms.Fsep(slots_per_rank=6), split=BY_SECONDS)
    parts = ms.LoadMatrix(load.tokens_RE * 256)
    of_tokens, of_parts = (
        solve_by_seconds(
            ms.PlanningProblem.of_layout(each, cluster, 6, model, None, strategy, units),
            BRIEF,
        )
        for each, units in ((load, 1), (parts, 256))
    )
    assert of_parts.layout.filled_R.sum() == of_tokens.layout.filled_R.sum() < 24
    assert of_parts.plan_s == pytest.approx(of_tokens.plan_s, rel=1e-3)
    assert of_parts.bound_s == pytest.approx(of_tokens.bound_s, rel=0.01)


def test_a_layout_is_called_optimal_only_if_it_is():
    """With probing OR-Tools 9.15 found another to be the best of this model, at 1.14 of its cost."""
    cluster = ms.ClusterSpec(
        num_nodes=3, ranks_per_node=1, inter_node_gb_per_s=0.2, intra_node_gb_per_s=10, expert_tflops=10
    )
    load = ms.LoadMatrix([[319, 2669, 1670], [1260, 1104, 1736], [2261, 2199, 747]])
    sharding = ms.Fsep(slots_per_rank=(1, 1, 3), prefetch_layers=1, delay_reshard=True)
    strategy = ms.Strategy(name="hidden", sharding=sharding, split=BY_SECONDS)
    model = WIDE.replace(num_experts=3, intermediate_size=1)
    problem = ms.PlanningProblem.of_layout(load, cluster, (1, 1, 3), model, strategy=strategy)
    found = solve_by_seconds(problem, ms.CpSat(replicas_within="domain"))
    alone = [ms.ExpertLayout([[a], [b], [c]], 3) for a, b, c in permutations(range(3))]
    assert found.bound_s <= min(seconds_of(layout, load, cluster, model, strategy) for layout in alone) * (1 + 1e-6)
