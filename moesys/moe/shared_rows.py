"""SharedRows: rows of experts that lie over ranks, and how they change places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesys.load import IntArray
from moesys.moe.masters import local_part
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position
from moesys.overlap.comm.record import Meter, Recorder

MOVING = Position("move_homes()")


class SharedRows:
    """Where the E rows of ``like`` lie, a tensor [E, ...] that is cut into whole rows over the ranks of ``channel``,
    each row on one of them. Of it, and of other tensors that lie so, rows may change places.
    """

    def __init__(self, like: Tensor, channel: Channel) -> None:
        self._channel, self._mine = channel, _rows_here(like)
        owned_E = torch.full((len(like),), -1, dtype=torch.int64)
        owned_E[torch.from_numpy(self._mine)] = channel.rank
        self._rank_E = channel.all_gather(owned_E.to(like.device), lane="homes", at=MOVING).amax(0).cpu().numpy()

    def moved(self, tensor: Tensor, target_E: IntArray) -> Tensor:
        """Returns a tensor that has in row ``target_E[e]`` what ``tensor`` has in row e. A collective, unless it is
        whole here.
        """
        if not isinstance(tensor, DTensor):
            return tensor[torch.from_numpy(np.argsort(target_E)).to(tensor.device)]
        local = tensor.to_local()
        rows_N, received = self._received(local, target_E)
        moved = torch.empty_like(local)
        moved[rows_N] = received
        return DTensor.from_local(
            moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def move(self, tensor: Tensor, target_E: IntArray) -> None:
        """The same in place."""
        local = local_part(tensor)
        rows_N, received = self._received(local, target_E)
        local[rows_N] = received

    def _received(self, local: Tensor, target_E: IntArray) -> tuple[Tensor, Tensor]:
        """Returns which rows here have come, and what they are."""
        R, rank_E, mine = self._channel.num_ranks, self._rank_E, self._mine
        target_N, source_N = target_E[mine], np.argsort(target_E)[mine]
        # By rank, and of one rank by where rows go: both sides know this order.
        sending, receiving = np.lexsort((target_N, rank_E[target_N])), np.lexsort((mine, rank_E[source_N]))
        counts = (np.bincount(rank_E[rows], minlength=R).tolist() for rows in (source_N, target_N))
        sending_N, receiving_N = (torch.from_numpy(rows).to(local.device) for rows in (sending, receiving))
        sent = local[sending_N].contiguous()
        received = torch.empty_like(sent)
        self._channel.all_to_all(received, sent, *counts, lane="homes").wait()
        return receiving_N, received


def lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are of E rows, which lie over the same ranks."""
    if tensor.shape[:1] != other.shape[:1]:
        return False
    if isinstance(tensor, DTensor) and isinstance(other, DTensor):
        return tensor.device_mesh == other.device_mesh and tensor.placements == other.placements
    return isinstance(tensor, DTensor) == isinstance(other, DTensor)


def _rows_here(tensor: Tensor) -> IntArray:
    """Returns the numbers of this rank's rows, in their order here."""
    if not isinstance(tensor, DTensor):
        return np.arange(len(tensor))
    chunks = [(chunk.offsets[0], chunk.sizes[0]) for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    rows = [np.arange(first, first + count) for first, count in chunks]
    return np.concatenate([np.zeros(0, np.int64), *rows])


@contextmanager
def shared_rows(like: Tensor) -> Iterator[SharedRows]:
    """Gives the rows of ``like``, a ``DTensor`` that is cut into rows, or a tensor that one rank has alone."""
    with channel_over(like, copies=False) as channel:
        yield SharedRows(like, channel)


@contextmanager
def channel_over(tensor: Tensor, *, copies: bool) -> Iterator[Channel]:
    """Gives a channel of the ranks that have ``tensor`` together, and with ``copies`` of those that have copies too. A
    collective of the ranks of its mesh.
    """
    group, made = None, None
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        cut = [mesh.size(dim) > 1 and (copies or not each.is_replicate()) for dim, each in enumerate(tensor.placements)]
        index = tuple(slice(None) if wanted else at for wanted, at in zip(cut, coordinate, strict=True))
        ranks = mesh.mesh[index].flatten().tolist()
        if sum(cut) == 1:
            group = mesh.get_group(cut.index(True))
        elif len(ranks) == dist.get_world_size():
            group = dist.group.WORLD
        elif sum(cut) > 1:
            group = made = dist.new_group(ranks, use_local_synchronization=True)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    try:
        yield Channel(group, [0] * num_ranks, Recorder(0), Meter(), tensor.device.type)
    finally:
        if made is not None:
            dist.destroy_process_group(made)
