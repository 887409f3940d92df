"""Plans of hosts and of devices enumerate the same rows and tiles, on virtual ranks that only arrange."""

from __future__ import annotations

import pytest
import torch
from mega_case import CPU, Case, Drawn
from torch import Tensor

import moesys as ms
from moesys.kernels.mega.arguments import MegaMemory, MegaRows, announce, arrange
from moesys.kernels.mega.exchange import regions
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.overlap.device_split import PendingPlan, RowLimit, device_split
from moesys.overlap.mega_executor import replicas_of, tokens_by_replica

BLOCK_ROWS = 16
CASE = Case(5, 2, 4, 4, "float32", (35, 0, 19), 3, (), split=ms.FlowSplit(), turn=1)
CASES = {
    "exact": CASE,
    "even, some dropped": Case(6, 3, 4, 4, "float32", (9, 21), 5, (), split=ms.EvenSplit(), dropped=0.3, turn=2),
    "nothing to do": Case(3, 1, 4, 4, "float32", (0, 0), 2, (), split=ms.FlowSplit()),
}


def arranged(drawn: Drawn, on_device: bool, point: ms.MegaKernel) -> list[MegaRows]:
    """Of each rank."""
    case, most = drawn.case, max(1, *drawn.case.tokens)
    shared = regions(most, case.top_k, case.hidden, torch.float32, case.num_ranks, 1)
    shared = {**shared, **count_regions(case.num_ranks, case.num_experts)}
    memories = [MegaMemory(heap) for heap in Heap.virtual(shared, case.num_ranks, CPU)]
    ranks, origin = range(case.num_ranks), Origin() if on_device else None
    routings = [announce(memories[rank], drawn.expert_RTK[rank], case.num_experts, {}, origin) for rank in ranks]
    found = []
    for rank, memory, routing in zip(ranks, memories, routings, strict=True):
        num_rows, tokens_RP = int(drawn.plan.tokens_R[rank]), tokens_by_replica(drawn.plan, CPU)
        if on_device:
            assert case.split is not None
            num_rows = case.num_ranks * most * case.top_k
            split = device_split(drawn.layout, case.cluster, case.split, CPU)
            pending = PendingPlan(split, case.turn, RowLimit(CPU, ranks), num_rows, most * case.top_k)
            counts = receive_counts(memory.heap, memory.epoch_1, memory.exchanges_R, case.num_experts)
            assert torch.equal(counts.tokens_RE, torch.tensor(drawn.plan.load.tokens_RE))
            tokens_RP = pending.make(counts)
            assert pending.entries().tolist() == drawn.plan.entries.tolist()
        replicas = replicas_of(drawn.layout, rank, CPU)
        found.append(arrange(memory, routing, tokens_RP, replicas, num_rows, BLOCK_ROWS, point))
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "point", [ms.MegaKernel(deduplicate=True), ms.MegaKernel(granularity="expert", tile_order="slots")]
)
def test_both_homes_enumerate_the_same(name: str, point: ms.MegaKernel) -> None:
    drawn = Drawn(CASES[name])
    for by_host, by_device in zip(arranged(drawn, False, point), arranged(drawn, True, point), strict=True):
        for of_host, of_device in ((by_host.exchange, by_device.exchange), (by_host.flags, by_device.flags)):
            for field in ("tokens_RP", "first_G1", "block_first_B", "block_rows_B", "replica_TK", "row_TK", "first_B"):
                if hasattr(of_host, field):
                    assert torch.equal(getattr(of_host, field), getattr(of_device, field)), field
        assert torch.equal(by_host.flags.flag_TK, by_device.flags.flag_TK)
        assert_then_nothing(by_host.exchange.source_N, by_device.exchange.source_N)
        assert_then_nothing(by_host.exchange.place_N, by_device.exchange.place_N)
        assert_then_nothing(by_host.entry_N, by_device.entry_N)
        if point.deduplicate:
            assert by_host.first_row_N is not None
            assert by_host.first_tile_N is not None
            assert_then_nothing(by_host.first_row_N, by_device.first_row_N)
            assert_then_nothing(by_host.first_tile_N, by_device.first_tile_N)
        count = int(by_host.tiles.tiles.count_1)
        assert int(by_device.tiles.tiles.count_1) == count
        assert_then_nothing(by_host.tiles.tiles.group_M[:count], by_device.tiles.tiles.group_M)
        assert_then_nothing(by_host.tiles.tiles.row_M[:count], by_device.tiles.tiles.row_M)


def assert_then_nothing(of_host: Tensor, of_device: Tensor | None) -> None:
    """What the host has, and -1 for what else there is room for."""
    assert of_device is not None
    assert of_device.tolist() == of_host.tolist() + [-1] * (len(of_device) - len(of_host))
