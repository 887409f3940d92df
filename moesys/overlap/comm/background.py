"""Threads in the background that end before Python does.

Python ends a thread that comes back from C++ while it finalizes, and that through frames of C++ ends the process by
SIGABRT. So threads that wait inside of torch are stopped, and waited for, when the process ends.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

# How long the end of a process waits for a thread, and of one that failed for any.
PATIENCE_S = 1.0


def _nothing() -> None:
    pass


class BackgroundThread(threading.Thread):
    """A daemon thread that the process stops when it ends, and waits for.

    Args:
        name: of the thread.
        run: what it runs.
        stop: asks it to end soon.
        abandon: called where it has not ended in time: it must not come back from C++ after that.
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
        # Else their owner, which has this thread, would wait for Python's collector.
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


# Later than what programs register themselves, which may still use their models.
atexit.register(_end_all)
