"""Heartbeat: every rank's sign of life, by which a failed collective distinguishes dead ranks from waiting ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist

from moesys.overlap.comm.background import PATIENCE_S, BackgroundThread
from moesys.torch_private import default_store

PERIOD_S = 0.5


class Heartbeat:
    """Counts up a key of the rendezvous store twice a second, in the background; ``close`` it to stop.

    A stopped, killed or finished process has no heartbeat. One that computes, or waits in a collective, has. Only the
    thread asks the store, which does not answer while its host is frozen.
    """

    def __init__(self, rank: int) -> None:
        # The thread needs a connection of its own: one that waits for an answer lets no other caller through.
        self._store: dist.Store = default_store().clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._closed = threading.Event()
        self._thread = BackgroundThread("moesys-heartbeat", self._run, stop=self.stop)
        self._thread.start()

    def stop(self) -> None:
        self._closed.set()

    def close(self) -> None:
        """Stops the thread and waits until it has ended, or the store has not answered for a second."""
        self.stop()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        # If the store is gone, the job has ended, and no rank reads the heartbeat.
        with suppress(RuntimeError):
            self._store.add(_key(self._rank), 1)
            while not self._closed.wait(PERIOD_S):
                self._store.add(_key(self._rank), 1)


def silent_ranks(grace_s: float, store: dist.Store, ranks: Collection[int]) -> set[int]:
    """Returns the ranks whose heartbeat does not move for ``grace_s`` seconds; at once when all have moved."""
    seen = {rank: store.add(_key(rank), 0) for rank in ranks}
    silent = set(ranks)
    deadline_s = time.monotonic() + grace_s
    while silent and time.monotonic() < deadline_s:
        time.sleep(PERIOD_S / 2)
        silent = {rank for rank in silent if store.add(_key(rank), 0) == seen[rank]}
    return silent


def _key(rank: int) -> str:
    return f"moesys/heartbeat/{rank}"
