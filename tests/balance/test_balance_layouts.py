"""What every planner promises, and what each of them promises alone."""

import numpy as np
import pytest
from balance_cases import zipf_load

from moesys.balance.eplb import heaviest_replicated
from moesys.balance.laer import BYTES_PER_TOKEN, Laer, laer_seconds, proportional_replicas
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.run_planner import plan_layout
from moesys.balance.static import Static
from moesys.config import ClusterSpec, Ep, ModelShape, Strategy
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import LoadMatrix


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 1), (3, 7), (4, 8), (4, 2), (7, 24)])
def test_static_on_the_slots_of_ep_is_blocks_of_experts_by_rank(num_ranks, num_experts):
    cluster = ClusterSpec(ranks_per_node=num_ranks)
    model = ModelShape(hidden_size=8, intermediate_size=8, num_experts=num_experts, top_k=1)
    slots = Strategy(name="ep", sharding=Ep()).slots(model, cluster)
    load = LoadMatrix(np.ones((num_ranks, num_experts), dtype=np.int64))
    layout = plan_layout(load, cluster, Static(), slots)
    assert [e for rank in range(num_ranks) for e in layout.experts_of(rank)] == list(range(num_experts))


def test_static_wraps_round_and_leaves_slots_beyond_the_experts_empty():
    layout = plan_layout(LoadMatrix([[1, 1, 1]] * 3), ClusterSpec(ranks_per_node=3), Static(), [2, 4, 2])
    assert layout.expert_RS.tolist() == [[0, 1, EMPTY, EMPTY], [2, 0, 1, EMPTY], [2, 0, EMPTY, EMPTY]]


# --- EPLB


def test_eplb_compares_shares_that_floating_point_cannot_tell_apart():
    huge = 2**55
    # huge + 1 in three replicas is the heavier share, by a third of a token
    assert heaviest_replicated([3 * huge, 3 * huge + 1], 7) == [0, 1, 1, 0, 1, 0, 1]


# --- LAER


def test_laer_grows_by_a_replica_a_node_once_there_is_one_a_node():
    # 8 slots, 2 nodes, 3 experts: 2 each to begin with, the last 2 to the heaviest
    assert proportional_replicas([10, 90, 10], num_slots=8, num_nodes=2) == [2, 4, 2]
    # one node: one at a time, as EPLB
    assert proportional_replicas([10, 90, 20], num_slots=6, num_nodes=1) == [1, 4, 1]
    # 3 nodes do not fit at the start, and at the end 2 slots are too few for a step of 3
    assert proportional_replicas([90, 10], num_slots=5, num_nodes=3) == [3, 2]
    assert proportional_replicas([90], num_slots=5, num_nodes=3) == [3]


def test_laer_spreads_the_replicas_of_an_expert_over_nodes():
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=2)
    layout = plan_layout(LoadMatrix([[80, 10]] * 4), cluster, Laer(candidates=("even",)), 1)
    node_0, node_1 = layout.replicas_RE[:2].sum(axis=0), layout.replicas_RE[2:].sum(axis=0)
    assert node_0.tolist() == node_1.tolist() == [1, 1]


def test_laer_counts_its_cost_by_hand():
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=(2, 1), intra_node_gb_per_s=2.0, inter_node_gb_per_s=0.5)
    load = LoadMatrix([[10, 4], [0, 0], [6, 0]])
    layout = ExpertLayout([[0], [0], [1]], num_experts=2)
    # rank 0 keeps 5 of expert 0 and sends 5 to rank 1, and 4 of expert 1 to rank 2; rank 2 sends 3 to either
    communication = BYTES_PER_TOKEN * 1e-9 * (5 / 2.0 + (4 + 6) / 0.5)
    seconds = laer_seconds(PlanningProblem.of_split(load, layout, cluster))
    assert float(seconds) == pytest.approx(4 * communication + 4 * 1.484375e-6 * 8)


def test_laer_takes_the_cheaper_candidate_and_the_first_at_equal_cost():
    cluster, load = ClusterSpec(ranks_per_node=4), zipf_load(4, 4, 2.0)
    even, proportional = (plan_layout(load, cluster, Laer(candidates=(c,)), 2) for c in ("even", "proportional"))
    seconds = [laer_seconds(PlanningProblem.of_split(load, layout, cluster)) for layout in (proportional, even)]
    assert seconds[0] < seconds[1]
    assert plan_layout(load, cluster, Laer(), 2) == proportional
    nothing = LoadMatrix(np.zeros((4, 3), dtype=np.int64))
    firsts = [
        plan_layout(nothing, cluster, Laer(candidates=order), 3)
        for order in (("even",), ("even", "proportional"), ("proportional",), ("proportional", "even"))
    ]
    assert firsts[0] == firsts[1] != firsts[2] == firsts[3]


def test_laer_falls_back_to_proportional_where_even_cannot_be():
    cluster, load = ClusterSpec(ranks_per_node=3), zipf_load(3, 4, 1.0)
    fallen, proportional = (plan_layout(load, cluster, Laer(candidates=(c,)), 2) for c in ("even", "proportional"))
    assert fallen == proportional
