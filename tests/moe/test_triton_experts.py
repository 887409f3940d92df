"""On kernels the layer computes what it computes a GEMM a slot; chunks change no bit there either."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import Case, make_layer, run_cases
from torch import Tensor

import moesys as ms
from moesys.overlap.experts_cpu import CpuExperts, experts_on_device
from moesys.overlap.experts_triton import TritonExperts

# float32 sums in another order; bfloat16 rounds h, dh and the weighted activation to 8 bits on either way.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4 * 2.0**-8}

# (id, experts, choices, tokens, pull towards one direction)
ROUTINGS = [("ragged", 4, 2, 35, 0.0), ("slots without rows", 5, 1, 9, 50.0), ("no token", 4, 2, 0, 0.0)]


def shape(dtype: str, num_experts: int, top_k: int) -> ms.ModelShape:
    # Sizes that fill no block of the kernels.
    return ms.ModelShape(hidden_size=40, intermediate_size=24, num_experts=num_experts, top_k=top_k, dtype=dtype)


def found(result: dict) -> dict[str, Tensor]:
    """What a layer gives, by name. The router's gradient is that of the routing weights, carried on."""
    (y_TH,), (dx_TH,) = result["outputs"], result["dx"]
    experts = result["gradients"]["experts.masters"]
    return {"y": y_TH, "dx": dx_TH, "router": result["local_router_gradient"], "experts": experts}


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, in units of the largest number expected."""
    if not expected.numel():
        return 0.0
    largest, apart = expected.abs().max(), (actual - expected).abs().max()
    return float(apart / largest if largest > 0 else apart)


# On ranks tests/moe/test_ranks_plan.py and test_node_dispatch.py run kernels.
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_compute_what_slots_compute(dtype: str) -> None:
    for name, num_experts, top_k, tokens, skew in ROUTINGS:
        on_slots = Case(shape(dtype, num_experts, top_k), ms.Strategy(name="ep"), [[tokens]], skew=skew)
        chunks = ms.Strategy(name="chunks", overlap=ms.Pipelined(chunks=3))
        cases = [on_slots, replace(on_slots, kernels=True), replace(on_slots, kernels=True, strategy=chunks)]
        expected, on_kernels, bits = map(found, run_cases(cases))
        for part, actual in on_kernels.items():
            assert difference(actual, expected[part]) <= TOLERANCE[dtype], f"{name}: {part}"
            assert torch.equal(actual, bits[part]), f"{name}: {part}"


def test_masters_without_gradient_and_rows_with_gaps() -> None:
    """x is a transposed matrix, and nobody asks for weight gradients."""
    case = Case(shape("float32", 2, 2), ms.Strategy(name="ep", overlap=ms.Pipelined(chunks=2)), [[0]])
    generator = torch.Generator().manual_seed(0)
    x_HT = torch.randn(40, 11, generator=generator)
    dy_TH = torch.randn(11, 40, generator=generator)
    dxs = []
    for kernels in (False, True):
        layer = make_layer(replace(case, kernels=kernels))
        layer.experts.masters.requires_grad_(False)
        x = x_HT.clone().requires_grad_()
        layer(x.t()).backward(dy_TH)
        assert layer.experts.masters.grad is None
        dxs.append(x.grad)
    assert difference(dxs[1], dxs[0]) <= TOLERANCE["float32"]


@pytest.mark.parametrize(("device_type", "kind"), [("cpu", CpuExperts), ("cuda", TritonExperts)])
def test_the_device_says_how_experts_are_computed(device_type: str, kind: type) -> None:
    assert isinstance(experts_on_device(shape("float32", 4, 2), torch.float32, device_type), kind)


def with_lora(strategy: ms.Strategy, adapted: tuple[bool, bool], kernels: bool, T: int = 64) -> list[Tensor]:
    """Output and gradients of frozen experts with LoRA on some of their matrices."""
    experts, of = shape("float32", 4, 2), torch.Generator().manual_seed(0)
    E, H, I = experts.num_experts, experts.hidden_size, experts.intermediate_size
    parts = {"gate_up": (2 * I, H), "down": (H, I)}
    drawn = {name: torch.randn(E, *size, generator=of) / 4 for name, size in parts.items()}
    frozen = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in drawn.items()}
    sizes = (32, H), (2 * I, 32), (16, I), (H, 16)
    pairs = [torch.nn.Parameter(torch.randn(E, *size, generator=of) / 4) for size in sizes]
    factors = [each if adapted[place // 2] else None for place, each in enumerate(pairs)]
    layer = ms.Experts(experts, strategy, outside=ms.OutsideExperts(lambda: frozen, adapters=lambda: factors))
    layer.expert_compute = TritonExperts() if kernels else None
    x_TH, weight_TK = torch.randn(T, H, generator=of).requires_grad_(), torch.rand(T, 2, generator=of).requires_grad_()
    # The last expert has no rows.
    y_TH = layer(x_TH, torch.rand(T, E - 1, generator=of).topk(2).indices, weight_TK)
    learnt = [x_TH, weight_TK, *(each for each in factors if each is not None)]
    return [y_TH.detach(), *torch.autograd.grad(y_TH, learnt, torch.randn(T, H, generator=of))]


@pytest.mark.parametrize("adapted", [(True, True), (True, False), (False, True)], ids=["both", "up", "down"])
@pytest.mark.parametrize("reduction", [ms.Ordered(), ms.LayoutInvariant(block_rows=16)], ids=["ordered", "invariant"])
def test_kernels_compute_lora_as_slots_do(reduction: ms.Ordered, adapted: tuple[bool, bool]) -> None:
    strategy = ms.Strategy(name="alone", reduction=reduction)
    expected, found = (with_lora(strategy, adapted, kernels) for kernels in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert other.any()
        assert difference(one, other) <= TOLERANCE["float32"]
