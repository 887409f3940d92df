"""Gradients summed inside nodes before they leave them: bits of the order of sums, bytes on the wire of the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import Stack, gradients_of
from shuffling_planner import ShufflingPlanner
from torch import Tensor

import moesys as ms
from moesys.config import Overlap
from moesys.lab.ranks.pool import LocalRanks
from moesys.layout import ExpertLayout
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertTransfer
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

# P_e = 3·7·5 = 105 elements divide by none of 2 and 4, so slices are padded on the wire.
SHAPE = ms.ModelShape(hidden_size=7, intermediate_size=5, num_experts=6, top_k=2)
CLUSTERS = {
    "2 nodes x 2 ranks": ms.ClusterSpec(num_nodes=2, ranks_per_node=2),
    "nodes of 1 and 3": ms.ClusterSpec(num_nodes=2, ranks_per_node=(1, 3)),
    # The last rank's slices come through the first, so that the order of arrival is not its own inverse.
    "nodes of 3 and 1": ms.ClusterSpec(num_nodes=2, ranks_per_node=(3, 1)),
    "nodes of 1, 2 and 1": ms.ClusterSpec(num_nodes=3, ranks_per_node=(1, 2, 1)),
    "4 nodes of a rank": ms.ClusterSpec(num_nodes=4, ranks_per_node=1),
    "one node": ms.ClusterSpec(num_nodes=1, ranks_per_node=4),
}
HOME = ms.Fsep(slots_per_rank=(5, 3, 0, 4), reshard="hierarchical")
# A rank without experts, one twice on a rank, and experts on all ranks.
LAYOUTS = (
    [[0, 1, 2, 0], [3, 4, 5, -1], [-1] * 4, [0, 3, 2, -1]],
    [[5, -1, 4, 0], [5, 4, 3, 0], [5, 2, 1, 0], [5, 0, -1, 1]],
)


def summed_by_node(gradients: list[dict[int, Tensor]], cluster: ms.ClusterSpec) -> Tensor:
    """Of each rank's by expert: replicas of a node in rank order, then nodes in their order; [E, P]."""
    total = torch.zeros(SHAPE.num_experts, SHAPE.expert_parameters)
    for expert in range(SHAPE.num_experts):
        for node in range(cluster.num_nodes):
            of_node = [
                by_expert[expert]
                for rank, by_expert in enumerate(gradients)
                if cluster.node_of_rank[rank] == node and expert in by_expert
            ]
            if of_node:
                node_sum = torch.zeros(SHAPE.expert_parameters)
                for gradient in of_node:
                    node_sum += gradient
                total[expert] += node_sum
    return total


def brought_home(cluster: ms.ClusterSpec) -> list[tuple[dict[int, Tensor], Tensor, dict, list[list[int]]]]:
    """Of each layout: this rank's slot gradients by expert, its part of the masters', and the bytes it received."""
    rank, found = dist.get_rank(), []
    for number, expert_RS in enumerate(LAYOUTS):
        shards, meter = ShardedExperts(SHAPE, rank, cluster.node_of_rank, HOME), Meter()
        channel = Channel(dist.group.WORLD, cluster.node_of_rank, Recorder(rank), meter)
        layout = ExpertLayout(np.array(expert_RS), SHAPE.num_experts)
        grads_DP = shards.new_gradients(layout, torch.device("cpu"))
        generator = torch.Generator().manual_seed(10 * number + rank)
        # Of many magnitudes, so that another order has other bits.
        grads_DP.copy_(torch.randn(grads_DP.shape, generator=generator).mul(4).exp2().mul(grads_DP.shape[0] - 3.5))
        mine = dict(zip(layout.held_by_rank[rank], grads_DP[:, : SHAPE.expert_parameters].clone(), strict=True))
        (local,) = ExpertTransfer(shards.reshard(grads_DP, layout, channel, "")).finish()
        found.append((mine, local, dict(meter.wire_bytes), expert_RS))
    return found


def all_brought_home() -> list[list[tuple[dict[int, Tensor], Tensor, dict, list[list[int]]]]]:
    return [brought_home(cluster) for cluster in CLUSTERS.values()]


@pytest.fixture(scope="module")
def homes(ranks: LocalRanks) -> dict[str, tuple[Any, ...]]:
    """What each rank has of each layout, by cluster."""
    return dict(zip(CLUSTERS, zip(*ranks.run(all_brought_home), strict=True), strict=True))


@pytest.mark.parametrize("name", CLUSTERS)
def test_gradients_are_summed_in_rank_order_and_nodes_in_their_order(homes: dict[str, Any], name: str) -> None:
    cluster = CLUSTERS[name]
    in_rank_order = cluster.replace(num_nodes=1, ranks_per_node=4)
    differs = False
    for of_ranks in zip(*homes[name], strict=True):
        gradients = [mine for mine, *_ in of_ranks]
        found = torch.cat([local for _, local, *_ in of_ranks], dim=1)
        assert torch.equal(found, summed_by_node(gradients, cluster))
        differs |= not torch.equal(found, summed_by_node(gradients, in_rank_order))
    # What the first node begins, rank by rank, is the same in both.
    assert differs == any(size > 1 for size in cluster.node_sizes[1:]), "the case tells one order from another"


@pytest.mark.parametrize("name", CLUSTERS)
def test_bytes_on_the_wire_are_those_of_the_formula(homes: dict[str, Any], name: str) -> None:
    """A sum of each distinct expert leaves a node for each outside owner; gradients reach all carriers of a node."""
    cluster = CLUSTERS[name]
    node, s = cluster.node_of_rank, -(-SHAPE.expert_parameters // 4)
    for rank, of_layouts in enumerate(homes[name]):
        for _, _, received, expert_RS in of_layouts:
            held = [set(experts) - {-1} for experts in expert_RS]
            by_node = [
                set().union(*(held[each] for each in range(4) if node[each] == of)) for of in range(cluster.num_nodes)
            ]
            members = [each for each in range(4) if node[each] == node[rank]]
            outside = [each for each in range(4) if node[each] != node[rank]]
            carried = 1 + sum(members[each % len(members)] == rank for each in outside)
            inside = 4 * s * carried * sum(len(held[each]) for each in members if each != rank)
            between = 4 * s * sum(len(by_node[of]) for of in range(cluster.num_nodes) if of != node[rank])
            assert received.get(("reshard", "intra_node"), 0) == inside
            assert received.get(("reshard", "inter_node"), 0) == between


def trained(
    cluster: ms.ClusterSpec, sharding: ms.Fsep, overlap: Overlap, linked: bool, checkpointed: bool
) -> dict[str, Any]:
    """Gradients of two micro-batches of three layers, and what slots had of the first layer's, in backward's order."""
    strategy = ms.Strategy(name="home", sharding=sharding, balance=ms.Eplb(), overlap=overlap)
    model = Stack(SHAPE, strategy, num_layers=3, cluster=cluster)
    if linked:
        ms.link(model)
    for moe in model.moe:
        moe.experts.schedule.source = ShufflingPlanner()
    slots: list[dict[int, Tensor]] = []
    shards = model.moe[0].experts.store.shards
    reshard = shards.reshard

    def recorded(grads_DP: Tensor, layout: ExpertLayout, *rest: Any) -> Any:
        mine = layout.held_by_rank[dist.get_rank()]
        slots.append(dict(zip(mine, grads_DP[:, : SHAPE.expert_parameters].clone(), strict=True)))
        return reshard(grads_DP, layout, *rest)

    shards.reshard = recorded  # type: ignore[method-assign]
    for num_tokens in (11, 7):
        generator = torch.Generator().manual_seed(num_tokens + dist.get_rank())
        x = torch.randn(num_tokens + 5 * dist.get_rank(), SHAPE.hidden_size, generator=generator)
        model(x, checkpointed).sum().backward()
    return {"slots": slots, "gradients": gradients_of(model)}


@pytest.mark.parametrize("name", ["nodes of 1 and 3", "nodes of 3 and 1"])
def test_travel_behind_other_work_recomputation_and_chunks_change_no_bit(ranks: LocalRanks, name: str) -> None:
    ahead = HOME.replace(prefetch_layers=1, delay_reshard=True)
    runs = [
        (HOME, ms.Sequential(), False, False),
        (ahead.replace(restore="hierarchical", prefetch_layers=2), ms.Pipelined(chunks=3), True, True),
        (HOME.replace(reshard_after_forward=False, delay_reshard=True), ms.Pipelined(chunks=2), True, False),
    ]
    first, *others = [ranks.run(trained, CLUSTERS[name], *each) for each in runs]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_equal(mine["gradients"], theirs["gradients"])
    assert [len(each["slots"]) for each in first] == [2] * 4
    batches = [summed_by_node([each["slots"][batch] for each in first], CLUSTERS[name]) for batch in range(2)]
    for each in first:
        (masters,) = (gradient for name, gradient in each["gradients"].items() if name.startswith("moe.0.experts."))
        assert torch.equal(masters, batches[0] + batches[1])
