"""Starts processes as ranks and workers need them: few threads in their libraries, and deaf to Ctrl-C."""

import multiprocessing.resource_tracker
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def threads_of(threads: int) -> dict[str, str]:
    """Returns the variables that give the libraries of a process so many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
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


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """A process started inside never hears Ctrl-C, not even while it imports: this process ends it."""
    # Its start would end what is blocked here.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
