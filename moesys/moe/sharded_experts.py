"""ShardedExperts: fully sharded expert parallelism (LAER-MoE, section 4), every expert sliced over all ranks.

R ranks, E experts, P_e parameters of an expert, s wire slice, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moesys.config import Fsep, ModelShape
from moesys.layout import ExpertLayout
from moesys.moe.expert_form import ExpertForm, FlatSlices, PartSlices, Slices
from moesys.moe.expert_parameters import initial_expert
from moesys.moe.node_carriers import NodeCarriers
from moesys.moe.shards import Cross, ExpertShards, Finish, HeldByRank, Restored, add_in_order, index_of
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.held_experts import ExpertWeights


class ShardedExperts(ExpertShards):
    """FSEP: every rank owns its slice of every expert (``expert_form.Slices``)."""

    shard_dim = 1

    def __init__(
        self,
        shape: ModelShape,
        rank: int,
        node_of_rank: Sequence[int],
        sharding: Fsep,
        form: ExpertForm | None = None,
    ) -> None:
        super().__init__(shape, rank, len(node_of_rank), form)
        self.node_of_rank, self.sharding = tuple(node_of_rank), sharding
        self.slices: Slices = (FlatSlices if self.flat else PartSlices)(self.form, self.num_ranks)

    @property
    def wire_slice(self) -> int:
        """s, elements of one rank's slice of one expert on the wire."""
        return self.slices.wire_slice

    @property
    def padded_parameters(self) -> int:
        return self.num_ranks * self.wire_slice

    @property
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((self.shape.num_experts, *shape) for shape in self.slices.shapes_of(self.rank))

    def owned(self) -> range:
        """Returns this rank's elements of flat masters."""
        assert isinstance(self.slices, FlatSlices)
        return self.slices.of_rank(self.rank)

    def initial(self, seed: int, layer_index: int) -> Tensor:
        local = torch.empty(self.shape.num_experts, len(self.owned()), dtype=torch.float32)
        for expert in range(self.shape.num_experts):
            self.keep(local, expert, initial_expert(self.shape, seed, layer_index, expert))
        return local

    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        local[expert] = flat_P[self.owned().start : self.owned().stop]

    def restore(
        self, masters: Sequence[Tensor], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> Restored:
        if self.num_ranks == 1:
            return self.restored(dtype, masters[0].device, lambda: masters[0] if self.flat else ExpertWeights(*masters))
        wire_Es = self.on_wire(masters, dtype)
        hierarchical = self.sharding.restore == "hierarchical"
        start = self._restore_hierarchical if hierarchical else self._restore_flat
        return start(wire_Es, held, channel, detail)

    def _restore_flat(self, wire_Es: Tensor, held: HeldByRank, channel: Channel, detail: str) -> Restored:
        """One all-to-all: to every rank my slice of each expert it holds."""
        num_held = len(held[self.rank])
        received = self.new(wire_Es, self.num_ranks, num_held, self.wire_slice)
        transfer = channel.all_to_all(
            received.view(-1, self.wire_slice),
            self._rows(wire_Es, [e for experts in held for e in experts]),
            [num_held] * self.num_ranks,
            [len(experts) for experts in held],
            lane="restore",
            detail=detail,
        )

        def finish() -> Tensor:
            transfer.wait()
            return self._joined(received)

        return self.restored(received.dtype, received.device, finish)

    def _restore_hierarchical(self, wire_Es: Tensor, held: HeldByRank, channel: Channel, detail: str) -> Restored:
        """Two all-to-alls: one copy of each distinct expert into each node, to its carriers, then a spread inside."""
        carriers = NodeCarriers(self.rank, self.node_of_rank, held)
        wanted, num_held, s = carriers.wanted, len(held[self.rank]), self.wire_slice
        abroad = dict(carriers.abroad())
        arrived = self.new(wire_Es, len(carriers.outside), len(wanted), s)
        first = channel.all_to_all(
            arrived.view(-1, s),
            self._rows(wire_Es, [e for experts in abroad.values() for e in experts]),
            [len(wanted) if r in carriers.outside else 0 for r in range(self.num_ranks)],
            [len(abroad.get(r, ())) for r in range(self.num_ranks)],
            lane="restore",
            detail=f"{detail} between nodes",
        )
        received = self.new(wire_Es, self.num_ranks, num_held, s)
        second: Transfer | None = None

        def spread() -> None:
            nonlocal second
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

        def finish() -> Tensor:
            assert second is not None
            second.wait()
            return self._joined(received[index_of(carriers.by_carrier, received).argsort()])

        return self.restored(received.dtype, received.device, finish, spread)

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Cross:
        if self.num_ranks == 1:
            return lambda: lambda: (grads_DP,) if self.flat else self.form.views(grads_DP)
        held = self.held_by_rank(layout)
        if self.sharding.reshard == "hierarchical":
            return self._reshard_hierarchical(grads_DP, held, channel, detail)
        return lambda: self._reshard_flat(grads_DP, held, channel, detail)

    def _reshard_flat(self, grads_DP: Tensor, held: HeldByRank, channel: Channel, detail: str) -> Finish:
        """One all-to-all: to every rank its slice of each of my gradients."""
        num_held = len(held[self.rank])
        received = self.new(grads_DP, sum(map(len, held)), self.wire_slice)
        transfer = channel.all_to_all(
            received,
            self._cut(grads_DP).view(-1, self.wire_slice),
            [len(experts) for experts in held],
            [num_held] * self.num_ranks,
            lane="reshard",
            detail=detail,
        )

        def finish() -> tuple[Tensor, ...]:
            transfer.wait()
            return self._summed(received, [e for experts in held for e in experts], received)

        return finish

    def _reshard_hierarchical(self, grads_DP: Tensor, held: HeldByRank, channel: Channel, detail: str) -> Cross:
        """Two all-to-alls, a hierarchical restore backwards: gradients to their carriers, who add those of their node
        in rank order; then a sum a node to its owner, who adds nodes in their order.
        """
        carriers = NodeCarriers(self.rank, self.node_of_rank, held)
        num_owners, num_held, s = len(carriers.owners), len(held[self.rank]), self.wire_slice
        counts = [num_owners * len(held[r]) if r in carriers.members else 0 for r in range(self.num_ranks)]
        gathered = self.new(grads_DP, sum(counts), s)
        first = channel.all_to_all(
            gathered,
            self._cut(grads_DP)[index_of(carriers.by_carrier, grads_DP)].view(-1, s),
            counts,
            [len(carriers.owners_by.get(r, ())) * num_held for r in range(self.num_ranks)],
            lane="reshard",
            detail=f"{detail} inside nodes",
        )

        def cross() -> Finish:
            first.wait()
            sums_ONs = self.new(grads_DP, num_owners, len(carriers.wanted), s).fill_(-0.0)
            for member, part in zip(
                carriers.members, gathered.split([counts[r] for r in carriers.members]), strict=True
            ):
                sums_ONs[:, index_of(carriers.places_of(member), grads_DP)] += part.view(num_owners, -1, s)
            return self._cross(sums_ONs, carriers, channel, detail)

        return cross

    def _cross(self, sums_ONs: Tensor, carriers: NodeCarriers, channel: Channel, detail: str) -> Finish:
        """``sums_ONs``: of this node, for each owner that this rank carries for, itself among them."""
        s, abroad = self.wire_slice, dict(carriers.abroad())
        received = self.new(sums_ONs, sum(map(len, abroad.values())), s)
        place = carriers.owners.index(self.rank)
        second = channel.all_to_all(
            received,
            torch.cat([sums_ONs[:place], sums_ONs[place + 1 :]]).view(-1, s),
            [len(abroad.get(r, ())) for r in range(self.num_ranks)],
            [len(carriers.wanted) if r in carriers.outside else 0 for r in range(self.num_ranks)],
            lane="reshard",
            detail=f"{detail} between nodes",
        )

        def finish() -> tuple[Tensor, ...]:
            second.wait()
            before = sum(len(wanted) for carrier, wanted in abroad.items() if carrier < self.rank)
            parts = [*received[:before], *sums_ONs[place], *received[before:]]
            return self._summed(parts, [e for wanted in carriers.wanted_by_node for e in wanted], received)

        return finish

    def _cut(self, grads_DP: Tensor) -> Tensor:
        """Returns the slices of all ranks, [R, D, s]."""
        return self.slices.cut(grads_DP, self.new(grads_DP, self.num_ranks, len(grads_DP), self.wire_slice))

    def _summed(self, parts: Iterable[Tensor], experts: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of this rank's masters: slices of ``experts``, added in the order of ``parts``."""
        num_owned = len(self.owned()) if self.flat else self.wire_slice
        total_Es = self.new(like, self.shape.num_experts, num_owned)
        return self.slices.from_wire(add_in_order((part[:num_owned] for part in parts), experts, total_Es))

    def on_wire(self, masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns this rank's slices of all experts, [E, s]."""
        size = (self.shape.num_experts, self.wire_slice)
        return self.slices.to_wire(masters, self.memory.empty(size, dtype, masters[0].device))

    def _rows(self, slices_Es: Tensor, experts: Sequence[int]) -> Tensor:
        """Returns copies of the slices of ``experts``, [N, s]."""
        out_Ns = self.new(slices_Es, len(experts), self.wire_slice)
        return torch.index_select(slices_Es, 0, index_of(experts, slices_Es), out=out_Ns)

    def _joined(self, received_RDs: Tensor) -> Tensor:
        whole_DP = self.new(received_RDs, received_RDs.shape[1], self.padded_parameters)
        return self.slices.join(received_RDs, whole_DP)
