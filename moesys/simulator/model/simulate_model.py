"""Simulates a step of a whole model: its parts on their ranks, put together by the pipeline's schedule.

Layers with experts run in ``simulator.step_program`` on the ranks of one expert group, as many neighbouring layers at
once as a part of the model has, with the rest of each layer around them and what data-parallel ranks gather on the same
links. Parts then run as the schedule says. Expert groups that hold the same experts draw routing of their own, and wait
for each other at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from moesys.balance.plan import LayerPlan, out_of_rows
from moesys.config.model_run import ModelRun
from moesys.cost import row_product_seconds
from moesys.simulator.model.drawn_plans import Routing, drawn_plans, num_draws
from moesys.simulator.model.end_of_step import EndOfStep
from moesys.simulator.model.memory import stage_memory
from moesys.simulator.model.model_step import DrawnStep, ModelStep, SimulatedPart, run_parts
from moesys.simulator.model.parts import split_evenly
from moesys.simulator.model.simulated_part import WAITS, simulate_part
from moesys.simulator.model.units import Units

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
    if draws < 1:
        raise ValueError(f"draws={draws}; a step is simulated at least once, so use 1 or more")
    units = Units.of(run)
    parallel = run.parallelism
    parts = split_evenly(_layer_costs(run, units), parallel.pipeline * parallel.virtual_stages)
    drawn, against = [], [run.strategy.overlap.out_of_reach(run.expert_cluster)]
    count = num_draws(routing, draws)
    for draw, plans in enumerate(drawn_plans(run, routing, draws, seed), 1):
        tell(f"draw {draw} of {count}")
        against.append(out_of_rows(run.strategy, run.shape, plans.values()))
        drawn.append(_drawn_step(run, units, parts, plans))
    factor = max(draw.max_over_mean for draw in drawn)
    memory = tuple(
        stage_memory(run, units, parts[stage :: parallel.pipeline], held, factor)
        for stage, held in enumerate(drawn[0].pipeline.most_held)
    )
    return ModelStep(run, tuple(drawn), memory, tuple(dict.fromkeys(filter(None, against))))


def _layer_costs(run: ModelRun, units: Units) -> list[float]:
    """Forward and backward of each layer, rows evenly spread and nothing on its way; ends are with their layers."""
    experts = run.tokens_per_rank * run.shape.top_k * row_product_seconds(run.shape, run.expert_cluster)
    costs = [unit.rest.seconds + (experts if unit.has_experts else 0.0) for unit in units.layers]
    costs[0] += units.embedding.rest.seconds
    costs[-1] += units.head.rest.seconds
    return costs


def _drawn_step(run: ModelRun, units: Units, parts: Sequence[range], plans: dict[int, LayerPlan]) -> DrawnStep:
    stages, end = run.parallelism.pipeline, EndOfStep(run, units)
    known: dict[tuple[int, ...], SimulatedPart] = {}

    def part_of(layers: range) -> SimulatedPart:
        # Parts that are alike, unit by unit, are one.
        within = units.of_part(layers)
        routed = [plans[layer].tokens for layer in layers if layer in plans]
        key = tuple(map(id, (*within, *routed)))
        if key not in known:
            known[key] = simulate_part(run, within, routed)
        return known[key]

    found = tuple(tuple(part_of(layers) for layers in parts[stage::stages]) for stage in range(stages))
    pipeline = run_parts(run, [[part.seconds for part in stage] for stage in found])
    behind = [end.seconds(parts[stage::stages], found[stage]) for stage in range(stages)]
    seconds = max(_ends([spans[-1][2] for spans in pipeline.spans], behind))
    shares: dict[str, float] = {}
    for part in chain.from_iterable(found):
        for name, share in part.shares.items():
            shares[name] = shares.get(name, 0.0) + share * run.num_micro_batches / stages
    hidden = sum(shares.values()) - pipeline.seconds * (1 - pipeline.bubble_share)
    waits = {name: share for name, share in shares.items() if name in WAITS}
    if run.parallelism.overlap_micro_batches and hidden > 0 and (waited := sum(waits.values())) > 0:
        # Exchanges beside another micro-batch's products are not waited for.
        shares |= {name: share * (1 - min(1.0, hidden / waited)) for name, share in waits.items()}
    shares |= {name: float(np.mean([each[name] for each in behind])) for name in behind[0]}
    shares["bubble"] = seconds - sum(shares.values())
    tokens = [plan.tokens.max_over_mean for plan in plans.values()]
    return DrawnStep(seconds, shares, float(np.mean(tokens)), pipeline, found, seconds - pipeline.seconds)


def _ends(pipeline_s: Sequence[float], behind: Sequence[dict[str, float]]) -> list[float]:
    """Returns when each stage is through: those that sum gradients of tied embeddings begin that together."""
    before = [end + each["gradients and parameters"] for end, each in zip(pipeline_s, behind, strict=True)]
    tied = [stage for stage, each in enumerate(behind) if each["tied embeddings"]]
    meeting = max((before[stage] for stage in tied), default=0.0)
    started = [max(end, meeting) if stage in tied else end for stage, end in enumerate(before)]
    return [end + each["tied embeddings"] + each["optimizer"] for end, each in zip(started, behind, strict=True)]
