"""Where expert parameters live, how they get into slots, and how gradients get home: what EP and FSEP share.

Both keep float32 masters of logical shape [E, P_e], which ``WholeExperts`` (EP) shards over experts and
``ShardedExperts`` (FSEP) over all ranks, expert by expert: what a ``DTensor`` calls ``Shard(0)`` and ``Shard(1)``, so
that distributed checkpoints reshard by themselves.

Restoring gives a rank the experts its layout holds, in the compute dtype; resharding returns the gradients of its
slots to the owners, who add them in rank order: in float32, or in float64, where no order shows (``LayoutInvariant``).

R ranks, E experts, P_e parameters of an expert, D distinct experts held by this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.kernels.cpu.page_pool import PagePool
from moesys.kernels.host_copies import to_device
from moesys.layout import ExpertLayout
from moesys.moe.expert_form import ExpertForm
from moesys.moe.kept_casts import KeptCasts
from moesys.overlap.comm.channel import Channel
from moesys.overlap.held_experts import ExpertWeights
from moesys.overlap.routes import held_experts


class Restored(Sequence[ExpertWeights]):
    """The held experts by slot index. ``wait`` first.

    A rank's own are its masters, which their user casts on use; or, with ``keep_casts``, they are cast here when they
    are first asked for and stay so, for a backward that follows. ``finish`` gives them stacked, flat [D, P] or part by
    part, or one by one.
    """

    def __init__(
        self,
        form: ExpertForm,
        dtype: torch.dtype,
        memory: PagePool,
        device: torch.device,
        finish: Callable[[], Finished],
        spread: Callable[[], None] | None,
    ) -> None:
        self._form, self._memory, self.dtype, self.device = form, memory, dtype, device
        self._finish: Callable[[], Finished] | None = finish
        self._spread = spread
        self._experts: list[ExpertWeights] | None = None
        self._together: ExpertWeights | None = None
        self.keep_casts = False
        # Of masters, which other micro-batches cast too.
        self.kept: KeptCasts | None = None

    def spread(self) -> Restored:
        """Start what is left to start, so that it does not queue behind the restores of other layers. A collective."""
        if self._spread is not None:
            self._spread()
            self._spread = None
        return self

    def wait(self) -> Restored:
        if self._experts is None:
            self.spread()
            assert self._finish is not None
            # With it goes what travelled, of which experts were put together.
            finished, self._finish = self._finish(), None
            if isinstance(finished, Tensor):
                finished = self._form.weights(finished)
            if isinstance(finished, ExpertWeights):
                self._together = finished
                finished = unstacked(finished)
            self._experts = list(finished)
        return self

    def __len__(self) -> int:
        return len(self.wait()._experts or ())

    def __getitem__(self, slot: int) -> ExpertWeights:  # type: ignore[override]
        assert self._experts is not None
        weights = self._experts[slot]
        if self.keep_casts and weights.gate_up.dtype != self.dtype:
            weights = self._experts[slot] = self._cast(weights)
        return weights

    def _cast(self, weights: ExpertWeights) -> ExpertWeights:
        cast = self._form.weights(self._memory.empty((self._form.num_elements,), self.dtype, self.device))
        _copy(weights, cast)
        return cast

    def stacked(self) -> ExpertWeights:
        """All of them in the compute dtype, [D, 2I, H] and [D, H, I]: views of what was restored where it is one tensor
        of that dtype, else of a copy, which ``keep_casts`` keeps if it is a cast, for other micro-batches in ``kept``.
        """
        if self._together is not None and self._together.gate_up.dtype == self.dtype:
            return self._together
        assert self._experts is not None
        kept = self.kept if self.keep_casts and self._together is not None else None
        if kept is not None and (found := kept.find(self.dtype)) is not None:
            self._together = found
            return found
        size = (len(self._experts), self._form.num_elements)
        stacked = self._form.weights(self._memory.empty(size, self.dtype, self.device))
        if self._together is not None:
            _copy(self._together, stacked)
        else:
            for place, weights in zip(unstacked(stacked), self._experts, strict=True):
                _copy(weights, place)
        # Masters are float32: what has that dtype is no cast.
        if self.keep_casts and self.dtype != torch.float32:
            self._together = stacked
            if kept is not None:
                kept.keep(stacked)
        return stacked


# Distinct experts of each rank, [R], in the order of their slots.
HeldByRank = list[tuple[int, ...]]

# What a restore ends with: held experts stacked, flat [D, at least P] or part by part, or one by one.
Finished = Tensor | ExpertWeights | Sequence[ExpertWeights]

# What a return of gradients ends with: waits for them, and gives the masters'.
Finish = Callable[[], tuple[Tensor, ...]]
# What it goes on with: sends home what has not set off yet, from node to node or all of it. A collective.
Cross = Callable[[], Finish]


def index_of(values: Sequence[int], like: Tensor) -> Tensor:
    """Returns ``values`` as an index of rows on the device of ``like``."""
    return to_device(values, like.device)


def unstacked(stacked: ExpertWeights) -> list[ExpertWeights]:
    """Returns each expert of [D, ...]."""
    parts = [part for part in stacked if part is not None]
    return [ExpertWeights(*expert) for expert in zip(*parts, strict=True)]


class ExpertShards(ABC):
    """This rank's part of the masters' geometry. The masters themselves are passed in: one tensor, flat; or, where they
    are of a ``form``, one for each of its parts.

    ``memory``: where restored experts and slot gradients lie; the layers of a linked model share one.
    """

    shard_dim: Literal[0, 1]

    def __init__(self, shape: ModelShape, rank: int, num_ranks: int, form: ExpertForm | None = None) -> None:
        self.shape, self.rank, self.num_ranks = shape, rank, num_ranks
        self.form, self.flat = form or ExpertForm.of(shape), form is None
        self.memory = PagePool()

    @abstractmethod
    def initial(self, seed: int, layer_index: int) -> Tensor:
        """This rank's float32 part of flat masters; at no time does it hold more than one expert besides."""

    @abstractmethod
    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        """Write this rank's part of an expert, whose parameters are ``flat_P`` [P_e], into flat masters."""

    @property
    @abstractmethod
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of this rank's masters."""

    @abstractmethod
    def restore(
        self, masters: Sequence[Tensor], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> Restored:
        """Start bringing the experts that this rank is to hold, to be computed with in ``dtype``."""

    @abstractmethod
    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Cross:
        """Start on the way home of slot gradients [D, padded_parameters]: what is summed inside nodes before it leaves
        them. What goes home by itself sets off with the rest.
        """

    @property
    @abstractmethod
    def padded_parameters(self) -> int:
        """Columns of a slot-gradient buffer: P, or R·s."""

    def new_gradients(self, layout: ExpertLayout, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for slot gradients, [D, padded_parameters]."""
        num_held = len(held_experts(layout.experts_of(self.rank)))
        return self.memory.empty((num_held, self.padded_parameters), dtype, device)

    def restored(
        self,
        dtype: torch.dtype,
        device: torch.device,
        finish: Callable[[], Finished],
        spread: Callable[[], None] | None = None,
    ) -> Restored:
        """What ``restore`` returns. ``spread``, if any, starts a second phase; ``finish``, called after it, waits and
        gives the held experts by slot.
        """
        return Restored(self.form, dtype, self.memory, device, finish, spread)

    def together(self, early: Restored, early_experts: Sequence[int], late: Restored, held: Sequence[int]) -> Restored:
        """What two restores bring, as one: ``held``, of which ``early_experts`` came ahead."""
        late_experts = [expert for expert in held if expert not in early_experts]

        def spread() -> None:
            early.spread()
            late.spread()

        def finish() -> Finished:
            by_expert = dict(zip(early_experts, early.wait(), strict=True))
            by_expert |= zip(late_experts, late.wait(), strict=True)
            return [by_expert[expert] for expert in held]

        return Restored(self.form, early.dtype, self.memory, early.device, finish, spread)

    def share_with(self, first: ExpertShards) -> None:
        """Use the memory of ``first``, as the layers of a linked model do."""
        self.memory = first.memory

    def unshare(self) -> None:
        """Have memory of one's own again."""
        self.memory = PagePool()

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """Memory of the dtype and device of ``like``."""
        return self.memory.empty(shape, like.dtype, like.device)

    def held_by_rank(self, layout: ExpertLayout) -> HeldByRank:
        return [held_experts(layout.experts_of(rank)) for rank in range(self.num_ranks)]


def _copy(weights: ExpertWeights, into: ExpertWeights) -> None:
    for place, tensor in zip(into, weights, strict=True):
        if place is not None and tensor is not None:
            place.copy_(tensor)


def add_in_order(parts: Iterable[Tensor], rows: Sequence[int], total_NP: Tensor) -> Tensor:
    """Returns ``total``, zeros and then ``total[rows[n]] += parts[n]`` for n = 0, 1, ... in that order."""
    total_NP.zero_()
    for part, row in zip(parts, rows, strict=True):
        total_NP[row] += part
    return total_NP
