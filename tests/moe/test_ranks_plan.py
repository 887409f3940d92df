"""Ranks that plan on their devices: no host waits, no bit changes, and plans are read when somebody asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Stack, gradients_of
from host_waits import host_waits_refused
from torch import Tensor

import moesys as ms
from moesys.kernels.launch import HostCopy
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.experts_triton import TritonExperts

SHAPE = ms.ModelShape(
    hidden_size=20,
    intermediate_size=12,
    num_experts=5,
    top_k=2,
    dtype="bfloat16",
    scoring_func="sigmoid",
    router_bias_update_rate=0.01,
)
HOST = ms.MegaKernel(programs=1, rows_cap=2.0)
DEVICE = HOST.replace(most_tokens=9)
EP = ms.Strategy(name="ep", overlap=DEVICE)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), split=ms.FlowSplit(), overlap=DEVICE)
# Layouts change, by the counts of two micro-batches.
CHANGING: dict[str, Any] = {"balance": ms.Greedy(), "replan_every": 2, "predictor": ms.WindowMean(steps=2)}
# Functions that go another way on the CPU: they read a kernel's words, of which a GPU's copy is looked at later, and
# take numbers of the host as they lie.
ON_THE_CPU = ("raise_if_given_up", "_raise_if_found", "_framed", "index_of")
# Experts and their gradients, which no plan of tokens is about, are brought by tables that the host makes of layouts.
OF_LAYOUTS = ("moesys.moe.pulled_experts", "moesys.kernels.symmetric.pulls")
# Goes by pinned memory on a GPU; what it reads is counted.
COPIES = "moesys.kernels.launch"


def of_hosts(frame: Any) -> bool:
    return frame.f_globals.get("__name__") in (*OF_LAYOUTS, COPIES) or frame.f_code.co_name in ON_THE_CPU


def train(model: Stack, batches: Sequence[int], guard: bool, linked: bool, again: bool = False) -> dict[str, Any]:
    """Returns outputs, gradients, plans and states of batches of so many tokens of this rank. ``guard``: the host must
    not wait, once the first batch made memory.
    """
    runtime = ms.link(model) if linked else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: dict[str, Any] = {}
    for step, tokens in enumerate(batches):
        x = torch.randn(tokens, SHAPE.hidden_size, generator=generator).requires_grad_()
        with host_waits_refused(of_hosts) if guard and step else nullcontext():
            y = model(x, again)
            y.square().sum().backward()
        found |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
    for index, moe in enumerate(model.moe):
        found[f"plan {index}"] = moe.last_plan
        # Planners remember layouts together with the overlap that these were judged for.
        found[f"state {index}"] = json.loads(moe.experts.get_extra_state()) | {"memory": None}
        moe.experts.check()
    ms.update_router_bias(model)
    found |= gradients_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    if runtime is not None:
        runtime.close()
    return found


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not (torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name])
    ]


def made(shape: ms.ModelShape, strategy: ms.Strategy, compute: TritonExperts, num_layers: int = 1) -> Stack:
    model = Stack(shape, strategy, num_layers)
    for moe in model.moe:
        moe.experts.expert_compute = compute
    return model


def planned(strategy: ms.Strategy, guard: bool, linked: bool, checkpointed: bool) -> dict[str, Any]:
    model = made(SHAPE, strategy, TritonExperts(), num_layers=1 + checkpointed)
    batches = [tokens + dist.get_rank() for tokens in (3, 8, 5)[: strategy.replan_every + 1]]
    return train(model, batches, guard, linked, checkpointed)


def differ(
    strategy: ms.Strategy, other: ms.MegaKernel | ms.Sequential, guard: bool, linked: bool, checkpointed: bool
) -> list[str]:
    """Returns which results under plans of devices differ from those of ``other`` under plans of hosts."""
    found = planned(strategy, guard, linked, checkpointed)
    return different(found, planned(strategy.replace(overlap=other), False, linked, checkpointed))


@pytest.mark.parametrize(
    ("strategy", "other", "guard", "linked", "checkpointed"),
    [
        (EP, ms.Sequential(), True, False, False),
        pytest.param(FSEP, HOST, True, True, True, marks=pytest.mark.slow),
        # As where messages travel, below.
        pytest.param(FSEP.replace(**CHANGING), ms.Sequential(), False, True, False, marks=pytest.mark.slow),
    ],
    ids=["ep", "replicas, linked, recomputed", "layouts change"],
)
def test_hosts_never_wait_and_no_bit_changes(
    ranks: LocalRanks, strategy: ms.Strategy, other: Any, guard: bool, linked: bool, checkpointed: bool
) -> None:
    assert ranks.run(differ, strategy, other, guard, linked, checkpointed, num_ranks=2, timeout_s=500) == [[], []]


def waiting() -> str:
    with pytest.raises(RuntimeError) as refused:
        planned(EP.replace(overlap=HOST), True, False, False)
    return str(refused.value)


def test_the_guard_sees_hosts_that_plan(ranks: LocalRanks) -> None:
    for said in ranks.run(waiting, num_ranks=2, timeout_s=100):
        assert "which waits for the device" in said


# --- what travels as messages is routed on devices: the host reads the sizes of messages, once a layer ---

SENT = ms.Strategy(name="ep")
CHUNKS = FSEP.replace(overlap=ms.Pipelined(chunks=2))
LENT = SENT.replace(name="lent", sharding=ms.Ep(slots_per_rank=4), split=ms.Proportional())


class ByHosts(TritonExperts):
    """The same kernels, of routes that hosts build."""

    by_tables = False  # type: ignore[assignment]


def routed(compute: TritonExperts, strategy: ms.Strategy, guard: bool, linked: bool) -> dict[str, Any]:
    return train(made(SHAPE, strategy, compute), (3, 8, 0)[: strategy.replan_every + 1], guard, linked)


def differ_by_routes(strategy: ms.Strategy, guard: bool, linked: bool) -> tuple[list[str], list[int], int]:
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
        pytest.param(SENT, True, False, marks=pytest.mark.slow),
        (CHUNKS, True, True),
        pytest.param(LENT, True, False, marks=pytest.mark.slow),
        pytest.param(CHUNKS.replace(**CHANGING), False, True, marks=pytest.mark.slow),
    ],
    ids=["ep", "chunks", "lent", "layouts change"],
)
def test_hosts_read_sizes_once(ranks: LocalRanks, strategy: ms.Strategy, guard: bool, linked: bool) -> None:
    chunks = strategy.overlap.chunks if isinstance(strategy.overlap, ms.Pipelined) else 1
    # Rows of each chunk to and from each of two ranks, and who wants what.
    size = 2 * chunks * 2 + 2 * SHAPE.num_experts
    forwards = strategy.replan_every + 1
    for changed, told, asked in ranks.run(differ_by_routes, strategy, guard, linked, num_ranks=2, timeout_s=500):
        assert changed == []
        assert told == [size] * forwards
        assert asked == forwards
