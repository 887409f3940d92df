"""Layouts of experts that stay whole: they leave experts on their owners, and add the copies that pay."""

from __future__ import annotations

import numpy as np
import pytest

import moesys as ms
from moesys.balance.greedy.builders import pin_owners
from moesys.balance.run_planner import plan_layout
from moesys.config import presets
from moesys.layout import owner_of_experts


def test_copies_are_those_that_a_node_wants_most_on_ranks_with_least():
    """Rank 0 owns 0 and 1 in node 0, rank 1 owns 2 and 3 in node 1; each has a slot more."""
    supply_NE = np.array([[5, 5, 3, 7], [2, 9, 5, 5]])
    expert_RS = np.full((2, 3), -1)
    assert pin_owners(supply_NE, np.array([0, 0, 1, 1]), np.array([3, 3]), np.array([0, 1]), expert_RS)
    assert expert_RS.tolist() == [[0, 1, 3], [2, 3, 1]]
    assert not pin_owners(supply_NE, np.array([0, 0, 1, 1]), np.array([1, 3]), np.array([0, 1]), np.full((2, 3), -1))


@pytest.mark.parametrize("lend", ["flat", "hierarchical"])
def test_greedy_leaves_experts_at_home_where_they_stay_whole(lend):
    """Nearly all; and does not where every slot of every rank is filled anew anyway."""
    model, cluster = presets.OLMOE_1B_7B, presets.h100(2)
    rng = np.random.default_rng(0)
    tokens_E = rng.lognormal(sigma=1.0, size=model.num_experts)
    load = ms.planning.LoadMatrix(rng.poisson(4096 * tokens_E / tokens_E.sum(), (16, model.num_experts)) * 8)
    owner_E, experts = owner_of_experts(model.num_experts, 16), np.arange(model.num_experts)

    def plan(sharding: ms.Ep | ms.Fsep) -> ms.planning.ExpertLayout:
        strategy = ms.Strategy(name="whole", sharding=sharding, balance=ms.Greedy())
        return plan_layout(load, cluster, strategy.balance, 6, model=model, strategy=strategy)

    layout = plan(ms.Ep(slots_per_rank=6, lend=lend))
    assert (layout.replicas_RE[owner_E, experts] == 1).mean() > 0.9
    assert layout.num_duplicates == 0
    assert layout.filled_R.max() > 4, "some are lent"
    assert (plan(ms.Fsep(slots_per_rank=6)).replicas_RE[owner_E, experts] == 0).any()


def test_copies_that_pay_beat_planners_that_know_the_counts_as_well():
    """Dear experts of very different popularity: few copies balance the ranks, and more cost more than they save."""
    model, cluster = presets.DEEPSEEK_V3, presets.h100(2)
    rng = np.random.default_rng(0)
    share_E = rng.lognormal(sigma=1.5, size=model.num_experts)
    load = ms.planning.LoadMatrix(rng.poisson(8192 * model.top_k * share_E / share_E.sum(), (16, model.num_experts)))
    ep = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=32), lag=0)

    def layer(**planner: object) -> tuple[float, int]:
        strategy = ep.replace(**planner)
        plan = ms.planning.plan_layer(strategy, model, cluster, load)
        length_ms = ms.simulate(ms.planning.StepPlan(strategy, model, cluster, (plan,))).length_us / 1e3
        return length_ms, int(plan.layout.filled_R.sum()) - model.num_experts

    ours_ms, copies = layer(balance=ms.Greedy(drift=0), split=ms.FlowSplit(max_inter_node="seconds"))
    rivals = [layer(balance=balance, split=ms.Quotas()) for balance in (ms.MoonEp(), ms.UltraEp(), ms.Llep())]
    assert ours_ms < min(ms_of for ms_of, _ in rivals)
    assert 0 < copies < 100
