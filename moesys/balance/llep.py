"""LLEP: a rank keeps its experts' tokens up to a cap, and spills the rest to the least loaded (arXiv 2601.17111)."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import numpy as np
from pydantic import Field

from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.quotas import QuotaPlanner, borrowed_plan, cut_in_order, spare_slots
from moesys.layout import TokenPlan, owner_of_experts


class Llep(QuotaPlanner):
    """LLEP (arXiv 2601.17111) as a baseline: owners compute their experts up to a cap, the least loaded ranks the rest;
    for ``lag=0``.
    """

    kind: Literal["llep"] = "llep"
    alpha: float = Field(1.0, ge=1, description="largest load of a rank, as a multiple of the mean")
    min_tokens: int = Field(1024, ge=1)
    """Fewest tokens for which a copy is made, except for the last of an expert."""
    skip_below: float = Field(1.3, ge=0, description="below this max/mean of experts all tokens stay at their owners")

    def token_plan(self, problem: PlanningProblem) -> TokenPlan:
        """Treats experts from the most tokens down, at a tie the lower one first.

        A rank's load is what it was given plus all tokens of its own experts that are not treated yet. The owner of an
        expert computes what the cap, ``alpha`` times total // R or, if that is 0, the total, leaves room for. The rest
        goes in chunks to the least loaded other rank, at a tie the lower one, up to its cap; a chunk of fewer than
        ``min_tokens`` is made only if it is the last. If no rank has room, the rest goes to the least loaded of the
        others, above its cap. If the hottest expert has less than ``skip_below`` times the mean of experts, owners
        compute all. An expert's tokens, by source rank and position, are cut in the order of its parts, the owner's
        first.

        Source: the paper, and SalesforceAIResearch/LeastLoadedEP, llep/gpt_oss_llep.py. They differ: here are the
        paper's ``alpha`` of 1 (code: 1.1), its ``skip_below`` of 1.3 on experts (code: off, and on ranks) and its
        sorting of ranks after every chunk, also if an owner computes nothing (code: once); the whole cap is the code's.
        The original lends without limit. Here a rank without a free slot is passed over, and the owner computes what
        finds no slot at all: with a slot for every expert this is the original.
        """
        load, alone = problem.load, problem.load.num_ranks == 1
        owner_E, tokens_E = owner_of_experts(load.num_experts, load.num_ranks), load.tokens_E.tolist()
        free_R = spare_slots(problem)
        cap = int(Fraction(str(self.alpha)) * (load.total // load.num_ranks)) or load.total
        load_R = np.bincount(owner_E, weights=tokens_E, minlength=load.num_ranks).astype(np.int64)
        quota_RE = np.zeros((load.num_ranks, load.num_experts), dtype=np.int64)
        hottest, skip_below = max(tokens_E), Fraction(str(self.skip_below))
        skip = alone or hottest * load.num_experts < skip_below * load.total
        parts_E: list[list[tuple[int, int]]] = [[] for _ in tokens_E]

        def give(expert: int, rank: int, tokens: int) -> None:
            if rank != owner_E[expert] and not quota_RE[rank, expert]:
                free_R[rank] -= 1
            load_R[rank] += tokens
            quota_RE[rank, expert] += tokens
            parts_E[expert].append((rank, tokens))

        for expert in sorted(range(load.num_experts), key=lambda expert: -tokens_E[expert]):
            owner, tokens = owner_E[expert], tokens_E[expert]
            load_R[owner] -= tokens
            stays = tokens if skip else min(tokens, max(0, cap - int(load_R[owner])))
            if stays:
                give(expert, owner, stays)
            rest = tokens - stays
            while rest:
                others = [r for r in np.argsort(load_R, kind="stable").tolist() if r != owner]
                others = [rank for rank in others if free_R[rank] or quota_RE[rank, expert]]
                chunks = {rank: min(rest, cap - int(load_R[rank])) for rank in others}
                takes = [rank for rank in others if chunks[rank] > 0 and chunks[rank] >= min(self.min_tokens, rest)]
                rank, chunk = (takes[0], chunks[takes[0]]) if takes else ([*others, owner][0], rest)
                give(expert, rank, chunk)
                rest -= chunk
        rows = (
            row
            for expert, parts in enumerate(parts_E)
            for row in cut_in_order(expert, load.tokens_RE[:, expert].tolist(), parts)
        )
        return borrowed_plan(problem, quota_RE, rows)
