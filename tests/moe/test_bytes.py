"""Restored bytes, counted on the wire, are those of the formulas: flat and hierarchical."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shuffling_planner import ShufflingPlanner
from test_node_gradients import CLUSTERS, SHAPE

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks


def restored_bytes(cluster: ms.ClusterSpec, restore: str, dtype: str) -> list[tuple[list[list[int]], dict, bytes]]:
    """For each of three micro-batches: its layout, this rank's received bytes by link class, and the output's bits."""
    strategy = ms.Strategy(
        name=restore, sharding=ms.Fsep(slots_per_rank=(3, 2, 0, 3), restore=restore), balance=ms.Greedy()
    )
    layer = ms.MoELayer(SHAPE.replace(dtype=dtype), strategy, cluster=cluster)
    layer.experts.schedule.source = ShufflingPlanner()
    counted = []
    for batch in range(3):
        generator = torch.Generator().manual_seed(10 * batch + dist.get_rank())
        layer.experts.meter.clear()
        y = layer(torch.randn(9, 7, generator=generator))
        received = {link: count for (lane, link), count in layer.experts.meter.wire_bytes.items() if lane == "restore"}
        counted.append((layer.last_plan.layout.expert_RS.tolist(), received, y.detach().numpy().tobytes()))
    return counted


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in CLUSTERS), ("nodes of 1 and 3", "bfloat16")]
)
def test_restored_bytes_are_those_of_the_formulas(ranks: LocalRanks, name: str, dtype: str) -> None:
    cluster = CLUSTERS[name]
    flat = ranks.run(restored_bytes, cluster, "flat", dtype)
    hierarchical = ranks.run(restored_bytes, cluster, "hierarchical", dtype)
    R, b = 4, 4 if dtype == "float32" else 2
    s = -(-SHAPE.expert_parameters // R)
    for batch in range(3):
        layout = ms.planning.ExpertLayout(flat[0][batch][0], SHAPE.num_experts)
        assert layout.num_duplicates == 0
        for rank in range(R):
            received = sum(flat[rank][batch][1].values())
            assert received == b * s * (R - 1) * int(layout.filled_R[rank]), "flat"
        for node, g in enumerate(cluster.node_sizes):
            members = [rank for rank in range(R) if cluster.node_of_rank[rank] == node]
            received = sum(hierarchical[rank][batch][1].get("inter_node", 0) for rank in members)
            assert received == b * s * (R - g) * layout.replicas_RE[members].any(axis=0).sum(), "hierarchical"
        for rank in range(R):
            assert flat[rank][batch][2] == hierarchical[rank][batch][2], "the way experts travel changed the output"
    layouts = [flat[0][batch][0] for batch in range(3)]
    assert layouts[0] != layouts[1] != layouts[2]


def ep_bytes(strategy: ms.Strategy) -> int:
    layer = ms.MoELayer(SHAPE, strategy)
    layer(torch.randn(9, 7)).sum().backward()
    return layer.experts.meter.bytes_of("restore") + layer.experts.meter.bytes_of("reshard")


def test_static_ep_moves_no_expert(ranks: LocalRanks) -> None:
    assert ranks.run(ep_bytes, ms.Strategy(name="ep")) == [0, 0, 0, 0]
