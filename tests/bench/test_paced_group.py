"""A paced group moves the right data, and takes at least the time of its link."""

import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from moesys.bench.paced_group import Pace, make_paced_group
from moesys.lab.ranks.outcomes import RankError
from moesys.lab.ranks.pool import LocalRanks


def all_kinds_of_data() -> None:
    """Raises on a rank where a collective over the paced group differs from the same over gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    paced = make_paced_group(dist.group.WORLD, gb_per_s=100.0)
    assert (dist.get_rank(paced), dist.get_world_size(paced), dist.get_backend(paced)) == (rank, size, "paced")
    gathered = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scattered = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    # From rank s to rank d go s + 2·d rows: uneven, and none from rank 0 to itself.
    in_splits = [rank + 2 * peer for peer in range(size)]
    out_splits = [peer + 2 * rank for peer in range(size)]
    rows = torch.arange(sum(in_splits) * 3.0).reshape(-1, 3) + 100 * rank
    equal = torch.arange(size * 2.0) + 10 * rank
    for asynchronous in (False, True):
        results = []
        for group in (dist.group.WORLD, paced):
            exchanged = torch.full((sum(out_splits), 3), -1.0)
            evenly = torch.full_like(equal, -1.0)
            all_equal = torch.full((size * equal.numel(),), -1.0)
            listed = [torch.full_like(equal, -1.0) for _ in range(size)]
            share = torch.full((2,), -1.0)
            total, largest, from_last = equal.clone(), equal.clone(), equal.clone()
            works = [
                dist.all_to_all_single(exchanged, rows, out_splits, in_splits, group=group, async_op=asynchronous),
                dist.all_to_all_single(evenly, equal, group=group, async_op=asynchronous),
                gathered(all_equal, equal, group=group, async_op=asynchronous),
                dist.all_gather(listed, equal, group=group, async_op=asynchronous),
                scattered(share, equal, group=group, async_op=asynchronous),
                dist.all_reduce(total, group=group, async_op=asynchronous),
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=asynchronous),
                dist.broadcast(from_last, size - 1, group=group, async_op=asynchronous),
                dist.barrier(group, async_op=asynchronous),
            ]
            for work in works:
                if asynchronous:
                    work.wait()
                    assert work.is_completed() or group is dist.group.WORLD
                else:
                    assert work is None
            objects: list[object] = [None] * size
            dist.all_gather_object(objects, {"rank": rank}, group=group)
            assert objects == [{"rank": peer} for peer in range(size)]
            results.append([exchanged, evenly, all_equal, *listed, share, total, largest, from_last])
        for over_gloo, over_link in zip(*results, strict=True):
            assert torch.equal(over_gloo, over_link)
    dist.destroy_process_group(paced)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_data_is_that_of_gloo(ranks: LocalRanks, num_ranks: int) -> None:
    ranks.run(all_kinds_of_data, num_ranks=num_ranks)


def seconds_of_each() -> dict[str, tuple[float, float]]:
    """Measured and least seconds of collectives over 0.1 GB/s and 2 ms."""
    size, rank = dist.get_world_size(), dist.get_rank()
    paced = make_paced_group(dist.group.WORLD, gb_per_s=0.1, latency_us=2000.0)
    gathered = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    # Rank 0 sends 250,000 floats to each peer, the others nothing.
    sent = [250_000] * size if rank == 0 else [0] * size
    received = [250_000] + [0] * (size - 1)
    out, rows = torch.empty(sum(received)), torch.ones(sum(sent))
    value, values = torch.ones(250_000), torch.empty(size * 250_000)
    mb = {
        "all_to_all": (
            lambda: dist.all_to_all_single(out, rows, received, sent, group=paced),
            (size - 1) * (rank == 0) + (rank != 0),
        ),
        "all_gather": (lambda: gathered(values, value, group=paced), size - 1),
        "all_reduce": (lambda: dist.all_reduce(value, group=paced), 2 * (size - 1) / size),
        "broadcast": (lambda: dist.broadcast(value, 0, group=paced), 1),
        "barrier": (lambda: dist.barrier(paced), 0),
    }
    seconds = {}
    for name, (collective, num_mb) in mb.items():
        begin_s = time.monotonic()
        collective()
        seconds[name] = (time.monotonic() - begin_s, 2e-3 + num_mb * 1e-2)
    return seconds


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_collective_takes_latency_and_bytes_over_bandwidth(ranks: LocalRanks, num_ranks: int) -> None:
    for seconds in ranks.run(seconds_of_each, num_ranks=num_ranks):
        for name, (measured_s, least_s) in seconds.items():
            assert measured_s >= least_s, name


@dataclass(frozen=True)
class Spans:
    """Seconds on the monotonic clock: two collectives of 50 ms each, and the sleep beside them."""

    issued_s: float
    ended_s: tuple[float, float]
    slept_s: tuple[float, float]
    cpu_s: float
    early: tuple[bool, bool]


def two_beside_a_sleep() -> Spans:
    paced = make_paced_group(dist.group.WORLD, gb_per_s=0.1)
    values = [torch.ones(5_000_000 // 4) for _ in range(2)]
    dist.barrier(paced)
    ends: dict[int, float] = {}
    cpu_s = time.process_time()
    issued_s = time.monotonic()
    works = [dist.broadcast(value, 0, group=paced, async_op=True) for value in values]
    futures = [work.get_future() for work in works]
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ends.setdefault(index, time.monotonic()))
    chained = futures[1].then(lambda done: done.value()[0] is values[1])
    early = (works[0].is_completed(), works[1].is_completed())
    sleep_s = time.monotonic()
    time.sleep(0.08)
    woke_s = time.monotonic()
    for work in works:
        work.wait()
    assert chained.wait()
    return Spans(issued_s, (ends[0], ends[1]), (sleep_s, woke_s), time.process_time() - cpu_s, early)


def test_collectives_queue_up_and_run_beside_the_main_thread(ranks: LocalRanks) -> None:
    for spans in ranks.run(two_beside_a_sleep, num_ranks=2):
        first_s, second_s = spans.ended_s
        assert spans.early == (False, False)
        assert first_s - spans.issued_s >= 0.05
        assert second_s - spans.issued_s >= 0.1
        beside_s = min(spans.slept_s[1], second_s) - max(spans.slept_s[0], spans.issued_s)
        assert beside_s > 0.05
        assert spans.cpu_s < 0.1


def late_peer() -> float:
    paced = make_paced_group(dist.group.WORLD, gb_per_s=0.1)
    value = torch.ones(5_000_000 // 4)
    dist.barrier()
    begin_s = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    dist.broadcast(value, 0, group=paced)
    return time.monotonic() - begin_s


def test_the_link_is_used_only_when_the_last_rank_has_come(ranks: LocalRanks) -> None:
    assert ranks.run(late_peer, num_ranks=2)[0] >= 0.14


def subgroup_sums() -> float:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    paced = make_paced_group(halves[rank // 2], gb_per_s=1.0)
    again = make_paced_group(halves[rank // 2], gb_per_s=1.0)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=paced)
    dist.all_reduce(value, group=again)
    return value.item()


def test_subgroups_have_links_of_their_own(ranks: LocalRanks) -> None:
    assert ranks.run(subgroup_sums, num_ranks=3) == [2.0, 2.0, 2.0]


def wait_for_a_peer_that_left() -> str:
    paced = make_paced_group(dist.group.WORLD, gb_per_s=1.0)
    if dist.get_rank() == 1:
        dist.destroy_process_group(paced)
        return ""
    work = dist.all_reduce(torch.ones(1), group=paced, async_op=True)
    called = threading.Event()
    work.get_future().add_done_callback(lambda _: called.set())
    try:
        work.wait()
    except RuntimeError as error:
        assert called.wait(10)
        assert not work.is_success()
        return str(error)
    return "no error"


def test_a_peer_that_leaves_fails_the_collective(ranks: LocalRanks) -> None:
    assert "by peer" in ranks.run(wait_for_a_peer_that_left, num_ranks=2)[0]


def send_one() -> None:
    dist.send(torch.ones(1), 1 - dist.get_rank(), group=make_paced_group(dist.group.WORLD, gb_per_s=1.0))


def test_point_to_point_is_refused(ranks: LocalRanks) -> None:
    with pytest.raises(RankError, match="NotImplementedError: a paced group has collectives only"):
        ranks.run(send_one, num_ranks=2)


def test_a_pace_is_positive() -> None:
    assert Pace(gb_per_s=1.0, latency_us=50.0).seconds(3_000_000) == pytest.approx(3.05e-3)
    with pytest.raises(ValueError, match=r"gb_per_s=0\.0 must be positive"):
        Pace(gb_per_s=0.0)
    with pytest.raises(ValueError, match=r"latency_us=-1\.0 must not be negative"):
        Pace(gb_per_s=1.0, latency_us=-1.0)
