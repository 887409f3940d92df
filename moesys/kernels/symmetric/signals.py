"""Signals between ranks, and between the programs of a rank: flags that hold the epoch in which they were last raised.

An epoch is one direction of one micro-batch of one layer. A flag is raised by storing the epoch, and waited for until
it is at least that, so it never has to be cleared. A program that has waited for a flag sees everything that was
stored before the flag was raised (release and acquire at system scope, by atomics that Triton has had since 3.6).

Every wait is bounded. A program whose wait times out writes a report of what it waited for, and notifies all ranks;
from then on every wait returns at once, so that all kernels end, and ``raise_if_given_up`` raises the report on each
rank. Results computed after a time-out raise no flag: a rank whose waits all succeeded has correct results, and a rank
whose waits did not fills its outputs with NaN.

Waits time out by the clock that kernels see. Functions of the host are called in branches that only the interpreter
takes.

For measurements, tasks may wait for a link of a declared bandwidth, int64 [2]: when it will be free, in ns of the
device's clock, and 10^6 times its GB/s. Without a link, kernels contain none of this code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl  # the interpreter looks for it where a function comes from
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from moesys.kernels.experts.products import INTERPRETED
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import ABORT, NUM_RANKS, RANK, REPORT, REPORT_WORDS, SEEN_NS, TIMEOUT_NS, Heap, at

# Ranks that are interpreted share cores, and leave them to each other while they wait.
INTERPRETED_POLL_S = 5e-4
# Programs that fill outputs with NaN.
SPOILERS = 32
# The stages that are waited for, by number.
STAGES = ("publish", "dispatch", "combine", "pull")
PUBLISH, DISPATCH, COMBINE, PULL = (tl.constexpr(stage) for stage in range(len(STAGES)))


def host_ns() -> int:
    """Returns the value of ``now_ns`` in the interpreter."""
    return time.perf_counter_ns()


def nap() -> None:
    """Sleeps, in the interpreter alone, so that ranks that wait leave the cores to each other."""
    time.sleep(INTERPRETED_POLL_S)


host_ns.__triton_builtin__ = True  # type: ignore[attr-defined]
nap.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def now_ns():  # type: ignore[no-untyped-def]
    """Returns the nanoseconds of a clock that all GPUs of a node share, or all processes of a machine in the
    interpreter.
    """
    if INTERPRETED:
        return host_ns()
    else:
        return globaltimer()


@triton.jit
def agreed_ns(world):  # type: ignore[no-untyped-def]
    """Returns a time on which all threads of a program agree: the latest that this rank has read before. Threads meet
    at barriers, so none may leave a loop by a clock that it alone has read.
    """
    seen = at(world, tl.load(world + RANK), SEEN_NS, tl.int64)
    return tl.atomic_max(seen, tl.cast(now_ns(), tl.int64), sem="relaxed", scope="gpu")


class PeerTimeoutError(RuntimeError):
    """A wait of this rank or another timed out; ``peer`` is the rank that was waited for."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


def raise_if_given_up(heap: Heap) -> None:
    """Waits for the device. Raises ``PeerTimeoutError`` if a kernel of this rank, or of a peer's, gave up; so does each
    later call, as ranks that were left behind are in no common epoch.
    """
    first = heap.rank if int(heap.own("report")[0]) else int(heap.own("abort")[0]) - 1
    if first < 0:
        return
    report = torch.empty(REPORT_WORDS - 1, dtype=torch.int32, device=heap.arena.device)
    _read_report[(1,)](heap.world, first, report, REPORT_WORDS)
    stage, peer, expert, flag, found, wanted = report.tolist()
    raise PeerTimeoutError(
        ("" if first == heap.rank else f"rank {heap.rank} stopped: ")
        + f"rank {first} waited {heap.timeout_s:g} s for rank {peer} in {STAGES[stage]}: flag {flag}"
        + (f" of expert {expert}" if expert >= 0 else "")
        + f" is at epoch {found}, not {wanted}; rank {peer} is dead, stuck, or ran another step",
        peer,
    )


@kernel(do_not_specialize=["rank"])
def _read_report(world, rank, out_ptr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads the report of ``rank`` without its first word, which only chooses the program that writes it."""
    # The peer may have published its report after all waits of this rank, so this rank has not acquired it yet.
    tl.atomic_add(at(world, tl.load(world + RANK), ABORT, tl.int32), 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    for word in range(1, WORDS):
        tl.store(out_ptr + word - 1, tl.load(at(world, rank, REPORT, tl.int32) + word))


def spoil_if_given_up(heap: Heap, outputs: Sequence[Tensor]) -> None:
    """Fills what has been made with NaN, if a kernel of this rank or of a peer's gave up. No host waits for it."""
    filled = tuple(Output(out, len(out), out[0].numel(), out.stride(0)) for out in outputs if out.numel())
    if filled:
        _spoil[(SPOILERS,)](heap.world, filled, BLOCK=1024)


class Output(NamedTuple):
    """Rows of a tensor, of ``length`` elements side by side, ``stride`` elements apart."""

    elements: Tensor
    num_rows: int
    length: int
    stride: int


@kernel
def _spoil(world, outputs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    if not all_came(world):
        for number in tl.static_range(len(outputs)):
            output = outputs[number]
            for row in range(tl.program_id(0), output.num_rows, tl.num_programs(0)):
                first = output.elements + tl.cast(row, tl.int64) * output.stride
                for start in range(0, output.length, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    tl.store(first + column, float("nan"), mask=column < output.length)


class TimeoutWatch:
    """Reports waits that timed out to the host, which does not wait for running kernels.

    On a GPU every direction ends with a copy of the ranks' status into memory of the host. The host reads what has
    arrived there, so it raises an error in a later direction than the one that failed. All waits in between return at
    once. A captured graph contains the copy. On the CPU kernels have ended when they return.
    """

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._abort_1 = torch.zeros(1, dtype=torch.int32).pin_memory() if heap.arena.is_cuda else None

    def note(self, outputs: Sequence[Tensor]) -> None:
        """Ends a direction: if it was given up, its ``outputs``, whose first dimension alone may have gaps, become NaN.
        On the CPU raises ``PeerTimeoutError`` at once.
        """
        spoil_if_given_up(self._heap, outputs)
        if self._heap.arena.is_meta:
            return
        if self._abort_1 is None:
            raise_if_given_up(self._heap)
        else:
            self._abort_1.copy_(self._heap.own("abort"), non_blocking=True)

    def look(self) -> None:
        """Raises ``PeerTimeoutError`` if a direction that has ended by now was given up."""
        if self._abort_1 is not None and int(self._abort_1):
            self.wait()

    def wait(self) -> None:
        """Raises ``PeerTimeoutError`` if any direction was given up, when the device has done all of them."""
        if self._heap.arena.is_cuda:
            torch.cuda.synchronize(self._heap.arena.device)
        raise_if_given_up(self._heap)


@triton.jit
def raise_flag(flag, epoch, mask=None):  # type: ignore[no-untyped-def]
    """Raises a flag, or all flags of a tensor of pointers, after everything that this program has stored."""
    # The barrier covers the stores of all threads; it is needless where this thread alone has stored, or none has.
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def wait(flag, mask, epoch, peer, expert, index, stage: tl.constexpr, world):  # type: ignore[no-untyped-def]
    """Waits until all flags of a tensor of pointers into this rank's memory are at ``epoch``; ``peer``, ``expert`` and
    ``index`` of each are reported if it is given up. What was stored before they were raised may be read afterwards.

    Returns whether they are: what is made without raises no flag.
    """
    abort = at(world, tl.load(world + RANK), ABORT, tl.int32)
    lowest = tl.min(_poll(flag, mask, epoch), 0)
    waits = lowest < epoch
    end_ns = tl.cast(0, tl.int64)
    if waits:
        # The first call may return the time of an earlier wait.
        agreed_ns(world)
        end_ns = agreed_ns(world) + tl.load(world + TIMEOUT_NS)
    while waits:
        if INTERPRETED:
            nap()
        # Acquire is more than is needed: nothing that others wrote is read behind it.
        aborted = tl.atomic_add(abort, 0, sem="acquire", scope="sys") != 0
        late = agreed_ns(world) >= end_ns
        found = _poll(flag, mask, epoch)
        lowest = tl.min(found, 0)
        if (lowest < epoch) & late:  # noqa: SIM102, as these are no Python booleans
            if not aborted:
                _give_up(found, epoch, peer, expert, index, stage, world)
        waits = (lowest < epoch) & (not (late | aborted))
    tl.debug_barrier()
    return lowest >= epoch


@triton.jit
def all_came(world):  # type: ignore[no-untyped-def]
    """Returns whether everything came that launches before this one waited for."""
    # Acquire is more than is needed: outputs of what was given up are overwritten, not read.
    return tl.atomic_add(at(world, tl.load(world + RANK), ABORT, tl.int32), 0, sem="acquire", scope="sys") == 0


@triton.jit
def _poll(flag, mask, epoch):  # type: ignore[no-untyped-def]
    return tl.where(mask, tl.atomic_add(flag, 0, mask=mask, sem="acquire", scope="sys"), epoch)


@triton.jit
def _give_up(found, epoch, peer, expert, index, stage: tl.constexpr, world):  # type: ignore[no-untyped-def]
    """Writes the report if this is the first program of its rank whose wait times out, and then writes the number of
    this rank into the arena of every rank.
    """
    own = tl.load(world + RANK).to(tl.int32)
    report = at(world, own, REPORT, tl.int32)
    # It only chooses one program of this rank: acquire, release and other GPUs are more than is needed.
    if tl.atomic_cas(report, 0, 1, sem="acq_rel", scope="sys") == 0:
        furthest_behind = tl.min(found, 0)
        lane = tl.arange(0, found.shape[0])
        late = lane == tl.min(tl.where(found == furthest_behind, lane, found.shape[0]), 0)
        tl.store(report + 1, stage)
        tl.store(report + 2, tl.sum(tl.where(late, peer, 0), 0))
        tl.store(report + 3, tl.sum(tl.where(late, expert, 0), 0))
        tl.store(report + 4, tl.sum(tl.where(late, index, 0), 0))
        tl.store(report + 5, furthest_behind)
        tl.store(report + 6, epoch)
        tl.debug_barrier()
        for rank in range(tl.load(world + NUM_RANKS).to(tl.int32)):
            tl.atomic_xchg(at(world, rank, ABORT, tl.int32), own + 1, sem="release", scope="sys")
    else:
        # The program that wrote the report may not have notified this rank yet; a later launch must see that a wait
        # timed out. Release is more than is needed, as such a launch sees all stores of this one.
        tl.atomic_xchg(at(world, own, ABORT, tl.int32), own + 1, sem="release", scope="sys")


# Places in a link.
FREE_AT, BYTES_PER_MS = tl.constexpr(0), tl.constexpr(1)
NS_PER_MS = tl.constexpr(1_000_000)


@triton.jit
def set_off(link_ptr, away, row_bytes):  # type: ignore[no-untyped-def]
    """Returns when the rows that are ``away``, of ``row_bytes`` each, will have passed the link if they set off now."""
    if link_ptr is None:
        return 0
    else:
        num_bytes = tl.sum(away.to(tl.int64), 0) * row_bytes
        took_ns = num_bytes * NS_PER_MS // tl.load(link_ptr + BYTES_PER_MS)
        start_ns = now_ns()
        found = tl.atomic_add(link_ptr + FREE_AT, 0, sem="relaxed", scope="gpu")
        free_at, through = found - 1, found
        while found != free_at:
            free_at = found
            through = tl.maximum(free_at, start_ns) + took_ns
            found = tl.atomic_cas(link_ptr + FREE_AT, free_at, through, sem="relaxed", scope="gpu")
        return through


@triton.jit
def arrive(link_ptr, through):  # type: ignore[no-untyped-def]
    """Waits until the time ``through``."""
    if link_ptr is not None:
        at_ns = now_ns()
        while at_ns < through:
            if INTERPRETED:
                nap()
            at_ns = now_ns()
