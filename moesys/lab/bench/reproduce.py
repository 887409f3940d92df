"""LAER-MoE's published measurements beside what the simulator makes of them: rows, breakdown, ablation, planner times.

A simulation knows shapes and routing: not the dataset, not the coefficient of the auxiliary loss, not Qwen's bias. So
24 rows are four simulations of three methods each, and what differs between rows of a shape is not explained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from moesys.config import ClusterSpec, Strategy
from moesys.lab.bench.laer_constants import CONSTANTS
from moesys.lab.bench.laer_plans import (
    BREAKDOWN_ITERATION,
    ROW_ITERATIONS,
    SETTINGS,
    Planner,
    Plans,
    SettingName,
    drawn_plans,
    mean_max_over_mean,
)
from moesys.lab.bench.laer_published import (
    ABLATION_S,
    BREAKDOWN,
    METHODS,
    ROWS,
    Method,
    PublishedBreakdown,
    PublishedRow,
)
from moesys.lab.bench.laer_step import MODELS, Constants, LaerModel, Seconds, iteration_seconds

SEEDS = (0, 1, 2)
ABLATED: dict[str, Planner] = {"no_pq": "no_pq", "no_comm_opt": "LAER", "no_even": "no_even"}
ABLATION_MODEL = "mixtral-8x7b-e8k2"

AllPlans = dict[tuple[SettingName, Planner], list[Plans]]


@dataclass(frozen=True)
class Row:
    """A published row, and the simulated seconds of an iteration by method."""

    published: PublishedRow
    simulated: dict[Method, float]

    @property
    def fitted(self) -> bool:
        return self.published.dataset == "wikitext" and self.published.aux_loss == 0

    def error(self, method: Method) -> float:
        """Of the seconds."""
        return self.simulated[method] / self.published.seconds(method) - 1

    def speed_up(self, method: Method) -> tuple[float, float]:
        """FSDP+EP's seconds over the method's: published, simulated."""
        published = self.published.fsdp_ep_s / self.published.seconds(method)
        return published, self.simulated["FSDP+EP"] / self.simulated[method]

    def speed_up_error(self, method: Method) -> float:
        published, simulated = self.speed_up(method)
        return simulated / published - 1


@dataclass(frozen=True)
class Part:
    """A published breakdown and the simulated one."""

    published: PublishedBreakdown
    simulated: Seconds

    @property
    def experts_error(self) -> float:
        return self.simulated.experts / self.published.experts_s - 1


@dataclass(frozen=True)
class Reproduction:
    """Everything simulated. max_over_mean: of the busiest rank, by setting and planner."""

    rows: tuple[Row, ...]
    breakdown: tuple[Part, ...]
    ablation_s: dict[str, float]
    max_over_mean: dict[tuple[SettingName, Planner], float]

    def speed_up_errors(self, fitted: bool | None = None) -> list[float]:
        """Absolute errors of FlexMoE's and LAER's speed-up over FSDP+EP, of the rows fitted on, the others, or all."""
        chosen = [row for row in self.rows if fitted is None or row.fitted == fitted]
        return [abs(row.speed_up_error(method)) for row in chosen for method in METHODS[1:]]

    def seconds_errors(self, fitted: bool | None = None) -> list[float]:
        chosen = [row for row in self.rows if fitted is None or row.fitted == fitted]
        return [abs(row.error(method)) for row in chosen for method in METHODS]

    def ablation_points(self) -> dict[str, tuple[float, float]]:
        """Seconds over FSDP+EP's: published, simulated."""
        return {
            name: (seconds / ABLATION_S["FSDP+EP"], self.ablation_s[name] / self.ablation_s["FSDP+EP"])
            for name, seconds in ABLATION_S.items()
        }


def planned(
    planners: Sequence[Planner],
    constants: Constants = CONSTANTS,
    seeds: Sequence[int] = SEEDS,
    settings: Sequence[SettingName] = ("e8k2", "e16k4"),
    iterations: Sequence[int] = (BREAKDOWN_ITERATION, *ROW_ITERATIONS),
    tell: Callable[[str], None] | None = None,
) -> AllPlans:
    """Plans of every planner in every setting."""
    found: AllPlans = {}
    for name in settings:
        routing = SETTINGS[name].routing(constants.skew_growth, constants.calm)
        drawn = drawn_plans(SETTINGS[name], routing, planners, constants.cluster, seeds, iterations, tell)
        found |= {(name, planner): plans for planner, plans in drawn.items()}
    return found


def mean_seconds(
    model: LaerModel,
    constants: Constants,
    found: Sequence[Plans],
    iterations: Sequence[int],
    *,
    strategy: Strategy | None = None,
    optimised: bool = True,
    cluster: ClusterSpec | None = None,
) -> Seconds:
    """The mean over iterations and seeds; on the cluster of ``constants`` where no other is given."""
    all_seconds = [
        iteration_seconds(model, constants, plans[iteration], strategy, optimised, cluster)
        for plans in found
        for iteration in iterations
    ]
    return Seconds(*np.mean([astuple(seconds) for seconds in all_seconds], axis=0).tolist())


def simulated_rows(
    constants: Constants,
    found: AllPlans,
    iterations: Sequence[int] = ROW_ITERATIONS,
    tell: Callable[[str], None] | None = None,
) -> tuple[Row, ...]:
    """All 24 rows, each shape simulated once a method."""
    by_model: dict[LaerModel, dict[Method, float]] = {}
    for name, model in MODELS.items():
        if model not in by_model:
            if tell:
                tell(f"rows of {name}")
            by_model[model] = {
                method: mean_seconds(model, constants, found[model.setting, method], iterations).total
                for method in METHODS
            }
    return tuple(Row(row, by_model[MODELS[row.model]]) for row in ROWS)


def reproduce(
    constants: Constants = CONSTANTS,
    seeds: Sequence[int] = SEEDS,
    iterations: Sequence[int] = ROW_ITERATIONS,
    tell: Callable[[str], None] | None = None,
) -> Reproduction:
    """All of it; the same arguments give the same figures."""
    drawn = (BREAKDOWN_ITERATION, *iterations)
    say = tell or (lambda _: None)
    found = planned((*METHODS, "no_pq", "no_even"), constants, seeds, settings=("e8k2",), iterations=drawn, tell=tell)
    found |= planned(METHODS, constants, seeds, settings=("e16k4",), iterations=drawn, tell=tell)

    rows = simulated_rows(constants, found, iterations, tell)
    say("breakdown")
    parts = []
    for published in BREAKDOWN:
        model = MODELS[published.model]
        plans = found[model.setting, published.method]
        parts.append(Part(published, mean_seconds(model, constants, plans, (BREAKDOWN_ITERATION,))))
    say("ablation")
    model = MODELS[ABLATION_MODEL]
    of_model = next(row.simulated for row in rows if row.published.model == ABLATION_MODEL)
    ablation_s: dict[str, float] = {"FSDP+EP": of_model["FSDP+EP"], "LAER": of_model["LAER"]}
    for name, planner in ABLATED.items():
        plans = found[model.setting, planner]
        optimised = name != "no_comm_opt"
        ablation_s[name] = mean_seconds(model, constants, plans, iterations, optimised=optimised).total
    return Reproduction(
        rows=rows,
        breakdown=tuple(parts),
        ablation_s=ablation_s,
        max_over_mean={key: mean_max_over_mean(plans, iterations) for key, plans in found.items()},
    )


def median_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return statistics.median(errors), max(errors)
