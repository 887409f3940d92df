"""Simulates a step of a whole model: its parts on their ranks, put together by the pipeline's schedule.

Layers with experts run in ``simulator.step_program`` on the ranks of one expert group, as many neighbouring layers at
once as a part of the model has, with the rest of each layer around them and what data-parallel ranks gather on the same
links. Parts then run as the schedule says. Expert groups that hold the same experts draw routing of their own, and wait
for each other at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain

import numpy as np

from moesys.config.model_run import ModelRun
from moesys.config.workload import Recompute
from moesys.cost import LinkLoad, row_product_seconds
from moesys.runnable import out_of_reach, out_of_rows
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import Simulation
from moesys.step import LayerPlan, StepPlan, simulation
from moesys.whole_model.drawn_plans import Routing, drawn_plans, num_draws
from moesys.whole_model.end_of_step import EndOfStep
from moesys.whole_model.exchanges import Ring
from moesys.whole_model.memory import stage_memory
from moesys.whole_model.model_cost import ModelCost, count_model
from moesys.whole_model.model_step import DrawnStep, ModelStep, SimulatedPart, run_parts
from moesys.whole_model.operations import Operations
from moesys.whole_model.parts import split_evenly
from moesys.whole_model.pipeline import PartSeconds
from moesys.whole_model.rest_seconds import RestSeconds, rest_seconds

_RECOMPUTED: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "layers"}
Told = Callable[[str], None]


def simulate_model(
    run: ModelRun, routing: Routing = None, *, draws: int = 4, seed: int = 0, tell: Told = lambda words: None
) -> ModelStep:
    """Simulates a step of ``run``.

    ``routing``: how routers choose. None: every expert gets as many tokens as every other. ``Generated``: drawn, of
    which ``num_layers``, ``tokens_per_rank``, ``steps`` and ``micro_batches`` are the run's own. A ``Trace``: as
    recorded of its layers with experts, planned with the layouts that earlier micro-batches led to. Plans, one of each
    layer with experts: as they ran, such as ``experts.last_plan``. ``draws``: of generated routing, from ``seed`` on;
    of a trace as many newest micro-batches; else there is one. ``tell``: is told how it goes.

    Raises ValueError for a trace or plans of another model, of other ranks, and a trace of other numbers of tokens.
    """
    cost = count_model(run.model, run.seq_len, fp8=run.fp8)
    found = {id(each): rest_seconds(each, run) for each in (cost.embedding, *cost.layers, cost.head)}
    # Neither end runs again.
    first, last = (replace(found[id(each)], again=0.0) for each in (cost.embedding, cost.head))
    rest = _Rest(first, tuple(found[id(each)] for each in cost.layers), last)
    parallel = run.parallelism
    parts = split_evenly(_layer_costs(run, rest), parallel.pipeline * parallel.virtual_stages)
    drawn, against = [], [out_of_reach(run.strategy, run.expert_cluster)]
    count = num_draws(routing, draws)
    for draw, plans in enumerate(drawn_plans(run, routing, draws, seed), 1):
        tell(f"draw {draw} of {count}")
        against.append(out_of_rows(run.strategy, run.shape, plans.values()))
        drawn.append(_drawn_step(run, cost, rest, parts, plans))
    factor = max(draw.max_over_mean for draw in drawn)
    memory = tuple(
        stage_memory(run, cost, parts[stage :: parallel.pipeline], held, stage, factor)
        for stage, held in enumerate(drawn[0].pipeline.most_held)
    )
    return ModelStep(run, tuple(drawn), memory, tuple(dict.fromkeys(filter(None, against))))


@dataclass(frozen=True)
class _Rest:
    """Seconds beside routed experts."""

    embedding: RestSeconds
    layers: tuple[RestSeconds, ...]
    head: RestSeconds

    def around(self, layers: range) -> RestSeconds:
        """Returns those of what comes before the first layer and behind the last, if the part has them."""
        before = self.embedding if layers.start == 0 else RestSeconds()
        return before + (self.head if layers.stop == len(self.layers) else RestSeconds())


def _layer_costs(run: ModelRun, rest: _Rest) -> list[float]:
    """Forward and backward of each layer, rows evenly spread and nothing on its way; ends are with their layers."""
    experts = run.tokens_per_rank * run.shape.top_k * row_product_seconds(run.shape, run.expert_cluster)
    costs = [
        seconds.forward + seconds.backward + seconds.again + (experts if layer.has_experts else 0.0)
        for layer, seconds in zip(run.model.layers, rest.layers, strict=True)
    ]
    costs[0] += rest.embedding.forward + rest.embedding.backward
    costs[-1] += rest.head.forward + rest.head.backward
    return costs


# --- seconds --------------------------------------------------------------------------------------------------------


def _drawn_step(
    run: ModelRun, cost: ModelCost, rest: _Rest, parts: Sequence[range], plans: dict[int, LayerPlan]
) -> DrawnStep:
    stages, end = run.parallelism.pipeline, EndOfStep(run, cost)
    known: dict[tuple[object, ...], SimulatedPart] = {}

    def part_of(layers: range) -> SimulatedPart:
        # Parts that are alike, layer by layer, are one.
        key = (
            *((id(cost.layers[layer]), id(plans.get(layer))) for layer in layers),
            layers.start == 0,
            layers.stop == len(cost.layers),
        )
        if key not in known:
            known[key] = _simulate_part(run, cost, rest, layers, plans)
        return known[key]

    found = tuple(tuple(part_of(layers) for layers in parts[stage::stages]) for stage in range(stages))
    pipeline = run_parts(run, [[part.seconds for part in stage] for stage in found])
    behind = [end.seconds(stage, parts[stage::stages], found[stage]) for stage in range(stages)]
    ends = [pipeline.spans[stage][-1][2] + sum(behind[stage].values()) for stage in range(stages)]
    last = int(np.argmax(ends))
    seconds = ends[last]
    shares: dict[str, float] = {}
    for part in chain.from_iterable(found):
        _add(shares, part.shares, run.num_micro_batches / stages)
    # What the last stage to end does behind its last micro-batch; others wait for it as they wait for micro-batches.
    shares |= behind[last]
    shares["bubble"] = seconds - sum(shares.values())
    tokens = [plan.tokens.max_over_mean for plan in plans.values()]
    return DrawnStep(seconds, shares, float(np.mean(tokens)), pipeline, found, seconds - pipeline.seconds)


def _simulate_part(
    run: ModelRun, cost: ModelCost, rest: _Rest, layers: range, plans: dict[int, LayerPlan]
) -> SimulatedPart:
    recompute = run.parallelism.recompute
    dense = rest.around(layers)
    for layer in layers:
        if layer not in plans:
            dense += rest.layers[layer]
    forward, backward = dense.forward, dense.backward + dense.again
    weight_gradients, moe = dense.weight_gradients, PartSeconds(0.0, 0.0)
    shares = {"rest of layers": forward + backward}
    if routed := [layer for layer in layers if layer in plans]:
        beside = [rest.layers[layer] for layer in routed]
        mean = RestSeconds(*(float(np.mean(each)) for each in zip(*map(astuple, beside), strict=True)))
        step = StepPlan(run.strategy, run.shape, run.expert_cluster, tuple(plans[layer] for layer in routed))
        gathered, reduced = _sharded_loads(run, cost.layers[routed[0]])
        found = simulation(
            [step],
            RestOfStep(
                other_seconds=mean.forward,
                other_backward_seconds=mean.backward,
                other_again_seconds=mean.again,
                recompute=_RECOMPUTED[recompute],
                gathered=gathered,
                reduced=reduced,
            ),
        )
        beside_s = sum(each.forward for each in beside), sum(each.backward + each.again for each in beside)
        of_experts = float(np.mean(found.computed_R.get("weight_gradients", 0.0)))
        seconds = found.forward_seconds, found.length_seconds - found.forward_seconds
        moe = PartSeconds(seconds[0] - beside_s[0], seconds[1] - beside_s[1], of_experts)
        forward, backward = forward + seconds[0], backward + seconds[1]
        weight_gradients += of_experts + sum(each.weight_gradients for each in beside)
        _add(shares, _shares(found))
    host = _host_seconds(run, cost, layers)
    waits = max(0.0, host.forward - forward), max(0.0, host.backward - backward)
    shares["host"] = sum(waits)
    whole = PartSeconds(forward + waits[0], backward + waits[1], weight_gradients)
    return SimulatedPart(whole, moe, host, shares)


def _host_seconds(run: ModelRun, cost: ModelCost, layers: range) -> PartSeconds:
    """Returns what the host takes to start all operations of a part."""
    ends = [cost.embedding] * (layers.start == 0) + [cost.head] * (layers.stop == len(cost.layers))
    within = [cost.layers[layer] for layer in layers]
    forward = sum(len(each.operations) for each in (*ends, *within))
    again = sum(len(each.again(run.parallelism.recompute).operations) for each in within)
    backward = sum(one.backward_kernels for each in (*ends, *within) for one in each.operations)
    return PartSeconds(forward * run.host_us * 1e-6, (again + backward) * run.host_us * 1e-6)


# Of what a simulated rank computes and waits for.
_NAMES = {
    "experts": "experts",
    "weight_gradients": "experts",
    "gather": "rows put in order",
    "sum": "rows put in order",
    "other": "rest of layers",
    "counts": "rows on their way",
    "dispatch": "rows on their way",
    "combine": "rows on their way",
    "restore": "experts on their way",
    "reshard": "experts on their way",
    "all_gather": "dense parameters on their way",
    "reduce_scatter": "dense parameters on their way",
    "mega_kernel": "rows on their way",
}
_SLOWER = "slower ranks"


def _shares(found: Simulation) -> dict[str, float]:
    """Returns mean seconds of a rank, by what it does or waits for; they add up to the length."""
    shares: dict[str, float] = {}
    for kind, seconds_R in (*found.computed_R.items(), *found.waited_R.items()):
        _add(shares, {_NAMES.get(kind, _SLOWER): float(np.mean(seconds_R))})
    _add(shares, {_SLOWER: found.length_seconds - sum(shares.values())})
    return shares


def _add(shares: dict[str, float], more: Mapping[str, float], times: float = 1.0) -> None:
    for name, seconds in more.items():
        shares[name] = shares.get(name, 0.0) + seconds * times


def _sharded_loads(run: ModelRun, layer: Operations) -> tuple[LinkLoad | None, LinkLoad | None]:
    """Returns what a layer's dense parameters, and their gradients, ask of the links where all of them are sharded."""
    if run.parallelism.dense != "full":
        return None, None
    parameters = layer.dense_parameters / run.parallelism.tensor
    ring, group = Ring.of_dense(run), run.expert_cluster
    sizes = (parameters * run.model.bytes_per_element, parameters * run.gradient_bytes)
    gathered, reduced = (ring.load(size, group, run.cluster) for size in sizes)
    return gathered, reduced
