"""WholeExperts: classic expert parallelism, every expert whole on its owner rank.

R ranks, E experts, P_e parameters of an expert, D distinct experts held by this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.layout import ExpertLayout, lender_of_experts, owner_of_experts
from moesys.moe.masters import ExpertForm, Master, initial_expert
from moesys.moe.store import ExpertShards, HeldByRank, ReshardSteps, RestoreSteps, add_in_order, device_of, index_of
from moesys.overlap.comm.channel import Channel, Transfer


class Loans:
    """Experts by sender and receiver, in the order of the receiver's slots. Gradients are sent the other way."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._experts: dict[tuple[int, int], list[int]] = defaultdict(list)

    def __bool__(self) -> bool:
        """Returns whether any rank sends an expert, which is the same on every rank."""
        return bool(self._experts)

    def add(self, sender: int, receiver: int, expert: int) -> None:
        self._experts[sender, receiver].append(expert)

    def sent_by(self, rank: int) -> list[list[int]]:
        """Returns the experts that a rank sends to each rank, [R]."""
        return [self._experts.get((rank, receiver), []) for receiver in range(self.num_ranks)]

    def received_by(self, rank: int) -> list[list[int]]:
        """Returns the experts that a rank receives from each rank, [R]."""
        return [self._experts.get((sender, rank), []) for sender in range(self.num_ranks)]


def loans_of(held: HeldByRank, num_experts: int, node_of_rank: Sequence[int] | None) -> tuple[Loans, Loans]:
    """Returns the loans of owners and, with ``node_of_rank``, those that receivers pass on inside their nodes."""
    num_ranks = len(held)
    held_RE = np.zeros((num_ranks, num_experts), np.int64)
    for rank, experts in enumerate(held):
        held_RE[rank, list(experts)] = 1
    lender_RE = lender_of_experts(held_RE, None if node_of_rank is None else np.asarray(node_of_rank)).tolist()
    owner_E = owner_of_experts(num_experts, num_ranks).tolist()
    by_owners, passed_on = Loans(num_ranks), Loans(num_ranks)
    for rank, experts in enumerate(held):
        for expert in experts:
            lender = lender_RE[rank][expert]
            if lender != rank:
                (by_owners if lender == owner_E[expert] else passed_on).add(lender, rank, expert)
    return by_owners, passed_on


class WholeExperts(ExpertShards):
    """EP: rank r owns experts [r·n, (r+1)·n), n = ceil(E/R), and lends copies where a layout wants them.

    ``by_node``: one copy to each other node, whose receiver passes it on there, and adds up the gradients that return.
    """

    shard_dim = 0

    def __init__(
        self, shape: ModelShape, rank: int, node_of_rank: Sequence[int], by_node: bool, form: ExpertForm | None = None
    ) -> None:
        super().__init__(shape, rank, len(node_of_rank), form)
        self.node_of_rank, self.by_node = tuple(node_of_rank), by_node
        # The experts that ranks hold under the newest layout, and the loans that this takes.
        self._newest_loans: tuple[HeldByRank | None, tuple[Loans, Loans]] = (None, (Loans(0), Loans(0)))

    @property
    def padded_parameters(self) -> int:
        return self.form.num_elements

    @property
    def master_shapes(self) -> tuple[tuple[int, ...], ...]:
        shapes = ((self.form.num_elements,),) if self.flat else tuple(part.shape for part in self.form.parts)
        return tuple((len(self.owned()), *shape) for shape in shapes)

    def owned(self) -> range:
        E, block = self.shape.num_experts, -(-self.shape.num_experts // self.num_ranks)
        return range(min(E, self.rank * block), min(E, (self.rank + 1) * block))

    def initial(self, seed: int, layer_index: int) -> Tensor:
        local = torch.empty(len(self.owned()), self.shape.expert_parameters, dtype=torch.float32)
        for expert in self.owned():
            self.keep(local, expert, initial_expert(self.shape, seed, layer_index, expert))
        return local

    def keep(self, local: Tensor, expert: int, flat_P: Tensor) -> None:
        if expert in self.owned():
            local[expert - self.owned().start] = flat_P

    def restore(
        self, masters: Sequence[Master], dtype: torch.dtype, held: HeldByRank, channel: Channel, detail: str
    ) -> RestoreSteps:
        first = self.owned().start
        by_owners, passed_on = self._loans(held)
        taken = [_flat(loans.received_by(self.rank)) for loans in (by_owners, passed_on)]
        place = {expert: row for row, expert in enumerate(_flat(taken))}
        received = self.memory.empty((len(place), self.form.num_elements), dtype, device_of(masters))
        from_owners, from_holders = received.split([len(experts) for experts in taken])
        transfers = []
        if by_owners:
            rows = [e - first for e in _flat(by_owners.sent_by(self.rank))]
            transfers.append(self._lend(by_owners, from_owners, self._rows(masters, rows, dtype), channel, detail))
        yield False
        if passed_on:
            transfers[0].wait()
            rows = [place[e] for e in _flat(passed_on.sent_by(self.rank))]
            sent = received[index_of(rows, received)]
            transfers.append(self._lend(passed_on, from_holders, sent, channel, f"{detail} inside nodes"))
            del sent
        yield True
        for transfer in transfers:
            transfer.wait()
        slots = enumerate(held[self.rank])
        lent = {slot: self.form.weights(received[place[e]]) for slot, e in slots if e in place}
        return self.joined(masters, held, lent, dtype)

    def own_rows(self, held: HeldByRank) -> dict[int, int]:
        owned = self.owned()
        return {slot: e - owned.start for slot, e in enumerate(held[self.rank]) if e in owned}

    def _owners_hold(self, held: HeldByRank) -> bool:
        by_owners, _ = self._loans(held)
        # Without loans all experts that are held are with their owners.
        return not by_owners and sum(map(len, held)) == self.shape.num_experts

    def _loans(self, held: HeldByRank) -> tuple[Loans, Loans]:
        if self._newest_loans[0] is not held:
            loans = loans_of(held, self.shape.num_experts, self.node_of_rank if self.by_node else None)
            self._newest_loans = held, loans
        return self._newest_loans[1]

    def _lend(self, loans: Loans, received: Tensor, sent: Tensor, channel: Channel, detail: str) -> Transfer:
        out_counts, in_counts = (list(map(len, of)) for of in (loans.received_by(self.rank), loans.sent_by(self.rank)))
        return channel.all_to_all(received, sent, out_counts, in_counts, lane="restore", detail=detail)

    def _rows(self, masters: Sequence[Master], rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns copies of experts [N, P]."""
        flat = masters[0]
        if self.flat and isinstance(flat, Tensor):
            return flat.index_select(0, index_of(rows, flat)).to(dtype)
        rows_NP = self.memory.empty((len(rows), self.form.num_elements), dtype, device_of(masters))
        for place, master in zip(self.form.views(rows_NP).values(), masters, strict=True):
            if isinstance(master, Tensor):
                place.copy_(master.index_select(0, index_of(rows, master)))
            else:
                for row_place, row in zip(place, rows, strict=True):
                    row_place.copy_(master[row])
        return rows_NP

    def reshard(self, grads_DP: Tensor, layout: ExpertLayout, channel: Channel, detail: str) -> ReshardSteps:
        held = layout.held_by_rank
        by_owners, passed_on = self._loans(held)
        slot = {expert: slot for slot, expert in enumerate(held[self.rank])}
        if passed_on:
            gathered, gathering = self._return(passed_on, grads_DP, slot, channel, f"{detail} inside nodes")
        yield False
        if passed_on:
            gathering.wait()
            self._add_gathered(gathered, passed_on.sent_by(self.rank), grads_DP, slot)
            del gathered, gathering
        if not by_owners:
            return self._masters_form(grads_DP)
        received, transfer = self._return(by_owners, grads_DP, slot, channel, detail)
        yield True
        transfer.wait()
        experts_R = by_owners.sent_by(self.rank)
        parts_R: list[Sequence[Tensor]] = list(received.split([len(experts) for experts in experts_R]))
        experts_R[self.rank] = [e for e in self.owned() if e in slot]
        parts_R[self.rank] = [grads_DP[slot[e]] for e in experts_R[self.rank]]
        return self._masters_form(self._total(parts_R, experts_R, grads_DP))

    def _return(
        self, loans: Loans, grads_DP: Tensor, slot: Mapping[int, int], channel: Channel, detail: str
    ) -> tuple[Tensor, Transfer]:
        """Starts sending gradients of received experts to their senders; returns where those of sent ones arrive."""
        sent_R, received_R = loans.sent_by(self.rank), loans.received_by(self.rank)
        received = self.memory.new(grads_DP, len(_flat(sent_R)), grads_DP.shape[1])
        sent = self.memory.new(grads_DP, len(_flat(received_R)), grads_DP.shape[1])
        torch.index_select(grads_DP, 0, index_of([slot[e] for e in _flat(received_R)], grads_DP), out=sent)
        counts = [[len(experts) for experts in of] for of in (sent_R, received_R)]
        return received, channel.all_to_all(received, sent, *counts, lane="reshard", detail=detail)

    def _add_gathered(
        self, gathered: Tensor, sent_R: Sequence[Sequence[int]], grads_DP: Tensor, slot: Mapping[int, int]
    ) -> None:
        """Writes the sums of this node, in rank order, into the slots of experts that were passed on."""
        passed = list(dict.fromkeys(_flat(sent_R)))
        before = len(_flat(sent_R[: self.rank]))
        parts = [*gathered[:before], *(grads_DP[slot[e]] for e in passed), *gathered[before:]]
        experts = [*_flat(sent_R[: self.rank]), *passed, *_flat(sent_R[self.rank :])]
        row = {expert: row for row, expert in enumerate(passed)}
        sums = add_in_order(parts, [row[e] for e in experts], self.memory.new(grads_DP, len(passed), grads_DP.shape[1]))
        grads_DP[index_of([slot[e] for e in passed], grads_DP)] = sums

    def _total(self, parts_R: list[Sequence[Tensor]], experts_R: list[list[int]], like: Tensor) -> Tensor:
        """Returns the sum in rank order, [owned, P]; by node, this one's ranks are summed before they are added."""
        if self.by_node:
            members = [
                rank for rank in range(self.num_ranks) if self.node_of_rank[rank] == self.node_of_rank[self.rank]
            ]
            here = slice(members[0], members[-1] + 1)
            parts_R[here] = [list(self._added(parts_R[here], experts_R[here], like))]
            experts_R[here] = [list(self.owned())]
        return self._added(parts_R, experts_R, like)

    def _added(self, parts_R: Iterable[Sequence[Tensor]], experts_R: Iterable[Sequence[int]], like: Tensor) -> Tensor:
        rows = [e - self.owned().start for e in _flat(experts_R)]
        total_NP = self.memory.new(like, len(self.owned()), like.shape[1])
        return add_in_order((part for parts in parts_R for part in parts), rows, total_NP)

    def _masters_form(self, total_NP: Tensor) -> tuple[Tensor, ...]:
        return (total_NP,) if self.flat else tuple(self.form.views(total_NP).values())


def _flat(lists: Iterable[Iterable[int]]) -> list[int]:
    return [value for values in lists for value in values]
