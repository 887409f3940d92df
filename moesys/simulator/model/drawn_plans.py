"""Who goes where in a simulated step of a whole model: the plan of each layer with experts, draw by draw.

R ranks of an expert group, E experts, K top-k, L layers with experts, S micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from moesys.balance.plan import LayerPlan, plan_layer
from moesys.balance.replay import Moment, replay_layer
from moesys.config.model_run import ModelRun
from moesys.config.workload import Generated
from moesys.load import IntArray, LoadMatrix
from moesys.traces import Trace, generate

Routing = Generated | Trace | Sequence[LayerPlan] | None


def num_draws(routing: Routing, draws: int) -> int:
    """Returns how many there are, if ``draws`` are asked for."""
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
            # All of them, as layouts depend on those before.
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
    """Raises ValueError where the trace is of another model or of other ranks."""
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
    """Raises ValueError where plans are of another model or of other ranks."""
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
    """Returns counts [R, E] of which none is more than one above another, of a rank as of an expert."""
    R, E = run.expert_cluster.num_ranks, run.shape.num_experts
    each, left = divmod(run.tokens_per_rank * run.shape.top_k, E)
    turn_RE = (np.arange(E) - left * np.arange(R)[:, None]) % E
    return each + (turn_RE < left).astype(np.int64)
