"""GPU checks of flags in memory: everything that was stored before a flag was raised can be read behind it.

W words of a payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from gpu_ranks import GpuRank
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, Heap, Region, at
from moesys.kernels.symmetric.signals import PUBLISH, raise_flag, raise_if_given_up, wait

pytestmark = pytest.mark.gpu(layer="flags in memory")

# 4 KB, of which each of a program's 128 threads stores several words.
WORDS = 1024
ROUNDS, REHEARSED_ROUNDS = 1_000_000, 100
# Where ranks share a GPU, each round waits for milliseconds until the driver has given the other rank its turn.
ROUNDS_IN_TURNS = 2_000
# The rounds of one launch end within a second, so that a process that has to end can.
LAUNCHED = 100_000
# Two payloads, used in turn, as a peer may be one round ahead. It is never two rounds ahead, because its flag of the
# round between follows its own reading of the last payload.
REGIONS = {"payload": Region((2, WORDS), torch.int32), "flag": Region((1,), torch.int32)}


@pytest.mark.gpu(limit_s=60, after=("device",))
def test_rounds_on_one_gpu(gpu: GpuRank) -> str:
    """In a million rounds of publish and wait between virtual ranks, every payload is there when its flag is."""
    # Two ranks on two streams. In the interpreter, where programs run one by one, one rank plays with itself.
    ranks = 1 if gpu.rehearsed else 2
    heaps = Heap.virtual(REGIONS, ranks, gpu.device)
    rounds = REHEARSED_ROUNDS if gpu.rehearsed else ROUNDS
    wrong = [torch.zeros(WORDS, dtype=torch.int64, device=gpu.device) for _ in heaps]
    for first in range(1, rounds + 1, LAUNCHED):
        _launch(heaps, [ranks - 1 - rank for rank in range(ranks)], first, min(LAUNCHED, rounds + 1 - first), wrong)
    _check_payloads(wrong, heaps)
    return f"{rounds} rounds of {4 * WORDS} bytes between {ranks} virtual ranks"


@pytest.mark.gpu(limit_s=90, ranks="together", after=("shared memory", "rounds on one gpu"))
def test_rounds(gpu: GpuRank) -> str:
    """In a million rounds of publish and wait for every pair of ranks, every payload is there when its flag is."""
    device = gpu.device
    heap = Heap.of_group(REGIONS, dist.group.WORLD, device)
    in_turns = ROUNDS_IN_TURNS if gpu.ranks_per_gpu > 1 else ROUNDS
    rounds, pairings = REHEARSED_ROUNDS if gpu.rehearsed else in_turns, triton.next_power_of_2(gpu.num_ranks) - 1
    wrong, epoch = torch.zeros(WORDS, dtype=torch.int64, device=device), 1
    for distance in range(1, pairings + 1):
        peer = heap.rank ^ distance
        for first in range(epoch, epoch + rounds, LAUNCHED):
            if peer < gpu.num_ranks:
                _launch([heap], [peer], first, min(LAUNCHED, epoch + rounds - first), [wrong])
        raise_if_given_up(heap)
        # A flag does not tell who raised it, so no pair begins while another plays.
        dist.barrier()
        epoch += rounds
    _check_payloads([wrong], [heap])
    return f"{rounds} rounds of {4 * WORDS} bytes for each of {pairings} pairings of {gpu.num_ranks} ranks"


def _launch(heaps: Sequence[Heap], peers: Sequence[int], first: int, rounds: int, wrong: Sequence[Tensor]) -> None:
    """Launches one program per rank, each on a stream of its own where there are several."""
    device = heaps[0].arena.device
    streams = [torch.cuda.Stream(device) for _ in heaps] if len(heaps) > 1 else []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    for number, (heap, peer, of_rank) in enumerate(zip(heaps, peers, wrong, strict=True)):
        with torch.cuda.stream(streams[number] if streams else None):
            _rounds[(1,)](
                heap.world,
                heap.offset("payload"),
                heap.offset("flag"),
                peer,
                first,
                rounds,
                of_rank,
                W=WORDS,
                num_warps=4,
            )
    for stream in streams:
        torch.cuda.current_stream(device).wait_stream(stream)


def _check_payloads(wrong: Sequence[Tensor], heaps: Sequence[Heap]) -> None:
    for heap in heaps:
        raise_if_given_up(heap)
    number = sum(int(of_rank.sum()) for of_rank in wrong)
    assert number == 0, f"{number} words were not there when their flag was"


@kernel(do_not_specialize=["peer", "first", "rounds"])
def _rounds(world, payload, flag, peer, first, rounds, wrong_ptr, W: tl.constexpr):
    own, word, lane = tl.load(world + RANK), tl.arange(0, W), tl.arange(0, 1)
    mine, theirs = at(world, own, payload, tl.int32), at(world, peer, payload, tl.int32)
    flag_here, flag_there = at(world, own, flag, tl.int32) + lane, at(world, peer, flag, tl.int32) + lane
    wrong = tl.zeros([W], tl.int64)
    for turn in range(rounds):
        epoch = first + turn
        place = (epoch % 2) * W + word
        tl.store(theirs + place, _payload(epoch, own, word))
        raise_flag(flag_there, epoch)
        wait(flag_here, lane < 1, epoch, peer + lane, lane - 1, lane, PUBLISH, world)
        wrong += (tl.load(mine + place) != _payload(epoch, peer, word)).to(tl.int64)
    tl.store(wrong_ptr + word, tl.load(wrong_ptr + word) + wrong)


@triton.jit
def _payload(epoch, source, word):
    """Returns another number for every epoch, rank and word."""
    return (epoch * 40503 + source.to(tl.int32) * 9973 + word).to(tl.int32)
