"""Processes that call functions for this one: how one starts, what it is asked through its pipe, what it answers, and
how it ends. With a process group it is a rank, without one a worker. The devices of ranks are the CPU, or the GPUs of
their host, of which several ranks may share one.
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from moesys.files import FolderLock, number_set
from moesys.lab.ranks.process_start import (
    LOOPBACK,
    MAIN_GUARD,
    first_line,
    stop_signals_blocked,
    threads_of,
    variables_set,
)
from moesys.torch_private import forget_meshes, num_process_groups

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ("numpy", "torch", "torch.distributed", __name__)
_PR_SET_PDEATHSIG = 1
_SERVER_FOLDER = "moesys-ranks-"
# A path to that folder has at most this many bytes, because the address of a socket in it has at most 107.
_LONGEST_PLACE = 64
STORE_ADDRESS = "127.0.0.1"
# Seconds that a process has, after all others have answered, to finish dying or to print its stacks.
DEATH_S = 0.3


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call in one process.

    Attributes:
        rank: the rank.
        kind: "returned"; "raised" an exception; "died" (it exited or was killed); "silent" (no answer in time).
        seconds: the duration of the function in the process; for "died" and "silent", from the start to the end.
        ended_s: `time.monotonic()` at the end, comparable between processes of one host.
        result: the value that the function returned; None for every other kind.
        reason: one line that continues "rank 2 …", such as "was killed by signal 9"; empty for "returned".
        trace: the traceback of "raised", the stacks of a "silent" rank where it could print them, else empty.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "silent"]
    seconds: float
    ended_s: float
    result: Any = None
    reason: str = ""
    trace: str = ""


@dataclass(frozen=True)
class GroupSettings:
    """The process groups that a rank joins, one for each run; ranks meet at the store of this port."""

    rank: int
    store_port: int
    timeout: timedelta
    backend: str


@dataclass(frozen=True)
class ProcessSettings:
    """The settings that a process is started with; a worker has no ``group``."""

    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    group: GroupSettings | None = None


@dataclass(frozen=True)
class Job:
    """One call: the pickled function and arguments, and where modules are found; of ranks, the run and its size."""

    call: bytes
    sys_path: list[str]
    run: int = 0
    num_ranks: int = 1


def ensure_server(environment: Mapping[str, str], preload: Sequence[str]) -> None:
    """Starts the server that processes are forked from, with these variables and modules, if there is none yet."""
    _give_server_a_folder()
    with variables_set({**environment, **threads_of(1)}), stop_signals_blocked():
        _CONTEXT.set_forkserver_preload([*_PRELOAD, *preload])
        multiprocessing.forkserver.ensure_running()


def _give_server_a_folder() -> None:
    """Makes the folder of the server's socket, and removes those of processes that were killed.

    The folders that multiprocessing makes by itself, ``pymp-*``, stay for ever when a process is killed.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        return
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > _LONGEST_PLACE:
        place = "/tmp"
    for left in Path(place).glob(f"{_SERVER_FOLDER}*"):
        with contextlib.suppress(OSError, ValueError):
            if left.lstat().st_uid == os.getuid() and not left.is_symlink():
                with FolderLock(left) as lock:
                    if lock.is_locked:
                        shutil.rmtree(left)
    for _ in range(100):
        folder = Path(tempfile.mkdtemp(prefix=_SERVER_FOLDER, dir=place))
        # Another process may have taken it for one that was left.
        with contextlib.suppress(OSError, ValueError):
            lock = FolderLock(folder)
            multiprocessing.util.Finalize(None, _remove_folder, args=(folder, lock), exitpriority=-100)
            config["tempdir"] = str(folder)
            return
    raise OSError(f"other processes remove every new folder in {place}; set TMPDIR to another one")


def _remove_folder(folder: Path, lock: FolderLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


@dataclass(frozen=True)
class ChildProcess:
    """A process, the two-way pipe for its jobs, and the pipe for its stacks."""

    rank: int
    process: multiprocessing.context.ForkServerProcess
    jobs: Connection
    stacks: Connection

    @classmethod
    def start(cls, name: str, settings: ProcessSettings) -> Self:
        jobs, jobs_there = _CONTEXT.Pipe()
        stacks, stacks_there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_serve, args=(settings, jobs_there, stacks_there), name=name)
        process.start()
        jobs_there.close()
        stacks_there.close()
        return cls(settings.group.rank if settings.group else 0, process, jobs, stacks)

    def check_started(self) -> None:
        """Waits until the process has imported the script of this one. Raises ValueError if it ends before."""
        if self._received() is None:
            raise ValueError(f"a process ended while it started; {MAIN_GUARD}")

    def _received(self) -> bytes | None:
        """Waits for bytes, without limit: whoever loses patience kills the process. Returns None if it is dead."""
        try:
            # Both are waited for, because a child of the process may hold its end of the pipe open after its death.
            multiprocessing.connection.wait([self.jobs, self.process.sentinel])
            return self.jobs.recv_bytes() if self.jobs.poll() else None
        except (EOFError, OSError):
            return None

    def ask(self, job: Job) -> Outcome:
        """Sends the job and waits without limit."""
        begin_s = time.monotonic()
        # A process that has died does not answer.
        with contextlib.suppress(OSError):
            self.jobs.send(job)
        data = self._received()
        if data is None:
            self.process.join()
            code = self.process.exitcode
            assert code is not None
            reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            return Outcome(self.rank, "died", time.monotonic() - begin_s, time.monotonic(), reason=reason)
        outcome: Outcome = pickle.loads(data)
        return outcome if outcome.result is None else replace(outcome, result=pickle.loads(outcome.result))

    def leave_group(self) -> None:
        """Lets the process, which has answered, leave the run's group, as every rank of the run has answered."""
        # A process that has died since is replaced by the next run.
        with contextlib.suppress(OSError):
            self.jobs.send(None)

    def discard(self) -> None:
        """Kills the process, stopped or not, and frees its pipes."""
        self.process.kill()
        self.process.join()
        self.jobs.close()
        self.stacks.close()


def kill_all(processes: dict[int, ChildProcess]) -> None:
    for process in processes.values():
        process.process.kill()
    while processes:
        processes.popitem()[1].discard()


def stacks_of(processes: Sequence[ChildProcess]) -> dict[int, str]:
    """Returns the stacks of each process, by rank, as its fault handler prints them; "" for one that is stopped."""
    for process in processes:
        if process.process.is_alive() and process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGUSR1)
    stacks = {}
    for process in processes:
        printed = process.stacks.poll(DEATH_S)
        # The handler writes line by line.
        time.sleep(0.05 if printed else 0.0)
        stacks[process.rank] = os.read(process.stacks.fileno(), 65536).decode(errors="replace") if printed else ""
    return stacks


def pickled(value: Any) -> bytes:
    """Pickles ``value``, tensors by value, for ``pickle.loads`` in another process."""
    buffer = io.BytesIO()
    _ByValuePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


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


# --- in the process -----------------------------------------------------------------------------------------------


def _serve(settings: ProcessSettings, jobs: Connection, stacks: Connection) -> None:
    """Runs jobs until the parent closes the pipe. None instead of a job: every rank has answered the last one."""
    _die_with_parent()
    try:
        jobs.send_bytes(b"started")
    except BrokenPipeError:
        # The parent was stopped while this process started.
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    os.environ.update({**settings.environment, **threads_of(settings.threads)})
    # Otherwise gloo takes the interface of the host name, which on many laptops is none that works.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(settings.threads)
    group = settings.group
    store = dist.TCPStore(STORE_ADDRESS, group.store_port, is_master=False) if group else None
    inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs, inbox), name="inbox", daemon=True).start()
    while True:
        job = inbox.get()
        failed = False
        if job is not None:
            answer = _answer(job, group, store)
            failed = answer.kind == "raised"
            sys.stdout.flush()
            sys.stderr.flush()
            jobs.send_bytes(pickle.dumps(answer, protocol=5))
        # A group closed earlier would cut off peers that still read; after a failure, that is just what they need.
        if (job is None or failed) and dist.is_initialized():
            leave_groups()


def leave_groups() -> None:
    """Ends the groups of a run. Each of gloo has a thread that wakes a hundred times a second until its last reference
    is gone, and models hold theirs in circles.
    """
    made_more = num_process_groups() > 1
    dist.destroy_process_group()
    forget_meshes()
    if made_more:
        gc.collect()


def _answer(job: Job, group: GroupSettings | None, store: dist.Store | None) -> Outcome:
    """Runs the job. The result of the outcome is pickled, so that the parent may fail to read it without harm."""
    begin_s, rank = time.monotonic(), group.rank if group else 0
    try:
        sys.path[:] = job.sys_path
        fn, args = pickle.loads(job.call)
        if group is not None and store is not None:
            dist.init_process_group(
                group.backend,
                store=dist.PrefixStore(f"run{job.run}", store),
                rank=group.rank,
                world_size=job.num_ranks,
                timeout=group.timeout,
            )
        begin_s = time.monotonic()
        result = fn(*args)
        end_s = time.monotonic()
        return Outcome(rank, "returned", end_s - begin_s, end_s, pickled(result))
    except Exception as error:
        end_s, reason = time.monotonic(), f"raised {first_line(error)}"
        return Outcome(rank, "raised", end_s - begin_s, end_s, reason=reason, trace=traceback.format_exc())


def _receive(jobs: Connection, inbox: "queue.SimpleQueue[Job | None]") -> None:
    """Passes jobs on; ends the process when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(jobs.recv())
    os._exit(0)


def _die_with_parent() -> None:
    """Lets Linux kill this process when the parent is gone, even while it is stopped or stuck in C code.

    The signal comes with the death of the forkserver, which ends when nobody holds the pipe that keeps it alive: so
    this process, which was given a copy in order to start processes of its own, must not hold it either.
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


# --- devices ------------------------------------------------------------------------------------------------------


def gpu_backend(ranks_of_host: int) -> str:
    """Returns the backend of a process group whose ranks use GPUs: gloo carries counts and plans, NCCL tokens and
    experts. NCCL needs a GPU for each rank, so gloo carries everything where ranks share GPUs, except for what
    MegaKernels send.

    Raises ValueError if torch finds no GPU.
    """
    return "cpu:gloo,cuda:nccl" if ranks_of_host <= _num_gpus() else "gloo"


def device_of(device: str, rank: int) -> torch.device:
    """Returns the device of ``rank``. The GPUs of a host are dealt to its ranks in turn, by torchrun's LOCAL_RANK where
    it is set.

    Raises ValueError for GPUs if torch finds none.
    """
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", number_set("LOCAL_RANK", rank) % _num_gpus())


def rank_device(device: str) -> torch.device:
    """Returns the device of the calling rank, and makes it the current one."""
    found = device_of(device, dist.get_rank() if dist.is_initialized() else 0)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def _num_gpus() -> int:
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ValueError("device='cuda' trains on GPUs, and torch finds none here; use device='cpu'")
    return num_gpus
