"""Workers: processes of this machine that run pure functions side by side, each with one thread in its libraries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from moesys.lab.ranks.process_start import stop_signals_blocked, threads_of, variables_set
from moesys.lab.runs.environment import available_cores

P = ParamSpec("P")
T = TypeVar("T")

# What takes no longer ends before workers would have begun.
ALONE_S = 2.0


class WorkerDiedError(BrokenExecutor):
    """The process that ran a function ended without an answer, after so many ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "its worker process died, by a crash or killed, as where memory is short; use fewer jobs, or jobs=1"
        )
        self.seconds = seconds


class Workers:
    """``num_workers`` processes, which start when they are first needed and end with this one, however it ends.

    Each is a pool of its own, so that one that dies is known by what it ran, and takes nothing else with it.

    ``prepare`` is called here before the first starts, for what is to be done once and not by all at once.

    As for any process that is spawned, a script that uses this needs ``if __name__ == "__main__":``.
    """

    def __init__(self, num_workers: int, prepare: Callable[[], object] = lambda: None) -> None:
        self.num_workers, self._prepare, self._is_prepared = num_workers, prepare, False
        self._alone_until_s = time.monotonic() + ALONE_S
        self._lifeline, self._held = Pipe(duplex=False)
        self._pools: SimpleQueue[ProcessPoolExecutor | None] = SimpleQueue()
        for _ in range(num_workers):
            self._pools.put(None)
        self._askers = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")
        self._one_start = threading.Lock()

    @property
    def are_due(self) -> bool:
        """Whether work has gone on for so long that starting them pays."""
        return time.monotonic() > self._alone_until_s

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Has the next worker that is free call a module-level function. What it returns or raises is the future's; so
        is WorkerDiedError, and ValueError where no process can be started.
        """
        return self._askers.submit(self._ask, function, *args, **kwargs)

    def close(self) -> None:
        """Ends the workers at once, in whatever they do; what waits for one is cancelled."""
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._held.close()
        self._askers.shutdown()
        while not self._pools.empty():
            if (pool := self._pools.get()) is not None:
                pool.shutdown()
        self._lifeline.close()

    def _ask(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        pool = self._pools.get()
        begun_s = time.monotonic()
        try:
            pool = pool or self._started()
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            if pool is not None:
                # A worker whose answer could not be read is alive and blocks the signal by which its pool would end it.
                # From Python 3.12 on the pool would wait for it.
                for process in list(pool._processes.values()):
                    process.kill()
                # This waits for the thread of the pool, which would close what Python's exit writes to.
                pool.shutdown()
            pool = None
            raise WorkerDiedError(time.monotonic() - begun_s) from None
        finally:
            self._pools.put(pool)

    def _started(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, get_context("spawn"), _live_as_long_as, (self._lifeline,))
        # Variables are those of all threads here.
        with self._one_start:
            if not self._is_prepared:
                self._prepare()
                self._is_prepared = True
            with variables_set(threads_of(1)), stop_signals_blocked():
                started = pool.submit(os.getpid)
        try:
            started.result()
        except BrokenProcessPool:
            pool.shutdown()
            raise ValueError(
                'a worker process ended while it started; a script needs `if __name__ == "__main__":` around what it '
                "runs, or use jobs=1 for no workers"
            ) from None
        return pool


def num_workers(jobs: int | None) -> int:
    """``jobs``; None: one for each core that this process may use. Raises ValueError for fewer than 1."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}; use at least 1, which is this process alone, or none for a worker on each core")
    return available_cores() if jobs is None else jobs


def _live_as_long_as(lifeline: Connection) -> None:
    """Called in a worker: nothing is ever sent, but the pipe ends when its other end is closed, or is no more."""
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)
