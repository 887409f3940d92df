"""transformers' experts over ranks: experts modules run under a strategy that reads their parameters in place.

transformers makes one instance of an ``EPImplementation`` for every experts module, inside ``from_pretrained``, when
parameters are ``DTensor``s without memory. FSDP wraps the module later, and weights are loaded after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers.distributed.expert_parallel import EPImplementation

from moesys.config import ClusterSpec, Fsep, ModelShape, Strategy
from moesys.config.model_spec import NAMES
from moesys.hf.checkpoint_check import check_before_loading
from moesys.hf.experts_module import ExpertsModule, compute_dtype, factors_of, is_experts, with_lora
from moesys.hf.padding import real_tokens
from moesys.kernels.cpu.page_pool import PagePool
from moesys.moe.experts import Experts, attach
from moesys.moe.gradients import is_lost
from moesys.moe.masters import DTYPE_NAMES, local_part, part_of
from moesys.moe.outside import OutsideExperts, Parts
from moesys.torch_private import NO_BACKWARD, current_backward, hooks_of, unseen_by_selective_checkpoints


def implementation_of(strategy: Strategy) -> type[EPImplementation]:
    """Returns the class whose instances run experts modules under ``strategy``.

    Raises ValueError if transformers' models cannot run it.
    """
    check(strategy)
    newest = _Model(None)

    class StrategyExperts(EPImplementation):
        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._module: Any = experts
            check_module(experts)
            nonlocal newest
            if newest.ep_mesh is not ep_mesh:
                check_before_loading(experts.config)
                newest = _Model(ep_mesh)
                watch_optimizers(experts)
            num_batches = dist.get_world_size() // tp_mesh.size()
            # FSDP computes in bfloat16 if DistributedConfig asks for mixed precision.
            distributed = getattr(experts.config, "distributed_config", None)
            dtype = torch.bfloat16 if getattr(distributed, "fsdp_mixed_precision", False) else None
            layer_index = next(newest.layer_indices)
            self._experts = strategy_experts(experts, strategy, ep_mesh, layer_index, num_batches, dtype=dtype)
            shard(experts, self._experts)
            self._experts.use_memory(newest.memory)
            twice = dtype is None and self._module.down_proj.dtype in (torch.float16, torch.float64)
            self._divides_by = num_batches if twice and getattr(distributed, "efsdp_size", 0) == 1 else None

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if (num_batches := self._divides_by) is not None and isinstance(self._module, FSDPModule):
                # With one rank FSDP divides these dtypes twice by its factor, which transformers has set (torch 2.13).
                self._module.set_gradient_divide_factor(1.0)
                self._module.set_all_reduce_hook(partial(_divide, num_batches))
                self._divides_by = None
            mask_T = real_tokens(hidden_states)
            tensors = hidden_states, top_k_index, top_k_weights, *([] if mask_T is None else [mask_T])
            of_part = partial(run, self._experts, self._module)
            return _cut_over(self.tp_mesh, of_part, *tensors) if self.tp_mesh.size() > 1 else of_part(*tensors)

    return StrategyExperts


class _Model:
    """State that the layers of one model share, to all of which transformers gives the same mesh: their numbers from 0
    on, and memory, which they use in turn.
    """

    def __init__(self, ep_mesh: DeviceMesh | None) -> None:
        self.ep_mesh, self.layer_indices, self.memory = ep_mesh, count(), PagePool()


@unseen_by_selective_checkpoints
def run(
    experts: Experts, module: Any, x_TH: Tensor, *others: Tensor | None, param_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns y [T, H] in x's dtype, computed in the dtype of autocast, or else in ``param_dtype``, by default that of
    the experts of ``module``. ``others``: what else ``experts`` take, the routing and perhaps a mask.
    """
    experts.training = module.training
    dtype = compute_dtype(module._parameters["down_proj"], param_dtype)
    # A copy, as experts' output lies in a page, and FSDP loses its hooks where a model adds to such a view in place.
    return experts(x_TH.to(dtype), *others).to(x_TH.dtype, copy=True)


def _cut_over(tp_mesh: DeviceMesh, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns ``run`` of the tokens, which all ranks of ``tp_mesh`` have alike: each runs its part of them."""
    parts = (
        DTensor.from_local(tensor, tp_mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        for tensor in tensors
    )
    y_TH = run(*(part.to_local() for part in parts)).contiguous()
    size = tensors[0].shape
    return DTensor.from_local(y_TH, tp_mesh, [Shard(0)], run_check=False, shape=size, stride=(size[1], 1)).full_tensor()


def _divide(num_batches: int, gradients: Tensor) -> None:
    gradients.div_(num_batches)


def watch_optimizers(owner: nn.Module, replaced: Iterable[Any] = ()) -> None:
    """Makes a step of an optimizer raise ValueError if it has parameters that nothing trains: ``replaced`` ones or
    copies that FSDP had gathered. Ends when ``owner`` does, whose FSDP unit takes up what steps have changed.
    """
    for parameter in replaced:
        parameter.moesys_replaced = True
    this, checked = weakref.ref(owner), weakref.WeakKeyDictionary[Optimizer, list[int]]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        # FSDP reads gathered parameters in backward, where optimizers step parameter by parameter.
        if current_backward() == NO_BACKWARD and isinstance(module := this(), FSDPModule):
            module.reshard()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        # Groups may be added between steps.
        if checked.get(optimizer) == (ids := [*map(id, parameters)]):
            return
        if lost := [each for each in parameters if is_lost(each)]:
            raise ValueError(
                f"{len(lost)} of the {len(parameters)} parameters of {type(optimizer).__name__} are not the model's: "
                "ms.parallelize has replaced them, or FSDP had gathered them for a forward, so nothing trains them; "
                "make the optimizer behind ms.parallelize, and before any evaluation of a model that is not linked"
            )
        checked[optimizer] = ids

    weakref.finalize(owner, register_optimizer_step_pre_hook(before_step).remove)


def check(strategy: Strategy) -> None:
    """Raises TypeError for what is no strategy."""
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy is a {type(strategy).__name__}; give a ms.Strategy")


def check_module(module: Any) -> ExpertsModule:
    """Returns what an experts module computes. Raises ValueError where moesys does not run it over ranks."""
    kind = type(module).__name__
    if not is_experts(module):
        raise ValueError(
            f"{kind} does not declare what it computes (use_experts_implementation of transformers), which moesys "
            'needs; use ep_implementation="all_to_all"'
        )
    if is_parametrized(module):
        raise _computed(kind, next(iter(module.parametrizations)))
    description = ExpertsModule.of(module)
    if description.norm is not None or description.parameters:
        others = [name for name, _ in module.named_parameters() if name not in description.names]
        raise ValueError(
            f"{kind} has {', '.join(others) or 'post_expert_norm'} beside its projections and biases, which moesys "
            'does not run over ranks; use ep_implementation="all_to_all", or on one rank '
            'experts_implementation="moesys"'
        )
    dtypes = {name: module._parameters[name].dtype for name in description.names}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{kind} has parameters of several dtypes, {found}; give the experts of a layer one dtype")
    return description


def _refuse_later(module: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Raises ValueError where experts that run under a strategy are wrapped by PEFT."""
    if name in ("base_layer", "original_module") and inner is not None and "moesys_experts" in inner.__dict__:
        raise ValueError(
            f"{type(inner).__name__} runs under a strategy already, and {type(module).__name__} of PEFT would train "
            "parameters that ranks do not share; load the model without distributed_config, call get_peft_model first, "
            "then ms.parallelize"
        )


# A model that is sharded already may still be wrapped, and then this hook is called.
register_module_module_registration_hook(_refuse_later)


def strategy_experts(
    module: Any,
    strategy: Strategy,
    ep_mesh: DeviceMesh,
    layer_index: int,
    num_batches: int,
    cluster: ClusterSpec | None = None,
    dtype: torch.dtype | None = None,
    adapters: Sequence[Any] = (),
    alone: bool = False,
) -> Experts:
    """Returns the module's experts under ``strategy``, which read its parameters. Leaves the module as it is: ``shard``
    gives it to them.

    ``num_batches``: the number of all ranks' batches, over which gradients are the mean. ``dtype``: experts
    compute in; by default the dtype of their parameters. ``adapters``: LoRA around the module (``adapters_of``).
    ``alone``: FSDP does not hold the parameters, nor cast them to ``dtype``, nor divide their gradients.

    Raises ValueError for a module that cannot be sharded that way, or that the strategy does not fit.
    """
    description, kind = check_module(module), type(module).__name__
    names = part_names(description)
    num_experts, *down_shape = module.down_proj.shape
    _check_shards(module.down_proj, strategy, ep_mesh.size())
    hidden_size, width = reversed(down_shape) if description.transposed else down_shape
    shape = ModelShape(
        hidden_size=hidden_size,
        intermediate_size=width,
        num_experts=num_experts,
        top_k=_top_k(module.config),
        # A ModelShape has no float64.
        dtype=DTYPE_NAMES.get(dtype or description.dtype, "float32"),
    )

    adapter_of = {adapter.parameter_name: adapter for adapter in adapters}
    # LoRA on matrices runs by products of its own, and on biases it is added to them.
    by_products = [adapter_of.pop(name, None) for name in description.names[:2]]

    # FSDP does this where it holds the parameters.
    mean_over = num_batches if alone else None

    def read() -> dict[str, Tensor]:
        if replaced := [name for name in names.values() if is_parametrized(module, name)]:
            raise _computed(kind, replaced[0])
        return {part: with_lora(module, name, adapter_of.get(name), mean_over) for part, name in names.items()}

    def add_gradients(gradients: Parts) -> None:
        if isinstance(module, FSDPModule):
            module.reshard()
        parameters = [module._parameters[name] for name in names.values()]
        add_late(parameters, [cast(Tensor, gradients[part]) for part in names], num_batches)

    def factors() -> tuple[Tensor | None, ...]:
        return tuple(factor for adapter in by_products for factor in factors_of(adapter))

    add = None if adapter_of else add_gradients
    activation = None if description.swiglu else description.activation
    low_rank = factors if any(by_products) else None
    outside = OutsideExperts(
        read,
        description.transposed,
        activation,
        add_gradients=add,
        adapters=low_rank,
        mean_over=mean_over,
    )
    device = ep_mesh.device_type
    return Experts(shape, strategy, ep_mesh, cluster=cluster, layer_index=layer_index, device=device, outside=outside)


def _computed(kind: str, name: str) -> ValueError:
    return ValueError(
        f"{kind}.{name} is computed from other parameters, by a parametrization, which moesys does not run over ranks; "
        "leave experts out, or train LoRA of PEFT on them (target_parameters)"
    )


def part_names(description: ExpertsModule) -> dict[str, str]:
    """Returns the names that parameters of an experts module have, by those of the parts of an expert. Fsep cuts gate
    and up across both if they are one tensor: checkpoints have them apart, and transformers cuts what it loads before
    it puts them together.
    """
    return {name.replace("_proj", ""): name for name in description.names}


def _check_shards(parameter: Tensor, strategy: Strategy, num_ranks: int) -> None:
    """Raises ValueError if whole experts such as ``parameter`` leave a rank without any."""
    if isinstance(strategy.sharding, Fsep) or isinstance(parameter, DTensor):
        return
    block = -(-len(parameter) // num_ranks)
    if block * (num_ranks - 1) >= len(parameter):
        raise ValueError(
            f"{len(parameter)} experts on {num_ranks} ranks, {block} a rank, leave the last rank without any, "
            "which FSDP cannot run; use fewer ranks in a group, or Fsep"
        )


def shard(module: Any, experts: Experts) -> None:
    """Shards the parameters of ``module`` over the ranks of its ``experts`` as their strategy does, where they are not
    sharded so yet, and attaches the experts to it.
    """
    names, mesh = part_names(ExpertsModule.of(module)), experts.mesh
    assert mesh is not None
    inside = isinstance(experts.strategy.sharding, Fsep)
    for part in experts.shards.form.parts:
        name = names[part.name]
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor) and not inside:
            # transformers gives each rank whole experts already.
            continue
        placement: Placement = Shard(1 + part.dim if inside else 0)
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        sharded = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    if inside:
        # What transformers set when it gave each rank some experts.
        module.num_experts, module._is_expert_parallel = module.down_proj.shape[0], False
    attach(experts, module)


def _top_k(config: Any) -> int:
    for name in NAMES["top_k"]:
        if (top_k := getattr(config, name, None)) is not None:
            of_layers = {*top_k} if isinstance(top_k, Sequence) else {top_k}
            if len(of_layers) > 1:
                raise ValueError(
                    f"{type(config).__name__} has {config.attribute_map.get(name, name)}={top_k}, which differs by "
                    'layer; moesys needs one number for all, so train with ep_implementation="all_to_all"'
                )
            return int(of_layers.pop())
    raise ValueError(f"{type(config).__name__} does not say how many experts a token has: none of {NAMES['top_k']}")


def add_late(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], num_batches: int) -> None:
    """Adds ``gradients``, which arrive when FSDP is past their layer, to ``.grad`` of sharded ``parameters``, as FSDP
    would have done. A collective of all expert groups.

    ``gradients`` are sums over the ranks of one expert group. They are summed over all groups in the parameters' dtype
    and divided by ``num_batches``, and each rank keeps its part.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        # As parameters lie: where strides differ, optimizers and norms round otherwise.
        part = _part_of_sum(parameter, gradient.to(parameter.dtype).contiguous()) / num_batches
        if parameter.grad is not None:
            local_part(parameter.grad).add_(part)
        elif isinstance(parameter, DTensor):
            parameter.grad = part_of(parameter, part, parameter.placements)
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
