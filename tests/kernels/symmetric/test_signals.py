"""Ranks reach each other's arenas and wait for each other's flags, and none waits for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from conftest import PreparedRanks

from moesys.kernels.symmetric.heap import Heap, Region, at
from moesys.kernels.symmetric.signals import (
    PUBLISH,
    SPOILERS,
    PeerTimeoutError,
    raise_flag,
    raise_if_given_up,
    spoil_if_given_up,
    wait,
)
from moesys.lab.ranks.pool import LocalRanks

LANES = 8
REGIONS = {
    "numbers": Region((4, LANES), torch.float32),
    # Its end lies inside a cache line.
    "odd": Region((3,), torch.int16),
    "ready": Region((4,), torch.int32),
}
SHORT_S = 0.75


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[LocalRanks]:
    with PreparedRanks(4) as pool:
        yield pool


@triton.jit
def _tell(world, numbers, ready, rank, epoch, num_ranks, N: tl.constexpr):
    """Every peer gets this rank's numbers, then its flag."""
    lane = tl.arange(0, N)
    for peer in range(num_ranks):
        tl.store(at(world, peer, numbers, tl.float32) + rank * N + lane, rank * 100.0 + lane + 1000.0 * epoch)
    peer = tl.arange(0, 4)
    raise_flag(at(world, peer % num_ranks, ready, tl.int32) + rank, epoch, peer < num_ranks)


@triton.jit
def _hear(world, ready, rank, epoch, num_ranks, numbers_ptr, out_ptr, N: tl.constexpr):
    """This rank's arena as it is when all flags are up; lanes without a rank point to flags that nobody raises."""
    peer = tl.arange(0, 4)
    flags = at(world, rank, ready, tl.int32)
    wait(flags + peer, peer < num_ranks, epoch, peer, peer + 10, peer + 20, PUBLISH, world)
    place = tl.arange(0, 4 * N)
    tl.store(out_ptr + place, tl.load(at(world, rank, numbers_ptr, tl.float32) + place))


def hear(heap: Heap, epoch: int) -> torch.Tensor:
    heard = torch.full((4, LANES), float("nan"))
    ready, numbers = heap.offset("ready"), heap.offset("numbers")
    _hear[(1,)](heap.world, ready, heap.rank, epoch, heap.num_ranks, numbers, heard, LANES)
    return heard


def tell(heap: Heap, epoch: int) -> None:
    ready, numbers = heap.offset("ready"), heap.offset("numbers")
    _tell[(1,)](heap.world, numbers, ready, heap.rank, epoch, heap.num_ranks, LANES)


def everything_arrives(late_s: float) -> list[torch.Tensor]:
    heap = Heap.between_processes(REGIONS, dist.group.WORLD)
    heard = []
    for epoch in (1, 2):
        if heap.rank == 1:
            time.sleep(late_s)
        tell(heap, epoch)
        heard.append(hear(heap, epoch))
        raise_if_given_up(heap)
        # Nobody tells of the next epoch while somebody listens to this one.
        dist.barrier()
    return heard


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_what_lies_behind_a_raised_flag_is_seen(ranks: LocalRanks, num_ranks: int) -> None:
    """Rank 1 is late: whoever did not wait would hear of the epoch before."""
    for heard in ranks.run(everything_arrives, 0.3, num_ranks=num_ranks):
        for epoch, numbers in enumerate(heard, 1):
            expected = torch.arange(4)[:, None] * 100.0 + torch.arange(LANES) + 1000.0 * epoch
            expected[num_ranks:] = 0
            assert torch.equal(numbers, expected)


def hears_of_the_dead(victim: int, dies: bool) -> tuple[list[str], list[int], list[float]]:
    """Two calls: what each says, for whom it waited, and how long it took."""
    heap = Heap.between_processes(REGIONS, dist.group.WORLD, SHORT_S)
    tell(heap, 1)
    # A busy machine may take longer than the time-out until all have told.
    dist.barrier()
    hear(heap, 1)
    raise_if_given_up(heap)
    if heap.rank == victim:
        if dies:
            os._exit(1)
        time.sleep(4 * SHORT_S)
    else:
        tell(heap, 2)
    errors, peers, seconds = [], [], []
    for epoch in (2, 3):
        began = time.monotonic()
        hear(heap, epoch)
        with pytest.raises(PeerTimeoutError) as raised:
            raise_if_given_up(heap)
        errors.append(str(raised.value))
        peers.append(raised.value.peer)
        seconds.append(time.monotonic() - began)
    return errors, peers, seconds


@pytest.mark.parametrize("dies", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["dead", "late"])
def test_every_rank_names_who_was_waited_for(mortal_ranks: LocalRanks, dies: bool) -> None:
    victim = 2
    outcomes = mortal_ranks.outcomes(hears_of_the_dead, victim, dies, expect_dead={victim} if dies else ())
    for outcome in outcomes:
        if outcome.rank == victim and dies:
            continue
        assert outcome.kind == "returned", outcome
        errors, peers, seconds = outcome.result
        assert peers == [victim, victim]
        for error in errors:
            assert f"waited {SHORT_S:g} s for rank {victim} in publish: flag 22 of expert 12" in error
            assert "is at epoch 1, not 2" in error
        # What a busy machine adds; the second call does not wait at all.
        assert seconds[0] < 3 * SHORT_S
        assert seconds[1] < 0.5 * SHORT_S


def test_a_wait_ends_by_the_clock_however_long_a_poll_takes_and_the_last_wait_is_ago() -> None:
    """The time on which threads agree is kept where that of the last wait was."""
    waiting = Heap.virtual(REGIONS, 2, "cpu", timeout_s=0.5)[0]
    waiting.own("seen_ns")[:] = time.perf_counter_ns() - 3600 * 10**9
    began = time.monotonic()
    hear(waiting, 1)
    # A busy machine adds a poll.
    assert 0.5 <= time.monotonic() - began < 2.5


def test_a_rank_that_is_told_says_who_gave_up() -> None:
    told, waiting = Heap.virtual(REGIONS, 2, "cpu", timeout_s=0.01)
    raise_if_given_up(told)
    hear(waiting, 7)
    with pytest.raises(PeerTimeoutError, match=r"^rank 1 waited 0.01 s for rank 0 in publish: flag 20 of expert 10 is"):
        raise_if_given_up(waiting)
    with pytest.raises(PeerTimeoutError, match=r"^rank 0 stopped: rank 1 waited .* epoch 0, not 7; rank 0 is dead"):
        raise_if_given_up(told)


@pytest.mark.parametrize("gave_up", [False, True])
def test_what_was_given_up_becomes_nan_and_nothing_beside_it(gave_up: bool) -> None:
    heap, waiting = Heap.virtual(REGIONS, 2, "cpu", timeout_s=0.01)
    if gave_up:
        hear(waiting, 1)
    slots, plain = torch.zeros(3, 5, 7, dtype=torch.bfloat16), torch.zeros(SPOILERS + 3, 2)
    spoil_if_given_up(heap, [slots[:, 1:4], plain, plain[:0]])
    assert slots[:, 1:4].isnan().all().item() is gave_up
    assert plain.isnan().all().item() is gave_up
    assert not slots[:, :1].isnan().any()
    assert not slots[:, 4:].isnan().any()
