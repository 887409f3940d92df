"""Experts and their gradients are pulled from peers' memory, with the bits of those that are sent."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal

import moesys as ms
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.pulls import PullPart, PullRing, PullRings, pull_regions
from moesys.kernels.symmetric.signals import PeerTimeoutError
from moesys.layout import ExpertLayout
from moesys.moe.pulled_experts import PulledExperts
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertTransfer
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

TIMEOUT_S = 30.0
E = 6
NODES = (0, 0, 0, 1)
# P_e = 3·7·5 = 105 has 4 slices of 27, 27, 27, 24, in 16 bits on odd addresses; 3·1·2 = 6 has 2, 2, 2 and none.
SHAPES = {
    "uneven slices": ms.ModelShape(hidden_size=7, intermediate_size=5, num_experts=E, top_k=2),
    "a rank that owns nothing": ms.ModelShape(hidden_size=1, intermediate_size=2, num_experts=E, top_k=2),
}
SHARDING = ms.Fsep(slots_per_rank=3)
LAYOUTS = (
    [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [0, 3, 0]],  # a rank without experts, an expert twice on a rank
    [[5, -1, 4], [5, 4, 3], [5, 2, 1], [0, -1, -1]],
    [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]],
)


def restored_and_resharded(shape: ms.ModelShape, dtype: torch.dtype, under_way: int) -> list[dict[str, Any]]:
    """Both kinds of experts through all layouts, each with ``under_way`` restores and reshards begun before any ends,
    and one rank late.
    """
    rank = dist.get_rank()
    found = []
    for pulled in (False, True):
        shards: ShardedExperts
        if pulled:
            shards = PulledExperts(shape, rank, NODES, SHARDING, dist.group.WORLD, TIMEOUT_S)
        else:
            shards = ShardedExperts(shape, rank, NODES, SHARDING)
        meter = Meter()
        channel = Channel(dist.group.WORLD, NODES, Recorder(rank), meter)
        experts, gradients, begun = [], [], []
        for number, expert_RS in enumerate(LAYOUTS):
            if rank == number:
                time.sleep(0.05)
            layout = ExpertLayout(np.array(expert_RS), E)
            local = shards.initial(number, layer_index=0)
            generator = torch.Generator().manual_seed(10 * number + rank)
            grads_DP = shards.new_gradients(layout, torch.device("cpu"))
            grads_DP.copy_(torch.randn(grads_DP.shape, generator=generator))
            restore = ExpertTransfer(shards.restore([local], dtype, layout.held_by_rank, channel, ""))
            reshard = ExpertTransfer(shards.reshard(grads_DP, layout, channel, ""))
            reshard.start()
            begun.append((restore, reshard))
            if pulled:
                # What is shared is a copy, so nothing of this is read any more.
                local.fill_(torch.nan)
                grads_DP.fill_(torch.nan)
            if len(begun) == under_way or number == len(LAYOUTS) - 1:
                for restore, reshard in begun:
                    experts.append([tuple(w.clone() for w in weights[:2]) for weights in restore.finish()])
                    gradients.append(*reshard.finish())
                begun = []
        found.append({"experts": experts, "gradients": gradients, "bytes": dict(meter.wire_bytes)})
    return found


@pytest.mark.parametrize(
    ("shape", "dtype", "under_way"),
    [
        pytest.param("uneven slices", torch.float32, 1, marks=pytest.mark.slow, id="one at a time"),
        pytest.param("uneven slices", torch.bfloat16, 3, id="more under way than a ring has room for"),
        pytest.param("a rank that owns nothing", torch.float32, 3, id="a rank that owns nothing"),
    ],
)
def test_they_are_those_that_are_sent(ranks, shape, dtype, under_way):
    for sent, pulled in ranks.run(restored_and_resharded, SHAPES[shape], dtype, under_way, num_ranks=4):
        assert {weight.dtype for held in pulled["experts"] for weights in held for weight in weights} == {dtype}
        assert_equal(*([each["experts"], each["gradients"]] for each in (pulled, sent)))
        restored = [{key: n for key, n in each["bytes"].items() if key[0] == "restore"} for each in (sent, pulled)]
        assert restored[0] == restored[1] != {}


def pull_from_a_rank_that_does_not_share(timeout_s: float) -> str:
    ring = PullRings(dist.group.WORLD).ring("restore", 64, torch.device("cpu"), timeout_s)
    if dist.get_rank() == 0:
        into_DP = torch.zeros(2, 4)
        pull = ring.start(torch.zeros(16), [PullPart(into_DP[1, :3], 1, 4)], into_DP)
        try:
            pull.wait()
        except PeerTimeoutError as error:
            assert into_DP.isnan().all()
            return str(error)
    return ""


def test_who_does_not_share_is_named(ranks):
    told, _ = ranks.run(pull_from_a_rank_that_does_not_share, 0.3, num_ranks=2)
    assert told.startswith("rank 0 waited 0.3 s for rank 1 in publish: flag 1 is at epoch 0, not 1; ")


def test_more_than_there_is_room_for_is_refused():
    heap = Heap.virtual(pull_regions(20, 1), 1, "cpu")[0]
    with pytest.raises(ValueError, match="shared has 36 bytes, but the ring has room for 32; make it of the most"):
        PullRing(heap).start(torch.zeros(9), [], torch.zeros(0))
