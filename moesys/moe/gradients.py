"""Gradients of a model whose experts are sharded and whose other parameters are replicated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.moe.experts import experts_of
from moesys.moe.layer import MoELayer
from moesys.moe.masters import local_part
from moesys.overlap.exact_sum import grid_below, largest_size

# A norm's squares are computed in pieces of so many elements, which stay in a core's cache.
_ELEMENTS_AT_ONCE = 1 << 18


@torch.no_grad()
def sync_gradients(model: nn.Module) -> None:
    """Sum the gradients of replicated parameters over the ranks; experts' gradients are summed already.

    One all-reduce of a flat buffer a dtype. A replicated parameter must have a gradient on every rank or on none.
    Does nothing without a process group.
    """
    group = expert_group(model)
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    summed = {id(parameter) for layer in layers for parameter in layer.summed_in_backward()}
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor) and id(parameter) not in summed:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their joint L2 norm is at most ``max_norm``; returns the norm before, float32.

    The norm is that of the whole model: shards are added up over the ranks of their own meshes, and what several ranks
    have alike counts once (call ``sync_gradients`` first, where parameters are replicated without FSDP). The same bits
    on every rank, and for every way to shard. A collective.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm={max_norm} must be positive; leave the call out to not clip")
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    num_elements = 0
    for parameter in model.parameters():
        # By parameters, which all ranks have, and not by the gradients that this one has: groups meet below.
        parts = by_group.setdefault(_groups_of_shards(parameter), [])
        num_elements += parameter.numel()
        if parameter.grad is not None:
            parts.append(local_part(parameter.grad))
    norm = _norm(by_group, num_elements, next(model.parameters()).device)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_group.values():
        for part in parts:
            part.mul_(scale.to(part.dtype))
    return norm.float()


def _norm(
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]], num_elements: int, device: torch.device
) -> Tensor:
    """Returns the norm, float64: squares are rounded to a grid, and what that leaves to a finer one, on which their
    sums are exact, so that it does not show in which parts they were added. Off by n³ · 2⁻¹⁰² of the largest square of
    n at most. What is not finite is as a plain sum has it.
    """
    # What is sharded before what is whole.
    ordered = sorted(by_group.items(), key=lambda item: not item[0])
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for groups, parts in ordered:
        for part in parts:
            largest = torch.maximum(largest, largest_size(part).double())
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    coarse = grid_below(largest.square() * num_elements)
    fine = grid_below(coarse * num_elements)
    totals_3 = torch.zeros(3, dtype=torch.float64, device=device)
    for groups, parts in ordered:
        sums_3 = torch.zeros_like(totals_3)
        for part in parts:
            for elements in part.flatten().split(_ELEMENTS_AT_ONCE):
                squares = elements.double().square_()
                plain, rounded = squares.sum(), squares.div(coarse).round_().mul_(coarse)
                left = squares.sub_(rounded).div_(fine).round_().mul_(fine)
                sums_3 += torch.stack([rounded.sum(), left.sum(), plain])
        for group in groups:
            dist.all_reduce(sums_3, group=group)
        totals_3 += sums_3
    coarse_and_fine, plain = totals_3[:2].sum(), totals_3[2]
    return torch.where(plain.isfinite(), coarse_and_fine, plain).sqrt()


def _groups_of_shards(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups over which a tensor is sharded; none for one that is whole here."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)


def update_router_bias(model: nn.Module) -> None:
    """After an optimizer step: move every router's correction bias towards balance (DeepSeek-V3, section 2.1.2)."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.update_router_bias()


def expert_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The one group that all MoE layers of a model share; None for one rank without a group."""
    layers = experts_of(model)
    if not layers:
        raise ValueError("the model has no ms.Experts, so there is nothing to do; call torch's own function")
    groups = {id(layer.group): layer.group for layer in layers}
    if len(groups) > 1:
        raise ValueError(f"the model's MoE layers use {len(groups)} different groups; give them all the same group")
    return layers[0].group
