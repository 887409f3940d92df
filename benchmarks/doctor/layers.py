"""Layers that checks run: ``MoELayer`` as a training has it, small in a rehearsal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.doctor.place import Place
from moesys.config import MegaKernel, ModelShape, Strategy
from moesys.config.overlap import Overlap
from moesys.moe.layer import MoELayer
from moesys.overlap.experts_triton import TritonExperts

# Experts of a rank.
EACH = 8
REAL_TOKENS, TOY_TOKENS = 2048, 6


def shape_at(place: Place) -> ModelShape:
    """Of Qwen3-30B-A3B's widths."""
    if place.rehearsed:
        return ModelShape(
            hidden_size=32, intermediate_size=16, num_experts=2 * place.num_ranks, top_k=2, dtype="bfloat16"
        )
    return ModelShape(
        hidden_size=2048, intermediate_size=768, num_experts=EACH * place.num_ranks, top_k=8, dtype="bfloat16"
    )


def tokens_at(place: Place) -> int:
    """Of a rank's usual micro-batch."""
    return TOY_TOKENS if place.rehearsed else REAL_TOKENS


def planned_on_devices(place: Place) -> MegaKernel:
    """With room for all choices of all ranks."""
    return MegaKernel(most_tokens=tokens_at(place), rows_cap=float(place.num_ranks))


def layer_at(place: Place, overlap: Overlap) -> MoELayer:
    """Over all ranks, on the kernels that a GPU has, wherever it is; the same parameters whatever the overlap."""
    layer = MoELayer(shape_at(place), Strategy(name=overlap.kind, overlap=overlap), device=place.device)
    layer.experts.expert_compute = TritonExperts()
    return layer


def inputs_at(place: Place, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """x and dy of this rank, [T, H]; another rank's, or another seed's, are others."""
    generator = torch.Generator().manual_seed(1000 * seed + place.rank)
    H = shape_at(place).hidden_size
    x_TH, dy_TH = (torch.randn(num_tokens, H, generator=generator).to(place.device, torch.bfloat16) for _ in range(2))
    return x_TH, dy_TH


def step(layer: MoELayer, x_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
    """Forward and backward: output and all gradients, this rank's own."""
    layer.zero_grad(set_to_none=True)
    x_TH = x_TH.detach().requires_grad_()
    y_TH = layer(x_TH)
    y_TH.backward(dy_TH)
    assert x_TH.grad is not None
    gradients = {name: own.grad for name, own in layer.named_parameters() if own.grad is not None}
    local = {name: of.to_local() if isinstance(of, DTensor) else of for name, of in gradients.items()}
    return {"y": y_TH.detach(), "dx": x_TH.grad, **local}
