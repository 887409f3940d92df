"""An all-to-all over gloo as messages between pairs of ranks, receives first.

gloo's own all-to-all posts what a rank sends to a peer before what it receives from it. Whoever comes second then
starts sending at once, and its readiness to receive queues behind its bytes: a slow link carries one direction after
the other. With all receives posted first both directions run at once, on all links.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from moesys.overlap.comm.background import BackgroundThread


class Messages:
    """Messages under way: a ``dist.Work`` as far as channels need one.

    ``get_future`` has a thread wait for them, so that their end is known when it comes; ``is_completed`` is for those
    who have called it. Either gives the first error of any message.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._future: Future[None] | None = None

    def wait(self) -> bool:
        if self._future is not None:
            self._future.wait()
        else:
            self._wait_for_all()
        return True

    def get_future(self) -> Future[None]:
        if self._future is None:
            self._future = Future()
            BackgroundThread("moesys-messages", partial(self._settle, self._future)).start()
        return self._future

    def is_completed(self) -> bool:
        return self._future is not None and self._future.done()

    def _wait_for_all(self) -> None:
        for work in self._works:
            work.wait()

    def _settle(self, future: Future[None]) -> None:
        try:
            self._wait_for_all()
        except RuntimeError as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(None)


def exchange(
    received: Tensor,
    sent: Tensor,
    out_counts: Sequence[int],
    in_counts: Sequence[int],
    group: dist.ProcessGroup,
    tag: int = 1 << 30,
) -> dist.Work | Messages:
    """Starts an all-to-all: ``in_counts`` [R] rows of ``sent`` go to each rank in rank order, and ``received`` gets
    ``out_counts`` [R] by source. By messages where gloo moves what lies on the CPU, else by the backend's own.

    Messages with the same ``tag`` keep their order between two ranks, and never match messages with another tag. Each
    rank turns to its peers in an order of its own, so that no rank is everyone's first; ranks that have nothing for
    each other do not wait for each other.
    """
    # Of a GPU's memory gloo moves only what collectives are given.
    if dist.get_backend(group) != "gloo" or sent.device.type != "cpu":
        work = dist.all_to_all_single(received, sent, list(out_counts), list(in_counts), group=group, async_op=True)
        assert work is not None
        return work
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received_R, sent_R = received.split(list(out_counts)), sent.split(list(in_counts))
    others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
    works = [
        dist.irecv(received_R[peer], group=group, group_src=peer, tag=tag)
        for peer in reversed(others)
        if out_counts[peer]
    ]
    works += [dist.isend(sent_R[peer], group=group, group_dst=peer, tag=tag) for peer in others if in_counts[peer]]
    received_R[rank].copy_(sent_R[rank])
    return Messages([work for work in works if work is not None])
