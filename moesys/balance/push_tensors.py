"""Quotas by pushing, for tensors: the algorithm of ``push`` in plain torch ops whose shapes are known beforehand.

The layout is known on the host, the counts are on a device, and nothing here asks the host to wait for them: no branch
and no loop depends on a count. So the phases are a fixed number, and those after the last push change nothing. All is
int64, and sums and least values of integers are the same in any order: equal counts give the bytes of ``push``.

``push`` looks for cheapest paths expert by expert until no label changes; here paths are joined end to end, each time
to twice as many hops. ``push`` is told its limit; here it is found first, by pushes of hops alone: it begins as a lower
bound, and wherever ranks reach no room their tokens can go nowhere else, so that their mean is a bound as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.balance.holders import Holders
from moesys.balance.push import CROSSING, STEPS, UNREACHED
from moesys.load import IntArray

UNBOUNDED = 1 << 62
# Paths are joined for so many pairs of hops at once: 128 MiB.
PAIRS_AT_ONCE = 1 << 24


def sum_by(values_N: Tensor, of_N: Tensor, num: int) -> Tensor:
    """Sums int64 [num] of the values that ``of_N`` gives the same number."""
    return values_N.new_zeros(num).index_add(0, of_N, values_N)


def least_by(values_N: Tensor, of_N: Tensor, num: int) -> Tensor:
    """Least values int64 [num], at most ``UNREACHED``, of those that ``of_N`` gives the same number."""
    return values_N.new_full((num,), UNREACHED).scatter_reduce(0, of_N, values_N, "amin")


def sum_before(values_N: Tensor, first_N: Tensor) -> Tensor:
    """Along the first dimension: of the values from item ``first_N`` up to each item, itself not counted, the sum."""
    before_N = values_N.cumsum(0) - values_N
    return before_N - before_N[first_N]


@dataclass(frozen=True, eq=False)
class Queues:
    """N items in ``num`` = L queues, one queue after another. All int64 [N].

    ``queue_N``: an item's queue; ``first_N``: that queue's first item; ``place_N``: an item's place in it, from 0;
    ``size_N``: how many items are in it.
    """

    num: int
    queue_N: Tensor
    first_N: Tensor
    place_N: Tensor
    size_N: Tensor

    @classmethod
    def of(cls, queue_N: IntArray, device: torch.device) -> Queues:
        """For ``queue_N`` that never falls and leaves no queue out."""
        first_N = np.searchsorted(queue_N, queue_N)
        place_N, size_N = np.arange(len(queue_N)) - first_N, np.bincount(queue_N)[queue_N]
        num = int(queue_N[-1]) + 1
        return cls(num, *(torch.as_tensor(values_N, device=device) for values_N in (queue_N, first_N, place_N, size_N)))

    def sum(self, values_N: Tensor) -> Tensor:
        """Of each queue, int64 [L]."""
        return sum_by(values_N, self.queue_N, self.num)

    def serve(self, amount_L: Tensor, wish_N: Tensor) -> Tensor:
        """What each item gets, int64 [N]: in turn what it wishes, while some of its queue's amount is left."""
        left_N = amount_L[self.queue_N] - sum_before(wish_N, self.first_N)
        return left_N.clamp(min=0).minimum(wish_N)

    def share(self, amount_L: Tensor, turn: int | Tensor) -> Tensor:
        """What each item gets of equal shares, int64 [N]; remainders begin at item ``turn`` of the queue."""
        amount_N = amount_L[self.queue_N]
        return amount_N // self.size_N + ((self.place_N - turn) % self.size_N < amount_N % self.size_N)


class Quotas(NamedTuple):
    """Where the tokens are, int64: ``tokens_P`` of each replica, ``load_R`` of each rank, ``here_G`` of each group."""

    tokens_P: Tensor
    load_R: Tensor
    here_G: Tensor


class TensorLabels(NamedTuple):
    """Costs of cheapest paths to room, as in ``push``, and what of a step follows from them alone.

    ``rank_R`` int64: from a rank; ``inside_G``: from the best rank of a group; ``from_G``: for a token that leaves a
    rank of the group; ``exchange_G``: by the best of all groups of its expert. Bool: ``path_P``: a replica's tokens
    leave its rank along a cheapest path; ``best_P``: no rank of the group is nearer to room; ``local_G``: a cheapest
    path stays in the group.
    """

    rank_R: Tensor
    inside_G: Tensor
    from_G: Tensor
    exchange_G: Tensor
    path_P: Tensor
    best_P: Tensor
    local_G: Tensor


class PushTensors:
    """What pushing needs to know of a layout: P replicas in the order of ``Holders``, in G groups by expert and node.

    ``rank_P``, ``expert_P`` int64 [P]; ``groups`` and ``experts``: queues of replicas; ``groups_of_expert``: of groups.
    """

    def __init__(self, holders: Holders, node_R: IntArray, device: torch.device) -> None:
        node_P = node_R[holders.rank_P]
        place_G, group_P = np.unique(np.stack([holders.expert_P, node_P]), axis=1, return_inverse=True)
        group_P = group_P.reshape(-1)
        width_E = np.diff(holders.first_E)
        giver_A = np.repeat(np.arange(len(node_P)), width_E[holders.expert_P])
        queue_A = np.searchsorted(giver_A, giver_A)
        taker_A = holders.first_E[holders.expert_P[giver_A]] + np.arange(len(giver_A)) - queue_A
        flat_A = holders.rank_P[giver_A] * len(node_R) + holders.rank_P[taker_A]

        def on_device(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, device=device)

        self.num_ranks = len(node_R)
        self.rank_P, self.expert_P = on_device(holders.rank_P), on_device(holders.expert_P)
        self.groups = Queues.of(group_P, device)
        self.experts = Queues.of(holders.expert_P, device)
        self.groups_of_expert = Queues.of(place_G[0], device)
        self.node_G = on_device(place_G[1])
        num_groups = self.groups.num
        self._pools = Queues.of(
            np.concatenate(
                [group_P, group_P + num_groups, group_P + 2 * num_groups, holders.expert_P + 3 * num_groups]
            ),
            device,
        )
        self._index_P, self._far_pool_P = torch.arange(len(node_P), device=device), num_groups + self.expert_P
        self._holding_R = on_device(holders.holds_R)
        # pairs of an expert's replicas, one to give and one to take
        self._giver_A, self._taker_A, self._flat_A = on_device(giver_A), on_device(taker_A), on_device(flat_A)
        self._crosses_A = on_device(node_P[giver_A] != node_P[taker_A])

    def share_out(self, tokens_RE: Tensor, supply_G: Tensor, turn: int | Tensor) -> Quotas:
        """Every token at home, as ``push.share_out`` has it. ``supply_G``: tokens that a group's node has for it."""
        own_P = tokens_RE[self.rank_P, self.expert_P]
        away_E = tokens_RE.sum(0) - self.groups_of_expert.sum(supply_G)
        inside_P = self.groups.share(supply_G - self.groups.sum(own_P), turn)
        tokens_P = own_P + inside_P + self.experts.share(away_E, turn)
        return Quotas(tokens_P, sum_by(tokens_P, self.rank_P, self.num_ranks), self.groups.sum(tokens_P))

    def lower_bound(self, tokens_E: Tensor) -> Tensor:
        """Of the busiest rank's tokens, int64 []: the mean of all ranks that hold anything, and of each expert's."""
        mean = -(-tokens_E.sum() // self._holding_R.sum())
        return torch.maximum(mean, (-(-tokens_E[self.expert_P] // self.experts.size_N)).max())

    def push_down(self, home: Quotas, supply_G: Tensor, limit: Tensor, phases: int) -> tuple[Quotas, Tensor, Tensor]:
        """Pushes twice: by hops alone until the least load of the busiest rank is found, then again from home for the
        least traffic. Gives the quotas, that load int64 [] and whether all was done, bool []. ``limit`` int64 []: a
        lower bound of it to begin with.
        """
        quotas = home
        levelled = torch.zeros_like(limit, dtype=torch.bool)
        for _ in range(phases):
            crossing = torch.where(levelled, CROSSING, 0)
            labels = self._label(quotas, supply_G, limit, crossing)
            for _ in range(STEPS):
                quotas = self._step(quotas, supply_G, limit, crossing, labels)
            # no push has changed what these ranks have
            tight_R = self._holding_R & (labels.rank_R == UNREACHED)
            limit = torch.maximum(limit, -(-(quotas.load_R * tight_R).sum() // tight_R.sum().clamp(min=1)))
            again = ~levelled & (quotas.load_R.max() <= limit)
            quotas = Quotas(*(torch.where(again, first, last) for first, last in zip(home, quotas, strict=True)))
            levelled = levelled | again
        return quotas, limit, levelled & (quotas.load_R.max() <= limit)

    def _label(self, quotas: Quotas, supply_G: Tensor, limit: Tensor, crossing: Tensor) -> TensorLabels:
        group_P, of_expert = self.groups.queue_N, self.groups_of_expert
        enter_G, leave_G = _cost_to_enter_and_leave(quotas, supply_G, crossing)
        across_A = enter_G[group_P][self._taker_A] + leave_G[group_P][self._giver_A]
        cost_A = torch.where(quotas.tokens_P[self._giver_A] > 0, 1 + across_A * self._crosses_A, UNREACHED)
        cost_RR = least_by(cost_A, self._flat_A, self.num_ranks**2).view(self.num_ranks, self.num_ranks)
        for _ in range((self.num_ranks - 1).bit_length()):
            cost_RR = _join_paths(cost_RR)
        room_R = torch.where((quotas.load_R < limit) & self._holding_R, 0, UNREACHED)
        rank_R = (cost_RR + room_R).amin(1).minimum(room_R)
        rank_R = torch.where(rank_R > UNREACHED // 2, UNREACHED, rank_R)

        label_P = rank_R[self.rank_P]
        inside_G = least_by(label_P, group_P, self.groups.num)
        exchange_G = least_by(inside_G + enter_G, of_expert.queue_N, of_expert.num)[of_expert.queue_N]
        from_G = inside_G.minimum(exchange_G + leave_G)
        path_P = (from_G[group_P] + 1 == label_P) & (label_P < UNREACHED)
        best_P = label_P == inside_G[group_P]
        return TensorLabels(rank_R, inside_G, from_G, exchange_G, path_P, best_P, from_G == inside_G)

    def _step(self, quotas: Quotas, supply_G: Tensor, limit: Tensor, crossing: Tensor, labels: TensorLabels) -> Quotas:
        tokens_P, load_R, here_G = quotas
        groups, experts, of_expert, rank_P = self.groups, self.experts, self.groups_of_expert, self.rank_P
        enter_G, leave_G = _cost_to_enter_and_leave(quotas, supply_G, crossing)

        # what each rank gives, by the first of its replicas on a cheapest path: near, inside its node, or far
        can_P = labels.path_P & (tokens_P > 0) & (load_R >= limit)[rank_P]
        hop_R = least_by(torch.where(can_P, self._index_P, UNREACHED), rank_P, self.num_ranks)
        hop_P = hop_R[rank_P] == self._index_P
        spare_R = torch.where(labels.rank_R < UNREACHED, (load_R - limit).clamp(min=0), 0)
        wish_P = torch.where(hop_P, spare_R[rank_P].minimum(tokens_P), 0)
        # what is not at home leaves for less, but no more than that
        foreign_G = here_G - supply_G
        leaving_G = torch.where(foreign_G > 0, foreign_G, UNBOUNDED)
        leaving_G = torch.where(labels.from_G == labels.exchange_G + leave_G, leaving_G, 0)
        give_P = groups.serve(torch.where(labels.local_G, UNBOUNDED, leaving_G), wish_P)
        give_near_P = torch.where(labels.local_G[groups.queue_N], give_P, 0)
        give_far_P = give_P - give_near_P
        near_G, far_E = groups.sum(give_near_P), experts.sum(give_far_P)

        # what each rank takes, from one pool: those inside nodes are numbered first
        passed_P = torch.where(hop_P & (give_P == 0), tokens_P, 0)
        take_R = (limit - load_R).clamp(min=0) + sum_by(passed_P, rank_P, self.num_ranks)
        take_P = torch.where(labels.best_P, take_R[rank_P], 0)
        far_G = torch.where(labels.inside_G + enter_G == labels.exchange_G, far_E[of_expert.queue_N], 0)
        pool_P = torch.where(far_G[groups.queue_N] > 0, self._far_pool_P, UNREACHED)
        pool_P = torch.where(near_G[groups.queue_N] > 0, groups.queue_N, pool_P)
        pool_P = torch.where(take_P > 0, pool_P, UNREACHED)
        taker_P = (least_by(pool_P, rank_P, self.num_ranks)[rank_P] == pool_P) & (pool_P < UNREACHED)
        take_P = torch.where(taker_P, take_P, 0)
        take_near_P = torch.where(pool_P < groups.num, take_P, 0)
        take_far_P = take_P - take_near_P

        # where some tokens are missing at home, a group takes no more than those
        open_G = groups.sum(take_far_P)
        open_G = torch.where(foreign_G < 0, open_G.minimum(-foreign_G), open_G)
        moved_G = near_G.minimum(groups.sum(take_near_P))
        moved_E = far_E.minimum(of_expert.sum(open_G))
        entering_G = of_expert.serve(moved_E, open_G)
        moved_4P = self._pools.serve(
            torch.cat([moved_G, moved_G, entering_G, moved_E]),
            torch.cat([give_near_P, take_near_P, take_far_P, give_far_P]),
        ).view(4, -1)
        far_P = moved_4P[2] - moved_4P[3]
        moved_P = far_P + moved_4P[1] - moved_4P[0]
        return Quotas(tokens_P + moved_P, load_R + sum_by(moved_P, rank_P, self.num_ranks), here_G + groups.sum(far_P))


def _cost_to_enter_and_leave(quotas: Quotas, supply_G: Tensor, crossing: Tensor) -> tuple[Tensor, Tensor]:
    """Of a token, int64 [G]: a crossing where it would not be at home; less a crossing where it is not at home now."""
    enter_G = torch.where(quotas.here_G >= supply_G, crossing, 0)
    return enter_G, -torch.where(quotas.here_G > supply_G, crossing, 0)


def _join_paths(cost_RR: Tensor) -> Tensor:
    """Costs of the cheapest paths of up to twice as many hops."""
    onward_RR, rows = cost_RR.T.contiguous(), max(1, PAIRS_AT_ONCE // cost_RR.numel())
    joined = [(part_NR[:, None] + onward_RR).amin(2) for part_NR in cost_RR.split(rows)]
    return torch.cat(joined).minimum(cost_RR)
