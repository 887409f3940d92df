"""Masters: where the float32 parameters of a layer's experts are kept, as ``ExpertStore`` sees it.

E experts, P_e parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moesys.moe.shards import ExpertShards


class Masters:
    """One parameter of logical shape [E, P_e], of which this rank has the part that ``shards`` says.

    Who keeps masters elsewhere, as several tensors, in other shardings or with biases, offers the same five methods.

    ``parameters``: the layer's table of parameters, and ``name`` the one in it. It is looked up at every use, as moves
    between devices and ``load_state_dict(assign=True)`` may put another parameter in its place. To hold the layer
    instead would be a circle of references, and a layer that is dropped would keep its memory until Python collects it.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], name: str, shards: ExpertShards, mesh: DeviceMesh | None
    ) -> None:
        self._parameters, self._name, self._shards, self._mesh = parameters, name, shards, mesh

    def differentiable(self) -> Tensor:
        """Returns this rank's part as backward knows it."""
        return _local(self._parameter)

    def local(self) -> Tensor:
        """Returns this rank's part, outside of autograd."""
        return _local(self._parameter.detach())

    def full(self) -> Tensor:
        """Returns all experts [E, P_e] on every rank. A collective."""
        masters = self._parameter.detach()
        return masters.full_tensor() if isinstance(masters, DTensor) else masters

    @torch.no_grad()
    def load(self, expert: int, flat_P: Tensor) -> None:
        """Writes this rank's part of an expert, whose parameters are ``flat_P`` [P_e]."""
        self._shards.keep(self.local(), expert, flat_P)

    @torch.no_grad()
    def accumulate_gradient(self, gradient: Tensor) -> None:
        """Adds this rank's part of the gradient, which autograd is not there to add, to ``.grad``."""
        parameter = self._parameter
        if parameter.grad is None:
            parameter.grad = distributed(gradient, self._shards, self._mesh)
        else:
            _local(parameter.grad).add_(gradient)

    @property
    def _parameter(self) -> nn.Parameter:
        parameter = self._parameters[self._name]
        assert parameter is not None
        return parameter


def distributed(local: Tensor, shards: ExpertShards, mesh: DeviceMesh | None) -> Tensor:
    """Returns a tensor of logical shape [E, P_e] of which ``local`` is this rank's part; without a mesh that is all."""
    if mesh is None:
        return local
    size = torch.Size((shards.shape.num_experts, shards.shape.expert_parameters))
    return DTensor.from_local(local, mesh, [Shard(shards.shard_dim)], run_check=False, shape=size, stride=(size[1], 1))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
