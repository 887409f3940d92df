"""A pool of local ranks: processes that are started once and run one function after another on fresh gloo groups."""

import concurrent.futures
import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist

from moesys.lab import processor_shares
from moesys.lab.namespaces import RankNetwork, enter_namespace, in_namespace

T = TypeVar("T")

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ("numpy", "torch", "torch.distributed", __name__)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_STORE_ADDRESS = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
# How long a rank that must end by itself may take before it is killed.
_EXIT_S = 5.0
# How long a rank is waited for after all those that must answer: to end its death, or to tell its stacks.
_DEATH_S = 0.3


@dataclass(frozen=True)
class Outcome:
    """What became of one rank in one run.

    Attributes:
        rank: the rank.
        kind: "returned"; "raised" an exception; "died" (it exited or was killed); "silent" (no answer in time).
        seconds: what the function took on the rank; for "died" and "silent", from the start of the run to the end.
        ended_s: `time.monotonic()` at the end, comparable between ranks.
        result: what the function returned; None for every other kind.
        reason: one line that continues "rank 2 …", such as "was killed by signal 9"; empty for "returned".
        trace: the traceback of "raised", the stacks of a "silent" rank where it could tell them, else empty.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "silent"]
    seconds: float
    ended_s: float
    result: Any = None
    reason: str = ""
    trace: str = ""


class RankError(RuntimeError):
    """Some ranks of a run failed; the message holds every one's reason and traceback.

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


class LocalRanks:
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
        timeout_s: seconds that a run may take, unless it says otherwise.
        collective_timeout_s: seconds after which gloo gives up on a missing peer.
        grace_s: seconds that `run` leaves to the other ranks after the first failure, for tracebacks of their own.
        setup: a module-level function, called once in every process before its first run.
        environment: variables that every process has from its start; heeded only by the first pool that this process
            starts, like `preload`.
        preload: modules to import once, ahead of all ranks, beside torch and numpy; heeded only by the first pool that
            this process starts.
        network: the hosts that ranks live on (`shaped_links`), as long as the pool does; None: this machine itself.
        backend: of the group, as `dist.init_process_group` knows it.

    Raises:
        ValueError: `num_ranks` or `threads` is below 1, or `network` has places for another number of ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        threads: int = 1,
        timeout_s: float = 60.0,
        collective_timeout_s: float = 30.0,
        grace_s: float = 3.0,
        setup: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        network: RankNetwork | None = None,
        backend: str = "gloo",
    ) -> None:
        for name, value in (("num_ranks", num_ranks), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if network is not None and len(network.namespace_of_rank) != num_ranks:
            raise ValueError(
                f"network has places for {len(network.namespace_of_rank)} ranks but num_ranks={num_ranks}; "
                "make hosts for exactly the ranks of the pool"
            )
        self.num_ranks = num_ranks
        self._threads = threads
        self._timeout_s = timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._grace_s = grace_s
        self._setup = setup
        self._environment = {**(environment or {}), **dict.fromkeys(_THREAD_VARIABLES, "1")}
        self._preload = tuple(preload)
        self._network = network
        self._backend = backend
        self._num_runs = 0
        self._store: dist.TCPStore | None = None
        self._processes: dict[int, _RankProcess] = {}
        self._askers = concurrent.futures.ThreadPoolExecutor(num_ranks, thread_name_prefix="rank")
        self._one_run = threading.Lock()
        # Also runs when the interpreter exits, before multiprocessing would wait for the processes.
        self._finalizer = weakref.finalize(self, _kill, self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, fn: Callable[..., T], *args: Any, num_ranks: int | None = None, timeout_s: float | None = None
    ) -> list[T]:
        """Calls `fn(*args)` on each of the first `num_ranks` ranks (default: all) and gives the results by rank.

        `fn` is a module-level function; it, `args` and the results are pickled, tensors by value.

        Raises:
            RankError: a rank raised, died, or gave no answer within `timeout_s` seconds.
            ValueError: `num_ranks` is not between 1 and the size of the pool.
        """
        outcomes = self.outcomes(fn, *args, num_ranks=num_ranks, timeout_s=timeout_s, grace_s=self._grace_s)
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
        """As `run`, but tells what became of every rank, by rank, where some are meant to fail.

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
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if not 1 <= num_ranks <= self.num_ranks:
            raise ValueError(f"num_ranks={num_ranks} must be between 1 and {self.num_ranks}, the ranks of the pool")
        call = _pickled((fn, args))
        with self._one_run, self._killed_on_error():
            self._num_runs += 1
            self._start(num_ranks)
            job = _Job(self._num_runs, num_ranks, list(sys.path), call)
            outcomes = self._collect(job, timeout_s, grace_s, expect_dead)
            if all(outcome.kind == "returned" for outcome in outcomes):
                for rank in range(num_ranks):
                    # A rank that has died since it answered is replaced by the next run.
                    with contextlib.suppress(OSError):
                        self._processes[rank].jobs.send(None)
            else:
                _kill(self._processes)
        return outcomes

    def close(self) -> None:
        """Ends all processes; a later run would start new ones."""
        with self._one_run:
            for process in self._processes.values():
                process.jobs.close()
            deadline_s = time.monotonic() + _EXIT_S
            for process in self._processes.values():
                process.process.join(max(0.0, deadline_s - time.monotonic()))
            _kill(self._processes)
            self._store = None

    def _start(self, num_ranks: int) -> None:
        """Starts those of the first `num_ranks` processes that are not alive."""
        if self._store is None:
            # Served by this process, so that it outlives every rank and its port ends with the pool.
            network = self._network
            self._store = _new_store() if network is None else in_namespace(network.store_namespace, _new_store)
        with _environment(self._environment), _deaf_to_ctrl_c():
            _CONTEXT.set_forkserver_preload([*_PRELOAD, *self._preload])
            multiprocessing.forkserver.ensure_running()
        for rank in range(num_ranks):
            if rank in self._processes and self._processes[rank].is_dead():
                self._processes.pop(rank).discard()
            if rank not in self._processes:
                settings = _Settings(
                    rank,
                    self._store.port,
                    self._threads,
                    timedelta(seconds=self._collective_timeout_s),
                    self._setup,
                    self._network,
                    self._backend,
                )
                self._processes[rank] = _RankProcess.start(settings)

    def _collect(
        self, job: "_Job", timeout_s: float, grace_s: float | None, expect_dead: Collection[int]
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
        concurrent.futures.wait([future for future, rank in asked.items() if rank not in outcomes], _DEATH_S)
        outcomes |= {rank: future.result() for future, rank in asked.items() if rank not in outcomes and future.done()}
        silent = [rank for rank in range(job.num_ranks) if rank not in outcomes]
        stacks = _stacks([self._processes[rank] for rank in silent])
        now_s = time.monotonic()
        for rank in silent:
            self._processes[rank].process.kill()
            outcomes[rank] = Outcome(
                rank, "silent", now_s - begin_s, now_s, reason=f"gave no answer {limit}", trace=stacks[rank]
            )
        # Their threads still read the pipes, which are about to be closed.
        concurrent.futures.wait(asked)
        return [outcomes[rank] for rank in range(job.num_ranks)]

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Kills all ranks when the run itself breaks off, as by Ctrl-C, for nobody would read their answers."""
        try:
            yield
        except BaseException:
            _kill(self._processes)
            raise


def _new_store() -> dist.TCPStore:
    return dist.TCPStore(_STORE_ADDRESS, 0, is_master=True, wait_for_workers=False)


def _failure_text(outcome: Outcome) -> str:
    if outcome.kind == "silent" and outcome.trace:
        return f"{outcome.reason}; it was in:\n{outcome.trace}"
    return outcome.trace or outcome.reason


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for a process started inside: libraries read them when they load, not later."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process started inside never hears Ctrl-C, not even while it imports: this process ends it."""
    # Its start would end what is blocked here.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Settings:
    """What a process is started with."""

    rank: int
    store_port: int
    threads: int
    collective_timeout: timedelta
    setup: Callable[[], None] | None
    network: RankNetwork | None
    backend: str


@dataclass(frozen=True)
class _Job:
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


class _ByValuePickler(pickle.Pickler):
    """Pickles a plain CPU tensor as its own values.

    That is several times faster than by its storage, and a small view of a large storage stays small.
    """

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not torch.Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.requires_grad
            or value.is_quantized
            or value.is_complex()
        ):
            return NotImplemented
        bytes_n: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_of_bytes, (pickle.PickleBuffer(bytes_n), value.dtype, tuple(value.shape))


def _tensor_of_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValuePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True)
class _RankProcess:
    """One process of the pool, the two-way pipe for its jobs, and the pipe for its stacks."""

    rank: int
    process: multiprocessing.context.ForkServerProcess
    jobs: Connection
    stacks: Connection

    @classmethod
    def start(cls, settings: _Settings) -> Self:
        jobs, jobs_there = _CONTEXT.Pipe()
        stacks, stacks_there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_serve, args=(settings, jobs_there, stacks_there), name=f"moesys-rank-{settings.rank}"
        )
        process.start()
        jobs_there.close()
        stacks_there.close()
        return cls(settings.rank, process, jobs, stacks)

    def ask(self, job: _Job) -> Outcome:
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

    def is_dead(self) -> bool:
        """Whether the process, which has no job, has ended: between jobs only the end of the pipe can be read."""
        return self.jobs.poll()

    def discard(self) -> None:
        """Kills the process, stopped or not, and frees its pipes."""
        self.process.kill()
        self.process.join()
        self.jobs.close()
        self.stacks.close()


def _kill(processes: dict[int, _RankProcess]) -> None:
    for process in processes.values():
        process.process.kill()
    while processes:
        processes.popitem()[1].discard()


def _stacks(processes: Sequence[_RankProcess]) -> dict[int, str]:
    """Where each process is, by rank, as told by its fault handler; empty for one that is stopped."""
    for process in processes:
        if process.process.is_alive() and process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGUSR1)
    stacks = {}
    for process in processes:
        told = process.stacks.poll(_DEATH_S)
        # The handler writes line by line.
        time.sleep(0.05 if told else 0.0)
        stacks[process.rank] = os.read(process.stacks.fileno(), 65536).decode(errors="replace") if told else ""
    return stacks


def _serve(settings: _Settings, jobs: Connection, stacks: Connection) -> None:
    """Runs jobs until the parent closes the pipe. None instead of a job: every rank has answered the last one."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    os.environ.update({name: str(settings.threads) for name in _THREAD_VARIABLES})
    store_address = _STORE_ADDRESS
    if (network := settings.network) is not None:
        # Before any socket or thread of gloo's: they belong where the thread is that makes them.
        enter_namespace(network.namespace_of_rank[settings.rank])
        if network.share_of_rank:
            processor_shares.join(network.share_of_rank[settings.rank])
        os.environ["GLOO_SOCKET_IFNAME"] = network.interface
        store_address = network.store_address
    # Otherwise gloo takes the interface of the host name, which on many laptops is none that works.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    torch.set_num_threads(settings.threads)
    store = dist.TCPStore(store_address, settings.store_port, is_master=False)
    inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
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
            dist.destroy_process_group()


def _answer(job: _Job, settings: _Settings, store: dist.Store, setup: Callable[[], None] | None) -> _Answer:
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
        return _Answer(end_s - begin_s, end_s, _pickled(result))
    except Exception as error:
        end_s = time.monotonic()
        line = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        return _Answer(end_s - begin_s, end_s, None, f"raised {line}", traceback.format_exc())


def _receive(jobs: Connection, inbox: "queue.SimpleQueue[_Job | None]") -> None:
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
