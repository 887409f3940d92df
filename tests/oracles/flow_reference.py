"""The split of ``split.py`` in plain torch: the same integers, by ops on whole groups, experts and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moesys.kernels.split import flow as kernels
from moesys.kernels.split.flow import PHASES, TensorPlan
from moesys.kernels.split.tables import SplitTables

STEPS, CROSSING, UNREACHED, UNBOUNDED = (
    constant.value for constant in (kernels.STEPS, kernels.CROSSING, kernels.UNREACHED, kernels.UNBOUNDED)
)


class _Members(NamedTuple):
    """Items with numbers ``of_N`` of what they belong to; what is found for all of its items, each of them gets."""

    of_N: Tensor

    def sum(self, values_N: Tensor) -> Tensor:
        return torch.zeros_like(values_N).index_add(0, self.of_N, values_N)[self.of_N]

    def least(self, values_N: Tensor) -> Tensor:
        return torch.full_like(values_N, UNREACHED).scatter_reduce(0, self.of_N, values_N, "amin")[self.of_N]

    def before(self, values_N: Tensor) -> Tensor:
        """Of earlier items, the sum; ``of_N`` is what an item's queue begins with."""
        before_N = values_N.cumsum(0) - values_N
        return before_N - before_N[self.of_N]

    def serve(self, amount_N: Tensor, wish_N: Tensor) -> Tensor:
        """What each item gets: in turn what it wishes, while some of the amount is left."""
        return (amount_N - self.before(wish_N)).clamp(min=0).minimum(wish_N)

    def share(self, amount_N: Tensor, turn: int | Tensor) -> Tensor:
        """Equal shares of the amount; remainders begin at item ``turn``."""
        one_N = torch.ones_like(amount_N)
        place_N, size_N = self.before(one_N), self.sum(one_N)
        return amount_N // size_N + ((place_N - turn) % size_N < amount_N % size_N)


class _Quotas(NamedTuple):
    """int64 [P]: a replica's tokens, those of its rank, those of its group."""

    tokens: Tensor
    load: Tensor
    here: Tensor


class _Labels(NamedTuple):
    """int64 [P]: what the cheapest path to room costs. ``rank``: from the rank; ``near``: from the best rank of the
    group; ``exchange``: by the best group of the expert, for a token that leaves; ``cost``: from a rank of the group.
    """

    rank: Tensor
    near: Tensor
    exchange: Tensor
    cost: Tensor


def split_reference(tokens_RE: Tensor, tables: SplitTables, turn: int | Tensor = 0, phases: int = PHASES) -> TensorPlan:
    """``TensorPlan`` of ``tokens_RE`` int64 [R, E]; ``turn`` and ``phases`` as in ``split``. The host waits."""
    push = _Push(tokens_RE, tables, turn)
    quota_P, limit, converged = push.down(phases)
    return TensorPlan(_fill_quotas(tokens_RE, quota_P, tables), limit, converged)


class _Push:
    def __init__(self, tokens_RE: Tensor, tables: SplitTables, turn: int | Tensor) -> None:
        self.rank_P, expert_P = tables.rank_P.long(), tables.expert_P.long()
        self.index_P = torch.arange(len(self.rank_P), device=tokens_RE.device)
        # every number is that of the first replica, of a rank too
        self.ranks = _Members(tables.by_rank_P.long()[tables.first_R1.long()[self.rank_P]])
        self.groups = _Members(tables.group_first_P.long())
        self.experts = _Members(tables.first_E1.long()[expert_P])
        self.is_first_P = self.groups.of_N == self.index_P

        node_R = tables.node_first_R.long()
        supply_NE = torch.zeros_like(tokens_RE).index_add(0, node_R, tokens_RE)
        self.supply_P = supply_NE[node_R[self.rank_P], expert_P]
        own_P, total_P = tokens_RE[self.rank_P, expert_P], tokens_RE.sum(0)[expert_P]
        away_P = total_P - self.experts.sum(self.supply_P * self.is_first_P)
        inside_P = self.groups.share(self.supply_P - self.groups.sum(own_P), turn)
        self.home = self.quotas(own_P + inside_P + self.experts.share(away_P, turn))
        holding = len(self.rank_P.unique())
        of_expert_P = -(-total_P // self.experts.sum(torch.ones_like(total_P)))
        self.limit = of_expert_P.max().maximum(-(-tokens_RE.sum() // holding))

    def quotas(self, tokens_P: Tensor) -> _Quotas:
        return _Quotas(tokens_P, self.ranks.sum(tokens_P), self.groups.sum(tokens_P))

    def down(self, phases: int) -> tuple[Tensor, Tensor, Tensor]:
        """Quotas int64 [P], the limit int64 [], whether all was done, bool []: first by hops alone until the limit is
        found, then again from home for the least traffic.
        """
        quotas, crossing, phase = self.home, 0, 0
        while phase < phases and (crossing == 0 or quotas.load.max() > self.limit):
            if quotas.load.max() <= self.limit:
                quotas, crossing = self.home, CROSSING
                continue
            labels = self.label(quotas, crossing)
            for _ in range(STEPS):
                quotas = self.step(quotas, crossing, labels)
            tight_P = labels.rank == UNREACHED
            if tight_P.any():
                ranks = self.rank_P[tight_P].unique()
                self.limit = self.limit.maximum(-(-quotas.tokens[tight_P].sum() // len(ranks)))
            phase += 1
        return quotas.tokens, self.limit, (quotas.load.max() <= self.limit) & (crossing > 0)

    def fares(self, quotas: _Quotas, crossing: int) -> tuple[Tensor, Tensor]:
        """Of a token, int64 [P]: a crossing to enter a group that has all of its own; less a crossing to leave one that
        has more.
        """
        return (quotas.here >= self.supply_P) * crossing, (quotas.here > self.supply_P) * -crossing

    def label(self, quotas: _Quotas, crossing: int) -> _Labels:
        enter_P, leave_P = self.fares(quotas, crossing)
        rank_P = torch.where(quotas.load < self.limit, 0, UNREACHED)
        while True:
            near_P = self.groups.least(rank_P)
            exchange_P = self.experts.least(near_P + enter_P)
            cost_P = near_P.minimum(exchange_P + leave_P)
            passable_P = (quotas.tokens > 0) & (cost_P < UNREACHED // 2)
            lower_P = rank_P.minimum(self.ranks.least(torch.where(passable_P, cost_P + 1, UNREACHED)))
            if torch.equal(lower_P, rank_P):
                return _Labels(rank_P, near_P, exchange_P, cost_P)
            rank_P = lower_P

    def step(self, quotas: _Quotas, crossing: int, labels: _Labels) -> _Quotas:
        tokens_P, load_P, here_P = quotas
        ranks, groups, experts = self.ranks, self.groups, self.experts
        enter_P, leave_P = self.fares(quotas, crossing)
        foreign_P, local_P = here_P - self.supply_P, labels.cost == labels.near

        # what each rank gives, by the first of its replicas on a cheapest path
        reached_P = labels.rank < UNREACHED
        can_P = (labels.cost + 1 == labels.rank) & reached_P & (tokens_P > 0) & (load_P >= self.limit)
        is_hop_P = ranks.least(torch.where(can_P, self.index_P, UNREACHED)) == self.index_P
        spare_P = (load_P - self.limit).clamp(min=0) * reached_P
        wish_P = spare_P.minimum(tokens_P) * is_hop_P
        # what is not at home leaves for less, but no more than that
        leaving_P = torch.where(foreign_P > 0, foreign_P, UNBOUNDED)
        leaving_P = leaving_P * (labels.cost == labels.exchange + leave_P)
        give_P = groups.serve(torch.where(local_P, UNBOUNDED, leaving_P), wish_P)
        near_P, far_P = give_P * local_P, give_P * ~local_P
        given_near_P, given_far_P = groups.sum(near_P), experts.sum(far_P)

        # what each rank takes, from the pool of the lowest number: those inside of nodes come first
        room_P = (self.limit - load_P).clamp(min=0) + ranks.sum(tokens_P * (is_hop_P & (give_P == 0)))
        takes_P = (labels.rank == labels.near) & (room_P > 0)
        for_far_P = takes_P & (labels.near + enter_P == labels.exchange) & (given_far_P > 0)
        pool_P = torch.where(for_far_P, len(tokens_P) + experts.of_N, UNREACHED)
        pool_P = torch.where(takes_P & (given_near_P > 0), groups.of_N, pool_P)
        take_P = room_P * ((ranks.least(pool_P) == pool_P) & (pool_P < UNREACHED))
        take_near_P, take_far_P = take_P * (pool_P < len(tokens_P)), take_P * (pool_P >= len(tokens_P))

        # where some tokens are missing at home, a group takes no more than those
        open_P = groups.sum(take_far_P)
        open_P = torch.where(foreign_P < 0, open_P.minimum(-foreign_P), open_P) * self.is_first_P
        moved_near_P = given_near_P.minimum(groups.sum(take_near_P))
        moved_far_P = given_far_P.minimum(experts.sum(open_P))
        entering_P = experts.serve(moved_far_P, open_P)[groups.of_N]
        return self.quotas(
            tokens_P
            + groups.serve(moved_near_P, take_near_P)
            - groups.serve(moved_near_P, near_P)
            + groups.serve(entering_P, take_far_P)
            - experts.serve(moved_far_P, far_P)
        )


def _fill_quotas(tokens_RE: Tensor, quota_P: Tensor, tables: SplitTables) -> Tensor:
    """What each source sends to each replica, int64 [R, P]: where their lines overlap, the finest parts first."""
    expert_P, rank_P = tables.expert_P.long(), tables.rank_P.long()
    supply_RE, demand_RE = tokens_RE, torch.zeros_like(tokens_RE)
    demand_RE[rank_P, expert_P] = quota_P
    tokens_RP = tokens_RE.new_zeros(len(tokens_RE), len(rank_P))
    for first_R in tables.part_first_LR.long():
        parts = _Members(first_R)
        begin_RE, begin_P = parts.before(supply_RE), parts.before(demand_RE)[rank_P, expert_P]
        end_RP = (begin_RE + supply_RE)[:, expert_P].minimum(begin_P + demand_RE[rank_P, expert_P])
        overlap_RP = (end_RP - begin_RE[:, expert_P].maximum(begin_P)).clamp(min=0)
        overlap_RP = overlap_RP * (first_R[:, None] == first_R[rank_P])
        tokens_RP = tokens_RP + overlap_RP
        supply_RE = supply_RE.index_add(1, expert_P, overlap_RP, alpha=-1)
        demand_RE = demand_RE.index_put((rank_P, expert_P), -overlap_RP.sum(0), accumulate=True)
    return tokens_RP
