"""Who computes what in LAER-MoE's experiments, method by method, on drawn routing of iterations 21 to 70.

``laer_routing`` is fitted to micro-batches 1 to 9, and 1 to 29, which are published; rows are means over later ones.
There experts are more unequal, and that changes more slowly: in what is published of e16k4 the busiest rank under the
static layout rises from 1.60 to 1.90 times the mean, while LAER's falls from 1.29 to 1.15. How much more, and how much
more slowly, nobody published: ``laer_model.CONSTANTS`` has both, fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np

from moesys.bench.laer.flex_moe import laer_flex_moe_layout
from moesys.bench.planner.scored_layers import Contender, layouts_of
from moesys.config import Adaptive, ClusterSpec, EvenSplit, FlexMoe, FlowSplit, Greedy, Laer, Last, Static, WindowMean
from moesys.config.experiment import Generated
from moesys.config.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.moe.planning import PlanRequest, SolvedPlan
from moesys.replay import Moment
from moesys.traces import generate

SettingName = Literal["e8k2", "e16k4"]
Planner = Literal["FSDP+EP", "FlexMoE", "LAER", "no_even", "no_pq", "LAER, flow", "greedy, flow"]

MICRO_BATCHES = 2
# Iterations 21 to 70 of the rows, counted from 0 and thinned out; 14 is that of the breakdown.
ROW_ITERATIONS = (20, 44, 68)
BREAKDOWN_ITERATION = 14


@dataclass(frozen=True)
class Setting:
    """One of the two routings: 16,384 tokens a rank and micro-batch; ``slots`` a rank."""

    name: SettingName
    num_experts: int
    slots: int
    published: Generated

    def routing(self, skew_growth: float, calm: float) -> Generated:
        """Experts ``skew_growth`` times as unequal in logarithms, at a ``calm``-th of the drift and of the straying."""
        assert self.published.concentration is not None
        return self.published.replace(
            skew=self.published.skew * skew_growth,
            drift=self.published.drift / calm,
            concentration=self.published.concentration * calm,
            warmup=0,
        )


SETTINGS = {
    "e8k2": Setting("e8k2", 8, 2, LAER_E8K2_ROUTING),
    "e16k4": Setting("e16k4", 16, 4, LAER_E16K4_ROUTING),
}

# By iteration: of each micro-batch the plans of all layers.
Plans = dict[int, list[list[TokenPlan]]]


def drawn_plans(
    setting: Setting,
    routing: Generated,
    planners: Sequence[Planner],
    cluster: ClusterSpec,
    seeds: Sequence[int],
    iterations: Sequence[int] = (BREAKDOWN_ITERATION, *ROW_ITERATIONS),
    tell: Callable[[str], None] | None = None,
) -> dict[Planner, list[Plans]]:
    """Of each planner the plans for routing drawn under each seed."""
    found: dict[Planner, list[Plans]] = {planner: [] for planner in planners}
    wanted = [MICRO_BATCHES * iteration + part for iteration in iterations for part in range(MICRO_BATCHES)]
    for seed in seeds:
        # Later micro-batches change no earlier one.
        needed = routing.replace(steps=max(wanted) + 1)
        trace = generate(needed, cluster.num_ranks, setting.num_experts, setting.slots, seed)
        for planner in planners:
            if tell:
                tell(f"{setting.name}, seed {seed}, {planner}")
            by_layer = [
                dict(_layer_plans(planner, trace.tokens_SLRE[:, layer], wanted, cluster, setting.slots))
                for layer in range(trace.num_layers)
            ]
            plans = {micro_batch: [layer[micro_batch] for layer in by_layer] for micro_batch in wanted}
            parts = range(MICRO_BATCHES)
            found[planner].append({it: [plans[MICRO_BATCHES * it + part] for part in parts] for it in iterations})
    return found


def _layer_plans(
    planner: Planner, tokens_SRE: IntArray, wanted: Sequence[int], cluster: ClusterSpec, slots: int
) -> Iterator[tuple[int, TokenPlan]]:
    """Of one layer, for the micro-batches that are wanted: each is planned on those before it."""
    contender = _contender(planner)
    if planner == "FlexMoE":
        walk = layouts_of(contender, tokens_SRE[: max(wanted) + 1], None, cluster, slots, _FlexMoePlanner())
    else:
        walk = layouts_of(contender, tokens_SRE, [Moment(index, index) for index in wanted], cluster, slots)
    for one in walk:
        if one.micro_batch in wanted:
            yield one.micro_batch, contender.split_over(one.load, one.layout, cluster, one.micro_batch)


class _FlexMoePlanner:
    """Plans at once, as LAER-MoE's FlexMoE does: step by step, so it is asked after every micro-batch."""

    def submit(self, request: PlanRequest) -> SolvedPlan:
        return SolvedPlan(laer_flex_moe_layout(request.load.tokens_RE, request.previous, request.cluster))


def _contender(planner: Planner) -> Contender:
    match planner:
        case "FSDP+EP":
            return Contender(Static(), EvenSplit(), Last())
        case "FlexMoE":
            return Contender(FlexMoe(), EvenSplit(), WindowMean(steps=5))
        case "LAER":
            return Contender(Laer(), EvenSplit(), WindowMean(steps=5))
        case "no_even":
            return Contender(Laer(candidates=("proportional",)), EvenSplit(), WindowMean(steps=5))
        case "no_pq":
            return Contender(Laer(candidates=("even",)), EvenSplit(), WindowMean(steps=5))
        case "LAER, flow":
            return Contender(Laer(), FlowSplit(), WindowMean(steps=5))
        case "greedy, flow":
            return Contender(Greedy(), FlowSplit(), Adaptive())
        case _:
            assert_never(planner)


def mean_max_over_mean(found: Sequence[Plans], iterations: Sequence[int] = ROW_ITERATIONS) -> float:
    """Rows of the busiest rank over the mean: the mean over layers, micro-batches and seeds."""
    return float(
        np.mean([plan.max_over_mean for plans in found for it in iterations for part in plans[it] for plan in part])
    )
