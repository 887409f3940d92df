"""Pools of processes: ranks, which run one function after another, each in a new process group; and workers, which
call pure functions side by side, each with one thread in its libraries.
"""

import concurrent.futures
import contextlib
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from moesys.files import Closing
from moesys.lab.ranks.process import (
    DEATH_S,
    STORE_ADDRESS,
    ChildProcess,
    GroupSettings,
    Job,
    Outcome,
    ProcessSettings,
    ensure_server,
    kill_all,
    pickled,
    stacks_of,
)

T = TypeVar("T")

# A rank that must end by itself is killed after this time.
_EXIT_S = 5.0
# Work that ends within this time ends before workers would have started.
ALONE_S = 2.0


@dataclass(frozen=True)
class RankTimeouts:
    """Limits of time, in seconds.

    Args:
        run_s: the most that a run may take, unless it says otherwise.
        collective_s: the time after which gloo gives up on a missing peer.
        grace_s: the time that `run` leaves to the other ranks after the first failure, for their own tracebacks.
    """

    run_s: float = 60.0
    collective_s: float = 30.0
    grace_s: float = 3.0


class RankError(RuntimeError):
    """Some ranks of a run failed; the message holds the reason and the traceback of each of them.

    Attributes:
        failures: rank to traceback, or to the reason where there is none; the first to fail comes first, where a
            death counts as earlier than an exception (peers raise because of it), and silence as later.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        order = ("died", "raised", "silent")
        failed = sorted(
            (outcome for outcome in outcomes if outcome.kind != "returned"),
            key=lambda outcome: (order.index(outcome.kind), outcome.ended_s),
        )
        self.failures = {outcome.rank: _failure_text(outcome) for outcome in failed}
        ranks_by_reason: dict[str, list[str]] = {}
        for outcome in failed:
            ranks_by_reason.setdefault(outcome.reason, []).append(str(outcome.rank))
        reasons = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {reason}"
            for reason, ranks in ranks_by_reason.items()
        )
        traces = [f"\n\nrank {outcome.rank}:\n{outcome.trace.rstrip()}" for outcome in failed if outcome.trace]
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed: {reasons}{''.join(traces)}")


def _failure_text(outcome: Outcome) -> str:
    if outcome.kind == "silent" and outcome.trace:
        return f"{outcome.reason}; it was in:\n{outcome.trace}"
    return outcome.trace or outcome.reason


class LocalRanks(Closing):
    """Processes on this machine that run functions as the ranks of a process group.

    ```python
    def total(value: float) -> float:
        value_1 = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(value_1)
        return value_1.item()

    with LocalRanks(4) as ranks:
        ranks.run(total, 10.0)               # [46.0, 46.0, 46.0, 46.0]
        ranks.run(total, 10.0, num_ranks=2)  # [21.0, 21.0]
    ```

    Processes start when a run needs them and stay until `close()`; after a run in which a rank failed, all are killed
    and the next run starts new ones. Between runs a process keeps what a function leaves in it: random generators,
    module globals, default dtype. Every run has a default process group of its own. Output goes to this process's
    stdout and stderr. When this process ends, however it ends, so do they, without running exit handlers.

    As for any forkserver, a script that uses this needs `if __name__ == "__main__":`.

    Args:
        num_ranks: the most ranks that a run may have.
        threads: threads of torch's CPU operators in a rank; numpy's BLAS always has one.
        timeouts: limits of runs and collectives.
        environment: variables of every process. What torch or the C library read when they are loaded has an effect
            only if this process has started no ranks or workers before.
        preload: modules to import once, for all ranks, besides torch and numpy; ignored if this process has started
            ranks or workers before.
        backend: of the group, as `dist.init_process_group` knows it.

    Raises:
        ValueError: `num_ranks` or `threads` is below 1.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        threads: int = 1,
        timeouts: RankTimeouts = RankTimeouts(),
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        backend: str = "gloo",
    ) -> None:
        for name, value in (("num_ranks", num_ranks), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.num_ranks, self._threads, self._timeouts = num_ranks, threads, timeouts
        self._preload, self._backend = tuple(preload), backend
        self._environment = dict(environment or {})
        self._num_runs = 0
        self._store: dist.TCPStore | None = None
        self._processes: dict[int, ChildProcess] = {}
        self._askers = self._new_askers()
        self._one_run = threading.Lock()
        # Also runs when the interpreter exits, before multiprocessing would wait for the processes.
        self._finalizer = weakref.finalize(self, kill_all, self._processes)

    # This process is the one that prints and writes files, and needs to share nothing: see `Ranks`.
    writes = True

    def share(self, value: T | None) -> T:
        assert value is not None
        return value

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Calls `fn(*args)` on each rank, and returns the result of rank 0; raises as `run` does."""
        return self.run(fn, *args)[0]

    def run(
        self, fn: Callable[..., T], *args: Any, num_ranks: int | None = None, timeout_s: float | None = None
    ) -> list[T]:
        """Calls `fn(*args)` on each of the first `num_ranks` ranks (default: all) and returns the results by rank.

        `fn` is a module-level function; it, `args` and the results are pickled, tensors by value.

        Raises:
            RankError: a rank raised, died, or gave no answer within `timeout_s` seconds.
            ValueError: `num_ranks` is not between 1 and the size of the pool, or a rank ended while it started.
        """
        outcomes = self.outcomes(fn, *args, num_ranks=num_ranks, timeout_s=timeout_s, grace_s=self._timeouts.grace_s)
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise RankError(outcomes)
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        grace_s: float | None = None,
        expect_dead: Collection[int] = (),
    ) -> list[Outcome]:
        """Runs as `run` does, but returns the outcome of every rank, by rank, for runs in which some are meant to fail.

        Args:
            fn: see `run`.
            args: see `run`.
            num_ranks: see `run`.
            timeout_s: see `run`.
            grace_s: seconds left to the other ranks after the first failure; None leaves them all of `timeout_s`.
            expect_dead: ranks that `fn` kills or stops: the run ends when all others have answered, and the death of
                these does not start the grace.

        Raises:
            ValueError: `num_ranks` is not between 1 and the size of the pool.
        """
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        timeout_s = self._timeouts.run_s if timeout_s is None else timeout_s
        if not 1 <= num_ranks <= self.num_ranks:
            raise ValueError(f"num_ranks={num_ranks} must be between 1 and {self.num_ranks}, the ranks of the pool")
        call = pickled((fn, args))
        with self._one_run, contextlib.ExitStack() as on_error:
            # All are killed too when the run itself breaks off, as by Ctrl-C, for nobody would read their answers.
            on_error.callback(kill_all, self._processes)
            self._num_runs += 1
            self._start(num_ranks)
            job = Job(call, list(sys.path), self._num_runs, num_ranks)
            outcomes = self._collect(job, timeout_s, grace_s, expect_dead)
            if all(outcome.kind == "returned" for outcome in outcomes):
                for rank in range(num_ranks):
                    self._processes[rank].leave_group()
                on_error.pop_all()
        return outcomes

    def close(self) -> None:
        """Ends all processes and threads; a later run would start new ones."""
        with self._one_run:
            for process in self._processes.values():
                # The process, which has no job, then ends by itself.
                process.jobs.close()
            deadline_s = time.monotonic() + _EXIT_S
            for process in self._processes.values():
                process.process.join(max(0.0, deadline_s - time.monotonic()))
            kill_all(self._processes)
            self._store = None
            self._askers.shutdown()
            self._askers = self._new_askers()

    def _new_askers(self) -> ThreadPoolExecutor:
        """Returns a pool of threads that wait for ranks; the threads start with the first run."""
        return ThreadPoolExecutor(self.num_ranks, thread_name_prefix="rank")

    def _start(self, num_ranks: int) -> None:
        """Starts those of the first `num_ranks` processes that are not alive."""
        if self._store is None:
            self._store = _local_store()
        ensure_server(self._environment, self._preload)
        started = []
        for rank in range(num_ranks):
            # A process that has no job writes nothing, so its pipe is readable only if it has ended.
            if rank in self._processes and self._processes[rank].jobs.poll():
                self._processes.pop(rank).discard()
            if rank not in self._processes:
                timeout = timedelta(seconds=self._timeouts.collective_s)
                group = GroupSettings(rank, self._store.port, timeout, self._backend)
                settings = ProcessSettings(self._threads, self._environment, group)
                self._processes[rank] = ChildProcess.start(f"moesys-rank-{rank}", settings)
                started.append(self._processes[rank])
        for process in started:
            process.check_started()

    def _collect(
        self, job: Job, timeout_s: float, grace_s: float | None, expect_dead: Collection[int]
    ) -> list[Outcome]:
        begin_s = time.monotonic()
        deadline_s = begin_s + timeout_s
        limit = f"within {timeout_s:g} s"
        asked = {self._askers.submit(self._processes[rank].ask, job): rank for rank in range(job.num_ranks)}
        outcomes: dict[int, Outcome] = {}
        while any(rank not in outcomes and rank not in expect_dead for rank in range(job.num_ranks)):
            waiting = [future for future, rank in asked.items() if rank not in outcomes]
            done, _ = concurrent.futures.wait(
                waiting, max(0.0, deadline_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                break
            for future in done:
                rank = asked[future]
                outcomes[rank] = future.result()
                if outcomes[rank].kind == "returned" or rank in expect_dead or grace_s is None:
                    continue
                if time.monotonic() + grace_s < deadline_s:
                    deadline_s = time.monotonic() + grace_s
                    limit = f"within {grace_s:g} s of the first failure"
        # A rank that kills itself may be a moment later than the peers that do not wait for it.
        concurrent.futures.wait([future for future, rank in asked.items() if rank not in outcomes], DEATH_S)
        outcomes |= {rank: future.result() for future, rank in asked.items() if rank not in outcomes and future.done()}
        silent = [rank for rank in range(job.num_ranks) if rank not in outcomes]
        stacks = stacks_of([self._processes[rank] for rank in silent])
        now_s = time.monotonic()
        for rank in silent:
            self._processes[rank].process.kill()
            outcomes[rank] = Outcome(
                rank, "silent", now_s - begin_s, now_s, reason=f"gave no answer {limit}", trace=stacks[rank]
            )
        # Their threads still read the pipes, which are about to be closed.
        concurrent.futures.wait(asked)
        return [outcomes[rank] for rank in range(job.num_ranks)]


def _local_store() -> dist.TCPStore:
    """Returns a store that this process serves, so that it outlives every rank and its port ends with the pool.

    By itself torch's store listens on all interfaces of the machine, where anybody may write into it.
    """
    listener = socket.create_server((STORE_ADDRESS, 0), backlog=1024)
    port = listener.getsockname()[1]
    # The store closes it.
    handle = listener.detach()
    return dist.TCPStore(STORE_ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)


# --- workers ----------------------------------------------------------------------------------------------------------


class WorkerDiedError(concurrent.futures.BrokenExecutor):
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
        self._alone_until_s = time.monotonic() + ALONE_S
        self._processes: dict[int, ChildProcess] = {}
        self._free: SimpleQueue[int] = SimpleQueue()
        for worker in range(num_workers):
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")
        self._one_start = threading.Lock()

    @property
    def are_due(self) -> bool:
        """True if the work has gone on for so long that starting the workers is worth it."""
        return time.monotonic() > self._alone_until_s

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        """Passes a call of a module-level function to the next free worker, and returns the future of its result.

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
        worker, begin_s = self._free.get(), time.monotonic()
        try:
            if worker not in self._processes:
                self._start(worker)
            outcome = self._ask(worker, function, *args)
        finally:
            self._free.put(worker)
        if outcome is None:
            raise WorkerDiedError(time.monotonic() - begin_s)
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
            process = self._processes[worker] = ChildProcess.start(f"moesys-worker-{worker}", ProcessSettings())
        try:
            process.check_started()
        except ValueError:
            with self._one_start:
                if self._is_closed:
                    raise WorkerDiedError(0.0) from None
                self._processes.pop(worker).discard()
            raise

    def _ask(self, worker: int, function: Callable[..., Any], *args: Any) -> Outcome | None:
        """Returns None for a process that died, or whose answer cannot be read; the next call starts another one."""
        job = Job(pickled((function, args)), list(sys.path))
        process = self._processes.get(worker)
        try:
            outcome = process.ask(job) if process else None
        # An answer can raise anything when it is unpickled.
        except Exception:
            outcome = None
        if outcome is not None and outcome.kind != "died":
            return outcome
        with self._one_start:
            if process and not self._is_closed:
                self._processes.pop(worker).discard()
        return None
