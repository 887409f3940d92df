"""Links of a declared pace between ranks of one machine: what travels over them takes the time of its bytes."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.futures import Future

from moesys.overlap.comm.background import BackgroundThread
from moesys.overlap.comm.channel import AsyncWork


class PacedTransfer:
    """A transfer over a paced link; a ``dist.Work`` as far as channels need one."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[None]:
        return self._future


@dataclass(frozen=True)
class _Booking:
    work: AsyncWork
    num_bytes: int
    begun_s: float
    transfer: PacedTransfer


class PacedLink:
    """The link of ``gb_per_s``, in 10^9 bytes a second, that every rank of ``group`` has, once for each direction.

    Transfers take turns, as on one CUDA stream. One starts when the last rank has begun it and has ended the one
    before; on each rank it ends when its bytes have had their time, or when its data is there, if that is later. 3 MB
    at 1 GB/s take 3 ms. Ranks agree on a start over a gloo group of the link's own, and compare their monotonic clocks:
    all must be on one machine, and all make and close their links together.

    Raises ValueError for a pace that is not positive.
    """

    def __init__(self, group: dist.ProcessGroup, gb_per_s: float) -> None:
        if not gb_per_s > 0:
            raise ValueError(f"gb_per_s={gb_per_s} must be positive")
        self.gb_per_s = gb_per_s
        members = dist.get_process_group_ranks(group)
        # Groups of the same few ranks, made without the others, would all have one name, and meet what older ones left.
        alone = len(members) < dist.get_world_size()
        self._group = dist.new_group(members, backend="gloo", use_local_synchronization=alone)
        self._bookings: queue.SimpleQueue[_Booking | None] = queue.SimpleQueue()
        self._thread = BackgroundThread("moesys-paced-link", self._run, stop=self._stop)
        self._thread.start()

    def carry(self, work: AsyncWork, num_bytes: int) -> PacedTransfer:
        """Paces ``work``, which is in flight, over this link. ``num_bytes``: the larger of those sent and received."""
        transfer = PacedTransfer()
        self._bookings.put(_Booking(work, num_bytes, time.monotonic(), transfer))
        return transfer

    def close(self) -> None:
        """Ends after the transfers that are booked."""
        self._stop()
        self._thread.join()
        dist.destroy_process_group(self._group)

    def _stop(self) -> None:
        self._bookings.put(None)

    def _run(self) -> None:
        """Waits and sleeps release the GIL and use no processor."""
        free_s = 0.0
        while (booking := self._bookings.get()) is not None:
            future = booking.transfer.get_future()
            try:
                start_s = torch.tensor([max(booking.begun_s, free_s)], dtype=torch.float64)
                dist.all_reduce(start_s, dist.ReduceOp.MAX, group=self._group)
                booking.work.wait()
                free_s = max(time.monotonic(), start_s.item() + booking.num_bytes / (self.gb_per_s * 1e9))
                time.sleep(max(0.0, free_s - time.monotonic()))
            except RuntimeError as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(None)
