"""Waterfalls: strategies stage by stage, each beside LAER-MoE's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from benchmarks.published.drawn_steps import Drawn, mean_of_seeds
from moesys.lab.show.sheets import Column
from moesys.lab.show.tables import figure

LAER_STAGE, UNIFIED_STAGE = "LAER's layout", "unified"


@dataclass(frozen=True)
class Fall:
    """What is simulated of one case at one stage.

    of: the case, by column. took: time in a unit, and of that what is not computing, the mean over ranks: rows on their
    way, slower ranks, and experts and gradients that come late, of which there is a figure too. inter_node_share: of
    the routed rows. point: of the search space, where the stage has one.
    """

    of: Annotated[Mapping[str, str], Column("{}")]
    stage: Annotated[str, Column("stage")]
    took: Annotated[Mapping[str, float], Column("{}", figure)]
    over_laer: Annotated[float, Column("over LAER", ".3f")]
    max_over_mean: Annotated[float, Column("max/mean", ".3f")]
    inter_node_share: Annotated[float, Column("inter-node %", ".1f", 100)]
    point: Annotated[str, Column("point")] = ""

    @property
    def total(self) -> float:
        """In the unit of ``took``."""
        return next(iter(self.took.values()))


def waterfall(
    of: Mapping[str, str], stages: Mapping[str, Sequence[Drawn]], unit: str, scale: float, point: str = ""
) -> list[Fall]:
    """One case at all stages, of each of which there is a simulation a seed. scale: units a second of a step."""
    means = {stage: mean_of_seeds(of_seeds) for stage, of_seeds in stages.items()}
    laer = means[LAER_STAGE].seconds.total
    return [
        Fall(
            of,
            stage,
            {
                unit: scale * mean.seconds.total,
                f"exposed {unit}": scale * mean.seconds.exposed,
                f"experts late {unit}": scale * mean.seconds.experts_late,
            },
            laer / mean.seconds.total,
            mean.max_over_mean_P[0],
            mean.inter_node_share,
            point if stage == UNIFIED_STAGE else "",
        )
        for stage, mean in means.items()
    ]
