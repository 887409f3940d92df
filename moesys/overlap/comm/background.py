"""Threads in the background that end before Python does.

While Python finalizes, it ends any thread that returns from C++. Ending it unwinds frames of C++, which aborts the
process by SIGABRT. Threads that wait inside torch are therefore stopped and joined when the process ends.

One of them is the heartbeat: every rank's sign of life, by which a failed collective distinguishes dead ranks from
waiting ones.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch.distributed as dist

from moesys.torch_private import default_store

# The exit of a process waits this many seconds for a thread by default, and for any thread if the process failed.
PATIENCE_S = 1.0


def _nothing() -> None:
    pass


class BackgroundThread(threading.Thread):
    """A daemon thread that the process stops when it ends, and waits for.

    Args:
        name: the name of the thread.
        run: the function that it runs.
        stop: asks it to end soon.
        abandon: is called if it has not ended in time; it must not return from C++ after that.
        patience_s: seconds that the process waits for it; at most ``PATIENCE_S`` where an unhandled exception ends it.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        *,
        stop: Callable[[], None] = _nothing,
        abandon: Callable[[], None] = _nothing,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(name=name, target=run, daemon=True)
        self.stop, self.abandon, self.patience_s = stop, abandon, patience_s

    def run(self) -> None:
        super().run()
        # Their owner refers to this thread, and the cycle would otherwise last until Python's garbage collector runs.
        self.stop = self.abandon = _nothing


def _end_all() -> None:
    """Ends the background threads of this process. A fork has none of its parent's."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread)]
    for thread in threads:
        thread.stop()
    failed = getattr(sys, "last_value", None) is not None
    begun_s = time.monotonic()
    for thread in threads:
        patience_s = PATIENCE_S if failed else thread.patience_s
        thread.join(max(0.0, begun_s + patience_s - time.monotonic()))
    for thread in threads:
        if thread.is_alive():
            thread.abandon()


# Exit handlers run in reverse order, so this one runs after those of programs, which may still use their models.
atexit.register(_end_all)


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
