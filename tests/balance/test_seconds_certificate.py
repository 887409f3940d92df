"""The bound in seconds: below every plan, reached by some, and what it says."""

from __future__ import annotations

import numpy as np
import pytest
from balance_cases import instances, layouts
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.balance.certificate import certify_seconds
from moesys.balance.planners import split_tokens
from moesys.config import presets

WIDE = ms.ModelShape(hidden_size=64, intermediate_size=8, num_experts=1, top_k=1, dtype="bfloat16")
SPLITS = (ms.EvenSplit(), ms.Proportional(), ms.FlowSplit(), ms.FlowSplit(max_inter_node=0.0))


def strategies(slots_R: tuple[int, ...]) -> st.SearchStrategy[ms.Strategy]:
    def made(prefetch: int, delay: bool, again: bool, restore: str, reshard: str, overlap: ms.Overlap) -> ms.Strategy:
        sharding = ms.Fsep(
            slots_per_rank=slots_R,
            prefetch_layers=prefetch,
            delay_reshard=delay,
            reshard_after_forward=again,
            restore=restore,
            reshard=reshard,
        )
        return ms.Strategy(name="drawn", sharding=sharding, overlap=overlap)

    once = (ms.Sequential(node_dispatch="once", combine=combine) for combine in ("ordered", "per_node"))
    overlaps = st.sampled_from([ms.Sequential(), *once])
    ways = st.sampled_from(["flat", "hierarchical"])
    return st.builds(made, st.integers(0, 1), st.booleans(), st.booleans(), ways, ways, overlaps)


@given(data=st.data(), instance=instances(), split=st.sampled_from(SPLITS))
def test_no_plan_costs_less_than_the_bound(data, instance, split):
    layout = data.draw(layouts(instance))
    slots_R = tuple(np.maximum(layout.filled_R, instance.slots).tolist())
    strategy, num_experts = data.draw(strategies(slots_R)), instance.load.num_experts
    model = WIDE.replace(num_experts=num_experts, top_k=data.draw(st.integers(1, num_experts)))
    rates = {"expert_tflops": (0.1, 100), "backward_tflops": (None, 1.0)}
    cluster = instance.cluster.replace(**{rate: data.draw(st.sampled_from(values)) for rate, values in rates.items()})
    plan = split_tokens(instance.load, layout, cluster, split, overlap=strategy.overlap)
    found = certify_seconds(plan, cluster, model, strategy)
    # prices are whole, and whole tokens cross
    assert found.plan_s >= found.bound_s * (1 - 1e-4) - 64 * model.hidden_size / (cluster.inter_node_gb_per_s * 1e9)


def test_the_bound_is_reached_where_nothing_need_cross():
    """Two nodes, each with the experts that its ranks want, and nothing else to pay."""
    load = ms.LoadMatrix([[500, 500, 0, 0], [0, 0, 500, 500]])
    layout = ms.ExpertLayout([[0, 1], [2, 3]], num_experts=4)
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=1)
    sharding = ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True)
    strategy = ms.Strategy(name="hidden", sharding=sharding)
    plan = split_tokens(load, layout, cluster, ms.FlowSplit())
    found = certify_seconds(plan, cluster, WIDE.replace(num_experts=4), strategy)
    assert found.gap == pytest.approx(0, abs=1e-4)
    assert (found.rows_s, found.experts_s, found.limit) == (0, 0, "products")
    crossed = ms.ExpertLayout([[2, 3], [0, 1]], num_experts=4)
    plan = split_tokens(load, crossed, cluster, ms.FlowSplit())
    assert certify_seconds(plan, cluster, WIDE.replace(num_experts=4), strategy).gap > 1


def test_rows_and_experts_are_weighed_against_each_other():
    """By hand: on each of two nodes two experts are wanted, and a rank has slots for three."""
    load = ms.LoadMatrix([[900, 90, 10], [900, 90, 10]])
    layout = ms.ExpertLayout([[0, 1, -1], [0, 2, -1]], num_experts=3)
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=1.0)
    model = ms.ModelShape(hidden_size=8, intermediate_size=20, num_experts=3, top_k=1)
    strategy = ms.Strategy(name="waits", sharding=ms.Fsep(slots_per_rank=3, reshard_after_forward=False))
    plan = split_tokens(load, layout, cluster, ms.FlowSplit())
    found = certify_seconds(plan, cluster, model, strategy)
    # A row four times 32 bytes, an expert 240 elements from the other rank, there and as a gradient 4 bytes each.
    row_s, expert_s = 4 * 32e-9, 240 * 8e-9
    # The first two stay on both nodes, the third on one.
    assert found.experts_s == pytest.approx((2 + 2 + 1) / 2 * expert_s)
    assert found.rows_s == pytest.approx(10 / 2 * row_s)
    assert found.plan_s > found.bound_s


def test_a_certificate_says_what_limits():
    load = ms.LoadMatrix(np.random.default_rng(0).integers(0, 4000, (32, 128)))
    model, cluster = presets.QWEN3_30B_A3B, presets.h100(4)
    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Greedy(), split=ms.FlowSplit())
    layer = ms.plan_layer(strategy, model, cluster, load)
    found = certify_seconds(layer.tokens, cluster, model, strategy)
    assert found.limit == "rows between nodes"
    assert 0 < found.gap < 0.5
    assert "rows between nodes" in str(found)


def test_a_certificate_of_another_strategy_is_refused():
    load, layout = ms.LoadMatrix([[1, 2], [3, 4]]), ms.ExpertLayout([[0, 1], [0, 1]], num_experts=2)
    cluster, model = ms.ClusterSpec(ranks_per_node=2), WIDE.replace(num_experts=2)
    plan = split_tokens(load, layout, cluster, ms.EvenSplit())
    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=1))
    with pytest.raises(ValueError, match="fills 2 slots of rank 0"):
        certify_seconds(plan, cluster, model, strategy)
    with pytest.raises(ValueError, match="the plan is for 2 ranks and 2 experts"):
        certify_seconds(plan, cluster, WIDE.replace(num_experts=3), strategy)
