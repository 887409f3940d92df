"""What devices plan by takes few launches, on whatever number of ranks and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launches import launches

import moesys as ms
from moesys.kernels.mega.arguments import MegaMemory, announce, arrange
from moesys.kernels.mega.exchange import most_flags, regions
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.layout import ExpertLayout
from moesys.overlap.device_split import RowLimit, device_split
from moesys.overlap.mega_executor import replicas_of

# Rows and choices themselves, which travel however it was planned.
PAYLOAD = ("copy_", "_publish", "_pull_choices")


@pytest.mark.parametrize("granularity", ["tile", "expert"])
def test_a_mega_kernels_plan_is_at_most_15(granularity: str) -> None:
    E, K, cpu = 3, 2, torch.device("cpu")
    layout, point = ExpertLayout(np.arange(E)[None], E), ms.MegaKernel(granularity=granularity, programs=1)
    replicas, limit = replicas_of(layout, 0, cpu), RowLimit(cpu, [0])
    made_by = device_split(layout, ms.ClusterSpec(), ms.FlowSplit(), cpu)
    expert_TK = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1]])
    shared = regions(4, K, 16, torch.float32, 1, most_flags(4, K, E, 16, 1))
    memory = MegaMemory(Heap.virtual({**shared, **count_regions(1, E)}, 1, cpu)[0])
    with launches() as found:
        routing = announce(memory, expert_TK, E, {}, Origin())
        tokens_RE, origin_R2 = receive_counts(memory.heap, memory.epoch_1, memory.exchanges_R, E)
        tokens_RP = limit.keep(made_by.tokens_RP(tokens_RE, 1), made_by.tables, 16, 8, origin_R2, 0)
        rows = arrange(memory, routing, tokens_RP, replicas, 16, 16, point)
    assert rows.exchange.first_G1.tolist() == [0, 3, 5, 8]
    planned = [name for name in found if name not in PAYLOAD]
    assert len(planned) <= 15, planned
