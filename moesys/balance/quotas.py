"""Plans that say who computes how many tokens of which source: of planners on the current counts."""

from __future__ import annotations

from typing import assert_never

from moesys.balance.baselines.faster_moe import faster_moe_plan
from moesys.balance.baselines.llep import llep_plan
from moesys.balance.baselines.moon_ep import moon_ep_plan
from moesys.balance.baselines.ultra_ep import ultra_ep_plan
from moesys.balance.planning_problem import PlanningProblem
from moesys.config import FasterMoe, Llep, MoonEp, UltraEp, WithQuotas
from moesys.layout import TokenPlan


def plan_quotas(problem: PlanningProblem, config: WithQuotas) -> TokenPlan:
    """Returns the layout that ``config`` chooses for the problem's load, and who goes where, as it says.

    Every expert is held by the rank where it lives, that of ``Ep``'s owner. Raises ValueError, with the way out, where
    a rank has too few slots.
    """
    match config:
        case MoonEp():
            return moon_ep_plan(problem, config)
        case Llep():
            return llep_plan(problem, config)
        case UltraEp():
            return ultra_ep_plan(problem, config)
        case FasterMoe():
            return faster_moe_plan(problem, config)
        case _:
            assert_never(config)
