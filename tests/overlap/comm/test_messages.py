"""An all-to-all by messages: the rows of gloo's own, receives first, several at once, and its end known in time."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moesys.lab.ranks.pool import LocalRanks, RankError
from moesys.overlap.comm.channel import Messages, exchange


def counts_of(seed: int, num_ranks: int) -> torch.Tensor:
    """Rows from each rank to each rank, many of them none, [R, R]."""
    generator = torch.Generator().manual_seed(seed)
    counts_RR = torch.randint(0, 50, (num_ranks, num_ranks), generator=generator)
    return counts_RR * torch.randint(0, 2, counts_RR.shape, generator=generator)


def same_as_gloo(num_exchanges: int) -> bool:
    """Whether exchanges that are under way at once, waited for last first, bring what ``all_to_all_single`` brings."""
    num_ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    under_way = []
    for number in range(num_exchanges):
        counts_RR = counts_of(number, num_ranks)
        out_R, in_R = counts_RR[:, rank].tolist(), counts_RR[rank].tolist()
        generator = torch.Generator().manual_seed(100 * number + rank)
        sent = torch.randint(0, 256, (sum(in_R), 3), dtype=torch.uint8, generator=generator)
        received, expected = (torch.zeros(sum(out_R), 3, dtype=torch.uint8) for _ in range(2))
        dist.all_to_all_single(expected, sent, out_R, in_R)
        under_way.append((exchange(received, sent, out_R, in_R, group), received, expected, sent))
    same = True
    for work, received, expected, _ in reversed(under_way):
        assert isinstance(work, Messages)
        work.wait()
        same = same and torch.equal(received, expected)
    return same


def test_it_brings_what_gloo_brings(ranks: LocalRanks) -> None:
    assert ranks.run(same_as_gloo, 8, num_ranks=4) == [True] * 4
    assert ranks.run(same_as_gloo, 3, num_ranks=1) == [True]


def order_of_calls() -> list[str]:
    calls: list[str] = []
    receive, send, group = dist.irecv, dist.isend, dist.group.WORLD
    assert group is not None
    values = torch.ones(dist.get_world_size(), dtype=torch.uint8)

    def received(*arguments: object, group_src: int, **options: object) -> object:
        calls.append(f"from {group_src}")
        return receive(*arguments, group_src=group_src, **options)  # type: ignore[arg-type]

    def sent(*arguments: object, group_dst: int, **options: object) -> object:
        calls.append(f"to {group_dst}")
        return send(*arguments, group_dst=group_dst, **options)  # type: ignore[arg-type]

    with mock.patch.object(dist, "irecv", received), mock.patch.object(dist, "isend", sent):
        counts = [1] * len(values)
        exchange(torch.empty_like(values), values, counts, counts, group).wait()
    return calls


def test_a_rank_can_receive_before_it_sends_and_no_peer_is_everyones_first(ranks: LocalRanks) -> None:
    calls = ranks.run(order_of_calls, num_ranks=4)
    assert calls[1] == ["from 0", "from 3", "from 2", "to 2", "to 3", "to 0"]
    assert sorted(of_rank[3] for of_rank in calls) == ["to 0", "to 1", "to 2", "to 3"]


def end_known_to_whoever_asks() -> tuple[bool, bool]:
    """Rank 0: whether the exchange was over before rank 1 came, and whether its end became known unasked."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    values = torch.ones(2, dtype=torch.uint8)
    if rank:
        dist.barrier()
    work = exchange(torch.empty_like(values), values, [1, 1], [1, 1], group)
    work.get_future()
    over_before = work.is_completed()
    if not rank:
        dist.barrier()
    until_s = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < until_s:
        time.sleep(0.001)
    known = work.is_completed()
    work.wait()
    return over_before and not rank, known


def test_its_end_is_known_to_whoever_asks_for_its_future(ranks: LocalRanks) -> None:
    assert ranks.run(end_known_to_whoever_asks, num_ranks=2) == [(False, True)] * 2


def gone_while_waited_for(asked: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank():
        raise ValueError("gone")
    values = torch.ones(2, dtype=torch.uint8)
    work = exchange(torch.empty_like(values), values, [1, 1], [1, 1], group)
    if asked:
        work.get_future()
    work.wait()


@pytest.mark.parametrize("asked", [False, True])
def test_a_peer_that_is_gone_is_an_error(ranks: LocalRanks, asked: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(gone_while_waited_for, asked, num_ranks=2)
    assert "RuntimeError" in caught.value.failures[0]
