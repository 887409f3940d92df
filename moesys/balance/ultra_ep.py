"""UltraEP (arXiv 2606.04101): experts on their owners, and copies for the least threshold that a greedy reaches."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import numpy as np
from pydantic import Field

from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.quotas import QuotaPlanner, Row, borrowed_plan, spare_slots
from moesys.layout import TokenPlan, owner_of_experts
from moesys.load import IntArray

PROBES = 4
RETRIES = 2


class UltraEp(QuotaPlanner):
    """UltraEP (arXiv 2606.04101) as a baseline: experts on their owners, copies inside a domain, the least threshold
    that a greedy reaches; for ``lag=0``.
    """

    kind: Literal["ultra_ep"] = "ultra_ep"
    tolerance: float = Field(0.01, ge=0, description="first threshold that is tried, as a share above the mean")
    min_tokens: int = Field(1024, ge=1, description="fewest tokens of a piece while a threshold is searched for")

    def token_plan(self, problem: PlanningProblem) -> TokenPlan:
        """Balances each domain of the cluster by itself, so that copies stay where the fastest links are.

        *Greedy* for a threshold: ranks from the most tokens down, and the experts that each owns likewise, at ties the
        lower first. While a rank has more than the threshold, it sends as much of an expert as it must, as the receiver
        has room for below the threshold, and as leaves the owner one token; to the rank with most room that has a free
        slot and no copy of it. A piece below the least piece is not sent, and the next expert is tried.

        *Search*: with the mean, rounded up, times 1 + ``tolerance``, and twice with a hundredth of the busiest rank
        more, where the least piece is the rank's need over the ranks that could take some. If all fail, the least
        threshold from the mean, rounded up, to the busiest rank, with ``min_tokens`` as the least piece.

        *Sources*: a rank that holds an expert computes its own tokens up to its quota. Each source spreads what it has
        left over what is left of quotas, in proportion, by floors and largest remainders, at ties to the lower rank.
        Every source rounds for itself, so that a rank may end some tokens off its quota.

        Source: Dots-Infra/UltraEP v1.0.0, csrc/kernels/placement.cu and README. The kernel's search probes four
        thresholds at a time with warps, and the greedy need not be monotone; our reading keeps the range above the
        greatest probe that fails below the least that does not. If no threshold is feasible, owners compute everything.
        """
        load = problem.load
        owner_E, tokens_E = owner_of_experts(load.num_experts, load.num_ranks), load.tokens_E
        spare_R = spare_slots(problem)
        quota_RE = np.zeros((load.num_ranks, load.num_experts), dtype=np.int64)
        quota_RE[owner_E, range(load.num_experts)] = tokens_E
        domain_R = np.array(problem.cluster.domain_of_rank)
        for domain in range(domain_R[-1] + 1):
            _Domain(np.flatnonzero(domain_R == domain).tolist(), quota_RE, spare_R, self).level()
        rows = (
            row
            for expert in range(load.num_experts)
            for row in _by_source(expert, load.tokens_RE[:, expert], quota_RE[:, expert])
        )
        return borrowed_plan(problem, quota_RE, rows)


class _Domain:
    """The ranks of a domain, whose part of ``quota_RE`` is all on owners before ``level``."""

    def __init__(self, ranks: list[int], quota_RE: IntArray, spare_R: list[int], config: UltraEp) -> None:
        self.ranks, self.quota_RE, self.spare_R, self.config = ranks, quota_RE, spare_R, config
        self.load_R = quota_RE.sum(axis=1).tolist()

    def level(self) -> None:
        loads = [self.load_R[rank] for rank in self.ranks]
        lowest, highest = -(-sum(loads) // len(loads)), max(loads)
        threshold = -int(-(lowest * (1 + Fraction(str(self.config.tolerance)))) // 1)
        found = None
        for _ in range(1 + RETRIES):
            found = self._greedy(threshold, None)
            if found is not None:
                break
            threshold += max(1, -(-highest // 100))
        if found is None:
            found = self._search(lowest, highest)
        for sender, receiver, expert, tokens in found:
            self.quota_RE[sender, expert] -= tokens
            self.quota_RE[receiver, expert] += tokens

    def _search(self, lowest: int, highest: int) -> list[Row]:
        """Moves of the least threshold that is found. At the highest there is nothing to do."""
        if (found := self._greedy(lowest, self.config.min_tokens)) is not None:
            return found
        low, high, best = lowest + 1, highest, list[Row]()
        while low < high:
            probes = sorted({low + (high - low) * part // (PROBES + 1) for part in range(1, PROBES + 1)})
            for probe in probes:
                if (found := self._greedy(probe, self.config.min_tokens)) is not None:
                    high, best = probe, found
                    break
                low = probe + 1
        return best

    def _greedy(self, threshold: int, least_piece: int | None) -> list[Row] | None:
        """Returns moves (sender, receiver, expert, tokens) by which no rank exceeds the threshold, None if it fails."""
        room_R = {rank: max(threshold - self.load_R[rank], 0) for rank in self.ranks}
        free_R = {rank: self.spare_R[rank] for rank in self.ranks}
        moves: list[Row] = []
        for sender in sorted(self.ranks, key=lambda rank: -self.load_R[rank]):
            need = max(self.load_R[sender] - threshold, 0)
            held = np.flatnonzero(self.quota_RE[sender]).tolist()
            for expert in sorted(held, key=lambda expert: -self.quota_RE[sender, expert]):
                left, holders = int(self.quota_RE[sender, expert]) - 1, {sender}
                while need:
                    receivers = [r for r in self.ranks if room_R[r] and free_R[r] and r not in holders]
                    if not receivers:
                        break
                    receiver = max(receivers, key=lambda rank: (room_R[rank], -rank))
                    piece = min(need, room_R[receiver], left)
                    least = -(-need // len(receivers)) if least_piece is None else least_piece
                    if piece < max(least, 1):
                        break
                    moves.append((sender, receiver, expert, piece))
                    holders.add(receiver)
                    free_R[receiver] -= 1
                    room_R[receiver] -= piece
                    left -= piece
                    need -= piece
            if need:
                return None
        return moves


def _by_source(expert: int, tokens_R: IntArray, quota_R: IntArray) -> Iterator[Row]:
    kept_R = np.minimum(tokens_R, quota_R)
    rest_R, room_R = tokens_R - kept_R, quota_R - kept_R
    sent_RR, remainder_RR = np.divmod(rest_R[:, None] * room_R, max(int(room_R.sum()), 1))
    largest_first_RR = np.argsort(-remainder_RR, axis=1, kind="stable")
    left_R = rest_R - sent_RR.sum(axis=1)
    sent_RR += np.argsort(largest_first_RR, axis=1) < left_R[:, None]
    np.fill_diagonal(sent_RR, sent_RR.diagonal() + kept_R)
    for source, rank in np.argwhere(sent_RR).tolist():
        yield source, expert, rank, int(sent_RR[source, rank])
