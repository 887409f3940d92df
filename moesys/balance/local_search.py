"""Local search over the ranks that hold each expert: swaps and re-replications that lower the busiest rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

# Coordinate descent converges in a few sweeps unless experts form long chains; the bound keeps a plan's time bounded.
MOST_SWEEPS = 12
REPLICATIONS_TRIED = 32

Move = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Filling:
    """Experts on ranks, and their tokens split so that no shift between an expert's own replicas helps.

    ``holders_by_expert`` the ranks of each expert, ascending; ``flow_by_expert`` the tokens each of them gets, in the
    same order; ``load_by_rank`` the sums. Tuples are replaced, never changed, so that a copy is three short lists.
    """

    tokens_by_expert: Sequence[int]
    holders_by_expert: list[tuple[int, ...]]
    flow_by_expert: list[tuple[int, ...]]
    load_by_rank: list[int]

    def copy(self) -> Filling:
        return Filling(
            self.tokens_by_expert, self.holders_by_expert.copy(), self.flow_by_expert.copy(), self.load_by_rank.copy()
        )

    def cost(self) -> tuple[int, int]:
        """What is minimised: the busiest rank's tokens, then the sum of squares."""
        return max(self.load_by_rank), sum(tokens * tokens for tokens in self.load_by_rank)

    def take(self, expert: int) -> None:
        """Takes an expert's tokens off its ranks."""
        for rank, tokens in zip(self.holders_by_expert[expert], self.flow_by_expert[expert], strict=True):
            self.load_by_rank[rank] -= tokens
        self.flow_by_expert[expert] = (0,) * len(self.holders_by_expert[expert])

    def pour(self, expert: int) -> None:
        """Gives an expert's tokens to its lowest ranks, up to one level: the least sum of squares, in integers."""
        holders = self.holders_by_expert[expert]
        if len(holders) == 1:
            self.flow_by_expert[expert] = (self.tokens_by_expert[expert],)
            self.load_by_rank[holders[0]] += self.tokens_by_expert[expert]
            return
        lowest = sorted((self.load_by_rank[rank], place) for place, rank in enumerate(holders))
        water = self.tokens_by_expert[expert]
        width = 0
        for level, _ in lowest:
            if level * width >= water:
                break
            water += level
            width += 1
        level, left = divmod(water, max(width, 1))
        flow = [0] * len(holders)
        for index, (height, place) in enumerate(lowest[:width]):
            flow[place] = level + (index < left) - height
            self.load_by_rank[holders[place]] += flow[place]
        self.flow_by_expert[expert] = tuple(flow)

    def settle(self) -> None:
        """Pours experts with several ranks anew until the sum of squares no longer falls.

        Its minimum over all splits is also the split with the least busiest rank, so this tends to ``min_max_load``.
        """
        shared = [
            expert
            for expert, holders in enumerate(self.holders_by_expert)
            if len(holders) > 1 and self.tokens_by_expert[expert]
        ]
        cost = self.cost()
        for _ in range(MOST_SWEEPS):
            for expert in shared:
                self.take(expert)
                self.pour(expert)
            before, cost = cost, self.cost()
            if cost[1] >= before[1]:
                break


def water_filled(holders_E: Sequence[tuple[int, ...]], tokens_E: Sequence[int], num_ranks: int) -> Filling:
    """The filling of these holders, from scratch: experts with the fewest ranks first, of those the heaviest first."""
    filling = Filling(tokens_E, list(holders_E), [(0,) * len(holders) for holders in holders_E], [0] * num_ranks)
    for expert in sorted(range(len(tokens_E)), key=lambda expert: (len(holders_E[expert]), -tokens_E[expert])):
        filling.pour(expert)
    filling.settle()
    return filling


def improved(
    holders_E: Sequence[tuple[int, ...]], tokens_E: Sequence[int], num_ranks: int, search_moves: int
) -> list[tuple[int, ...]]:
    """Holders after at most ``search_moves`` moves, each of which lowers the cost; the same number of replicas a rank.

    A swap exchanges two experts between a busiest rank and a lighter one. A re-replication gives a lighter rank one
    of the busiest's experts in place of one that has other ranks too. Search ends early where no move tried helps, or
    where the busiest rank has no more than the mean.
    """
    filling = water_filled(holders_E, tokens_E, num_ranks)
    num_holding = len({rank for holders in holders_E for rank in holders})
    mean = -(-sum(tokens_E) // num_holding)
    for _ in range(search_moves):
        if max(filling.load_by_rank) <= mean:
            break
        better = next((trial for trial in _trials(filling) if trial.cost() < filling.cost()), None)
        if better is None:
            break
        filling = better
    return filling.holders_by_expert


def _trials(filling: Filling) -> Iterator[Filling]:
    """Fillings one move away, the most promising first."""
    for move in _swaps(filling):
        yield _after(filling, move)
    for move in _replications(filling):
        yield _after(filling, move)


def _after(filling: Filling, move: Move) -> Filling:
    """A copy in which every ``(rank, leaving, coming)`` of the move has happened, settled."""
    trial = filling.copy()
    moved = sorted({expert for _, *experts in move for expert in experts})
    for expert in moved:
        trial.take(expert)
    for rank, leaving, coming in move:
        trial.holders_by_expert[leaving] = tuple(
            holder for holder in trial.holders_by_expert[leaving] if holder != rank
        )
        trial.holders_by_expert[coming] = tuple(sorted((*trial.holders_by_expert[coming], rank)))
    for expert in sorted(moved, key=lambda expert: len(trial.holders_by_expert[expert])):
        trial.pour(expert)
    trial.settle()
    return trial


def _swaps(filling: Filling) -> Iterator[Move]:
    """The swap that lowers the higher of its two ranks the most, if any lowers it.

    For rank h with a tokens of an expert, rank d with b of another, and gap = load of h - load of d, both end below h's
    load exactly if 0 < a - b < gap, and by the smaller of a - b and gap - (a - b).
    """
    expert_P = np.repeat(
        np.arange(len(filling.holders_by_expert)), [len(holders) for holders in filling.holders_by_expert]
    )
    rank_P = np.array([rank for holders in filling.holders_by_expert for rank in holders])
    flow_P = np.array([tokens for flow in filling.flow_by_expert for tokens in flow])
    load_R = np.array(filling.load_by_rank)
    holds_RE = np.zeros((len(load_R), len(filling.holders_by_expert)), dtype=bool)
    holds_RE[rank_P, expert_P] = True
    hot = load_R[rank_P] >= load_R.max() - 1
    h, d = np.flatnonzero(hot), np.flatnonzero(~hot)
    if not d.size:
        return
    lowered = flow_P[h][:, None] - flow_P[d]
    gap = load_R[rank_P[h]][:, None] - load_R[rank_P[d]]
    gain = np.minimum(lowered, gap - lowered)
    gain[holds_RE[rank_P[d]][:, expert_P[h]].T | holds_RE[rank_P[h]][:, expert_P[d]]] = 0
    best = int(gain.argmax())
    if gain.flat[best] > 0:
        p, q = h[best // len(d)], d[best % len(d)]
        hot_rank, light_rank, heavy, light = (int(x) for x in (rank_P[p], rank_P[q], expert_P[p], expert_P[q]))
        yield (hot_rank, heavy, light), (light_rank, light, heavy)


def _replications(filling: Filling) -> Iterator[Move]:
    """An expert of a busiest rank onto a lighter rank, in place of one that other ranks hold too; a few of them.

    The places with the most room are tried first, counting as lost what the expert that leaves had there, and for each
    the experts with the most tokens on a busiest rank.
    """
    most = max(filling.load_by_rank)
    hot = {rank for rank, tokens in enumerate(filling.load_by_rank) if tokens >= most - 1}
    coming = sorted(
        (-tokens, expert)
        for expert, (holders, flow) in enumerate(zip(filling.holders_by_expert, filling.flow_by_expert, strict=True))
        for rank, tokens in zip(holders, flow, strict=True)
        if rank in hot and tokens
    )
    leaving = sorted(
        (filling.load_by_rank[rank] + tokens, rank, expert)
        for expert, (holders, flow) in enumerate(zip(filling.holders_by_expert, filling.flow_by_expert, strict=True))
        for rank, tokens in zip(holders, flow, strict=True)
        if len(holders) > 1 and rank not in hot
    )
    found = (
        ((rank, out, into),)
        for _, rank, out in leaving
        for into in dict.fromkeys(expert for _, expert in coming)
        if rank not in filling.holders_by_expert[into]
    )
    yield from islice(found, REPLICATIONS_TRIED)
