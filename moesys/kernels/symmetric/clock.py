"""The time as a kernel sees it, and what one that is interpreted does while it waits.

What the host gives to the interpreter is called in branches that are never compiled.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl  # the interpreter looks for it where a function comes from
from triton.language.extra.cuda import globaltimer

from moesys.kernels.experts.numerics import INTERPRETED
from moesys.kernels.symmetric.heap import RANK, SEEN_NS, at

# Ranks that are interpreted share cores, and leave them to each other while they wait.
INTERPRETED_POLL_S = 5e-4


def host_ns() -> int:
    """What ``now_ns`` is in the interpreter."""
    return time.perf_counter_ns()


def nap() -> None:
    """For the interpreter alone: ranks that wait leave the cores to each other."""
    time.sleep(INTERPRETED_POLL_S)


host_ns.__triton_builtin__ = True  # type: ignore[attr-defined]
nap.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def now_ns():  # type: ignore[no-untyped-def]
    """Nanoseconds: of a clock that all GPUs of a node share, or of the one that all processes of a machine share."""
    if INTERPRETED:
        return host_ns()
    else:
        return globaltimer()


@triton.jit
def agreed_ns(world):  # type: ignore[no-untyped-def]
    """A time on which all threads of a program agree: the latest that this rank had asked for before. They meet at
    barriers, so none may leave a loop by a clock that it alone has read.
    """
    seen = at(world, tl.load(world + RANK), SEEN_NS, tl.int64)
    return tl.atomic_max(seen, tl.cast(now_ns(), tl.int64), sem="relaxed", scope="gpu")
