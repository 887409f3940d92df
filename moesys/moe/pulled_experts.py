"""PulledExperts: fully sharded expert parallelism where ranks reach each other's memory, with the bits of
``ShardedExperts``.

Nothing is sent. A rank shares its slice of every expert once, however many ranks hold it, and each rank pulls the
slices of the experts that it holds. Of slot gradients a rank pulls the slices that it owns, and adds them in rank
order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.config import Fsep, ModelShape
from moesys.kernels.symmetric.pulls import PullPart, PullRing, PullRings, ordered_sum
from moesys.layout import ExpertLayout
from moesys.moe.masters import Master
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertShards, HeldByRank, ReshardSteps, RestoreSteps, Steps, index_of
from moesys.overlap.comm.channel import Channel


class PulledExperts(ShardedExperts):
    """``rings``: the memory that ranks share, which is one for all layers of a linked model. ``timeout_s``: after how
    long a rank that waits for a peer gives up; None: as collectives do.
    """

    def __init__(
        self,
        shape: ModelShape,
        rank: int,
        node_of_rank: Sequence[int],
        sharding: Fsep,
        group: dist.ProcessGroup,
        timeout_s: float | None,
    ) -> None:
        super().__init__(shape, rank, node_of_rank, sharding)
        self.rings, self._timeout_s = PullRings(group), timeout_s

    def share_with(self, first: ExpertShards) -> None:
        super().share_with(first)
        if isinstance(first, PulledExperts):
            self.rings = first.rings

    def restore(
        self, masters: Sequence[Master], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> RestoreSteps:
        s, mine = self.wire_slice, held[self.rank]
        wire_Es = self.on_wire(masters, dtype)
        restored_DP = self.memory.new(wire_Es, len(mine), self.padded_parameters)
        wanted = [
            PullPart(restored_DP[slot, rank * s : (rank + 1) * s], rank, expert * s * wire_Es.itemsize)
            for rank in self._ranks_from_next()
            for slot, expert in enumerate(mine)
        ]
        ring = self._ring("restore", wire_Es.nbytes, wire_Es.device, channel)
        pull = self._pull(ring, wire_Es, wanted, restored_DP, channel, "restore", detail)
        del wire_Es
        yield from pull
        return self.restored_flat(restored_DP)

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        yield False
        s, held = self.wire_slice, layout.held_by_rank
        expert_N = [expert for experts in held for expert in experts]
        received_No = self.memory.new(grads_DP, len(expert_N), len(self.owned()))
        place = {(rank, slot): n for n, (rank, slot) in enumerate(_slots(held))}
        wanted = [
            PullPart(received_No[place[rank, slot]], rank, (slot * self.num_ranks + self.rank) * s * grads_DP.itemsize)
            for rank in self._ranks_from_next()
            for slot in range(len(held[rank]))
            if len(self.owned())
        ]
        most_bytes = layout.expert_RS.shape[1] * self.padded_parameters * grads_DP.itemsize
        ring = self._ring("reshard", most_bytes, grads_DP.device, channel)
        yield from self._pull(ring, grads_DP, wanted, received_No, channel, "reshard", detail)
        return (ordered_sum(received_No, index_of(expert_N, received_No), self.shape.num_experts),)

    def _ring(self, name: str, num_bytes: int, device: torch.device, channel: Channel) -> PullRing:
        return self.rings.ring(name, num_bytes, device, self._timeout_s or channel.timeout_s)

    def _ranks_from_next(self) -> list[int]:
        """Returns all ranks, this one last, so that not all ranks pull from the same one at once."""
        return [(self.rank + 1 + place) % self.num_ranks for place in range(self.num_ranks)]

    def _pull(
        self,
        ring: PullRing,
        shared: Tensor,
        wanted: Sequence[PullPart],
        into: Tensor,
        channel: Channel,
        lane: str,
        detail: str,
    ) -> Steps[None]:
        """Pulls, and counts the bytes as ``Channel.all_to_all`` does. The span ends when the data have arrived: on a
        GPU an event of the stream records that, elsewhere the end of the wait.
        """
        recorder = channel.recorder
        start = recorder.clock.now() if recorder.enabled else None
        pull = ring.start(shared, wanted, into)
        del shared
        if recorder.enabled and ring.stream is not None:
            with torch.cuda.stream(ring.stream):
                recorder.add_between(lane, lane, start, recorder.clock.now(), detail)
        for part in wanted:
            if part.rank != self.rank:
                same_node = self.node_of_rank[part.rank] == self.node_of_rank[self.rank]
                channel.meter.wire_bytes[lane, "intra_node" if same_node else "inter_node"] += part.destination.nbytes
        yield True
        with channel.meter.exposed(lane):
            pull.wait()
        if recorder.enabled and ring.stream is None:
            recorder.add_between(lane, lane, start, recorder.clock.now(), detail)


def _slots(held: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns all (rank, slot) in rank order."""
    return [(rank, slot) for rank, experts in enumerate(held) for slot in range(len(experts))]
