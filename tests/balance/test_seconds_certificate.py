"""The bound in seconds: below every plan, reached by some, and what it says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from balance_cases import every_layout, instances, layouts
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from benchmarks.seconds_certificate import certify_seconds
from moesys.balance.flow.step_cost import plan_seconds
from moesys.balance.run_planner import split_tokens
from moesys.config import Overlap, presets

WIDE = ms.ModelShape(hidden_size=64, intermediate_size=8, num_experts=1, top_k=1, dtype="bfloat16")
SPLITS = (ms.EvenSplit(), ms.Proportional(), ms.FlowSplit(), ms.FlowSplit(max_inter_node=0.0))


def quick(values: Iterable[int], *always: int) -> list[Any]:
    """Values of a parameter, of which only some always run."""
    return [value if value in always else pytest.param(value, marks=pytest.mark.slow) for value in values]


def strategies(slots_R: tuple[int, ...]) -> st.SearchStrategy[ms.Strategy]:
    def made(prefetch: int, delay: bool, again: bool, restore: str, reshard: str, overlap: Overlap) -> ms.Strategy:
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


@pytest.mark.parametrize("faster", quick((1, 1000), 1000))
def test_more_slots_never_raise_the_bound_however_little_a_token_costs(faster):
    """The solver of linear programs has absolute tolerances, and a token may cost picoseconds."""
    tokens_RE = np.zeros((7, 4), dtype=np.int64)
    tokens_RE[0, 3], tokens_RE[4, 0], tokens_RE[4, 3], tokens_RE[5, 2] = 218, 46, 4, 314
    links = {"intra_node_gb_per_s": 300.0 * faster, "inter_node_gb_per_s": 89.0 * faster}
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=(1, 6), expert_tflops=100.0 * faster, **links)
    layout = ms.planning.ExpertLayout([[2], [0], [3], [0], [0], [0], [1]], 4)
    plan = split_tokens(ms.planning.LoadMatrix(tokens_RE), layout, cluster, ms.EvenSplit())
    model, found = WIDE.replace(num_experts=4, top_k=1), []
    for slots in (1, 2, 3, 4):
        strategy = ms.Strategy(name="bounded", sharding=ms.Fsep(slots_per_rank=slots), overlap=ms.Sequential())
        certificate = certify_seconds(plan, cluster, model, strategy)
        assert certificate.bound_s <= certificate.plan_s
        found.append(certificate.bound_s)
    assert all(more <= fewer * (1 + 1e-6) for fewer, more in pairwise(found))


@pytest.mark.parametrize("seed", quick(range(60), 0, 6, 23, 36, 56))
def test_the_bound_is_below_all_layouts_of_small_problems(seed):
    numbers = np.random.default_rng(seed)
    nodes = ((1, 1), (1, 2), (2, 1), (1, 1, 1))[seed % 4]
    R, E = sum(nodes), int(numbers.integers(2, 5))
    slots = min(-(-E // R) + int(numbers.integers(0, 2)), E)
    popular_E = numbers.lognormal(0, 1.2, E) * numbers.lognormal(0, 0.5, (R, E))
    load = ms.planning.LoadMatrix(numbers.poisson(40 * popular_E))
    links = {"intra_node_gb_per_s": 1e9, "inter_node_gb_per_s": float(numbers.choice([0.3, 3.0]))}
    cluster = ms.ClusterSpec(num_nodes=len(nodes), ranks_per_node=nodes, expert_tflops=0.01, **links)
    model = ms.ModelShape(hidden_size=64, intermediate_size=int(numbers.choice([1, 8])), num_experts=E, top_k=1)
    hidden = {"prefetch_layers": 1, "delay_reshard": True} if seed % 5 == 0 else {}
    sharding = ms.Fsep(slots_per_rank=slots, reshard_after_forward=bool(seed % 3), **hidden)
    strategy = ms.Strategy(name="small", sharding=sharding)
    by_seconds = ms.FlowSplit(max_inter_node="seconds")
    plans = [split_tokens(load, layout, cluster, by_seconds, model=model) for layout in every_layout(R, slots, E)]
    seconds = [plan_seconds(plan, cluster, model, sharding, strategy.overlap) for plan in plans]
    found = certify_seconds(plans[int(np.argmin(seconds))], cluster, model, strategy)
    assert found.plan_s == min(seconds)
    assert found.bound_s <= found.plan_s * (1 + 1e-4)


def test_the_bound_is_reached_where_nothing_need_cross():
    """Two nodes, each with the experts that its ranks want, and nothing else to pay."""
    load = ms.planning.LoadMatrix([[500, 500, 0, 0], [0, 0, 500, 500]])
    layout = ms.planning.ExpertLayout([[0, 1], [2, 3]], num_experts=4)
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=1, expert_tflops=0.1)
    sharding = ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True)
    strategy = ms.Strategy(name="hidden", sharding=sharding)
    plan = split_tokens(load, layout, cluster, ms.FlowSplit())
    found = certify_seconds(plan, cluster, WIDE.replace(num_experts=4), strategy)
    assert found.gap == pytest.approx(0, abs=1e-4)
    assert (found.rows_s, found.experts_s, found.limit) == (0, 0, "products")
    crossed = ms.planning.ExpertLayout([[2, 3], [0, 1]], num_experts=4)
    plan = split_tokens(load, crossed, cluster, ms.FlowSplit())
    assert certify_seconds(plan, cluster, WIDE.replace(num_experts=4), strategy).gap > 0.05


def test_rows_and_experts_are_weighed_against_each_other():
    """By hand: on each of two nodes two experts are wanted, and a rank has slots for three."""
    load = ms.planning.LoadMatrix([[900, 90, 10], [900, 90, 10]])
    layout = ms.planning.ExpertLayout([[0, 1, -1], [0, 2, -1]], num_experts=3)
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
    load = ms.planning.LoadMatrix(np.random.default_rng(0).integers(0, 4000, (32, 128)))
    model, cluster = presets.QWEN3_30B_A3B, presets.h100(4)
    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Greedy(), split=ms.FlowSplit())
    layer = ms.planning.plan_layer(strategy, model, cluster, load)
    found = certify_seconds(layer.tokens, cluster, model, strategy)
    assert found.limit == "rows between nodes"
    assert 0 < found.gap < 0.5
    assert "rows between nodes" in str(found)


@pytest.mark.parametrize("seed", quick((*range(8), 9, 37, 61, 108, 121, 277), 4, 9, 37, 108, 277))
def test_the_bound_is_below_plans_of_lent_experts(seed):
    """Owners need not keep what they own in a slot; from the seed 9 on, these plans have such owners."""
    numbers = np.random.default_rng(seed)
    nodes = tuple(int(ranks) for ranks in numbers.integers(1, 4, int(numbers.integers(2, 4))))
    R, E = sum(nodes), int(numbers.integers(4, 13))
    slots = min(-(-E // R) + int(numbers.integers(0, 2)), E)
    cluster = ms.ClusterSpec(num_nodes=len(nodes), ranks_per_node=nodes, inter_node_gb_per_s=20.0)
    model = ms.ModelShape(hidden_size=512, intermediate_size=1024, num_experts=E, top_k=2)
    by_node_NE = numbers.lognormal(0, 1.5, (len(nodes), E))
    popular_RE = by_node_NE[np.array(cluster.node_of_rank)] * numbers.lognormal(0, 0.3, (R, E))
    load = ms.planning.LoadMatrix(numbers.poisson(300 * popular_RE))
    sharding = ms.Ep(slots_per_rank=slots, lend="flat", prefetch_layers=1, delay_reshard=bool(seed % 2))
    strategy = ms.Strategy(name="lent", sharding=sharding)
    layout = ms.plan_layout(load, cluster, ms.Greedy(), slots, model=model, strategy=strategy)
    plan = split_tokens(load, layout, cluster, ms.FlowSplit(max_inter_node="seconds"), model=model)
    found = certify_seconds(plan, cluster, model, strategy)
    assert found.bound_s <= found.plan_s * (1 + 1e-4)
