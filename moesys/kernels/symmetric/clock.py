"""The time as a kernel sees it, and what one that is interpreted does while it waits.

What the host gives to the interpreter is called in branches that are never compiled.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl  # noqa: F401  # the interpreter looks for it where a function comes from
from triton.language.extra.cuda import globaltimer

from moesys.kernels.experts.numerics import INTERPRETED
from moesys.kernels.symmetric.heap import INTERPRETED_POLL_S


def host_ns() -> int:
    """What ``now_ns`` is in the interpreter."""
    return time.perf_counter_ns()


def nap() -> None:
    """For the interpreter alone: ranks that wait leave the cores to each other."""
    time.sleep(INTERPRETED_POLL_S)


def polls_by_now() -> int:
    """For the interpreter alone: how often a flag would have been asked for since some beginning."""
    return int(time.monotonic() / INTERPRETED_POLL_S)


host_ns.__triton_builtin__ = True  # type: ignore[attr-defined]
nap.__triton_builtin__ = True  # type: ignore[attr-defined]
polls_by_now.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def now_ns():  # type: ignore[no-untyped-def]
    """Nanoseconds: of a clock that all GPUs of a node share, or of the one that all processes of a machine share."""
    if INTERPRETED:
        return host_ns()
    else:
        return globaltimer()
