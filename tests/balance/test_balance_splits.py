"""What every split promises, and that FlowSplit is exact."""

import numpy as np
import pytest
from balance_cases import instances, layouts, zipf_load
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from moesys.balance.eplb import Eplb
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.proportional_split import Proportional
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec, Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix

SPLITS = [
    *(split() for split in Split.kinds().values() if not split.follows_planner),
    FlowSplit(traffic="exact"),
    FlowSplit(max_inter_node=0.1),
    FlowSplit(traffic="exact", max_inter_node=0.1),
]


@pytest.mark.parametrize("config", SPLITS, ids=repr)
@given(data=st.data(), instance=instances(), turn=st.integers(0, 7))
def test_splits_send_every_token_once_to_a_holder_and_repeat_themselves(config, data, instance, turn):
    layout = data.draw(layouts(instance))
    plan = split_tokens(instance.load, layout, instance.cluster, config, turn)
    # splits vouch for their entries; here everything that a plan must be is checked
    plan = TokenPlan(plan.entries.copy(), instance.load, layout)
    np.testing.assert_array_equal(plan.tokens_RER.sum(axis=2), instance.load.tokens_RE)
    assert not plan.tokens_RER[:, (layout.replicas_RE == 0).T].any()
    again = split_tokens(instance.load, layout, instance.cluster, config, turn)
    assert again.entries.tobytes() == plan.entries.tobytes()


# --- EvenSplit


def test_even_split_by_hand():
    """Two nodes of two ranks; expert 0 on ranks 0, 1 and 2, expert 1 on rank 3 only."""
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=2)
    layout = ExpertLayout([[0], [0], [0], [1]], num_experts=2)
    load = LoadMatrix([[7, 3], [0, 0], [5, 0], [4, 2]])
    plan = split_tokens(load, layout, cluster, EvenSplit())
    assert plan.entries.tolist() == [
        [0, 0, 0, 4],  # 7 over the two on its node, the odd one to the first
        [0, 0, 1, 3],
        [0, 1, 3, 3],  # none on its node: all of them
        [2, 0, 2, 5],
        [3, 0, 2, 4],
        [3, 1, 3, 2],
    ]
    turned = split_tokens(load, layout, cluster, EvenSplit(), turn=1)
    assert turned.tokens_RER[0, 0].tolist() == [3, 4, 0, 0]


@given(data=st.data(), instance=instances(), turn=st.integers(0, 7))
def test_even_split_agrees_with_its_definition(data, instance, turn):
    layout, load, node = data.draw(layouts(instance)), instance.load, instance.cluster.node_of_rank
    expected = np.zeros((load.num_ranks, load.num_experts, load.num_ranks), dtype=np.int64)
    for source, expert in np.ndindex(load.num_ranks, load.num_experts):
        slots = [rank for rank in range(load.num_ranks) for e in layout.experts_of(rank) if e == expert]
        slots = [rank for rank in slots if node[rank] == node[source]] or slots
        each, left = divmod(int(load.tokens_RE[source, expert]), len(slots))
        for rank in slots:
            expected[source, expert, rank] += each
        for i in range(left):
            expected[source, expert, slots[(turn + i) % len(slots)]] += 1
    plan = split_tokens(load, layout, instance.cluster, EvenSplit(), turn)
    np.testing.assert_array_equal(plan.tokens_RER, expected)


# --- Proportional


def test_proportional_split_by_hand():
    """Expert 0 on both ranks; expert 1 leaves 50 - 30 of room on rank 0, expert 2 leaves 50 - 10 on rank 1."""
    layout = ExpertLayout([[0, 1], [0, 2]], num_experts=3)
    plan = split_tokens(LoadMatrix([[30, 30, 0], [30, 0, 10]]), layout, ClusterSpec(ranks_per_node=2), Proportional())
    # 60 as 20 to 40; each rank's own tokens come first
    assert plan.tokens_RER[:, 0].tolist() == [[20, 10], [0, 30]]
    assert plan.tokens_R.tolist() == [50, 50]


def test_proportional_split_rotates_ties_and_shares_alike_where_there_is_no_room():
    layout, cluster = ExpertLayout([[0], [0], [0]], num_experts=1), ClusterSpec(ranks_per_node=3)
    load = LoadMatrix([[4], [0], [0]])
    rotated = [split_tokens(load, layout, cluster, Proportional(), turn).tokens_R.tolist() for turn in range(4)]
    assert rotated == [[2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1]]
    crowded = ExpertLayout([[0, 1], [0, 2], [3, -1]], num_experts=4)
    load = LoadMatrix([[6, 90, 90, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert split_tokens(load, crowded, cluster, Proportional()).tokens_RER[0, 0].tolist() == [3, 3, 0]


def test_proportional_split_shares_all_tokens_among_the_ranks_that_hold_experts():
    """Rank 2 holds nothing: of a mean of 5, expert 1 leaves 2 on rank 0, so that 6 tokens are divided as 2 to 5."""
    layout = ExpertLayout([[0, 1], [0, -1], [-1, -1]], num_experts=2)
    plan = split_tokens(LoadMatrix([[6, 3], [0, 0], [0, 0]]), layout, ClusterSpec(ranks_per_node=3), Proportional())
    assert plan.tokens_RER[0, 0].tolist() == [2, 4, 0]


def test_proportional_split_survives_loads_near_the_end_of_int64():
    layout = ExpertLayout([[0, 1], [0, 2]], num_experts=3)
    load = LoadMatrix([[3 * 2**45, 3 * 2**45, 0], [3 * 2**45, 0, 2**45]])
    plan = split_tokens(load, layout, ClusterSpec(ranks_per_node=2), Proportional())
    assert plan.max_over_mean == 1.0


# --- FlowSplit


@given(data=st.data(), instance=instances(max_ranks=4, max_experts=5, max_tokens=30))
def test_flow_split_is_the_optimum_of_an_independent_solver(data, instance):
    """Three integer programs in turn: busiest rank, then tokens between nodes, then tokens between ranks."""
    layout, load = data.draw(layouts(instance)), instance.load
    # rows are dear to leave a domain: nodes, single ranks, or the whole cluster
    domains = data.draw(st.sampled_from([None, 1, load.num_ranks]))
    cluster = instance.cluster.replace(ranks_per_domain=domains)
    node = np.array(cluster.domain_of_rank)
    allowed_RER = np.repeat(layout.replicas_RE.T[None] > 0, load.num_ranks, axis=0)
    source, expert, destination = np.nonzero(allowed_RER)
    num = len(source)
    routed = np.zeros((load.num_ranks * load.num_experts, num + 1))
    routed[source * load.num_experts + expert, np.arange(num)] = 1
    received = np.zeros((load.num_ranks, num + 1))
    received[destination, np.arange(num)] = 1
    received[:, num] = -1
    crossing = np.append(node[source] != node[destination], 0).astype(float)
    moving = np.append(source != destination, 0).astype(float)
    busiest = np.append(np.zeros(num), 1.0)
    constraints = [
        LinearConstraint(routed, load.tokens_RE.ravel(), load.tokens_RE.ravel()),
        LinearConstraint(received, -np.inf, 0),
    ]
    optima = []
    for objective in (busiest, crossing, moving):
        solution = milp(objective, constraints=constraints, integrality=np.ones(num + 1))
        assert solution.success
        optima.append(round(solution.fun))
        constraints.append(LinearConstraint(objective[None], -np.inf, optima[-1]))
    assert min_max_load(load, layout) == optima[0]
    plan = split_tokens(load, layout, cluster, FlowSplit(traffic="exact"))
    moved = int(plan.tokens_RER.sum(axis=1)[~np.eye(load.num_ranks, dtype=bool)].sum())
    assert [plan.tokens_R.max(), plan.inter_node_tokens(tuple(node)), moved] == optima
    fast = split_tokens(load, layout, cluster, FlowSplit())
    assert fast.tokens_R.max() == optima[0]
    assert optima[1] <= fast.inter_node_tokens(tuple(node)) <= 1.05 * optima[1] + 1


@pytest.mark.parametrize(("num_experts", "slots"), [(8, 2), (16, 4), (64, 3), (128, 5)])
@pytest.mark.parametrize("balance", [Greedy(), Laer(), Eplb()], ids=repr)
def test_fast_traffic_is_within_a_twentieth_of_exact(num_experts, slots, balance):
    """Layouts of 4 nodes of 8 that were planned for other loads; (8, 2) and (16, 4) are LAER-MoE's settings."""
    cluster, rng = ClusterSpec(num_nodes=4, ranks_per_node=8), np.random.default_rng(num_experts)
    for exponent in (0.3, 1.0, 1.5):
        planned = zipf_load(32, num_experts, exponent)
        noise_NE = rng.lognormal(0, 0.15, (4, num_experts))
        load = LoadMatrix((planned.tokens_RE * noise_NE.repeat(8, axis=0)).astype(np.int64))
        layout = plan_layout(planned, cluster, balance, slots)
        fast, exact = (split_tokens(load, layout, cluster, FlowSplit(traffic=traffic)) for traffic in ("fast", "exact"))
        assert fast.tokens_R.max() == exact.tokens_R.max() == min_max_load(load, layout)
        crossing = [plan.inter_node_tokens(cluster.node_of_rank) for plan in (fast, exact)]
        assert crossing[1] <= crossing[0] <= 1.05 * crossing[1]


@given(data=st.data(), instance=instances(), cap=st.floats(0, 1))
def test_a_cap_on_traffic_is_kept_or_the_least_traffic_is_reached(data, instance, cap):
    layout, load, node_R = data.draw(layouts(instance)), instance.load, instance.cluster.node_of_rank
    capped = split_tokens(load, layout, instance.cluster, FlowSplit(max_inter_node=cap))
    holds_EN = np.zeros((load.num_experts, max(node_R) + 1), dtype=bool)
    for rank, expert in np.argwhere(layout.replicas_RE):
        holds_EN[expert, node_R[rank]] = True
    homeless = sum(int(load.tokens_RE[rank, ~holds_EN[:, node]].sum()) for rank, node in enumerate(node_R))
    assert capped.inter_node_tokens(node_R) <= max(int(cap * load.total), homeless)
    free = split_tokens(load, layout, instance.cluster, FlowSplit())
    assert capped.tokens_R.max() >= free.tokens_R.max()
    if free.inter_node_tokens(node_R) <= cap * load.total:
        assert capped == free


def test_a_cap_trades_balance_for_traffic():
    """Rank 0 and 1 hold expert 0 on two nodes; each token that crosses takes one from the busiest rank."""
    cluster, layout = ClusterSpec(num_nodes=2, ranks_per_node=1), ExpertLayout([[0], [0]], num_experts=1)
    load = LoadMatrix([[80], [20]])
    busiest = [
        split_tokens(load, layout, cluster, FlowSplit(max_inter_node=cap)).tokens_R.max() for cap in (0, 0.1, 0.3, 1)
    ]
    assert busiest == [80, 70, 50, 50]


def test_flow_split_rotates_what_does_not_divide():
    """Five tokens of a rank without the expert, over two that have it."""
    layout, cluster = ExpertLayout([[1], [0], [0]], num_experts=2), ClusterSpec(ranks_per_node=3)
    load = LoadMatrix([[5, 0], [0, 0], [0, 0]])
    turned = [split_tokens(load, layout, cluster, FlowSplit(), turn).tokens_R.tolist() for turn in range(3)]
    assert turned == [[0, 3, 2], [0, 2, 3], [0, 3, 2]]


def test_tokens_stay_in_their_domain_before_they_leave_it():
    """Ranks 0 and 1 are a domain of node 0, ranks 2 and 3 the other; rank 4 is node 1."""
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=(4, 1), ranks_per_domain=(2, 2, 1))
    layout = ExpertLayout([[1], [0], [0], [1], [0]], num_experts=2)
    plan = split_tokens(LoadMatrix([[6, 0], [0, 0], [3, 0], [0, 0], [3, 0]]), layout, cluster, FlowSplit())
    assert plan.entries.tolist() == [[0, 0, 1, 4], [0, 0, 2, 1], [0, 0, 4, 1], [2, 0, 2, 3], [4, 0, 4, 3]]
