"""Which ranks share the experts of a layer, and which of them a node, where nobody says."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moesys.config import ClusterSpec, presets


def mesh_of(group: dist.ProcessGroup | DeviceMesh | None, device_type: str) -> DeviceMesh | None:
    """The ranks that share the experts, as a mesh; None for one rank without a process group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; give the one-dimensional sub-mesh of experts"
            )
        return group
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None else DeviceMesh.from_group(group, device_type)


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
