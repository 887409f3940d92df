"""The fit of the reproduction's three free constants, on the six wikitext rows without auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

import numpy as np

from moesys.bench.laer.constants import CONSTANTS
from moesys.bench.laer.plans import ROW_ITERATIONS
from moesys.bench.laer.published import METHODS
from moesys.bench.laer.reproduction import SEEDS, Row, planned, simulated_rows
from moesys.bench.laer.step import Constants

SKEW_GROWTHS = (2.0, 2.5, 3.0)
CALMS = (4.0, 6.0, 9.0, 14.0)
DISPATCHERS_MS = (4.0, 8.0, 12.0, 16.0)
# The whole grid: half of the seeds, and one of the rows' three iterations, as experts stay hot over many.
COARSE_SEEDS, COARSE_ITERATIONS = SEEDS[:8], (44,)
# Routings of the grid that are drawn again, by all seeds and iterations of the rows.
FINALISTS = 4
FINAL_DISPATCHERS_MS = (8.0, 10.0, 12.0)
# Of two settings, what ``tell`` is told: a seed's plans of each method.
NUM_TOLD = 2 * len(METHODS) * (len(SKEW_GROWTHS) * len(CALMS) * len(COARSE_SEEDS) + FINALISTS * len(SEEDS))
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


def fit(tell: Callable[[str], None] | None = None) -> list[Fit]:
    """The finalists, best first: the routings of the whole grid's best points, by all draws."""
    grid = _points(product(SKEW_GROWTHS, CALMS), DISPATCHERS_MS, COARSE_SEEDS, COARSE_ITERATIONS, tell)
    routings = dict.fromkeys((one.constants.skew_growth, one.constants.calm) for one in sorted(grid, key=_MISFIT))
    finalists = _points(list(routings)[:FINALISTS], FINAL_DISPATCHERS_MS, SEEDS, ROW_ITERATIONS, tell)
    return sorted(finalists, key=_MISFIT)


def _points(
    routings: Iterable[tuple[float, float]],
    dispatchers_ms: Sequence[float],
    seeds: Sequence[int],
    iterations: Sequence[int],
    tell: Callable[[str], None] | None,
) -> Iterator[Fit]:
    """Of each (skew_growth, calm), with each of ``dispatchers_ms``."""
    for skew_growth, calm in routings:
        constants = replace(CONSTANTS, skew_growth=skew_growth, calm=calm)
        plans = planned(METHODS, constants, seeds, iterations=iterations, tell=tell)
        for dispatcher_ms in dispatchers_ms:
            tried = replace(constants, dispatcher_ms=dispatcher_ms)
            rows = [row for row in simulated_rows(tried, plans, iterations) if row.fitted]
            without = tuple(misfit([row.without_seed(place) for row in rows]) for place in range(len(seeds)))
            yield Fit(tried, misfit(rows), without)


def misfit(rows: Sequence[Row]) -> float:
    errors = [row.error(method) for row in rows for method in METHODS]
    errors += [row.speed_up_error(method) for row in rows for method in METHODS[1:]]
    return float(np.sqrt(np.mean(np.square(errors))))
