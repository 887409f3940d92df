"""Trials: a strategy under one seed, trained on real ranks or simulated. ``METRICS`` has the names of all metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesys.config import ClusterSpec, ModelShape, Strategy, presets
from moesys.config.workload import Generated, ModelTraining, RealTraining, Replay, Training, Workload
from moesys.cost import restore_bytes, restores_per_step
from moesys.lab.runs.records import Samples
from moesys.load import IntArray
from moesys.traces import Trace, generate, load_trace

if TYPE_CHECKING:
    from moesys.balance.plan import StepPlan
    from moesys.config.experiment import Experiment
    from moesys.simulator.rest_of_step import RestOfStep
    from moesys.simulator.simulation import Simulation

# Unit and direction of every metric that a trial may have, in the order in which tables show them.
METRICS: dict[str, tuple[str, Literal["lower", "higher", ""]]] = {
    "step_ms": ("ms", "lower"),
    "exposed_ms": ("ms", "lower"),
    "load_max_over_mean": ("", "lower"),
    "restored_mib": ("MiB", "lower"),
    "plan_ms": ("ms", "lower"),
    "inter_node_share": ("", "lower"),
    "loss": ("nats/token", "lower"),
    "router_entropy": ("", "higher"),
    "starved_experts": ("pairs of layer and expert", "lower"),
    "processes_per_core": ("", "lower"),
}


@dataclass(frozen=True)
class Measurement:
    """The measurement of a trial that did not fail.

    ``samples``: one value a timed step. ``losses``: of all steps, warm-up included; empty where it was simulated.
    ``tokens_LE``: tokens of each expert by layer, over timed steps. ``routing``: the timed steps' routing, of a
    measured trial. ``would_not_run``: what stands against a simulated one, in some step; else "".
    """

    samples: dict[str, Samples]
    losses: list[float] = field(default_factory=list)
    tokens_LE: list[list[int]] = field(default_factory=list)
    routing: Trace | None = None
    would_not_run: str = ""


def run_measured(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Training | ModelTraining,
    seed: int,
) -> Measurement | None:
    """Trains on every rank of the default group, or alone: a collective. Returns None on all ranks except rank 0."""
    import torch.distributed as dist

    from moesys.lab.train.loop import train

    results = list(train(strategy, model, cluster, workload, seed))
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    timed = [result for result in results if result.timed]
    values = {
        name: [float(getattr(result, name)) for result in timed]
        for name in ("step_ms", "exposed_ms", "load_max_over_mean", "restored_mib", "plan_ms", "loss", "router_entropy")
    }
    values["starved_experts"] = [float((np.array(result.tokens_LE) == 0).sum()) for result in timed]
    # The load of the machine over the last minute, of which the ranks are a part.
    values["processes_per_core"] = [os.getloadavg()[0] / (os.cpu_count() or 1)] * len(timed)
    routing = Trace(
        np.concatenate([np.array(result.loads_MLRE) for result in timed]),
        model.top_k,
        name=strategy.name,
        meta={"strategy": strategy.fingerprint(), "seed": str(seed), "recorded": "timed steps of a training"},
    )
    return Measurement(
        _samples(values), [result.loss for result in results], routing.tokens_SLRE.sum(axis=(0, 2)).tolist(), routing
    )


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step in the cost model: the plans of its micro-batches, and the rest of it."""

    plans: tuple[StepPlan, ...]
    rest: RestOfStep

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step. Raises ValueError for a step that the cost model does not support."""
        from moesys.simulator.step_program import simulation

        return simulation(self.plans, self.rest)

    def why_not(self, num_layers: int | None = None) -> tuple[str, ...]:
        """Returns all reasons why the step cannot run. ``num_layers``: as in ``moesys.balance.plan.why_not``."""
        from moesys.balance.plan import why_not

        return why_not(self.plans, num_layers=num_layers, recompute=self.rest.recompute != "none")


def simulated_steps(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Replay | Generated,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[SimulatedStep]:
    """Yields the timed steps. Layouts follow from the micro-batches before. A step is simulated when its simulation is
    first read.

    ``tick`` is called after every micro-batch.
    """
    from moesys.balance.replay import replay_steps

    routing, rest, plans = routing_of(workload, model, cluster, seed), rest_of(workload), []
    for number, micro_batch in enumerate(replay_steps(strategy, model, cluster, routing.tokens_SLRE)):
        if number >= workload.warmup:
            plans.append(micro_batch)
        if len(plans) == workload.micro_batches:
            yield SimulatedStep(tuple(plans), rest)
            plans = []
        tick()


def run_simulated(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Replay | Generated,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measures the simulated steps, as a pure function of everything but ``tick``."""
    against: tuple[str, ...] = ()
    values: dict[str, list[float]] = {}
    tokens_SLE: list[IntArray] = []
    for step in simulated_steps(strategy, model, cluster, workload, seed, tick):
        against = against or step.why_not()
        for name, value in _metrics(step).items():
            values.setdefault(name, []).append(value)
        tokens_SLE += [np.stack([plan.load.tokens_E for plan in of_batch.layers]) for of_batch in step.plans]
    tokens_LE = np.sum(tokens_SLE, axis=0).tolist()
    return Measurement(_samples(values), tokens_LE=tokens_LE, would_not_run="; ".join(against))


def has_seeds(workload: Workload) -> bool:
    """Returns whether routing differs by seed, and is there before anything runs."""
    return isinstance(workload, Generated) or (isinstance(workload, Replay) and "{seed}" in workload.trace)


def rest_of(workload: Workload) -> RestOfStep:
    """Returns what a workload declares about a step besides its routing; for a training, only the recomputation and
    Muon.
    """
    from moesys.simulator.rest_of_step import RestOfStep

    experts: Literal["own", "outside"] = "outside" if isinstance(workload, ModelTraining) else "own"
    muon: Literal["none", "own", "outside"] = experts if workload.optimizer == "muon" else "none"
    if isinstance(workload, RealTraining):
        return RestOfStep(recompute=workload.recomputed, muon=muon)
    return RestOfStep(
        other_seconds=workload.other_ms / 1000,
        recompute=workload.recompute,
        optimizer_seconds=workload.optimizer_ms / 1000,
        muon=muon,
    )


def routing_of(workload: Replay | Generated, model: ModelShape, cluster: ClusterSpec, seed: int) -> Trace:
    """Returns the routing, the same for every strategy: drawn with ``seed``, or read from the trace file of the seed.

    Raises ValueError for a trace that is missing, too short, or does not fit the model or the cluster.
    """
    if isinstance(workload, Generated):
        return generate(workload, cluster.num_ranks, model.num_experts, model.top_k, seed)
    path = workload.trace.replace("{seed}", str(seed))
    trace = load_trace(path)
    try:
        trace = trace.fold(cluster.num_ranks)
    except ValueError as error:
        raise ValueError(f"trace {path} on a cluster of {cluster.num_ranks} ranks: {error}") from None
    if (trace.num_experts, trace.top_k) != (model.num_experts, model.top_k):
        raise ValueError(
            f"trace {path} is of {trace.num_experts} experts and top_k={trace.top_k}, but the model has "
            f"num_experts={model.num_experts} and top_k={model.top_k}; replay it on a model that has as many"
        )
    if workload.warmup + workload.micro_batches > trace.num_micro_batches:
        raise ValueError(
            f"warmup={workload.warmup} leaves nothing to time of the {trace.num_micro_batches} micro-batches that "
            f"trace {path} has on {cluster.num_ranks} ranks, with micro_batches={workload.micro_batches} a step; "
            f"use warmup and micro_batches that are at most {trace.num_micro_batches} together"
        )
    empty_S = trace.tokens_SLRE.sum(axis=(1, 2, 3)) == 0
    if empty_S.any():
        raise ValueError(
            f"trace {path} has no token in micro-batch {empty_S.argmax()} on {cluster.num_ranks} ranks; leave it out"
        )
    return trace if workload.tokens_per_rank is None else trace.scaled(workload.tokens_per_rank)


def simulated_workload(workload: Workload) -> Replay | Generated:
    """Returns the workload. In place of a training, whose routing is known only once it runs, it returns drawn routing
    with as many layers, micro-batches and tokens.
    """
    if not isinstance(workload, RealTraining):
        return workload
    return Generated(
        num_layers=workload.num_layers,
        tokens_per_rank=workload.batch * workload.context,
        warmup=workload.warmup * workload.micro_batches,
        steps=workload.steps,
        micro_batches=workload.micro_batches,
        recompute=workload.recomputed,
        optimizer=workload.optimizer,
    )


def simulated_cluster(experiment: Experiment) -> ClusterSpec:
    """Returns the cluster of an experiment, with the speeds of CPUs for a training on CPUs that declares none."""
    cluster, workload = experiment.cluster, experiment.workload
    if cluster.has_speeds or not isinstance(workload, RealTraining) or workload.device != "cpu":
        return cluster
    return presets.cpu(cluster.ranks_per_node, cluster.num_nodes).replace(ranks_per_domain=cluster.ranks_per_domain)


def _metrics(step: SimulatedStep) -> dict[str, float]:
    from moesys.simulator.simulation import exposed_ms

    model, cluster, sharding = step.plans[0].model, step.plans[0].cluster, step.plans[0].strategy.sharding
    timeline = step.simulation.timeline
    tokens = [plan.tokens for micro_batch in step.plans for plan in micro_batch.layers]
    restored_bytes = sum(
        bytes_RR.sum() for plan in tokens for bytes_RR in restore_bytes(plan.layout, model, cluster, sharding)
    )
    routed = sum(plan.load.total for plan in tokens)
    leaving = sum(plan.inter_node_tokens(cluster.domain_of_rank) for plan in tokens)
    return {
        "step_ms": timeline.length_us / 1000,
        "exposed_ms": exposed_ms(timeline),
        "load_max_over_mean": float(np.mean([plan.max_over_mean for plan in tokens])),
        "restored_mib": float(restores_per_step(sharding) * restored_bytes / 2**20),
        "inter_node_share": leaving / routed if routed else 0.0,
    }


def _samples(values: dict[str, list[float]]) -> dict[str, Samples]:
    return {name: Samples(*METRICS[name], values[name]) for name in METRICS if name in values}
