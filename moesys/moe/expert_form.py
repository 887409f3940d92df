"""ExpertForm: which tensors an expert is made of, and how each is cut over ranks.

On the wire, and where gradients are collected, an expert is one vector of P elements: its tensors one after another,
``gate_up``, ``down`` and, where it has them, their biases. Masters may lie so too, [E, P], or tensor by tensor, as
models of other libraries keep them.

R ranks, E experts, P elements of an expert, s of a rank's slice of it on the wire, D experts held by a rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moesys.config import ModelShape
from moesys.overlap.held_experts import ExpertGradients, ExpertWeights


@dataclass(frozen=True)
class Part:
    """One tensor of an expert.

    shape: of one expert. dim: where FSEP cuts it over ranks.
    """

    shape: tuple[int, ...]
    dim: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def sliced_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Returns a rank's slice. Raises ValueError where ranks do not divide it."""
        size = self.shape[self.dim]
        if size % num_ranks:
            raise ValueError(
                f"an expert's tensor of {self.shape} is cut by Fsep in dimension {self.dim} over {num_ranks} ranks, "
                f"which do not divide {size}; use ranks that do, or Ep"
            )
        return (*self.shape[: self.dim], size // num_ranks, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class ExpertForm:
    """The tensors of an expert, in the order of ``ExpertWeights``."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(shape: ModelShape) -> ExpertForm:
        """Returns that of our own experts: SwiGLU without biases, as transformers' experts lie."""
        H, I = shape.hidden_size, shape.intermediate_size
        return ExpertForm((Part((2 * I, H)), Part((H, I))))

    @property
    def num_elements(self) -> int:
        """P."""
        return sum(part.num_elements for part in self.parts)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of experts [..., at least P] as views."""
        sizes = [part.num_elements for part in self.parts]
        flats = flat[..., : self.num_elements].split(sizes, dim=-1)
        return tuple(each.unflatten(-1, part.shape) for each, part in zip(flats, self.parts, strict=True))

    def weights(self, flat: Tensor) -> ExpertWeights:
        return ExpertWeights(*self.views(flat))

    def gradients(self, flat_DP: Tensor) -> ExpertGradients:
        return ExpertGradients(*self.views(flat_DP))


class Slices(ABC):
    """How FSEP cuts experts into the slices of ranks."""

    def __init__(self, form: ExpertForm, num_ranks: int) -> None:
        self.form, self.num_ranks = form, num_ranks

    @property
    @abstractmethod
    def wire_slice(self) -> int:
        """s."""

    @abstractmethod
    def shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of a rank's masters, of one expert."""

    @abstractmethod
    def to_wire(self, masters: Sequence[Tensor], wire_Es: Tensor) -> Tensor:
        """Writes this rank's slices of all experts, [E, s], and returns them."""

    @abstractmethod
    def from_wire(self, slices_Es: Tensor) -> tuple[Tensor, ...]:
        """Returns slices in the shapes of this rank's masters."""

    @abstractmethod
    def join(self, received_RDs: Tensor, whole_DP: Tensor) -> Tensor:
        """Writes whole experts [D, R·s] from the slices of all ranks, and returns them."""

    @abstractmethod
    def cut(self, whole_DP: Tensor, slices_RDs: Tensor) -> Tensor:
        """Writes the slices of all ranks, [R, D, s], of whole experts [D, R·s], and returns them."""


class FlatSlices(Slices):
    """Of masters [E, P]: rank r has elements [r·s, (r+1)·s) of every expert, s = ceil(P/R), the last ranks fewer or
    none. Only on the wire are slices padded to s.
    """

    @property
    def wire_slice(self) -> int:
        return -(-self.form.num_elements // self.num_ranks)

    def of_rank(self, rank: int) -> range:
        """Returns the elements that a rank has."""
        P, s = self.form.num_elements, self.wire_slice
        return range(min(P, rank * s), min(P, (rank + 1) * s))

    def shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return ((len(self.of_rank(rank)),),)

    def to_wire(self, masters: Sequence[Tensor], wire_Es: Tensor) -> Tensor:
        (local_EP,) = masters
        wire_Es[:, : local_EP.shape[1]] = local_EP
        wire_Es[:, local_EP.shape[1] :] = 0
        return wire_Es

    def from_wire(self, slices_Es: Tensor) -> tuple[Tensor, ...]:
        return (slices_Es,)

    def join(self, received_RDs: Tensor, whole_DP: Tensor) -> Tensor:
        self._by_rank(whole_DP).copy_(received_RDs)
        return whole_DP

    def cut(self, whole_DP: Tensor, slices_RDs: Tensor) -> Tensor:
        return slices_RDs.copy_(self._by_rank(whole_DP))

    def _by_rank(self, whole_DP: Tensor) -> Tensor:
        return whole_DP.view(len(whole_DP), self.num_ranks, self.wire_slice).transpose(0, 1)


class PartSlices(Slices):
    """Of masters that lie tensor by tensor, each cut as its ``Part`` says."""

    def __init__(self, form: ExpertForm, num_ranks: int) -> None:
        super().__init__(form, num_ranks)
        self._slice_shapes = [part.sliced_shape(num_ranks) for part in form.parts]

    @property
    def wire_slice(self) -> int:
        return self.form.num_elements // self.num_ranks

    def shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self._slice_shapes)

    def to_wire(self, masters: Sequence[Tensor], wire_Es: Tensor) -> Tensor:
        for place_EN, master in zip(self._split(wire_Es), masters, strict=True):
            place_EN.copy_(master.flatten(1))
        return wire_Es

    def from_wire(self, slices_Es: Tensor) -> tuple[Tensor, ...]:
        parts = zip(self._split(slices_Es), self._slice_shapes, strict=True)
        return tuple(part_EN.unflatten(1, shape) for part_EN, shape in parts)

    def join(self, received_RDs: Tensor, whole_DP: Tensor) -> Tensor:
        for by_rank, slices in self._pairs(whole_DP, received_RDs):
            by_rank.copy_(slices)
        return whole_DP

    def cut(self, whole_DP: Tensor, slices_RDs: Tensor) -> Tensor:
        for by_rank, slices in self._pairs(whole_DP, slices_RDs):
            slices.copy_(by_rank)
        return slices_RDs

    def _split(self, wire: Tensor) -> tuple[Tensor, ...]:
        return wire.split([math.prod(shape) for shape in self._slice_shapes], dim=-1)

    def _pairs(self, whole_DP: Tensor, slices_RDs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns views of the same elements, tensor by tensor: in whole experts, and in slices."""
        flats = whole_DP.split([part.num_elements for part in self.form.parts], dim=1)
        pairs = []
        for part, flat_DN, slices in zip(self.form.parts, flats, self._split(slices_RDs), strict=True):
            before, behind = math.prod(part.shape[: part.dim]), math.prod(part.shape[part.dim + 1 :])
            rows = part.shape[part.dim] // self.num_ranks
            by_rank = flat_DN.unflatten(1, (before, self.num_ranks, rows, behind)).permute(2, 0, 1, 3, 4)
            pairs.append((by_rank, slices.unflatten(2, by_rank.shape[2:])))
        return pairs
