"""Rows by stage, from counts: nothing is lost on the way, and expected crossings are what drawn tokens do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.row_traffic import expected_crossing, gates, row_traffic

ONCE = ms.Sequential(node_dispatch="once")
SUMS = ms.Sequential(node_dispatch="once", combine="per_node")


@st.composite
def plans(draw: st.DrawFn) -> tuple[ms.planning.TokenPlan, ms.ModelShape, ms.ClusterSpec]:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    cluster = ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes)
    E, K, R = draw(st.integers(2, 9)), draw(st.integers(1, 2)), cluster.num_ranks
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = [rng.random((draw(st.integers(0, 40)), E)).argsort(axis=1)[:, :K] for _ in range(R)]
    load = ms.planning.LoadMatrix(np.array([np.bincount(each.ravel(), minlength=E) for each in chosen]))
    layout = ms.plan_layout(load, cluster, ms.Greedy(), -(-E // R) + 1)
    shape = ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=E, top_k=K)
    return ms.planning.split_tokens(load, layout, cluster, ms.FlowSplit()), shape, cluster


@given(plans())
def test_what_crosses_is_spread_and_what_stays_goes_at_once(case):
    plan, shape, cluster = case
    node_R = np.array(cluster.node_of_rank)
    same_RR = node_R[:, None] == node_R
    direct = row_traffic(plan, shape, cluster, ms.Sequential())
    once, sums = (row_traffic(plan, shape, cluster, overlap) for overlap in (ONCE, SUMS))
    rows_RR = direct.rows_RR["dispatch"]
    assert rows_RR.sum() == plan.load.total
    assert (direct.rows_RR["combine"] == rows_RR.T).all()
    assert (once.rows_RR["combine"] == rows_RR.T).all()
    # Every rank gets its rows: of its node at once, of others from gates in its node.
    arrived_R = once.rows_RR["dispatch"].sum(axis=0, where=same_RR) + once.rows_RR["spread"].sum(axis=0)
    assert np.allclose(arrived_R, rows_RR.sum(axis=0))
    assert not once.rows_RR["spread"][~same_RR].any()
    # A token crosses to a node at most once, and so at most as often as it has rows there.
    crossing_RR, rows_across_RR = (np.where(same_RR, 0, rows) for rows in (once.rows_RR["dispatch"], rows_RR))
    assert crossing_RR.sum() <= rows_across_RR.sum() + 1e-9
    assert (crossing_RR.sum(axis=1) * shape.top_k >= rows_across_RR.sum(axis=1) - 1e-9).all()
    # What goes home is what came.
    assert (sums.rows_RR["combine"] == once.rows_RR["spread"].T).all()
    assert (sums.rows_RR["send_sums"] == once.rows_RR["dispatch"].T).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_rank_has_a_gate_in_every_node_and_none_is_gate_for_many_more_than_others(sizes: list[int]):
    cluster = ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=tuple(sizes))
    gate_RN, node_R = gates(cluster.node_of_rank), np.array(cluster.node_of_rank)
    assert (node_R[gate_RN] == np.arange(len(sizes))).all()
    assert (gate_RN[np.arange(len(node_R)), node_R] == np.arange(len(node_R))).all()
    for node, size in enumerate(sizes):
        for of, other in enumerate(sizes):
            served = np.bincount(gate_RN[node_R == of, node], minlength=len(node_R))[node_R == node]
            assert served.max() <= -(-other // size)


@pytest.mark.parametrize(("num_nodes", "K"), [(2, 8), (4, 8), (8, 4), (4, 2)])
def test_expected_crossings_are_those_of_drawn_tokens(num_nodes: int, K: int):
    """Tokens choose distinct experts by log-normal popularity; their rows go where a split of counts sends them."""
    E, T, rng = 64, 4000, np.random.default_rng(num_nodes)
    cluster = ms.ClusterSpec(num_nodes=num_nodes, ranks_per_node=2)
    node_R, R = np.array(cluster.node_of_rank), cluster.num_ranks
    popularity_E = rng.normal(size=E)
    chosen = [(popularity_E + rng.gumbel(size=(T, E))).argsort(axis=1)[:, -K:] for _ in range(R)]
    load = ms.planning.LoadMatrix(np.array([np.bincount(each.ravel(), minlength=E) for each in chosen]))
    plan = ms.planning.split_tokens(
        load, ms.plan_layout(load, cluster, ms.Greedy(), E // R + 2), cluster, ms.FlowSplit()
    )
    crossing_RN = np.zeros((R, num_nodes))
    for rank, chosen_TK in enumerate(chosen):
        mine = plan.entries[plan.entries[:, 0] == rank]
        to = {e: np.repeat(node_R[mine[mine[:, 1] == e, 2]], mine[mine[:, 1] == e, 3]) for e in range(E)}
        seen_TN = np.zeros((T, num_nodes), dtype=bool)
        for expert in range(E):
            seen_TN[np.nonzero((chosen_TK == expert).any(axis=1))[0], to[expert]] = True
        seen_TN[:, node_R[rank]] = False
        crossing_RN[rank] = seen_TN.sum(axis=0)
    rows_RR = np.zeros((R, R))
    np.add.at(rows_RR, (plan.entries[:, 0], plan.entries[:, 2]), plan.entries[:, 3])
    model = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=E, top_k=K)
    expected_RN = expected_crossing(rows_RR, cluster, model, np.ones(num_nodes, dtype=int))
    assert expected_RN.sum() == pytest.approx(crossing_RN.sum(), rel=0.04)
    assert np.abs(expected_RN - crossing_RN).max() < 0.12 * T


@pytest.mark.parametrize(
    ("num_nodes", "E", "groups", "left", "K"),
    [(8, 64, 8, 4, 8), (4, 64, 8, 3, 6), (2, 64, 8, 2, 4), (8, 64, 4, 2, 8), (16, 256, 8, 4, 8)],
)
def test_a_choice_limited_to_groups_reaches_fewer_nodes(num_nodes: int, E: int, groups: int, left: int, K: int):
    """Tokens choose ``left`` groups, and in them distinct experts, which lie in order on the nodes."""
    T, rng, R = 4000, np.random.default_rng(0), num_nodes
    cluster = ms.ClusterSpec(num_nodes=num_nodes)
    open_TG = rng.random((R * T, groups)).argsort(axis=1) < left
    score_TE = np.where(open_TG.repeat(E // groups, axis=1), rng.random((R * T, E)), -1.0)
    chosen_RTK = score_TE.argsort(axis=1)[:, -K:].reshape(R, T, K)
    node_RTK = chosen_RTK // (E // num_nodes)
    reached = np.array([[(node_RTK[rank] == node).any(axis=1).sum() for node in range(R)] for rank in range(R)])
    np.fill_diagonal(reached, 0)
    load = ms.planning.LoadMatrix(np.array([np.bincount(each.ravel(), minlength=E) for each in chosen_RTK]))
    plan = ms.planning.split_tokens(load, ms.plan_layout(load, cluster, ms.Static(), E // R), cluster, ms.EvenSplit())
    free = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=E, top_k=K)
    limited = free.replace(scoring_func="sigmoid", n_group=groups, topk_group=left)
    sent = [row_traffic(plan, model, cluster, ONCE).rows_RR["dispatch"] for model in (free, limited)]
    crossing = [each.sum() - np.trace(each) for each in sent]
    assert crossing[1] == pytest.approx(reached.sum(), rel=0.05)
    assert crossing[0] > crossing[1]
    # Without a limit in effect it is the same.
    wide = limited.replace(topk_group=groups)
    assert row_traffic(plan, wide, cluster, ONCE).rows_RR["dispatch"].sum() == pytest.approx(sent[0].sum(), rel=0.05)
