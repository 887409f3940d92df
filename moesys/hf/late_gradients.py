"""Gradients of experts that come home when FSDP is past their layer: their sum and mean, as it would have made them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from moesys.moe.masters import local_part
from moesys.torch_private import hooks_of


def add_late(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], num_batches: int) -> None:
    """Adds ``gradients``, sums over the ranks of an expert group, to ``.grad`` of sharded ``parameters``: summed over
    all groups in the parameters' dtype, of which each rank keeps its part, and as the mean over ``num_batches``. A
    collective of those groups.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        # As parameters lie: where strides differ, optimizers and norms round otherwise.
        part = _part_of_sum(parameter, gradient.to(parameter.dtype).contiguous()) / num_batches
        if parameter.grad is not None:
            local_part(parameter.grad).add_(part)
        elif isinstance(parameter, DTensor):
            size, stride = parameter.shape, parameter.stride()
            parameter.grad = DTensor.from_local(
                part, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride
            )
        else:
            parameter.grad = part
        # FSDP calls these hooks too when it has accumulated a gradient.
        for hook in hooks_of(parameter, behind=True):
            hook(parameter)


def _part_of_sum(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Returns this rank's part of the sum over groups, which are all dimensions of the mesh but the last."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == parameter.device_mesh.size(-1):
        return gradient
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    kept: list[Placement] = [
        Replicate() if placement.is_replicate() else Shard(0) for placement in parameter.placements[:-1]
    ]
    summands = DTensor.from_local(gradient, parameter.device_mesh[names[:-1]], [Partial()] * len(kept), run_check=False)
    return summands.redistribute(placements=kept).to_local()
