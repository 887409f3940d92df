"""How transformers' models run under a strategy over ranks: an implementation of its expert parallelism.

transformers makes one instance for every experts module, inside ``from_pretrained``, when parameters are ``DTensor``s
without memory. FSDP wraps the module later, and weights are loaded after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed.expert_parallel import EPImplementation

from moesys.config import Fsep, MegaKernel, ModelShape, Strategy
from moesys.hf.experts_module import ExpertsModule, compute_dtype
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, RowFunction, by_rows, by_rows_backward
from moesys.moe.expert_form import ExpertForm, Part
from moesys.moe.experts import Experts, attach
from moesys.moe.outside import OutsideExperts
from moesys.overlap.experts_cpu import SWIGLU
from moesys.overlap.experts_on_device import ExpertFunction
from moesys.torch_private import strided_shard


def implementation_of(strategy: Strategy) -> type[EPImplementation]:
    """Returns the class whose instances run experts modules under ``strategy``.

    Raises ValueError where transformers' models cannot.
    """
    if isinstance(strategy.overlap, MegaKernel):
        raise ValueError(
            f"strategy {strategy.name!r} has overlap=MegaKernel, which transformers' experts do not run yet; use "
            "Sequential() or Pipelined(chunks=...)"
        )
    layer_indices = count()

    class StrategyExperts(EPImplementation):
        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._module = experts
            self._experts = _experts_of(experts, strategy, ep_mesh, next(layer_indices))
            attach(self._experts, experts)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            self._experts.training = self._module.training
            if self.tp_mesh.size() > 1:
                return _cut_over(self.tp_mesh, self._run, hidden_states, top_k_index, top_k_weights)
            return self._run(hidden_states, top_k_index, top_k_weights)

        def _run(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
            dtype = compute_dtype(self._experts.store.masters.local()[0])
            y_TH: Tensor = self._experts(x_TH.to(dtype), expert_TK, weight_TK)
            return y_TH.to(x_TH.dtype)

    return StrategyExperts


def _experts_of(module: Any, strategy: Strategy, ep_mesh: DeviceMesh, layer_index: int) -> Experts:
    """Returns the module's experts under ``strategy``, and cuts its parameters as that asks for."""
    experts = ExpertsModule.of(module)
    kind = type(module).__name__
    if experts.norm is not None or experts.parameters:
        raise ValueError(f"{kind} has a norm or an activation with parameters of its own, which moesys does not shard")
    names = experts.names
    if isinstance(strategy.sharding, Fsep):
        _cut_inside_experts(module, names, ep_mesh)
    form = ExpertForm(tuple(_part(module, name) for name in names))
    up, down = form.parts[:2]
    hidden_size, width = reversed(down.shape) if experts.transposed else down.shape
    shape = ModelShape(
        hidden_size=hidden_size,
        intermediate_size=width,
        num_experts=_whole_size(module, names[0])[0],
        top_k=_top_k(module),
    )
    function = ExpertFunction(
        SWIGLU if experts.swiglu else _row_function(experts.activation, up.shape[int(experts.transposed)] // width),
        experts.transposed,
        biases=len(names) == 4,
    )

    def read() -> list[Tensor]:
        return [module._parameters[name] for name in names]

    return Experts(shape, strategy, ep_mesh, layer_index=layer_index, outside=OutsideExperts(read, form, function))


def _top_k(module: Any) -> int:
    config = module.config
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"):
        if (top_k := getattr(config, name, None)) is not None:
            return int(top_k)
    raise ValueError(f"{type(config).__name__} does not say how many experts a token has: no num_experts_per_tok")


def _whole_size(module: Any, name: str) -> torch.Size:
    return module._parameters[name].shape


def _part(module: Any, name: str) -> Part:
    """Returns one expert's part of a parameter, and where Fsep cuts it."""
    shape = tuple(_whole_size(module, name)[1:])
    return Part(shape, dim=0, blocks=2 if _is_joined(module, name) else 1)


def _is_joined(module: Any, name: str) -> bool:
    """Whether a parameter is loaded from two of a checkpoint, one behind the other, each cut by itself."""
    return name.startswith("gate_up_proj") and getattr(module, "is_concatenated", True)


def _cut_inside_experts(module: Any, names: tuple[str, ...], ep_mesh: DeviceMesh) -> None:
    """Cuts every expert over the ranks, where transformers has given each rank some whole ones."""
    for name in names:
        parameter = module._parameters[name]
        part = _part(module, name)
        part.sliced_shape(ep_mesh.size())
        placement = Shard(1) if part.blocks == 1 else strided_shard(1, part.blocks)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        module._parameters[name] = nn.Parameter(
            distribute_tensor(whole, ep_mesh, [placement], src_data_rank=None), requires_grad=parameter.requires_grad
        )
    # What transformers set when it gave each rank some experts.
    module.num_experts = _whole_size(module, names[0])[0]
    module._is_expert_parallel = False


def _row_function(function: Callable[[Tensor], Tensor], halves: int) -> RowFunction:
    none = ParameterGradients((), ())
    return RowFunction(partial(by_rows, function), partial(by_rows_backward, function, gradients=none), halves)


def _cut_over(tp_mesh: DeviceMesh, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns ``run`` of the tokens, which all ranks of ``tp_mesh`` have alike: each runs its part of them."""
    parts = (
        DTensor.from_local(tensor, tp_mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        for tensor in tensors
    )
    y_TH = run(*(part.to_local() for part in parts)).contiguous()
    size = tensors[0].shape
    return DTensor.from_local(y_TH, tp_mesh, [Shard(0)], run_check=False, shape=size, stride=(size[1], 1)).full_tensor()
