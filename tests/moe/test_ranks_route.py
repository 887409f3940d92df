"""Ranks whose devices route what travels as messages: the host reads the sizes of messages, once a layer, and no bit
changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_ranks_plan import different, made, train
from torch import Tensor

import moesys as ms
from moesys.kernels.launch import HostCopy
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.experts_triton import TritonExperts

SHAPE = ms.ModelShape(hidden_size=20, intermediate_size=12, num_experts=5, top_k=2, dtype="bfloat16")
EP = ms.Strategy(name="ep")
FSEP = EP.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=4), split=ms.FlowSplit(), overlap=ms.Pipelined(chunks=2))
LENT = EP.replace(name="lent", sharding=ms.Ep(slots_per_rank=4), split=ms.Proportional())
# Layouts change, by the counts of two micro-batches.
PLANNED = FSEP.replace(name="planned", balance=ms.Greedy(), replan_every=2, predictor=ms.WindowMean(steps=2))


class ByHosts(TritonExperts):
    """The same kernels, of routes that hosts build."""

    by_tables = False  # type: ignore[assignment]


def routed(compute: TritonExperts, strategy: ms.Strategy, guard: bool, linked: bool) -> dict[str, Any]:
    return train(made(SHAPE, strategy, compute), (3, 8, 0)[: strategy.replan_every + 1], guard, linked)


def differ(strategy: ms.Strategy, guard: bool, linked: bool) -> tuple[list[str], list[int], int]:
    """Where routes of devices change what those of hosts give; how many numbers the host was told at a time; how often
    it asked.
    """
    told, asked = [], []

    class Counted(HostCopy):
        def __init__(self, values: Tensor) -> None:
            super().__init__(values)
            told.append(values.numel())
            self.waited = False

        def read(self) -> np.ndarray:
            if not self.waited:
                asked.append(1)
            self.waited = True
            return super().read()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesys.overlap.device_routes.HostCopy", Counted)
        found = routed(TritonExperts(), strategy, guard, linked)
        number = len(told)
        expected = routed(ByHosts(), strategy, False, linked)
    assert len(told) == number
    return different(found, expected), told, len(asked)


@pytest.mark.parametrize(
    ("strategy", "guard", "linked"),
    [
        pytest.param(EP, True, False, marks=pytest.mark.slow),
        (FSEP, True, True),
        pytest.param(LENT, True, False, marks=pytest.mark.slow),
        pytest.param(PLANNED, False, True, marks=pytest.mark.slow),
    ],
    ids=["ep", "chunks", "lent", "layouts change"],
)
def test_hosts_read_sizes_once_and_no_bit_changes(
    ranks: LocalRanks, strategy: ms.Strategy, guard: bool, linked: bool
) -> None:
    chunks = strategy.overlap.chunks if isinstance(strategy.overlap, ms.Pipelined) else 1
    # Rows of each chunk to and from each of two ranks, and who wants what.
    size = 2 * chunks * 2 + 2 * SHAPE.num_experts
    forwards = strategy.replan_every + 1
    for changed, told, asked in ranks.run(differ, strategy, guard, linked, num_ranks=2, timeout_s=500):
        assert changed == []
        assert told == [size] * forwards
        assert asked == forwards
