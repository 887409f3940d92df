"""Steps of MoE layers on generated routing, planned and simulated.

A ``Scenario`` is data: which layers run, under which strategy, on which cluster and on which routing. Its simulated
seconds depend on it and on the seed alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context

import numpy as np

from moesys.balance.layout_schedule import PlanSource
from moesys.balance.replay import Moment, replay_layer
from moesys.balance.run_planner import split_tokens
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import Generated
from moesys.lab.runs.environment import available_cores
from moesys.lab.show.progress import steps_told
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.step_program import run_step
from moesys.traces import generate


@dataclass(frozen=True)
class Planning:
    """A planner and the routing that it plans for. Scenarios with the same planning share its plans.

    strategy: the balance, predictor, split and slots. cluster: the cluster as the planner knows it. every_micro_batch:
    a planner that plans after every micro-batch, in place of the strategy's balance, which plans only before the
    micro-batches that are simulated.
    """

    routing: Generated
    num_experts: int
    top_k: int
    strategy: Strategy
    cluster: ClusterSpec
    every_micro_batch: PlanSource | None = None

    def plans(self, tokens_SLRE: IntArray, wanted: Collection[int]) -> dict[int, list[TokenPlan]]:
        """Returns the plans of all layers for each wanted micro-batch, planned from the micro-batches before it."""
        shape = ModelShape(hidden_size=1, intermediate_size=1, num_experts=self.num_experts, top_k=1)
        moments = None if self.every_micro_batch else [Moment(number, number) for number in sorted(wanted)]
        found: dict[int, list[TokenPlan]] = {number: [] for number in wanted}
        for layer in range(tokens_SLRE.shape[1]):
            tokens_SRE, planner = tokens_SLRE[:, layer], self.every_micro_batch
            for one in replay_layer(self.strategy, shape, self.cluster, tokens_SRE, moments=moments, planner=planner):
                if one.micro_batch in wanted:
                    plan = split_tokens(one.load, one.layout, self.cluster, self.strategy.split, one.micro_batch)
                    found[one.micro_batch].append(plan)
        return found


@dataclass(frozen=True)
class Scenario:
    """Steps of the first ``num_layers`` layers of a planning; ``steps`` has each step's micro-batches, from 0."""

    name: str
    planning: Planning
    layer: ModelShape
    num_layers: int
    steps: tuple[tuple[int, ...], ...]
    strategy: Strategy
    cluster: ClusterSpec
    rest: RestOfStep


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step and of its parts, as means over ranks, and figures of its plans.

    experts: expert products and weight gradients. all_to_all: the token all-to-all with the wait for slower ranks that
    a rank exchanges messages with. spread: the standard deviation of ``experts`` over ranks, divided by its mean.
    max_over_mean: the load imbalance of the plans of all layers that were planned.
    """

    total: float
    experts: float
    all_to_all: float
    spread: float
    max_over_mean: float

    @property
    def rest(self) -> float:
        """All but experts and the all-to-all; it includes the wait for other nodes where no rows leave a node."""
        return self.total - self.experts - self.all_to_all

    @classmethod
    def mean(cls, steps: Sequence[SimulatedStep]) -> SimulatedStep:
        return cls(*np.mean([astuple(step) for step in steps], axis=0).tolist())


# The simulated steps of each scenario, one per seed.
Found = Mapping[Scenario, Sequence[SimulatedStep]]


def simulate(
    scenarios: Collection[Scenario], seeds: Sequence[int], what: str, num_processes: int = available_cores()
) -> Found:
    """Simulates every scenario under each seed; ``what`` names the progress. ``num_processes`` changes no result."""
    plannings: dict[Planning, list[Scenario]] = {}
    for scenario in dict.fromkeys(scenarios):
        plannings.setdefault(scenario.planning, []).append(scenario)
    jobs = [(planning, sharing, seed) for seed in seeds for planning, sharing in plannings.items()]
    found: dict[Scenario, list[SimulatedStep]] = {scenario: [] for scenario in scenarios}
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("forkserver"))
    with pool, steps_told(what, len(jobs)) as tell:
        parallel = num_processes > 1 and len(jobs) > 1
        results = pool.map(_simulate_planning, jobs) if parallel else map(_simulate_planning, jobs)
        for _, sharing, seed in jobs:
            tell(f"{sharing[0].name}, {sharing[0].strategy.name}, seed {seed}")
            for scenario, step in zip(sharing, next(results), strict=True):
                found[scenario].append(step)
    return found


def _simulate_planning(job: tuple[Planning, Sequence[Scenario], int]) -> list[SimulatedStep]:
    """Simulates all scenarios of a planning under one seed; returns the mean over the steps of each."""
    planning, sharing, seed = job
    wanted = {number for scenario in sharing for step in scenario.steps for number in step}
    # The generator draws micro-batches in order, so leaving out later ones changes none before them.
    routing = planning.routing.replace(warmup=0, steps=max(wanted) + 1)
    trace = generate(routing, planning.cluster.num_ranks, planning.num_experts, planning.top_k, seed)
    plans = planning.plans(trace.tokens_SLRE, wanted)
    return [
        SimulatedStep.mean([_simulate_step(of, [plans[number] for number in step]) for step in of.steps])
        for of in sharing
    ]


def _simulate_step(of: Scenario, micro_batches: Sequence[Sequence[TokenPlan]]) -> SimulatedStep:
    layers = [plans_L[: of.num_layers] for plans_L in micro_batches]
    simulation = run_step(of.strategy, of.layer, of.cluster, layers, of.rest)
    waited = {lane: float(seconds_R.mean()) for lane, seconds_R in simulation.waited_R.items()}
    late = waited.get("restore", 0.0) + waited.get("reshard", 0.0)
    experts_R = simulation.computed_R["experts"] + simulation.computed_R["weight_gradients"]
    return SimulatedStep(
        total=simulation.length_seconds,
        experts=float(experts_R.mean()),
        all_to_all=sum(waited.values()) - late - float(simulation.other_domains_R.mean()),
        spread=float(experts_R.std() / experts_R.mean()),
        max_over_mean=float(np.mean([plan.max_over_mean for plans_L in micro_batches for plan in plans_L])),
    )
