"""Split: the current tokens over the replicas of their experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moesys.config.base import Declared


class EvenSplit(Declared):
    """LAER-MoE's lite routing: evenly over the replicas on the source's node, or over all if the node has none."""

    kind: Literal["even"] = "even"


class Proportional(Declared):
    """Over all replicas, in proportion to the room that the other experts leave on their ranks."""

    kind: Literal["proportional"] = "proportional"


class FlowSplit(Declared):
    """Exact: the least maximum load that the layout allows, then little traffic between nodes."""

    kind: Literal["flow"] = "flow"
    traffic: Literal["fast", "exact"] = Field("fast", description="traffic almost the least, or the least there is")
    max_inter_node: float | None = Field(
        None, ge=0, le=1, description="share of the routed tokens that may leave their node, before balance; None: any"
    )


class Quotas(Declared):
    """As the balance says: of planners that decide who computes how many tokens of which source; with ``lag=0``."""

    kind: Literal["quotas"] = "quotas"


Split = Annotated[EvenSplit | Proportional | FlowSplit | Quotas, Field(discriminator="kind")]
