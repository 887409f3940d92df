"""Ranks that plan on their devices: no host waits, no bit changes, and plans are read when somebody asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Stack, gradients_of
from test_local import READS, WAITS
from torch import Tensor

import moesys as ms
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
PLANNED = FSEP.replace(name="planned", balance=ms.Greedy(), replan_every=2, predictor=ms.WindowMean(steps=2))
# Functions that go another way on the CPU: they read a kernel's words, of which a GPU's copy is looked at later, and
# take numbers of the host as they lie.
ON_THE_CPU = ("raise_if_given_up", "_raise_if_found", "_framed", "index_of")
# Experts and their gradients, which no plan of tokens is about, are brought by tables that the host makes of layouts.
OF_LAYOUTS = ("moesys.moe.pulled_experts", "moesys.kernels.symmetric.pulls")
# Goes by pinned memory on a GPU; what it reads is counted.
COPIES = "moesys.kernels.host_copies"


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Raises where code of moesys does, for tokens, what on a GPU waits for it."""

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("torch"):
                frame = frame.f_back
            where = str(frame.f_globals.get("__name__"))
            allowed = where in (*OF_LAYOUTS, COPIES) or frame.f_code.co_name in ON_THE_CPU
            assert allowed or not where.startswith("moesys."), f"{name} in {where}, line {frame.f_lineno}"
            return function(*args, **options)

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((Tensor, READS), (torch, WAITS)):
            for name in names:
                patch.setattr(owner, name, refusing(name, getattr(owner, name)))
        yield


def train(strategy: ms.Strategy, guard: bool, linked: bool, checkpointed: bool) -> dict[str, Any]:
    """Micro-batches, one more than lead to a layout, through a layer, or two that are recomputed. The first makes what
    lasts, unguarded.
    """
    model = Stack(SHAPE, strategy, num_layers=1 + checkpointed)
    for moe in model.moe:
        moe.experts.expert_compute = TritonExperts()
    runtime = ms.link(model) if linked else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: dict[str, Any] = {}
    for step, tokens in enumerate((3, 8, 5)[: strategy.replan_every + 1]):
        x = torch.randn(tokens + dist.get_rank(), SHAPE.hidden_size, generator=generator).requires_grad_()
        with host_never_waits() if guard and step else nullcontext():
            y = model(x, checkpointed)
            y.square().sum().backward()
        found |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
    for index, moe in enumerate(model.moe):
        found[f"plan {index}"] = moe.last_plan
        found[f"state {index}"] = moe.experts.get_extra_state()
        moe.experts.check()
    ms.update_router_bias(model)
    found |= gradients_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    if runtime is not None:
        runtime.close()
    return found


def differ(
    strategy: ms.Strategy, other: ms.MegaKernel | ms.Sequential, guard: bool, linked: bool, checkpointed: bool
) -> list[str]:
    """Where plans of devices change what ``other`` finds by those of hosts."""
    found = train(strategy, guard, linked, checkpointed)
    expected = train(strategy.replace(overlap=other), False, linked, checkpointed)
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not (torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name])
    ]


@pytest.mark.parametrize(
    ("strategy", "other", "guard", "linked", "checkpointed"),
    [
        (EP, ms.Sequential(), True, False, False),
        pytest.param(FSEP, HOST, True, True, True, marks=pytest.mark.slow),
        # As where messages travel: tests/moe/test_ranks_route.py.
        pytest.param(PLANNED, ms.Sequential(), False, True, False, marks=pytest.mark.slow),
    ],
    ids=["ep", "replicas, linked, recomputed", "layouts change"],
)
def test_hosts_never_wait_and_no_bit_changes(
    ranks: LocalRanks, strategy: ms.Strategy, other: Any, guard: bool, linked: bool, checkpointed: bool
) -> None:
    assert ranks.run(differ, strategy, other, guard, linked, checkpointed, num_ranks=2, timeout_s=500) == [[], []]


def waiting() -> str:
    with pytest.raises(AssertionError) as refused:
        train(EP.replace(overlap=HOST), True, False, False)
    return str(refused.value)


def test_the_guard_sees_hosts_that_plan(ranks: LocalRanks) -> None:
    for said in ranks.run(waiting, num_ranks=2, timeout_s=100):
        assert "in moesys." in said
