"""A rank that dies in a MegaKernel's micro-batch ends all others within their time-out, and they say where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import PreparedRanks
from mega_case import CPU, Case, Drawn, MegaRun, new_heaps
from torch import Tensor

import moesys as ms
from moesys.kernels.mega.arguments import MegaMemory, announce
from moesys.kernels.mega.exchange import regions
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.signals import PeerTimeoutError, TimeoutWatch
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.experts_triton import ACTIVATION
from moesys.overlap.mega_executor import MegaKernelRun, replicas_of, tokens_by_replica
from moesys.torch_private import default_store

TIMEOUT_S = 4.0
VICTIM = 2
# Every rank has rows of every other, and every layout as many replicas: one heap for all.
FIRST = Case(8, 2, 20, 8, "float32", (9, 9, 9, 9), 2, (), dropped=0.5)


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[LocalRanks]:
    with PreparedRanks(4) as pool:
        yield pool


class DyingRun(MegaRun):
    """Ends the process of the victim before what its case calls late."""

    def _be_late(self, now: str) -> None:
        if (self.rank, now) == (VICTIM, self.drawn.case.late[2]):
            os._exit(1)


@contextmanager
def noted_outputs() -> Iterator[list[Sequence[Tensor]]]:
    """What each direction makes, also one that raises."""
    outputs: list[Sequence[Tensor]] = []
    note = TimeoutWatch.note

    def keep(watch: TimeoutWatch, made: Sequence[Tensor]) -> None:
        outputs.append(made)
        note(watch, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimeoutWatch, "note", keep)
        yield outputs


def survive(second: Case, point: ms.MegaKernel) -> tuple[list[str], list[float]]:
    """A micro-batch that goes well, one in which the victim dies, and another try: what they say after how long."""
    rank, heaps = dist.get_rank(), new_heaps(4, TIMEOUT_S)
    well = MegaRun(Drawn(replace(FIRST, split=second.split)), rank, heaps)
    well.backward(*well.forward(point))
    run = DyingRun(Drawn(second), rank, heaps)
    said, seconds = [], []
    for attempt in range(2):
        _meet_survivors(rank, attempt)
        began = time.monotonic()
        with noted_outputs() as outputs, pytest.raises(PeerTimeoutError) as raised:
            run.backward(*run.forward(point))
        assert raised.value.peer == VICTIM, raised.value
        # Of the direction in which it ended: a GPU's host hears of it later.
        assert all(out.isnan().all() for out in outputs[-1])
        said.append(str(raised.value))
        seconds.append(time.monotonic() - began)
    return said, seconds


def _meet_survivors(rank: int, attempt: int) -> None:
    """Waits until all but the victim are here, so that it alone is late."""
    if rank != VICTIM:
        default_store().set(f"attempt {attempt} of {rank}", "here")
        default_store().wait(
            [f"attempt {attempt} of {peer}" for peer in range(dist.get_world_size()) if peer != VICTIM]
        )


# Each case says where the victim dies: (before what, point, the stage that waits for it, epoch that it has reached).
DEATHS = {
    "before it publishes": (
        "forward",
        ms.MegaKernel(most_tokens=9, rows_cap=4.0),
        "publish: flag 2 is at epoch 2, not 3",
    ),
    "before it pulls": ("experts", ms.MegaKernel(granularity="expert", rows_cap=4.0), "combine: flag "),
    "between its directions": (
        "backward",
        ms.MegaKernel(deduplicate=True, rows_cap=4.0),
        "publish: flag 2 is at epoch 3, not 4",
    ),
}


# They wait where tests/kernels/symmetric/test_signals.py does: at a flag that says that all is published.
SLOW = ("before it publishes", "between its directions")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in DEATHS]
)
def test_all_others_end_in_time_and_say_where_it_was(mortal_ranks: LocalRanks, name: str) -> None:
    when, point, where = DEATHS[name]
    # Choices that were dropped before are not now: what the dead one said last does not fit what is asked of it.
    second = replace(FIRST, seed=5, dropped=0.0, late=(VICTIM, 0.0, when))
    if point.most_tokens is not None:
        second = replace(second, split=ms.EvenSplit())
    outcomes = mortal_ranks.outcomes(survive, second, point, expect_dead={VICTIM}, timeout_s=60)
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            assert outcome.kind == "died"
            continue
        assert outcome.kind == "returned", outcome
        said, seconds = outcome.result
        for words in said:
            assert f"waited 4 s for rank {VICTIM} in {where}" in words
            assert "of expert" in words or "combine" not in words
        # What the interpreter takes for tasks that need not wait.
        assert seconds[0] < TIMEOUT_S + 15
        assert seconds[1] < 15


@pytest.mark.parametrize(
    "point", [ms.MegaKernel(), ms.MegaKernel(combine_share=0.5, deduplicate=True, granularity="expert")]
)
def test_who_gave_up_tells_nobody_that_rows_have_come(point: ms.MegaKernel) -> None:
    """Rank 2 never comes, rank 1 waits for it, and has rows of rank 0, which would else sum what nobody computed."""
    drawn = Drawn(replace(FIRST, tokens=(9, 9, 9), dropped=0.0, slots=3))
    wanted = regions(9, 2, drawn.case.hidden, torch.float32, 3, 99)
    first, waiting, _ = (MegaMemory(heap) for heap in Heap.virtual(wanted, 3, "cpu", timeout_s=0.05))
    announce(first, drawn.expert_RTK[0], drawn.case.num_experts, {"x": drawn.x_RTH[0]})
    executor = MegaKernelRun(
        drawn.expert_RTK[1],
        drawn.case.num_experts,
        tokens_by_replica(drawn.plan, CPU),
        replicas_of(drawn.layout, 1, CPU),
        int(drawn.plan.tokens_R[1]),
        waiting,
        blocks_at(point, ACTIVATION, torch.float32, CPU),
        point,
    )
    with pytest.raises(PeerTimeoutError, match=r"waited 0\.05 s for rank 2 in publish"):
        executor.forward(drawn.x_RTH[1], drawn.weight_RTK[1], lambda: drawn.weights(1))
    assert drawn.plan.tokens_RER[0, :, 1].any()
    assert not first.heap.own("combined").any()
    assert not first.heap.own("staging").any()
