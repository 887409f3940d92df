"""The store of a layer's experts: how they get from masters into slots, and gradients to owners.

Masters are float32 and have the logical shape [E, P_e]. ``WholeExperts`` (EP) shards them over experts, and
``ShardedExperts`` (FSEP) shards every expert over all ranks: ``Shard(0)`` and ``Shard(1)`` of a ``DTensor``, so that
distributed checkpoints reshard by themselves.

The weights of an expert pass six classes. ``Masters`` have the parameters; ``ExpertShards`` know which part of them
this rank owns, and which messages take them where. The ``ExpertStore`` of a layer creates an ``ExpertTransfer``, which
sends these messages and returns ``RestoredExperts``, a sequence of one ``ExpertWeights`` per slot. An ``ExpertForm``
declares the tensors of an expert.

Restoring gives a rank the experts its layout holds, in the compute dtype; resharding returns the gradients of its
slots to the owners, who add them in rank order: in float32, or in float64, where no order shows (``LayoutInvariant``).

R ranks, E experts, P_e parameters of an expert, D distinct experts held by this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from moesys.balance.layout_schedule import LayoutSchedule
from moesys.config import LayoutInvariant, ModelShape, Sharding
from moesys.kernels.cpu.page_pool import PagePool
from moesys.kernels.launch import to_device
from moesys.layout import ExpertLayout
from moesys.moe.masters import Expert, ExpertForm, Master, Masters
from moesys.overlap.comm.channel import Channel
from moesys.overlap.executor import Adapters, ExpertGradients, ExpertWeights


class RestoredExperts(Sequence[ExpertWeights]):
    """The experts that a rank holds, by slot index: ``experts``, stacked or one by one.

    A rank's own experts are its masters, which their user casts on use. Once ``keeper`` is set, they are cast here when
    they are first asked for, and the casts stay for a backward that follows; ``keeper``, the masters, keep a cast of
    all experts for other micro-batches. Masters that do not lie as an expert is computed are copied when they are first
    asked for, until ``drop_copies``. ``apart``: tensors of an expert lie apart from each other when they are stacked.
    """

    def __init__(
        self,
        form: ExpertForm,
        dtype: torch.dtype,
        memory: PagePool,
        device: torch.device,
        experts: ExpertWeights | Sequence[Expert],
        apart: bool = False,
    ) -> None:
        self._form, self._dtype, self._memory, self._device, self._apart = form, dtype, memory, device, apart
        self._together = experts if isinstance(experts, ExpertWeights) else None
        self.masters: list[Expert] = list(unstacked(experts) if isinstance(experts, ExpertWeights) else experts)
        self._copies: dict[int, ExpertWeights] = {}
        self.keeper: Masters | None = None
        # LoRA on them, for one pass.
        self.adapters: Adapters | None = None

    def __len__(self) -> int:
        return len(self.masters)

    def __getitem__(self, slot: int) -> ExpertWeights:  # type: ignore[override]
        masters = self.masters[slot]
        if self.keeper is not None and masters[0].dtype != self._dtype:
            cast = self.masters[slot] = self._usable(masters)
            return cast
        if isinstance(masters, ExpertWeights):
            return masters
        if slot not in self._copies:
            self._copies[slot] = self._usable(masters)
        return self._copies[slot]

    def by_slot(self) -> Sequence[ExpertWeights]:
        """Returns the experts by slot index, each to be cast by its user where it has another dtype."""
        ready = [masters for masters in self.masters if isinstance(masters, ExpertWeights)]
        return self if self._casts_stay() or len(ready) < len(self) else ready

    def drop_copies(self) -> None:
        """Frees the copies that are no casts; the next pass makes its own."""
        self._copies.clear()

    def _usable(self, masters: Expert) -> ExpertWeights:
        """Returns an expert in the compute dtype: its masters, or copies of those that do not lie so."""
        weights = {}
        for part, pieces in zip(self._form.joined.parts, self._form.pieces(masters).values(), strict=True):
            weights[part.name] = pieces[0]
            if len(pieces) > 1 or pieces[0].dtype != self._dtype or not pieces[0].is_contiguous():
                weights[part.name] = self._new(part.shape)
                _write(pieces, weights[part.name])
        return ExpertWeights(**weights)

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        return self._memory.empty(shape, self._dtype, self._device)

    def stacked(self) -> ExpertWeights:
        """Returns all of them in the compute dtype, [D, 2I, H] and [D, H, I]: views of the experts if they are one
        tensor of that dtype, else of a copy, which stays if it is a cast and ``keeper`` is set.
        """
        if self._together is not None and self._together.gate_up.dtype == self._dtype:
            return self._together
        keeper = self.keeper if self._together is not None else None
        if keeper is not None and (found := keeper.find_cast(self._dtype)) is not None:
            self._together = found
            return found
        form, D = self._form.joined, len(self)
        if self._apart:
            places = {part.name: self._new((D, *part.shape)) for part in form.parts}
        else:
            places = form.views(self._new((D, form.num_elements)))
        held = enumerate(self.masters) if self._together is None else [(slice(D), self._together)]
        for slots, masters in held:
            for name, pieces in self._form.pieces(masters).items():
                _write(pieces, places[name][slots])
        stacked = ExpertWeights(**places)
        if self._casts_stay():
            self._together = stacked
            if keeper is not None:
                keeper.keep_cast(stacked)
        return stacked

    def _casts_stay(self) -> bool:
        return self.keeper is not None and any(masters[0].dtype != self._dtype for masters in self.masters)


T = TypeVar("T")
# The steps of a transfer, which are a collective. Each sends messages, and yields True once all are sent: messages
# behind a False wait until the transfer is started. At last the steps wait for them, and return the result. They may
# return it earlier, if there is nothing more to send.
Steps = Generator[bool, None, T]


class ExpertTransfer(Generic[T]):
    """A transfer of experts to the ranks that hold them, or of gradients to the ranks that own them. Its first messages
    are sent when it is made.

    ``started``: whether ``start`` was called, which sends the others.
    """

    _result: T

    def __init__(self, steps: Steps[T]) -> None:
        self._steps: Steps[T] | None = steps
        self.started, self._all_sent, self._failure = False, False, ""
        self._advance()

    def start(self) -> None:
        """Sends all remaining messages, before those of other layers. A collective.

        Waits for earlier messages of this transfer where later ones depend on them.
        """
        self.started = True
        while not self._all_sent:
            self._advance()

    def finish(self) -> T:
        """Waits, and returns the restored experts, or the gradients of this rank's masters; the same when called again.

        Raises RuntimeError where the transfer has failed before.
        """
        while self._steps is not None:
            self._advance()
        return self._result

    def _advance(self) -> None:
        if self._failure:
            raise RuntimeError(
                f"a transfer of experts failed before, with {self._failure}, so what it sent is lost; end the job, and "
                "resume it from its last checkpoint"
            )
        assert self._steps is not None
        try:
            self._all_sent = next(self._steps)
        except StopIteration as end:
            # The messages that the result was made of are freed with the steps.
            self._result, self._steps, self._all_sent = end.value, None, True
        except BaseException as error:
            self._failure = repr(error)
            raise


def without_messages(result: T) -> Steps[T]:
    """Returns the steps of a transfer that needs no messages."""
    yield True
    return result


# A restore returns the experts that this rank holds, and a reshard the gradients of its masters, part by part.
RestoreSteps = Steps[RestoredExperts]
ReshardSteps = Steps[tuple[Tensor, ...]]
Restore = ExpertTransfer[RestoredExperts]
Reshard = ExpertTransfer[tuple[Tensor, ...]]

# Distinct experts of each rank, [R], in the order of their slots.
HeldByRank = list[tuple[int, ...]]


def index_of(values: Sequence[int], like: Tensor) -> Tensor:
    """Returns ``values`` as an index of rows on the device of ``like``."""
    return torch.tensor(values, dtype=torch.int64) if like.device.type == "cpu" else to_device(values, like.device)


def unstacked(stacked: ExpertWeights) -> list[ExpertWeights]:
    """Returns each expert of [D, ...]."""
    parts = {name: part for name, part in stacked._asdict().items() if part is not None}
    return [ExpertWeights(**dict(zip(parts, expert, strict=True))) for expert in zip(*parts.values(), strict=True)]


class ExpertShards(ABC):
    """How masters are sharded, and which transfers experts and gradients need. The masters themselves are passed in:
    one flat tensor or, with a ``form``, those of each of its parts.

    ``memory``: where restored experts and slot gradients lie, which the layers of a linked model share.
    """

    shard_dim: Literal[0, 1]

    def __init__(self, shape: ModelShape, rank: int, num_ranks: int, form: ExpertForm | None = None) -> None:
        self.shape, self.rank, self.num_ranks = shape, rank, num_ranks
        self.form, self.flat = form or ExpertForm.of(shape), form is None
        self.memory = PagePool()

    @abstractmethod
    def initial(self, seed: int, layer_index: int) -> Tensor:
        """Returns this rank's float32 part of flat masters. It never holds more than one expert besides."""

    @abstractmethod
    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        """Writes this rank's part of an expert, whose parameters are ``flat_P`` [P_e], into flat masters."""

    @property
    @abstractmethod
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of this rank's masters."""

    def keeps_all(self, held: HeldByRank) -> bool:
        """Returns whether every rank holds exactly what it owns, so that no message is sent; the same on all ranks."""
        return self.num_ranks == 1 or self._owners_hold(held)

    def _owners_hold(self, held: HeldByRank) -> bool:
        """Returns the same, of several ranks."""
        return False

    @abstractmethod
    def restore(
        self, masters: Sequence[Master], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> RestoreSteps:
        """Returns the steps of the transfer of this rank's ``held`` experts, which compute in ``dtype``."""

    @abstractmethod
    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        """Returns the steps of the transfer of slot gradients [D, padded_parameters] to the owners of the experts,
        which add them up. Gradients that are first summed inside nodes are sent at once, all others when it is started.
        """

    def can_send_whole(self) -> bool:
        """Returns whether gradients of whole experts can be sent to one rank each, where all ranks have slices."""
        return False

    def reshard_whole(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        """Returns the steps that do so, and return the gradients of E/R experts."""
        raise NotImplementedError

    @property
    @abstractmethod
    def padded_parameters(self) -> int:
        """Columns of a slot-gradient buffer: P, or R·s."""

    def own_rows(self, held: HeldByRank) -> dict[int, int]:
        """Returns the masters' rows of the experts that this rank holds and owns, by slot; none where an expert is put
        together from the slices of all ranks.
        """
        return {}

    def joined(
        self, masters: Sequence[Master], held: HeldByRank, lent: Mapping[int, Expert], dtype: torch.dtype
    ) -> RestoredExperts:
        """Returns the experts that this rank holds: its own, and by slot those that were ``lent``."""
        row_of = self.own_rows(held)
        if [*row_of.values()] == [*range(len(masters[0]))] and not lent:
            return self.all_of(masters, dtype)
        slots = range(len(row_of) + len(lent))
        experts = [lent[slot] if slot in lent else self.one_of(masters, row_of[slot]) for slot in slots]
        return self.restored(dtype, device_of(masters), experts)

    def all_of(self, masters: Sequence[Master], dtype: torch.dtype) -> RestoredExperts:
        """Returns all experts of masters that are whole."""
        experts: ExpertWeights | Sequence[Expert] | None
        if self.flat and isinstance(masters[0], Tensor):
            experts = self.form.weights(masters[0])
        else:
            experts = self._stacked(masters) or [self.one_of(masters, row) for row in range(len(masters[0]))]
        return self.restored(dtype, device_of(masters), experts)

    def one_of(self, masters: Sequence[Master], row: int) -> Expert:
        """Returns one expert of masters that are whole."""
        parts = [master[row] for master in masters]
        return self.form.weights(parts[0]) if self.flat else self._stacked(parts) or parts

    def _stacked(self, parts: Sequence[Master]) -> ExpertWeights | None:
        """Returns one or more experts of their masters; None where these do not lie as experts are computed."""
        weights = {part.name: each for part, each in zip(self.form.joined.parts, parts, strict=False)}
        tensors = {name: each for name, each in weights.items() if isinstance(each, Tensor) and each.is_contiguous()}
        return ExpertWeights(**tensors) if len(tensors) == len(parts) else None

    def new_gradients(self, layout: ExpertLayout, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns memory for slot gradients, [D, padded_parameters]."""
        num_held = len(layout.held_by_rank[self.rank])
        return self.memory.empty((num_held, self.padded_parameters), dtype, device)

    def restored(
        self, dtype: torch.dtype, device: torch.device, experts: ExpertWeights | Sequence[Expert]
    ) -> RestoredExperts:
        """Returns the held ``experts`` by slot, stacked or one by one, to be computed with in ``dtype``."""
        return RestoredExperts(self.form, dtype, self.memory, device, experts, not self.flat)

    def restored_flat(self, flat_DP: Tensor) -> RestoredExperts:
        """Returns the held experts that are [D, at least P], in their compute dtype."""
        return self.restored(flat_DP.dtype, flat_DP.device, self.form.weights(flat_DP))

    def share_with(self, first: ExpertShards) -> None:
        """Uses the memory of ``first`` from now on, as the layers of a linked model do."""
        self.memory = first.memory


def _write(pieces: Sequence[Tensor], place: Tensor) -> None:
    for part, piece in zip(place.split([len(each) for each in pieces]), pieces, strict=True):
        part.copy_(piece)


def device_of(masters: Sequence[Master]) -> torch.device:
    """Returns where masters are."""
    return masters[0].device if isinstance(masters[0], Tensor) else masters[0][0].device


def add_in_order(parts: Iterable[Tensor], rows: Sequence[int], total_NP: Tensor) -> Tensor:
    """Returns ``total``, zeros and then ``total[rows[n]] += parts[n]`` for n = 0, 1, ... in that order."""
    # The sum starts at -0.0, so that the sum of one part is that part, with the signs of its zeros.
    total_NP.fill_(-0.0)
    for part, row in zip(parts, rows, strict=True):
        total_NP[row] += part
    return total_NP


class ExpertStore:
    """Starts the transfers of a layer's experts, for a call or ahead of the coming one, and of their gradients.

    ``schedule`` has the layout of the coming micro-batch. ``channel``: the channel of experts and their gradients,
    which is another than that of tokens in a linked model.
    """

    def __init__(
        self,
        layer_index: int,
        sharding: Sharding,
        shards: ExpertShards,
        masters: Masters,
        schedule: LayoutSchedule,
        channel: Channel,
    ) -> None:
        self.layer_index, self.shards, self.masters = layer_index, shards, masters
        self.schedule, self.channel = schedule, channel
        self.reshard_after_forward = sharding.reshard_after_forward
        self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
        # Whether an optimizer has asked for gradients of whole experts (``ExpertShards.reshard_whole``).
        self.whole_gradients = False
        # The dtype in which the layer's last call computed; None before the first.
        self.dtype: torch.dtype | None = None
        self._prefetched: tuple[tuple[ExpertLayout, int, torch.dtype | None], Restore] | None = None

    def start_restore(
        self, layout: ExpertLayout, dtype: torch.dtype, generation: int, masters: Sequence[Tensor] | None = None
    ) -> Restore:
        """Starts the transfer of the experts of ``layout``, which compute in ``dtype``, by messages of ``generation``.
        A collective. ``masters``: those that autograd has, if they were read already.
        """
        local = self.masters.local() if masters is None else self.masters.by_part(masters)
        return self._start(local, layout.held_by_rank, dtype, generation, "")

    def rejoin(
        self, layout: ExpertLayout, dtype: torch.dtype, masters: Sequence[Tensor], lent: Mapping[int, Expert]
    ) -> Restore:
        """Returns the experts of ``layout`` without messages. ``lent``: those that other ranks have sent, by slot."""
        local = self.masters.by_part(masters)
        return ExpertTransfer(without_messages(self.shards.joined(local, layout.held_by_rank, lent, dtype)))

    def _with_late(self, early: Restore, layout: ExpertLayout, dtype: torch.dtype, generation: int) -> RestoreSteps:
        """Returns the steps that add the experts of late slots in ``layout`` to ``early``, those of the settled
        layout.
        """
        rank = self.shards.rank
        settled, held = self.schedule.layout.held_by_rank, layout.held_by_rank
        missing = [
            tuple(expert for expert in wanted if expert not in there)
            for wanted, there in zip(held, settled, strict=True)
        ]
        late = self._start(self.masters.local(), missing, dtype, generation, " late")
        late_experts = [expert for expert in held[rank] if expert not in settled[rank]]
        yield False
        early.start()
        late.start()
        yield True
        by_expert = dict(zip(settled[rank], early.finish().masters, strict=True))
        by_expert |= zip(late_experts, late.finish().masters, strict=True)
        return self.shards.restored(dtype, self.masters.device, [by_expert[expert] for expert in held[rank]])

    def _start(
        self, masters: Sequence[Master], held: HeldByRank, dtype: torch.dtype, generation: int, when: str
    ) -> Restore:
        if self.shards.keeps_all(held):
            return ExpertTransfer(without_messages(self.shards.all_of(masters, dtype)))
        name, channel = f"layer {self.layer_index}{when}", self.channel.tagged(generation)
        return ExpertTransfer(self.shards.restore(masters, dtype, held, channel, name))

    def prefetch(self, pass_number: int, generation: int) -> None:
        """Starts the transfer of the settled layout's experts for the coming micro-batch, unless that is done already
        or masters are not at hand. With ``lag=0`` no layout is settled yet.
        """
        if self.schedule.strategy.lag == 0:
            return
        if self.dtype is not None and not self._is_prefetched(pass_number) and self.masters.at_hand:
            layout = self.schedule.layout
            self._prefetched = (layout, pass_number, self.dtype), self.start_restore(layout, self.dtype, generation)

    def take_prefetched(self, pass_number: int, layout: ExpertLayout, generation: int) -> Restore | None:
        """Returns the transfer of the experts of ``layout`` that was started ahead for this pass, and forgets it; None
        if there is none, or if masters are computed anew. Experts of late slots are sent now: a collective if there are
        any.
        """
        restored = None
        usable = self._is_prefetched(pass_number) and not self.masters.computed
        if usable and self._prefetched is not None and self.dtype is not None:
            restored = self._prefetched[1]
            if self.schedule.layout.held_by_rank != layout.held_by_rank:
                restored = ExpertTransfer(self._with_late(restored, layout, self.dtype, generation))
        self.drop_prefetched()
        return restored

    def drop_prefetched(self) -> None:
        """Forgets the transfer that was started ahead."""
        self._prefetched = None

    def _is_prefetched(self, pass_number: int) -> bool:
        """Returns whether a transfer was started ahead for this very pass: a pass that was broken off leaves one
        behind, whose experts are stale after the next optimizer step.
        """
        return self._prefetched is not None and self._prefetched[0] == (self.schedule.layout, pass_number, self.dtype)

    def new_gradients(self, layout: ExpertLayout, device: torch.device, dtype: torch.dtype) -> Tensor | ExpertGradients:
        """Returns memory for the gradients of the slots of ``layout``, [D, padded_parameters]: float64 where those of
        several ranks are added up and the result may not depend on the layout. Or, where nothing is added to them, that
        of the masters' gradients, in their ``dtype``; not for MegaKernels, which are compiled for one form.
        """
        strategy, shards = self.schedule.strategy, self.shards
        invariant, parts = isinstance(strategy.reduction, LayoutInvariant), shards.form.joined.parts
        as_computed = not shards.flat and len(parts) == len(shards.form.parts)
        if as_computed and not (invariant or strategy.overlap.reaches_memory) and shards.keeps_all(layout.held_by_rank):
            D = len(layout.held_by_rank[shards.rank])
            places = {part.name: shards.memory.empty((D, *part.shape), dtype, device) for part in parts}
            return ExpertGradients(**places)
        added = invariant and bool((layout.replicas_RE > 0).sum(axis=0).max() > 1)
        return shards.new_gradients(layout, device, torch.float64 if added else torch.float32)

    def start_reshard(
        self, grads: Tensor | ExpertGradients, layout: ExpertLayout, generation: int, dtype: torch.dtype, whole: bool
    ) -> Reshard:
        """Creates the transfer that gives owners the sums of slot gradients in ``dtype``, or one rank each those of
        ``whole`` experts. A collective.

        Unless gradients are first summed inside nodes, nothing is sent before ``start`` or ``finish``.
        """
        if isinstance(grads, ExpertGradients):
            return ExpertTransfer(without_messages(tuple(each for each in grads if each is not None)))
        channel = self.channel.tagged(generation)
        reshard = self.shards.reshard_whole if whole else self.shards.reshard
        steps = reshard(grads, layout, channel, f"layer {self.layer_index}")
        return ExpertTransfer(_in_dtype(steps, dtype))


def _in_dtype(steps: ReshardSteps, dtype: torch.dtype) -> ReshardSteps:
    # Gradients pass through float32, as some layouts add gradients up in float64 and others do not.
    gradients = yield from steps
    return tuple(gradient.float().to(dtype) for gradient in gradients)
