"""Heartbeat: every rank's sign of life, by which a failed collective tells dead ranks from those that wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

import torch.distributed as dist

from moesys.overlap.comm.background import BackgroundThread
from moesys.torch_private import default_store

PERIOD_S = 0.5


class Heartbeat:
    """Counts up a key of the rendezvous store twice a second, in the background; ``close`` it to stop.

    A stopped, killed or finished process has no heartbeat. One that computes, or waits in a collective, has.
    """

    def __init__(self, rank: int) -> None:
        # The thread needs a connection of its own: one that waits for an answer lets no other caller through.
        self._store: dist.Store = default_store().clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._closed = threading.Event()
        self._beat()
        self._thread = BackgroundThread("moesys-heartbeat", self._run, stop=self.stop)
        self._thread.start()

    def silent_ranks(self, ranks: Collection[int], grace_s: float) -> set[int]:
        """Returns the ranks whose heartbeat does not move for ``grace_s`` seconds; at once when all have moved."""
        seen = {rank: self._count(rank) for rank in ranks}
        silent = set(ranks)
        deadline = time.monotonic() + grace_s
        while silent and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 2)
            silent = {rank for rank in silent if self._count(rank) == seen[rank]}
        return silent

    def stop(self) -> None:
        self._closed.set()

    def close(self) -> None:
        """Stops the thread and waits until it has ended."""
        self.stop()
        self._thread.join()

    def _count(self, rank: int) -> int:
        return self._store.add(_key(rank), 0)

    def _beat(self) -> None:
        self._store.add(_key(self._rank), 1)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._beat()
            except RuntimeError:
                # The store is gone, and with it the job: there is nobody left to tell.
                return


def _key(rank: int) -> str:
    return f"moesys/heartbeat/{rank}"
