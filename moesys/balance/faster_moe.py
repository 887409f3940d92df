"""FasterMoE's shadowing: the hottest experts on every rank, each of which computes its own tokens (PPoPP 2022)."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.quotas import QuotaPlanner, borrowed_plan, spare_slots
from moesys.layout import TokenPlan, owner_of_experts


class FasterMoe(QuotaPlanner):
    """FasterMoE's shadowing (PPoPP 2022) as a baseline: the hottest experts on all ranks, by its own cost model; for
    ``lag=0``.

    Sizes are those of the model where it is known.
    """

    kind: Literal["faster_moe"] = "faster_moe"
    gb_per_s: float = Field(6.25, gt=0, description="bandwidth of a rank's link, GB/s")
    tflops: float = Field(11.5, gt=0, description="matmul rate of a rank, TFLOP/s")
    hidden_size: int = Field(2048, ge=1, description="elements of a row")
    intermediate_size: int = Field(4096, ge=1, description="width of an expert")

    def token_plan(self, problem: PlanningProblem) -> TokenPlan:
        """Shadows experts from the most tokens down, at a tie the lower one first, as long as an estimate falls.

        With i shadows it is (3·c + 4·f)·B_i + i·w, where B_0 >= B_1 >= ... are the tokens of experts: c = 4·d·I / flops
        of a token's products, f = 4·d / net of its row, w = 2·d·I·4 / net of an expert, for rows of d elements in
        float32 and experts of two matrices. It ends at the first shadow that does not pay, and before the last expert.
        A shadowed expert is on every rank, which computes its own tokens with it; owners compute all other experts.

        Source: laekov/fastmoe, fmoe/fastermoe/shadow_policy.py, whose experts have I = alpha·d. It assumes one count an
        expert and never adds them up over a rank. The config has its defaults; the model's sizes are taken where they
        are known. Its sort leaves ties open. The original has memory for any number of shadows; here it ends where some
        rank has no free slot.
        """
        load, model = problem.load, problem.model
        d, I = self.hidden_size, self.intermediate_size
        if model is not None:
            d, I = model.hidden_size, model.intermediate_size
        net = self.gb_per_s * 1e9
        token_seconds = 3 * 4 * d * I / (self.tflops * 1e12) + 4 * 4 * d / net
        shadow_seconds = 2 * d * I * 4 / net
        tokens_E = load.tokens_E.tolist()
        hottest = sorted(range(load.num_experts), key=lambda expert: -tokens_E[expert])
        most = min(spare_slots(problem)) if load.num_ranks > 1 else 0
        shadowed: set[int] = set()
        for expert, next_one in islice(pairwise(hottest), most):
            if (tokens_E[expert] - tokens_E[next_one]) * token_seconds <= shadow_seconds:
                break
            shadowed.add(expert)
        owner_E = owner_of_experts(load.num_experts, load.num_ranks)
        quota_RE = np.zeros((load.num_ranks, load.num_experts), dtype=np.int64)
        rows = []
        for source, expert in np.argwhere(load.tokens_RE).tolist():
            tokens = int(load.tokens_RE[source, expert])
            rows.append((source, expert, source if expert in shadowed else owner_E[expert], tokens))
        for expert in shadowed:
            # A rank without tokens of its own receives the broadcast like all others.
            quota_RE[:, expert] = np.maximum(load.tokens_RE[:, expert], 1)
        return borrowed_plan(problem, quota_RE, rows)
