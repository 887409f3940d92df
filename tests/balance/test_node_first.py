"""Layouts by seconds: nodes choose their experts first, and rows between nodes cost what the cluster says."""

from __future__ import annotations

import numpy as np
import pytest
from balance_cases import Instance, instances
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.balance.greedy.builders import deal_to_nodes, level
from moesys.balance.plan import StepPlan, plan_layer
from moesys.balance.run_planner import plan_layout
from moesys.config import presets
from moesys.load import LoadMatrix
from moesys.simulator.step_program import simulate
from moesys.traces import generate

SMALL = ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=1, top_k=1)


def model_of(instance: Instance) -> ms.ModelShape:
    return SMALL.replace(num_experts=instance.load.num_experts)


@st.composite
def deals(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Demands of nodes, some without slots, that can hold every expert."""
    num_experts = draw(st.integers(1, 20))
    ranks_N = np.array(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)))
    fair = -(-num_experts // int(ranks_N.sum()))
    slots_N = ranks_N * min(fair + draw(st.integers(0, 3)), num_experts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    supply_NE = rng.integers(0, 50, (len(ranks_N), num_experts)) ** draw(st.integers(0, 3))
    supply_NE *= rng.random(supply_NE.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return supply_NE, slots_N, ranks_N, draw(st.sampled_from([1, 2, 8]))


@given(deal=deals())
def test_every_expert_has_a_place_every_slot_is_one_and_no_token_is_lost(deal):
    supply_NE, slots_N, ranks_N, _ = deal
    places_NE, tokens_NE = deal_to_nodes(*deal)
    assert (places_NE.sum(axis=0) >= 1).all()
    np.testing.assert_array_equal(places_NE.sum(axis=1), slots_N)
    assert (places_NE <= ranks_N[:, None]).all()
    np.testing.assert_array_equal(tokens_NE.sum(axis=0), supply_NE.sum(axis=0))
    assert not tokens_NE[places_NE == 0].any()
    # What a node can keep it keeps.
    assert (tokens_NE >= np.where(places_NE > 0, supply_NE, 0)).all()


def test_tokens_of_others_make_nodes_level():
    supply_NE = np.array([[10, 0, 12], [0, 4, 12], [0, 0, 12]])
    places_NE = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 1]])
    tokens_NE = level(supply_NE, places_NE, np.array([1, 1, 1]))
    # Node 0's twelve of expert 2 go to nodes 1 and 2, which have 16 and 12: the last gets four more.
    assert tokens_NE.tolist() == [[10, 0, 0], [0, 4, 16], [0, 0, 20]]


@given(instance=instances())
def test_every_usable_slot_holds_another_expert_where_seconds_decide(instance):
    layout = plan_layout(instance.load, instance.cluster, ms.Greedy(), instance.slots, model=model_of(instance))
    assert layout.num_duplicates == 0
    np.testing.assert_array_equal(layout.filled_R, np.minimum(instance.slots, instance.load.num_experts))
    again = plan_layout(
        instance.load, instance.cluster, ms.Greedy(), instance.slots, model=model_of(instance), previous=layout
    )
    assert again.num_duplicates == 0
    assert (again.replicas_RE.sum(axis=0) >= 1).all()


@pytest.mark.parametrize("seed", [1034, 1136, 1245, 1262, 1421, 1482, 1492])
def test_ranks_with_more_slots_than_their_node_has_experts_use_them(seed):
    draws = np.random.default_rng(seed)
    num_experts, nodes = int(draws.integers(2, 9)), tuple(draws.integers(1, 4, 2).tolist())
    slots = tuple(draws.integers(0, num_experts + 1, sum(nodes)).tolist())
    load = LoadMatrix(draws.integers(0, 400, (sum(nodes), num_experts)))
    links = {"inter_node_gb_per_s": draws.choice([10.0, 50.0, 400.0])}
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=nodes, **links)
    shape = {"hidden_size": 2048, "intermediate_size": int(draws.choice([128, 768, 8192])), "top_k": 1}
    model = ms.ModelShape(num_experts=num_experts, **shape)
    assert plan_layout(load, cluster, ms.Greedy(), slots, model=model).filled_R.tolist() == list(slots)


def drawn(model: ms.ModelShape, cluster: ms.ClusterSpec, seed: int, spread: float) -> list[LoadMatrix]:
    """A load to plan for and a later sample."""
    how = ms.Generated(drift=0.0, spread=spread, num_layers=1, tokens_per_rank=8192, warmup=0, steps=2)
    trace = generate(how, cluster.num_ranks, model.num_experts, model.top_k, seed)
    return [LoadMatrix(tokens_RE) for tokens_RE in trace.tokens_SLRE[:, 0]]


def step_ms(model, cluster, slots, balance, split, loads, *, counts_only=False):
    planned_for, later = loads
    layout = plan_layout(planned_for, cluster, balance, slots, model=None if counts_only else model)
    strategy = ms.Strategy(name="x", sharding=ms.Fsep(slots_per_rank=slots), balance=balance, split=split)
    layer = plan_layer(strategy, model, cluster, later, layout=layout)
    return simulate(StepPlan(strategy, model, cluster, (layer, layer))).length_us / 1000


@pytest.mark.parametrize(
    ("model", "num_nodes", "slots", "spread", "most"),
    [
        (presets.QWEN3_30B_A3B, 2, 10, 0.1, 0.93),
        (presets.QWEN3_30B_A3B, 4, 8, 0.1, 0.86),
        (presets.QWEN3_30B_A3B, 4, 8, 1.0, 0.72),
        (presets.DEEPSEEK_V3, 4, 10, 0.1, 0.96),
        pytest.param(presets.QWEN3_30B_A3B, 8, 8, 0.1, 0.85, marks=pytest.mark.slow),
        pytest.param(presets.QWEN3_30B_A3B, 16, 6, 0.1, 0.79, marks=pytest.mark.slow),
        pytest.param(presets.DEEPSEEK_V3, 8, 6, 0.1, 0.93, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_shorter_than_under_laer_and_under_a_plan_for_counts(model, num_nodes, slots, spread, most):
    cluster = presets.h100(num_nodes)
    for seed in (0, 1):
        case = (model, cluster, slots)
        loads = drawn(model, cluster, seed, spread)
        ours_ms = step_ms(*case, ms.Greedy(), ms.FlowSplit(), loads)
        assert ours_ms <= most * step_ms(*case, ms.Laer(), ms.EvenSplit(), loads)
        assert ours_ms <= step_ms(*case, ms.Greedy(), ms.FlowSplit(), loads, counts_only=True)


def test_a_fast_network_leaves_balance_alone():
    model, cluster = presets.QWEN3_30B_A3B, presets.h100(2)
    load = drawn(model, cluster, 0, 0.1)[0]
    near = cluster.replace(inter_node_gb_per_s=1e6)
    crossing, busiest = [], []
    for each in (cluster, near):
        layout = plan_layout(load, each, ms.Greedy(), 10, model=model)
        tokens = plan_layer(ms.Strategy(name="x", split=ms.FlowSplit()), model, each, load, layout=layout).tokens
        crossing.append(tokens.inter_node_tokens(each.node_of_rank))
        busiest.append(tokens.max_over_mean)
    assert crossing[0] < crossing[1]
    assert busiest[1] == pytest.approx(1.0, abs=1e-4)


def test_cp_sat_begins_with_counts_whatever_the_model():
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, inter_node_gb_per_s=0.01)
    load = LoadMatrix(np.random.default_rng(0).integers(0, 90, (4, 6)))
    config = ms.CpSat(deterministic_time=0.2)
    plain, known = (plan_layout(load, cluster, config, 2, model=m) for m in (None, SMALL.replace(num_experts=6)))
    assert plain.expert_RS.tobytes() == known.expert_RS.tobytes()
