"""The reproduction's four free constants, fitted on what was published of one shape, and judged on the others.

Steps are simulated once a routing, at both ends of ``ROWS_SLOWDOWNS`` and without a dispatcher. Between the ends
seconds lie on a straight line (to 1 in 1,000), and a dispatcher delays all ranks alike: the rest of the grid is sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product

import numpy as np

from benchmarks.published.drawn_steps import StepSeconds, mean_of_seeds, simulate
from benchmarks.published.laer_figures import BREAKDOWN, METHODS, ROWS, PublishedBreakdown, PublishedRow
from benchmarks.published.laer_setup import (
    BREAKDOWN_ITERATION,
    CONSTANTS,
    LAER_MODELS,
    Constants,
    LaerModel,
    laer_model,
    laer_scenario,
)

SKEW_GROWTHS = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0)
UNRESTS = (0.0, 0.1, 0.2, 0.35, 0.6, 1.0)
ROWS_SLOWDOWNS = tuple(np.arange(0.0, 8.5, 0.5).tolist())
DISPATCHERS_MS = tuple(np.arange(0.0, 12.5, 0.5).tolist())
FIT_SEEDS, FIT_ITERATIONS = (0, 1), (30,)
# Constants fit about as well as the best whose misfit is at most so many times the best one's.
AS_GOOD = 1.1

Routing = tuple[float, float]


@dataclass(frozen=True)
class Figures:
    """What was published of one shape; two of four have a breakdown."""

    rows: tuple[PublishedRow, ...]
    breakdown: tuple[PublishedBreakdown, ...]


@dataclass(frozen=True)
class Steps:
    """Simulated steps of a method: of the rows, and of the breakdown's iteration."""

    rows: StepSeconds
    breakdown: StepSeconds


@dataclass(frozen=True)
class Fit:
    """Constants, and the root mean square error that they leave of one shape's figures."""

    constants: Constants
    misfit: float


# Of a routing, a model and a method: at no and at the most slowdown of rows.
Simulated = Mapping[tuple[Routing, str, str], tuple[Steps, Steps]]


def figures_of(
    shape: str, rows: Sequence[PublishedRow] = ROWS, breakdown: Sequence[PublishedBreakdown] = BREAKDOWN
) -> Figures:
    """All of ``shape``, which is the end of a published model's name."""
    return Figures(
        tuple(row for row in rows if row.model.endswith(shape)),
        tuple(row for row in breakdown if row.model.endswith(shape)),
    )


def simulate_grid(
    models: Sequence[LaerModel] = LAER_MODELS,
    skew_growths: Sequence[float] = SKEW_GROWTHS,
    unrests: Sequence[float] = UNRESTS,
    seeds: Sequence[int] = FIT_SEEDS,
    iterations: Sequence[int] = FIT_ITERATIONS,
) -> Simulated:
    """Of every routing all models and methods."""
    whens = (iterations, (BREAKDOWN_ITERATION,))
    ends = (0.0, ROWS_SLOWDOWNS[-1])
    scenarios = {}
    for growth, unrest, model, method in product(skew_growths, unrests, models, METHODS):
        for end, when in product(ends, whens):
            constants = replace(CONSTANTS, dispatcher_ms=0.0, rows_slowdown=end, skew_growth=growth, unrest=unrest)
            scenario = laer_scenario(model, method, constants, when)
            scenarios[(growth, unrest), model.name, method, end, when] = scenario
    found = simulate(scenarios.values(), seeds, "fit")
    mean = {key: mean_of_seeds(found[scenario]).seconds for key, scenario in scenarios.items()}

    def steps(routing: Routing, name: str, method: str, end: float) -> Steps:
        return Steps(*(mean[routing, name, method, end, when] for when in whens))

    cases = product(product(skew_growths, unrests), [model.name for model in models], METHODS)
    return {case: (steps(*case, ends[0]), steps(*case, ends[1])) for case in cases}


def steps_by(simulated: Simulated, shape: str, constants: Constants) -> dict[str, Steps]:
    """Of all methods, by constants whose routing is on the grid."""
    model, routing = laer_model(shape), (constants.skew_growth, constants.unrest)
    share = constants.rows_slowdown / ROWS_SLOWDOWNS[-1]
    late = model.num_passes * constants.dispatcher_ms * 1e-3
    found = {}
    for method in METHODS:
        none, most = simulated[routing, shape, method]
        found[method] = Steps(
            _between(none.rows, most.rows, share, late), _between(none.breakdown, most.breakdown, share, late)
        )
    return found


def _between(none: StepSeconds, most: StepSeconds, share: float, late: float) -> StepSeconds:
    between = StepSeconds(*((1 - share) * np.array(astuple(none)) + share * np.array(astuple(most))).tolist())
    return replace(between, total=between.total + late)


def row_errors(seconds: Mapping[str, float], rows: Sequence[PublishedRow]) -> tuple[list[float], list[float]]:
    """Of one number a method against all rows: errors of its seconds, and of FSDP+EP's seconds over its own."""
    of_seconds = [seconds[method] / row.seconds[method] - 1 for row in rows for method in METHODS]
    of_speed_ups = [
        seconds["FSDP+EP"] / seconds[method] * row.seconds[method] / row.fsdp_ep_s - 1
        for row in rows
        for method in METHODS[1:]
    ]
    return of_seconds, of_speed_ups


def misfit(steps: Mapping[str, Steps], figures: Figures) -> float:
    """The root of the mean of four mean squares: of the errors of seconds, of speed-ups, of the breakdown's parts, and
    of the ranks' spread in points; of two where a shape has no breakdown.
    """
    groups = [*row_errors({method: of.rows.total for method, of in steps.items()}, figures.rows)]
    if figures.breakdown:
        parts, spreads = [], []
        for row in figures.breakdown:
            of = steps[row.method].breakdown
            parts += [getattr(of, part) / published_s - 1 for part, published_s in row.parts.items()]
            spreads.append(of.spread - row.spread)
        groups += [parts, spreads]
    return float(np.sqrt(np.mean([np.mean(np.square(group)) for group in groups])))


def fit(simulated: Simulated, shape: str, figures: Figures) -> list[Fit]:
    """The whole grid, best first. Knows ``figures`` of ``shape`` alone."""
    routings = dict.fromkeys(routing for routing, name, _ in simulated if name == shape)
    found = []
    for (growth, unrest), slowdown, dispatcher_ms in product(routings, ROWS_SLOWDOWNS, DISPATCHERS_MS):
        constants = replace(
            CONSTANTS, dispatcher_ms=dispatcher_ms, rows_slowdown=slowdown, skew_growth=growth, unrest=unrest
        )
        found.append(Fit(constants, misfit(steps_by(simulated, shape, constants), figures)))
    return sorted(found, key=lambda one: one.misfit)


def as_good(fits: Sequence[Fit]) -> list[Fit]:
    """Those that fit about as well as the best, which comes first."""
    return [one for one in fits if one.misfit <= AS_GOOD * fits[0].misfit]
