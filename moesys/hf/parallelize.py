"""parallelize: a model of transformers under a strategy, for one's own loop, with what else it has sharded by FSDP2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from moesys.config import ClusterSpec, Strategy
from moesys.hf.expert_parallel import run
from moesys.hf.experts_module import is_experts
from moesys.hf.strategy_experts import check, strategy_experts
from moesys.moe.experts import Experts
from moesys.moe.runtime import MoERuntime, link

EP = "ep"


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh | None = None,
    *,
    policy: MixedPrecisionPolicy | None = None,
    cluster: ClusterSpec | None = None,
) -> MoERuntime:
    """Makes ``model`` run under ``strategy`` on the ranks of ``mesh``, in place, and links its layers. A collective.

    Replaces what the experts modules of its MoE blocks do, shards their parameters as the strategy does, and shards all
    others by FSDP2, block by block, over all ranks of the mesh. Every rank brings the same whole model, or all bring it
    on the meta device, to be loaded later.

    ``mesh``: its dimension "ep" are the ranks that share the experts; other dimensions are copies of such groups, each
    with layouts of its own: ("dp", "ep") of (2, 4) on 8 ranks is two groups of four. None is one group of all ranks.
    ``policy``: FSDP's mixed precision, of experts too. ``cluster``: which ranks of a group share a node; by default as
    in ``Experts``.

    Gradients are the mean over all ranks, of experts as of all else: each rank's loss is the mean over its tokens, or a
    part of one mean that is multiplied by the number of ranks. Clip by ``ms.clip_grad_norm_``.

    Raises ValueError for a model without MoE blocks, one whose experts moesys cannot run, a mesh without "ep" or of
    other ranks than there are, and a strategy that does not fit.
    """
    check(strategy)
    modules = [module for module in model.modules() if is_experts(module)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no MoE blocks with experts as transformers has them (gate_up_proj and "
            "down_proj of all experts in one module); for a model of your own use ms.MoELayer or ms.Experts"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is sharded already, by parallelize or from_pretrained(distributed_config=...); "
            "do it once, and link a model that transformers has sharded by ms.link"
        )
    expert_mesh = _expert_mesh(mesh)
    ranks = expert_mesh.mesh.flatten()
    dense_mesh = DeviceMesh(expert_mesh.device_type, ranks, mesh_dim_names=("fsdp",))
    policy = policy or MixedPrecisionPolicy()
    shard: Any = partial(fully_shard, mp_policy=policy)
    # Where there is one group nothing travels, and FSDP would divide twice by what other dtypes need.
    alone = expert_mesh["efsdp"].size() == 1
    of_experts = replace(policy, reduce_dtype=torch.float32) if alone else policy
    for index, module in enumerate(modules):
        experts = strategy_experts(module, strategy, expert_mesh[EP], index, len(ranks), cluster)
        module.forward = partial(_forward, module, experts)
        unit: FSDPModule = shard(module, mesh=expert_mesh["efsdp"], mp_policy=of_experts)
        # Each group's gradients are sums already: the sum of the groups' over all ranks is the mean. Where there is one
        # group FSDP adds nothing up, and divides.
        unit.set_gradient_divide_factor(float(len(ranks)))
        if not alone:
            unit.set_force_sum_reduction_for_comms(True)
    for block in _blocks(model, modules):
        shard(block, mesh=dense_mesh)
    shard(model, mesh=dense_mesh)
    return link(model)


def _forward(module: nn.Module, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return run(experts, module.training, hidden, index, weights)


def _expert_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns copies of groups and their ranks, as a mesh of ("efsdp", "ep")."""
    world = dist.get_world_size()
    if mesh is None:
        device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return DeviceMesh(str(device_type or "cpu"), torch.arange(world).view(1, -1), mesh_dim_names=("efsdp", EP))
    names = mesh.mesh_dim_names or ()
    if not names or names[-1] != EP:
        raise ValueError(
            f'mesh has dimensions {names}; its last must be named "{EP}", the ranks that share the experts, as in '
            'init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "ep"))'
        )
    if alike := [name for name in names if name in ("tp", "cp", "pp")]:
        raise ValueError(
            f'mesh has a dimension "{alike[0]}", whose ranks do not have batches of their own, and those of all others '
            'than "ep" must; leave it out, or load the model by from_pretrained(distributed_config=DistributedConfig('
            "tp_size=...)), which cuts a batch over them"
        )
    if mesh.size() != world:
        raise ValueError(f"mesh has {mesh.size()} ranks, and there are {world}; its sizes must multiply to all of them")
    ranks = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("efsdp", EP))


def _blocks(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the elements of the lists of modules that hold experts: the model's layers."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    wanted = set(modules)
    holding = [each for each in lists if any(wanted & set(block.modules()) for block in each)]
    return [block for each in holding for block in each]
