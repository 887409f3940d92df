"""Masters: where the parameters of a layer's experts are kept, as ``ExpertStore`` sees it.

E experts, P_e parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moesys.moe.ranks import check_order
from moesys.moe.shards import ExpertShards
from moesys.torch_private import hide_backward, hooks_of


class Masters(Protocol):
    """This rank's part of the masters: one flat tensor, or one for each part of an expert (``ExpertForm``)."""

    def differentiable(self) -> tuple[Tensor, ...]:
        """Returns them as backward knows them."""

    def local(self) -> tuple[Tensor, ...]:
        """Returns them outside of autograd."""

    @property
    def device(self) -> torch.device:
        """Returns where they are."""

    @property
    def at_hand(self) -> bool:
        """Whether ``local`` has them now, outside of the layer's own forward and backward."""

    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients, which autograd is not there to add, to ``.grad``."""

    @property
    def may_delay(self) -> bool:
        """Whether ``accumulate_gradient`` is possible."""

    def expect_gradient(self, *, late: bool) -> None:
        """Says whether the gradient of the backward that runs comes ``late``, by ``accumulate_gradient``."""

    def state(self) -> tuple[int, ...] | None:
        """Returns the parameter's id, and what differs where masters may have changed, beside steps of optimizers; None
        where nothing says so, and as long as they have no gradient.
        """


class OutsideMasters:
    """Masters that are somebody else's parameters. ``read`` gives them as they lie at the moment, ``DTensor``s or this
    rank's part; ``shapes`` are those of the parts.

    They are read at every use, and never kept: FSDP frees them after forward and brings them again for backward.
    ``add_gradients``: adds to their gradients what autograd is not there to add.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        add_gradients: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self._read, self._shapes, self._add = read, [tuple(shape) for shape in shapes], add_gradients
        self._checked_mesh: DeviceMesh | None = None

    @property
    def may_delay(self) -> bool:
        return self._add is not None

    def expect_gradient(self, *, late: bool) -> None:
        """Nothing depends on it."""

    def state(self) -> None:
        """Returns None: FSDP fills the same storage anew, and no version says so."""

    def differentiable(self) -> tuple[Tensor, ...]:
        read = self._read()
        for master in read:
            if isinstance(master, DTensor) and master.device_mesh is not self._checked_mesh:
                check_order(master.device_mesh)
                self._checked_mesh = master.device_mesh
        masters = tuple(local_part(master) for master in read)
        if (found := [tuple(master.shape) for master in masters]) != self._shapes:
            raise ValueError(
                f"masters of shapes {found} are not this rank's part of the experts, which is {self._shapes}; shard "
                "them over exactly the ranks of the group, as the strategy's sharding does"
            )
        return masters

    def local(self) -> tuple[Tensor, ...]:
        return tuple(master.detach() for master in self.differentiable())

    @property
    def device(self) -> torch.device:
        return self._read()[0].device

    @property
    def at_hand(self) -> bool:
        return [tuple(local_part(master).shape) for master in self._read()] == self._shapes

    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        assert self._add is not None
        self._add(gradients)


class OwnMasters:
    """One parameter of logical shape [E, P_e], float32, of which this rank has the part that ``shards`` says.

    ``parameters``: the layer's table of parameters, and ``name`` the one in it. It is looked up at every use, as moves
    between devices and ``load_state_dict(assign=True)`` may put another parameter in its place. To hold the layer
    instead would be a circle of references, and a layer that is dropped would keep its memory until Python collects it.
    """

    at_hand = may_delay = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], name: str, shards: ExpertShards, mesh: DeviceMesh | None
    ) -> None:
        self._parameters, self._name, self._shards, self._mesh = parameters, name, shards, mesh

    @property
    def device(self) -> torch.device:
        return self._parameter.device

    def differentiable(self) -> tuple[Tensor, ...]:
        return (local_part(self._parameter),)

    def local(self) -> tuple[Tensor, ...]:
        return (local_part(self._parameter.detach()),)

    @torch.no_grad()
    def state(self) -> tuple[int, ...] | None:
        parameter = self._parameter
        # A parameter that nobody trains has none for good, and what writes into it is told by nothing.
        if parameter.grad is None or parameter.is_inference():
            return None
        local = local_part(parameter)
        return id(parameter), local.data_ptr(), parameter._version, local._version

    def full(self) -> Tensor:
        """Returns all experts [E, P_e] on every rank. A collective."""
        masters = self._parameter.detach()
        return masters.full_tensor() if isinstance(masters, DTensor) else masters

    @torch.no_grad()
    def load(self, expert: int, flat_P: Tensor) -> None:
        """Writes this rank's part of an expert, whose parameters are ``flat_P`` [P_e]."""
        self._shards.keep(self.local()[0], expert, flat_P)

    def expect_gradient(self, *, late: bool) -> None:
        hide_backward(self._parameter, hide=late)

    @torch.no_grad()
    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        self.expect_gradient(late=False)
        parameter = self._parameter
        gradient = distributed(gradients[0], self._shards, self._mesh)
        # As autograd does. Where one rank alone has hooks its gradient still travels as late as those of the others.
        for hook in hooks_of(parameter):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            local_part(parameter.grad).add_(local_part(gradient))
        for hook in hooks_of(parameter, behind=True):
            hook(parameter)

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


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a ``DTensor``; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
