"""Symmetric heap: one arena per rank, with the same regions at the same places in each, which peers read and write by
address.

An arena is in memory that processes share on a CPU, where kernels run in Triton's interpreter, in the memory of one
device with virtual ranks, or on GPUs that map each other's memory (``torch.distributed._symmetric_memory``). A kernel
gets ``world``, with the addresses of all ranks' arenas as its own rank sees them, and the offset of a region. Arenas
are never passed to a kernel as tensors: the interpreter copies those back when it ends, over what peers have written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.torch_internals import symmetric_arena

# Regions begin at multiples of a cache line of both kinds of machine, and so at multiples of any load's width.
ALIGNMENT = 128
# int32 from one rank's flag to the next: each has a cache line, so that none is raised where another is polled.
FLAG_WORDS = tl.constexpr(ALIGNMENT // 4)
SHARED_FOLDER = Path("/dev/shm")
# A wait that takes longer is given up.
TIMEOUT_S = 30.0
# The regions with which every arena begins (``signals``): 1 + the rank that has given up; why this one did; the latest
# time that a waiter has seen, in ns.
REPORT_WORDS = 7
SIGNALS = {"abort": ((1,), torch.int32), "report": ((REPORT_WORDS,), torch.int32), "seen_ns": ((1,), torch.int64)}
ABORT, REPORT, SEEN_NS = (tl.constexpr(place * ALIGNMENT) for place in range(3))
# Places in ``world``; the bases of all ranks follow.
NUM_RANKS, RANK, TIMEOUT_NS, BASES = (tl.constexpr(place) for place in range(4))


class Region(NamedTuple):
    """A tensor that every rank has at the same place of its arena."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ArenaLayout:
    """The places of regions: the ``offset`` of each in bytes, and the bytes of an arena."""

    regions: Mapping[str, Region]
    offset: Mapping[str, int]
    num_bytes: int

    @staticmethod
    def of(regions: Mapping[str, Region]) -> ArenaLayout:
        """Returns the layout of these regions behind those of ``signals``."""
        together = {name: Region(*region) for name, region in (*SIGNALS.items(), *regions.items())}
        offset, end = {}, 0
        for name, region in together.items():
            offset[name] = end
            end += -(-region.num_bytes // ALIGNMENT) * ALIGNMENT
        return ArenaLayout(together, offset, end)


@dataclass(frozen=True, eq=False)
class Heap:
    """One rank's sight of all arenas.

    ``arena``: this rank's own, bytes, born as zeros. ``world`` int64 [3 + R], on the arena's device: R, this rank,
    after how many ns a waiter gives up, and where each rank's arena begins, at addresses that are valid for this rank.
    Memory is given back when the last rank's heap is gone, however its process ends.
    """

    layout: ArenaLayout
    rank: int
    num_ranks: int
    timeout_s: float
    arena: Tensor
    world: Tensor
    # The objects that keep peers' memory mapped.
    mapped: tuple[object, ...]

    @staticmethod
    def _of(
        layout: ArenaLayout, rank: int, arena: Tensor, bases: Sequence[int], timeout_s: float, mapped: Sequence[object]
    ) -> Heap:
        world = torch.tensor([len(bases), rank, int(timeout_s * 1e9), *bases], dtype=torch.int64, device=arena.device)
        return Heap(layout, rank, len(bases), timeout_s, arena, world, tuple(mapped))

    def on_meta(self) -> Heap:
        """Returns a heap like this one without memory, for which kernels are compiled."""
        regions = {name: region for name, region in self.layout.regions.items() if name not in SIGNALS}
        return Heap.virtual(regions, self.num_ranks, "meta", self.timeout_s)[self.rank]

    def offset(self, region: str) -> int:
        """Returns the offset of a region in bytes from the beginning of every arena."""
        return self.layout.offset[region]

    def own(self, region: str) -> Tensor:
        """Returns this rank's part of a region, for torch's operators."""
        found, start = self.layout.regions[region], self.layout.offset[region]
        return self.arena[start : start + found.num_bytes].view(found.dtype).view(found.shape)

    @staticmethod
    def virtual(
        regions: Mapping[str, Region], num_ranks: int, device: torch.device | str, timeout_s: float = TIMEOUT_S
    ) -> list[Heap]:
        """Returns the heaps of ranks that are streams of one process on one device; one rank alone has no peers."""
        layout = ArenaLayout.of(regions)
        arenas = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
        bases = [arena.data_ptr() for arena in arenas]
        return [Heap._of(layout, rank, arena, bases, timeout_s, arenas) for rank, arena in enumerate(arenas)]

    @staticmethod
    def of_group(
        regions: Mapping[str, Region],
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> Heap:
        """Returns this rank's heap among the ranks of ``group``, wherever they are; None is one rank alone. A
        collective.
        """
        if group is None:
            return Heap.virtual(regions, 1, device, timeout_s)[0]
        if device.type == "cpu":
            return Heap.between_processes(regions, group, timeout_s)
        return Heap.between_gpus(regions, group, device, timeout_s)

    @staticmethod
    def between_processes(
        regions: Mapping[str, Region], group: dist.ProcessGroup, timeout_s: float = TIMEOUT_S
    ) -> Heap:
        """Returns this rank's heap among the CPU processes of ``group`` on one machine. A collective.

        Raises OSError where the memory cannot be had or a peer's is not on this machine.
        """
        layout, rank = ArenaLayout.of(regions), dist.get_rank(group)
        path, own = _new_shared_memory(layout.num_bytes)
        paths: list[str] = [""] * dist.get_world_size(group)
        try:
            dist.all_gather_object(paths, str(path), group=group)
            try:
                arenas = [own if peer == rank else _map(Path(name)) for peer, name in enumerate(paths)]
            finally:
                # After this barrier no rank maps the memory any more.
                dist.barrier(group)
        finally:
            # Memory without a name is freed with the last process that maps it, even if a peer has died in here.
            path.unlink()
        return Heap._of(layout, rank, own, [arena.data_ptr() for arena in arenas], timeout_s, arenas)

    @staticmethod
    def between_gpus(
        regions: Mapping[str, Region], group: dist.ProcessGroup, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> Heap:
        """Returns this rank's heap among the GPUs of ``group``, on one host, which reach each other by NVLink, or by
        PCIe that carries atomics. A collective.

        Several ranks may share a GPU if ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` is set before torch is used.
        Raises RuntimeError, on all ranks alike, where GPUs do not reach each other so; and where torch cannot map a
        peer's memory.
        """
        layout = ArenaLayout.of(regions)
        _require_reach(group, device)
        arena, bases, handle = symmetric_arena(layout.num_bytes, group, device)
        # No rank writes into an arena that its owner has still to clear.
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return Heap._of(layout, dist.get_rank(group), arena, bases, timeout_s, (handle,))


def _require_reach(group: dist.ProcessGroup, device: torch.device) -> None:
    """Checks, before torch maps anything, that it would not wait in vain, or map memory that flags do not reach."""
    num_ranks = dist.get_world_size(group)
    places: list[tuple[str, str]] = [("", "")] * num_ranks
    dist.all_gather_object(places, (platform.node(), gpu_address(device)), group=group)
    addresses = dict.fromkeys(address for _, address in places)
    # A rank that does not see two GPUs asks the others.
    answers: list[dict[tuple[str, str], bool | None]] = [{}] * num_ranks
    own = {(source, target): atomics_reach(source, target) for source in addresses for target in addresses}
    dist.all_gather_object(answers, own, group=group)
    for (rank, (host, source)), (peer, (other, target)) in product(enumerate(places), repeat=2):
        known, reason = {each[source, target] for each in answers} - {None}, ""
        if other != host:
            reason = f"rank {peer} is on host {other}, and not on {host}: memory is mapped between GPUs of one host"
        elif source != target and False in known:
            reason = f"atomics of the GPU at {source} do not reach rank {peer} at {target}, and flags are atomics"
        elif source != target and not known:
            reason = (
                f"no rank sees both its GPU at {source} and that of rank {peer} at {target}, so nobody knows whether "
                "atomics reach it, and flags are atomics; let each rank see all GPUs of its host "
                "(CUDA_VISIBLE_DEVICES) and choose one by torch.cuda.set_device"
            )
        if reason:
            raise RuntimeError(
                f"rank {rank} cannot run overlap=MegaKernel(): {reason}; or use Sequential() or Pipelined()"
            )


def require_no_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured. To be called before ``what`` is replaced by a larger one."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would have to grow while a CUDA graph is captured; run a micro-batch of this size once, on all "
            "ranks, before the capture"
        )


def _new_shared_memory(num_bytes: int) -> tuple[Path, Tensor]:
    """Returns a file in memory if the system has such a folder, else one that the system may keep in memory."""
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else None
    descriptor, name = tempfile.mkstemp(prefix="moesys-heap-", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            # All memory is taken now: if it were missing later, the process would end without an error.
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        Path(name).unlink()
        raise OSError(
            error.errno,
            f"{num_bytes / 2**20:.0f} MiB of memory to share between ranks are not to be had in {Path(name).parent}; "
            "give that folder more room, or the layer fewer tokens at once",
        ) from None
    finally:
        os.close(descriptor)
    return Path(name), _map(Path(name))


def _map(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


@triton.jit
def at(world, rank, offset, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a pointer to a region on a rank, or on each of a tensor of ranks."""
    base = tl.load(world + BASES + rank).to(tl.pointer_type(dtype))
    # Regions are aligned, and arenas more so: without the hint a compiler would move one element at a time. It keeps a
    # hint about a sum of a pointer, and forgets one about what is made a pointer.
    return tl.multiple_of(base + offset // (dtype.primitive_bitwidth // 8), 16)


def flags_of_ranks(num_ranks: int) -> Region:
    """Returns a region of one flag for each rank, ``FLAG_WORDS`` apart."""
    return Region((num_ranks, FLAG_WORDS.value), torch.int32)


@triton.jit
def flag_of(world, rank, region, peer):  # type: ignore[no-untyped-def]
    """Returns a pointer to the flag of ``peer`` in such a region on ``rank``; either may be a tensor of ranks."""
    return at(world, rank, region, tl.int32) + peer * FLAG_WORDS


# Copies from an address to another, of the current device or of what it maps, on a stream of it: destination, source,
# bytes, stream.
EngineCopy = Callable[[int, int, int, int], None]

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED.
P2P_NATIVE_ATOMICS = 3


@cache
def cuda_driver() -> ctypes.CDLL | None:
    """Returns libcuda, or None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def copy_engines(device: torch.device) -> EngineCopy | None:
    """Returns the function that has copy engines of ``device`` move bytes: of CuPy's runtime if it is installed, else
    of the driver; None if there is neither.
    """
    if device.type != "cuda":
        return None
    try:
        from cupy.cuda import runtime  # type: ignore[import-not-found]
    except ImportError:
        driver = cuda_driver()
        return None if driver is None else partial(_copy_by_driver, driver)
    return lambda destination, source, num_bytes, stream: runtime.memcpyAsync(
        destination, source, num_bytes, runtime.memcpyDefault, stream
    )


def _copy_by_driver(driver: ctypes.CDLL, destination: int, source: int, num_bytes: int, stream: int) -> None:
    error = driver.cuMemcpyAsync(
        ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
    )
    if error:
        raise RuntimeError(
            f"CUDA's driver does not copy {num_bytes} bytes from {source:#x} to {destination:#x}: error {error} of "
            "cuMemcpyAsync; the memory is mapped on no GPU here, or a kernel failed before"
        )


def gpu_address(device: torch.device) -> str:
    """Returns the name that all processes of a host have for a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def atomics_reach(source: str, target: str) -> bool | None:
    """Returns whether atomics of the GPU at ``source`` (``gpu_address``) reach the memory of the one at ``target``;
    None if the driver does not say, as for GPUs that ``CUDA_VISIBLE_DEVICES`` hides.
    """
    driver, found = cuda_driver(), ctypes.c_int()
    places = {gpu_address(torch.device("cuda", place)): place for place in range(torch.cuda.device_count())}
    if driver is None or not {source, target} <= places.keys():
        return None
    error = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), P2P_NATIVE_ATOMICS, places[source], places[target])
    return None if error else bool(found.value)
