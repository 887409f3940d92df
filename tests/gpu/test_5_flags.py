"""GPU checks of flags in memory: everything that was stored before a flag was raised can be read behind it.

W words of a payload.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from gpu_ranks import GpuRank
from torch import Tensor

from moesys.kernels.experts.products import INTERPRETED
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, ArenaLayout, Heap, Region, at
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


# The other rank of ``_rounds``, as a function that the host runs.
PEER = r"""
#include <stdint.h>
#include <time.h>

int64_t play(
    int32_t *mine, int32_t *flag_here, int32_t *theirs, int32_t *flag_there, int rounds, int words, int seconds
) {
    int64_t wrong = 0;
    time_t end = time(0) + seconds;
    for (int32_t epoch = 1; epoch <= rounds; epoch++) {
        int32_t *sent = theirs + epoch % 2 * words, *found = mine + epoch % 2 * words;
        for (int word = 0; word < words; word++)
            sent[word] = (uint32_t)epoch * 40503u + 9973u + word;
        __atomic_store_n(flag_there, epoch, __ATOMIC_RELEASE);
        while (__atomic_load_n(flag_here, __ATOMIC_ACQUIRE) < epoch)
            if (time(0) > end)
                return -epoch;
        for (int word = 0; word < words; word++)
            wrong += found[word] != (int32_t)((uint32_t)epoch * 40503u + word);
    }
    return wrong;
}
"""
# The host gives a GPU up after so many seconds, and a GPU the host after so many loads, of a microsecond each.
PEER_S, MOST_POLLS = 60, tl.constexpr(1 << 24)


@pytest.mark.gpu(limit_s=90, after=("device",))
def test_rounds_with_the_host(gpu: GpuRank) -> str:
    """In a million rounds with a thread of the host, over the real bus, every payload is there when its flag is."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler, cc, for the host's part")
    with TemporaryDirectory() as folder:
        library = Path(folder) / "peer.so"
        given = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(given, input=PEER, text=True, check=True)
        play = ctypes.CDLL(str(library)).play
    play.restype = ctypes.c_int64
    rounds = REHEARSED_ROUNDS if gpu.rehearsed else ROUNDS
    assert _played_with(play, gpu.device, rounds) == 0, "words were not there when their flag was"
    # Otherwise nothing was proven.
    assert _played_with(play, gpu.device, REHEARSED_ROUNDS, early=True) > 0, "a flag before its payload went unnoticed"
    return f"{rounds} rounds of {4 * WORDS} bytes between a GPU and its host; a planted fault was found"


def _played_with(play: Any, device: torch.device, rounds: int, *, early: bool = False) -> int:
    """The words that either rank missed: rank 0 is a program, rank 1 the host, and both arenas are the host's."""
    layout = ArenaLayout.of(REGIONS)
    arenas = [torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(2)]
    if device.type == "cuda":
        arenas = [arena.pin_memory() for arena in arenas]
    bases = [arena.data_ptr() for arena in arenas]
    world = torch.tensor([2, 0, 0, *bases], dtype=torch.int64, device=device)
    wrong = torch.zeros(WORDS, dtype=torch.int64, device=device)
    regions = [base + layout.offset[name] for base in bases[::-1] for name in ("payload", "flag")]
    with ThreadPoolExecutor(1) as host:
        played = host.submit(play, *map(ctypes.c_void_p, regions), rounds, WORDS, PEER_S)
        for first in range(1, rounds + 1, LAUNCHED):
            chunk = min(LAUNCHED, rounds + 1 - first)
            offsets = layout.offset["payload"], layout.offset["flag"]
            _rounds_with_host[(1,)](world, *offsets, first, chunk, wrong, W=WORDS, EARLY=early, num_warps=4)
        missed_here, missed_there = int(wrong.sum()), played.result()
    assert missed_there >= 0, f"the host waited {PEER_S} s for round {-missed_there}"
    return missed_here + missed_there


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


@kernel(do_not_specialize=["first", "rounds"])
def _rounds_with_host(world, payload, flag, first, rounds, wrong_ptr, W: tl.constexpr, EARLY: tl.constexpr):
    """Plays as rank 0. ``EARLY``: a fault, by which a flag is raised before its payload is stored."""
    word, lane = tl.arange(0, W), tl.arange(0, 1)
    mine, theirs = at(world, 0, payload, tl.int32), at(world, 1, payload, tl.int32)
    flag_here, flag_there = at(world, 0, flag, tl.int32) + lane, at(world, 1, flag, tl.int32) + lane
    wrong = tl.zeros([W], tl.int64)
    for turn in range(rounds):
        epoch = first + turn
        place = (epoch % 2) * W + word
        if EARLY:
            raise_flag(flag_there, epoch)
        tl.store(theirs + place, _payload(epoch, tl.load(world + RANK), word))
        if not EARLY:
            raise_flag(flag_there, epoch)
        polls, found = 0, tl.min(_acquired(flag_here), 0)
        while (found < epoch) & (polls < MOST_POLLS):
            polls += 1
            found = tl.min(_acquired(flag_here), 0)
        tl.debug_barrier()
        wrong += (tl.load(mine + place) != _payload(epoch, tl.load(world + RANK) + 1, word)).to(tl.int64)
    tl.store(wrong_ptr + word, tl.load(wrong_ptr + word) + wrong)


@triton.jit
def _acquired(flag):
    """Returns a flag by a load: on few buses a host and a GPU have atomics in common, as GPUs have among each other."""
    if INTERPRETED:
        return tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _payload(epoch, source, word):
    """Returns another number for every epoch, rank and word."""
    return (epoch * 40503 + source.to(tl.int32) * 9973 + word).to(tl.int32)
