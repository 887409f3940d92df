"""How processes start and end: ranks and workers have few threads in their libraries, and block SIGINT and SIGTERM,
because this process ends them itself. Importing this module imports no torch.
"""

import multiprocessing.process
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks and workers import the script that starts them.
MAIN_GUARD = (
    'a script needs `if __name__ == "__main__":` around what it runs, and to be a file, not standard input; or use '
    "moesys run, or jobs=1 for simulated trials"
)


class RunInterruption(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a run whose results so far are kept; the message says how to go on."""


def joins() -> bool:
    """Returns whether torchrun, or a job of Slurm, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_main_guard() -> None:
    """Raises ValueError in a process that imports the script of the one that started it, where the script runs again
    what only that one is to run.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ValueError(f"the script is imported by a rank or a worker; {MAIN_GUARD}")


def writes() -> bool:
    """Returns whether this process prints and writes files, as only the first of torchrun's ranks does."""
    return os.environ.get("RANK", "0") == "0"


def first_line(error: Exception) -> str:
    """Returns the class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


def threads_of(threads: int) -> dict[str, str]:
    """Returns the variables that give the libraries of a process this number of threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a process started inside: libraries read them when they load, not later."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Makes processes that are started inside block SIGINT and SIGTERM, also while they import modules. Batch systems
    send these signals to all processes of a job, and this process ends its children itself.
    """
    # The tracker unblocks the signals when it starts, so it starts before they are blocked.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[threading.Event]:
    """Raises KeyboardInterrupt in the main thread if SIGTERM arrives inside (Slurm, docker and ``kill`` send it), and
    yields an event that is set when it does. SIGTERM and Ctrl-C are not lost in callbacks, such as those of imports.

    Does nothing in other threads, and where the program handles SIGTERM by itself.
    """
    terminated = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminated.set()
        raise KeyboardInterrupt

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        # Python ignores what a callback raises, so the signal comes again when that has ended.
        if found.exc_type is KeyboardInterrupt:
            again = signal.SIGTERM if terminated.is_set() else signal.SIGINT
            threading.Timer(0.01, os.kill, (os.getpid(), again)).start()
        else:
            before(found)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield terminated
        return
    signal.signal(signal.SIGTERM, interrupt)
    before, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield terminated
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
