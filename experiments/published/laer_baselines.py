"""What stands beside the simulated rows of LAER-MoE: Megatron's iterations, a closed form and copied rows.

Published of Megatron (the artifact's scripts): tensor parallelism of 8 for e8k2 and of 4 for e16k4 with sequence
parallelism, whole experts on 8 ranks, so once per node, micro-batches of one sequence per tensor-parallel group, no
recomputation, gradients and parameters overlapped, experts one by one. The time of its parts was not published. The
constants are those that were fitted to LAER-MoE's own program; none is fitted to a row of Megatron. Not published
either: rates of kernels under tensor parallelism, host time, the exposed time of gradients, and the routing of single
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import numpy as np

from experiments.published import laer_setup as laer
from experiments.published.drawn_steps import Planning, Scenario, SimulatedStep, simulate
from experiments.published.laer_setup import METHODS, Constants, LaerModel, PublishedRow
from moesys.config import Ep, Strategy
from moesys.cost import GRADIENT_BYTES, expert_seconds
from moesys.lab.show.sheets import Column, Sheet

# --- Megatron -------------------------------------------------------------------------------------------------

SEQUENCES, TENSOR_PARALLEL = 128, {"e8k2": 8, "e16k4": 4}


@dataclass(frozen=True)
class MegatronRow:
    """Seconds of an iteration of a shape: the range of its published rows and what is simulated, also over LAER's.

    simulated: with LAER-MoE's dispatcher and slowdown of rows; free: without both.
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
    """Returns the micro-batches of an iteration: a tensor-parallel group takes one sequence at a time."""
    return SEQUENCES * tensor_parallel(model) // constants.cluster.num_ranks


def megatron_scenario(model: LaerModel, constants: Constants) -> Scenario:
    """Returns micro-batches of a node, each a step of its own, since nodes exchange only gradients and parameters.

    One micro-batch stands for each iteration, as all are drawn alike. The ranks of a tensor-parallel group share a
    sequence, so the routing of their sum varies as that of one rank does. Attention and the language head are split;
    activations are gathered before attention and reduced behind it over the measured links of a node.
    """
    cluster, parallel, layer = constants.cluster.replace(num_nodes=1), tensor_parallel(model), model.layer
    routing = model.routing(constants, laer.ROW_ITERATIONS)
    if routing.concentration is not None:
        routing = routing.replace(concentration=routing.concentration / parallel)
    tflops = constants.rest_tflops * 1e12
    moved = 2 * laer.SEQUENCE * layer.row_bytes * (parallel - 1) / parallel
    moved_s = moved / (constants.intra_node_gb_per_s * 1e9) + constants.dispatcher_ms * 1e-3
    head = 2 * (1 + laer.BACKWARD_OVER_FORWARD) * laer.SEQUENCE * laer.VOCABULARY * layer.hidden_size / parallel
    return Scenario(
        name=model.name,
        planning=Planning(
            routing=routing.replace(tokens_per_rank=laer.SEQUENCE // parallel),
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            strategy=laer.planner_strategy("FSDP+EP", layer.num_experts // cluster.num_ranks),
            cluster=cluster,
        ),
        layer=layer,
        num_layers=model.num_layers,
        steps=tuple((2 * iteration,) for iteration in laer.ROW_ITERATIONS),
        strategy=Strategy(name="Megatron", sharding=Ep()),
        cluster=cluster,
        rest=replace(
            model.rest_of_step(constants, communication_optimized=True),
            other_seconds=model.attention_flops(laer.SEQUENCE) / parallel / tflops + moved_s,
            recompute="none",
            optimizer_seconds=head / tflops,
        ),
    )


def iteration_seconds(model: LaerModel, constants: Constants, micro_batch_s: float) -> float:
    """Returns the seconds of all micro-batches, and those that gradients (float32) and parameters (bfloat16) of a
    node's experts spend between nodes beyond the backward and the forward of one of them.
    """
    nodes = constants.cluster.num_nodes
    parameters = model.num_layers * model.layer.num_experts * model.layer.expert_parameters * (nodes - 1) / nodes
    late_s = 0.0
    for element_bytes, part in ((GRADIENT_BYTES, 2 / 3), (model.layer.bytes_per_element, 1 / 3)):
        travel_s = element_bytes * parameters / (constants.inter_node_gb_per_s * 1e9)
        late_s += max(0.0, travel_s - part * micro_batch_s)
    return num_micro_batches(model, constants) * micro_batch_s + late_s


def megatron_sheet(constants: Constants, seeds: Sequence[int], laer_seconds: Mapping[str, float]) -> Sheet:
    """Simulates Megatron's iterations of all shapes. ``laer_seconds``: LAER's simulated seconds, by shape."""
    free = replace(constants, dispatcher_ms=0.0, rows_slowdown=0.0)
    scenarios = {(model, by): megatron_scenario(model, by) for model in laer.MODELS for by in (free, constants)}
    found = simulate(scenarios.values(), seeds, "Megatron")
    rows = []
    for model in laer.MODELS:
        steps = {by: SimulatedStep.mean(found[scenarios[model, by]]) for by in (free, constants)}
        free_s, simulated_s = (iteration_seconds(model, by, step.total) for by, step in steps.items())
        published, laer_s = laer.published_rows(model.name), laer_seconds[model.name]
        seconds, over = zip(*((row.megatron_s, row.megatron_s / row.laer_s) for row in published), strict=True)
        ratios = (min(over), max(over), free_s / laer_s, simulated_s / laer_s)
        figures = (min(seconds), max(seconds), free_s, simulated_s, *ratios, steps[free].max_over_mean)
        rows.append(MegatronRow(model.name, tensor_parallel(model), *figures))
    notes = (
        "No constant is fitted to these rows. e8k2 has 16 times as many passes of a layer as LAER and e16k4 8 times as "
        "many, each with its host time.",
        "free host: without the dispatcher's time and the slowdown of rows, which were fitted to LAER-MoE's program.",
    )
    return Sheet("SIMULATED beside published: Megatron, seconds of an iteration", rows, notes)


# --- what the simulator has to be better than -----------------------------------------------------------------

GROWTHS = tuple(np.arange(0.0, 4.05, 0.05).tolist())
OVERHEADS_MS = tuple(np.arange(0.0, 31.0, 1.0).tolist())
# Errors of seconds, and of speed-ups over FSDP+EP.
Errors = tuple[list[float], list[float]]


def row_errors(seconds: Mapping[str, float], rows: Iterable[PublishedRow]) -> Errors:
    """Returns the relative errors of one number per method against all ``rows``."""
    of_seconds, of_speed_ups = [], []
    for row in rows:
        of_seconds += [seconds[method] / row.seconds[method] - 1 for method in METHODS]
        speed_ups = ((seconds["FSDP+EP"] / seconds[method], row.fsdp_ep_s / row.seconds[method]) for method in METHODS)
        of_speed_ups += [ours / published - 1 for ours, published in list(speed_ups)[1:]]
    return of_seconds, of_speed_ups


@dataclass(frozen=True)
class ClosedForm:
    """Seconds of an iteration as a sum over passes: experts times max/mean, attention, an all-to-all and an overhead.

    growth: the factor of max/mean - 1 of the published log of tokens. overhead_ms: per pass of a layer.
    """

    growth: float
    overhead_ms: float

    def seconds(self, shape: str, constants: Constants = laer.CONSTANTS) -> dict[str, float]:
        """Returns the seconds of each method; of ``constants`` it uses only the measured ones."""
        model = laer.model_of(shape)
        rows = laer.TOKENS * model.layer.top_k
        experts_s = float(expert_seconds(rows, model.layer, constants.cluster, backward=False))
        rest = model.rest_of_step(replace(constants, dispatcher_ms=0.0), communication_optimized=True)
        rows_s = rows * model.layer.row_bytes * (7 / 8) / (constants.intra_node_gb_per_s * 1e9)
        fixed_s = float(rest.other_seconds) + rows_s + self.overhead_ms * 1e-3
        logged = laer.LOGGED_MAX_OVER_MEAN[shape.rpartition("-")[2]]
        passes_s = {method: experts_s * (1 + self.growth * (logged[method] - 1)) + fixed_s for method in METHODS}
        return {method: rest.optimizer_seconds + model.num_passes * of for method, of in passes_s.items()}


def fitted_closed_form(shape: str, rows: Sequence[PublishedRow]) -> ClosedForm:
    """Returns the form with the least root mean square error of seconds and speed-ups, which weigh the same."""

    def square(form: ClosedForm) -> float:
        return sum(float(np.mean(np.square(of))) for of in row_errors(form.seconds(shape), rows))

    return min((ClosedForm(*of) for of in product(GROWTHS, OVERHEADS_MS)), key=square)


def copied_row_errors(shape: str, rows: Sequence[PublishedRow] = laer.ROWS) -> Errors:
    """Returns the errors of copying each row of ``shape`` from the same model's row on the other data set."""
    found: Errors = ([], [])
    for row in laer.published_rows(shape, rows):
        other = next(
            of for of in rows if (of.model, of.aux_loss) == (row.model, row.aux_loss) and of.dataset != row.dataset
        )
        for errors, of_row in zip(found, row_errors(other.seconds, [row]), strict=True):
            errors += of_row
    return found
