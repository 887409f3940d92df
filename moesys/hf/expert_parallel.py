"""How transformers' models run under a strategy over ranks: an implementation of its expert parallelism.

transformers makes one instance for every experts module, inside ``from_pretrained``, when parameters are ``DTensor``s
without memory. FSDP wraps the module later, and weights are loaded after that.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from moesys.config import Strategy
from moesys.hf.checkpoint_check import check_before_loading
from moesys.hf.experts_module import compute_dtype
from moesys.hf.strategy_experts import check, shard, strategy_experts
from moesys.kernels.cpu.page_pool import PagePool
from moesys.moe.experts import Experts
from moesys.torch_private import unseen_by_selective_checkpoints


def implementation_of(strategy: Strategy) -> type[EPImplementation]:
    """Returns the class whose instances run experts modules under ``strategy``.

    Raises ValueError where transformers' models cannot.
    """
    check(strategy)
    newest = _Model(None)

    class StrategyExperts(EPImplementation):
        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._module = experts
            nonlocal newest
            if newest.ep_mesh is not ep_mesh:
                check_before_loading(experts.config)
                newest = _Model(ep_mesh)
            num_batches = dist.get_world_size() // tp_mesh.size()
            # FSDP computes in bfloat16 if DistributedConfig asks for mixed precision.
            distributed = getattr(experts.config, "distributed_config", None)
            dtype = torch.bfloat16 if getattr(distributed, "fsdp_mixed_precision", False) else None
            layer_index = next(newest.layer_indices)
            self._experts = strategy_experts(experts, strategy, ep_mesh, layer_index, num_batches, dtype=dtype)
            shard(experts, self._experts)
            self._experts.shards.memory = newest.memory

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if self.tp_mesh.size() > 1:
                return _cut_over(self.tp_mesh, self._run, hidden_states, top_k_index, top_k_weights)
            return self._run(hidden_states, top_k_index, top_k_weights)

        def _run(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
            return run(self._experts, self._module.training, x_TH, expert_TK, weight_TK)

    return StrategyExperts


class _Model:
    """What the layers of one model share, which transformers gives all the same mesh: numbers from 0 on, and memory, as
    they take turns.
    """

    def __init__(self, ep_mesh: DeviceMesh | None) -> None:
        self.ep_mesh, self.layer_indices, self.memory = ep_mesh, count(), PagePool()


@unseen_by_selective_checkpoints
def run(experts: Experts, training: bool, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Returns y [T, H] in x's dtype, computed in autocast's or else in that of the experts."""
    experts.training = training
    dtype = compute_dtype(experts.store.masters.local()[0])
    # A copy, as experts' output lies in a page, and FSDP loses its hooks where a model adds to such a view in place.
    return experts(x_TH.to(dtype), expert_TK, weight_TK).to(x_TH.dtype, copy=True)


def _cut_over(tp_mesh: DeviceMesh, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns ``run`` of the tokens, which all ranks of ``tp_mesh`` have alike: each runs its part of them."""
    parts = (
        DTensor.from_local(tensor, tp_mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        for tensor in tensors
    )
    y_TH = run(*(part.to_local() for part in parts)).contiguous()
    size = tensors[0].shape
    return DTensor.from_local(y_TH, tp_mesh, [Shard(0)], run_check=False, shape=size, stride=(size[1], 1)).full_tensor()
