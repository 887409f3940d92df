"""The baselines against what they are said to be: EPLB's published example and its three steps, FlexMoE's moves."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from balance_cases import instances, layouts, zipf_load
from hypothesis import assume, given
from hypothesis import strategies as st

from moesys.balance.eplb import Eplb
from moesys.balance.flex_moe import FlexMoe
from moesys.balance.planning_problem import share_key
from moesys.balance.run_planner import plan_layout
from moesys.balance.static import Static
from moesys.config import ClusterSpec
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix

# EPLB's README: 12 experts in 4 groups, 16 replicas on 2 nodes of 4 ranks, and what it prints.
PUBLISHED = [
    (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]],
    ),
    (
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        [[7, 10], [6, 8], [6, 11], [8, 9], [2, 4], [5, 1], [5, 0], [3, 1]],
    ),
]


def on_one_source(tokens_E, num_ranks):
    return LoadMatrix([tokens_E] + [[0] * len(tokens_E)] * (num_ranks - 1))


# --- EPLB, hierarchical


@pytest.mark.parametrize(("tokens_E", "expert_RS"), PUBLISHED)
def test_hierarchical_eplb_prints_what_the_original_prints(tokens_E, expert_RS):
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=4)
    config = Eplb(num_groups=4, hierarchical=True)
    assert plan_layout(on_one_source(tokens_E, 8), cluster, config, 2).expert_RS.tolist() == expert_RS


@st.composite
def hierarchies(draw):
    """(load, cluster, slots a rank, groups) that the hierarchical form can divide."""
    nodes, ranks, groups_a_node, group_size = (draw(st.integers(1, most)) for most in (3, 3, 3, 3))
    num_experts = nodes * groups_a_node * group_size
    slots = -(-groups_a_node * group_size // ranks) + draw(st.integers(0, 2))
    tokens_E = draw(st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts))
    cluster = ClusterSpec(num_nodes=nodes, ranks_per_node=ranks)
    return on_one_source(tokens_E, nodes * ranks), cluster, slots, nodes * groups_a_node


def lightest_first(weights, num_bins, room):
    """Step 1 and step 3 as they are told: the heaviest item left goes to the lightest bin that has room."""
    bins, left = [[] for _ in range(num_bins)], list(range(len(weights)))
    while left:
        item = max(left, key=lambda i: (weights[i], -i))
        left.remove(item)
        fitting = [b for b in range(num_bins) if len(bins[b]) < room]
        bins[min(fitting, key=lambda b: (sum((weights[i] for i in bins[b]), Fraction(0)), b))].append(item)
    return bins


@given(hierarchies())
def test_hierarchical_eplb_is_its_three_steps(hierarchy):
    load, cluster, slots, num_groups = hierarchy
    tokens_E, ranks = [Fraction(int(tokens)) for tokens in load.tokens_E], cluster.node_sizes[0]
    size = load.num_experts // num_groups
    weights = [sum(tokens_E[g * size : (g + 1) * size], Fraction(0)) for g in range(num_groups)]
    expected = []
    for groups in lightest_first(weights, cluster.num_nodes, num_groups // cluster.num_nodes):
        experts = [g * size + i for g in groups for i in range(size)]
        copies = list(range(len(experts)))
        while len(copies) < ranks * slots:
            share = [tokens_E[e] / copies.count(local) for local, e in enumerate(experts)]
            copies.append(share.index(max(share)))
        weights_P = [tokens_E[experts[local]] / copies.count(local) for local in copies]
        expected += [[experts[copies[p]] for p in row] for row in lightest_first(weights_P, ranks, slots)]
    layout = plan_layout(load, cluster, Eplb(num_groups=num_groups, hierarchical=True), slots)
    assert layout.expert_RS.tolist() == expected


@given(instance=instances(max_ranks=6))
def test_on_one_node_and_one_group_both_forms_are_one(instance):
    slots = max(instance.slots)
    assume(slots * instance.load.num_ranks >= instance.load.num_experts)
    cluster = ClusterSpec(ranks_per_node=instance.load.num_ranks)
    hierarchical, flat = (
        plan_layout(instance.load, cluster, config, slots) for config in (Eplb(hierarchical=True), Eplb())
    )
    assert hierarchical == flat


# --- FlexMoE


def measured(load, layout, slots):
    """(busiest rank, -idlest rank) under an even split, over ranks with slots."""
    share_E = [Fraction(int(t), int(n)) for t, n in zip(load.tokens_E, layout.replicas_RE.sum(axis=0), strict=True)]
    loads = [sum(share_E[e] for e in layout.experts_of(rank)) for rank in range(layout.num_ranks) if slots[rank]]
    return max(loads), -min(loads)


@given(data=st.data(), instance=instances(max_ranks=6, max_experts=10), max_moves=st.integers(0, 5))
def test_flex_moe_improves_within_its_moves_and_slots(data, instance, max_moves):
    load = instance.load
    previous = data.draw(layouts(instance))
    slots = (previous.num_slots,) * load.num_ranks
    layout = plan_layout(load, instance.cluster, FlexMoe(max_moves=max_moves), slots, previous=previous)
    gained = np.maximum(layout.replicas_RE - previous.replicas_RE, 0).sum()
    assert gained <= max_moves
    assert layout.num_duplicates <= previous.num_duplicates
    assert measured(load, layout, slots) <= measured(load, previous, slots)
    if gained:
        assert measured(load, layout, slots) < measured(load, previous, slots)
    else:
        np.testing.assert_array_equal(layout.replicas_RE, previous.replicas_RE)


@given(data=st.data(), instance=instances(max_ranks=5, max_experts=7, max_tokens=40))
def test_a_move_of_flex_moe_is_the_first_accepted_of_all(data, instance):
    """One move against every move there is, tried from the hottest expert down by the rule in its docstring."""
    load = instance.load
    start = data.draw(layouts(instance))
    slots = (start.num_slots,) * load.num_ranks
    share_E = [Fraction(int(t), int(n)) for t, n in zip(load.tokens_E, start.replicas_RE.sum(axis=0), strict=True)]
    expected = start.replicas_RE
    for hot in sorted(range(load.num_experts), key=lambda e: (-share_E[e], e)):
        outcomes = []
        ranks = [rank for rank in range(load.num_ranks) if start.replicas_RE[rank, hot] == 0]
        free = [rank for rank in ranks if start.filled_R[rank] < slots[rank]]
        colds = sorted(
            {e for rank in ranks for e in start.experts_of(rank) if start.replicas_RE[:, e].sum() > 1},
            key=lambda e: (share_E[e], e),
        )
        for rank in free or ranks:
            rows = [list(start.experts_of(each)) for each in range(load.num_ranks)]
            if free:
                rows[rank].append(hot)
            elif colds and colds[0] in rows[rank]:
                rows[rank][rows[rank].index(colds[0])] = hot
            else:
                continue
            padded = [row + [-1] * (start.num_slots - len(row)) for row in rows]
            moved = ExpertLayout(np.array(padded), load.num_experts)
            outcomes.append((measured(load, moved, slots), rank, moved.replicas_RE))
        best = min(outcomes, key=lambda outcome: outcome[:2], default=None)
        if best is not None and best[0] < measured(load, start, slots):
            expected = best[2]
            break
    layout = plan_layout(load, instance.cluster, FlexMoe(max_moves=1), slots, previous=start)
    np.testing.assert_array_equal(layout.replicas_RE, expected)


def test_flex_moe_without_a_layout_in_force_begins_at_static():
    load, cluster = zipf_load(4, 8, 1.0), ClusterSpec(ranks_per_node=4)
    static = plan_layout(load, cluster, Static(), 3)
    assert plan_layout(load, cluster, FlexMoe(max_moves=0), 3) == static
    assert plan_layout(load, cluster, FlexMoe(), 3) == plan_layout(load, cluster, FlexMoe(), 3, previous=static)


def test_keys_of_shares_order_as_the_exact_fractions_do() -> None:
    counts, most = range(30), 7
    shares = [(tokens, replicas) for tokens in counts for replicas in range(1, most + 1)]
    for (a, m), (b, n) in product(shares, shares):
        keys, fractions = (share_key(a, m, most), share_key(b, n, most)), (Fraction(a, m), Fraction(b, n))
        assert (keys[0] < keys[1], keys[0] == keys[1]) == (fractions[0] < fractions[1], fractions[0] == fractions[1])
