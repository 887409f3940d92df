"""Bounds and certificates, against every layout and every set of ranks of tiny instances."""

import json
from itertools import chain, combinations, product

import numpy as np
import pytest
from balance_cases import instances, layouts
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesys.balance.certificate import certify, greatest_bound
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load, tight_set
from moesys.balance.planning_problem import domains_of
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.balance.static import Static
from moesys.config import ClusterSpec
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix


def subsets(things, sizes):
    return chain.from_iterable(combinations(things, size) for size in sizes)


def busiest_by_counting(tokens_E, rows):
    """Hall's condition over all sets of ranks; None where an expert is nowhere."""
    if set(chain.from_iterable(rows)) != set(range(len(tokens_E))):
        return None
    most = 0
    for ranks in subsets(range(len(rows)), range(1, len(rows) + 1)):
        outside = set(chain.from_iterable(row for rank, row in enumerate(rows) if rank not in ranks))
        tokens = sum(amount for expert, amount in enumerate(tokens_E) if expert not in outside)
        most = max(most, -(-tokens // len(ranks)))
    return most


def best_of_all_layouts(tokens_E, slots_R, domain_R, min_replicas=1):
    """The least busiest rank over all layouts within the limits; None where there is none."""
    num_experts = len(tokens_E)
    choices = [list(subsets(range(num_experts), range(min(slots, num_experts) + 1))) for slots in slots_R]
    best = None
    for rows in product(*choices):
        holders = [[rank for rank, row in enumerate(rows) if expert in row] for expert in range(num_experts)]
        if min(map(len, holders)) < min_replicas or max(len({domain_R[r] for r in ranks}) for ranks in holders) > 1:
            continue
        busiest = busiest_by_counting(tokens_E, rows)
        best = busiest if best is None else min(best, busiest)
    return best


@st.composite
def tiny(draw):
    """Tokens of up to four experts, up to three slots on each of up to three ranks, and their domains."""
    tokens_E = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 13, 30]), min_size=1, max_size=4))
    slots_R = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    domain_R = draw(st.sampled_from([(0, 0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 1)]))[: len(slots_R)]
    return tokens_E, slots_R, domain_R


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(instance=tiny(), min_replicas=st.integers(1, 2))
def test_no_layout_is_below_the_bound(instance, min_replicas):
    tokens_E, slots_R, domain_R = instance
    best = best_of_all_layouts(tokens_E, slots_R, domain_R, min_replicas)
    assume(best is not None)
    assert greatest_bound(tokens_E, slots_R, domain_R, min_replicas)[0] <= best


@pytest.mark.parametrize(
    ("tokens_E", "slots_R", "domain_R", "min_replicas", "bound", "kind"),
    [
        # 5 slots a rank: everything can be everywhere
        ([7, 4, 4], [5, 5], (0, 0), 1, 8, "mean"),
        # a node of two ranks cannot relieve the 20 of expert 0
        ([20, 1, 1], [3, 3, 3, 3], (0, 0, 1, 1), 1, 10, "hottest expert"),
        # no spare slot: the rank of expert 0 holds another expert
        ([9, 3, 3, 3], [2, 2], (0, 0), 1, 12, "hottest expert"),
        # 3 slots for 2 experts: one of them stays whole
        ([20, 20], [1, 1, 1], (0, 0, 0), 1, 20, "slots"),
        # of the second replicas that all must have, one slot is left for a third of expert 0
        ([30, 3], [2, 2, 1, 0], (0, 0, 0, 0), 2, 11, "mean"),
        ([30, 3], [1, 1, 1, 1], (0, 0, 0, 0), 2, 15, "slots"),
        # no spare slot: of four experts, two share one of three ranks
        ([6, 6, 5, 5], [2, 1, 1], (0, 0, 0), 1, 10, "whole experts"),
        # one spare: of the five heaviest one may be split, and two of the others share a rank
        ([6, 6, 6, 4, 4], [2, 2, 2], (0, 0, 0), 1, 9, "mean"),
        ([8, 8, 8, 8, 8], [2, 2, 2], (0, 0, 0), 1, 16, "whole experts"),
        # three equal experts on two nodes of two ranks: some node has two of them
        ([8, 8, 8], [3, 3, 3, 3], (0, 0, 1, 1), 1, 8, "domain"),
        # node 1 has room for one expert only
        ([6, 6, 6, 6], [4, 4, 1, 0], (0, 0, 1, 1), 1, 9, "domain"),
    ],
)
def test_the_reason_that_binds_is_named(tokens_E, slots_R, domain_R, min_replicas, bound, kind):
    assert greatest_bound(tokens_E, slots_R, domain_R, min_replicas) == (bound, kind)


@given(data=st.data(), instance=instances(max_ranks=5, max_experts=8))
def test_the_tight_set_proves_the_least_maximum(data, instance):
    layout = data.draw(layouts(instance))
    proof, tokens_E = tight_set(instance.load, layout), instance.load.tokens_E.tolist()
    rows = [layout.experts_of(rank) for rank in range(layout.num_ranks)]
    assert proof.bound == min_max_load(instance.load, layout) == busiest_by_counting(tokens_E, rows)
    elsewhere = set(chain.from_iterable(row for rank, row in enumerate(rows) if rank not in proof.ranks))
    assert not elsewhere & set(proof.experts)
    assert proof.tokens == sum(tokens_E[expert] for expert in proof.experts)


@pytest.mark.parametrize("split", [EvenSplit(), FlowSplit()], ids=repr)
@given(data=st.data(), instance=instances())
def test_a_certificate_brackets_its_plan(split, data, instance):
    layout = data.draw(layouts(instance))
    plan = split_tokens(instance.load, layout, instance.cluster, split)
    found = certify(plan, instance.cluster)
    assert found.bound <= found.layout_bound <= found.max_tokens == plan.tokens_R.max()
    assert found.max_over_mean == pytest.approx(plan.max_over_mean)
    assert found.gap >= found.layout_gap >= 0
    if isinstance(split, FlowSplit):
        assert found.layout_gap == 0
    wider = certify(plan, instance.cluster, slots_per_rank=layout.num_slots)
    assert wider.bound <= found.bound
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def _plan():
    load = LoadMatrix([[20, 4, 1], [10, 0, 1]])
    cluster, layout = ClusterSpec(ranks_per_node=2), ExpertLayout([[0, 1], [2, 1]], num_experts=3)
    return split_tokens(load, layout, cluster, FlowSplit()), cluster


def test_a_certificate_in_words():
    found = certify(*_plan())
    assert str(found).splitlines() == [
        "busiest rank: 30 tokens, 1.6667 × the mean of 18.0",
        "this layout:  at least 30 (gap 0.00%), for 30 tokens live only on rank 0: expert 0",
        "any layout:   at least 18 (gap 66.67%), by mean",
    ]
    everywhere = split_tokens(
        LoadMatrix([[4], [6]]), ExpertLayout([[0], [0]], num_experts=1), ClusterSpec(ranks_per_node=2), FlowSplit()
    )
    _, of_layout, _ = str(certify(everywhere, ClusterSpec(ranks_per_node=2))).splitlines()
    assert of_layout == "this layout:  at least 5 (gap 0.00%), by mean"


def test_domains_of_a_cluster():
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=4, ranks_per_domain=2)
    assert domains_of(cluster, "cluster") == (0,) * 8
    assert domains_of(cluster, "node") == (0, 0, 0, 0, 1, 1, 1, 1)
    assert domains_of(cluster, "domain") == (0, 0, 1, 1, 2, 2, 3, 3)


def test_a_plan_of_no_tokens_is_perfect():
    cluster, load = ClusterSpec(ranks_per_node=2), LoadMatrix(np.zeros((2, 3), dtype=np.int64))
    layout = plan_layout(load, cluster, Static(), 2)
    found = certify(TokenPlan(np.zeros((0, 4), dtype=np.int64), load, layout), cluster)
    assert (found.max_over_mean, found.gap, found.layout_gap, found.bound) == (1.0, 0.0, 0.0, 0)
