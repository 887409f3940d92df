"""Greedy: what it promises for any problem, how good it is, and how it stays with the layout in force."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from balance_cases import Instance, instances, zipf_load
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moesys.balance.eplb import Eplb
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.greedy.numbering import num_moves, relabelled, relabelled_inside
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.balance.static import Static
from moesys.config import ClusterSpec
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import LoadMatrix

NODES_OF_8 = {ranks: ClusterSpec(num_nodes=ranks // 8, ranks_per_node=8) for ranks in (8, 16, 32, 64)}


@given(instance=instances(), least=st.integers(1, 4), within=st.sampled_from(["cluster", "node", "domain"]))
def test_replicas_are_as_many_as_asked_for_and_stay_where_they_may(instance, least, within):
    config = Greedy(effort=0, min_replicas=least, replicas_within=within)
    try:
        layout = plan_layout(instance.load, instance.cluster, config, instance.slots)
    except ValueError:
        assume(False)
    assert (layout.replicas_RE.sum(axis=0) >= least).all()
    assert layout.num_duplicates == 0
    if within != "cluster":
        place_R = np.array(getattr(instance.cluster, f"{within}_of_rank"))
        for expert in range(layout.num_experts):
            assert len(set(place_R[layout.replicas_RE[:, expert] > 0])) == 1
    searched = plan_layout(instance.load, instance.cluster, config.replace(effort=1), instance.slots)
    assert (searched.replicas_RE.sum(axis=0) >= least).all()
    assert searched.num_duplicates == 0


# --- quality


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(64, 8), (32, 16), (128, 32), (256, 64)])
def test_one_redundant_slot_a_rank_is_enough_for_the_mean(num_experts, num_ranks, exponent):
    load, cluster = zipf_load(num_ranks, num_experts, exponent, 65536), NODES_OF_8[num_ranks]
    layout = plan_layout(load, cluster, Greedy(), num_experts // num_ranks + 1)
    assert min_max_load(load, layout) <= 1.001 * load.total / num_ranks
    eplb = plan_layout(load, cluster, Eplb(), num_experts // num_ranks + 1)
    assert min_max_load(load, layout) <= min_max_load(load, eplb)


@given(
    num_ranks=st.integers(1, 9),
    slots=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.sampled_from([0.0, 0.7, 1.4]),
)
def test_any_load_on_one_node_is_filled_to_the_token_or_nearly(num_ranks, slots, seed, exponent):
    """With one redundant slot a rank an exact filling always exists: whole experts and a cut, rank by rank."""
    num_experts = num_ranks * (slots - 1)
    rng = np.random.default_rng(seed)
    share_E = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** exponent) * rng.lognormal(0, 0.3, num_experts)
    load = LoadMatrix(rng.multinomial(10_000, share_E / share_E.sum(), size=num_ranks))
    layout = plan_layout(load, ClusterSpec(ranks_per_node=num_ranks), Greedy(effort=4), slots)
    assert min_max_load(load, layout) <= 1.02 * load.total / num_ranks


@given(instance=instances())
def test_more_work_is_never_worse_on_the_load_itself(instance):
    def busiest(effort):
        layout = plan_layout(instance.load, instance.cluster, Greedy(effort=effort), instance.slots)
        return min_max_load(instance.load, layout)

    one_node = Instance(instance.load, ClusterSpec(ranks_per_node=instance.cluster.num_ranks), instance.slots)
    layouts = [plan_layout(one_node.load, one_node.cluster, Greedy(effort=e), one_node.slots) for e in (1, 2, 8)]
    misses = [min_max_load(one_node.load, layout) for layout in layouts]
    mean = -(-instance.load.total // sum(slots > 0 for slots in instance.slots))
    # what is minimised counts the load itself first; scenarios decide within a millionth of the mean
    assert all(after <= before + mean // 500 for before, after in pairwise(misses))
    assert busiest(1) >= mean or instance.load.total == 0


def test_layouts_are_ready_for_loads_that_drift():
    """On loads with 15 % noise a layout that was searched does better than one that is only exact."""
    cluster, slots = NODES_OF_8[16], 3
    rng = np.random.default_rng(0)
    searched, exact = [], []
    for exponent in (0.5, 1.0, 1.5):
        load = zipf_load(16, 32, exponent, 65536)
        later = [LoadMatrix((load.tokens_RE * rng.lognormal(0, 0.15, 32)).astype(np.int64)) for _ in range(20)]
        for effort, misses in ((4, searched), (0, exact)):
            layout = plan_layout(load, cluster, Greedy(effort=effort), slots)
            misses += [min_max_load(each, layout) * 16 / each.total for each in later]
    assert np.mean(searched) < 1.02 < np.mean(exact)


def test_nodes_that_can_hold_all_experts_keep_nearly_all_tokens():
    load, cluster = zipf_load(32, 8, 1.0), NODES_OF_8[32]
    plan = split_tokens(load, plan_layout(load, cluster, Greedy(), 2), cluster, FlowSplit())
    assert plan.max_over_mean < 1.001
    assert plan.inter_node_tokens(cluster.node_of_rank) < 0.01 * load.total


@given(instance=instances(max_ranks=8, max_experts=16), seed=st.integers(0, 2**32 - 1))
def test_values_do_not_depend_on_numbers_of_experts_nor_of_ranks_inside_a_node(instance, seed):
    rng = np.random.default_rng(seed)
    node_R = np.array(instance.cluster.node_of_rank)
    expert_E = rng.permutation(instance.load.num_experts)
    rank_R = np.lexsort((rng.random(len(node_R)), node_R))
    renamed = LoadMatrix(instance.load.tokens_RE[rank_R][:, expert_E])
    slots = [instance.slots[rank] for rank in rank_R]
    values = []
    for load, slots_R in ((instance.load, instance.slots), (renamed, slots)):
        layout = plan_layout(load, instance.cluster, Greedy(), slots_R)
        plan = split_tokens(load, layout, instance.cluster, FlowSplit())
        values.append((plan.tokens_R.max(), plan.inter_node_tokens(instance.cluster.node_of_rank)))
    assert values[0] == values[1]


def test_a_giant_load_is_planned_as_its_proportions_are():
    load, cluster = zipf_load(8, 24, 1.0), ClusterSpec(num_nodes=2, ranks_per_node=4)
    giant = LoadMatrix(load.tokens_RE * 2**42)
    layout = plan_layout(giant, cluster, Greedy(), 4)
    assert min_max_load(giant, layout) <= 1.001 * giant.total / 8


# --- the layout in force


def drifted(load, sigma, seed=0):
    factor_E = np.random.default_rng(seed).lognormal(0, sigma, load.num_experts)
    return LoadMatrix((load.tokens_RE * factor_E).astype(np.int64))


def test_a_layout_that_is_as_good_stays():
    load, cluster = zipf_load(8, 24, 1.0), ClusterSpec(num_nodes=2, ranks_per_node=4)
    # a second plan has another start, and here gains by it
    layout = plan_layout(load, cluster, Greedy(), 4, previous=plan_layout(load, cluster, Greedy(), 4))
    renamed = ExpertLayout(layout.expert_RS[[2, 0, 3, 1, 5, 4, 7, 6]], load.num_experts)
    kept = plan_layout(load, cluster, Greedy(), 4, previous=renamed)
    np.testing.assert_array_equal(kept.replicas_RE, renamed.replicas_RE)
    worse = plan_layout(load, cluster, Static(), 4)
    assert min_max_load(load, plan_layout(load, cluster, Greedy(), 4, previous=worse)) < min_max_load(load, worse)


def test_a_layout_in_force_with_a_duplicate_or_an_empty_slot_is_not_kept():
    cluster, load = ClusterSpec(ranks_per_node=2), LoadMatrix([[1, 1], [1, 1]])
    for rows in ([[0, 0], [1, EMPTY]], [[0, 1], [1, EMPTY]]):
        layout = plan_layout(load, cluster, Greedy(), 2, previous=ExpertLayout(rows, num_experts=2))
        assert layout.num_duplicates == 0
        assert layout.filled_R.tolist() == [2, 2]


def test_replicas_move_only_where_the_gain_pays():
    load, cluster = zipf_load(16, 48, 1.0), NODES_OF_8[16]
    before = plan_layout(load, cluster, Greedy(), 4)
    later = drifted(load, 0.6)
    free, dear, prohibitive = (
        plan_layout(later, cluster, Greedy(move_tokens=tokens), 4, previous=before) for tokens in (0, 300, 10**9)
    )
    moves = [num_moves(before.replicas_RE, after.replicas_RE) for after in (free, dear, prohibitive)]
    assert moves[0] > moves[1] > moves[2] == 0
    assert min_max_load(later, free) <= min_max_load(later, dear) < min_max_load(later, before)


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 12])
def test_a_move_budget_is_kept(budget):
    load, cluster = zipf_load(16, 48, 1.0), NODES_OF_8[16]
    before = plan_layout(load, cluster, Greedy(), 4)
    later = drifted(load, 0.8)
    after = plan_layout(later, cluster, Greedy(max_moves=budget, effort=4), 4, previous=before)
    assert num_moves(before.replicas_RE, after.replicas_RE) <= budget
    busiest = min_max_load(later, after)
    assert busiest < min_max_load(later, before) if budget > 1 else busiest <= min_max_load(later, before)


def test_a_deadline_gives_a_whole_layout_however_short_it_is():
    load, cluster = zipf_load(32, 128, 1.0), NODES_OF_8[32]
    for deadline_ms in (1e-3, 1.0, 20.0):
        layout = plan_layout(load, cluster, Greedy(deadline_ms=deadline_ms, effort=100), 5)
        assert min_max_load(load, layout) <= 1.001 * load.total / 32


@given(
    instance=instances(max_ranks=6, max_experts=10),
    within=st.sampled_from(["cluster", "node", "domain"]),
    budget=st.sampled_from([None, 0, 2]),
    before=st.sampled_from([Static(), Eplb(), Greedy(effort=0)]),
)
def test_whatever_was_in_force_promises_are_kept(instance, within, budget, before):
    sizes = [part for size in instance.cluster.node_sizes for part in ([1, size - 1] if size > 1 else [1])]
    cluster = instance.cluster.replace(ranks_per_domain=tuple(sizes))
    config = Greedy(replicas_within=within, max_moves=budget)
    before = before.replace(replicas_within=within) if isinstance(before, Greedy) else before
    try:
        first = plan_layout(instance.load, cluster, before, instance.slots)
        later = LoadMatrix(instance.load.tokens_RE[:, ::-1])
        layout = plan_layout(later, cluster, config, instance.slots, previous=first)
    except ValueError:
        assume(False)
    assert layout.num_duplicates == 0
    if within != "cluster":
        place_R = np.array(getattr(cluster, f"{within}_of_rank"))
        for expert in range(layout.num_experts):
            assert len(set(place_R[layout.replicas_RE[:, expert] > 0])) == 1
    if isinstance(before, Greedy) and budget is not None:
        assert num_moves(first.replicas_RE, layout.replicas_RE) <= budget


# --- relabelling


@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 7), num_experts=st.integers(1, 8))
def test_relabelling_one_node_reaches_the_assignment_optimum(seed, num_ranks, num_experts):
    rng = np.random.default_rng(seed)
    before_RE, after_RE = rng.integers(0, 2, (2, num_ranks, num_experts))
    slots_R = np.full(num_ranks, num_experts)
    row_R = relabelled(after_RE, before_RE, slots_R, ClusterSpec(ranks_per_node=num_ranks))
    assert sorted(row_R) == list(range(num_ranks))
    kept = np.minimum(after_RE[:, None], before_RE[None]).sum(axis=2)
    rows, ranks = linear_sum_assignment(kept, maximize=True)
    assert np.minimum(after_RE[row_R], before_RE).sum() == kept[rows, ranks].sum()


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_relabelling_maps_nodes_to_nodes_and_ranks_to_ranks_of_as_many_slots(seed, sizes):
    """Against all permutations that do."""
    rng = np.random.default_rng(seed)
    cluster = ClusterSpec(num_nodes=len(sizes), ranks_per_node=tuple(sizes))
    node_R, num_ranks = np.array(cluster.node_of_rank), sum(sizes)
    slots_R = rng.integers(1, 3, num_ranks)
    before_RE, after_RE = rng.integers(0, 2, (2, num_ranks, 5))

    def allowed(row_R):
        nodes = {(node_R[row], node) for row, node in zip(row_R, node_R, strict=True)}
        return len(nodes) == len(sizes) and all(slots_R[list(row_R)] == slots_R)

    best = max(
        np.minimum(after_RE[list(row_R)], before_RE).sum() for row_R in permutations(range(num_ranks)) if allowed(row_R)
    )
    row_R = relabelled(after_RE, before_RE, slots_R, cluster)
    assert allowed(row_R)
    assert np.minimum(after_RE[row_R], before_RE).sum() == best
    inside_R = relabelled_inside(after_RE, before_RE, slots_R, cluster.node_sizes)
    assert (node_R[inside_R] == node_R).all()
    assert allowed(inside_R)
