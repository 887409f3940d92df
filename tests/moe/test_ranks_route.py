"""Ranks whose devices route what travels as messages: the host reads the sizes of messages, once a layer, and no bit
changes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Stack, gradients_of
from test_ranks_plan import host_never_waits
from torch import Tensor

import moesys as ms
from moesys.kernels.host_copies import HostCopy
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


def train(compute: TritonExperts, strategy: ms.Strategy, guard: bool, linked: bool) -> dict[str, Any]:
    """Micro-batches, one more than lead to a layout. The first makes what lasts, unguarded."""
    model = Stack(SHAPE, strategy, num_layers=1)
    for moe in model.moe:
        moe.experts.expert_compute = compute
    runtime = ms.link(model) if linked else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: dict[str, Any] = {}
    for step, tokens in enumerate((3, 8, 0)[: strategy.replan_every + 1]):
        x = torch.randn(tokens, SHAPE.hidden_size, generator=generator).requires_grad_()
        with host_never_waits() if guard and step else nullcontext():
            y = model(x)
            y.square().sum().backward()
        found |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
    for index, moe in enumerate(model.moe):
        found[f"plan {index}"] = moe.last_plan
        found[f"state {index}"] = moe.experts.get_extra_state()
    found |= gradients_of(model)
    if runtime is not None:
        runtime.close()
    return found


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
        found = train(TritonExperts(), strategy, guard, linked)
        number = len(told)
        expected = train(ByHosts(), strategy, False, linked)
    assert len(told) == number
    assert found.keys() == expected.keys()
    different = [
        name
        for name, value in expected.items()
        if not (torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name])
    ]
    return different, told, len(asked)


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
    for different, told, asked in ranks.run(differ, strategy, guard, linked, num_ranks=2, timeout_s=500):
        assert different == []
        assert told == [size] * forwards
        assert asked == forwards


def waiting() -> str:
    with pytest.raises(AssertionError) as refused:
        train(ByHosts(), EP, True, False)
    return str(refused.value)


def test_the_guard_sees_hosts_that_route(ranks: LocalRanks) -> None:
    for said in ranks.run(waiting, num_ranks=2, timeout_s=100):
        assert "in moesys." in said
