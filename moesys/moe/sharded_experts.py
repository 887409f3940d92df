"""ShardedExperts: fully sharded expert parallelism (LAER-MoE, section 4), every expert sliced over all ranks.

R ranks, E experts, P_e parameters of an expert, s wire slice, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.layout import ExpertLayout
from moesys.moe.expert_form import ExpertForm, FlatSlices, PartSlices, Slices
from moesys.moe.expert_parameters import initial_expert
from moesys.moe.shards import ExpertShards, HeldByRank, Restored, add_in_order
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.held_experts import ExpertWeights


class ShardedExperts(ExpertShards):
    """FSEP: every rank owns its slice of every expert (``expert_form.Slices``)."""

    shard_dim = 1

    def __init__(
        self,
        shape: ModelShape,
        rank: int,
        num_ranks: int,
        node_of_rank: Sequence[int],
        hierarchical: bool,
        form: ExpertForm | None = None,
    ) -> None:
        super().__init__(shape, rank, num_ranks, form)
        self.node_of_rank, self.hierarchical = tuple(node_of_rank), hierarchical
        self.slices: Slices = (FlatSlices if self.flat else PartSlices)(self.form, num_ranks)

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
        start = self._restore_hierarchical if self.hierarchical else self._restore_flat
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
        """Two all-to-alls: one copy of each distinct expert into each node, then a spread inside nodes.

        A node's *carriers* share the first phase: slices of outside rank r are received by the rank whose place in the
        node is r mod the node's size, and passed on from there.
        """
        ranks_of_node = [
            [rank for rank in range(self.num_ranks) if self.node_of_rank[rank] == node]
            for node in sorted(set(self.node_of_rank))
        ]
        my_node = next(ranks for ranks in ranks_of_node if self.rank in ranks)
        wanted = [list(dict.fromkeys(e for rank in ranks for e in held[rank])) for ranks in ranks_of_node]
        my_wanted = wanted[ranks_of_node.index(my_node)]

        def carrier(ranks: list[int], source: int) -> int:
            """Who in a node passes on the slices of ``source``: the source itself at home."""
            return source if source in ranks else ranks[source % len(ranks)]

        carried = [r for r in range(self.num_ranks) if carrier(my_node, r) == self.rank and r not in my_node]
        phase1_to = [0] * self.num_ranks
        outgoing: list[tuple[int, list[int]]] = []
        for ranks, experts in zip(ranks_of_node, wanted, strict=True):
            if ranks is not my_node:
                phase1_to[carrier(ranks, self.rank)] = len(experts)
                outgoing.append((carrier(ranks, self.rank), experts))
        arrived = self.new(wire_Es, len(carried), len(my_wanted), self.wire_slice)
        first = channel.all_to_all(
            arrived.view(-1, self.wire_slice),
            self._rows(wire_Es, [e for _, experts in sorted(outgoing) for e in experts]),
            [len(my_wanted) if r in carried else 0 for r in range(self.num_ranks)],
            phase1_to,
            lane="restore",
            detail=f"{detail} between nodes",
        )
        # Slices of one source together: my own, and those that I carry, each for every expert my node wants.
        sources_of = {rank: [r for r in range(self.num_ranks) if carrier(my_node, r) == rank] for rank in my_node}
        place = {expert: row for row, expert in enumerate(my_wanted)}
        num_held = len(held[self.rank])
        received = self.new(wire_Es, self.num_ranks, num_held, self.wire_slice)
        second: Transfer | None = None

        def spread() -> None:
            nonlocal second
            first.wait()
            have = {source: arrived[row] for row, source in enumerate(carried)}
            have[self.rank] = self._rows(wire_Es, my_wanted)
            spread = [
                have[source].index_select(0, _index([place[e] for e in held[rank]], wire_Es))
                for rank in my_node
                for source in sources_of[self.rank]
            ]
            second = channel.all_to_all(
                received.view(-1, self.wire_slice),
                torch.cat(spread),
                [len(sources_of.get(r, ())) * num_held for r in range(self.num_ranks)],
                [len(sources_of[self.rank]) * len(held[r]) if r in my_node else 0 for r in range(self.num_ranks)],
                lane="restore",
                detail=f"{detail} inside nodes",
            )

        def finish() -> Tensor:
            assert second is not None
            second.wait()
            sources = [source for rank in my_node for source in sources_of[rank]]
            in_rank_order = received[torch.tensor(sources, device=received.device).argsort()]
            return self._joined(in_rank_order)

        return self.restored(received.dtype, received.device, finish, spread)

    def reshard(
        self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str
    ) -> Callable[[], tuple[Tensor, ...]]:
        if self.num_ranks == 1:
            return lambda: (grads_DP,) if self.flat else self.form.views(grads_DP)
        held = self.held_by_rank(layout)
        num_held = len(held[self.rank])
        slices_RDs = self.new(grads_DP, self.num_ranks, num_held, self.wire_slice)
        received = self.new(grads_DP, sum(map(len, held)), self.wire_slice)
        transfer: Transfer = channel.all_to_all(
            received,
            self.slices.cut(grads_DP, slices_RDs).view(-1, self.wire_slice),
            [len(experts) for experts in held],
            [num_held] * self.num_ranks,
            lane="reshard",
            detail=detail,
        )

        def finish() -> tuple[Tensor, ...]:
            transfer.wait()
            rows = [e for experts in held for e in experts]
            num_owned = len(self.owned()) if self.flat else self.wire_slice
            total_Es = self.new(received, self.shape.num_experts, num_owned)
            return self.slices.from_wire(add_in_order(received[:, :num_owned], rows, total_Es))

        return finish

    def on_wire(self, masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns this rank's slices of all experts, [E, s]."""
        size = (self.shape.num_experts, self.wire_slice)
        return self.slices.to_wire(masters, self.memory.empty(size, dtype, masters[0].device))

    def _rows(self, slices_Es: Tensor, experts: Sequence[int]) -> Tensor:
        """Returns copies of the slices of ``experts``, [N, s]."""
        out_Ns = self.new(slices_Es, len(experts), self.wire_slice)
        return torch.index_select(slices_Es, 0, _index(experts, slices_Es), out=out_Ns)

    def _joined(self, received_RDs: Tensor) -> Tensor:
        whole_DP = self.new(received_RDs, received_RDs.shape[1], self.padded_parameters)
        return self.slices.join(received_RDs, whole_DP)


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
