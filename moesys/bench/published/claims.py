"""Claims: figures that others published, each with the scenario that is simulated in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from moesys.bench.harness.sheets import Column
from moesys.bench.published.drawn_steps import Found, Scenario
from moesys.lab.show.tables import figure

Part = Literal["total", "experts", "all_to_all", "rest"]


@dataclass(frozen=True)
class Claim:
    """A published figure: the seconds of a part of ``scenario``, or, with ``per``, how many times those of ``per``.

    of: what it is of, by column. in_points: the difference is in points, as of shares. scenario: None where a figure is
    only quoted. own_s, per_s: simulated seconds of the two under each seed; none before ``simulated_by``.
    """

    of: Annotated[Mapping[str, str], Column("{}")]
    published: Annotated[float, Column("published", figure)]
    scenario: Scenario | None
    per: Scenario | None = None
    part: Part = "total"
    in_points: bool = False
    fitted: Annotated[bool, Column("fitted on", lambda fitted: "yes" if fitted else "")] = False
    own_s: tuple[float, ...] = ()
    per_s: tuple[float, ...] = (1.0,)

    def simulated_by(self, found: Found) -> Claim:
        """The claim with the seconds of its scenarios."""
        if self.scenario is None:
            return self
        own_s = tuple(getattr(drawn.seconds, self.part) for drawn in found[self.scenario])
        per_s = tuple(drawn.seconds.total for drawn in found[self.per]) if self.per else (1.0,)
        return replace(self, own_s=own_s, per_s=per_s)

    def without_seed(self, place: int) -> Claim:
        """Of all seeds but one."""
        own_s = (*self.own_s[:place], *self.own_s[place + 1 :])
        per_s = (*self.per_s[:place], *self.per_s[place + 1 :]) if self.per else self.per_s
        return replace(self, own_s=own_s, per_s=per_s)

    @property
    def simulated(self) -> Annotated[float | None, Column("simulated", figure, after="published")]:
        """Means over seeds, and of a ratio the ratio of the means."""
        return float(np.mean(self.own_s) / np.mean(self.per_s)) if self.own_s else None

    @property
    def difference(self) -> Annotated[float | None, Column("difference %", "+.1f", 100, after="simulated")]:
        """Of the simulated figure from the published one, over the published one; or in points."""
        if self.simulated is None:
            return None
        return self.simulated - self.published if self.in_points else self.simulated / self.published - 1

    @property
    def standard_error(self) -> float:
        """Of a simulated ratio, over it: of a ratio of means over seeds, by the jackknife; 0 for one seed."""
        own_s, per_s = np.array(self.own_s), np.array(self.per_s)
        without = (own_s.sum() - own_s) / (per_s.sum() - per_s) if len(own_s) > 1 else np.ones(1)
        return float(np.sqrt((len(own_s) - 1) * without.var()) / (own_s.mean() / per_s.mean()))


def scenarios_of(claims: Sequence[Claim]) -> list[Scenario]:
    """All that claims need to be simulated."""
    return [scenario for claim in claims for scenario in (claim.scenario, claim.per) if scenario]


def errors(claims: Sequence[Claim]) -> list[float]:
    """Absolute differences of what is simulated."""
    return [abs(claim.difference) for claim in claims if claim.difference is not None]


def least_worst_error(values: Sequence[float]) -> float:
    """Of the one number that is nearest to all ``values`` in relative terms: 2 / (1 / least + 1 / most)."""
    return (max(values) - min(values)) / (max(values) + min(values))
