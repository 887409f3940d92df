"""Claims: figures that others published, each with the scenario that is simulated in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from benchmarks.published.drawn_steps import Found, Scenario
from moesys.lab.show.sheets import Column
from moesys.lab.show.tables import figure

Part = Literal["total", "experts", "all_to_all", "rest", "spread"]


@dataclass(frozen=True)
class Claim:
    """A published figure: the seconds of a part of ``scenario``, or, with ``per``, how many times those of ``per``.

    of: what it is of, by column. in_points: the difference is in points, as of shares. scenario: None where a figure is
    only quoted, or simulated by other means. own, per_own: what is simulated of the two, under each seed.
    """

    of: Annotated[Mapping[str, str], Column("{}")]
    published: Annotated[float, Column("published", figure)]
    scenario: Scenario | None
    per: Scenario | None = None
    part: Part = "total"
    in_points: bool = False
    fitted: Annotated[bool, Column("fitted on", lambda fitted: "yes" if fitted else "")] = False
    own: tuple[float, ...] = ()
    per_own: tuple[float, ...] = (1.0,)

    def simulated_by(self, found: Found) -> Claim:
        """The claim with the seconds of its scenarios."""
        if self.scenario is None:
            return self
        own = tuple(getattr(drawn.seconds, self.part) for drawn in found[self.scenario])
        per_own = tuple(drawn.seconds.total for drawn in found[self.per]) if self.per else (1.0,)
        return replace(self, own=own, per_own=per_own)

    @property
    def simulated(self) -> Annotated[float | None, Column("simulated", figure, after="published")]:
        """Means over seeds, and of a ratio the ratio of the means."""
        return float(np.mean(self.own) / np.mean(self.per_own)) if self.own else None

    @property
    def difference(self) -> Annotated[float | None, Column("difference %", "+.1f", 100, after="simulated")]:
        """Of the simulated figure from the published one, over the published one; or in points."""
        if self.simulated is None:
            return None
        return self.simulated - self.published if self.in_points else self.simulated / self.published - 1


def scenarios_of(claims: Sequence[Claim]) -> list[Scenario]:
    """All that claims need to be simulated."""
    return [scenario for claim in claims for scenario in (claim.scenario, claim.per) if scenario]


def errors(claims: Sequence[Claim]) -> list[float]:
    """Absolute differences of what is simulated."""
    return [abs(claim.difference) for claim in claims if claim.difference is not None]
