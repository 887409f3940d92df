"""LAER-MoE's published measurements beside what the simulator makes of them: rows, breakdown, ablation, planner times.

A simulation knows shapes and routing: not the dataset, not the coefficient of the auxiliary loss, not Qwen's bias. So
24 rows are four simulations of three methods each, and what differs between rows of a shape is not explained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from moesys.bench.laer.constants import CONSTANTS
from moesys.bench.laer.plans import (
    BREAKDOWN_ITERATION,
    ROW_ITERATIONS,
    SETTINGS,
    Planner,
    Plans,
    SettingName,
    drawn_plans,
    mean_max_over_mean,
)
from moesys.bench.laer.published import ABLATION_S, BREAKDOWN, METHODS, ROWS, Method, PublishedBreakdown, PublishedRow
from moesys.bench.laer.step import MODELS, Constants, LaerModel, Seconds, iteration_seconds
from moesys.config import ClusterSpec, Strategy

# An iteration's layers are drawn once a seed, and the hottest expert of a few makes it slow: speed-ups of single seeds
# spread by 1 to 4 %, so that the mean of sixteen is known to 1 %.
SEEDS = tuple(range(16))
ABLATED: dict[str, Planner] = {"no_pq": "no_pq", "no_comm_opt": "LAER", "no_even": "no_even"}
ABLATION_MODEL = "mixtral-8x7b-e8k2"
# That of the constants was measured by the artifact's authors. 84.6: NCCL's all-to-all of 4 GB on two nodes of 8 A100
# with 4 NICs of 200 Gb/s, 19.83 GB/s of bus rate, of which 8 of 15 parts leave the node (github.com/NVIDIA/nccl issue
# 1138, 2024). 75 and 65: on 64 messages of 11 MB a rank nobody has published one.
RATES_GB_PER_S = (84.6, 75.0, 65.0)

AllPlans = dict[tuple[SettingName, Planner], list[Plans]]


@dataclass(frozen=True)
class Row:
    """A published row, and the simulated seconds of an iteration by method, of each seed."""

    published: PublishedRow
    of_seeds: dict[Method, tuple[float, ...]]

    @property
    def simulated(self) -> dict[Method, float]:
        """Means over seeds."""
        return {method: statistics.fmean(seconds) for method, seconds in self.of_seeds.items()}

    @property
    def fitted(self) -> bool:
        return self.published.dataset == "wikitext" and self.published.aux_loss == 0

    def without_seed(self, place: int) -> Row:
        """Of all seeds but one."""
        kept = {name: (*seconds[:place], *seconds[place + 1 :]) for name, seconds in self.of_seeds.items()}
        return Row(self.published, kept)

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

    def standard_error(self, method: Method) -> float:
        """Of the simulated speed-up, over it: of a ratio of means over seeds, by the jackknife; 0 for one seed."""
        own, fsdp_ep = (np.array(self.of_seeds[of]) for of in (method, "FSDP+EP"))
        without = (fsdp_ep.sum() - fsdp_ep) / (own.sum() - own) if len(own) > 1 else np.ones(1)
        return float(np.sqrt((len(own) - 1) * without.var()) / self.speed_up(method)[1])


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
    """Everything simulated.

    unhidden: seconds over FSDP+EP's of LAER, and of it without its communication optimisations, by the rate between
    nodes in GB/s. max_over_mean: of the busiest rank, by setting and planner. hindsight: the same on e8k2, of whichever
    of no_pq and no_even has the lower one for the tokens that came.
    """

    rows: tuple[Row, ...]
    breakdown: tuple[Part, ...]
    ablation_s: dict[str, float]
    unhidden: dict[float, tuple[float, float]]
    max_over_mean: dict[tuple[SettingName, Planner], float]
    hindsight: float

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


def seed_seconds(
    model: LaerModel,
    constants: Constants,
    found: Sequence[Plans],
    iterations: Sequence[int],
    *,
    strategy: Strategy | None = None,
    optimised: bool = True,
    cluster: ClusterSpec | None = None,
) -> list[Seconds]:
    """Of each seed the mean over iterations; on the cluster of ``constants`` where no other is given."""
    return [
        mean_seconds(
            iteration_seconds(model, constants, plans[iteration], strategy, optimised, cluster)
            for iteration in iterations
        )
        for plans in found
    ]


def mean_seconds(all_seconds: Iterable[Seconds]) -> Seconds:
    """Of iterations, or of seeds; part by part."""
    return Seconds(*np.mean([astuple(seconds) for seconds in all_seconds], axis=0).tolist())


def simulated_rows(
    constants: Constants,
    found: AllPlans,
    iterations: Sequence[int] = ROW_ITERATIONS,
    tell: Callable[[str], None] | None = None,
) -> tuple[Row, ...]:
    """All 24 rows, each shape simulated once a method."""
    by_model: dict[LaerModel, dict[Method, tuple[float, ...]]] = {}
    for name, model in MODELS.items():
        if model not in by_model:
            if tell:
                tell(f"rows of {name}")
            by_model[model] = {
                method: tuple(
                    seconds.total
                    for seconds in seed_seconds(model, constants, found[model.setting, method], iterations)
                )
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
        parts.append(Part(published, mean_seconds(seed_seconds(model, constants, plans, (BREAKDOWN_ITERATION,)))))
    say("ablation")
    model = MODELS[ABLATION_MODEL]
    of_model = next(row.simulated for row in rows if row.published.model == ABLATION_MODEL)
    ablation_s: dict[str, float] = {"FSDP+EP": of_model["FSDP+EP"], "LAER": of_model["LAER"]}
    for name, planner in ABLATED.items():
        plans = found[model.setting, planner]
        optimised = name != "no_comm_opt"
        ablation_s[name] = mean_seconds(seed_seconds(model, constants, plans, iterations, optimised=optimised)).total
    unhidden = {}
    for rate in RATES_GB_PER_S:
        say(f"{rate:g} GB/s between nodes")
        slower = replace(constants, inter_node_gb_per_s=rate)
        static_s = mean_seconds(seed_seconds(model, slower, found[model.setting, "FSDP+EP"], iterations)).total
        plans = found[model.setting, "LAER"]
        with_and_without = [
            mean_seconds(seed_seconds(model, slower, plans, iterations, optimised=is_so)) for is_so in (True, False)
        ]
        unhidden[rate] = (with_and_without[0].total / static_s, with_and_without[1].total / static_s)
    return Reproduction(
        rows=rows,
        breakdown=tuple(parts),
        ablation_s=ablation_s,
        unhidden=unhidden,
        max_over_mean={key: mean_max_over_mean(plans, iterations) for key, plans in found.items()},
        hindsight=_in_hindsight(found[model.setting, "no_pq"], found[model.setting, "no_even"], iterations),
    )


def _in_hindsight(found: Sequence[Plans], others: Sequence[Plans], iterations: Sequence[int]) -> float:
    pairs = [
        pair
        for plans, other in zip(found, others, strict=True)
        for iteration in iterations
        for parts in zip(plans[iteration], other[iteration], strict=True)
        for pair in zip(*parts, strict=True)
    ]
    return statistics.fmean(min(one.max_over_mean, other.max_over_mean) for one, other in pairs)


def least_worst_error(values: Sequence[float]) -> float:
    """Of the one number that is nearest to all ``values`` in relative terms: 2 / (1 / least + 1 / most)."""
    return (max(values) - min(values)) / (max(values) + min(values))


def median_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return statistics.median(errors), max(errors)
