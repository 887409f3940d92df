"""QuotaPlanner: the base of planners on the current counts that also decide which rank computes how many tokens of
which source; and ``Quotas``, the split that follows them.

R ranks, E experts. Every expert is on the rank that owns it under ``Ep``, and some are lent for a micro-batch. A
*quota* is the number of tokens of an expert that a rank computes; each planner has its own rule for their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np

from moesys.balance.planning_problem import PlanningProblem, layout_from_rows
from moesys.config import Balance, Split
from moesys.layout import ExpertLayout, TokenPlan, owner_of_experts
from moesys.load import IntArray

Row = tuple[int, int, int, int]


class QuotaPlanner(Balance):
    """A planner whose method ``token_plan`` decides how many tokens of each source every rank computes."""

    has_quotas: ClassVar[bool] = True

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Returns the layout of ``token_plan``."""
        plan: TokenPlan = self.token_plan(problem)
        return plan.layout


class Quotas(Split):
    """Divides tokens as a ``QuotaPlanner`` decided, with ``lag=0``."""

    kind: Literal["quotas"] = "quotas"
    follows_planner: ClassVar[bool] = True
    is_compiled: ClassVar[bool] = True

    def split(self, problem: PlanningProblem) -> TokenPlan:
        """Raises ValueError: the tokens are divided where the layout is planned, in ``plan_layer``."""
        raise ValueError(
            "split=Quotas() divides tokens as the planner of the layout does, which is not known here; "
            "use ms.planning.plan_layer with the strategy, or FlowSplit()"
        )


def spare_slots(problem: PlanningProblem, at_least: int = 0) -> list[int]:
    """Returns the slots of each rank, [R], beyond those for experts that live there.

    Raises ValueError where a rank has not even these, or fewer than ``at_least`` more.
    """
    load = problem.load
    homes_R = np.bincount(owner_of_experts(load.num_experts, load.num_ranks), minlength=load.num_ranks).tolist()
    for rank, (slots, homes) in enumerate(zip(problem.slots_R, homes_R, strict=True)):
        if slots < homes + at_least:
            raise ValueError(
                f"rank {rank} has {slots} slots, {homes} experts live there and it may borrow {at_least}; "
                f"use slots_per_rank of at least {max(homes_R) + at_least}"
            )
    return [slots - homes for slots, homes in zip(problem.slots_R, homes_R, strict=True)]


def borrowed_plan(problem: PlanningProblem, quota_RE: IntArray, rows: Iterable[Row]) -> TokenPlan:
    """Returns the plan of ``rows`` (source, expert, destination, tokens), in any order and with repeats, over the
    layout of a rank's own experts and then of others for which it has a quota, both by number.
    """
    load = problem.load
    owner_E = owner_of_experts(load.num_experts, load.num_ranks)
    held = [
        [e for e in range(load.num_experts) if owner_E[e] == rank]
        + [e for e in np.flatnonzero(quota_RE[rank]).tolist() if owner_E[e] != rank]
        for rank in range(load.num_ranks)
    ]
    layout = layout_from_rows(held, problem.slots_R, load.num_experts)
    tokens_of: dict[tuple[int, int, int], int] = {}
    for source, expert, destination, tokens in rows:
        key = source, expert, destination
        tokens_of[key] = tokens_of.get(key, 0) + tokens
    entries = [(*key, tokens) for key, tokens in sorted(tokens_of.items()) if tokens]
    return TokenPlan(np.array(entries, dtype=np.int64).reshape(-1, 4), load, layout)


def cut_in_order(expert: int, tokens_R: Sequence[int], parts: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Numbers an expert's tokens by source rank, and gives ``parts`` (destination, tokens) consecutive ranges."""
    left, source = list(tokens_R), 0
    for destination, tokens in parts:
        while tokens:
            while not left[source]:
                source += 1
            moved = min(tokens, left[source])
            yield source, expert, destination, moved
            left[source] -= moved
            tokens -= moved
