"""The fit of the reproduction's three free constants, on the six wikitext rows without auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Annotated

import numpy as np

from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.published.claims import Claim, errors, scenarios_of
from moesys.bench.published.drawn_steps import simulate
from moesys.bench.published.laer_claims import SEEDS, row_claims
from moesys.bench.published.laer_setup import CONSTANTS, ROW_ITERATIONS, Constants

SKEW_GROWTHS = (2.0, 2.5, 3.0)
CALMS = (4.0, 6.0, 9.0, 14.0)
DISPATCHERS_MS = (4.0, 8.0, 12.0, 16.0)
# The whole grid: half of the seeds, and one of the rows' three iterations, as experts stay hot over many.
COARSE_SEEDS, COARSE_ITERATIONS = SEEDS[:8], (44,)
# Routings of the grid that are drawn again, by all seeds and iterations of the rows.
FINALISTS = 4
FINAL_DISPATCHERS_MS = (8.0, 10.0, 12.0)
_MISFIT = attrgetter("misfit")


@dataclass(frozen=True)
class Fit:
    """A point of the grid. misfit: root mean square error of 18 seconds and of 12 speed-ups over FSDP+EP. without: the
    same, each time without one of the seeds.
    """

    constants: Constants
    misfit: float
    without: tuple[float, ...]

    def behind(self, best: Fit) -> tuple[float, float]:
        """Its misfit less that of ``best``, and the standard error of the difference over seeds, by the jackknife."""
        apart = np.array(self.without) - np.array(best.without)
        return self.misfit - best.misfit, float(np.sqrt((len(apart) - 1) * apart.var()))


def fit() -> list[Fit]:
    """The finalists, best first: the routings of the whole grid's best points, by all draws."""
    grid = _points(product(SKEW_GROWTHS, CALMS), DISPATCHERS_MS, COARSE_SEEDS, COARSE_ITERATIONS)
    routings = dict.fromkeys((one.constants.skew_growth, one.constants.calm) for one in sorted(grid, key=_MISFIT))
    return sorted(_points(list(routings)[:FINALISTS], FINAL_DISPATCHERS_MS, SEEDS, ROW_ITERATIONS), key=_MISFIT)


def _points(
    routings: Iterable[tuple[float, float]],
    dispatchers_ms: Sequence[float],
    seeds: Sequence[int],
    iterations: Sequence[int],
) -> Iterator[Fit]:
    """Of each (skew_growth, calm), with each of ``dispatchers_ms``."""
    for skew_growth, calm in routings:
        tried = [
            replace(CONSTANTS, skew_growth=skew_growth, calm=calm, dispatcher_ms=dispatcher_ms)
            for dispatcher_ms in dispatchers_ms
        ]
        claims = [fitted_claims(constants, iterations) for constants in tried]
        what = f"fit, skew_growth {skew_growth:g}, calm {calm:g}"
        found = simulate(scenarios_of([claim for of in claims for claim in of]), seeds, what)
        for constants, of in zip(tried, claims, strict=True):
            simulated = [claim.simulated_by(found) for claim in of]
            without = (misfit([claim.without_seed(place) for claim in simulated]) for place in range(len(seeds)))
            yield Fit(constants, misfit(simulated), tuple(without))


def fitted_claims(constants: Constants, iterations: Sequence[int]) -> list[Claim]:
    """Seconds and speed-ups of the rows that constants are fitted on."""
    return [claim for claims in row_claims(constants, iterations) for claim in claims if claim.fitted]


def misfit(claims: Sequence[Claim]) -> float:
    """The root mean square error."""
    return float(np.sqrt(np.mean(np.square(errors(claims)))))


@dataclass(frozen=True)
class FitRow:
    """A finalist beside the best one."""

    skew_growth: Annotated[float, Column("skew_growth", "g")]
    calm: Annotated[float, Column("calm", "g")]
    dispatcher_ms: Annotated[float, Column("dispatcher_ms", "g")]
    misfit: Annotated[float, Column("misfit %", ".2f", 100)]
    above_best: Annotated[float, Column("above the best", ".2f", 100)]
    standard_error: Annotated[float, Column("±", ".2f", 100)]


def fit_sheet(found: Sequence[Fit]) -> Sheet:
    """All finalists, best first."""
    rows = []
    for one in found:
        of = one.constants
        rows.append(FitRow(of.skew_growth, of.calm, of.dispatcher_ms, one.misfit, *one.behind(found[0])))
    notes = (
        "misfit: root mean square error of 18 seconds and 12 speed-ups, of the 6 rows fitted on.",
        f"±: standard error of the column before over the routing drawn under {len(SEEDS)} seeds, by the jackknife.",
        f"Shown are the {FINALISTS} best (skew_growth, calm) of {len(SKEW_GROWTHS) * len(CALMS)}, by all draws.",
    )
    return Sheet("SIMULATED: the fit", rows, notes)
