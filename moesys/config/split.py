"""Split: the base of what divides the current tokens over the replicas of their experts."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict

from moesys.config.cluster import ClusterSpec
from moesys.config.member import Member
from moesys.kinds import SPLITS


class Split(Member):
    """Divides the current tokens over the replicas of their experts. A split of your own extends this class: its
    fields, and ``split``.
    """

    union: ClassVar[str] = "split"
    method: ClassVar[str] = "split"
    table: ClassVar[dict[str, tuple[str, str]]] = SPLITS
    # True if tokens are divided as the planner of the layout decided.
    follows_planner: ClassVar[bool] = False
    # True if inner loops are compiled when the split first runs.
    is_compiled: ClassVar[bool] = False

    # Any: a ``PlanningProblem`` in, a ``TokenPlan`` out, both of which belong to packages above this one.
    def split(self, problem: Any) -> Any:
        """Returns a ``TokenPlan`` for a ``PlanningProblem``: every token of ``problem.load`` over
        ``problem.layout_in_force``, and to holders only.

        It is a pure function of ``problem`` and its own fields, for every rank calls it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method split(problem)")

    @property
    def on_device(self) -> bool:
        """True if a device can make the split from counts that the host has not read."""
        return False

    # Any: ``SplitTables`` and an ``ExpertLayout`` in, which belong to packages above this one.
    def device_split(self, tables: Any, layout: Any, cluster: ClusterSpec) -> Any:
        """Returns a function of ``tokens_RE`` int64 [R, E] on a device and ``turn``, which makes what each source sends
        to each replica, int64 [R, P], as ``split`` does. Raises ValueError where only the host can.
        """
        raise ValueError(f"split={self.kind} plans on the host; use FlowSplit(), or no most_tokens")


class RecordedSplit(Split):
    """A class of somebody's own as a record names it, whose code is not here."""

    model_config = ConfigDict(extra="allow")

    def split(self, problem: Any) -> Any:
        raise NotImplementedError(self.not_run)


Split.recorded = RecordedSplit
