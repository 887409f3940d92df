"""Runs the process of a rank: how it starts, what it is asked through its pipe, what it answers, and how it ends."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from moesys.lab.ranks.outcomes import Outcome
from moesys.lab.ranks.process_start import LOOPBACK, stop_signals_blocked, threads_of, variables_set
from moesys.lab.ranks.tensor_pickle import pickled
from moesys.torch_private import forget_meshes, num_process_groups

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ("numpy", "torch", "torch.distributed", __name__)
_PR_SET_PDEATHSIG = 1
STORE_ADDRESS = "127.0.0.1"
# How long a rank is waited for after all those that must answer: to end its death, or to tell its stacks.
DEATH_S = 0.3


@dataclass(frozen=True)
class RankSettings:
    """What a process is started with."""

    rank: int
    store_port: int
    threads: int
    collective_timeout: timedelta
    setup: Callable[[], None] | None
    backend: str


@dataclass(frozen=True)
class Job:
    """One run: its number, its ranks, where modules are found, and the pickled function and arguments."""

    run: int
    num_ranks: int
    sys_path: list[str]
    call: bytes


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back: the pickled result, or why there is none."""

    seconds: float
    ended_s: float
    result: bytes | None
    reason: str = ""
    trace: str = ""


def ensure_server(environment: Mapping[str, str], preload: Sequence[str]) -> None:
    """Starts the server that processes are forked from, with these variables and modules, unless it runs already."""
    with variables_set({**environment, **threads_of(1)}), stop_signals_blocked():
        _CONTEXT.set_forkserver_preload([*_PRELOAD, *preload])
        multiprocessing.forkserver.ensure_running()


@dataclass(frozen=True)
class RankProcess:
    """One process of the pool, the two-way pipe for its jobs, and the pipe for its stacks."""

    rank: int
    process: multiprocessing.context.ForkServerProcess
    jobs: Connection
    stacks: Connection

    @classmethod
    def start(cls, settings: RankSettings) -> Self:
        jobs, jobs_there = _CONTEXT.Pipe()
        stacks, stacks_there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_serve, args=(settings, jobs_there, stacks_there), name=f"moesys-rank-{settings.rank}"
        )
        process.start()
        jobs_there.close()
        stacks_there.close()
        return cls(settings.rank, process, jobs, stacks)

    def ask(self, job: Job) -> Outcome:
        """Sends the job and waits without limit: whoever loses patience kills the process, which ends the wait."""
        begin_s = time.monotonic()
        try:
            self.jobs.send(job)
            # Both, as a child of the rank may hold its end of the pipe open after the rank has died.
            multiprocessing.connection.wait([self.jobs, self.process.sentinel])
            data = self.jobs.recv_bytes() if self.jobs.poll() else None
        except (EOFError, OSError):
            data = None
        if data is None:
            self.process.join()
            code = self.process.exitcode
            assert code is not None
            reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            return Outcome(self.rank, "died", time.monotonic() - begin_s, time.monotonic(), reason=reason)
        answer: _Answer = pickle.loads(data)
        if answer.result is None:
            return Outcome(
                self.rank, "raised", answer.seconds, answer.ended_s, reason=answer.reason, trace=answer.trace
            )
        return Outcome(self.rank, "returned", answer.seconds, answer.ended_s, result=pickle.loads(answer.result))

    def leave_group(self) -> None:
        """Lets the process, which has answered, leave the run's group, as every rank of the run has answered."""
        # One that has died since is replaced by the next run.
        with contextlib.suppress(OSError):
            self.jobs.send(None)

    def is_dead(self) -> bool:
        """Whether the process, which has no job, has ended: between jobs only the end of the pipe can be read."""
        return self.jobs.poll()

    def dismiss(self) -> None:
        """Lets the process, which has no job, end by itself."""
        self.jobs.close()

    def discard(self) -> None:
        """Kills the process, stopped or not, and frees its pipes."""
        self.process.kill()
        self.process.join()
        self.jobs.close()
        self.stacks.close()


def kill_all(processes: dict[int, RankProcess]) -> None:
    for process in processes.values():
        process.process.kill()
    while processes:
        processes.popitem()[1].discard()


def stacks_of(processes: Sequence[RankProcess]) -> dict[int, str]:
    """Where each process is, by rank, as told by its fault handler; empty for one that is stopped."""
    for process in processes:
        if process.process.is_alive() and process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGUSR1)
    stacks = {}
    for process in processes:
        told = process.stacks.poll(DEATH_S)
        # The handler writes line by line.
        time.sleep(0.05 if told else 0.0)
        stacks[process.rank] = os.read(process.stacks.fileno(), 65536).decode(errors="replace") if told else ""
    return stacks


def _serve(settings: RankSettings, jobs: Connection, stacks: Connection) -> None:
    """Runs jobs until the parent closes the pipe. None instead of a job: every rank has answered the last one."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    os.environ.update(threads_of(settings.threads))
    # Otherwise gloo takes the interface of the host name, which on many laptops is none that works.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(settings.threads)
    store = dist.TCPStore(STORE_ADDRESS, settings.store_port, is_master=False)
    inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs, inbox), name="rank-inbox", daemon=True).start()
    setup = settings.setup
    while True:
        job = inbox.get()
        failed = False
        if job is not None:
            answer = _answer(job, settings, store, setup)
            failed = answer.result is None
            setup = None
            sys.stdout.flush()
            sys.stderr.flush()
            jobs.send_bytes(pickle.dumps(answer, protocol=5))
        # A group closed earlier would cut off peers that still read; after a failure, that is just what they need.
        if (job is None or failed) and dist.is_initialized():
            _leave_groups()


def _leave_groups() -> None:
    """Ends the groups of a run. Each of gloo has a thread that wakes a hundred times a second until its last reference
    is gone, and models hold theirs in circles.
    """
    made_more = num_process_groups() > 1
    dist.destroy_process_group()
    forget_meshes()
    if made_more:
        gc.collect()


def _answer(job: Job, settings: RankSettings, store: dist.Store, setup: Callable[[], None] | None) -> _Answer:
    begin_s = time.monotonic()
    try:
        sys.path[:] = job.sys_path
        if setup is not None:
            setup()
        fn, args = pickle.loads(job.call)
        dist.init_process_group(
            settings.backend,
            store=dist.PrefixStore(f"run{job.run}", store),
            rank=settings.rank,
            world_size=job.num_ranks,
            timeout=settings.collective_timeout,
        )
        begin_s = time.monotonic()
        result = fn(*args)
        end_s = time.monotonic()
        return _Answer(end_s - begin_s, end_s, pickled(result))
    except Exception as error:
        end_s = time.monotonic()
        line = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        return _Answer(end_s - begin_s, end_s, None, f"raised {line}", traceback.format_exc())


def _receive(jobs: Connection, inbox: "queue.SimpleQueue[Job | None]") -> None:
    """Passes jobs on; ends the process when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(jobs.recv())
    os._exit(0)


def _die_with_parent() -> None:
    """Lets Linux kill this process when the parent is gone, even while it is stopped or stuck in C code.

    The signal comes with the death of the forkserver, which ends when nobody holds the pipe that keeps it alive: so
    this rank, which was given a copy in order to start processes of its own, must not hold it either.
    """
    if sys.platform != "linux":
        return
    forkserver: Any = multiprocessing.forkserver._forkserver
    if forkserver._forkserver_alive_fd is not None:
        os.close(forkserver._forkserver_alive_fd)
        forkserver._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
