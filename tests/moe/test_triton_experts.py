"""On kernels the layer computes what it computes a GEMM a slot; chunks change no bit there either."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import Case, make_layer, run_cases
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.experts_cpu import CpuExperts, experts_on_device
from moesys.overlap.experts_triton import TritonExperts

# float32 sums in another order; bfloat16 rounds h, dh and the weighted activation to 8 bits on either way.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4 * 2.0**-8}

# (id, experts, choices, tokens of each rank, pull towards one direction)
ROUTINGS = [
    ("ragged", 4, 2, [35, 22], 0.0),
    ("slots and a rank without rows", 5, 1, [9, 0], 50.0),
    ("nobody has a token", 4, 2, [0, 0], 0.0),
]


def shape(dtype: str, num_experts: int, top_k: int) -> ms.ModelShape:
    # Sizes that fill no block of the kernels.
    return ms.ModelShape(hidden_size=40, intermediate_size=24, num_experts=num_experts, top_k=top_k, dtype=dtype)


def strategy(num_experts: int, num_ranks: int) -> ms.Strategy:
    """FSEP with room for replicas."""
    slots = -(-num_experts // num_ranks) + 1
    return ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=slots), balance=ms.Greedy(), split=ms.FlowSplit())


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


@pytest.mark.parametrize(
    ("dtype", "num_ranks"),
    [
        # On ranks tests/moe/test_ranks_route.py and test_node_dispatch.py run them always.
        ("float32", 1),
        ("bfloat16", 1),
        *(pytest.param(dtype, 2, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_kernels_compute_what_slots_compute(ranks: LocalRanks, dtype: str, num_ranks: int) -> None:
    cases = []
    for _, num_experts, top_k, tokens, skew in ROUTINGS:
        sequential = strategy(num_experts, num_ranks)
        chunks = sequential.replace(overlap=ms.Pipelined(chunks=3))
        on_slots = Case(shape(dtype, num_experts, top_k), sequential, [tokens[:num_ranks]], skew=skew)
        cases += [on_slots, replace(on_slots, kernels=True), replace(on_slots, kernels=True, strategy=chunks)]
    replicated = False
    for rank, results in enumerate(ranks.run(run_cases, cases, num_ranks=num_ranks, timeout_s=240)):
        for index, (name, *_) in enumerate(ROUTINGS):
            on_slots, on_kernels, chunked = results[3 * index : 3 * index + 3]
            held = [expert for slots in on_slots["layouts"][0] for expert in slots if expert >= 0]
            replicated |= len(held) > len(set(held))
            expected, bits = found(on_slots), found(chunked)
            for part, actual in found(on_kernels).items():
                where = f"rank {rank}, {name}: {part}"
                assert difference(actual, expected[part]) <= TOLERANCE[dtype], where
                assert torch.equal(actual, bits[part]), where
    assert replicated == (num_ranks > 1)


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
