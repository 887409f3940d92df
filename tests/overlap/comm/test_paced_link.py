"""A channel over a paced link moves the right data, and takes at least the time of its link."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.paced_link import PacedLink
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.comm.record import Meter, Recorder


def channel_over(group: dist.ProcessGroup, gb_per_s: float | None) -> Channel:
    channel = Channel(group, range(dist.get_world_size(group)), Recorder(dist.get_rank()), Meter())
    channel.failure_grace_s = 0.1
    if gb_per_s is not None:
        channel.link = PacedLink(group, gb_per_s)
    return channel


def spread_from_first(channel: Channel, num_floats: int) -> Transfer:
    """Rank 0 sends so many floats to each peer, the others nothing."""
    sent = [num_floats * (channel.rank == 0 and peer > 0) for peer in range(channel.num_ranks)]
    received = [num_floats * (channel.rank > 0)] + [0] * (channel.num_ranks - 1)
    out, rows = torch.empty(sum(received)), torch.ones(sum(sent))
    return channel.all_to_all(out, rows, received, sent, lane="dispatch")


def all_kinds_of_rows() -> None:
    """Raises on a rank where an all-to-all over a paced link differs from the same without one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # From rank s to rank d go s + 2·d rows: uneven, and none from rank 0 to itself.
    in_counts = [rank + 2 * peer for peer in range(size)]
    out_counts = [peer + 2 * rank for peer in range(size)]
    rows = torch.arange(sum(in_counts) * 3.0).reshape(-1, 3) + 100 * rank
    results = []
    for pace in (None, 100.0):
        channel = channel_over(dist.group.WORLD, pace)
        exchanged = torch.full((2, sum(out_counts), 3), -1.0)
        transfers = [channel.all_to_all(out, rows, out_counts, in_counts, lane="dispatch") for out in exchanged]
        for transfer in transfers:
            transfer.wait()
        assert torch.equal(channel.all_gather(torch.tensor([rank]), lane="counts")[:, 0], torch.arange(size))
        if channel.link is not None:
            channel.link.close()
        results.append(exchanged)
    assert torch.equal(*results)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_data_is_that_without_a_link(ranks: LocalRanks, num_ranks: int) -> None:
    ranks.run(all_kinds_of_rows, num_ranks=num_ranks)


@dataclass(frozen=True)
class Spans:
    """Seconds on the monotonic clock: two transfers of 50 ms each, and the sleep beside them."""

    issued_s: float
    ended_s: tuple[float, float]
    slept_s: tuple[float, float]
    early: tuple[bool, bool]


def two_beside_a_sleep() -> Spans:
    channel = channel_over(dist.group.WORLD, 0.1)
    dist.barrier()
    ends: dict[int, float] = {}
    issued_s = time.monotonic()
    transfers = [spread_from_first(channel, 5_000_000 // 4) for _ in range(2)]
    futures = [transfer._work.get_future() for transfer in transfers]
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ends.setdefault(index, time.monotonic()))
    early = (futures[0].done(), futures[1].done())
    sleep_s = time.monotonic()
    time.sleep(0.08)
    woke_s = time.monotonic()
    for transfer in transfers:
        transfer.wait()
    channel.link.close()
    return Spans(issued_s, (ends[0], ends[1]), (sleep_s, woke_s), early)


def test_transfers_queue_up_and_run_beside_the_main_thread(ranks: LocalRanks) -> None:
    for spans in ranks.run(two_beside_a_sleep, num_ranks=2):
        first_s, second_s = spans.ended_s
        assert spans.early == (False, False)
        assert first_s - spans.issued_s >= 0.05
        assert second_s - spans.issued_s >= 0.1
        beside_s = min(spans.slept_s[1], second_s) - max(spans.slept_s[0], spans.issued_s)
        assert beside_s > 0.05


def late_peer() -> float:
    channel = channel_over(dist.group.WORLD, 0.1)
    dist.barrier()
    begin_s = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    spread_from_first(channel, 5_000_000 // 4).wait()
    return time.monotonic() - begin_s


def test_the_link_is_used_only_when_the_last_rank_has_come(ranks: LocalRanks) -> None:
    assert ranks.run(late_peer, num_ranks=2)[0] >= 0.14


def subgroup_bytes() -> int:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    for _ in range(2):
        channel = channel_over(halves[rank // 2], 1.0)
        spread_from_first(channel, 8).wait()
    return channel.meter.bytes_of("dispatch")


def test_subgroups_have_links_of_their_own(ranks: LocalRanks) -> None:
    assert ranks.run(subgroup_bytes, num_ranks=3) == [0, 32, 0]


def wait_for_a_peer_that_left() -> str:
    channel = channel_over(dist.group.WORLD, 1.0)
    if dist.get_rank() == 1:
        channel.link.close()
        return ""
    transfer = spread_from_first(channel, 1)
    called = threading.Event()
    transfer._work.get_future().add_done_callback(lambda _: called.set())
    try:
        transfer.wait()
    except RuntimeError as error:
        assert called.wait(10)
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_peer_that_leaves_fails_the_transfer(ranks: LocalRanks) -> None:
    assert "by peer" in ranks.run(wait_for_a_peer_that_left, num_ranks=2)[0]
