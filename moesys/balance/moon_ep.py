"""MoonEP: experts on their owners, and loads made exactly equal by copies, each receiver served by one sender."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.quotas import QuotaPlanner, borrowed_plan, cut_in_order, spare_slots
from moesys.layout import TokenPlan, owner_of_experts
from moesys.load import IntArray


class MoonEp(QuotaPlanner):
    """MoonEP as a baseline: experts on their owners, and loads made exactly equal by copies; for ``lag=0``.

    A rank needs twice as many slots as it owns experts.
    """

    kind: Literal["moon_ep"] = "moon_ep"

    def token_plan(self, problem: PlanningProblem) -> TokenPlan:
        """Gives every rank the mean of tokens, to within one.

        1. A rank may receive total // R tokens, the first total mod R ranks one more.
        2. While some rank has more than it may have and another less, the rank with the greatest excess promises the
           rank with the greatest lack all that it lacks, at a tie the lower rank. So a sender may promise more than its
           excess, and then receives from another.
        3. A sender serves its largest open promise, at a tie that to the lower rank, by the expert of its own that has
           most tokens left, at a tie the lower one; as many tokens as both have.
        4. Tokens of an expert, by source rank and position, go in consecutive ranges to its ranks in their order.
           Nothing prefers a token's own rank.

        Every receiver has one sender, so a rank borrows at most the ceil(E / R) experts that one owns. Source: the
        planner reference and kernel in a public fork of MoonshotAI/MoonEP; the original could not be read. Where the
        kernel has rank 0 plan and broadcast, here every rank plans for itself. Its segments are padded to 128 rows;
        these are not.
        """
        load = problem.load
        spare_slots(problem, at_least=-(-load.num_experts // load.num_ranks) if load.num_ranks > 1 else 0)
        quota_RE = _quotas(load.tokens_E.tolist(), load.num_ranks)
        rows = (
            row
            for expert in range(load.num_experts)
            for row in cut_in_order(expert, load.tokens_RE[:, expert].tolist(), enumerate(quota_RE[:, expert].tolist()))
        )
        return borrowed_plan(problem, quota_RE, rows)


def _quotas(tokens_E: list[int], num_ranks: int) -> IntArray:
    owner_E, total = owner_of_experts(len(tokens_E), num_ranks), sum(tokens_E)
    quota_RE = np.zeros((num_ranks, len(tokens_E)), dtype=np.int64)
    quota_RE[owner_E, range(len(tokens_E))] = tokens_E
    excess_R = quota_RE.sum(axis=1) - total // num_ranks - (np.arange(num_ranks) < total % num_ranks)
    promised_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    while excess_R.max() > 0:
        sender, receiver = excess_R.argmax(), excess_R.argmin()
        promised_RR[sender, receiver] = -excess_R[receiver]
        excess_R[sender] += excess_R[receiver]
        excess_R[receiver] = 0
    for sender in range(num_ranks):
        left_E = np.where(np.array(owner_E) == sender, tokens_E, 0)
        while promised_RR[sender].any():
            receiver, expert = promised_RR[sender].argmax(), left_E.argmax()
            moved = min(promised_RR[sender, receiver], left_E[expert])
            promised_RR[sender, receiver] -= moved
            left_E[expert] -= moved
            quota_RE[sender, expert] -= moved
            quota_RE[receiver, expert] += moved
    return quota_RE
