"""Worker processes, which call pure functions side by side, each with one thread in its libraries."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from moesys.lab.ranks.process import ChildProcess, Job, Outcome, ProcessSettings, ensure_server, kill_all, pickled

T = TypeVar("T")

# Work that ends within this time ends before workers would have started.
ALONE_S = 2.0


class WorkerDiedError(BrokenExecutor):
    """The process that ran a function ended without an answer, after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "its worker process died, by a crash or killed, as where memory is short; use fewer jobs, or jobs=1"
        )
        self.seconds = seconds


class Workers:
    """``num_workers`` processes, which start when they are first needed and end with this one, however it ends.

    ``prepare`` is called in this process before the first one starts, for work that is to be done only once.
    ``preload`` names modules that all of them need; it is ignored if this process has started ranks or workers before.

    A script that uses this needs ``if __name__ == "__main__":``.
    """

    def __init__(
        self, num_workers: int, prepare: Callable[[], object] = lambda: None, preload: Sequence[str] = ()
    ) -> None:
        self.num_workers, self._prepare, self._preload = num_workers, prepare, preload
        self._is_prepared = self._is_closed = False
        self._alone_until_s = monotonic() + ALONE_S
        self._processes: dict[int, ChildProcess] = {}
        self._free: SimpleQueue[int] = SimpleQueue()
        for worker in range(num_workers):
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")
        self._one_start = threading.Lock()

    @property
    def are_due(self) -> bool:
        """Whether work has gone on for so long that starting the workers pays."""
        return monotonic() > self._alone_until_s

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        """Has the next free worker call a module-level function, and returns the future of its result.

        The future raises RuntimeError, with the traceback, if the function raises; WorkerDiedError if its process dies
        or its answer cannot be read; and ValueError if no process can be started.
        """
        return self._threads.submit(self._call, function, *args)

    def close(self) -> None:
        """Ends the workers at once, whatever they do; calls that wait for one are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._one_start:
            self._is_closed = True
            for process in self._processes.values():
                process.process.kill()
        self._threads.shutdown()
        kill_all(self._processes)

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        worker, begin_s = self._free.get(), monotonic()
        try:
            if worker not in self._processes:
                self._start(worker)
            outcome = self._ask(worker, function, *args)
        finally:
            self._free.put(worker)
        if outcome is None:
            raise WorkerDiedError(monotonic() - begin_s)
        if outcome.kind == "raised":
            raise RuntimeError(f"a worker process {outcome.reason}\n{outcome.trace}")
        result: T = outcome.result
        return result

    def _start(self, worker: int) -> None:
        with self._one_start:
            if self._is_closed:
                raise WorkerDiedError(0.0)
            if not self._is_prepared:
                self._prepare()
                self._is_prepared = True
            ensure_server({}, self._preload)
            self._processes[worker] = ChildProcess.start(f"moesys-worker-{worker}", ProcessSettings())
        if self._ask(worker, os.getpid) is None and not self._is_closed:
            raise ValueError(
                'a worker process ended while it started; a script needs `if __name__ == "__main__":` around what it '
                "runs, or use jobs=1 for no workers"
            )

    def _ask(self, worker: int, function: Callable[..., Any], *args: Any) -> Outcome | None:
        """Returns None for a process that died, or whose answer cannot be read; the next call starts another one."""
        job = Job(pickled((function, args)), list(sys.path))
        process = self._processes.get(worker)
        try:
            outcome = process.ask(job) if process else None
        # Whatever an answer raises when it is unpickled.
        except Exception:
            outcome = None
        if outcome is not None and outcome.kind != "died":
            return outcome
        with self._one_start:
            if process and not self._is_closed:
                self._processes.pop(worker).discard()
        return None
