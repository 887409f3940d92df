"""Trials: a strategy under one seed, trained on real ranks or simulated. ``METRICS`` has the names of all metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesys.config import ClusterSpec, ModelShape, Strategy, presets
from moesys.config.workload import Generated, ModelTraining, RealTraining, Replay, Training, Workload
from moesys.cost import restore_bytes, restores_per_step
from moesys.lab.runs.records import Samples
from moesys.load import IntArray
from moesys.traces import Trace

if TYPE_CHECKING:
    from moesys.config.experiment import Experiment
    from moesys.simulator.step_program import SimulatedStep

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


def run_simulated(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Replay | Generated,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measures the simulated steps, as a pure function of everything but ``tick``."""
    from moesys.simulator.step_program import simulated_steps

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
