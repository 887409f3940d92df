"""Which ranks share the experts of a layer, and which of them a node, where nobody says."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moesys.config import ClusterSpec, presets


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
    """Nodes of LOCAL_WORLD_SIZE ranks where a launcher says so and it fits, else one node; as fast as devices of such a
    type are about.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if not 0 < per_node < num_ranks or num_ranks % per_node:
        per_node = num_ranks
    nodes = num_ranks // per_node
    return (
        presets.cpu(per_node, nodes) if device_type == "cpu" else ClusterSpec(num_nodes=nodes, ranks_per_node=per_node)
    )
