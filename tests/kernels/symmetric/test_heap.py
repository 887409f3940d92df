"""Arenas: regions lie apart and at the same places, peers reach them, and nothing of them is left behind."""

from __future__ import annotations

import gc
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from conftest import PreparedRanks

from moesys.kernels.symmetric import heap as module
from moesys.kernels.symmetric.heap import ALIGNMENT, ArenaLayout, Heap, Region, at
from moesys.kernels.torch_internals import symmetric_arena
from moesys.lab.ranks.pool import LocalRanks

REGIONS = {
    "halves": Region((3, 5), torch.bfloat16),
    "nothing": Region((0, 7), torch.float32),
    "numbers": Region((4,), torch.int32),
    "one": Region((1,), torch.int64),
}


@triton.jit
def _read(world, offset, out_ptr, num_ranks, N: tl.constexpr):
    """Each rank's ``N`` numbers, one rank behind the other."""
    lane = tl.arange(0, N)
    for rank in range(num_ranks):
        tl.store(out_ptr + rank * N + lane, tl.load(at(world, rank, offset, tl.int32) + lane))


def read_all(heap: Heap) -> list[list[int]]:
    numbers_RN = torch.full((heap.num_ranks, 4), -1, dtype=torch.int32)
    _read[(1,)](heap.world, heap.offset("numbers"), numbers_RN, heap.num_ranks, 4)
    return numbers_RN.tolist()


def test_regions_lie_apart_behind_those_of_signals() -> None:
    layout = ArenaLayout.of(REGIONS)
    assert list(layout.offset) == ["abort", "report", "seen_ns", *REGIONS]
    # What signals find without being told.
    for name, place in (("abort", module.ABORT), ("report", module.REPORT), ("seen_ns", module.SEEN_NS)):
        assert layout.offset[name] == place.value
    ends = {name: layout.offset[name] + region.num_bytes for name, region in layout.regions.items()}
    for before, behind in pairwise(layout.offset):
        assert ends[before] <= layout.offset[behind]
    assert all(offset % ALIGNMENT == 0 for offset in layout.offset.values())
    assert layout.num_bytes >= max(ends.values())


def test_virtual_ranks_reach_each_other() -> None:
    heaps = Heap.virtual(REGIONS, 3, "cpu")
    for heap in heaps:
        assert not heap.arena.any()
        assert [heap.own(name).shape for name in REGIONS] == [region.shape for region in REGIONS.values()]
        heap.own("halves").fill_(7)
        heap.own("numbers").copy_(torch.arange(4) + 10 * heap.rank)
        heap.own("one").fill_(-1)
    expected = [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert [read_all(heap) for heap in heaps] == [expected] * 3


def test_memory_lasts_while_one_of_its_ranks_does() -> None:
    last = Heap.virtual(REGIONS, 2, "cpu")[1]
    gc.collect()
    assert read_all(last) == [[0] * 4] * 2


def heap_in(folder: Path) -> Heap:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARED_FOLDER", folder)
        return Heap.between_processes(REGIONS, dist.group.WORLD)


class Seen(NamedTuple):
    """What a rank reads of all arenas, and again when its own and rank 0's are gone; and what is left of many heaps."""

    together: list[list[int]]
    later: list[list[int]]
    open_files: list[int]
    mapped_arenas: list[int]
    in_folder: list[str]


def what_processes_see(folder: Path, times: int) -> Seen:
    heap = heap_in(folder)
    heap.own("numbers").copy_(torch.arange(4) + 10 * heap.rank)
    dist.barrier()
    in_folder = os.listdir(folder)
    together = later = read_all(heap)
    # The others' memory is mapped here when its owner has let go.
    if heap.rank == 0:
        del heap
        gc.collect()
    dist.barrier()
    if dist.get_rank():
        later = read_all(heap)
        del heap
        gc.collect()
    files, arenas = [], []
    for _ in range(times):
        heap = heap_in(folder)
        read_all(heap)
        del heap
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        arenas.append(Path("/proc/self/maps").read_text().count("moesys-heap-"))
    dist.barrier()
    return Seen(together, later, files, arenas, in_folder + os.listdir(folder))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_processes_reach_each_other_and_leave_nothing(ranks: LocalRanks, tmp_path: Path) -> None:
    for seen in ranks.run(what_processes_see, tmp_path, 4, num_ranks=3):
        assert seen.together == seen.later == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
        assert len(set(seen.open_files[1:])) == 1
        assert seen.mapped_arenas == [0] * 4
        assert seen.in_folder == []


def die_while_others_map(folder: Path) -> None:
    if dist.get_rank() == 1:
        dist.barrier = lambda group: os._exit(1)
    heap_in(folder)


def test_a_peer_that_dies_meanwhile_leaves_no_file_of_the_others(tmp_path: Path) -> None:
    with PreparedRanks(3) as pool:
        outcomes = pool.outcomes(die_while_others_map, tmp_path, expect_dead={1}, timeout_s=60)
    assert [outcome.kind for outcome in outcomes] == ["raised", "died", "raised"]
    # Its own alone: nothing of a process runs when it is killed.
    assert len(os.listdir(tmp_path)) == 1


def test_memory_that_is_not_to_be_had_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHARED_FOLDER", tmp_path)
    with pytest.raises(OSError, match=rf"1099511627776 MiB of memory .* in {tmp_path}; give that folder more room"):
        module._new_shared_memory(1 << 60)
    assert os.listdir(tmp_path) == []


# Each case: (host of rank 1, where that of rank 0 is "a"; what either rank knows of how atomics of rank 1's GPU reach
# that of rank 0, as in the other direction they do; what is said instead of asking torch for a rendezvous).
REFUSED: list[tuple[str, list[bool | None], str]] = [
    ("b", [True, True], "rank 0 cannot run overlap=MegaKernel(): rank 1 is on host b, and not on a: memory"),
    (
        "a",
        [False, None],
        "rank 1 cannot run overlap=MegaKernel(): atomics of the GPU at 0000:01:00 do not reach rank 0",
    ),
    ("a", [None, None], "rank 1 cannot run overlap=MegaKernel(): no rank sees both its GPU at 0000:01:00 and that of"),
    ("a", [True, None], "met"),
    ("a", [True, True], "met"),
]


def said_before_they_meet() -> list[str]:
    rank, said = dist.get_rank(), []
    for host, reach, _ in REFUSED:
        reaches = reach[rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.platform, "node", lambda host=host: host if rank == 1 else "a")
            patch.setattr(module, "gpu_address", lambda device: f"0000:0{rank}:00")
            patch.setattr(module, "atomics_reach", lambda of, to, reaches=reaches: reaches if of > to else True)
            patch.setattr(module, "symmetric_arena", _rendezvous)
            with pytest.raises(RuntimeError) as raised:
                Heap.of_group(REGIONS, dist.group.WORLD, torch.device("cuda", 0))
        said.append(str(raised.value))
    return said


def _rendezvous(*_: object) -> None:
    raise RuntimeError("met")


def test_gpus_that_do_not_reach_each_other_are_refused_before_they_meet(ranks: LocalRanks) -> None:
    for said in ranks.run(said_before_they_meet, num_ranks=2):
        for message, (*_, words) in zip(said, REFUSED, strict=True):
            assert message.startswith(words)


@pytest.mark.parametrize("offset", [0, 256])
def test_an_arena_begins_where_torchs_handle_says(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """On a pretended GPU, whose second buffer begins behind another tensor; a handle that is wrong is told."""
    buffer = torch.zeros(512, dtype=torch.uint8)
    handle = SimpleNamespace(buffer_ptrs=[77_000, buffer.data_ptr()], rank=1, offset=offset)
    monkeypatch.setattr(symmetric_memory, "empty", lambda *_, **__: buffer[256:])
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: handle)
    if offset == 256:
        arena, bases, kept = symmetric_arena(256, SimpleNamespace(), torch.device("cpu"))
        assert (bases, kept) == ([77_256, arena.data_ptr()], handle)
    else:
        with pytest.raises(RuntimeError, match=r"says that this rank's arena begins at 0x.*, but it does at 0x"):
            symmetric_arena(256, SimpleNamespace(), torch.device("cpu"))
