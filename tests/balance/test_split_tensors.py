"""The split for counts on a device: the host's bytes, from ops that never wait for a count."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from balance_cases import instances, layouts, zipf_load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from moesys.balance import min_max_load, plan_layout
from moesys.balance.flow_split import split_fast
from moesys.balance.quotas import levels_of
from moesys.balance.split_tensors import SplitTensors
from moesys.config import ClusterSpec, Eplb, FlowSplit, Greedy, Laer
from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix

TWO_NODES = ClusterSpec(num_nodes=2, ranks_per_node=2)
SMALL = ExpertLayout([[0, 1], [0, 2], [1, 3], [3, 0]], num_experts=4)


def host_entries(load, layout, cluster, turn=0):
    node_R = np.asarray(cluster.node_of_rank)
    return split_fast(load.tokens_RE, layout.expert_RS, node_R, levels_of(cluster), turn, -1)


def tensor_plan(load, layout, cluster, turn=0, **options):
    return SplitTensors(layout, cluster, FlowSplit(), "cpu", **options).split(torch.tensor(load.tokens_RE), turn)


def assert_is_the_hosts(plan, load, layout, cluster, turn=0):
    assert plan.converged
    expected = host_entries(load, layout, cluster, turn)
    assert plan.to_entries().tobytes() == expected.tobytes()
    assert plan.limit_tokens == min_max_load(load, layout)


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


@settings(max_examples=40, deadline=None)
@given(data=st.data(), instance=instances(max_ranks=10), turn=st.integers(-3, 9))
def test_the_bytes_are_the_hosts(data, instance, turn):
    layout, cluster = data.draw(layouts(instance)), data.draw(with_domains(instance.cluster))
    plan = tensor_plan(instance.load, layout, cluster, turn)
    assert_is_the_hosts(plan, instance.load, layout, cluster, turn)
    assert TokenPlan(plan.to_entries(), instance.load, layout).tokens_R.max() == plan.limit_tokens


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_the_bytes_are_the_hosts_where_much_must_cross(seed, nodes):
    """Every node wants experts of its own, and they are anywhere."""
    rng, num_ranks, num_experts = np.random.default_rng(seed), sum(nodes), 40
    cluster = ClusterSpec(num_nodes=len(nodes), ranks_per_node=tuple(nodes))
    cells = rng.permutation(np.append(np.arange(num_experts), rng.integers(EMPTY, num_experts, 4 * num_ranks)))
    cells = np.append(cells, np.full(-len(cells) % num_ranks, EMPTY))
    layout = ExpertLayout(cells.reshape(num_ranks, -1), num_experts)
    taste_NE = rng.lognormal(0, 1.5, (len(nodes), num_experts))
    load = LoadMatrix(rng.poisson(50 * taste_NE[np.asarray(cluster.node_of_rank)]))
    assert_is_the_hosts(tensor_plan(load, layout, cluster, turn=seed % 5), load, layout, cluster, seed % 5)


@pytest.mark.parametrize(
    ("num_experts", "num_nodes", "ranks_per_node", "config"),
    [
        (64, 1, 8, Greedy()),
        (128, 4, 8, Greedy()),
        (128, 4, 8, Laer()),
        (128, 4, 8, Eplb()),
        (256, 8, 8, Greedy()),
        (256, 4, 16, Eplb()),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_planned_layouts_converge_on_later_loads(num_experts, num_nodes, ranks_per_node, config):
    """Planned on one load; split on it with noise, with other tastes on every rank, and with few sources."""
    cluster = ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    planned = zipf_load(cluster.num_ranks, num_experts, exponent=1.0)
    layout = plan_layout(planned, cluster, config, num_experts // cluster.num_ranks + 2)
    split, rng = SplitTensors(layout, cluster, FlowSplit(), "cpu"), np.random.default_rng(3)
    shape = planned.tokens_RE.shape
    for share in (rng.lognormal(0, 0.15, num_experts), rng.lognormal(0, 1, shape), rng.random(shape) < 0.1):
        load = LoadMatrix(rng.poisson(planned.tokens_RE * share))
        assert_is_the_hosts(split.split(torch.tensor(load.tokens_RE)), load, layout, cluster)


def test_the_wildest_loads_converge_too():
    """Tastes of every single rank; of 1500 seeds this takes the host the most phases."""
    rng, cluster = np.random.default_rng(978), ClusterSpec(num_nodes=4, ranks_per_node=8)
    layout = ExpertLayout(np.argsort(rng.random((32, 64)), axis=1)[:, :8], num_experts=64)
    load = LoadMatrix(rng.poisson(100 * rng.lognormal(0, 3, (32, 64))))
    assert_is_the_hosts(tensor_plan(load, layout, cluster), load, layout, cluster)


def test_loads_near_the_end_of_int64():
    layout, cluster = ExpertLayout([[0, 1], [0, 2]], num_experts=3), ClusterSpec(ranks_per_node=2)
    load = LoadMatrix([[3 * 2**45, 3 * 2**45, 0], [3 * 2**45, 0, 2**45]])
    assert_is_the_hosts(tensor_plan(load, layout, cluster), load, layout, cluster)


def test_too_few_phases_show_and_lose_no_token():
    cluster, load = ClusterSpec(num_nodes=4, ranks_per_node=8), zipf_load(32, 128, exponent=1.0)
    layout = plan_layout(zipf_load(32, 128, exponent=0.5), cluster, Eplb(), 5)
    converged = []
    for phases in (1, 4, 64):
        plan = tensor_plan(load, layout, cluster, phases=phases)
        converged.append(bool(plan.converged))
        valid = TokenPlan(plan.to_entries(), load, layout)
        assert converged[-1] == (valid.tokens_R.max() == plan.limit_tokens == min_max_load(load, layout))
        assert plan.limit_tokens <= min_max_load(load, layout)
    assert converged == [False, False, True]


def test_the_turn_may_be_on_the_device():
    """Three tokens for expert 1 come from the other node: two for the one rank, one for the other, in turn."""
    layout, load = ExpertLayout([[0], [0], [1], [1]], num_experts=2), LoadMatrix([[9, 3], [0, 0], [0, 0], [0, 0]])
    for turn, expected_R in enumerate([[5, 4, 2, 1], [5, 4, 1, 2], [5, 4, 2, 1]]):
        plan = tensor_plan(load, layout, TWO_NODES, turn)
        assert TokenPlan(plan.to_entries(), load, layout).tokens_R.tolist() == expected_R
        on_device = tensor_plan(load, layout, TWO_NODES, torch.tensor(turn))
        assert torch.equal(on_device.tokens_RP, plan.tokens_RP)


def waits_by_value(tokens_RE):
    return int(tokens_RE.max())


def waits_by_shape(tokens_RE):
    return tokens_RE.nonzero()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_op_waits_for_a_count(device):
    """Tensors without values: an op that needs one raises, and so does one that mixes devices."""
    with FakeTensorMode():
        tokens_RE = torch.ones(4, 4, dtype=torch.int64, device=device)
        plan = SplitTensors(SMALL, TWO_NODES, FlowSplit(), device, phases=2).split(tokens_RE, tokens_RE[0, 0])
        assert plan.tokens_RP.shape == (4, 8)
        assert {tensor.device.type for tensor in plan} == {device}
        with pytest.raises(DataDependentOutputException):
            waits_by_value(tokens_RE)
        with pytest.raises(DynamicOutputShapeException):
            waits_by_shape(tokens_RE)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (FlowSplit(traffic="exact"), {}, "traffic='exact' is solved on the host only; use traffic='fast'"),
        (FlowSplit(max_inter_node=0.1), {}, "max_inter_node=0.1 takes a search over limits"),
        (FlowSplit(), {"phases": 0}, "phases=0 leaves no push; use at least 1"),
    ],
)
def test_what_the_host_alone_can_do_is_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        SplitTensors(SMALL, TWO_NODES, config, "cpu", **options)


def test_a_cluster_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the layout is for 4 ranks, the cluster has 8"):
        SplitTensors(SMALL, ClusterSpec(ranks_per_node=8), FlowSplit(), "cpu")


@pytest.mark.parametrize(
    ("tokens_RE", "message"),
    [
        (torch.ones(4, 3, dtype=torch.int64), r"tokens_RE is torch.int64 \[4, 3\], the layout needs int64 \[4, 4\]"),
        (torch.ones(4, 4), r"tokens_RE is torch.float32 \[4, 4\], the layout needs int64"),
        (torch.ones(4, 4, dtype=torch.int64, device="meta"), "tokens_RE is on meta, the split on cpu"),
    ],
)
def test_counts_of_another_kind_are_refused(tokens_RE, message):
    with pytest.raises(ValueError, match=message):
        SplitTensors(SMALL, TWO_NODES, FlowSplit(), "cpu").split(tokens_RE)
