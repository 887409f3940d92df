"""Static: experts in order over the slots, whatever the load."""

from __future__ import annotations

from typing import Literal

from moesys.balance.planning_problem import PlanningProblem, layout_from_rows, usable_slots
from moesys.config.member import Balance
from moesys.layout import ExpertLayout


class Static(Balance):
    """The same layout for ever: experts in order over the slots."""

    kind: Literal["static"] = "static"

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Places expert g mod E in the g-th usable slot, counted over all ranks in order.

        A rank's slots are a run of at most E consecutive g, so it holds no expert twice; slots beyond E stay empty.
        With ceil(E / R) slots in rank order, as ``Ep()`` has them, every rank owns one block of consecutive experts.
        """
        num_experts = problem.load.num_experts
        rows, first = [], 0
        for slots in usable_slots(problem.slots_R, num_experts):
            rows.append([g % num_experts for g in range(first, first + slots)])
            first += slots
        return layout_from_rows(rows, problem.slots_R, num_experts)
