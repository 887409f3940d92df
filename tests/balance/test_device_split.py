"""The split for counts on a device: the host's bytes, from a kernel and from plain torch."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from balance_cases import instances, layouts, zipf_load
from conftest import examples
from flow_reference import split_reference
from hypothesis import given
from hypothesis import strategies as st

from moesys.balance.eplb import Eplb
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.proportional_split import Proportional
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec, Split
from moesys.kernels.split.flow import split
from moesys.kernels.split.tables import entries_of
from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.device_routes import device_split, split_tables
from moesys.overlap.mega_executor import tokens_by_replica

TWO_NODES = ClusterSpec(num_nodes=2, ranks_per_node=2)


def assert_is_the_hosts(split, load, layout, cluster, turn=0):
    tables = split_tables(layout, cluster, "cpu")
    plan = split(torch.tensor(load.tokens_RE), tables, turn)
    assert plan.converged
    expected = split_tokens(load, layout, cluster, FlowSplit(), turn)
    assert entries_of(plan.tokens_RP, tables).numpy().tobytes() == expected.entries.tobytes()
    assert plan.limit_tokens == min_max_load(load, layout)
    assert expected.tokens_R.max() == plan.limit_tokens


@st.composite
def with_domains(draw, cluster):
    """The same nodes, with domains that are nodes, parts of nodes, ranks, or whole nodes together."""
    nodes = cluster.node_sizes
    match draw(st.sampled_from(["nodes", "parts", "ranks", "whole nodes"])):
        case "nodes":
            return cluster
        case "ranks":
            return cluster.replace(ranks_per_domain=1)
        case "parts":
            firsts = [draw(st.integers(1, size)) for size in nodes]
            sizes = [part for size, first in zip(nodes, firsts, strict=True) for part in (first, size - first) if part]
        case _:
            cuts = draw(st.sets(st.integers(1, len(nodes) - 1))) if len(nodes) > 1 else set()
            ends = [0, *accumulate(nodes)]
            cuts = [0, *sorted(cuts), len(nodes)]
            sizes = [ends[end] - ends[begin] for begin, end in pairwise(cuts)]
    return cluster.replace(ranks_per_domain=tuple(sizes))


@given(data=st.data(), instance=instances(max_ranks=10), turn=st.integers(-3, 9))
def test_the_references_bytes_are_the_hosts(data, instance, turn):
    layout, cluster = data.draw(layouts(instance)), data.draw(with_domains(instance.cluster))
    assert_is_the_hosts(split_reference, instance.load, layout, cluster, turn)


# Programs are slow in the interpreter, and there is one an expert and one a replica.
@examples(3, 20)
@given(data=st.data(), instance=instances(max_ranks=6, max_experts=6), turn=st.integers(-3, 9))
def test_the_kernels_bytes_are_the_hosts(data, instance, turn):
    layout, cluster = data.draw(layouts(instance)), data.draw(with_domains(instance.cluster))
    assert_is_the_hosts(split, instance.load, layout, cluster, turn)


def where_much_must_cross(seed, nodes, num_experts):
    """Every node wants experts of its own, and they are anywhere: (load, layout, cluster)."""
    rng, num_ranks = np.random.default_rng(seed), sum(nodes)
    cluster = ClusterSpec(num_nodes=len(nodes), ranks_per_node=tuple(nodes))
    cells = rng.permutation(np.append(np.arange(num_experts), rng.integers(EMPTY, num_experts, 4 * num_ranks)))
    cells = np.append(cells, np.full(-len(cells) % num_ranks, EMPTY))
    layout = ExpertLayout(cells.reshape(num_ranks, -1), num_experts)
    taste_NE = rng.lognormal(0, 1.5, (len(nodes), num_experts))
    return LoadMatrix(rng.poisson(50 * taste_NE[np.asarray(cluster.node_of_rank)])), layout, cluster


@given(seed=st.integers(0, 2**32 - 1), nodes=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_the_bytes_are_the_hosts_where_much_must_cross(seed, nodes):
    assert_is_the_hosts(split_reference, *where_much_must_cross(seed, nodes, 40), seed % 5)


# Each case says which edge it is: (tokens_RE, expert_RS, cluster).
EDGES = {
    "one rank": ([[3, 0, 4]], [[2, 0, 1, 0]], ClusterSpec()),
    "one replica": ([[5], [7]], [[EMPTY], [0]], ClusterSpec(ranks_per_node=2)),
    "no tokens": ([[0, 0], [0, 0]], [[0, 1], [1, 0]], ClusterSpec(ranks_per_node=2)),
    "experts held once": ([[9, 1, 0, 4], [2, 2, 5, 0]], [[0, 3], [1, 2]], ClusterSpec(ranks_per_node=2)),
    "a rank with nothing between others": (
        [[8, 1], [9, 0], [0, 3]],
        [[0, 1], [EMPTY, EMPTY], [0, EMPTY]],
        ClusterSpec(ranks_per_node=3),
    ),
    "a node without the expert": ([[9, 3], [0, 7], [0, 0], [5, 1]], [[0], [0], [1], [1]], TWO_NODES),
    "a node of one rank": (
        [[40, 7, 1], [0, 9, 2], [30, 0, 0]],
        [[0, 1], [0, 2], [1, 0]],
        ClusterSpec(num_nodes=2, ranks_per_node=(1, 2)),
    ),
    "a hop over a rank that is full": (
        [[90, 0, 0], [0, 30, 0], [0, 0, 3]],
        [[0, EMPTY], [0, 1], [1, 2]],
        ClusterSpec(num_nodes=3, ranks_per_node=1),
    ),
    "a node's own tokens first, though domains are ranks": (
        [[10], [0], [5], [0], [0], [0]],
        [[EMPTY], [0], [EMPTY], [0], [EMPTY], [0]],
        ClusterSpec(num_nodes=3, ranks_per_node=2, ranks_per_domain=1),
    ),
    "near the end of int64": (
        [[3 * 2**45, 3 * 2**45, 0], [3 * 2**45, 0, 2**45]],
        [[0, 1], [0, 2]],
        ClusterSpec(ranks_per_node=2),
    ),
}


@pytest.mark.parametrize("split", [split, split_reference])
@pytest.mark.parametrize(("tokens_RE", "expert_RS", "cluster"), EDGES.values(), ids=EDGES)
def test_edges_are_the_hosts(split, tokens_RE, expert_RS, cluster):
    load = LoadMatrix(tokens_RE)
    assert_is_the_hosts(split, load, ExpertLayout(expert_RS, load.num_experts), cluster, turn=1)


@pytest.mark.parametrize(
    ("seed", "nodes", "num_experts"),
    [(3, (2, 2, 2), 4), (66, (2, 2, 2), 4), (15, (3, 3), 8)],
    ids=["what is foreign leaves for less", "what is missing enters for less", "the limit rises"],
)
def test_the_kernels_bytes_are_the_hosts_where_much_must_cross(seed, nodes, num_experts):
    """Found among seeds: each is wrong without the one line of the algorithm that it is named after."""
    assert_is_the_hosts(split, *where_much_must_cross(seed, nodes, num_experts), turn=2)


@pytest.mark.parametrize(
    ("num_experts", "num_nodes", "ranks_per_node", "config"),
    [
        (64, 1, 8, Greedy()),
        (128, 4, 8, Greedy()),
        (128, 4, 8, Laer()),
        (128, 4, 8, Eplb()),
        (256, 4, 16, Eplb()),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_planned_layouts_converge_on_later_loads(num_experts, num_nodes, ranks_per_node, config):
    """Planned on one load; split on it with noise, with other tastes on every rank, and with few sources."""
    cluster = ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    planned = zipf_load(cluster.num_ranks, num_experts, exponent=1.0)
    layout = plan_layout(planned, cluster, config, num_experts // cluster.num_ranks + 2)
    rng, shape = np.random.default_rng(3), planned.tokens_RE.shape
    for share in (rng.lognormal(0, 0.15, num_experts), rng.lognormal(0, 1, shape), rng.random(shape) < 0.1):
        assert_is_the_hosts(split_reference, LoadMatrix(rng.poisson(planned.tokens_RE * share)), layout, cluster)


def test_the_wildest_loads_converge_too():
    """Tastes of every single rank; of 1500 seeds this takes the host the most phases."""
    rng, cluster = np.random.default_rng(978), ClusterSpec(num_nodes=4, ranks_per_node=8)
    layout = ExpertLayout(np.argsort(rng.random((32, 64)), axis=1)[:, :8], num_experts=64)
    load = LoadMatrix(rng.poisson(100 * rng.lognormal(0, 3, (32, 64))))
    assert_is_the_hosts(split_reference, load, layout, cluster)


def test_too_few_phases_show_and_lose_no_token():
    cluster, load = ClusterSpec(num_nodes=4, ranks_per_node=8), zipf_load(32, 128, exponent=1.0)
    layout = plan_layout(zipf_load(32, 128, exponent=0.5), cluster, Eplb(), 5)
    tables = split_tables(layout, cluster, "cpu")
    least, expected = min_max_load(load, layout), split_tokens(load, layout, cluster, FlowSplit())
    converged = []
    for phases in (1, 2, 4, 64):
        plan = split_reference(torch.tensor(load.tokens_RE), tables, phases=phases)
        converged.append(bool(plan.converged))
        valid = TokenPlan(entries_of(plan.tokens_RP, tables).numpy(), load, layout)
        assert plan.limit_tokens <= least <= valid.tokens_R.max()
        assert converged[-1] == (valid == expected)
    assert converged == [False, False, False, True]


SMALL = ExpertLayout([[0, 1], [0, 2], [1, 3], [3, 0]], num_experts=4)


@pytest.mark.parametrize(
    ("cluster", "config", "message"),
    [
        (TWO_NODES, FlowSplit(traffic="exact"), "traffic='exact' is solved on the host only; use traffic='fast'"),
        (TWO_NODES, FlowSplit(max_inter_node=0.1), "max_inter_node=0.1 takes a search over limits"),
        (ClusterSpec(ranks_per_node=8), FlowSplit(), "the layout is for 4 ranks, the cluster has 8"),
    ],
    ids=["exact traffic", "a cap on traffic", "another size"],
)
def test_what_the_host_alone_can_do_is_refused(cluster, config, message):
    with pytest.raises(ValueError, match=message):
        device_split(SMALL, cluster, config, "cpu")


def assert_shares_are_the_hosts(config, load, layout, cluster, turn):
    expected = split_tokens(load, layout, cluster, config, turn)
    found_RP = device_split(layout, cluster, config, "cpu").tokens_RP(torch.tensor(load.tokens_RE), turn)
    assert torch.equal(found_RP, tokens_by_replica(expected, torch.device("cpu")))


# A program of the interpreter a replica.
@pytest.mark.parametrize("kind", [kind for kind, split in Split.kinds().items() if split().on_device])
@examples(2, 20)
@given(data=st.data(), instance=instances(max_ranks=8, max_experts=6), turn=st.integers(-3, 9))
def test_every_split_of_devices_is_the_hosts(kind, data, instance, turn):
    """With each replica twice on its rank, too: ``EvenSplit`` counts both."""
    layout, cluster = data.draw(layouts(instance)), data.draw(with_domains(instance.cluster))
    twice = ExpertLayout(np.concatenate([layout.expert_RS] * 2, axis=1), layout.num_experts)
    for each in (layout, twice):
        assert_shares_are_the_hosts(Split.class_of(kind)(), instance.load, each, cluster, turn)


def test_rooms_whose_products_do_not_fit_lose_the_hosts_bits():
    """Two experts of 2^40 tokens, more or less, over three ranks."""
    layout = ExpertLayout([[0, 1], [0, 2], [1, 2]], 3)
    load = LoadMatrix([[2**40 + 12345, 7, 2**33 + 1], [2**39 - 1, 2**38 + 3, 5], [11, 2**40 - 77, 3]])
    assert_shares_are_the_hosts(Proportional(), load, layout, ClusterSpec(ranks_per_node=3), 1)
