"""The split for counts on a device: the host's bytes, in three launches, without waiting for a count."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from balance_cases import instances, layouts, zipf_load
from conftest import assert_equal, examples
from host_waits import host_waits_refused
from hypothesis import given
from hypothesis import strategies as st

from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.proportional_split import Proportional
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec, Split
from moesys.kernels.split import tables as split_module
from moesys.kernels.split.flow import split
from moesys.kernels.split.tables import entries_of
from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.device_routes import device_split, split_tables
from moesys.overlap.mega_executor import tokens_by_replica

TWO_NODES = ClusterSpec(num_nodes=2, ranks_per_node=2)


def assert_is_the_hosts(load, layout, cluster, turn=0):
    tables = split_tables(layout, cluster, "cpu")
    plan = split(torch.tensor(load.tokens_RE), tables, turn)
    assert plan.converged
    expected = split_tokens(load, layout, cluster, FlowSplit(), turn)
    assert entries_of(plan.tokens_RP, tables).numpy().tobytes() == expected.entries.tobytes()
    assert expected.tokens_R.max() == plan.limit_tokens == min_max_load(load, layout)


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


# Programs are slow in the interpreter, and there is one an expert and one a replica.
@examples(4, 40)
@given(data=st.data(), instance=instances(max_ranks=6, max_experts=6), turn=st.integers(-3, 9))
def test_the_bytes_are_the_hosts(data, instance, turn):
    layout, cluster = data.draw(layouts(instance)), data.draw(with_domains(instance.cluster))
    assert_is_the_hosts(instance.load, layout, cluster, turn)


def where_much_must_cross(seed, nodes, num_experts):
    """Every node wants experts of its own, and they are anywhere: (load, layout, cluster)."""
    rng, num_ranks = np.random.default_rng(seed), sum(nodes)
    cluster = ClusterSpec(num_nodes=len(nodes), ranks_per_node=tuple(nodes))
    cells = rng.permutation(np.append(np.arange(num_experts), rng.integers(EMPTY, num_experts, 4 * num_ranks)))
    cells = np.append(cells, np.full(-len(cells) % num_ranks, EMPTY))
    layout = ExpertLayout(cells.reshape(num_ranks, -1), num_experts)
    taste_NE = rng.lognormal(0, 1.5, (len(nodes), num_experts))
    return LoadMatrix(rng.poisson(50 * taste_NE[np.asarray(cluster.node_of_rank)])), layout, cluster


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


@pytest.mark.parametrize(("tokens_RE", "expert_RS", "cluster"), EDGES.values(), ids=EDGES)
def test_edges_are_the_hosts(tokens_RE, expert_RS, cluster):
    load = LoadMatrix(tokens_RE)
    assert_is_the_hosts(load, ExpertLayout(expert_RS, load.num_experts), cluster, turn=1)


@pytest.mark.parametrize(
    ("seed", "nodes", "num_experts"),
    [(3, (2, 2, 2), 4), (66, (2, 2, 2), 4), (15, (3, 3), 8)],
    ids=["what is foreign leaves for less", "what is missing enters for less", "the limit rises"],
)
def test_the_bytes_are_the_hosts_where_much_must_cross(seed, nodes, num_experts):
    """Found among seeds: each is wrong without the one line of the algorithm that it is named after."""
    assert_is_the_hosts(*where_much_must_cross(seed, nodes, num_experts), turn=2)


@pytest.mark.parametrize("config", [Greedy(), pytest.param(Laer(), marks=pytest.mark.slow)], ids=lambda of: of.kind)
def test_a_planned_layout_converges_on_a_later_load(config):
    """Planned on one load; split on another, with other tastes on every rank."""
    cluster, planned = ClusterSpec(num_nodes=2, ranks_per_node=8), zipf_load(16, 64, exponent=1.0)
    layout, taste_RE = plan_layout(planned, cluster, config, 6), np.random.default_rng(3).lognormal(0, 1, (16, 64))
    assert_is_the_hosts(LoadMatrix((planned.tokens_RE * taste_RE).astype(int)), layout, cluster)


def test_the_wildest_loads_converge_too():
    """Tastes of every single rank; of 1500 seeds this takes the host the most phases."""
    rng, cluster = np.random.default_rng(978), ClusterSpec(num_nodes=4, ranks_per_node=8)
    layout = ExpertLayout(np.argsort(rng.random((32, 64)), axis=1)[:, :8], num_experts=64)
    load = LoadMatrix(rng.poisson(100 * rng.lognormal(0, 3, (32, 64))))
    assert_is_the_hosts(load, layout, cluster)


def test_too_few_phases_show_and_lose_no_token():
    """Each rank shares an expert with the next one: paths of many hops. It takes 9 phases."""
    rng, cluster = np.random.default_rng(4), ClusterSpec(num_nodes=3, ranks_per_node=(3, 3, 4))
    load = LoadMatrix(rng.poisson(40 * rng.lognormal(0, 1.5, (10, 9))))
    layout = ExpertLayout([[max(rank - 1, 0), min(rank, 8)] for rank in range(10)], 9)
    tables, expected = split_tables(layout, cluster, "cpu"), split_tokens(load, layout, cluster, FlowSplit(), 1)
    converged = []
    for phases in (1, 8, 9):
        plan = split(torch.tensor(load.tokens_RE), tables, 1, phases)
        converged.append(bool(plan.converged))
        valid = TokenPlan(entries_of(plan.tokens_RP, tables).numpy(), load, layout)
        assert plan.limit_tokens <= min_max_load(load, layout) <= valid.tokens_R.max()
        assert converged[-1] == (valid == expected)
    assert converged == [False, False, True]


SMALL = split_tables(ExpertLayout([[0, 1], [0, 2], [1, 3], [3, 0]], num_experts=4), TWO_NODES, "cpu")


def test_neither_lanes_nor_the_order_of_memory_change_the_split(monkeypatch):
    """Lanes behind the last, and a power of two of them that is not the least."""
    tokens_RE = torch.from_numpy(np.random.default_rng(1).poisson(40, (4, 4)))
    before, plan = tokens_RE.clone(), split(tokens_RE, SMALL)
    assert_equal(split(tokens_RE.t().contiguous().t(), SMALL), plan)
    monkeypatch.setattr(split_module, "FEWEST_LANES", 128)
    assert_equal(split(tokens_RE, SMALL), plan)
    assert torch.equal(tokens_RE, before)


def test_the_turn_rotates_remainders_and_may_be_a_tensor_and_nothing_waits():
    """Three tokens for expert 1 come from the other node: two for the one rank, one for the other, in turn."""
    found = split_tables(ExpertLayout([[0], [0], [1], [1]], 2), TWO_NODES, "cpu")
    tokens_RE = torch.tensor([[9, 3], [0, 0], [0, 0], [0, 0]])
    for turn, expected_P in enumerate([[5, 4, 2, 1], [5, 4, 1, 2], [5, 4, 2, 1]]):
        plan, turn_1 = split(tokens_RE, found, turn), torch.tensor(turn)
        assert plan.tokens_RP.sum(0).tolist() == expected_P
        with host_waits_refused():
            again = split(tokens_RE, found, turn_1)
        assert_equal(again, plan)


def test_tables_by_hand() -> None:
    """Ranks 0, 1 | 2, 3 in nodes; rank 0 has expert 1 twice, rank 1 nothing."""
    found = split_tables(ExpertLayout([[1, 1, 0], [-1, -1, -1], [0, -1, 1], [1, 2, 0]], 3), TWO_NODES, "cpu")
    assert {name: table.tolist() for name, table in found._asdict().items()} == {
        "expert_P": [0, 0, 0, 1, 1, 1, 2],
        "rank_P": [0, 2, 3, 0, 2, 3, 3],
        "replica_ER": [[0, -1, 1, 2], [3, -1, 4, 5], [-1, -1, -1, 6]],
        "first_E1": [0, 3, 6, 7],
        "group_first_P": [0, 1, 1, 3, 4, 4, 6],
        "group_last_P": [0, 2, 2, 3, 5, 5, 6],
        "by_rank_P": [0, 3, 1, 4, 2, 5, 6],
        "first_R1": [0, 2, 2, 4, 7],
        "node_first_R": [0, 0, 2, 2],
        "node_last_R": [1, 1, 3, 3],
        "part_first_LR": [[0, 1, 2, 3], [0, 0, 2, 2], [0, 0, 0, 0]],
        "part_last_LR": [[0, 1, 2, 3], [1, 1, 3, 3], [3, 3, 3, 3]],
    }
    assert {table.dtype for table in found} == {torch.int32}


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
