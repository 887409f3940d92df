"""Gradients of a model whose experts are sharded and whose other parameters are replicated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.moe.experts import experts_of
from moesys.moe.layer import MoELayer
from moesys.moe.masters import local_part


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
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
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
    on every rank. A collective.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm={max_norm} must be positive; leave the call out to not clip")
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in model.parameters():
        # By parameters, which all ranks have, and not by the gradients that this one has: groups meet below.
        parts = by_group.setdefault(_groups_of_shards(parameter), [])
        if parameter.grad is not None:
            parts.append(local_part(parameter.grad))
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    # What is sharded before what is whole.
    for groups, parts in sorted(by_group.items(), key=lambda item: not item[0]):
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for part in parts:
            squares += part.double().square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_group.values():
        for part in parts:
            part.mul_(scale.to(part.dtype))
    return norm.float()


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
