"""Threads in the background that end before Python does.

While Python finalizes, it ends any thread that returns from C++. Ending it unwinds frames of C++, which aborts the
process by SIGABRT. Threads that wait inside torch are therefore stopped and joined when the process ends.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

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
