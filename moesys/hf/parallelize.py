"""parallelize: a model of transformers under a strategy, for one's own loop, with what else it has sharded by FSDP2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from inspect import signature
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesys.config import ClusterSpec, Strategy
from moesys.hf.expert_parallel import check, check_module, run, shard, strategy_experts, watch_optimizers
from moesys.hf.experts_module import adapters_of, bypass, is_adapter, is_experts
from moesys.hf.padding import follow_padding, real_tokens
from moesys.moe.experts import Experts, require_module
from moesys.moe.gradients import BIASES, require_equal_values, reshard_units
from moesys.moe.runtime import MoERuntime, link
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.torch_private import gather_with

EP = "ep"
# The modules of a block that run by themselves, each with the one around it and with its parameters.
Holders = dict[nn.Module, tuple[nn.Module, list[nn.Parameter]]]


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
    on the meta device: ``model.to_empty(device=...)`` then gives it memory, and ``torch.distributed.checkpoint`` loads
    it. Buffers that no checkpoint has, such as those of rotary embeddings, are computed in the first forward, unless
    they were written in place. Trainable parameters whose dtype is not that of the rest of their block,
    such as a router in float32, are sharded apart from it, module by module, and keep their dtype.

    ``mesh``: its dimension "ep" are the ranks that share the experts; other dimensions are copies of such groups, each
    with layouts of its own: ("dp", "ep") of (2, 4) on 8 ranks is two groups of four. None is one group of all ranks.
    Only which ranks form a group matters, not their order: experts are placed by ascending rank.
    ``policy``: FSDP's mixed precision, of experts too. ``cluster``: which ranks of a group share a node; by default as
    in ``Experts``.

    Padding, which the model's ``attention_mask`` [B, S] leaves out, is neither sent to experts nor counted.

    Gradients are the mean over all ranks, of experts as of all else: each rank's loss is the mean over its tokens, or a
    part of one mean that is multiplied by the number of ranks. Clip by ``ms.clip_grad_norm_``.

    Raises ValueError for a model without MoE blocks, one whose experts moesys cannot run or have adapters other than
    LoRA on parameters, a module with parameters of two dtypes, a mesh without "ep", of other ranks than there are or of
    groups that cannot be put in order, and a strategy that does not fit, and TypeError for an argument of another type.
    Raises ``RankMismatchError`` on all ranks where they bring models that differ in a parameter or in a router's bias.
    The model is unchanged then. Add adapters and parametrizations first: the next forward raises ValueError for
    trainable parameters that were added later.
    """
    require_module(model)
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
    adapters = adapters_of(model)
    _check_not_tied(model, modules)
    blocks, policy = _blocks(model, modules), policy or MixedPrecisionPolicy()
    kept = _kept_in_float32(model, policy.param_dtype)
    units = _units(model, blocks, modules, kept)
    expert_mesh = _expert_mesh(mesh)
    num_ranks = expert_mesh.size()
    dense_mesh = DeviceMesh(expert_mesh.device_type, torch.arange(num_ranks), mesh_dim_names=("fsdp",))
    # Experts of one group are gathered from no other, and added to those of no other, so FSDP need not hold them.
    alone = expert_mesh["efsdp"].size() == 1
    # Experts are made before the model is changed, because a strategy that does not fit is refused here.
    given = strategy, expert_mesh[EP]
    made = [
        strategy_experts(module, *given, index, num_ranks, cluster, policy.param_dtype, adapters.get(module, ()), alone)
        for index, module in enumerate(modules)
    ]
    everyone = Channel(dist.group.WORLD, [0] * num_ranks, Recorder(0), Meter(), expert_mesh.device_type)
    require_equal_values(model, everyone, "parallelize()", torch.device(expert_mesh.device_type))
    missing = _buffers_without_memory(model)
    whole = {parameter for parameter in kept if not parameter.requires_grad}
    for parameter in whole:
        # FSDP moves only what it shards.
        parameter.data = parameter.data.to(expert_mesh.device_type if not parameter.is_meta else "meta")
    watch_optimizers(model, {*model.parameters()} - whole)
    left_out = set(whole)
    fsdp: Any = partial(fully_shard, ignored_params=left_out)
    # ``output_dtype`` applies to the output of the model, not to what its modules pass to each other.
    of_blocks = replace(policy, output_dtype=None)
    for module, experts in zip(modules, made, strict=True):
        shard(module, experts)
        module.forward = partial(_forward, module, experts, of_blocks if alone else None)
        bypass(adapters.get(module, ()))
        if alone:
            left_out.update(_own_parameters(module).values())
            continue
        unit: FSDPModule = fsdp(module, mesh=expert_mesh["efsdp"], mp_policy=of_blocks)
        # Each group's gradients are sums already: the sum of the groups' over all ranks is the mean.
        unit.set_gradient_divide_factor(float(num_ranks))
        unit.set_force_sum_reduction_for_comms(True)
    # A part of a block computes with the inputs that it would have inside of the block's unit.
    of_parts = replace(of_blocks, cast_forward_inputs=False)
    blocks_of: dict[nn.Module, set[nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            blocks_of.setdefault(module, set()).add(block)
    parts: list[tuple[nn.Module, Any]] = []
    for together in [*units, [model]]:
        first: Any = together[0]
        is_part = first is not model and first not in blocks
        of_unit = policy if first is model else of_parts if is_part else of_blocks
        if any(parameter in kept and parameter not in whole for each in together for parameter in each.parameters()):
            of_unit = replace(of_unit, param_dtype=None)
        # FSDP registers other hooks for a list, so a single module is passed by itself.
        fsdp(first if len(together) == 1 else together, mesh=dense_mesh, mp_policy=of_unit)
        if is_part:
            # A part is gathered with the innermost block around it, and one of blocks side by side with the model.
            around = set.intersection(*(blocks_of.get(each, set()) for each in together))
            parts.append((next((block for block in around if around <= blocks_of[block]), model), first))
    for owner, part in parts:
        if not gather_with(owner, part):
            owner.register_forward_pre_hook(partial(_gather, part))
    # Ranks may differ in the modules that a batch uses, such as a vision tower, and FSDP reduces what was used.
    if hasattr(first, "set_reduce_scatter_unused_params"):  # not in every torch that is supported
        first.set_reduce_scatter_unused_params(True)
    each: Any
    for each in model.modules():
        each.register_load_state_dict_pre_hook(partial(_refuse_whole_tensors, ref(model)))
        # PEFT's models pass on names that they lack to the model inside.
        if hasattr(type(each), "save_pretrained"):
            each.__dict__["save_pretrained"] = partial(_save, each.save_pretrained)
    follow_padding(model)
    known = WeakKeyDictionary({module: frozenset(_own_parameters(module)) for module in model.modules()})
    model.register_forward_pre_hook(partial(_check_nothing_new, known), prepend=True)
    if missing:
        model.register_forward_pre_hook(partial(_fill_buffers, missing), prepend=True)
    return link(model)


def _check_not_tied(model: nn.Module, modules: list[nn.Module]) -> None:
    """Raises ValueError if layers share parameters of experts, because each layer shards its own."""
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, nn.Module] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if (owner := owners.setdefault(parameter, module)) is not module:
                raise ValueError(
                    f"{names[module]}.{name} is a parameter of {names[owner]} too, and moesys shards the experts of "
                    "each layer by themselves; give each layer parameters of its own, or one module to both"
                )


def _forward(
    module: nn.Module,
    experts: Experts,
    policy: MixedPrecisionPolicy | None,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Runs ``experts`` under ``policy``; None where FSDP does."""
    mask_T = real_tokens(hidden)
    if policy is None:
        return run(experts, module, hidden, index, weights, mask_T)
    if policy.cast_forward_inputs:
        hidden, weights = hidden.to(policy.param_dtype), weights.to(policy.param_dtype)
    return run(experts, module, hidden, index, weights, mask_T, param_dtype=policy.param_dtype)


def _expert_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns copies of groups and their ranks, as a mesh of ("efsdp", "ep")."""
    world = dist.get_world_size()
    if mesh is None:
        device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return DeviceMesh(str(device_type or "cpu"), torch.arange(world).view(1, -1), mesh_dim_names=("efsdp", EP))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh, or None for one group of all ranks")
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
    # Ranks must ascend in both dimensions: torch sorts a group's ranks, but places shards in the order of the mesh.
    ranks = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).sort(dim=1).values
    ranks = ranks[ranks[:, 0].argsort()]
    if ranks.flatten().sort().values.tolist() != list(range(world)):
        raise ValueError(f"mesh has ranks {mesh.mesh.tolist()}; it must have each of 0 to {world - 1} once")
    if (ranks.diff(dim=0) < 0).any():
        raise ValueError(
            f'mesh has groups {ranks.tolist()} along "{EP}", which cannot be put in an order in which ranks ascend '
            "along both dimensions, as torch needs it; give groups whose second ranks are in the order of their first "
            "ranks, and so on, for example [[0, 1], [2, 3]] or [[0, 2], [1, 3]]"
        )
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("efsdp", EP))


def _blocks(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the elements of the lists of modules that hold experts: the model's layers."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    wanted = set(modules)
    holding = [each for each in lists if any(wanted & set(block.modules()) for block in each)]
    return [block for each in holding for block in each if block not in wanted and _runs(block)]


# --- units of FSDP ------------------------------------------------------------------------------------------------


def _kept_in_float32(model: nn.Module, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Returns the parameters outside of experts that ``model`` keeps in float32 where it computes in ``dtype``, as
    transformers does when it loads them, with the others of their modules; and the correction biases of routers.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    lists = ["_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"][: 1 + (dtype == torch.float16)]
    listed = {name for each in model.modules() for names in lists for name in getattr(each, names, None) or ()}
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(listed)) or r"(?!)")
    kept: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        # PEFT puts modules around those that are listed.
        path = re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)", "", path)
        own = {} if is_experts(module) else _own_parameters(module)
        listed_here = {each for name, each in own.items() if name in BIASES or pattern.search(f"{path}.{name}")}
        trains = any(each.requires_grad for each in listed_here)
        kept |= listed_here | {each for each in own.values() if trains and each.requires_grad}
    return {each for each in kept if each.dtype == torch.float32}


def _units(
    model: nn.Module, blocks: list[nn.Module], experts: list[nn.Module], kept: set[nn.Parameter]
) -> list[list[nn.Module]]:
    """Returns the modules of each FSDP unit other than experts and the model itself, inner units first: the blocks, and
    parts of blocks and of the model.

    A unit has one dtype, and a parameter is in one unit. So modules whose trainable parameters have another dtype than
    the rest of their block become units of their own, and so do modules of several blocks that share a parameter.

    Raises ValueError for a module that cannot be in one unit.
    """
    index = {module: number for number, module in enumerate(model.modules())}
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    roots = sorted({model, *blocks}, key=index.__getitem__, reverse=True)
    held = {root: _holders(root, {*roots, *experts}) for root in roots}
    roots_of: dict[nn.Parameter, set[nn.Module]] = {}
    for root in roots:
        for _, parameters in held[root].values():
            for parameter in parameters:
                roots_of.setdefault(parameter, set()).add(root)
    # The modules that get a unit apart from their block's are mapped to all of their parameters.
    parts: dict[nn.Module, set[nn.Parameter]] = {}
    for root in roots:
        dtype_of: dict[nn.Module, tuple[torch.dtype, bool] | None] = {}
        for module, (around, parameters) in held[root].items():
            trainable = {(each.dtype, each in kept): each for each in parameters if each.requires_grad}
            shared = {parameter for parameter in parameters if len(roots_of[parameter]) > 1}
            if len(trainable) > 1 or (shared and module is root):
                name_of = {parameter: name for name, parameter in module.named_parameters()}
                several = " and ".join(f"{name_of[each]} of {dtype}" for (dtype, _), each in trainable.items())
                what = f"trainable parameters of several dtypes, {several}"
                if len(trainable) == 1:
                    first = next(each for each in parameters if each in shared)
                    what = f"a parameter that another block has too, {name_of[first]}"
                raise ValueError(
                    f"{names[module]} has {what}, which FSDP cannot shard together; give the parameters of one module "
                    "one dtype, and a shared parameter a module of its own"
                )
            [dtype] = trainable or [None]
            if module is root:
                dtype_of[module] = dtype or _commonest_dtype(held[root], kept)
            elif shared or dtype not in (None, dtype_of[around]):
                parts[module], dtype_of[module] = set(parameters), dtype
            else:
                dtype_of[module] = dtype_of[around]
    groups: list[list[nn.Module]] = []
    for module in sorted(parts, key=index.__getitem__):
        alike = [group for group in groups if any(parts[module] & parts[each] for each in group)]
        groups = [each for each in groups if each not in alike] + [[*chain.from_iterable(alike), module]]
    units = [*groups[::-1], *([root] for root in roots if root is not model)]
    unit_of = {module: number for number, unit in enumerate(units) for module in unit}
    inside = {
        number: {unit_of[each] for module in unit for each in module.modules() if each in unit_of} - {number}
        for number, unit in enumerate(units)
    }
    try:
        return [units[number] for number in TopologicalSorter(inside).static_order()]
    except CycleError as error:
        together = ", ".join(dict.fromkeys(names[module] for number in error.args[1] for module in units[number]))
        raise ValueError(
            f"{together} share parameters so that some would be sharded both before and after others, and FSDP shards "
            "inner modules first; give a module parameters of its own if it is inside a module that it shares with"
        ) from error


def _holders(root: nn.Module, others: set[nn.Module]) -> Holders:
    """Returns the modules of ``root`` outside of ``others`` that run by themselves, each with the one around it, and
    with its parameters and those of containers in it, which do not run, such as ``nn.ParameterList``.
    """
    found: Holders = {}
    seen = set()

    def walk(module: nn.Module, around: nn.Module) -> None:
        seen.add(module)
        # Modules inside of an adapter on experts do not run: experts read their parameters.
        if module is root or (_runs(module) and (is_adapter(module) or not is_adapter(around))):
            found[module] = (around, [])
            around = module
        found[around][1].extend(parameter for parameter in module._parameters.values() if parameter is not None)
        for child in module.children():
            if child not in others and child not in seen:
                walk(child, around)

    walk(root, root)
    return found


def _commonest_dtype(held: Holders, kept: set[nn.Parameter]) -> tuple[torch.dtype, bool] | None:
    """Returns the dtype of most elements of trainable parameters, and whether they are ``kept`` in it; None if there
    are none.
    """
    counts: Counter[tuple[torch.dtype, bool]] = Counter()
    for parameter in {parameter: None for _, parameters in held.values() for parameter in parameters}:
        if parameter.requires_grad:
            counts[parameter.dtype, parameter in kept] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else None


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@torch.compiler.disable
def _check_nothing_new(known: WeakKeyDictionary[nn.Module, frozenset[str]], model: nn.Module, _inputs: object) -> None:
    """Raises ValueError for trainable parameters added after ``parallelize``, whose gradients are not summed."""
    if not torch.is_grad_enabled():
        return
    for name, module in model.named_modules():
        if module in known and "parametrizations" in module._modules and is_experts(module):
            check_module(module)
        for parameter_name, parameter in _own_parameters(module).items():
            if parameter.requires_grad and parameter_name not in known.get(module, ()):
                raise ValueError(
                    f"{f'{name}.{parameter_name}'.removeprefix('.')} was added after ms.parallelize, so its gradient "
                    "would be that of one rank only; add adapters and parametrizations (get_peft_model) first, then "
                    "call ms.parallelize"
                )


@torch.compiler.disable
def _gather(part: FSDPModule, *_: object) -> None:
    """Gathers ``part`` with the unit around it, because a module may read its parameters without calling it."""
    part.unshard()


def _refuse_whole_tensors(
    whole_model: ref[nn.Module], model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
) -> None:
    """Raises ValueError for a state with whole tensors of what ``model``, a part of ``whole_model``, has sharded."""
    whole = whole_model()
    if prefix and model is not whole:
        # It is loaded with the module around it, which has been checked.
        return
    reshard_units(whole or model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not isinstance(state.get(prefix + name, parameter), DTensor):
            raise ValueError(
                f"load_state_dict() was given {name} whole, and ms.parallelize has sharded it; call on every rank "
                "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True)), which is in "
                "torch.distributed.checkpoint.state_dict"
            )


def _save(save: Any, *arguments: Any, **options: Any) -> None:
    """Calls ``save_pretrained`` of transformers or PEFT, which gathers nothing. Raises ValueError without whole tensors
    to write.
    """
    given = signature(save).bind(*arguments, **options).arguments
    state: Any = given.get("state_dict", options.get("state_dict"))
    missing = state is None or (not state and given.get("is_main_process", True))
    if missing or any(isinstance(each, DTensor) for each in state.values()):
        raise ValueError(
            "save_pretrained() does not gather what ms.parallelize has sharded; call ms.hf.save_pretrained(model, "
            "folder) on every rank, or for adapters state = get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)) on every rank and model.save_pretrained(folder, state_dict=state)"
            " on rank 0"
        )
    save(*arguments, **options)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module without those of its submodules."""
    return {name: each for name, each in module._parameters.items() if each is not None}


# --- models on the meta device --------------------------------------------------------------------------------------


def _buffers_without_memory(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Returns the names of the buffers on the meta device that no checkpoint has, by their modules."""
    found: dict[nn.Module, set[str]] = {}
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta:
                found.setdefault(module, set()).add(name)
    return found


@torch.compiler.disable
@torch.no_grad()
def _fill_buffers(missing: dict[nn.Module, set[str]], model: nn.Module, _inputs: object) -> None:
    """Computes the ``missing`` buffers as transformers does when it loads a model, unless they were written after
    ``to_empty``.

    Raises ValueError for a buffer that transformers does not know how to compute.
    """
    unwritten = {module: _unwritten(module, names) for module, names in missing.items()}
    # Each module is initialised by the innermost transformers model around it.
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)] if missing else []
    owners = {inner: each for each in models for inner in each.modules()}
    for module, names in unwritten.items():
        if names and module in owners:
            _initialise_buffers(owners[module], module, names)
    for module, names in unwritten.items():
        if left := sorted(_unwritten(module, names)):
            path = next(path for path, each in model.named_modules() if each is module)
            raise ValueError(
                f"{f'{path}.{left[0]}'.removeprefix('.')} is a buffer that no checkpoint has (persistent=False), and "
                "it has not been written since to_empty; write it in place after to_empty, for example with copy_"
            )
    # Buffers still on the meta device are kept for a later forward; this forward will fail.
    on_meta = {module: {name for name in names if module.get_buffer(name).is_meta} for module, names in missing.items()}
    missing.clear()
    missing.update((module, names) for module, names in on_meta.items() if names)


def _unwritten(module: nn.Module, names: set[str]) -> set[str]:
    """Returns the ``names`` of buffers of ``module`` that have memory and that nobody has written."""
    buffers = {name: module.get_buffer(name) for name in names}
    return {name for name, each in buffers.items() if not each.is_meta and each._version == 0}


def _initialise_buffers(owner: PreTrainedModel, module: nn.Module, names: set[str]) -> None:
    """Initialises only the buffers ``names`` of ``module``, by transformers' own code."""
    kind: Any = next(each for each in type(owner).__mro__ if not issubclass(each, FSDPModule))
    if kind.is_custom_code() and any(True for _ in module.parameters()):
        # Custom code may ignore the mark and initialise parameters as well.
        return
    others = [*module.parameters(), *(each for name, each in module.named_buffers() if name not in names)]
    kept: list[Any] = [each for each in others if not getattr(each, "_is_hf_initialized", False)]
    for each in kept:
        each._is_hf_initialized = True
    try:
        owner._init_weights(module)
    finally:
        for each in kept:
            del each._is_hf_initialized
