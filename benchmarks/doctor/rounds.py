"""Rounds of publish and wait, with payloads: is everything there that was stored before a flag was raised?

W words of a payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.doctor.place import Place, require
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, Heap, Region, at
from moesys.kernels.symmetric.signals import PUBLISH, raise_flag, raise_if_given_up, wait

# 4 KB, of which each of a program's 128 threads stores several words.
WORDS = 1024
ROUNDS, REHEARSED_ROUNDS = 1_000_000, 100
# Where ranks share a GPU, each round waits until the driver has given the other its turn, for milliseconds.
ROUNDS_IN_TURNS = 2_000
# Of one launch: as many end within a second, so that a process that is to end can.
LAUNCHED = 100_000


def virtual_rounds_hold(place: Place) -> str:
    """Two ranks on two streams of a GPU; in a rehearsal one that plays with itself, as programs run one by one."""
    ranks = 1 if place.rehearsed else 2
    heaps = Heap.virtual(regions(), ranks, place.device)
    rounds = REHEARSED_ROUNDS if place.rehearsed else ROUNDS
    wrong = [torch.zeros(WORDS, dtype=torch.int64, device=place.device) for _ in heaps]
    for first in range(1, rounds + 1, LAUNCHED):
        _launch(heaps, [ranks - 1 - rank for rank in range(ranks)], first, min(LAUNCHED, rounds + 1 - first), wrong)
    _require_none(wrong, heaps)
    return f"{rounds} rounds of {4 * WORDS} bytes between {ranks} virtual ranks"


def rounds_between_ranks_hold(place: Place) -> str:
    """Every pair of ranks in turn: each stores into the other's memory, and waits for the other."""
    device = place.device
    heap = Heap.of_group(regions(), dist.group.WORLD, device)
    in_turns = ROUNDS_IN_TURNS if place.ranks_of_gpu > 1 else ROUNDS
    rounds, pairings = REHEARSED_ROUNDS if place.rehearsed else in_turns, triton.next_power_of_2(place.num_ranks) - 1
    wrong, epoch = torch.zeros(WORDS, dtype=torch.int64, device=device), 1
    for distance in range(1, pairings + 1):
        peer = heap.rank ^ distance
        for first in range(epoch, epoch + rounds, LAUNCHED):
            if peer < place.num_ranks:
                _launch([heap], [peer], first, min(LAUNCHED, epoch + rounds - first), [wrong])
        raise_if_given_up(heap)
        # A flag says nothing of who raised it: no pair begins while another plays.
        dist.barrier()
        epoch += rounds
    _require_none([wrong], [heap])
    return f"{rounds} rounds of {4 * WORDS} bytes for each of {pairings} pairings of {place.num_ranks} ranks"


def regions() -> dict[str, Region]:
    """Two payloads, used in turn, as a peer may be one round ahead; never two: its flag of the round between is behind
    its own reading of the last.
    """
    return {"payload": Region((2, WORDS), torch.int32), "flag": Region((1,), torch.int32)}


def _launch(heaps: Sequence[Heap], peers: Sequence[int], first: int, rounds: int, wrong: Sequence[Tensor]) -> None:
    """Side by side, one program a rank, on streams of their own where there are several."""
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


def _require_none(wrong: Sequence[Tensor], heaps: Sequence[Heap]) -> None:
    for heap in heaps:
        raise_if_given_up(heap)
    number = sum(int(of_rank.sum()) for of_rank in wrong)
    require(number == 0, f"{number} words were not there when their flag was")


@kernel(do_not_specialize=["peer", "first", "rounds"])
def _rounds(world, payload, flag, peer, first, rounds, wrong_ptr, W: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _payload(epoch, source, word):  # type: ignore[no-untyped-def]
    """Another number for every epoch, rank and word."""
    return (epoch * 40503 + source.to(tl.int32) * 9973 + word).to(tl.int32)
