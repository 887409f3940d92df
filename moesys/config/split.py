"""Split: the current tokens over the replicas of their experts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from moesys.config.member import Member


class Split(Member):
    """The current tokens over the replicas of their experts. Extend it for a split of your own: its fields, and
    ``split``.
    """

    union: ClassVar[str] = "split"
    method: ClassVar[str] = "split"

    # Any: a ``PlanningProblem`` in, a ``TokenPlan`` out, which stand on floors above what is declared.
    def split(self, problem: Any) -> Any:
        """Returns a ``TokenPlan`` for a ``PlanningProblem``: every token of ``problem.load`` over
        ``problem.layout_in_force``, and to holders only.

        It is a pure function, for every rank calls it: of ``problem`` and its fields alone.
        """
        raise NotImplementedError(f"{type(self).__name__}() is planned for by ms.split_tokens")

    @property
    def on_device(self) -> bool:
        """True if a device can make the split from counts that the host has not read (``overlap.device_split``)."""
        return False


class RecordedSplit(Split):
    """A class of somebody's own as a record names it, whose code is not here."""

    model_config = ConfigDict(extra="allow")

    def split(self, problem: Any) -> Any:
        raise NotImplementedError(f"{self.kind} is named by a record, and a record is run by nobody")


Split.recorded = RecordedSplit


class EvenSplit(Split):
    """LAER-MoE's lite routing: evenly over the replicas on the source's node, or over all if the node has none."""

    kind: Literal["even"] = "even"

    @property
    def on_device(self) -> bool:
        return True


class Proportional(Split):
    """Over all replicas, in proportion to the room that the other experts leave on their ranks."""

    kind: Literal["proportional"] = "proportional"

    @property
    def on_device(self) -> bool:
        return True


class FlowSplit(Split):
    """Exact: the least maximum load that the layout allows, then little traffic between nodes."""

    kind: Literal["flow"] = "flow"
    traffic: Literal["fast", "exact"] = Field("fast", description="traffic almost the least, or the least there is")
    max_inter_node: Annotated[float, Field(ge=0, le=1)] | Literal["seconds"] | None = Field(
        None,
        description="share of the routed tokens that may leave their node, before balance; None: any; seconds: what "
        "takes a step the fewest",
    )

    @property
    def on_device(self) -> bool:
        return self.traffic == "fast" and self.max_inter_node is None


class Quotas(Split):
    """As the balance says: of planners that decide who computes how many tokens of which source; with ``lag=0``."""

    kind: Literal["quotas"] = "quotas"


# Only now are its members known.
Split.model_rebuild(force=True)
