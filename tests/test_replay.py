"""The walk history -> layout -> plan: which loads a layout knows, when it comes into force, and what brought it."""

from __future__ import annotations

import numpy as np
import pytest

from moesys import ClusterSpec, FlexMoe, FlowSplit, Fsep, Generated, Greedy, ModelShape, Oracle, Strategy, plan_layout
from moesys.balance.plan import plan_layer
from moesys.balance.replay import Moment, replay_layer, replay_steps
from moesys.load import LoadMatrix
from moesys.traces import generate

MODEL = ModelShape(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=3), balance=Greedy(), split=FlowSplit())
DRAWN = Generated(warmup=0, steps=8, tokens_per_rank=64, num_layers=2, drift=0.6, skew=1.5)
TOKENS_SLRE = generate(DRAWN, CLUSTER.num_ranks, MODEL.num_experts, MODEL.top_k, seed=0).tokens_SLRE
LOADS = [LoadMatrix(tokens_RE) for tokens_RE in TOKENS_SLRE[:, 0]]


def test_each_layout_is_planned_on_the_load_before_it():
    strategy = FSEP.replace(balance=FlexMoe())  # begins from the layout in force
    layout = plan_layout(LoadMatrix(np.ones((4, 8), dtype=int)), CLUSTER, FlexMoe(), 3, model=MODEL)
    for number, one in enumerate(replay_layer(strategy, MODEL, CLUSTER, TOKENS_SLRE[:, 0])):
        if number:
            layout = plan_layout(LOADS[number - 1], CLUSTER, FlexMoe(), 3, model=MODEL, previous=layout)
        assert one.micro_batch == number
        assert one.load == LOADS[number]
        assert np.array_equal(one.layout.expert_RS, layout.expert_RS)
        assert str(one.plan) == str(plan_layer(strategy, MODEL, CLUSTER, LOADS[number], layout=layout, turn=number))


def test_a_plan_comes_into_force_lag_after_the_load_that_it_was_asked_for_after():
    late = FSEP.replace(replan_every=2, lag=3)
    walk = list(replay_layer(late, MODEL, CLUSTER, TOKENS_SLRE[:, 0]))
    replans = {one.micro_batch: one.replan for one in walk if one.replan}
    assert {now: replan.made_after for now, replan in replans.items()} == {4: 1, 6: 3}
    for now, replan in replans.items():
        assert replan.request.load == LOADS[replan.made_after]
        assert replan.replaced == walk[now - 1].layout


def test_moments_know_what_they_say_and_plan_only_where_something_is_new():
    moments = [Moment(2, 3), Moment(2, 4), Moment(5, 7)]
    walk = list(replay_layer(FSEP, MODEL, CLUSTER, TOKENS_SLRE[:, 0], moments=moments))
    assert [one.micro_batch for one in walk] == [3, 4, 7]
    assert [one.replan and one.replan.made_after for one in walk] == [1, None, 4]
    assert walk[0].layout == walk[1].layout
    assert list(replay_layer(FSEP, MODEL, CLUSTER, TOKENS_SLRE[:, 0], moments=[])) == []


@pytest.mark.parametrize("strategy", [FSEP, FSEP.replace(predictor=Oracle())], ids=["last", "oracle"])
def test_steps_have_all_layers(strategy):
    steps = list(replay_steps(strategy, MODEL, CLUSTER, TOKENS_SLRE))
    assert len(steps) == 8
    for layer in range(2):
        walk = replay_layer(strategy, MODEL, CLUSTER, TOKENS_SLRE[:, layer], layer=layer)
        for step, one in zip(steps, walk, strict=True):
            assert step.layers[layer].tokens.entries.tolist() == one.plan.tokens.entries.tolist()
