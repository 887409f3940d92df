"""ShardedExperts: fully sharded expert parallelism (LAER-MoE, section 4), every expert sliced over all ranks.

R ranks, E experts, P_e parameters of an expert, s wire slice, D distinct experts held by this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moesys.config import Fsep, ModelShape
from moesys.layout import ExpertLayout
from moesys.moe.masters import ExpertForm, Master, Part, initial_expert
from moesys.moe.store import ExpertShards, HeldByRank, ReshardSteps, RestoreSteps, add_in_order, device_of, index_of
from moesys.overlap.comm.channel import Channel


class Slices:
    """The slices into which FSEP cuts experts. Masters of a form are cut tensor by tensor, in the dimension of the
    ``Part``.

    Flat masters [E, P] are cut as one tensor: rank r has elements [r·s, (r+1)·s) of every expert, s = ceil(P/R), the
    last ranks fewer or none. Slices are padded to s on the wire.
    """

    def __init__(self, form: ExpertForm, num_ranks: int, *, flat: bool) -> None:
        self.num_ranks, self.num_elements = num_ranks, form.num_elements
        self.wire_slice = -(-form.num_elements // num_ranks)
        self._parts = (Part("expert", (num_ranks * self.wire_slice,)),) if flat else form.parts
        self._slice_shapes = [part.sliced_shape(num_ranks) for part in self._parts]
        self._flat = flat

    def of_rank(self, rank: int) -> range:
        """Returns the elements of a rank in flat masters."""
        P, s = self.num_elements, self.wire_slice
        return range(min(P, rank * s), min(P, (rank + 1) * s))

    def shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of a rank's masters, of one expert."""
        return ((len(self.of_rank(rank)),),) if self._flat else tuple(self._slice_shapes)

    def to_wire(self, masters: Sequence[Master], wire_Es: Tensor) -> Tensor:
        """Writes this rank's slices of all experts, [E, s], and returns them."""
        for place_EN, master, shape in zip(self._split(wire_Es), masters, self._slice_shapes, strict=True):
            if not isinstance(master, Tensor):
                for place_N, slice_of_one in zip(place_EN, master, strict=True):
                    place_N.view(shape).copy_(slice_of_one)
            elif self._flat:
                place_EN[:, : master.shape[1]] = master
                place_EN[:, master.shape[1] :] = 0
            else:
                place_EN.unflatten(1, shape).copy_(master)
        return wire_Es

    def from_wire(self, slices_Es: Tensor) -> tuple[Tensor, ...]:
        """Returns slices in the shapes of this rank's masters."""
        if self._flat:
            return (slices_Es,)
        parts = zip(self._split(slices_Es), self._slice_shapes, strict=True)
        return tuple(part_EN.unflatten(1, shape) for part_EN, shape in parts)

    def join(self, received_RDs: Tensor, whole_DP: Tensor) -> Tensor:
        """Writes whole experts [D, R·s] from the slices of all ranks, and returns them."""
        for by_rank, slices in self._pairs(whole_DP, received_RDs):
            by_rank.copy_(slices)
        return whole_DP

    def cut(self, whole_DP: Tensor, slices_RDs: Tensor) -> Tensor:
        """Writes the slices of all ranks, [R, D, s], of whole experts [D, R·s], and returns them."""
        for by_rank, slices in self._pairs(whole_DP, slices_RDs):
            slices.copy_(by_rank)
        return slices_RDs

    def _split(self, wire: Tensor) -> tuple[Tensor, ...]:
        return wire.split([math.prod(shape) for shape in self._slice_shapes], dim=-1)

    def _pairs(self, whole_DP: Tensor, slices_RDs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns views of the same elements, tensor by tensor: in whole experts, and in slices."""
        flats = whole_DP.split([part.num_elements for part in self._parts], dim=1)
        pairs = []
        for part, flat_DN, slices in zip(self._parts, flats, self._split(slices_RDs), strict=True):
            before, behind = math.prod(part.shape[: part.dim]), math.prod(part.shape[part.dim + 1 :])
            rows = part.shape[part.dim] // self.num_ranks
            by_rank = flat_DN.unflatten(1, (before, self.num_ranks, rows, behind)).permute(2, 0, 1, 3, 4)
            pairs.append((by_rank, slices.unflatten(2, by_rank.shape[2:])))
        return pairs


class NodeCarriers:
    """The ranks that carry slices into nodes and out of them. ``members``: the ranks in the node of ``rank``;
    ``wanted``: the distinct experts that they hold, in the order of ranks and slots. ``nodes`` and ``wanted_by_node``:
    the same of all nodes.
    """

    def __init__(self, rank: int, node_of_rank: Sequence[int], held: HeldByRank) -> None:
        self.rank, self.num_ranks = rank, len(node_of_rank)
        self.nodes = [
            [each for each, of in enumerate(node_of_rank) if of == node] for node in sorted(set(node_of_rank))
        ]
        self.wanted_by_node = [list(dict.fromkeys(e for each in ranks for e in held[each])) for ranks in self.nodes]
        self.members, self.wanted = next(
            (ranks, wanted) for ranks, wanted in zip(self.nodes, self.wanted_by_node, strict=True) if rank in ranks
        )
        # The owners whose slices a member passes on: itself, and the ranks of other nodes whose carrier it is.
        self.owners_by = {
            member: [owner for owner in range(self.num_ranks) if _carrier(self.members, owner) == member]
            for member in self.members
        }
        self.owners = self.owners_by[rank]
        self.outside = [owner for owner in self.owners if owner != rank]
        self._held, self._place = held, {expert: place for place, expert in enumerate(self.wanted)}

    @property
    def by_carrier(self) -> list[int]:
        """All ranks, in the order of the members that pass on their slices."""
        return [owner for member in self.members for owner in self.owners_by[member]]

    def places_of(self, member: int) -> list[int]:
        """Returns the places in ``wanted`` of the experts that a member holds."""
        return [self._place[expert] for expert in self._held[member]]

    def abroad(self) -> dict[int, list[int]]:
        """Returns the experts that each other node needs, by the rank there that carries this rank's slices."""
        return {
            _carrier(ranks, self.rank): wanted
            for ranks, wanted in zip(self.nodes, self.wanted_by_node, strict=True)
            if ranks is not self.members
        }


def _carrier(ranks: Sequence[int], owner: int) -> int:
    return owner if owner in ranks else ranks[owner % len(ranks)]


class ShardedExperts(ExpertShards):
    """FSEP: every rank owns its slice of every expert (``Slices``)."""

    shard_dim = 1

    def __init__(
        self, shape: ModelShape, rank: int, node_of_rank: Sequence[int], sharding: Fsep, form: ExpertForm | None = None
    ) -> None:
        super().__init__(shape, rank, len(node_of_rank), form)
        self.node_of_rank, self.sharding = tuple(node_of_rank), sharding
        self.slices = Slices(self.form, self.num_ranks, flat=self.flat)
        # s, the elements of one rank's slice of one expert on the wire.
        self.wire_slice = self.slices.wire_slice

    @property
    def padded_parameters(self) -> int:
        return self.num_ranks * self.wire_slice

    @property
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((self.shape.num_experts, *shape) for shape in self.slices.shapes_of(self.rank))

    def owned(self) -> range:
        """Returns this rank's elements of flat masters."""
        return self.slices.of_rank(self.rank)

    def initial(self, seed: int, layer_index: int) -> Tensor:
        local = torch.empty(self.shape.num_experts, len(self.owned()), dtype=torch.float32)
        for expert in range(self.shape.num_experts):
            self.keep(local, expert, initial_expert(self.shape, seed, layer_index, expert))
        return local

    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        local[expert] = flat_P[self.owned().start : self.owned().stop]

    def restore(
        self, masters: Sequence[Master], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> RestoreSteps:
        hierarchical = self.sharding.restore == "hierarchical"
        restore = self._restore_hierarchical if hierarchical else self._restore_flat
        return restore(self.on_wire(masters, dtype), held, channel, detail)

    def _restore_flat(self, wire_Es: Tensor, held: HeldByRank, channel: Channel, detail: str) -> RestoreSteps:
        """Restores by one all-to-all: sends every rank this rank's slice of each expert that it holds."""
        num_held = len(held[self.rank])
        received = self.memory.new(wire_Es, self.num_ranks, num_held, self.wire_slice)
        transfer = channel.all_to_all(
            received.view(-1, self.wire_slice),
            self._rows(wire_Es, [e for experts in held for e in experts]),
            [num_held] * self.num_ranks,
            [len(experts) for experts in held],
            lane="restore",
            detail=detail,
        )
        del wire_Es
        yield True
        transfer.wait()
        return self.restored_flat(self._joined(received))

    def _restore_hierarchical(self, wire_Es: Tensor, held: HeldByRank, channel: Channel, detail: str) -> RestoreSteps:
        """Restores by two all-to-alls: one copy of each distinct expert goes into each node, to its carriers, who then
        spread it inside.
        """
        carriers = NodeCarriers(self.rank, self.node_of_rank, held)
        wanted, num_held, s = carriers.wanted, len(held[self.rank]), self.wire_slice
        abroad = carriers.abroad()
        arrived = self.memory.new(wire_Es, len(carriers.outside), len(wanted), s)
        first = channel.all_to_all(
            arrived.view(-1, s),
            self._rows(wire_Es, [e for experts in abroad.values() for e in experts]),
            [len(wanted) if r in carriers.outside else 0 for r in range(self.num_ranks)],
            [len(abroad.get(r, ())) for r in range(self.num_ranks)],
            lane="restore",
            detail=f"{detail} between nodes",
        )
        received = self.memory.new(wire_Es, self.num_ranks, num_held, s)
        yield False
        first.wait()
        have = dict(zip(carriers.outside, arrived, strict=True))
        have[self.rank] = self._rows(wire_Es, wanted)
        second = channel.all_to_all(
            received.view(-1, s),
            torch.cat(
                [
                    have[owner].index_select(0, index_of(carriers.places_of(member), wire_Es))
                    for member in carriers.members
                    for owner in carriers.owners
                ]
            ),
            [len(carriers.owners_by.get(r, ())) * num_held for r in range(self.num_ranks)],
            [len(carriers.owners) * len(held[r]) if r in carriers.members else 0 for r in range(self.num_ranks)],
            lane="restore",
            detail=f"{detail} inside nodes",
        )
        del wire_Es, arrived, have, first
        yield True
        second.wait()
        return self.restored_flat(self._joined(received[index_of(carriers.by_carrier, received).argsort()]))

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        hierarchical = self.sharding.reshard == "hierarchical" and self.num_ranks > 1
        reshard = self._reshard_hierarchical if hierarchical else self._reshard_flat
        return reshard(grads_DP, layout.held_by_rank, channel, detail)

    def can_send_whole(self) -> bool:
        """Returns whether ``reshard_whole`` is possible: every rank is the owner of as many experts."""
        plain = type(self) is ShardedExperts and self.sharding.reshard == "flat"
        return plain and self.num_ranks > 1 and self.shape.num_experts % self.num_ranks == 0

    def reshard_whole(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        """Sends gradients of whole experts to one rank each, in the place of slices to all ranks: rank r gets those of
        experts [r·E/R, (r+1)·E/R), [E/R, P]. They are added in rank order, as slices are.
        """
        yield False
        held, each, P = layout.held_by_rank, self.shape.num_experts // self.num_ranks, self.form.num_elements
        # The slots of each rank by the rank that gets their gradients.
        to_RR = [[[e for e in experts if e // each == rank] for rank in range(self.num_ranks)] for experts in held]
        sent = [held[self.rank].index(e) for experts in to_RR[self.rank] for e in experts]
        arriving = [e - self.rank * each for of_rank in to_RR for e in of_rank[self.rank]]
        received = self.memory.new(grads_DP, len(arriving), P)
        transfer = channel.all_to_all(
            received,
            grads_DP[:, :P].index_select(0, index_of(sent, grads_DP)),
            [len(of_rank[self.rank]) for of_rank in to_RR],
            [len(experts) for experts in to_RR[self.rank]],
            lane="reshard",
            detail=detail,
        )
        del grads_DP
        yield True
        transfer.wait()
        total_EP = add_in_order(received, arriving, self.memory.new(received, each, P))
        return (total_EP,) if self.flat else tuple(self.form.views(total_EP).values())

    def _reshard_flat(self, grads_DP: Tensor, held: HeldByRank, channel: Channel, detail: str) -> ReshardSteps:
        """Sends gradients by one all-to-all: every rank receives its slice of each gradient of this rank."""
        yield False
        if self.num_ranks == 1:
            return (grads_DP,) if self.flat else tuple(self.form.views(grads_DP).values())
        num_held = len(held[self.rank])
        received = self.memory.new(grads_DP, sum(map(len, held)), self.wire_slice)
        transfer = channel.all_to_all(
            received,
            self._cut(grads_DP).view(-1, self.wire_slice),
            [len(experts) for experts in held],
            [num_held] * self.num_ranks,
            lane="reshard",
            detail=detail,
        )
        del grads_DP
        yield True
        transfer.wait()
        return self._summed(received, [e for experts in held for e in experts], received)

    def _reshard_hierarchical(self, grads_DP: Tensor, held: HeldByRank, channel: Channel, detail: str) -> ReshardSteps:
        """Sends gradients by two all-to-alls, a hierarchical restore backwards: they go to their carriers, who add
        those of their node in rank order; then one sum per node goes to its owner, who adds nodes in their order.
        """
        carriers = NodeCarriers(self.rank, self.node_of_rank, held)
        num_owners, num_held, s = len(carriers.owners), len(held[self.rank]), self.wire_slice
        counts = [num_owners * len(held[r]) if r in carriers.members else 0 for r in range(self.num_ranks)]
        gathered = self.memory.new(grads_DP, sum(counts), s)
        first = channel.all_to_all(
            gathered,
            self._cut(grads_DP)[index_of(carriers.by_carrier, grads_DP)].view(-1, s),
            counts,
            [len(carriers.owners_by.get(r, ())) * num_held for r in range(self.num_ranks)],
            lane="reshard",
            detail=f"{detail} inside nodes",
        )
        yield False
        first.wait()
        sums_ONs = self.memory.new(grads_DP, num_owners, len(carriers.wanted), s).fill_(-0.0)
        for member, part in zip(carriers.members, gathered.split([counts[r] for r in carriers.members]), strict=True):
            sums_ONs[:, index_of(carriers.places_of(member), grads_DP)] += part.view(num_owners, -1, s)
        del grads_DP, gathered, part, first
        abroad, place = carriers.abroad(), carriers.owners.index(self.rank)
        received = self.memory.new(sums_ONs, sum(map(len, abroad.values())), s)
        second = channel.all_to_all(
            received,
            torch.cat([sums_ONs[:place], sums_ONs[place + 1 :]]).view(-1, s),
            [len(abroad.get(r, ())) for r in range(self.num_ranks)],
            [len(carriers.wanted) if r in carriers.outside else 0 for r in range(self.num_ranks)],
            lane="reshard",
            detail=f"{detail} between nodes",
        )
        yield True
        second.wait()
        before = sum(len(wanted) for carrier, wanted in abroad.items() if carrier < self.rank)
        parts = [*received[:before], *sums_ONs[place], *received[before:]]
        return self._summed(parts, [e for wanted in carriers.wanted_by_node for e in wanted], received)

    def _cut(self, grads_DP: Tensor) -> Tensor:
        """Returns the slices of all ranks, [R, D, s]."""
        return self.slices.cut(grads_DP, self.memory.new(grads_DP, self.num_ranks, len(grads_DP), self.wire_slice))

    def _summed(self, parts: Iterable[Tensor], experts: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of this rank's masters: slices of ``experts``, added in the order of ``parts``."""
        num_owned = len(self.owned()) if self.flat else self.wire_slice
        total_Es = self.memory.new(like, self.shape.num_experts, num_owned)
        return self.slices.from_wire(add_in_order((part[:num_owned] for part in parts), experts, total_Es))

    def on_wire(self, masters: Sequence[Master], dtype: torch.dtype) -> Tensor:
        """Returns this rank's slices of all experts, [E, s]."""
        size = (self.shape.num_experts, self.wire_slice)
        return self.slices.to_wire(masters, self.memory.empty(size, dtype, device_of(masters)))

    def _rows(self, slices_Es: Tensor, experts: Sequence[int]) -> Tensor:
        """Returns copies of the slices of ``experts``, [N, s]."""
        out_Ns = self.memory.new(slices_Es, len(experts), self.wire_slice)
        return torch.index_select(slices_Es, 0, index_of(experts, slices_Es), out=out_Ns)

    def _joined(self, received_RDs: Tensor) -> Tensor:
        whole_DP = self.memory.new(received_RDs, received_RDs.shape[1], self.padded_parameters)
        return self.slices.join(received_RDs, whole_DP)
