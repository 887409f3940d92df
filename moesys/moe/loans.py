"""Loans: which experts ranks give each other, where experts stay whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from moesys.layout import lender_of_experts, owner_of_experts
from moesys.moe.shards import HeldByRank


class Loans:
    """Experts by who gives and who takes them, in the order of the taker's slots."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._experts: dict[tuple[int, int], list[int]] = defaultdict(list)

    def __bool__(self) -> bool:
        """Whether anything is lent; every rank gives the same answer."""
        return bool(self._experts)

    def add(self, giver: int, taker: int, expert: int) -> None:
        self._experts[giver, taker].append(expert)

    def given_by(self, rank: int) -> list[list[int]]:
        """Returns what a rank gives each rank, [R]."""
        return [self._experts.get((rank, taker), []) for taker in range(self.num_ranks)]

    def taken_by(self, rank: int) -> list[list[int]]:
        """Returns what a rank takes from each rank, [R]."""
        return [self._experts.get((giver, rank), []) for giver in range(self.num_ranks)]


def loans_of(held: HeldByRank, num_experts: int, node_of_rank: Sequence[int] | None) -> tuple[Loans, Loans]:
    """Returns what owners give, and what those pass on inside nodes to whom they gave; with ``node_of_rank``."""
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
