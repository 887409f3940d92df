"""Simulates a step of a whole model: its parts on their ranks, put together by the pipeline's schedule.

Layers with experts run in ``simulator.step_program`` on the ranks of one expert group, as many neighbouring layers at
once as a part of the model has, with the rest of each layer around them and what data-parallel ranks gather on the same
links. Parts then run as the schedule says. Expert groups that hold the same experts draw routing of their own, and wait
for each other at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from math import inf
from operator import itemgetter

import numpy as np

from moesys.balance.plan import LayerPlan, out_of_rows, plan_layer
from moesys.balance.replay import Moment, replay_layer
from moesys.config import Gqa, MoeMlp
from moesys.config.base import check_type
from moesys.config.model_run import ModelRun
from moesys.config.workload import Generated
from moesys.cost import optimizer_seconds, product_rate, row_product_seconds
from moesys.load import IntArray, LoadMatrix
from moesys.simulator.model.model_step import WAITS, DrawnStep, ModelStep, SimulatedPart, run_parts, simulate_part
from moesys.simulator.model.model_units import MASTER_BYTES, MOMENT_BYTES, Ring, Units, passes_of_sum, stage_memory
from moesys.simulator.rest_of_step import iteration_flops, muon_work
from moesys.traces import Trace, generate


def simulate_model(
    run: ModelRun,
    routing: Routing = None,
    *,
    draws: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda words: None,
) -> ModelStep:
    """Simulates a step of ``run``.

    routing: how routers choose experts. None: every expert gets as many tokens as every other. ``Generated``: drawn;
    ``num_layers``, ``tokens_per_rank``, ``steps`` and ``micro_batches`` are taken from the run. A ``Trace``: as
    recorded in its layers with experts, planned with the layouts that earlier micro-batches led to. Plans, one for each
    layer with experts: as they ran, such as ``experts.last_plan``. draws: of generated routing, the number of seeds
    from ``seed`` on; of a trace, the number of newest micro-batches; other routing is simulated once. tell: called with
    the progress.

    Raises ValueError for a trace or plans of another model or other ranks, and for a trace of other numbers of tokens.
    """
    check_type(ModelRun, run=run)
    if draws < 1:
        raise ValueError(f"draws={draws}; a step is simulated at least once, so use 1 or more")
    units = Units.of(run)
    parallel = run.parallelism
    parts = split_evenly(_layer_costs(run, units), parallel.pp * parallel.vp)
    drawn, against = [], [run.strategy.overlap.out_of_reach(run.expert_cluster)]
    count = num_draws(routing, draws)
    for draw, plans in enumerate(drawn_plans(run, routing, draws, seed), 1):
        tell(f"draw {draw} of {count}")
        against.append(out_of_rows(run.strategy, run.shape, plans.values()))
        drawn.append(_drawn_step(run, units, parts, plans))
    factor = max(draw.max_over_mean for draw in drawn)
    memory = tuple(
        stage_memory(run, units, parts[stage :: parallel.pp], held, factor)
        for stage, held in enumerate(drawn[0].pipeline.most_held)
    )
    return ModelStep(run, tuple(drawn), memory, tuple(dict.fromkeys(filter(None, against))))


def _layer_costs(run: ModelRun, units: Units) -> list[float]:
    """Returns the seconds of forward and backward of each layer if rows are spread evenly and exchanges take no time.
    The embedding and the head count with the layers beside them.
    """
    experts = run.tokens_per_rank * run.shape.top_k * row_product_seconds(run.shape, run.expert_cluster)
    costs = [unit.rest.seconds + (experts if unit.has_experts else 0.0) for unit in units.layers]
    costs[0] += units.embedding.rest.seconds
    costs[-1] += units.head.rest.seconds
    return costs


def _drawn_step(run: ModelRun, units: Units, parts: Sequence[range], plans: dict[int, LayerPlan]) -> DrawnStep:
    stages, end = run.parallelism.pp, EndOfStep(run, units)
    known: dict[tuple[int, ...], SimulatedPart] = {}

    def part_of(layers: range) -> SimulatedPart:
        # Parts whose units and plans are equal are simulated once.
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
        # Exchanges that run with another micro-batch's products are not waited for.
        shares |= {name: share * (1 - min(1.0, hidden / waited)) for name, share in waits.items()}
    shares |= {name: float(np.mean([each[name] for each in behind])) for name in behind[0]}
    shares["bubble"] = max(seconds - sum(shares.values()), 0.0)
    tokens = [plan.tokens.max_over_mean for plan in plans.values()]
    return DrawnStep(seconds, shares, float(np.mean(tokens)), pipeline, found)


def _ends(pipeline_s: Sequence[float], behind: Sequence[dict[str, float]]) -> list[float]:
    """Returns when each stage ends. Stages that sum gradients of tied embeddings begin that together."""
    before = [end + each["gradients and parameters"] for end, each in zip(pipeline_s, behind, strict=True)]
    tied = [stage for stage, each in enumerate(behind) if each["tied embeddings"]]
    meeting = max((before[stage] for stage in tied), default=0.0)
    started = [max(end, meeting) if stage in tied else end for stage, end in enumerate(before)]
    return [end + each["tied embeddings"] + each["optimizer"] for end, each in zip(started, behind, strict=True)]


def split_evenly(costs: Sequence[float], num_parts: int) -> list[range]:
    """Returns neighbouring layers for each part, at least one, so that the costliest part costs least, and of all such
    splits the most even: that with the least sum of squares, as a stage of an interleaved pipeline has several parts.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"num_parts={num_parts} does not fit {len(costs)} layers; use 1 to {len(costs)}")
    until = [0.0, *accumulate(costs)]
    most, _ = _best(until, num_parts, max)
    # Sums over the same layers differ in their last bits.
    limit = most * (1 + 1e-12)
    _, bounds = _best(until, num_parts, lambda squares, cost: squares + cost * cost if cost <= limit else inf)
    return [range(first, end) for first, end in pairwise(bounds)]


def _best(
    until: Sequence[float], num_parts: int, with_part: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Returns the least value of a split, which ``with_part`` makes of the value without its last part and that part's
    cost, and the split: where its parts begin, and the end. ``until``: costs of all layers before each.
    """
    layers = len(until) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for part in range(1, num_parts + 1):
        best = {
            # The first of equal splits, in which the earlier parts hold most.
            end: min(
                (
                    (with_part(value, until[end] - until[first]), [*bounds, end])
                    for first, (value, bounds) in reversed(best.items())
                    if first < end
                ),
                key=itemgetter(0),
            )
            for end in range(part, layers - (num_parts - part) + 1)
        }
    return best[layers]


Routing = Generated | Trace | Sequence[LayerPlan] | None


def num_draws(routing: Routing, draws: int) -> int:
    """Returns how many draws there are, if ``draws`` are asked for."""
    match routing:
        case Generated():
            return draws
        case Trace():
            return min(draws, routing.num_micro_batches)
    return 1


def drawn_plans(run: ModelRun, routing: Routing, draws: int, seed: int) -> Iterator[dict[int, LayerPlan]]:
    """Yields, for each draw, the plan of each layer with experts. ``simulate_model`` says what ``routing`` is."""
    layers = run.model.moe_layers
    match routing:
        case None:
            plan = plan_layer(run.strategy, run.shape, run.expert_cluster, LoadMatrix(_even(run)))
            yield dict.fromkeys(layers, plan)
        case Generated():
            for draw in range(draws):
                trace = _generated(run, routing, seed + draw)
                yield from _replayed(run, trace, [Moment(routing.warmup, routing.warmup)])
        case Trace():
            _check_trace(run, routing)
            # All micro-batches are replayed, as layouts depend on those before.
            past = routing.num_micro_batches - num_draws(routing, draws)
            yield from islice(_replayed(run, routing, None), past, None)
        case _:
            _check_plans(run, routing)
            yield dict(zip(layers, routing, strict=True))


def _generated(run: ModelRun, routing: Generated, seed: int) -> Trace:
    own = {"num_layers": len(run.model.moe_layers), "tokens_per_rank": run.tokens_per_rank}
    routing = routing.replace(**own, steps=1, micro_batches=1)
    return generate(routing, run.expert_cluster.num_ranks, run.shape.num_experts, run.shape.top_k, seed)


def _replayed(run: ModelRun, trace: Trace, moments: Sequence[Moment] | None) -> Iterator[dict[int, LayerPlan]]:
    """Yields the plans of micro-batches at ``moments``, or of all, each with the layouts that history led to."""
    walks = [
        replay_layer(run.strategy, run.shape, run.expert_cluster, tokens_SRE, layer=place, moments=moments)
        for place, tokens_SRE in enumerate(trace.tokens_SLRE.swapaxes(0, 1))
    ]
    for replayed in zip(*walks, strict=True):
        yield {layer: each.plan for layer, each in zip(run.model.moe_layers, replayed, strict=True)}


def _check_trace(run: ModelRun, trace: Trace) -> None:
    """Raises ValueError for a trace of another model or of other ranks."""
    L, R, E = len(run.model.moe_layers), run.expert_cluster.num_ranks, run.shape.num_experts
    for of, count, wanted, way_out in (
        ("layers", trace.num_layers, L, "give a trace of this model"),
        ("experts", trace.num_experts, E, "give a trace of this model"),
        ("source ranks", trace.num_ranks, R, f"use trace.fold({R}) for a multiple of them"),
    ):
        if count != wanted:
            raise ValueError(f"routing has {count} {of}, and the run {wanted} with experts in a group; {way_out}")
    counted_SLR, tokens = trace.tokens_SLRE.sum(axis=-1), run.tokens_per_rank
    if (counted_SLR != tokens * run.shape.top_k).any():
        raise ValueError(
            f"routing has {counted_SLR.min()} to {counted_SLR.max()} choices of a rank, and the run's {tokens} tokens "
            f"have {tokens * run.shape.top_k}; use trace.scaled({tokens})"
        )


def _check_plans(run: ModelRun, plans: Sequence[LayerPlan]) -> None:
    """Raises ValueError for plans of another model or of other ranks."""
    if len(plans) != (layers := len(run.model.moe_layers)):
        raise ValueError(f"routing has plans of {len(plans)} layers, and the run {layers} with experts; give as many")
    wanted = (run.expert_cluster.num_ranks, run.shape.num_experts)
    for place, plan in enumerate(plans):
        if (found := plan.load.tokens_RE.shape) != wanted:
            raise ValueError(
                f"routing[{place}] is a plan of {found[0]} ranks and {found[1]} experts, and the run has {wanted[0]} "
                f"and {wanted[1]}; give plans of this model on these ranks"
            )


def _even(run: ModelRun) -> IntArray:
    """Returns counts [R, E] that differ by at most one, between experts and between ranks."""
    R, E = run.expert_cluster.num_ranks, run.shape.num_experts
    each, left = divmod(run.tokens_per_rank * run.shape.top_k, E)
    turn_RE = (np.arange(E) - left * np.arange(R)[:, None]) % E
    return each + (turn_RE < left).astype(np.int64)


# Bytes per parameter that are read and written besides master and moments: gradient, and copy in the compute dtype.
_GRADIENT_AND_COPY_BYTES = 4 + 2


def update_bytes(optimizer: str) -> int:
    """Returns the bytes of a parameter that its update reads and writes."""
    return 2 * (MASTER_BYTES + MOMENT_BYTES[optimizer]) + _GRADIENT_AND_COPY_BYTES


def muon_seconds(run: ModelRun, chunks: Sequence[range]) -> float:
    """Returns the seconds in which a rank of a stage makes its updates orthogonal, as ``ms.Muon`` divides that: each
    matrix is one rank's work unless all ranks have it, and messages of one layer travel while another is computed.
    Matrices of which several ranks have parts travel to the owner and back, in the compute dtype.
    """
    layers = [run.model.layers[layer] for chunk in chunks for layer in chunk]
    H, parallel = run.model.hidden_size, run.parallelism
    sharded = parallel.dense != "replicated"
    dense_ring = Ring.of_dense(run)
    groups = Ring.of_experts(run).size if sharded else 1
    flops, sent_s, dense_flops, dense_parameters = 0.0, 0.0, 0.0, 0
    for layer in layers:
        sizes = [(each.outputs, each.inputs) for each in layer.attention.products(H).values()]
        if isinstance(layer.attention, Gqa):
            head, kv_heads = layer.attention.head_dim, layer.attention.num_kv_heads
            # Queries, keys and values are apart.
            sizes = [(layer.attention.num_heads * head, H), *[(kv_heads * head, H)] * 2, *sizes[1:]]
        mlp = layer.mlp.shared if isinstance(layer.mlp, MoeMlp) else layer.mlp
        if mlp is not None:
            sizes += [(mlp.products(H)["down"].inputs, H)] * 3
        dense_flops += sum(iteration_flops(*each) for each in sizes)
        dense_parameters += sum(rows * columns for rows, columns in sizes)
        if isinstance(layer.mlp, MoeMlp):
            of_experts = muon_work(run.shape, run.expert_cluster, run.strategy.sharding, own=False, groups=groups)
            flops, sent_s = flops + of_experts[0], sent_s + of_experts[1]
    on_rank = parallel.tp * dense_ring.size if sharded else 1
    flops += dense_flops / on_rank
    if sharded or parallel.tp > 1:
        sent_bytes = dense_parameters * run.model.bytes_per_element / on_rank
        sent_s += 2 * max(dense_ring.busy_seconds(sent_bytes, run.cluster))
    return max(flops / product_rate(run.cluster, backward=False), sent_s)


@dataclass(frozen=True)
class EndOfStep:
    """The work after the last backward pass of a step, on all stages of ``run``."""

    run: ModelRun
    units: Units

    def seconds(self, chunks: Sequence[range], parts: Sequence[SimulatedPart]) -> dict[str, float]:
        """Returns the seconds of a stage after its last backward, by what it does. Gradients are hidden by the backward
        of the last micro-batch and parameters by the forward of the first, bucket by bucket, as far as links are idle.
        """
        run, parallel = self.run, self.run.parallelism
        units = self.units.of_stage(chunks)
        experts = sum(unit.operations.of("experts").parameters for unit in units) / run.groups.expert
        dense = sum(unit.parameters for unit in units) / parallel.tp
        sharded, travelled = parallel.dense != "replicated", parallel.dense == "full"
        # Seconds of links inside domains, and of NICs.
        summed, gathered, updated = np.zeros(2), np.zeros(2), 0.0
        for ring, parameters, done in ((Ring.of_dense(run), dense, travelled), (Ring.of_experts(run), experts, False)):
            updated += parameters / (ring.size if sharded else 1)
            if done:
                continue
            gradients_s = np.array(ring.busy_seconds(parameters * run.gradient_bytes, run.cluster))
            summed += gradients_s * (passes_of_sum(run) if sharded else 2)
            if sharded:
                gathered += ring.busy_seconds(parameters * run.model.bytes_per_element, run.cluster)
        # Nothing hides the gradients of the layer whose backward is last, and the parameters of the first layer.
        layers = sum(map(len, chunks))
        hidden = (layers - 1) / layers
        forward, backward = np.zeros(2), np.zeros(2)
        for part in parts:
            forward += [max(0.0, part.seconds.forward - link.forward) for link in part.busy]
            backward += [max(0.0, part.seconds.backward - link.backward) for link in part.busy]
        shown_s = [float((summed - hidden * backward).max()), float((gathered - hidden * forward).max())]
        update_s = optimizer_seconds(updated * update_bytes(run.optimizer), run.cluster)
        return {
            "gradients and parameters": sum(max(0.0, each) for each in shown_s),
            "tied embeddings": self._tied_seconds(chunks),
            "optimizer": update_s + (muon_seconds(run, chunks) if run.optimizer == "muon" else 0.0),
        }

    def _tied_seconds(self, chunks: Sequence[range]) -> float:
        """Returns the seconds in which the first and the last stage sum the gradients of tied embeddings, after their
        data-parallel ranks have (``finalize_model_grads`` of Megatron-Core).
        """
        run, parallel = self.run, self.run.parallelism
        at_end = chunks[0].start == 0 or chunks[-1].stop == len(self.units.layers)
        if not run.model.tied_embeddings or parallel.pp == 1 or not at_end:
            return 0.0
        held = self.units.embedding.parameters / parallel.tp
        if parallel.dense == "full":
            held /= Ring.of_dense(run).size
        return 2 * max(Ring.of_ends(run).busy_seconds(held * run.gradient_bytes, run.cluster))
