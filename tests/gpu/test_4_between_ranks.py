"""GPU checks of what ranks exchange data by: torch's collectives, each other's memory, and copies by address."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from gpu_layers import synchronize_ranks
from gpu_ranks import GpuRank

from moesys.kernels.symmetric.heap import BASES, Heap, Region, copy_engines
from moesys.kernels.symmetric.pulls import Copy, start_copies

pytestmark = pytest.mark.gpu(layer="between ranks", after=("device",))

# The words that each rank shows the others.
WORDS, REHEARSED_WORDS = 1 << 24, 1000
# The bytes by which both ends of a copy are moved, for words of 16 bytes, of 4, and single bytes.
OFFSETS = ((0, 0), (4, 8), (1, 3))


@pytest.mark.gpu(limit_s=60, ranks="together")
def test_collectives(gpu: GpuRank) -> str:
    """NCCL adds, gathers and exchanges integers correctly; in a rehearsal gloo does."""
    device, ranks = gpu.device, gpu.num_ranks
    if not gpu.rehearsed and dist.get_backend() == "gloo":
        pytest.skip("NCCL needs one GPU per rank, and ranks share one")
    own = torch.arange(ranks * 4, device=device) + 100 * gpu.rank
    total = own.clone()
    dist.all_reduce(total)
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own)
    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own)
    of_ranks = torch.stack([torch.arange(ranks * 4) + 100 * rank for rank in range(ranks)])
    for name, found, right in (
        ("all_reduce", total, of_ranks.sum(0)),
        ("all_gather", torch.stack(gathered), of_ranks),
        ("all_to_all", exchanged, of_ranks.view(ranks, ranks, 4)[:, gpu.rank].flatten()),
    ):
        assert torch.equal(found.cpu(), right), f"{name} gave {found.flatten()[:8].tolist()} and more"
    version = "" if gpu.rehearsed else f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"{dist.get_backend()}{version}: {ranks} ranks"


@pytest.mark.gpu(limit_s=60, ranks="together")
def test_shared_memory(gpu: GpuRank) -> str:
    """Torch's symmetric memory maps every rank's arena into all others, at the addresses that it returns."""
    device, words = gpu.device, REHEARSED_WORDS if gpu.rehearsed else WORDS
    heap = Heap.of_group({"words": Region((words,), torch.int32)}, dist.group.WORLD, device)
    bases = heap.world[BASES.value :].tolist()
    assert bases[gpu.rank] == heap.arena.data_ptr(), f"{bases[gpu.rank]:#x} is not where the arena begins"
    pattern = torch.arange(words, dtype=torch.int32, device=device)
    heap.own("words").copy_(pattern * 7 + gpu.rank)
    synchronize_ranks(gpu)
    for peer, base in enumerate(bases):
        found = torch.empty_like(pattern)
        start_copies([Copy(found.data_ptr(), base + heap.offset("words"), found.nbytes)], device)
        wrong = int((found != pattern * 7 + peer).sum())
        assert not wrong, f"{wrong} of {words} words of rank {peer} are not what it wrote"
    synchronize_ranks(gpu)
    return f"{gpu.num_ranks} arenas of {words * 4 / 2**20:.3g} MiB, read by every rank"


@pytest.mark.gpu(limit_s=30)
def test_copies(gpu: GpuRank) -> str:
    """Copies by address arrive unchanged, aligned to wide words or not, by copy engines where the driver has them."""
    device, num_bytes = gpu.device, 1000 if gpu.rehearsed else 1 << 26
    source = torch.randint(0, 256, (num_bytes + 16,), dtype=torch.uint8, device=device)
    for to, start in OFFSETS:
        found = torch.zeros_like(source)
        start_copies([Copy(found.data_ptr() + to, source.data_ptr() + start, num_bytes)], device)
        right = torch.zeros_like(source)
        right[to : to + num_bytes] = source[start : start + num_bytes]
        assert torch.equal(found, right), f"{num_bytes} bytes from {start} to {to} did not arrive unchanged"
    if gpu.rehearsed:
        return "by Triton's interpreter"
    if copy_engines(device) is None:
        return "by Triton's programs"
    return f"by copy engines, through {'CuPy' if importlib.util.find_spec('cupy') else 'the driver'}"
