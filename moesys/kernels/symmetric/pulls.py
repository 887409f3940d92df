"""Pulls of experts and their gradients from the memory of peers, concurrently with MegaKernels.

All ranks start pulls in the same order. Each rank copies what it shares into its arena and raises a flag; then, on a
separate stream, it waits for its peers' flags, copies what it needs from their arenas, and raises a second flag. An
arena has room for two pulls, so at most two run at a time: before a rank starts a third, its first one is ordered
before everything that it launches later. So a rank that waits for its peers to finish a pull never waits for work that
they have not launched yet.

Copies go by address (``start_copies``), between memory that this rank can reach: its own, and arenas of peers
(``heap``). On NVIDIA's GPUs they are asynchronous copies of CuPy's runtime or the driver, which copy engines execute
concurrently with the multiprocessors. Elsewhere each thread moves 16, 4 or 1 bytes at a time, as both addresses allow.

R ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.products import INTERPRETED
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import (
    BASES,
    RANK,
    Heap,
    Region,
    copy_engines,
    flag_of,
    flags_of_ranks,
    require_no_capture,
)
from moesys.kernels.symmetric.signals import PUBLISH, PULL, TimeoutWatch, raise_flag, wait

# Words of 4 bytes that a program moves at a time: 16 bytes for each of 128 threads, eight times, all loaded before the
# first is stored; ``PROGRAMS`` programs have half a megabyte in flight.
BLOCK_WORDS = 4096
PROGRAMS = 1 if INTERPRETED.value else 32
WARPS = 4
# The columns of a row that a program sums.
COLUMNS = 1024
# How many times a rank may share before its peers have pulled the first one.
DEPTH = 2


class Copy(NamedTuple):
    """``num_bytes`` from address ``source`` to address ``destination``; they do not overlap."""

    destination: int
    source: int
    num_bytes: int


def start_copies(copies: Sequence[Copy], device: torch.device, programs: int = PROGRAMS) -> None:
    """Starts copies on the current stream of ``device``. ``programs``: how many move bytes if no copy engine does."""
    engine_copy = copy_engines(device)
    if engine_copy is not None:
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            for copy in copies:
                if copy.num_bytes:
                    engine_copy(*copy, stream)
    elif copies:
        copies_C3 = torch.tensor(copies, dtype=torch.int64, pin_memory=device.type == "cuda")
        _copy[(programs,)](copies_C3.to(device, non_blocking=True), len(copies), BLOCK=BLOCK_WORDS, num_warps=WARPS)


@kernel(do_not_specialize=["num_copies"])
def _copy(copies_ptr, num_copies, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for number in range(num_copies):
        destination = tl.load(copies_ptr + number * 3)
        source = tl.load(copies_ptr + number * 3 + 1)
        num_bytes = tl.load(copies_ptr + number * 3 + 2)
        apart = destination ^ source
        if apart % 16 == 0:
            _copy_words(destination, source, num_bytes, 16, BLOCK)
        elif apart % 4 == 0:
            _copy_words(destination, source, num_bytes, 4, BLOCK)
        else:
            _copy_bytes(destination, source, num_bytes, BLOCK)


@triton.jit
def _copy_words(destination, source, num_bytes, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Moves bytes between addresses that are a multiple of ``width`` bytes apart."""
    head = tl.minimum((width - destination % width) % width, num_bytes)
    # The hint is given for a value that is computed here, because the compiler forgets hints of arguments.
    words = tl.multiple_of((num_bytes - head) // width * (width // 4), width // 4)
    to = tl.multiple_of((destination + head).to(tl.pointer_type(tl.int32)), width)
    came = tl.multiple_of((source + head).to(tl.pointer_type(tl.int32)), width)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(to + word, tl.load(came + word, mask=word < words), mask=word < words)
    behind = head + words * 4
    _copy_bytes(destination, source, head, BLOCK)
    _copy_bytes(destination + behind, source + behind, num_bytes - behind, BLOCK)


@triton.jit
def _copy_bytes(destination, source, num_bytes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    to = destination.to(tl.pointer_type(tl.uint8))
    came = source.to(tl.pointer_type(tl.uint8))
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_bytes, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(to + place, tl.load(came + place, mask=place < num_bytes), mask=place < num_bytes)


class PullPart(NamedTuple):
    """A part of a pull: contiguous ``destination`` gets as many bytes of what ``rank`` shares, from ``first_byte``."""

    destination: Tensor
    rank: int
    first_byte: int


class Pull:
    """A pull that may run until ``wait``; kernels that are launched after that see its rows."""

    def __init__(self, ring: PullRing, epoch: int, wanted: Sequence[PullPart], into: Tensor) -> None:
        self._ring, self.epoch, self.wanted, self.into = ring, epoch, wanted, into
        self.done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Raises ``PeerTimeoutError`` on the CPU if a peer does not share in time; on a GPU the host does not wait."""
        self._ring.settle(self)


class PullRing:
    """One rank's side of all pulls over one heap with ``pull_regions``. ``stream``: the stream of pulls on a GPU."""

    def __init__(self, heap: Heap) -> None:
        self._heap, self._watch = heap, TimeoutWatch(heap)
        self._bases = heap.world[BASES.value :].tolist()
        self._device = heap.arena.device
        # The stream goes before others that are ready, because a layer waits for it.
        self.stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        self._epoch = 0
        self._pending: deque[Pull] = deque()

    @property
    def num_bytes(self) -> int:
        """Returns the most bytes that a rank can share at once."""
        return self._heap.layout.regions["shared"].shape[1]

    def start(self, shared: Tensor, wanted: Sequence[PullPart], into: Tensor) -> Pull:
        """Starts a pull. ``shared``: contiguous; ``into``: contains all destinations; it becomes NaN if the pull times
        out. All ranks start the same pulls in the same order.

        Raises ``PeerTimeoutError`` if the host has seen by now that an earlier pull timed out, and ValueError if
        ``shared`` is larger than the ring.
        """
        as_bytes = shared.view(-1).view(torch.uint8)
        if len(as_bytes) > self.num_bytes:
            raise ValueError(
                f"shared has {len(as_bytes)} bytes, but the ring has room for {self.num_bytes}; "
                "make it of the most that any rank shares"
            )
        if len(self._pending) == DEPTH:
            self.settle(self._pending[0])
        self._watch.look()
        self._epoch += 1
        pull = Pull(self, self._epoch, wanted, into)
        self._await("pulled", self._epoch - DEPTH)
        self._heap.own("shared")[self._epoch % DEPTH, : len(as_bytes)].copy_(as_bytes)
        self._tell("published", self._epoch)
        self._pending.append(pull)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self.stream):
                self._run(pull)
                into.record_stream(self.stream)
                pull.done = self.stream.record_event()
        return pull

    def settle(self, pull: Pull) -> None:
        """Makes all that is launched from now on wait for this pull and all before it."""
        while self._pending and self._pending[0].epoch <= pull.epoch:
            first = self._pending.popleft()
            if first.done is None:
                self._run(first)
            else:
                torch.cuda.current_stream(self._device).wait_event(first.done)

    def drain(self) -> None:
        """Settles all pulls, and waits for the device."""
        if self._pending:
            self.settle(self._pending[-1])
        if self.stream is not None:
            self.stream.synchronize()
        self._watch.look()

    def _run(self, pull: Pull) -> None:
        self._await("published", pull.epoch)
        first_byte = self._heap.offset("shared") + pull.epoch % DEPTH * self.num_bytes
        copies = [
            Copy(
                part.destination.data_ptr(),
                self._bases[part.rank] + first_byte + part.first_byte,
                part.destination.nbytes,
            )
            for part in pull.wanted
        ]
        start_copies(copies, self._device)
        self._tell("pulled", pull.epoch)
        self._watch.note([pull.into])

    def _await(self, region: str, epoch: int) -> None:
        stage = PUBLISH if region == "published" else PULL
        heap, ranks = self._heap, triton.next_power_of_2(self._heap.num_ranks)
        _await_all[(1,)](heap.world, heap.offset(region), epoch, heap.num_ranks, stage=stage, RANKS=ranks)

    def _tell(self, region: str, epoch: int) -> None:
        heap, ranks = self._heap, triton.next_power_of_2(self._heap.num_ranks)
        _tell_all[(1,)](heap.world, heap.offset(region), epoch, heap.num_ranks, RANKS=ranks)


class PullRings:
    """The rings of a group, by name, each as large as has been asked for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rings: dict[str, PullRing] = {}

    def ring(self, name: str, num_bytes: int, device: torch.device, timeout_s: float) -> PullRing:
        """Returns the ring ``name``, grown to ``num_bytes`` per rank if needed. Waits on a new ring time out after
        ``timeout_s`` seconds. A collective: all ranks ask for the same.
        """
        ring = self._rings.get(name)
        if ring is None or ring.num_bytes < num_bytes:
            require_no_capture("the arena of experts")
            if ring is not None:
                ring.drain()
            wanted = pull_regions(num_bytes, dist.get_world_size(self._group))
            ring = self._rings[name] = PullRing(Heap.of_group(wanted, self._group, device, timeout_s))
        return ring


def pull_regions(num_bytes: int, num_ranks: int) -> Mapping[str, Region]:
    """Returns the regions of what a rank shares at once, a multiple of 16 bytes, ``DEPTH`` times, and of flags."""
    return {
        "shared": Region((DEPTH, -(-num_bytes // 16) * 16), torch.uint8),
        "published": flags_of_ranks(num_ranks),
        "pulled": flags_of_ranks(num_ranks),
    }


@kernel(do_not_specialize=["epoch"])
def _await_all(world, flags, epoch, num_ranks, stage: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until every rank has raised its flag for ``epoch``. Nothing follows, so the barrier is more than is
    needed.
    """
    peer = tl.arange(0, RANKS)
    flag = flag_of(world, tl.load(world + RANK), flags, tl.minimum(peer, num_ranks - 1))
    wait(flag, peer < num_ranks, epoch, peer, -1, peer, stage, world)


@kernel(do_not_specialize=["epoch"])
def _tell_all(world, flags, epoch, num_ranks, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    peer = tl.arange(0, RANKS)
    flag = flag_of(world, tl.minimum(peer, num_ranks - 1), flags, tl.load(world + RANK))
    raise_flag(flag, epoch, peer < num_ranks)


def ordered_sum(parts_NP: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Returns sums of rows [num_rows, P], such as of the gradients of experts, one from each rank that computed them.

    ``parts`` [N, P], float32 or float64, whose dtype is that of the sums; ``row_N`` int: the row of the result that
    each is added to, 0 ≤ row < ``num_rows``. A row is 0 + its first part + its second …, by n, so that its bits depend
    on the order of ranks and on nothing else; rows without parts are zeros.
    """
    num_columns = parts_NP.shape[1]
    out_EP = torch.empty(num_rows, num_columns, dtype=parts_NP.dtype, device=parts_NP.device)
    if not out_EP.numel():
        return out_EP
    order_N = torch.argsort(row_N, stable=True)
    first_E1 = torch.searchsorted(row_N[order_N], torch.arange(num_rows + 1, device=row_N.device))
    # A flat grid: CUDA has at most 65,535 programs in the second of its directions.
    _ordered_sum[(num_rows * triton.cdiv(num_columns, COLUMNS),)](
        parts_NP, order_N, first_E1, out_EP, parts_NP.stride(0), num_columns, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return out_EP


@kernel
def _ordered_sum(parts_ptr, order_ptr, first_ptr, out_ptr, part_stride, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    programs_of_row = (num_columns - 1) // COLUMNS + 1
    row = (tl.program_id(0) // programs_of_row).to(tl.int64)
    column = (tl.program_id(0) % programs_of_row).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    # The sum of one part is that part, zeros' signs too.
    total = tl.full([COLUMNS], -0.0, dtype=parts_ptr.dtype.element_ty)
    for place in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        part = tl.load(order_ptr + place)
        total += tl.load(parts_ptr + part * part_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * num_columns + column, total, mask=inside)
