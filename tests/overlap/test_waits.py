"""How often a rank waits for others: twice in each direction, wherever the plan is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from mega_case import Case, Drawn, MegaRun, new_heaps

import moesys as ms
from moesys.kernels.symmetric import signals
from moesys.kernels.symmetric.heap import Heap
from moesys.lab.ranks.pool import LocalRanks

CASE = Case(5, 2, 40, 24, "float32", (35, 22, 9), 3, (), split=ms.FlowSplit())
POINT = ms.MegaKernel(deduplicate=True, combine_share=0.3)


class Waits:
    """What is waited for in the interpreter: which region of the rank's arena, and until which epoch."""

    def __init__(self, heap: Heap) -> None:
        first = heap.world[3 + heap.rank].item()
        self._regions = {
            name: (first + heap.offset(name), first + heap.offset(name) + region.num_bytes)
            for name, region in heap.layout.regions.items()
        }
        self.seen: set[tuple[str, int]] = set()
        self._poll = signals._poll

    def __call__(self, flag: Any, mask: Any, epoch: Any) -> Any:
        for address in np.broadcast_to(flag.handle.data, mask.handle.data.shape)[mask.handle.data].tolist():
            found = [name for name, (begin, end) in self._regions.items() if begin <= address < end]
            # Flags between programs of this rank lie in memory of its own.
            self.seen |= {(name, int(epoch.handle.data.item())) for name in found}
        return self._poll(flag, mask, epoch)

    def of_direction(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, set()
        return sorted(seen)


def waits(point: ms.MegaKernel) -> list[list[tuple[str, int]]]:
    """Of forward and backward of two micro-batches."""
    rank = dist.get_rank()
    run, found = MegaRun(Drawn(CASE), rank, new_heaps(CASE.num_ranks)), []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            executor = run.plan(point)
            watched = Waits(executor.memory.heap)
            patch.setattr(signals, "_poll", watched)
            y_TH, saved = executor.forward(run.drawn.x_RTH[rank], run.weight_TK, lambda: run.weights)
            found.append(watched.of_direction())
            run.backward(executor, y_TH, saved)
            found.append(watched.of_direction())
            patch.undo()
    return found


@pytest.mark.parametrize("most_tokens", [None, pytest.param(35, marks=pytest.mark.slow)], ids=["hosts", "devices"])
def test_a_direction_waits_for_what_others_publish_and_for_what_they_bring_home(
    ranks: LocalRanks, most_tokens: int | None
) -> None:
    point = POINT.replace(most_tokens=most_tokens, rows_cap=3.0)
    expected = [[("combined", epoch), ("published", epoch)] for epoch in (1, 2, 3, 4)]
    assert ranks.run(waits, point, num_ranks=3, timeout_s=100) == [expected] * 3
