"""Two ranks raise flags for each other in turn: how long a flag takes to be seen on a peer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton.language as tl

from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, Heap, Region, at
from moesys.kernels.symmetric.signals import PUBLISH, raise_flag, raise_if_given_up, wait


class PingPong:
    """A game of the two ranks of ``pair``, which one program plays on each. Collective: all ranks of ``group`` make it,
    and all call ``play``; others return at once.
    """

    def __init__(self, group: dist.ProcessGroup, pair: tuple[int, int], device: torch.device) -> None:
        self._heap = Heap.of_group({"flag": Region((1,), torch.int32)}, group, device)
        self._pair, self._epoch = pair, 0

    def play(self, rounds: int) -> None:
        """A round is two flags, there and back. Waits for the device.

        Raises ``PeerTimeoutError`` if the peer does not play.
        """
        heap, (first, second) = self._heap, self._pair
        if heap.rank in self._pair:
            peer = second if heap.rank == first else first
            begins = int(heap.rank == first)
            _ping_pong[(1,)](heap.world, heap.offset("flag"), peer, begins, self._epoch + 1, rounds, num_warps=1)
            raise_if_given_up(heap)
        self._epoch += rounds


@kernel(do_not_specialize=["peer", "begins", "epoch", "rounds"])
def _ping_pong(world, flag, peer, begins, epoch, rounds):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, 1)
    mine = at(world, tl.load(world + RANK), flag, tl.int32) + lane
    theirs = at(world, peer, flag, tl.int32) + lane
    for turn in range(rounds):
        if begins:
            raise_flag(theirs, epoch + turn)
        wait(mine, lane < 1, epoch + turn, peer + lane, lane - 1, lane, PUBLISH, world)
        if not begins:
            raise_flag(theirs, epoch + turn)
