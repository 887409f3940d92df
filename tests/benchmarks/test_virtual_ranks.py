"""Virtual ranks side by side: what must be there when a stage begins, in which order streams wait, who is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega.ranks_layer import MegaRun, draw_layer, regions_of
from benchmarks.mega.virtual_ranks import side_by_side
from moesys.config.overlap import MegaKernel
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.mega.exchange import Replicas, combine_flags, exchange, first_rows, ordered_tiles
from moesys.kernels.symmetric import signals
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.signals import PeerTimeoutError, TimeoutWatch, raise_if_given_up
from moesys.overlap.mega_executor import at_once

CPU = torch.device("cpu")
TINY = Size("tiny", 6, 16, 16, 2, 1)


def rank_of_two(name, told):
    for stage in range(2):
        told.append(f"{name}{stage}")
        yield
    told.append(f"{name}2")
    return name


def test_no_rank_begins_a_stage_before_all_have_been_through_the_last():
    told = []
    assert side_by_side([rank_of_two("a", told), rank_of_two("b", told)]) == ["a", "b"]
    assert told == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert at_once(rank_of_two("c", told)) == "c"


@pytest.mark.parametrize(
    "point",
    [MegaKernel(), MegaKernel(deduplicate=True, granularity="expert", fused="combine")],
    ids=["fused", "unfused, de-duplicated"],
)
def test_only_combines_wait_for_peers_that_run(point):
    """In one process a launch ends before the next begins: whoever waited for one that is still to come gives up."""
    layer = draw_layer(TINY, 2, torch.float32, CPU)
    heaps = Heap.virtual(regions_of(layer, [point]), 2, CPU, timeout_s=0.3)
    ranks = [MegaRun(layer, rank, point, MegaMemory(heap)).stages("forward") for rank, heap in enumerate(heaps)]
    for _ in ("announced", "fetched and multiplied"):
        for rank in ranks:
            next(rank)
        for heap in heaps:
            raise_if_given_up(heap)
    next(ranks[0])
    with pytest.raises(PeerTimeoutError, match=r"rank 0 waited 0\.3 s for rank 1 in combine"):
        raise_if_given_up(heaps[0])
    with pytest.raises(PeerTimeoutError, match="rank 1 stopped"):
        raise_if_given_up(heaps[1])


def test_tables_of_an_exchange_never_wait_for_the_device():
    """On the meta device nothing has a value that a host could ask for."""
    R, P, T, K, N = 2, 5, 7, 3, 11
    numbers = [torch.empty(size, dtype=torch.int64, device="meta") for size in ((R, P), (T, K), P, P, 2)]
    tokens_RP, position_TK, rank_P, expert_P, own_G = numbers
    table = exchange(tokens_RP, position_TK, Replicas(rank_P, expert_P, own_G), 0, N)
    for order in ("largest_first", "slots"):
        tiles = ordered_tiles(table, 0, 16, order)
        first_rows(table, torch.empty(N, K, dtype=torch.int32, device="meta"), tiles)
    for of_experts in (False, True):
        combine_flags(table, 0, 16, of_experts)


@pytest.fixture
def gpu_heap(monkeypatch):
    """A heap of a GPU as far as a ``TimeoutWatch`` looks; ``arrive`` lets its copies reach the host."""
    heap, peer = Heap.virtual({}, 2, "cpu", timeout_s=5.0)
    copies, waited = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: _Pinned(tensor, copies))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    return SimpleNamespace(
        arena=SimpleNamespace(is_cuda=True, is_meta=False, device=torch.device("cpu")),
        own=heap.own,
        world=heap.world,
        rank=0,
        timeout_s=5.0,
        peer=peer,
        waited=waited,
        arrive=lambda: [copies.pop()() for _ in list(copies)],
    )


class _Pinned:
    def __init__(self, tensor, copies):
        self._tensor, self._copies = tensor, copies

    def copy_(self, source, non_blocking):
        assert non_blocking
        self._copies.append(lambda: self._tensor.copy_(source))

    def __int__(self):
        return int(self._tensor)


def test_the_host_hears_of_a_wait_in_vain_without_waiting_itself(gpu_heap):
    watch = TimeoutWatch(gpu_heap)
    watch.note([])
    gpu_heap.arrive()
    watch.look()
    gpu_heap.own("abort")[:] = 1
    gpu_heap.own("report")[:] = torch.tensor([1, signals.COMBINE.value, 3, 7, 40, 1, 2])
    watch.note([])
    # Nothing has arrived, and nobody waits for it.
    watch.look()
    assert gpu_heap.waited == []
    gpu_heap.arrive()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited 5 s for rank 3 in combine: flag 40 of expert 7"):
        watch.look()
    assert len(gpu_heap.waited) == 1


def test_whoever_asks_waits(gpu_heap):
    watch = TimeoutWatch(gpu_heap)
    watch.wait()
    # Rank 1 has told.
    gpu_heap.own("abort")[:] = 2
    gpu_heap.peer.own("report")[:] = torch.tensor([1, signals.COMBINE.value, 0, 7, 40, 1, 2])
    with pytest.raises(PeerTimeoutError, match="rank 0 stopped: rank 1 waited 5 s for rank 0 in combine"):
        watch.wait()
    assert len(gpu_heap.waited) == 2
