"""WholeExperts: classic expert parallelism, every expert whole on its owner rank.

R ranks, E experts, P_e parameters of an expert, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesys.layout import ExpertLayout
from moesys.moe.expert_parameters import initial_expert
from moesys.moe.shards import ExpertShards, Restored, add_in_order
from moesys.overlap.comm.channel import Channel


class WholeExperts(ExpertShards):
    """EP: rank r owns experts [r·n, (r+1)·n), n = ceil(E/R), and lends copies where a layout wants them."""

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
        local = torch.empty(len(self.owned()), self.shape.expert_parameters, dtype=torch.float32)
        for expert in self.owned():
            self.keep(local, expert, initial_expert(self.shape, seed, layer_index, expert))
        return local

    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        if expert in self.owned():
            local[expert - self.owned().start] = flat_P

    def restore(self, local: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Restored:
        held = self.held_by_rank(layout)
        first = self.owned().start
        lent = [[e for e in held[rank] if self.owner(e) == self.rank != rank] for rank in range(self.num_ranks)]
        borrowed = [
            [e for e in held[self.rank] if self.owner(e) == rank != self.rank] for rank in range(self.num_ranks)
        ]
        transfer = None
        received = self.memory.empty((sum(map(len, borrowed)), local.shape[1]), self.dtype, local.device)
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

        def finish() -> Tensor | list[Tensor]:
            if transfer is not None:
                transfer.wait()
            if held[self.rank] == tuple(self.owned()):
                return local
            return [received[place[e]] if e in place else local[e - first] for e in held[self.rank]]

        return self.restored(local.device, finish)

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Callable[[], Tensor]:
        held = self.held_by_rank(layout)
        mine = held[self.rank]
        # By owner, then by slot: what I send. By holder, then by its slot: what I get for the experts I own.
        outgoing = [slot for rank in range(self.num_ranks) for slot, e in enumerate(mine) if self.owner(e) == rank]
        incoming = [[e for e in held[rank] if self.owner(e) == self.rank] for rank in range(self.num_ranks)]
        if self._moves(held):
            received = self.memory.empty((sum(map(len, incoming)), grads_DP.shape[1]), grads_DP.dtype, grads_DP.device)
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
            return add_in_order(received, rows, len(self.owned()))

        return finish

    def _moves(self, held: list[tuple[int, ...]]) -> bool:
        """Whether any rank holds an expert that it does not own; every rank gives the same answer."""
        return any(self.owner(e) != rank for rank in range(self.num_ranks) for e in held[rank])
