"""Arguments of layers: their kinds, shapes, dtypes and devices, and what must be declared alike on all ranks.

T tokens of this rank, H hidden size, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pydantic_core import PydanticSerializationError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moesys.config import ClusterSpec, ModelShape, Strategy, presets
from moesys.config.base import Declaration
from moesys.display import version_of
from moesys.files import number_set
from moesys.kernels.torch_internals import refuse_function_transforms
from moesys.torch_private import require_values


def check_inputs(
    x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, mask_T: Tensor | None, shape: ModelShape, *, rounds: bool
) -> None:
    """Raises TypeError and ValueError for inputs of experts that do not fit each other or ``shape``. ``rounds``: the
    experts compute in the dtype of ``shape``, whatever x's is.
    """
    K, H = shape.top_k, shape.hidden_size
    require_dense(x_TH=x_TH, weight_TK=weight_TK, expert_TK=expert_TK)
    _require_floating("x_TH", x_TH, shape if rounds else None)
    _require_floating("weight_TK", weight_TK, None)
    if expert_TK.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"expert_TK has dtype {expert_TK.dtype}; give the ids of experts as int64 or int32")
    shapes = tuple(x_TH.shape), tuple(expert_TK.shape), tuple(weight_TK.shape)
    T = x_TH.shape[0] if x_TH.dim() else 0
    if shapes != ((T, H), (T, K), (T, K)):
        raise ValueError(
            f"x_TH has shape {shapes[0]}, expert_TK {shapes[1]} and weight_TK {shapes[2]}; give [T, {H}], [T, {K}] "
            f"and [T, {K}] for T tokens, as the layer has hidden_size={H} and top_k={K}"
        )
    if not x_TH.device == expert_TK.device == weight_TK.device:
        devices = f"{x_TH.device}, {expert_TK.device} and {weight_TK.device}"
        raise ValueError(f"x_TH, expert_TK and weight_TK are on {devices}; give all three on one device")
    if mask_T is not None:
        check_mask("mask_T", mask_T, x_TH)


def check_mask(name: str, mask: Tensor, x: Tensor) -> None:
    """Raises TypeError and ValueError for a ``mask`` that does not say of each token of ``x`` [..., H] whether it is
    real.
    """
    require_dense(**{name: mask})
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} has dtype {mask.dtype}; give torch.bool, True for a real token and False for padding, such as "
            "attention_mask.bool()"
        )
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, and x has {tuple(x.shape)}; give one value for each token, "
            f"{tuple(x.shape[:-1])}"
        )
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device}, and x on {x.device}; give both on one device")


def require_module(model: object) -> None:
    """Raises TypeError for an object that is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give the torch.nn.Module itself")


def require_dense(**tensors: Tensor) -> None:
    """Raises TypeError unless all ``tensors`` are dense tensors that hold this rank's own values, and RuntimeError
    inside a transform of ``torch.func``.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.layout != torch.strided:
            sparse = isinstance(tensor, Tensor) and tensor.layout != torch.strided
            kind = "sparse tensor" if sparse else type(tensor).__name__
            raise TypeError(f"{name} is a {kind}; give this rank's own part as a dense torch.Tensor")
    refuse_function_transforms(*tensors.values())
    for name, tensor in tensors.items():
        if type(tensor) is not Tensor or tensor.is_meta:
            require_values(tensor, name)


def check_x(x: Tensor, shape: ModelShape) -> None:
    """Raises TypeError and ValueError for an ``x`` that is no tokens [..., H] of a layer of ``shape``."""
    require_dense(x=x)
    _require_floating("x", x, shape)
    if not x.dim() or x.shape[-1] != shape.hidden_size:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be hidden_size={shape.hidden_size}")


def _require_floating(name: str, tensor: Tensor, shape: ModelShape | None) -> None:
    """Raises TypeError for a tensor that is not of a floating-point dtype; with a ``shape`` also for float64, which its
    experts would round.
    """
    if not tensor.is_floating_point() or (shape is not None and tensor.dtype == torch.float64):
        allowed = "a floating-point dtype" if shape is None else "float32, bfloat16 or float16"
        where = "" if shape is None else f", and the layer computes in {shape.dtype}"
        raise TypeError(f"{name} has dtype {tensor.dtype}{where}; give {allowed}")


def check_kinds(**given: object) -> None:
    """Raises TypeError and ValueError for arguments of ``Experts`` of another kind than declared."""
    optional_group = (dist.ProcessGroup, DeviceMesh, type(None)) if dist.is_available() else type(None)
    kinds = {"shape": ModelShape, "strategy": Strategy, "group": optional_group, "cluster": (ClusterSpec, type(None))}
    if isinstance(given.get("shape"), Strategy) and isinstance(given.get("strategy"), ModelShape):
        raise TypeError("shape is a Strategy and strategy is a ModelShape; give the shape first, then the strategy")
    for name, value in given.items():
        kind: Any = kinds.get(name, int)
        if name == "group" and dist.is_available() and value is dist.GroupMember.NON_GROUP_MEMBER:
            # ``mesh_of`` raises a more specific error for it.
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise TypeError(f"{name} is a {type(value).__name__}; give {wanted.replace('NoneType', 'None')}")
        if isinstance(value, int) and not 0 <= value < 2**32:
            raise ValueError(f"{name}={value} must be at least 0 and less than 2**32")


def declaration(shape: ModelShape, strategy: Strategy, cluster: ClusterSpec, seed: int | None) -> dict[str, Any]:
    """Returns what must be the same on all ranks that share experts, as JSON values; names are left out."""
    declared: dict[str, Declaration] = {"ModelShape": shape, "strategy": strategy, "cluster": cluster}
    fields = {key: {k: v for k, v in _fields(each).items() if k != "name"} for key, each in declared.items()}
    return fields | {"seed": seed, "torch": torch.__version__, "moesys": version_of("moesys", "not installed")}


def _fields(declared: Declaration) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in type(declared).model_fields:
        try:
            fields |= declared.model_dump(mode="json", include={name})
        except PydanticSerializationError:
            # The class of a planner that is defined inside a function has no source digest, so its fields are compared.
            fields[name] = repr(dict(getattr(declared, name)))
    return fields


def mesh_of(
    group: dist.ProcessGroup | DeviceMesh | None, device_type: str, *, may_reorder: bool = True
) -> DeviceMesh | None:
    """Returns the ranks that share the experts as a mesh in the order of its process group, or None for one rank
    without a process group.

    torch sorts the ranks of a mesh's groups and leaves the mesh as it is given, so that collectives would number ranks
    in one order and ``DTensor``s in the other. ``may_reorder``: whether nothing lies on ``group`` yet, so that another
    mesh of the same ranks may take its place.

    Raises ValueError for a mesh of several dimensions, a mesh or group without this rank, a mesh of another type of
    device, and an order of ranks that cannot be kept.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in group; make the layer on the ranks of the group only, or give each rank "
            "the group that it is in"
        )
    mesh = group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(group, device_type)
    _check_mesh(mesh, device_type)
    process_group, ranks = mesh.get_group(), mesh.mesh.tolist()
    members = dist.get_process_group_ranks(process_group)
    if members != sorted(members):
        raise ValueError(
            f"group has its ranks in the order {members}, and layers make further groups of them, which torch sorts; "
            "give a group whose ranks ascend (dist.new_group without sort_ranks=False)"
        )
    if ranks == members:
        return mesh
    if not may_reorder:
        raise ValueError(
            f"group is a mesh of ranks {ranks}, whose process group has them in the order {members}, so that each rank "
            "would compute with the experts of another; give the ranks of the mesh in ascending order"
        )
    return DeviceMesh.from_group(process_group, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)


def _check_mesh(mesh: DeviceMesh, device_type: str) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions; give the one-dimensional sub-mesh of experts"
        )
    if mesh.device_type != device_type != "meta":
        raise ValueError(
            f'group is a DeviceMesh of "{mesh.device_type}" devices, and the experts are on "{device_type}"; give '
            f'device="{mesh.device_type}", or a mesh of "{device_type}" devices'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in group, a mesh of ranks {mesh.mesh.tolist()}; make the layer on the "
            "ranks of the mesh only, or give each rank the mesh that it is in"
        )


def check_order(mesh: DeviceMesh) -> None:
    """Raises ValueError for a mesh with a dimension whose ranks do not ascend: collectives number them in ascending
    order, and ``DTensor``s in the order of the mesh.
    """
    if any(bool((mesh.mesh.diff(dim=dim) <= 0).any()) for dim in range(mesh.ndim)):
        raise ValueError(
            f"experts lie on a mesh of ranks {mesh.mesh.tolist()}, which do not ascend along every dimension, so that "
            "each rank would compute with the experts of another; shard them over a mesh whose ranks ascend"
        )


def cluster_of(num_ranks: int, device_type: str) -> ClusterSpec:
    """Returns nodes of LOCAL_WORLD_SIZE ranks if a launcher sets it and it divides the ranks, else one node, with the
    typical speeds of the device type.
    """
    per_node = number_set("LOCAL_WORLD_SIZE", num_ranks)
    if not 0 < per_node < num_ranks or num_ranks % per_node:
        per_node = num_ranks
    nodes = num_ranks // per_node
    return (
        presets.cpu(per_node, nodes) if device_type == "cpu" else ClusterSpec(num_nodes=nodes, ranks_per_node=per_node)
    )
