"""Experts are cast once for all micro-batches of a step, and never kept when masters have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe import store
from moesys.moe.layer import MoELayer
from moesys.moe.masters import local_part
from moesys.overlap.experts_triton import TritonExperts

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=2, top_k=1, dtype="bfloat16")


def new_layer() -> MoELayer:
    layer = ms.MoELayer(SHAPE, ms.Strategy(name="ep"))
    layer.experts.expert_compute = TritonExperts()
    return layer


def output(layer: MoELayer) -> Tensor:
    return layer(torch.ones(2, SHAPE.hidden_size))


def micro_batch(layer: MoELayer) -> Tensor:
    y = output(layer)
    y.sum().backward()
    return y.detach()


def masters(layer: MoELayer) -> nn.Parameter:
    assert layer.experts.masters is not None
    return layer.experts.masters


class Casts:
    """How often all experts were cast."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number, usual = 0, store._write

        def counted(*args: Any) -> None:
            self.number += 1
            usual(*args)

        patch.setattr(store, "_write", counted)

    def taken(self) -> int:
        # Each cast writes gate_up and down.
        number, self.number = self.number // 2, 0
        return number


def fused(layer: MoELayer) -> None:
    torch.optim.AdamW([masters(layer)], lr=0.1, fused=True).step()


class Foreign(torch.optim.Optimizer):
    """One that writes by kernels of its own, of which torch hears nothing."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local_part(parameter.data).numpy()[:] += 0.5


def another_storage(layer: MoELayer) -> None:
    """Of another parameter where that of a ``DTensor`` stays what it is."""
    before = masters(layer)
    if isinstance(before, DTensor):
        layer.experts.masters = nn.Parameter(before.detach() + 0.5)
        layer.experts.masters.grad = before.grad
    else:
        before.data = before.data + 0.5


def by_hand(layer: MoELayer) -> None:
    """As loops without an optimizer write; their gradients begin anew."""
    local_part(masters(layer).data).numpy()[:] += 0.5
    masters(layer).grad = None


def loaded(layer: MoELayer) -> None:
    state = layer.state_dict()
    layer.load_state_dict({name: of + 0.5 if isinstance(of, Tensor) else of for name, of in state.items()})


CHANGES: dict[str, Callable[[MoELayer], object]] = {
    "fused": fused,
    "by lists": lambda layer: torch.optim.Adam([masters(layer)], lr=0.1, foreach=True).step(),
    "foreign": lambda layer: Foreign([masters(layer)], {}).step(),
    "in place": lambda layer: torch.no_grad()(masters(layer).add_)(0.5),
    "another storage": another_storage,
    "by hand": by_hand,
    "loaded": loaded,
    "loaded whole": lambda layer: layer.load_full_state_dict(
        {name: of + 0.5 for name, of in layer.full_state_dict().items()}
    ),
}


def check(changes: Sequence[str]) -> bool:
    """Of what ``masters`` are: whether it is a ``DTensor``."""
    with pytest.MonkeyPatch.context() as patch:
        casts = Casts(patch)
        layer = new_layer()
        micro_batch(layer)
        assert casts.taken() == 1, "forward casts, and backward uses it"
        fused(layer)
        masters(layer).grad = None
        first = micro_batch(layer)
        assert casts.taken() == 1
        # Nobody says yet that a step has begun.
        assert torch.equal(micro_batch(layer), first)
        assert casts.taken() == 1
        assert all(torch.equal(micro_batch(layer), first) for _ in range(2))
        assert casts.taken() == 0
        with torch.no_grad():
            assert torch.equal(output(layer), first)
        assert casts.taken() == 1, "what backward does not follow keeps nothing"
        for change in changes:
            before = micro_batch(layer)
            assert casts.taken() <= 1
            CHANGES[change](layer)
            after = micro_batch(layer)
            assert casts.taken() == 1, f"{change} changes masters"
            fresh = new_layer()
            fresh.load_full_state_dict(layer.full_state_dict())
            assert torch.equal(after, micro_batch(fresh)), change
            assert not torch.equal(after, before), change
            micro_batch(layer)
            casts.taken()
        return isinstance(masters(layer), DTensor)


ON_RANKS = ("fused", "in place", "loaded")


def test_casts_are_of_the_masters_as_they_are() -> None:
    assert not check([each for each in CHANGES if each not in ON_RANKS])


def test_so_are_those_of_masters_over_ranks(ranks: LocalRanks) -> None:
    assert ranks.run(check, ON_RANKS, num_ranks=1, timeout_s=200) == [True]


def test_nothing_is_kept_of_masters_that_no_optimizer_steps() -> None:
    layer, other = new_layer(), new_layer()
    outputs = []
    for _ in range(4):
        outputs.append(micro_batch(layer))
        local_part(masters(layer).data).numpy()[:] += 0.5
        masters(layer).grad.zero_()
        micro_batch(other)
        fused(other)
    assert all(not torch.equal(a, b) for a, b in pairwise(outputs))


def test_a_layer_that_is_dropped_leaves_no_hook() -> None:
    from torch.optim import optimizer

    hooks = optimizer._global_optimizer_post_hooks
    before, layer = len(hooks), new_layer()
    assert len(hooks) == before + 1
    del layer
    assert len(hooks) == before
