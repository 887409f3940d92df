"""Layouts that change all the time, so that nothing may depend on one that stays."""

import numpy as np

from moesys.balance.layout_schedule import PlanOutcome, PlanRequest
from moesys.layout import ExpertLayout


class ShufflingPlanner:
    """A ``PlanSource`` that turns the layout in force around: another one each time, the same on every rank."""

    def submit(self, request: PlanRequest) -> PlanOutcome:
        expert_RS = request.previous.expert_RS
        # Empty slots are -1.
        seed = abs(int(expert_RS.sum() + expert_RS[0, 0]))
        permutation = np.random.default_rng(seed).permutation(expert_RS.max() + 1)
        turned = np.where(expert_RS >= 0, (permutation[expert_RS] + 1) % (expert_RS.max() + 1), -1)
        return PlanOutcome(ExpertLayout(turned, request.previous.num_experts))
