"""Experts that are lent once a node: the same copies, gradients summed inside nodes, bytes of the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_node_gradients import CLUSTERS, LAYOUTS, SHAPE, summed_by_node
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.layout import ExpertLayout, lender_of_experts, owner_of_experts
from moesys.moe.store import ExpertTransfer
from moesys.moe.whole_experts import WholeExperts
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

P, E = SHAPE.expert_parameters, SHAPE.num_experts
# Owners of 2, 2, 2 and 0 experts, all at home, and what others borrow.
AT_HOME = [[0, 1, 5, -1, -1], [2, 3, 0, 5, -1], [4, 5, 0, 2, -1], [0, 2, 4, 1, 3]]


def whole_expert(number: int, expert: int) -> Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(100 * number + expert))


def lent_and_returned(cluster: ms.ClusterSpec) -> list[dict[str, Any]]:
    """Of each layout: whether what was lent is what was owned, slot gradients by expert, the masters', and bytes."""
    rank, found = dist.get_rank(), []
    for number, expert_RS in enumerate([*LAYOUTS, AT_HOME]):
        shards, meter = WholeExperts(SHAPE, rank, cluster.node_of_rank, by_node=True), Meter()
        channel = Channel(dist.group.WORLD, cluster.node_of_rank, Recorder(rank), meter)
        layout = ExpertLayout(np.array(expert_RS), E)
        local = torch.empty(len(shards.owned()), P)
        for expert in shards.owned():
            shards.keep(local, expert, whole_expert(number, expert))
        held = layout.held_by_rank
        restored = ExpertTransfer(shards.restore([local], torch.float32, held, channel, "")).finish()
        same = [
            torch.equal(torch.cat([part.flatten() for part in weights[:2]]), whole_expert(number, expert))
            for expert, weights in zip(held[rank], restored, strict=True)
        ]
        grads_DP = shards.new_gradients(layout, torch.device("cpu"))
        # Of many magnitudes, so that another order has other bits.
        grads_DP.copy_(torch.randn(grads_DP.shape, generator=torch.Generator().manual_seed(10 * number + rank)).exp())
        mine = dict(zip(held[rank], grads_DP.clone(), strict=True))
        (total,) = ExpertTransfer(shards.reshard(grads_DP, layout, channel, "")).finish()
        found.append({"same": same, "slots": mine, "total": total, "bytes": dict(meter.wire_bytes), "held": held})
    return found


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_is_lent_once_a_node_is_what_is_owned_and_sums_return(ranks: LocalRanks, name: str) -> None:
    cluster = CLUSTERS[name]
    node = cluster.node_of_rank
    owner = owner_of_experts(E, 4).tolist()
    for of_ranks in zip(*ranks.run(lent_and_returned, cluster), strict=True):
        assert all(all(each["same"]) for each in of_ranks)
        total = torch.cat([each["total"] for each in of_ranks])
        assert torch.equal(total, summed_by_node([each["slots"] for each in of_ranks], cluster))
        held = of_ranks[0]["held"]
        in_node = [{e for r in range(4) if node[r] == of for e in held[r]} for of in range(cluster.num_nodes)]
        for of in range(cluster.num_nodes):
            members = [each["bytes"] for rank, each in enumerate(of_ranks) if node[rank] == of]
            restored = sum(received.get(("restore", "inter_node"), 0) for received in members)
            assert restored == 4 * P * sum(node[owner[e]] != of for e in in_node[of]), "one copy a node"
            returned = sum(received.get(("reshard", "inter_node"), 0) for received in members)
            owned = [e for e in range(E) if node[owner[e]] == of]
            others = [of_node for other, of_node in enumerate(in_node) if other != of]
            assert returned == 4 * P * sum(e in experts for e in owned for experts in others), "one sum a node"
        # Every copy reaches its holder over one last way, from its owner or inside its node, and returns so.
        lent = sum(owner[e] != rank for rank in range(4) for e in held[rank])
        for lane in ("restore", "reshard"):
            links = ("inter_node", "intra_node")
            assert sum(each["bytes"].get((lane, link), 0) for each in of_ranks for link in links) == 4 * P * lent


def test_holders_take_turns_at_passing_on() -> None:
    """Four ranks own two experts each; both ranks of node 1 hold the four of node 0, and each brings in every other."""
    held_RE = np.zeros((4, 8), np.int64)
    held_RE[2:, :4] = 1
    held_RE[1, 0] = 1
    node_R = np.array([0, 0, 1, 1])
    assert lender_of_experts(held_RE, node_R)[:, :4].tolist() == [[-1] * 4, [0, -1, -1, -1], [0, 3, 1, 3], [2, 0, 2, 1]]
    assert lender_of_experts(held_RE)[2, :4].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("fails_at", ["its start", "its end"])
def test_a_transfer_that_failed_is_never_finished(fails_at: str) -> None:
    def steps() -> Iterator[bool]:
        yield False
        if fails_at == "its start":
            raise KeyError("a peer")
        yield True
        raise KeyError("a peer")

    transfer = ExpertTransfer(steps())
    with pytest.raises(KeyError, match="a peer"):
        transfer.finish()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed before, with KeyError"):
            transfer.finish()
