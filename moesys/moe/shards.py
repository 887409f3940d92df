"""Where expert parameters live, how they get into slots, and how gradients get home: EP and FSEP.

Both keep float32 masters of logical shape [E, P_e]. ``WholeExperts`` (EP) shards them over experts: rank r owns a block
of ceil(E/R) of them. ``ShardedExperts`` (FSEP) shards every expert over all ranks: rank r owns slice
[r·s, (r+1)·s) of each, s = ceil(P_e/R), the last ones shorter; only on the wire are they padded to s. Both are what a
``DTensor`` calls ``Shard(0)`` and ``Shard(1)``, so that distributed checkpoints reshard by themselves.

Restoring gives a rank the experts its layout holds, in the compute dtype; resharding returns the gradients of its
slots, in float32, to the owners, who add them in rank order.

R ranks, E experts, P_e parameters of an expert, s wire slice, D distinct experts held by this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.layout import ExpertLayout
from moesys.moe.experts import as_weights, initial_expert
from moesys.overlap.channel import Channel, Transfer
from moesys.overlap.chunked import ExpertWeights
from moesys.overlap.routes import held_experts


class Restored(Sequence[ExpertWeights]):
    """The held experts in the compute dtype, by slot index; a rank's own masters are cast on use. ``wait`` first."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, finish: Callable[[], Sequence[Tensor]]) -> None:
        self._shape, self._dtype, self._finish = shape, dtype, finish
        self._flat: Sequence[Tensor] | None = None

    def wait(self) -> Restored:
        if self._flat is None:
            self._flat = self._finish()
        return self

    def __len__(self) -> int:
        return len(self.wait()._flat or ())

    def __getitem__(self, slot: int) -> ExpertWeights:  # type: ignore[override]
        assert self._flat is not None
        return as_weights(self._flat[slot].to(self._dtype), self._shape)


class ExpertShards(ABC):
    """This rank's part of the masters' geometry. The masters themselves are the layer's parameter, passed in."""

    shard_dim: Literal[0, 1]

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rank: int, num_ranks: int) -> None:
        self.shape, self.dtype, self.rank, self.num_ranks = shape, dtype, rank, num_ranks

    @abstractmethod
    def initial(self, seed: int, layer_index: int) -> Tensor:
        """This rank's float32 part of the masters; at no time does it hold more than one expert besides."""

    @abstractmethod
    def restore(self, local: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Restored:
        """Start bringing the held experts here."""

    @abstractmethod
    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Callable[[], Tensor]:
        """Start sending slot gradients [D, padded_parameters] home; the result finishes, and gives this rank's part."""

    @property
    @abstractmethod
    def padded_parameters(self) -> int:
        """Columns of a slot-gradient buffer: P_e, or R·s."""

    def held_by_rank(self, layout: ExpertLayout) -> list[tuple[int, ...]]:
        return [held_experts(layout.experts_of(rank)) for rank in range(self.num_ranks)]


class WholeExperts(ExpertShards):
    """EP: every expert whole on its owner, who lends copies where a layout wants them."""

    shard_dim = 0

    @property
    def block(self) -> int:
        """Experts a rank owns: ceil(E/R); the last ranks fewer."""
        return -(-self.shape.num_experts // self.num_ranks)

    @property
    def padded_parameters(self) -> int:
        return self.shape.expert_parameters

    def owner(self, expert: int) -> int:
        return expert // self.block

    def owned(self) -> range:
        E = self.shape.num_experts
        return range(min(E, self.rank * self.block), min(E, (self.rank + 1) * self.block))

    def initial(self, seed: int, layer_index: int) -> Tensor:
        local = torch.empty(len(self.owned()), self.shape.expert_parameters)
        for row, expert in enumerate(self.owned()):
            local[row] = initial_expert(self.shape, seed, layer_index, expert)
        return local

    def restore(self, local: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Restored:
        held = self.held_by_rank(layout)
        first = self.owned().start
        lent = [[e for e in held[rank] if self.owner(e) == self.rank != rank] for rank in range(self.num_ranks)]
        borrowed = [
            [e for e in held[self.rank] if self.owner(e) == rank != self.rank] for rank in range(self.num_ranks)
        ]
        transfer = None
        received = local.new_empty(sum(map(len, borrowed)), local.shape[1], dtype=self.dtype)
        if self._moves(held):
            outgoing = torch.tensor([e - first for experts in lent for e in experts], dtype=torch.int64)
            transfer = channel.all_to_all(
                received,
                local.index_select(0, outgoing.to(local.device)).to(self.dtype),
                [len(experts) for experts in borrowed],
                [len(experts) for experts in lent],
                lane="restore",
                detail=detail,
            )
        place = {expert: row for row, expert in enumerate(e for experts in borrowed for e in experts)}

        def finish() -> list[Tensor]:
            if transfer is not None:
                transfer.wait()
            return [received[place[e]] if e in place else local[e - first] for e in held[self.rank]]

        return Restored(self.shape, self.dtype, finish)

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Callable[[], Tensor]:
        held = self.held_by_rank(layout)
        mine = held[self.rank]
        # By owner, then by slot: what I send. By holder, then by its slot: what I get for the experts I own.
        outgoing = [slot for rank in range(self.num_ranks) for slot, e in enumerate(mine) if self.owner(e) == rank]
        incoming = [[e for e in held[rank] if self.owner(e) == self.rank] for rank in range(self.num_ranks)]
        if self._moves(held):
            received = grads_DP.new_empty(sum(map(len, incoming)), grads_DP.shape[1])
            transfer = channel.all_to_all(
                received,
                grads_DP[torch.tensor(outgoing, dtype=torch.int64, device=grads_DP.device)],
                [len(experts) for experts in incoming],
                [sum(self.owner(e) == rank for e in mine) for rank in range(self.num_ranks)],
                lane="reshard",
                detail=detail,
            )
        else:
            received, transfer = grads_DP, None

        def finish() -> Tensor:
            if transfer is not None:
                transfer.wait()
            rows = [e - self.owned().start for experts in incoming for e in experts]
            if rows == list(range(len(self.owned()))):
                return received
            return _add_in_order(received, rows, len(self.owned()))

        return finish

    def _moves(self, held: list[tuple[int, ...]]) -> bool:
        """Whether any rank holds an expert that it does not own; every rank gives the same answer."""
        return any(self.owner(e) != rank for rank in range(self.num_ranks) for e in held[rank])


class ShardedExperts(ExpertShards):
    """FSEP: every expert sliced over all ranks."""

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
        mine = self.owned()
        local = torch.empty(self.shape.num_experts, len(mine))
        for expert in range(self.shape.num_experts):
            local[expert] = initial_expert(self.shape, seed, layer_index, expert)[mine.start : mine.stop]
        return local

    def restore(self, local: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Restored:
        held = self.held_by_rank(layout)
        if self.num_ranks == 1:
            return Restored(self.shape, self.dtype, lambda: [local[expert] for expert in held[0]])
        wire_Es = local.new_zeros(local.shape[0], self.wire_slice, dtype=self.dtype)
        wire_Es[:, : local.shape[1]] = local
        start = self._restore_hierarchical if self.hierarchical else self._restore_flat
        return Restored(self.shape, self.dtype, start(wire_Es, held, channel, detail))

    def _restore_flat(
        self, wire_Es: Tensor, held: list[tuple[int, ...]], channel: Channel, detail: str
    ) -> Callable[[], Sequence[Tensor]]:
        """One all-to-all: to every rank my slice of each expert it holds."""
        num_held = len(held[self.rank])
        received = wire_Es.new_empty(self.num_ranks, num_held, self.wire_slice)
        transfer = channel.all_to_all(
            received.view(-1, self.wire_slice),
            wire_Es.index_select(0, _index([e for experts in held for e in experts], wire_Es)),
            [num_held] * self.num_ranks,
            [len(experts) for experts in held],
            lane="restore",
            detail=detail,
        )

        def finish() -> Sequence[Tensor]:
            transfer.wait()
            return received.transpose(0, 1).reshape(num_held, self.padded_parameters).unbind()

        return finish

    def _restore_hierarchical(
        self, wire_Es: Tensor, held: list[tuple[int, ...]], channel: Channel, detail: str
    ) -> Callable[[], Sequence[Tensor]]:
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
        arrived = wire_Es.new_empty(len(carried), len(my_wanted), self.wire_slice)
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

        def finish() -> Sequence[Tensor]:
            first.wait()
            have = {source: arrived[row] for row, source in enumerate(carried)}
            have[self.rank] = wire_Es.index_select(0, _index(my_wanted, wire_Es))
            spread = [
                have[source].index_select(0, _index([place[e] for e in held[rank]], wire_Es))
                for rank in my_node
                for source in sources_of[self.rank]
            ]
            received = wire_Es.new_empty(self.num_ranks, num_held, self.wire_slice)
            second = channel.all_to_all(
                received.view(-1, self.wire_slice),
                torch.cat(spread),
                [len(sources_of.get(r, ())) * num_held for r in range(self.num_ranks)],
                [len(sources_of[self.rank]) * len(held[r]) if r in my_node else 0 for r in range(self.num_ranks)],
                lane="restore",
                detail=f"{detail} inside nodes",
            )
            second.wait()
            sources = [source for rank in my_node for source in sources_of[rank]]
            in_rank_order = received[torch.tensor(sources, device=received.device).argsort()]
            return in_rank_order.transpose(0, 1).reshape(num_held, self.padded_parameters).unbind()

        return finish

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Callable[[], Tensor]:
        held = self.held_by_rank(layout)
        num_held, num_owned = len(held[self.rank]), len(self.owned())
        if self.num_ranks == 1:
            rows = list(held[0])
            return lambda: grads_DP if rows == sorted(rows) else _add_in_order(grads_DP, rows, len(rows))
        received = grads_DP.new_empty(sum(map(len, held)), self.wire_slice)
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
            return _add_in_order(received[:, :num_owned], rows, self.shape.num_experts)

        return finish


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _add_in_order(parts_NP: Tensor, rows: Sequence[int], num_rows: int) -> Tensor:
    """``total[rows[n]] += parts[n]`` for n = 0, 1, ... in that order, float32 [num_rows, P]."""
    total = parts_NP.new_zeros(num_rows, parts_NP.shape[1])
    for part, row in zip(parts_NP, rows, strict=True):
        total[row] += part
    return total
