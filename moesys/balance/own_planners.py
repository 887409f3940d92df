"""own_layout and own_split: what a person's own planner returns, checked before anybody relies on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moesys.balance.planning_problem import PlanningProblem
from moesys.config import Balance, Split
from moesys.layout import EMPTY, ExpertLayout, TokenPlan


def own_layout(problem: PlanningProblem, config: Balance) -> ExpertLayout:
    """Returns ``config.layout(problem)``.

    Raises ValueError, which names the class, where that raises, and where it is no layout for the problem: of other
    ranks, experts or slots, with more experts on a rank than it has slots, or with one twice on a rank.
    """
    name = f"balance={config.kind}"
    layout = _called(f"{name}: layout(problem)", config.layout, problem, ExpertLayout)
    R, S, E = len(problem.slots_R), max(problem.slots_R), problem.load.num_experts
    if (layout.expert_RS.shape, layout.num_experts) != ((R, S), E):
        raise ValueError(
            f"{name}: layout(problem) returned expert_RS of shape {list(layout.expert_RS.shape)} for "
            f"{layout.num_experts} experts; return [{R}, {S}] for {E}, rows as wide as the most slots of a rank, with "
            f"{EMPTY} in empty slots"
        )
    for rank, (filled, slots) in enumerate(zip(layout.filled_R.tolist(), problem.slots_R, strict=True)):
        if filled > slots:
            raise ValueError(
                f"{name}: layout(problem) put {filled} experts on rank {rank}, which has {slots} slots; put at most as "
                f"many as problem.slots_R says, and {EMPTY} into the rest of the row"
            )
    if layout.num_duplicates:
        rank, expert = np.argwhere(layout.replicas_RE > 1)[0].tolist()
        raise ValueError(
            f"{name}: layout(problem) put expert {expert} on rank {rank} {layout.replicas_RE[rank, expert]} times, "
            f"which wastes a slot; put it on another rank, or leave the slot empty ({EMPTY})"
        )
    return layout


def own_split(problem: PlanningProblem, config: Split) -> TokenPlan:
    """Returns ``config.split(problem)``.

    Raises ValueError, which names the class, where that raises, and where it is no plan for the problem: where it does
    not sum to the load, or sends tokens to a rank that does not hold their expert.
    """
    name = f"split={config.kind}"
    plan = _called(f"{name}: split(problem)", config.split, problem, TokenPlan)
    try:
        # Anew, for what was made by construction nobody has checked, nor for which load and layout it is.
        return TokenPlan(plan.entries, problem.load, problem.layout_in_force)
    except ValueError as error:
        raise ValueError(f"{name}: split(problem) returned a plan that cannot be: {error}") from None


def _called(what: str, method: Callable[[PlanningProblem], Any], problem: PlanningProblem, kind: type[Any]) -> Any:
    try:
        returned = method(problem)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, kind):
        raise ValueError(f"{what} returned {type(returned).__name__}; let it return an ms.{kind.__name__}")
    return returned
