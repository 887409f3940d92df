"""Steps of MoE layers on drawn routing, planned and simulated.

A ``Scenario`` is data: which layers run under which strategy, on which cluster, on which routing. What it is simulated
to take depends on it and the seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from multiprocessing import get_context

import numpy as np

from benchmarks.published.contenders import Contender, layouts_of
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import Generated
from moesys.lab.show.steps import steps_told
from moesys.layout import TokenPlan
from moesys.layout_schedule import PlanSource
from moesys.load import IntArray
from moesys.replay import Moment
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.step_program import run_step
from moesys.traces import generate


@dataclass(frozen=True)
class Planning:
    """Who plans for which routing. Scenarios with the same planning share its plans.

    cluster: the one that planners are told. every_micro_batch: makes plans after every micro-batch, in place of the
    contender's balance, which plans before those micro-batches only that are simulated.
    """

    routing: Generated
    num_experts: int
    top_k: int
    slots: int
    cluster: ClusterSpec
    contender: Contender
    every_micro_batch: PlanSource | None = None

    def plans(self, tokens_SLRE: IntArray, wanted: Collection[int]) -> dict[int, list[TokenPlan]]:
        """Of each wanted micro-batch the plans of all layers, each planned on the micro-batches before."""
        layers = range(tokens_SLRE.shape[1])
        by_layer = [dict(self._layer_plans(tokens_SLRE[:, layer], wanted)) for layer in layers]
        return {number: [plans[number] for plans in by_layer] for number in wanted}

    def _layer_plans(self, tokens_SRE: IntArray, wanted: Collection[int]) -> Iterator[tuple[int, TokenPlan]]:
        source = self.every_micro_batch
        when = None if source else [Moment(number, number) for number in sorted(wanted)]
        for one in layouts_of(self.contender, tokens_SRE, when, self.cluster, self.slots, source):
            if one.micro_batch in wanted:
                plan = self.contender.split_over(one.load, one.layout, self.cluster, one.micro_batch)
                yield one.micro_batch, plan


@dataclass(frozen=True)
class Scenario:
    """Steps of the first ``num_layers`` layers of a planning; ``steps`` has the micro-batches of each, from 0."""

    name: str
    planning: Planning
    layer: ModelShape
    num_layers: int
    steps: tuple[tuple[int, ...], ...]
    strategy: Strategy
    cluster: ClusterSpec
    rest: RestOfStep


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, and of its parts: means over ranks.

    experts: products and weight gradients. all_to_all: of rows, with the waiting for slower ranks that they have
    messages with. experts_late: waiting for experts and gradients on their way. exposed: all that is not computing.
    spread: of ``experts`` over ranks, the standard deviation over the mean.
    """

    total: float
    experts: float
    all_to_all: float
    experts_late: float
    exposed: float
    spread: float

    @property
    def rest(self) -> float:
        """All but experts and the all-to-all: waiting for other nodes, where no rows leave a node, is in it."""
        return self.total - self.experts - self.all_to_all

    @classmethod
    def mean(cls, of: Sequence[StepSeconds]) -> StepSeconds:
        return cls(*np.mean([astuple(seconds) for seconds in of], axis=0).tolist())


@dataclass(frozen=True)
class Drawn:
    """A scenario under one seed: the mean over its steps, and of its P plans in all drawn layers the rows of the
    busiest rank over the mean; ``inter_node_share``: of the routed rows.
    """

    seconds: StepSeconds
    max_over_mean_P: tuple[float, ...]
    inter_node_share: float


Found = Mapping[Scenario, Sequence[Drawn]]


def mean_of_seeds(of_seeds: Sequence[Drawn]) -> Drawn:
    """The mean over seeds, and over plans."""
    return Drawn(
        StepSeconds.mean([drawn.seconds for drawn in of_seeds]),
        (float(np.mean([drawn.max_over_mean_P for drawn in of_seeds])),),
        float(np.mean([drawn.inter_node_share for drawn in of_seeds])),
    )


def simulate(
    scenarios: Collection[Scenario], seeds: Sequence[int], what: str, num_processes: int = os.cpu_count() or 1
) -> Found:
    """Of every scenario what it takes under each seed, the same for any ``num_processes``. Says how far it is, as
    ``what``.
    """
    plannings: dict[Planning, list[Scenario]] = {}
    for scenario in dict.fromkeys(scenarios):
        plannings.setdefault(scenario.planning, []).append(scenario)
    found: dict[Scenario, list[Drawn]] = {scenario: [] for scenario in scenarios}
    jobs = [(planning, alike, seed) for seed in seeds for planning, alike in plannings.items()]
    with steps_told(what, len(jobs)) as tell, ExitStack() as stack:
        of_jobs: Iterator[list[Drawn]] = map(_drawn, jobs)
        if len(jobs) > num_processes > 1:
            pool = ProcessPoolExecutor(num_processes, mp_context=get_context("forkserver"))
            of_jobs = stack.enter_context(pool).map(_drawn, jobs)
        for _, alike, seed in jobs:
            tell(f"{alike[0].name}, {alike[0].strategy.name}, seed {seed}")
            for scenario, drawn in zip(alike, next(of_jobs), strict=True):
                found[scenario].append(drawn)
    return found


def _drawn(job: tuple[Planning, Sequence[Scenario], int]) -> list[Drawn]:
    """Of all scenarios of a planning."""
    planning, alike, seed = job
    wanted = {number for scenario in alike for step in scenario.steps for number in step}
    # Later micro-batches change no earlier one.
    routing = planning.routing.replace(warmup=0, steps=max(wanted) + 1)
    trace = generate(routing, planning.cluster.num_ranks, planning.num_experts, planning.top_k, seed)
    plans = planning.plans(trace.tokens_SLRE, wanted)
    found = []
    for of in alike:
        steps = [[plans[number] for number in step] for step in of.steps]
        seconds = [
            step_seconds(of.strategy, of.layer, of.cluster, [plans[: of.num_layers] for plans in step], of.rest)
            for step in steps
        ]
        used = [plan for step in steps for plans_L in step for plan in plans_L]
        crossed = sum(plan.inter_node_tokens(of.cluster.node_of_rank) for plan in used)
        share = crossed / sum(plan.load.total for plan in used)
        found.append(Drawn(StepSeconds.mean(seconds), tuple(plan.max_over_mean for plan in used), share))
    return found


def step_seconds(
    strategy: Strategy,
    layer: ModelShape,
    cluster: ClusterSpec,
    micro_batches: Sequence[Sequence[TokenPlan]],
    rest: RestOfStep,
) -> StepSeconds:
    """Of one step, by ``run_step``."""
    simulation = run_step(strategy, layer, cluster, micro_batches, rest)
    computed = {kind: float(seconds_R.mean()) for kind, seconds_R in simulation.computed_R.items()}
    waited = {lane: float(seconds_R.mean()) for lane, seconds_R in simulation.waited_R.items()}
    late = waited.get("restore", 0.0) + waited.get("reshard", 0.0)
    experts_R = simulation.computed_R["experts"] + simulation.computed_R["weight_gradients"]
    return StepSeconds(
        total=simulation.length_seconds,
        experts=float(experts_R.mean()),
        all_to_all=sum(waited.values()) - late - float(simulation.other_domains_R.mean()),
        experts_late=late,
        exposed=simulation.length_seconds - sum(computed.values()),
        spread=float(experts_R.std() / experts_R.mean()),
    )
