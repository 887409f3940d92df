"""Balance: the base of planners, which choose a layout from recent loads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from moesys.config.member import Member
from moesys.kinds import BALANCES

Within = Literal["cluster", "node", "domain"]
MinReplicas = Annotated[int, Field(ge=1, description="replicas of every expert, on distinct ranks")]
ReplicasWithin = Annotated[Within, Field(description="all replicas of an expert lie inside one of these")]


class Balance(Member):
    """A planner, which chooses a layout from recent loads. A planner of your own extends this class: its fields, and
    ``layout``.
    """

    union: ClassVar[str] = "balance"
    method: ClassVar[str] = "layout"
    table: ClassVar[dict[str, tuple[str, str]]] = BALANCES
    # True if the planner also decides who computes how many tokens of which source, so that ``Quotas`` can follow it.
    has_quotas: ClassVar[bool] = False
    # The number of newest micro-batches that a planner receives (``PlanningProblem.recent``).
    recent_batches: ClassVar[int] = 0
    # True if inner loops are compiled when the planner first runs.
    is_compiled: ClassVar[bool] = False

    # Any: a ``PlanningProblem`` in, an ``ExpertLayout`` out, both of which belong to packages above this one.
    def layout(self, problem: Any) -> Any:
        """Returns an ``ExpertLayout`` for a ``PlanningProblem``, [R, S] with S the slots of the widest rank: every
        expert at least once, none twice on one rank, and on no rank more than its slots.

        It is a pure function of ``problem`` and its own fields, on whichever rank it is called.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method layout(problem)")

    # Any: a ``PlanningProblem`` in, an ``ExpertLayout`` and bytes out.
    def plan(self, problem: Any) -> Any:
        """Returns ``layout(problem)``, and what the planner is to find in ``problem.memory`` when it plans next."""
        return self.layout(problem), b""

    def token_plan(self, problem: Any) -> Any:
        """Returns a ``TokenPlan`` over a layout of its own, where the planner ``has_quotas``."""
        raise NotImplementedError(f"{type(self).__name__} has no quotas")

    def unfit_for_lag_0(self) -> str:
        """Returns why it cannot plan on a micro-batch's own counts, on every rank alike, or ""."""
        return ""

    def without_clock(self) -> Balance:
        """Returns the planner whose layouts depend on no clock, so that all ranks find the same one."""
        return self

    def with_moves_priced(self, units_per_token: int, replan_every: int) -> Balance:
        """Returns the planner for a load of ``units_per_token`` per token, whose plan serves ``replan_every``
        micro-batches.
        """
        return self


def unfit_moves(balance: Balance, max_moves: int) -> str:
    """Returns why a planner that counts moves from the layout in force cannot plan with ``lag=0``."""
    return (
        f"balance={type(balance).__name__}(max_moves={max_moves}) counts moves from the layout before, but "
        "with lag=0 every layout is planned on its own counts alone; use another balance, or lag=1"
    )


class RecordedBalance(Balance):
    """A class of somebody's own as a record names it, whose code is not here."""

    model_config = ConfigDict(extra="allow")

    def layout(self, problem: Any) -> Any:
        raise NotImplementedError(self.not_run)


Balance.recorded = RecordedBalance
