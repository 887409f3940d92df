"""The tasks of a MegaKernel: the queue that its programs take them from, and records of when each of them ran.

A task waits only for tasks with lower numbers, of its own rank or of a peer, and tasks are taken in the order of their
numbers. So the lowest that is not done can always be done: no number of resident programs, not even one, is too few,
and Triton's interpreter, which runs programs one after another, gets through as well.

Two kinds of tasks share a queue: fetches, which bring data, and work, which needs what the first fetches brought. Work
comes in sweeps (``tiles.tile_of``), each of which needs as many more fetches.

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

# A share of 1 in the kernels.
WHOLE = tl.constexpr(1024)


@triton.jit
def take(queue_ptr):  # type: ignore[no-untyped-def]
    """Returns the number of this program's next task; ``queue_ptr`` int32 [2], zeros between launches."""
    return tl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def leave(queue_ptr):  # type: ignore[no-untyped-def]
    """Puts the queue back to zeros if this is the last program of a launch."""
    if tl.atomic_add(queue_ptr + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(queue_ptr, 0)
        tl.store(queue_ptr + 1, 0)


@triton.jit
def mixed_task(  # type: ignore[no-untyped-def]
    task, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share: tl.constexpr
):
    """Returns (is it work, its number among its kind) of the queue's ``task``.

    Before each work task come the fetches that its sweep needs, and at least as many that ``share`` / ``WHOLE`` of all
    tasks until then are fetches. With a share of 0, fetches come just before they are needed, with ``WHOLE`` before any
    work. Each sweep needs ``fetches_of_sweep`` more, or the multiple of it in ``needed_ptr`` if that is not None.
    """
    # The first work task that is not before ``task``: where they are is a rising function of their number.
    low, high = 0, num_work
    while low < high:
        middle = (low + high) // 2
        before = _fetches_before(middle, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share)
        is_before = middle + before < task
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    fetches = _fetches_before(low, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share)
    is_work = (low < num_work) & (low + fetches == task)
    return is_work, tl.where(is_work, low, task - low)


@triton.jit
def _fetches_before(  # type: ignore[no-untyped-def]
    work, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share: tl.constexpr
):
    if share >= WHOLE:
        return num_fetches
    else:
        sweep = tl.minimum(work, num_work - 1) // work_of_sweep
        if needed_ptr is None:
            needed = (sweep + 1) * fetches_of_sweep
        else:
            needed = tl.load(needed_ptr + sweep, mask=num_work > 0, other=0) * fetches_of_sweep
        # The minimum is taken in int64: a share near ``WHOLE`` gives a thousand times the number of work tasks.
        spread = tl.minimum(tl.cast(work, tl.int64) * share // (WHOLE - share), num_fetches).to(tl.int32)
        return tl.minimum(tl.maximum(needed, spread), num_fetches)


# --- records --------------------------------------------------------------------------------------

# The kinds of tasks, by number; 0 marks a place without a task.
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
