"""Homes of experts that stay whole: who owns them, and layouts that leave them there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.balance.greedy.builders import pin_homes
from moesys.balance.homes import Homes, planned_homes
from moesys.balance.planners import plan_layout
from moesys.config import presets
from moesys.layout import owner_of_experts

CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(0, 2**32),
    st.sampled_from([1, 50]),
)
def test_every_rank_owns_as_many_as_by_the_rule_and_numbers_follow(sizes, num_experts, seed, most):
    cluster = ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=tuple(sizes))
    R = cluster.num_ranks
    load = ms.LoadMatrix(np.random.default_rng(seed).integers(0, most, (R, num_experts)))
    home_E, rule_E = planned_homes(load, cluster), owner_of_experts(num_experts, R)
    assert np.bincount(home_E, minlength=R).tolist() == np.bincount(rule_E, minlength=R).tolist()
    homes = Homes(home_E, R)
    numbered = homes.numbered(load)
    assert homes.load_by_id(numbered) == load
    assert rule_E[homes.number_E].tolist() == home_E.tolist()
    for rank in range(R):
        of_rank = sorted(load.tokens_RE[:, home_E == rank].T.tolist())
        assert sorted(numbered.tokens_RE[:, rule_E == rank].T.tolist()) == of_rank


def test_nodes_own_what_their_own_ranks_want():
    wants_RE = np.array([[1, 1, 9, 9], [1, 1, 9, 9], [9, 9, 1, 1], [9, 9, 1, 1]])
    assert np.asarray(CLUSTER.node_of_rank)[planned_homes(ms.LoadMatrix(wants_RE), CLUSTER)].tolist() == [1, 1, 0, 0]


def test_nodes_are_level_where_all_want_the_same():
    tokens_E = (2 ** np.arange(8, 0, -0.25)).astype(int)
    load = ms.LoadMatrix(np.tile(tokens_E, (4, 1)))
    home_E, node_R = planned_homes(load, CLUSTER), np.asarray(CLUSTER.node_of_rank)
    by_rule, planned = (
        np.bincount(node_R[of_E], load.tokens_E) for of_E in (owner_of_experts(len(tokens_E), 4), home_E)
    )
    assert planned.max() < 1.01 * planned.mean() < 0.7 * by_rule.max()


def test_copies_are_those_that_a_node_wants_most_on_ranks_with_least():
    """Rank 0 owns 0 and 1 in node 0, rank 1 owns 2 and 3 in node 1; each has a slot more."""
    supply_NE = np.array([[5, 5, 3, 7], [2, 9, 5, 5]])
    expert_RS = np.full((2, 3), -1)
    assert pin_homes(supply_NE, np.array([0, 0, 1, 1]), np.array([3, 3]), np.array([0, 1]), expert_RS)
    assert expert_RS.tolist() == [[0, 1, 3], [2, 3, 1]]
    assert not pin_homes(supply_NE, np.array([0, 0, 1, 1]), np.array([1, 3]), np.array([0, 1]), np.full((2, 3), -1))


@pytest.mark.parametrize("lend", ["flat", "hierarchical"])
def test_greedy_leaves_experts_at_home_where_they_stay_whole(lend):
    """Nearly all; and does not where every slot of every rank is filled anew anyway."""
    model, cluster = presets.OLMOE_1B_7B, presets.h100(2)
    rng = np.random.default_rng(0)
    tokens_E = rng.lognormal(sigma=1.0, size=model.num_experts)
    load = ms.LoadMatrix(rng.poisson(4096 * tokens_E / tokens_E.sum(), (16, model.num_experts)) * 8)
    owner_E, experts = owner_of_experts(model.num_experts, 16), np.arange(model.num_experts)

    def plan(sharding: ms.Ep | ms.Fsep) -> ms.ExpertLayout:
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
    load = ms.LoadMatrix(rng.poisson(8192 * model.top_k * share_E / share_E.sum(), (16, model.num_experts)))
    ep = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=32), lag=0)

    def layer(**planner: object) -> tuple[float, int]:
        strategy = ep.replace(**planner)
        plan = ms.plan_layer(strategy, model, cluster, load)
        length_ms = ms.simulate(ms.StepPlan(strategy, model, cluster, (plan,))).length_us / 1e3
        return length_ms, int(plan.layout.filled_R.sum()) - model.num_experts

    ours_ms, copies = layer(balance=ms.Greedy(drift=0), split=ms.FlowSplit(max_inter_node="seconds"))
    rivals = [layer(balance=balance, split=ms.Quotas()) for balance in (ms.MoonEp(), ms.UltraEp(), ms.Llep())]
    assert ours_ms < min(ms_of for ms_of, _ in rivals)
    assert 0 < copies < 100


def test_a_plan_in_numbers_is_the_plan_of_the_model():
    """Expert 3 lives on rank 0 with expert 0; what is planned for number 1 is planned for it."""
    homes = Homes(np.array([0, 1, 1, 0]), 2)
    assert homes.expert_E.tolist() == [0, 3, 1, 2]
    load = ms.LoadMatrix([[5, 6, 7, 8], [1, 2, 3, 4]])
    layout = ms.ExpertLayout([[0, 1, -1], [2, 3, 1]], num_experts=4)
    plan = ms.split_tokens(homes.numbered(load), layout, ms.ClusterSpec(ranks_per_node=2), ms.EvenSplit())
    found = homes.plan_by_id(plan)
    assert found.load == load
    assert found.layout.expert_RS.tolist() == [[0, 3, -1], [1, 2, 3]]
    assert found.tokens_R.tolist() == plan.tokens_R.tolist()
    assert found.tokens_RER[:, homes.expert_E].tolist() == plan.tokens_RER.tolist()


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        ([0, 1, 2, 0], "homes has rank 2 for expert 2; ranks are 0..1"),
        ([0, -1, 1, 0], "homes has rank -1 for expert 1"),
        ([0, 0, 1, 0], r"homes has 3 of 4 experts on rank 0, and each of 2 ranks has \[2, 2\]"),
        ([[0, 1, 1, 0]], r"homes has shape \(1, 4\)"),
        ([0.0, 1.0, 1.0, 0.0], "homes has dtype float64"),
    ],
)
def test_homes_that_do_not_fit_are_refused(homes, message):
    with pytest.raises(ValueError, match=message):
        Homes(np.array(homes), 2)


def test_loads_of_other_ranks_are_refused():
    with pytest.raises(ValueError, match=r"loads\[0\] is of 2 ranks and the cluster has 4"):
        ms.plan_homes([ms.LoadMatrix([[1], [1]])], CLUSTER)
