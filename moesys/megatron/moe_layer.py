"""Megatron-Core's ``MoELayer`` under a strategy: Megatron keeps, initialises, reduces and saves the parameters, and its
router chooses experts; dispatch, computation and combination are those of ``Experts``.

R ranks of an expert group, E experts, K top-k, T tokens of a rank, S sequence length, B sequences, H the width of a
token inside of the experts, and I that of an expert.

``REFUSED`` has the options of ``TransformerConfig`` that no strategy runs. Tables of ``tests/megatron`` have all others
that are of MoE, or that Megatron's own layer reads: those that are used, and those without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from inspect import isfunction
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from moesys.config import Fsep, ModelShape, Strategy
from moesys.kernels.cpu.page_pool import PagePool
from moesys.moe.call import recompute
from moesys.moe.experts import Experts, attach
from moesys.moe.outside import OutsideExperts, Parts
from moesys.moe.runtime import link
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
    models = [_Model()]

    def copied(each: Any) -> Any:
        if isinstance(each, partial):
            if each.func is MoELayer:
                found.append(each)
                return partial(StrategyMoELayer, *each.args, **each.keywords, strategy=strategy, models=models)
            return each
        if isinstance(each, list):
            return [copied(one) for one in each]
        if is_dataclass(each) and not isinstance(each, type):
            new: Any = copy(each)
            for field in fields(each):
                setattr(new, field.name, copied(getattr(each, field.name)))
            if getattr(new, "module", None) is MoELayer:
                found.append(new)
                new.module, new.params = StrategyMoELayer, {**new.params, "strategy": strategy, "models": models}
            return new
        return each

    new = copied(spec)
    if not found:
        raise ValueError(
            f"spec, a {type(spec).__name__}, has no MoELayer of Megatron-Core; give the specification of a layer or a "
            "block with num_experts, such as get_gpt_layer_local_spec(num_experts=8), before another adapter changes it"
        )
    return new


class _Model:
    """Gives the layers of a model the memory that they use in turn, and a runtime from their first forward on. It knows
    the layers by their indices, as long as they exist.
    """

    def __init__(self) -> None:
        self.memory = PagePool()
        self._layers: WeakValueDictionary[int, Experts] = WeakValueDictionary()

    def add(self, layer: Experts) -> bool:
        """Makes ``layer`` one of the model's. Returns False where it is of another model of the same specification."""
        if layer.layer_index in self._layers or any(each.link.linked for each in self._layers.values()):
            return False
        layer.use_memory(self.memory)
        self._layers[layer.layer_index] = layer
        return True

    def link(self) -> None:
        """Links the layers, which have all been made when the first one runs. A collective."""
        link(nn.ModuleList(each for _, each in sorted(self._layers.items())))


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
        models: list[_Model],
    ) -> None:
        check_options(config, strategy)
        assert submodules is not None
        if isinstance(strategy.sharding, Fsep):
            submodules = replace(submodules, experts=partial(_sliced, submodules.experts))
        super().__init__(config, submodules, None, pg_collection, is_mtp_layer, name)
        self._strategy, self._models = strategy, models
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
        if not self._models[-1].add(made):
            self._models.append(_Model())
            self._models[-1].add(made)
        self._model = self._models[-1]
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
        # Without plans and transfers ahead, a runtime would only keep a thread and two more groups.
        ahead = made.schedule.follows_history or self._strategy.sharding.prefetch_layers
        if ahead and self.ep_group.size() > 1 and not made.link.linked:
            self._model.link()
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


class Refusal(NamedTuple):
    """Why an option is refused where it is none of the ``allowed`` values, of which errors advise the first."""

    why: str
    allowed: tuple[Any, ...] = (False,)


_DROPS = "tokens beyond a capacity would be dropped, and moesys computes all of them; balance experts by the strategy"
_DISPATCHES = (
    "the layer would be taken apart at Megatron's dispatch, which moesys replaces; choose the strategy's overlap"
)
_QUANTIZED = "experts would be quantized, and moesys computes them in the dtype of their parameters"
_OFFLOADED = "activations inside of the experts would be offloaded, and moesys keeps its own"

REFUSED = {
    "activation_func_fp8_input_store": Refusal(_QUANTIZED),
    "cpu_offloading": Refusal(_OFFLOADED),
    "delay_wgrad_compute": Refusal("gradients would be computed after backward, and moesys computes them in it"),
    "expert_gtp_weight_remat_size": Refusal("experts would be sharded a second time; choose Fsep", (1,)),
    "expert_tensor_parallel_size": Refusal("experts would be cut over tensor-parallel ranks; choose Fsep", (1,)),
    "fp4": Refusal(_QUANTIZED, (None,)),
    "fp8": Refusal(_QUANTIZED, (None,)),
    "moe_expert_capacity_factor": Refusal(_DROPS, (None,)),
    "moe_expert_rank_capacity_factor": Refusal(_DROPS, (None,)),
    "moe_pad_expert_input_to_capacity": Refusal(_DROPS),
    "moe_pad_experts_for_cuda_graph_inference": Refusal(_DROPS),
    "moe_paged_stash": Refusal("activations would be kept in pages of Megatron's, and moesys keeps its own"),
    "moe_router_padding_for_fp8": Refusal(_QUANTIZED),
    "moe_router_padding_for_quantization": Refusal(_QUANTIZED),
    "moe_shared_expert_overlap": Refusal("shared experts would run inside of Megatron's dispatch, which is not used"),
    "moe_single_grouped_bias": Refusal("all biases would be in one tensor, of which moesys does not know the layout"),
    "moe_single_grouped_weight": Refusal(
        "all experts would be in one tensor, of which moesys does not know the layout"
    ),
    "moe_token_dispatcher_type": Refusal("its buffers would never be used", ("alltoall", "allgather")),
    "moe_token_dropping": Refusal(_DROPS),
    "overlap_dispatch_backward_with_experts_wgrad": Refusal(_DISPATCHES),
    "overlap_moe_expert_parallel_comm": Refusal(_DISPATCHES),
    "transformer_impl": Refusal("generation has a dispatch of its own", ("transformer_engine", "local")),
    "use_kitchen": Refusal(_QUANTIZED),
    "use_te_activation_func": Refusal("the activation would be a module of Transformer Engine"),
}


def check_options(config: TransformerConfig, strategy: Strategy) -> None:
    """Raises ValueError for an option under which moesys runs no experts, and for experts that ``Fsep`` cannot cut."""
    for name, refusal in REFUSED.items():
        # Megatron removes options now and then.
        if (value := getattr(config, name, refusal.allowed[0])) not in refusal.allowed:
            raise ValueError(f"{name}={value!r}: {refusal.why}; set {name}={refusal.allowed[0]!r}")
    graphs = [getattr(each, "name", each) for each in config.cuda_graph_modules or ()]
    if config.cuda_graph_impl != "none" and (not graphs or any(each.startswith("moe") for each in graphs)):
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} with cuda_graph_modules={graphs} would capture MoE layers, "
            'whose plans are made on the host; set cuda_graph_modules=["attn"], or cuda_graph_impl="none"'
        )
    inside = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(config.offload_modules or ())
    if config.fine_grained_activation_offloading and inside:
        raise ValueError(
            f"offload_modules={config.offload_modules}: {_OFFLOADED}; leave out {', '.join(sorted(inside))}"
        )
    if isinstance(strategy.sharding, Fsep):
        if config.add_bias_linear:
            raise ValueError(
                f"add_bias_linear=True, and strategy {strategy.name!r} has sharding=Fsep, for which Megatron's biases "
                "are not cut; set add_bias_linear=False, or choose Ep"
            )
        width, num_ranks = config.moe_latent_size or config.hidden_size, config.expert_model_parallel_size
        if width % num_ranks:
            raise ValueError(
                f"expert_model_parallel_size={num_ranks} does not divide the width {width} of experts, which Fsep "
                "cuts; choose ranks that do, or Ep"
            )


def activation_of(config: TransformerConfig, experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the activation of ``experts`` [N, 2I] to [N, I], or [N, I] without a gate; None for SwiGLU."""
    function, offset, most = config.activation_func, config.glu_linear_offset, config.activation_func_clamp_value
    if not config.gated_linear_unit:
        return function
    blocks = config.moe_mlp_glu_interleave_size if isinstance(experts, TEGroupedMLP) else None
    if function is silu and not offset and most is None and blocks is None:
        return None

    def gated(x_N2I: Tensor) -> Tensor:
        if blocks is not None:
            x_N2I = TEGroupedMLP._remove_glu_interleaving(x_N2I, blocks)
        gate_NI, up_NI = x_N2I.chunk(2, dim=-1)
        if most is not None:
            gate_NI, up_NI = gate_NI.clamp(max=most), up_NI.clamp(-most, most)
        return function(gate_NI) * (up_NI + offset)

    return gated
