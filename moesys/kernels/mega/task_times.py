"""When each task of a MegaKernel ran: what it was, which program took it, how long it waited before it could begin.

The number of a task in its launch's queue is the place of its record, so programs write without talking to each other.
Without memory for records a kernel is compiled without a trace of them.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.signals import now_ns

# What a task is, by number; 0 for one that was not there.
KINDS = ("", "fetch", "product", "push", "sum", "outer_product")
FETCH, PRODUCT, PUSH, SUM, OUTER_PRODUCT = (tl.constexpr(kind) for kind in range(1, len(KINDS)))
# Places in a record, int64; times in nanoseconds of the device's clock.
KIND, GROUP, PROGRAM, START, READY, END = (tl.constexpr(place) for place in range(6))
WORDS = tl.constexpr(6)
# How often a device's clock is compared with the host's; the quickest time is the truest.
CLOCK_TRIES = 8


class TaskTime(NamedTuple):
    """One task. Microseconds of ``time.perf_counter``: it was taken, had what it waited for, was done.

    ``group``: whose rows it handled, -1 for a sum, which has those of several.
    """

    launch: str
    number: int
    kind: str
    group: int
    program: int
    start_us: float
    ready_us: float
    end_us: float


class TaskTimes:
    """Records of launches, on the device until they are read."""

    def __init__(self) -> None:
        self._launches: list[tuple[str, Tensor]] = []

    def of_launch(self, name: str, most_tasks: int, device: torch.device) -> Tensor:
        """Returns memory for the next launch's records, int64 [most_tasks, WORDS]."""
        records = torch.zeros(most_tasks, WORDS.value, dtype=torch.int64, device=device)
        self._launches.append((name, records))
        return records

    def read(self) -> list[TaskTime]:
        """Returns what has been recorded since the last time, by launch and number. Waits for the device."""
        launches, self._launches = self._launches, []
        found = []
        offset_ns = _clock_offset_ns(launches[0][1].device) if launches else 0
        for name, records in launches:
            for number, (kind, group, program, *times_ns) in enumerate(records.tolist()):
                if kind:
                    start_us, ready_us, end_us = ((time_ns + offset_ns) / 1e3 for time_ns in times_ns)
                    found.append(TaskTime(name, number, KINDS[kind], group, program, start_us, ready_us, end_us))
        return found


def _clock_offset_ns(device: torch.device) -> int:
    """Returns how far the host's clock is ahead of the device's, to a few microseconds; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    found = torch.zeros(1, dtype=torch.int64, device=device)
    tries = []
    for _ in range(CLOCK_TRIES):
        torch.cuda.synchronize(device)
        before_ns = time.perf_counter_ns()
        _read_clock[(1,)](found)
        device_ns = int(found)
        after_ns = time.perf_counter_ns()
        tries.append((after_ns - before_ns, (before_ns + after_ns) // 2 - device_ns))
    return min(tries)[1]


@kernel
def _read_clock(out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, now_ns())


@triton.jit
def begin_task(times_ptr, task):  # type: ignore[no-untyped-def]
    """Records that a program has taken ``task``; ``times_ptr`` int64 [tasks, WORDS], or None for no records."""
    if times_ptr is not None:
        record = times_ptr + tl.cast(task, tl.int64) * WORDS
        tl.store(record + PROGRAM, tl.program_id(0))
        tl.store(record + START, now_ns())


@triton.jit
def task_is_ready(times_ptr, task, kind: tl.constexpr, group):  # type: ignore[no-untyped-def]
    """Records that the task has what it waited for."""
    if times_ptr is not None:
        record = times_ptr + tl.cast(task, tl.int64) * WORDS
        tl.store(record + KIND, kind)
        tl.store(record + GROUP, group)
        tl.store(record + READY, now_ns())


@triton.jit
def end_task(times_ptr, task):  # type: ignore[no-untyped-def]
    """Records the end of the task, once all threads of the program have finished it."""
    if times_ptr is not None:
        tl.debug_barrier()
        tl.store(times_ptr + tl.cast(task, tl.int64) * WORDS + END, now_ns())
