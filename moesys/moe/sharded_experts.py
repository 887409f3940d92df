"""ShardedExperts: fully sharded expert parallelism (LAER-MoE, section 4), every expert sliced over all ranks.

R ranks, E experts, P_e parameters of an expert, s wire slice, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.layout import ExpertLayout
from moesys.moe.expert_parameters import initial_expert
from moesys.moe.shards import ExpertShards, Restored, add_in_order
from moesys.overlap.comm.channel import Channel, Transfer


class ShardedExperts(ExpertShards):
    """FSEP: rank r owns elements [r·s, (r+1)·s) of every expert, s = ceil(P_e/R), the last ranks fewer or none. Only on
    the wire are slices padded to s.
    """

    shard_dim = 1

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        rank: int,
        num_ranks: int,
        node_of_rank: Sequence[int],
        hierarchical: bool,
    ) -> None:
        super().__init__(shape, dtype, rank, num_ranks)
        self.node_of_rank, self.hierarchical = tuple(node_of_rank), hierarchical

    @property
    def wire_slice(self) -> int:
        """s = ceil(P_e/R), elements of one rank's slice of one expert on the wire."""
        return -(-self.shape.expert_parameters // self.num_ranks)

    @property
    def padded_parameters(self) -> int:
        return self.num_ranks * self.wire_slice

    def owned(self) -> range:
        P = self.shape.expert_parameters
        return range(min(P, self.rank * self.wire_slice), min(P, (self.rank + 1) * self.wire_slice))

    def initial(self, seed: int, layer_index: int) -> Tensor:
        local = torch.empty(self.shape.num_experts, len(self.owned()), dtype=torch.float32)
        for expert in range(self.shape.num_experts):
            self.keep(local, expert, initial_expert(self.shape, seed, layer_index, expert))
        return local

    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        local[expert] = flat_P[self.owned().start : self.owned().stop]

    def restore(self, local: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Restored:
        if self.num_ranks == 1:
            return self.restored(local.device, lambda: local)
        held = self.held_by_rank(layout)
        wire_Es = local.new_zeros(local.shape[0], self.wire_slice, dtype=self.dtype)
        wire_Es[:, : local.shape[1]] = local
        start = self._restore_hierarchical if self.hierarchical else self._restore_flat
        return start(wire_Es, held, channel, detail)

    def _restore_flat(self, wire_Es: Tensor, held: list[tuple[int, ...]], channel: Channel, detail: str) -> Restored:
        """One all-to-all: to every rank my slice of each expert it holds."""
        num_held = len(held[self.rank])
        received = self._new(wire_Es, self.num_ranks, num_held, self.wire_slice)
        transfer = channel.all_to_all(
            received.view(-1, self.wire_slice),
            wire_Es.index_select(0, _index([e for experts in held for e in experts], wire_Es)),
            [num_held] * self.num_ranks,
            [len(experts) for experts in held],
            lane="restore",
            detail=detail,
        )

        def finish() -> Tensor:
            transfer.wait()
            return received.transpose(0, 1).reshape(num_held, self.padded_parameters)

        return self.restored(received.device, finish)

    def _restore_hierarchical(
        self, wire_Es: Tensor, held: list[tuple[int, ...]], channel: Channel, detail: str
    ) -> Restored:
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
        arrived = self._new(wire_Es, len(carried), len(my_wanted), self.wire_slice)
        first = channel.all_to_all(
            arrived.view(-1, self.wire_slice),
            wire_Es.index_select(0, _index([e for _, experts in sorted(outgoing) for e in experts], wire_Es)),
            [len(my_wanted) if r in carried else 0 for r in range(self.num_ranks)],
            phase1_to,
            lane="restore",
            detail=f"{detail} between nodes",
        )
        # Slices of one source together: my own, and those that I carry, each for every expert my node wants.
        sources_of = {rank: [r for r in range(self.num_ranks) if carrier(my_node, r) == rank] for rank in my_node}
        place = {expert: row for row, expert in enumerate(my_wanted)}
        num_held = len(held[self.rank])
        received = self._new(wire_Es, self.num_ranks, num_held, self.wire_slice)
        second: Transfer | None = None

        def spread() -> None:
            nonlocal second
            first.wait()
            have = {source: arrived[row] for row, source in enumerate(carried)}
            have[self.rank] = wire_Es.index_select(0, _index(my_wanted, wire_Es))
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
            return in_rank_order.transpose(0, 1).reshape(num_held, self.padded_parameters)

        return self.restored(received.device, finish, spread)

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Callable[[], Tensor]:
        if self.num_ranks == 1:
            return lambda: grads_DP
        held = self.held_by_rank(layout)
        num_held, num_owned = len(held[self.rank]), len(self.owned())
        received = self._new(grads_DP, sum(map(len, held)), self.wire_slice)
        transfer: Transfer = channel.all_to_all(
            received,
            grads_DP.view(num_held, self.num_ranks, self.wire_slice).transpose(0, 1).reshape(-1, self.wire_slice),
            [len(experts) for experts in held],
            [num_held] * self.num_ranks,
            lane="reshard",
            detail=detail,
        )

        def finish() -> Tensor:
            transfer.wait()
            rows = [e for experts in held for e in experts]
            return add_in_order(received[:, :num_owned], rows, self.shape.num_experts)

        return finish

    def _new(self, like: Tensor, *shape: int) -> Tensor:
        return self.memory.empty(shape, like.dtype, like.device)


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
