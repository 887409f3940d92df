"""WholeExperts: classic expert parallelism, every expert whole on its owner rank.

R ranks, E experts, P_e parameters of an expert, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesys.layout import ExpertLayout
from moesys.moe.expert_parameters import initial_expert
from moesys.moe.shards import Cross, ExpertShards, Finish, Finished, HeldByRank, Restored, add_in_order
from moesys.overlap.comm.channel import Channel
from moesys.overlap.held_experts import ExpertWeights


class WholeExperts(ExpertShards):
    """EP: rank r owns experts [r·n, (r+1)·n), n = ceil(E/R), and lends copies where a layout wants them."""

    shard_dim = 0

    @property
    def block(self) -> int:
        """Experts a rank owns: ceil(E/R); the last ranks fewer."""
        return -(-self.shape.num_experts // self.num_ranks)

    @property
    def padded_parameters(self) -> int:
        return self.form.num_elements

    @property
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        shapes = ((self.form.num_elements,),) if self.flat else tuple(part.shape for part in self.form.parts)
        return tuple((len(self.owned()), *shape) for shape in shapes)

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

    def restore(
        self, masters: Sequence[Tensor], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> Restored:
        device, first = masters[0].device, self.owned().start
        lent = [[e for e in held[rank] if self.owner(e) == self.rank != rank] for rank in range(self.num_ranks)]
        borrowed = [
            [e for e in held[self.rank] if self.owner(e) == rank != self.rank] for rank in range(self.num_ranks)
        ]
        transfer = None
        received = self.memory.empty((sum(map(len, borrowed)), self.form.num_elements), dtype, device)
        if self._moves(held):
            transfer = channel.all_to_all(
                received,
                self._rows(masters, [e - first for experts in lent for e in experts], dtype),
                [len(experts) for experts in borrowed],
                [len(experts) for experts in lent],
                lane="restore",
                detail=detail,
            )
        place = {expert: row for row, expert in enumerate(e for experts in borrowed for e in experts)}

        def finish() -> Finished:
            if transfer is not None:
                transfer.wait()
            if held[self.rank] == tuple(self.owned()):
                return masters[0] if self.flat else ExpertWeights(*masters)
            return [
                self.form.weights(received[place[e]]) if e in place else self._owned_weights(masters, e - first)
                for e in held[self.rank]
            ]

        return self.restored(dtype, device, finish)

    def _owned_weights(self, masters: Sequence[Tensor], row: int) -> ExpertWeights:
        """Returns an expert where its owner keeps it."""
        return self.form.weights(masters[0][row]) if self.flat else ExpertWeights(*(master[row] for master in masters))

    def _rows(self, masters: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns copies of experts [N, P]."""
        index_N = torch.tensor(rows, dtype=torch.int64).to(masters[0].device)
        if self.flat:
            return masters[0].index_select(0, index_N).to(dtype)
        rows_NP = self.memory.empty((len(rows), self.form.num_elements), dtype, masters[0].device)
        for place, master in zip(self.form.views(rows_NP), masters, strict=True):
            place.copy_(master.index_select(0, index_N))
        return rows_NP

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> Cross:
        held = self.held_by_rank(layout)
        if not self._moves(held):
            return lambda: lambda: self._masters_form(grads_DP)
        return lambda: self._send_home(grads_DP, held, channel, detail)

    def _send_home(self, grads_DP: Tensor, held: HeldByRank, channel: Channel, detail: str) -> Finish:
        mine = held[self.rank]
        # By owner, then by slot. By holder, then by its slot: of the experts I own. What is mine does not travel.
        slots_R = [[slot for slot, e in enumerate(mine) if self.owner(e) == rank] for rank in range(self.num_ranks)]
        experts_R = [[e for e in held[rank] if self.owner(e) == self.rank] for rank in range(self.num_ranks)]
        kept, slots_R[self.rank] = slots_R[self.rank], []
        arriving = [0 if rank == self.rank else len(experts) for rank, experts in enumerate(experts_R)]
        received = self.new(grads_DP, sum(arriving), grads_DP.shape[1])
        outgoing = [slot for slots in slots_R for slot in slots]
        sent = self.new(grads_DP, len(outgoing), grads_DP.shape[1])
        transfer = channel.all_to_all(
            received,
            torch.index_select(grads_DP, 0, torch.tensor(outgoing).long().to(grads_DP.device), out=sent),
            arriving,
            [len(slots) for slots in slots_R],
            lane="reshard",
            detail=detail,
        )

        def finish() -> tuple[Tensor, ...]:
            transfer.wait()
            before = sum(arriving[: self.rank])
            parts = [*received[:before], *(grads_DP[slot] for slot in kept), *received[before:]]
            rows = [e - self.owned().start for experts in experts_R for e in experts]
            total_NP = self.new(grads_DP, len(self.owned()), grads_DP.shape[1])
            return self._masters_form(add_in_order(parts, rows, total_NP))

        return finish

    def _masters_form(self, total_NP: Tensor) -> tuple[Tensor, ...]:
        return (total_NP,) if self.flat else self.form.views(total_NP)

    def _moves(self, held: HeldByRank) -> bool:
        """Whether any rank holds an expert that it does not own; every rank gives the same answer."""
        return any(self.owner(e) != rank for rank in range(self.num_ranks) for e in held[rank])
