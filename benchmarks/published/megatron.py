"""Megatron's iterations of LAER-MoE's evaluation, simulated: the baseline of its "up to 1.69x".

Published (the artifact's scripts): tensor parallelism of 8 for e8k2 and of 4 for e16k4 with sequence parallelism,
experts whole on 8 ranks, so on each node once, micro-batches of one sequence a tensor-parallel group, nothing
recomputed, gradients and parameters overlapped, experts one by one. Not published: how long anything of it takes. Its
constants here are those fitted on LAER-MoE's own program, and none is fitted on a Megatron row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from benchmarks.published.drawn_steps import Planning, Scenario, StepSeconds, mean_of_seeds, simulate
from benchmarks.published.laer_figures import ROWS
from benchmarks.published.laer_setup import (
    BACKWARD_OVER_FORWARD,
    LAER_MODELS,
    PLANNERS,
    ROW_ITERATIONS,
    SEQUENCE,
    VOCABULARY,
    Constants,
    LaerModel,
)
from moesys.config import Ep, Strategy
from moesys.cost import GRADIENT_BYTES
from moesys.lab.show.sheets import Column, Sheet
from moesys.simulator.rest_of_step import RestOfStep

SEQUENCES = 128
TENSOR_PARALLEL = {"e8k2": 8, "e16k4": 4}
# Each an iteration of the rows: of its micro-batches one is simulated, as they are drawn alike.
MICRO_BATCHES = tuple((2 * iteration,) for iteration in ROW_ITERATIONS)


@dataclass(frozen=True)
class MegatronRow:
    """Seconds of an iteration of a shape, least and most of its published rows, and over LAER's.

    simulated: with LAER-MoE's dispatcher and its slow-down of rows. free: with neither.
    """

    model: Annotated[str, Column("model")]
    tensor_parallel: Annotated[int, Column("TP")]
    least: Annotated[float, Column("least published", ".2f")]
    most: Annotated[float, Column("most", ".2f")]
    free: Annotated[float, Column("simulated, free host", ".2f")]
    simulated: Annotated[float, Column("LAER's host", ".2f")]
    least_over: Annotated[float, Column("least published / LAER", ".2f")]
    most_over: Annotated[float, Column("most / LAER", ".2f")]
    free_over: Annotated[float, Column("simulated / LAER, free host", ".2f")]
    over: Annotated[float, Column("LAER's host / LAER", ".2f")]
    max_over_mean: Annotated[float, Column("max/mean", ".2f")]


def tensor_parallel(model: LaerModel) -> int:
    return TENSOR_PARALLEL[model.name.rpartition("-")[2]]


def num_micro_batches(model: LaerModel, constants: Constants) -> int:
    """Of an iteration: a tensor-parallel group takes one sequence at a time."""
    return SEQUENCES * tensor_parallel(model) // constants.cluster.num_ranks


def megatron_scenario(model: LaerModel, constants: Constants) -> Scenario:
    """A node's micro-batches, each a step of its own: nodes meet in gradients alone.

    Ranks of a tensor-parallel group share a sequence, so that what strays is the group's routing: the sum of its ranks'
    varies as one rank's does.
    """
    cluster, parallel, layer = constants.cluster.replace(num_nodes=1), tensor_parallel(model), model.layer
    routing = model.routing(constants, ROW_ITERATIONS)
    if routing.concentration is not None:
        routing = routing.replace(concentration=routing.concentration / parallel)
    slots = layer.num_experts // cluster.num_ranks
    return Scenario(
        name=model.name,
        planning=Planning(
            routing=routing.replace(tokens_per_rank=SEQUENCE // parallel),
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            slots=slots,
            cluster=cluster,
            contender=PLANNERS["FSDP+EP"],
        ),
        layer=layer,
        num_layers=model.num_layers,
        steps=MICRO_BATCHES,
        strategy=Strategy(name="Megatron", sharding=Ep()),
        cluster=cluster,
        rest=_rest(model, constants, parallel),
    )


def _rest(model: LaerModel, constants: Constants, parallel: int) -> RestOfStep:
    """Attention's flops and the language head's are split; activations are gathered before attention and reduced behind
    it, over the measured links of a node.
    """
    whole = model.rest_of_step(constants, communication_optimised=True)
    attention_s = model.attention_flops(SEQUENCE) / parallel / (constants.rest_tflops * 1e12)
    moved = SEQUENCE * model.layer.row_bytes * (parallel - 1) / parallel
    moved_s = 2 * moved / (constants.intra_node_gb_per_s * 1e9)
    head = 2 * (1 + BACKWARD_OVER_FORWARD) * SEQUENCE * VOCABULARY * model.layer.hidden_size / parallel
    return replace(
        whole,
        other_seconds=attention_s + moved_s + constants.dispatcher_ms * 1e-3,
        recompute="none",
        optimizer_seconds=head / (constants.rest_tflops * 1e12),
    )


def iteration_seconds(model: LaerModel, constants: Constants, micro_batch: StepSeconds) -> float:
    """All micro-batches, and what gradients (float32) and parameters (bfloat16) of a node's experts take between nodes
    beyond the backward and the forward of one of them.
    """
    nodes = constants.cluster.num_nodes
    parameters = model.num_layers * model.layer.num_experts * model.layer.expert_parameters * (nodes - 1) / nodes
    late_s = 0.0
    for element_bytes, part in ((GRADIENT_BYTES, 2 / 3), (model.layer.bytes_per_element, 1 / 3)):
        travel_s = element_bytes * parameters / (constants.inter_node_gb_per_s * 1e9)
        late_s += max(0.0, travel_s - part * micro_batch.total)
    return num_micro_batches(model, constants) * micro_batch.total + late_s


def megatron_sheet(
    constants: Constants,
    seeds: Sequence[int],
    laer_seconds: Mapping[str, float],
    models: Sequence[LaerModel] = LAER_MODELS,
) -> Sheet:
    """``laer_seconds``: simulated, by model."""
    both = (replace(constants, dispatcher_ms=0.0, rows_slowdown=0.0), constants)
    scenarios = {(model, by): megatron_scenario(model, by) for model in models for by in both}
    found = simulate(scenarios.values(), seeds, "Megatron")
    rows = []
    for model in models:
        means = [mean_of_seeds(found[scenarios[model, by]]) for by in both]
        free_s, simulated_s = (iteration_seconds(model, by, mean.seconds) for by, mean in zip(both, means, strict=True))
        published = [row for row in ROWS if row.model.endswith(model.name)]
        over = [row.megatron_s / row.laer_s for row in published]
        seconds = [row.megatron_s for row in published]
        laer_s = laer_seconds[model.name]
        rows.append(
            MegatronRow(
                model=model.name,
                tensor_parallel=tensor_parallel(model),
                least=min(seconds),
                most=max(seconds),
                free=free_s,
                simulated=simulated_s,
                least_over=min(over),
                most_over=max(over),
                free_over=free_s / laer_s,
                over=simulated_s / laer_s,
                max_over_mean=means[0].max_over_mean_P[0],
            )
        )
    notes = (
        "Nothing is fitted on these rows: tensor parallelism (TP), experts on 8 ranks of a node, micro-batches of one "
        "sequence and no recomputation are the artifact's. So e8k2 has 16 times as many passes of a layer as LAER, "
        "e16k4 8 times as many, each with its host time.",
        "free host: without the dispatcher's time and the slow-down of rows, which were fitted on LAER-MoE's program.",
        "Not published: kernels' rates under tensor parallelism, host time, what overlap leaves of gradients, routing "
        "of single sequences.",
    )
    return Sheet("SIMULATED beside published: Megatron, seconds of an iteration", rows, notes)
