"""Where groups lie: every pair of ranks looked at, and what rings ask of links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.config.model_run import ModelRun, Parallelism
from moesys.simulator.model.model_units import Ring, place_groups, place_pairs
from moesys.simulator.model.simulate_model import simulate_model

SLOW = ms.presets.h100(2).replace(ranks_per_node=4, name="")
SMALL = ms.models.ModelSpec.from_config("qwen3-moe-small")
GB = 1e9


def domains(draw: st.DrawFn, num_nodes: int, node: int) -> tuple[int, ...]:
    """Parts of nodes, or nodes together."""
    if node % 2 == 0 and draw(st.booleans()):
        return (node // 2,) * (2 * num_nodes)
    sizes, left = [], num_nodes
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return tuple(node * size for size in sizes)


@st.composite
def placed_cases(draw: st.DrawFn) -> tuple[ms.ClusterSpec, int, int]:
    num_nodes, node = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks = num_nodes * node
    cluster = ms.ClusterSpec(num_nodes=num_nodes, ranks_per_node=node, ranks_per_domain=domains(draw, num_nodes, node))
    span = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    stride = draw(st.sampled_from([size for size in range(1, span + 1) if span % size == 0]))
    return cluster, span // stride, stride


@given(placed_cases())
def test_placement_is_what_pairs_of_ranks_say(case: tuple[ms.ClusterSpec, int, int]) -> None:
    cluster, size, stride = case
    domain, node = cluster.domain_of_rank, cluster.node_of_rank
    groups = [
        [first + offset + place * stride for place in range(size)]
        for first in range(0, cluster.num_ranks, size * stride)
        for offset in range(stride)
    ]
    found = place_groups(size, stride, cluster)
    assert found.inside == any(domain[a] == domain[b] for group in groups for a in group for b in group if a < b)
    on_nodes = [0.0] * cluster.num_nodes
    for group in groups:
        spanned = {domain[rank] for rank in group}
        for rank in range(cluster.num_ranks):
            # Every rank of a domain brings its share of the domain's NICs.
            if len(spanned) > 1 and domain[rank] in spanned:
                on_nodes[node[rank]] += 1 / domain.count(domain[rank])
    assert found.on_nics == pytest.approx(max(on_nodes))


def test_rings_pass_all_but_their_own() -> None:
    inside, across = (Ring(size, place_groups(size, 4 // size, SLOW)) for size in (4, 2))
    assert max(inside.busy_seconds(GB, SLOW)) == pytest.approx(0.75 / SLOW.intra_node_gb_per_s)
    across = Ring(2, place_groups(2, 4, SLOW))
    # Four groups of a node share its NICs.
    assert max(across.busy_seconds(GB, SLOW)) == pytest.approx(4 * 0.5 / SLOW.inter_node_gb_per_s)
    assert max(Ring(1, place_groups(1, 8, SLOW)).busy_seconds(GB, SLOW)) == 0
    load = across.load(GB, SLOW, SLOW)
    assert load.seconds_L[2 * 8 :] == pytest.approx(4 * 0.5 / SLOW.inter_node_gb_per_s)
    assert not load.seconds_L[: 2 * 8].any()
    # The NICs of all nodes of a domain share what leaves it.
    racks = SLOW.replace(num_nodes=4, ranks_per_domain=8, inter_node_gb_per_s=10.0)
    assert max(Ring(16, place_groups(16, 1, racks)).busy_seconds(GB, racks)) == pytest.approx(15 / 16 / (2 * 10))


def test_pairs_of_the_first_and_the_last_ranks() -> None:
    assert place_pairs(4, 4, SLOW).on_nics == 4
    assert place_pairs(2, 2, SLOW).on_nics == 0


def test_a_group_that_straddles_a_rack_is_simulated() -> None:
    """Six trays of four in racks of three trays: of groups of eight the second has a tray in either rack."""
    cluster = ms.ClusterSpec(num_nodes=6, ranks_per_node=4, ranks_per_domain=12, expert_tflops=1e3)
    run = ModelRun(model=SMALL, cluster=cluster, parallelism=Parallelism(ep=8), seq_len=256, global_batch=24)
    assert run.expert_cluster.domain_sizes == (4, 4)
    fitting = run.replace(cluster=cluster.replace(ranks_per_domain=8))
    assert fitting.expert_cluster.domain_sizes == (8,)
    assert simulate_model(run).shares["token all-to-all"] > 1.5 * simulate_model(fitting).shares["token all-to-all"]


def test_tensor_groups_and_hops_lie_as_ranks_are_numbered() -> None:
    """Of tensor groups of four in domains of six, the second straddles; with stages of four so do hops."""
    cluster = ms.ClusterSpec(num_nodes=6, ranks_per_node=2, ranks_per_domain=6, expert_tflops=1e3)
    run = ModelRun(model=SMALL, cluster=cluster, seq_len=256, global_batch=12)
    in_one = cluster.replace(ranks_per_domain=12)
    tensor = run.replace(parallelism=Parallelism(ep=2, tp=4))
    rest = [
        simulate_model(each).shares["attention and dense layers"] for each in (tensor, tensor.replace(cluster=in_one))
    ]
    assert rest[0] > 1.2 * rest[1]
    stages = run.replace(parallelism=Parallelism(ep=2, pp=2))
    runs = [simulate_model(each).draws[0].pipeline.seconds for each in (stages, stages.replace(cluster=in_one))]
    assert runs[0] > runs[1]
