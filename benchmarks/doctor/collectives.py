"""What ranks talk through: torch's collectives, each other's memory, and copies by address."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from benchmarks.doctor.place import LeftOutError, Place, require
from moesys.kernels.symmetric.copies import Copy, start_copies
from moesys.kernels.symmetric.cuda_driver import copy_engines
from moesys.kernels.symmetric.heap import BASES, Heap, Region

# Of what each rank shows the others.
WORDS, REHEARSED_WORDS = 1 << 24, 1000
# Bytes by which both ends of a copy are moved: words of 16, of 4, and single bytes.
MOVED = ((0, 0), (4, 8), (1, 3))


def collectives_add_up(place: Place) -> str:
    """NCCL's, on integers, whose sums are exact; in a rehearsal gloo's."""
    device, ranks = place.device, place.num_ranks
    if not place.rehearsed and dist.get_backend() == "gloo":
        raise LeftOutError("NCCL takes a GPU for each rank, and here ranks share one")
    own = torch.arange(ranks * 4, device=device) + 100 * place.rank
    total = own.clone()
    dist.all_reduce(total)
    everyones = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyones, own)
    swapped = torch.empty_like(own)
    dist.all_to_all_single(swapped, own)
    of_ranks = torch.stack([torch.arange(ranks * 4) + 100 * rank for rank in range(ranks)])
    for name, found, right in (
        ("all_reduce", total, of_ranks.sum(0)),
        ("all_gather", torch.stack(everyones), of_ranks),
        ("all_to_all", swapped, of_ranks.view(ranks, ranks, 4)[:, place.rank].flatten()),
    ):
        require(torch.equal(found.cpu(), right), f"{name} gave {found.flatten()[:8].tolist()} and more")
    version = "" if place.rehearsed else f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"{dist.get_backend()}{version}: {ranks} ranks"


def memory_is_shared(place: Place) -> str:
    """Every rank reads what all others have written into arenas of their own, by address."""
    device, words = place.device, REHEARSED_WORDS if place.rehearsed else WORDS
    heap = Heap.of_group({"words": Region((words,), torch.int32)}, dist.group.WORLD, device)
    bases = heap.world[BASES.value :].tolist()
    require(bases[place.rank] == heap.arena.data_ptr(), f"{bases[place.rank]:#x} is not where the arena begins")
    pattern = torch.arange(words, dtype=torch.int32, device=device)
    heap.own("words").copy_(pattern * 7 + place.rank)
    _meet(device)
    for peer, base in enumerate(bases):
        seen = torch.empty_like(pattern)
        start_copies([Copy(seen.data_ptr(), base + heap.offset("words"), seen.nbytes)], device)
        wrong = int((seen != pattern * 7 + peer).sum())
        require(not wrong, f"{wrong} of {words} words of rank {peer} are not what it wrote")
    _meet(device)
    return f"{place.num_ranks} arenas of {words * 4 / 2**20:.3g} MiB, read by every rank"


def copies_arrive(place: Place) -> str:
    """Bytes by address, at places that allow wide words and at others: by copy engines where there is a driver."""
    device, num_bytes = place.device, 1000 if place.rehearsed else 1 << 26
    source = torch.randint(0, 256, (num_bytes + 16,), dtype=torch.uint8, device=device)
    for to, came in MOVED:
        found = torch.zeros_like(source)
        start_copies([Copy(found.data_ptr() + to, source.data_ptr() + came, num_bytes)], device)
        right = torch.zeros_like(source)
        right[to : to + num_bytes] = source[came : came + num_bytes]
        require(torch.equal(found, right), f"{num_bytes} bytes from {came} to {to} did not arrive as they were")
    if place.rehearsed:
        return "by Triton's interpreter"
    if copy_engines(device) is None:
        return "by Triton's programs"
    return f"by copy engines, through {'CuPy' if importlib.util.find_spec('cupy') else 'the driver'}"


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
