"""The layers that GPU checks run, ``MoELayer`` as in a training, small in a rehearsal; a guard against host waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import GpuRank
from host_waits import host_waits_refused
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesys.config import ModelShape, Strategy
from moesys.config.overlap import MegaKernel, Overlap
from moesys.moe.layer import MoELayer
from moesys.overlap.experts_triton import TritonExperts

EXPERTS_PER_RANK = 8
REAL_TOKENS, TOY_TOKENS = 2048, 6
WARM_UPS, STEPS = 2, 2
# On the CPU, where kernels have ended when they return, moesys reads at once whether one gave up.
READS_ON_CPU = ("raise_if_given_up", "_raise_if_found")
# Copies to pinned memory, which the host reads on a GPU when they have arrived or all of backward is launched.
COPIES = "moesys.kernels.launch"


def shape_of(gpu: GpuRank) -> ModelShape:
    """Returns a shape with the widths of Qwen3-30B-A3B; a small one in a rehearsal."""
    if gpu.rehearsed:
        return ModelShape(
            hidden_size=32, intermediate_size=16, num_experts=2 * gpu.num_ranks, top_k=2, dtype="bfloat16"
        )
    experts = EXPERTS_PER_RANK * gpu.num_ranks
    return ModelShape(hidden_size=2048, intermediate_size=768, num_experts=experts, top_k=8, dtype="bfloat16")


def tokens_of(gpu: GpuRank) -> int:
    """Returns the tokens of a micro-batch, per rank."""
    return TOY_TOKENS if gpu.rehearsed else REAL_TOKENS


def planned_on_devices(gpu: GpuRank) -> MegaKernel:
    """Returns MegaKernels that are planned on devices, with memory for all choices of all ranks."""
    return MegaKernel(most_tokens=tokens_of(gpu), rows_cap=float(gpu.num_ranks))


def layer_of(gpu: GpuRank, overlap: Overlap) -> MoELayer:
    """Returns a layer over all ranks, on GPU kernels, with the same parameters for every overlap."""
    layer = MoELayer(shape_of(gpu), Strategy(name=overlap.kind, overlap=overlap), device=gpu.device)
    layer.experts.expert_compute = TritonExperts()
    return layer


def inputs_of(gpu: GpuRank, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns x and dy, [T, H]. They differ between ranks and between seeds."""
    generator = torch.Generator().manual_seed(1000 * seed + gpu.rank)
    H = shape_of(gpu).hidden_size
    x_TH, dy_TH = (torch.randn(num_tokens, H, generator=generator).to(gpu.device, torch.bfloat16) for _ in range(2))
    return x_TH, dy_TH


def run_step(layer: MoELayer, x_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
    """Runs forward and backward. Returns the output and this rank's part of all gradients."""
    layer.zero_grad(set_to_none=True)
    x_TH = x_TH.detach().requires_grad_()
    y_TH = layer(x_TH)
    y_TH.backward(dy_TH)
    gradients = {name: own.grad for name, own in layer.named_parameters() if own.grad is not None}
    local = {name: of.to_local() if isinstance(of, DTensor) else of for name, of in gradients.items()}
    return {"y": y_TH.detach(), "dx": x_TH.grad, **local}


def synchronize_ranks(gpu: GpuRank) -> None:
    """Waits until the device is idle and every rank has come here."""
    if not gpu.rehearsed:
        torch.cuda.synchronize()
    dist.barrier()


def run_without_waiting(gpu: GpuRank, overlap: Overlap) -> str:
    """Runs steps of a layer, in which every wait of the host for the device raises RuntimeError."""
    layer, inputs = layer_of(gpu, overlap), inputs_of(gpu, tokens_of(gpu), 0)
    # The first steps compile, and allocate memory that is kept.
    for _ in range(1 if gpu.rehearsed else WARM_UPS):
        run_step(layer, *inputs)
    with waits_refused(gpu.device):
        for _ in range(1 if gpu.rehearsed else STEPS):
            found = run_step(layer, *inputs)
    wrong = [name for name, of in found.items() if not of.isfinite().all()]
    assert not wrong, f"{', '.join(wrong)} are not finite"
    return f"{overlap.kind}: the host never waited"


@contextmanager
def waits_refused(device: torch.device) -> Iterator[None]:
    """Makes waits of the host for the device raise RuntimeError: on a GPU torch detects them."""
    if device.type != "cuda":
        with host_waits_refused(_may_wait):
            yield
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _may_wait(frame: Any) -> bool:
    return frame.f_code.co_name in READS_ON_CPU or frame.f_globals["__name__"] == COPIES
