"""Megatron-Core's ``MoELayer`` under a strategy: Megatron keeps, initialises, reduces and saves the parameters, and its
router chooses experts; dispatch, computation and combination are those of ``Experts``.

R ranks of an expert group, E experts, K top-k, T tokens of a rank, S sequence length, B sequences, H the width of a
token inside of the experts, and I that of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from inspect import isfunction
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moesys.config import Fsep, ModelShape, Strategy
from moesys.kernels.cpu.page_pool import PagePool
from moesys.megatron.options import activation_of, check_options
from moesys.moe.call import recompute
from moesys.moe.experts import Experts, attach
from moesys.moe.outside import OutsideExperts, Parts
from moesys.torch_private import NO_BACKWARD, current_backward, run_forward_pre_hooks


def experts(spec: Any, strategy: Strategy) -> Any:
    """Returns a copy of a specification of Megatron in which each ``MoELayer`` runs its experts under ``strategy``.

    ``spec``: that of a layer, of a block, or of the MoE layer alone, as the functions ``get_gpt_*_spec`` return them;
    or a function that returns one, as a provider of Megatron-Bridge has it, for which a function is returned.

    Raises TypeError for a strategy of another class, and ValueError for a specification without a ``MoELayer``.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy is a {type(strategy).__name__}; give a moesys.Strategy")
    if isfunction(spec) or (isinstance(spec, partial) and spec.func is not MoELayer):
        return wraps(spec)(lambda *args, **options: experts(spec(*args, **options), strategy))
    found: list[Any] = []
    memory = PagePool()

    def copied(each: Any) -> Any:
        if isinstance(each, partial):
            if each.func is MoELayer:
                found.append(each)
                return partial(StrategyMoELayer, *each.args, **each.keywords, strategy=strategy, memory=memory)
            return each
        if isinstance(each, list):
            return [copied(one) for one in each]
        if is_dataclass(each) and not isinstance(each, type):
            new: Any = copy(each)
            for field in fields(each):
                setattr(new, field.name, copied(getattr(each, field.name)))
            if getattr(new, "module", None) is MoELayer:
                found.append(new)
                new.module, new.params = StrategyMoELayer, {**new.params, "strategy": strategy, "memory": memory}
            return new
        return each

    new = copied(spec)
    if not found:
        raise ValueError(
            f"spec, a {type(spec).__name__}, has no MoELayer of Megatron-Core; give the specification of a layer or a "
            "block with num_experts, such as get_gpt_layer_local_spec(num_experts=8), before another adapter changes it"
        )
    return new


class StrategyMoELayer(MoELayer):
    """A MoE layer of Megatron-Core under a strategy. Its router, shared experts and latent projections, and all
    parameters, are those of ``MoELayer``; ``token_dispatcher`` is not used.

    With ``Fsep`` a rank has an H/R of each expert, [2I, H/R] and [H/R, I], instead of E/R whole ones. Distributed
    checkpoints have the same tensors for every strategy.

    Raises ValueError for options and experts that moesys does not run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        strategy: Strategy,
        memory: PagePool,
    ) -> None:
        check_options(config, strategy)
        assert submodules is not None
        if isinstance(strategy.sharding, Fsep):
            submodules = replace(submodules, experts=partial(_sliced, submodules.experts))
        super().__init__(config, submodules, None, pg_collection, is_mtp_layer, name)
        self._strategy, self._memory = strategy, memory
        _check_experts(self.experts)
        if isinstance(strategy.sharding, Fsep):
            self.experts.ep_group = _Alone()
            self.experts.sharded_state_dict = self._sharded_slices
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """Makes the experts of this layer, of the ranks of ``ep_group``."""
        super().set_layer_number(layer_number)
        config = self.config
        shape = ModelShape(
            hidden_size=config.moe_latent_size or config.hidden_size,
            intermediate_size=config.moe_ffn_hidden_size,
            num_experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
            dtype=str(config.params_dtype).removeprefix("torch."),
        )
        # Layers of multi-token prediction count from 1 again.
        index = layer_number - 1 + config.num_layers * self.is_mtp_layer
        outside = OutsideExperts(
            self._read,
            activation=activation_of(config, self.experts),
            weights_on="activations",
            collect=_added_to_main_grad(self._read) if config.gradient_accumulation_fusion else None,
        )
        device = _device_of(self.experts, self.ep_group)
        made = Experts(shape, self._strategy, self.ep_group, layer_index=index, device=device, outside=outside)
        made.use_memory(self._memory)
        attach(made, self)

    def _sharded_slices(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Returns this rank's slices for a distributed checkpoint, in which experts are whole."""
        rank, num_ranks = self.ep_group.rank(), self.ep_group.size()
        found: dict[str, Any] = type(self.experts).sharded_state_dict(self.experts, *args, **options)
        for name, part in found.items():
            # Cut where ``OutsideExperts`` has it.
            cut = partial(_slice_of, dim=int("linear_fc1" in name), rank=rank, num_ranks=num_ranks)
            if isinstance(part, ShardedTensorFactory):
                found[name] = replace(part, build_fn=_after(part.build_fn, cut))
            elif isinstance(part, ShardedTensor):
                found[name] = cut(part)
            else:
                part.replica_id = (0, rank, part.replica_id[-1])
        return found

    def _read(self) -> Parts:
        # Megatron's hooks wait for parameters that are gathered while layers compute.
        for module in self.experts.modules():
            run_forward_pre_hooks(module)
        if any(hasattr(parameter, "get_main_grad") for parameter in self.experts.parameters()):
            raise ValueError(
                "Megatron-FSDP shards the parameters of experts, which moesys shards itself; set "
                "use_megatron_fsdp=False, and choose Fsep for experts in slices"
            )
        up = "gate_up" if self.config.gated_linear_unit else "up"
        found: dict[str, list[nn.Parameter]] = {}
        for kind, part in (("weight", "{}"), ("bias", "{}_bias")):
            if kind == "weight" or self.config.add_bias_linear:
                for name, of in (("linear_fc1", up), ("linear_fc2", "down")):
                    found[part.format(of)] = list(_each(self.experts, name, kind))
        return found

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Returns y [S, B, H] of ``hidden_states``, and None for a bias. ``padding_mask``: [B, S], True for padding,
        which is neither sent nor computed.
        """
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                f"tensor_model_parallel_size={self.attn_tp_group.size()} without sequence_parallel, and each rank "
                "would send the same tokens; set sequence_parallel=True"
            )
        if intermediate_tensors is not None:
            raise ValueError("a part of a MoE layer was called alone, as CUDA graphs do; set cuda_graph_impl='none'")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            done: tuple[Tensor, None] = tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask)
            return done
        return self._forward(hidden_states, padding_mask)

    def _forward(self, x_SBH: Tensor, padding_mask_SB: Tensor | None) -> tuple[Tensor, None]:
        shared_SBH = self.shared_experts_compute(x_SBH)
        # Code that records or replays routes patches this method, or the router that it calls.
        probs_TE, map_TE = self.route(x_SBH, padding_mask_SB)
        if self.config.moe_latent_size:
            x_SBH, _ = self.fc1_latent_proj(x_SBH)
        x_TH = x_SBH.reshape(-1, x_SBH.shape[-1])
        expert_TK, weight_TK = _choices(probs_TE, map_TE, self.config.moe_router_topk)
        if self.config.moe_apply_probs_on_input:
            x_TH = (weight_TK * x_TH).to(x_TH.dtype)
            weight_TK = torch.ones_like(weight_TK)
        mask_T = None if padding_mask_SB is None else ~padding_mask_SB.reshape(-1)
        made: Experts = self.__dict__["moesys_experts"]
        made.training = self.training
        with _planned_anew():
            # A copy, as the output lies in a page that later layers use again.
            y_SBH = made(x_TH, expert_TK, weight_TK, mask_T).clone().view(x_SBH.shape)
        if self.config.moe_latent_size:
            y_SBH, _ = self.fc2_latent_proj(y_SBH)
        return (y_SBH if shared_SBH is None else y_SBH + shared_SBH), None


def _choices(probs_TE: Tensor, map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the experts [T, K] that a map of Megatron's has, in ascending order, and their weights [T, K].

    A token with fewer than K experts gets others with a weight of zero. One with more would lose some, so that it gets
    an id that ``Experts`` refuse on all ranks.
    """
    expert_TK = map_TE.byte().topk(top_k, dim=-1).indices.sort(dim=-1).values
    weight_TK = probs_TE.gather(1, expert_TK)
    return expert_TK.masked_fill(map_TE.sum(dim=-1, keepdim=True) > top_k, map_TE.shape[-1]), weight_TK


class _Alone:
    """The group of the ranks over which whole experts are distributed, where each rank has a slice of all."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _slice_of(part: ShardedTensor, *, dim: int, rank: int, num_ranks: int) -> ShardedTensor:
    """Returns a tensor of a checkpoint as the part of a larger one that a rank has."""
    axis = part.prepend_axis_num + dim
    sizes, offsets, fragments = (
        list(each) for each in (part.global_shape, part.global_offset, part.axis_fragmentations)
    )
    offsets[axis] += rank * sizes[axis]
    sizes[axis] *= num_ranks
    fragments[axis] *= num_ranks
    changed = {"global_shape": sizes, "global_offset": offsets, "axis_fragmentations": fragments}
    return replace(part, **{name: tuple(each) for name, each in changed.items()})


def _after(build: Callable[..., list[Any]], change: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    return lambda *args: [change(each) for each in build(*args)]


def _added_to_main_grad(read: Callable[[], Parts]) -> Callable[[Parts], Parts]:
    """Returns what adds gradients to Megatron's ``main_grad`` of parameters, as its linear layers do under
    ``gradient_accumulation_fusion``: in place, and before they are rounded. Autograd gets values that Megatron's hooks
    throw away, but which let them run.
    """

    def collect(gradients: Parts) -> Parts:
        return {
            name: [_collected(*each) for each in zip(parameters, gradients[name], strict=True)]
            for name, parameters in read().items()
        }

    return collect


def _collected(parameter: Tensor, gradient: Tensor) -> Tensor:
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or not parameter.requires_grad:
        return gradient.to(parameter.dtype)
    main_grad.add_(gradient)
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Hooks that add them all the same say so.
    like = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return like(parameter)


def _planned_anew() -> AbstractContextManager[None]:
    """Lets a recomputation of Megatron's plan its forward, as its first pass is one without gradients."""
    return nullcontext() if current_backward() == NO_BACKWARD else recompute()[0]


def _each(experts: Any, linear: str, kind: str) -> Iterator[nn.Parameter]:
    """Returns the tensors of all experts here."""
    if isinstance(experts, SequentialMLP):
        return (getattr(getattr(expert, linear), kind) for expert in experts.local_experts)
    return (getattr(getattr(experts, linear), f"{kind}{index}") for index in range(experts.num_local_experts))


def _device_of(experts: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Returns where experts are computed: Megatron may make their parameters elsewhere, and move them later."""
    device, accelerator = next(experts.parameters()).device, torch.accelerator.current_accelerator()
    if device.type in ("cpu", "meta") and accelerator is not None:
        backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
        return accelerator if backends.get(accelerator.type, "gloo") != "gloo" else torch.device("cpu")
    return device


def _check_experts(experts: nn.Module) -> None:
    """Raises ValueError for experts whose parameters moesys cannot find."""
    if type(experts) not in (SequentialMLP, TEGroupedMLP):
        raise ValueError(
            f"{type(experts).__qualname__} keeps experts in a layout that moesys does not know; it runs those of "
            "SequentialMLP and TEGroupedMLP"
        )


def _sliced(
    build: Callable[..., nn.Module],
    num_local_experts: int,
    config: TransformerConfig,
    *,
    pg_collection: ProcessGroupCollection,
    name: str | None = None,
) -> nn.Module:
    """Returns all experts of the ranks that share them, each H/R wide, as Megatron makes them for latent tokens."""
    num_ranks = pg_collection.ep.size()
    cut = copy(config)
    cut.moe_latent_size = (config.moe_latent_size or config.hidden_size) // num_ranks
    return build(num_local_experts * num_ranks, cut, pg_collection=pg_collection, name=name)
