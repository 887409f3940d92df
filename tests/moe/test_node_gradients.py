"""Experts brought to ranks and their gradients home, by slices or whole, flat or once a node: equal experts, the order
of sums, bytes of the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.layout import ExpertLayout, lender_of_experts, owner_of_experts
from moesys.moe.masters import initial_expert
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertTransfer
from moesys.moe.whole_experts import WholeExperts
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
P, E = SHAPE.expert_parameters, SHAPE.num_experts
# A rank without experts, one twice on a rank, experts on all ranks, and owners with all of theirs at home.
LAYOUTS = (
    [[0, 1, 2, 0], [3, 4, 5, -1], [-1] * 4, [0, 3, 2, -1]],
    [[5, -1, 4, 0], [5, 4, 3, 0], [5, 2, 1, 0], [5, 0, -1, 1]],
    [[0, 1, 5, -1, -1], [2, 3, 0, 5, -1], [4, 5, 0, 2, -1], [0, 2, 4, 1, 3]],
)
KINDS = ("sliced", "sliced by node", "lent", "lent by node")
BOTH = ("intra_node", "inter_node")


def summed_by_node(gradients: list[dict[int, Tensor]], cluster: ms.ClusterSpec) -> Tensor:
    """Of each rank's by expert: replicas of a node in rank order, then nodes in their order; [E, P]."""
    total = torch.zeros(E, P)
    for expert in range(E):
        for node in range(cluster.num_nodes):
            of_node = [
                by_expert[expert]
                for rank, by_expert in enumerate(gradients)
                if cluster.node_of_rank[rank] == node and expert in by_expert
            ]
            if of_node:
                node_sum = torch.zeros(P)
                for gradient in of_node:
                    node_sum += gradient
                total[expert] += node_sum
    return total


def in_rank_order(cluster: ms.ClusterSpec) -> ms.ClusterSpec:
    return cluster.replace(num_nodes=1, ranks_per_node=4)


def moved(kind: str, cluster: ms.ClusterSpec) -> list[dict[str, Any]]:
    """Of each layout: experts that were restored as others are, slot gradients by expert, sums, and bytes received."""
    rank, nodes, found = dist.get_rank(), cluster.node_of_rank, []
    for number, expert_RS in enumerate(LAYOUTS):
        by_node, lent = "by node" in kind, "lent" in kind
        way = "hierarchical" if by_node else "flat"
        sliced = ShardedExperts(SHAPE, rank, nodes, HOME.replace(restore=way, reshard=way))
        shards = WholeExperts(SHAPE, rank, nodes, by_node) if lent else sliced
        meter, dtype = Meter(), (torch.float32, torch.bfloat16)[number % 2]
        channel = Channel(dist.group.WORLD, nodes, Recorder(rank), meter)
        layout = ExpertLayout(np.array(expert_RS), E)
        held = layout.held_by_rank
        masters = [shards.initial(number, layer_index=0)]
        restored = ExpertTransfer(shards.restore(masters, dtype, held, channel, "")).finish()
        # Masters at home are cast where they are used.
        flat = [torch.cat([part.flatten() for part in weights[:2]]).to(dtype) for weights in restored]
        wanted = [initial_expert(SHAPE, number, 0, expert).to(dtype) for expert in held[rank]]
        same = [*map(torch.equal, flat, wanted)]
        grads_DP = shards.new_gradients(layout, torch.device("cpu"))
        generator = torch.Generator().manual_seed(10 * number + rank)
        # Of many magnitudes, so that another order has other bits.
        grads_DP.copy_(torch.randn(grads_DP.shape, generator=generator).mul(4).exp2().mul(grads_DP.shape[0] - 3.5))
        slots = dict(zip(held[rank], grads_DP[:, :P].clone(), strict=True))
        (total,) = ExpertTransfer(shards.reshard(grads_DP, layout, channel, "")).finish()
        found.append({"same": same, "slots": slots, "total": total, "bytes": dict(meter.wire_bytes), "held": held})
    return found


def all_moved() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {(kind, name): moved(kind, CLUSTERS[name]) for kind in KINDS for name in CLUSTERS}


@pytest.fixture(scope="module")
def by_rank(ranks: LocalRanks) -> list[dict[tuple[str, str], list[dict[str, Any]]]]:
    return ranks.run(all_moved)


Moved = list[dict[tuple[str, str], list[dict[str, Any]]]]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_restored_and_gradients_summed_in_their_order(by_rank: Moved, kind: str, name: str) -> None:
    """In rank order, or in that of ranks inside of nodes and nodes in theirs."""
    cluster, differs = CLUSTERS[name], False
    for of_ranks in zip(*(found[kind, name] for found in by_rank), strict=True):
        assert all(all(each["same"]) for each in of_ranks)
        total = torch.cat([each["total"] for each in of_ranks], dim=int("sliced" in kind))
        slots = [each["slots"] for each in of_ranks]
        in_order = summed_by_node(slots, in_rank_order(cluster))
        assert torch.equal(total, summed_by_node(slots, cluster) if "by node" in kind else in_order)
        differs |= not torch.equal(total, in_order)
    # What the first node begins, rank by rank, is the same in both.
    several = "by node" in kind and any(size > 1 for size in cluster.node_sizes[1:])
    assert differs == several, "the case tells one order from another"


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_on_the_wire_are_those_of_the_formula(by_rank: Moved, kind: str, name: str) -> None:
    """A node receives a copy or slice once, and sends one sum of an expert to each outside owner, by all carriers."""
    cluster = CLUSTERS[name]
    node, s, owner = cluster.node_of_rank, -(-P // 4), owner_of_experts(E, 4).tolist()
    for number, of_ranks in enumerate(zip(*(found[kind, name] for found in by_rank), strict=True)):
        held, b = [set(experts) for experts in of_ranks[0]["held"]], (4, 2)[number % 2]
        received = [each["bytes"] for each in of_ranks]

        def count(ranks: Iterable[int], lane: str, *links: str, received: Any = received) -> int:
            return sum(received[rank].get((lane, link), 0) for rank in ranks for link in links or BOTH)

        if "lent" in kind:
            # Every copy reaches its holder over one last way, from its owner or inside its node, and returns so.
            copies = sum(owner[e] != rank for rank in range(4) for e in held[rank])
            assert (count(range(4), "restore"), count(range(4), "reshard")) == (b * P * copies, 4 * P * copies)
        elif "by node" not in kind:
            for rank in range(4):
                assert count([rank], "restore") == b * s * 3 * len(held[rank])
                assert count([rank], "reshard") == 4 * s * sum(len(held[each]) for each in range(4) if each != rank)
        if "by node" not in kind:
            continue
        groups = [[rank for rank in range(4) if node[rank] == of] for of in range(cluster.num_nodes)]
        wanted = [set().union(*(held[rank] for rank in members)) for members in groups]
        for of, members in enumerate(groups):
            others = [experts for other, experts in enumerate(wanted) if other != of]
            at, back = (count(members, lane, "inter_node") for lane in ("restore", "reshard"))
            if "lent" in kind:
                assert at == b * P * sum(node[owner[e]] != of for e in wanted[of])
                assert back == 4 * P * sum(node[owner[e]] == of for experts in others for e in experts)
                continue
            assert at == b * s * (4 - len(members)) * len(wanted[of])
            for rank in members:
                outside = [each for each in range(4) if node[each] != of]
                carried = 1 + sum(members[each % len(members)] == rank for each in outside)
                inside = 4 * s * carried * sum(len(held[each]) for each in members if each != rank)
                assert count([rank], "reshard", "intra_node") == inside
                assert count([rank], "reshard", "inter_node") == 4 * s * sum(map(len, others))


def test_holders_take_turns_at_passing_on() -> None:
    """Four ranks own two experts each; both ranks of node 1 hold the four of node 0, and each brings in every other."""
    held_RE = np.zeros((4, 8), np.int64)
    held_RE[2:, :4] = 1
    held_RE[1, 0] = 1
    node_R = np.array([0, 0, 1, 1])
    assert lender_of_experts(held_RE, node_R)[:, :4].tolist() == [[-1] * 4, [0, -1, -1, -1], [0, 3, 1, 3], [2, 0, 2, 1]]
    assert lender_of_experts(held_RE)[2, :4].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("starts", [False, True])
def test_a_transfer_that_failed_is_never_finished(starts: bool) -> None:
    def steps() -> Iterator[bool]:
        yield False
        if starts:
            yield True
        raise KeyError("a peer")

    transfer = ExpertTransfer(steps())
    with pytest.raises(KeyError, match="a peer"):
        transfer.finish()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed before, with KeyError"):
            transfer.finish()
