"""Bounds a step's time from below, by its busiest lane: closed forms that rule a point out before it is simulated.

R ranks, E experts, L layers. All are bounds of the simulated step, whatever the strategy hides behind what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moesys.balance.certificate import greatest_bound
from moesys.balance.plan import LayerPlan
from moesys.config import Fsep, Strategy
from moesys.cost import (
    GRADIENT_BYTES,
    ExpertPass,
    FloatArray,
    expert_seconds,
    link_seconds,
    pass_seconds,
    reshard_bytes,
    restore_bytes,
    restores_per_step,
    row_product_seconds,
    rows_of,
)
from moesys.load import LoadMatrix
from moesys.row_traffic import row_traffic
from moesys.tuner.setting import Setting
from moesys.tuner.workload import Step, layers_of


def load_bound_ms(strategy: Strategy, loads: Sequence[LoadMatrix], setting: Setting) -> float:
    """Of a step with these ``loads``, of all its layers and micro-batches, under the best layouts that there are.

    Computing: where ranks meet, the rows that a layer's busiest rank has at least (``balance.greatest_bound``); where
    they do not, and for MegaKernels, whose ranks never do, the mean. Links: an expert is held once at least.
    """
    if strategy.overlap.reaches_memory:
        computing = _compute_seconds(sum(load.total // setting.cluster.num_ranks for load in loads), setting)
    else:
        L = setting.num_layers
        micro_batches = [loads[first : first + L] for first in range(0, len(loads), L)]
        computing = sum(_least_computing(strategy, loads_L, setting) for loads_L in micro_batches)
    return 1000 * max(computing, len(loads) * _sharding_seconds(strategy, setting))


def _least_computing(strategy: Strategy, loads_L: Sequence[LoadMatrix], setting: Setting) -> float:
    """Seconds of a micro-batch's products, whoever holds what."""
    model, cluster = setting.model, setting.cluster
    slots_R = strategy.slots(model, cluster)
    busiest_L = [greatest_bound(load.tokens_E.tolist(), slots_R, (0,) * cluster.num_ranks)[0] for load in loads_L]
    # Who wants more experts than it can hold sends rows under every layout.
    meets_L = [bool(((load.tokens_RE > 0).sum(axis=1) > slots_R).all()) for load in loads_L]
    seconds = 0.0
    for stretch in _stretches(meets_L):
        mean = sum(expert_seconds(loads_L[of].total / cluster.num_ranks, model, cluster, back) for of, back in stretch)
        seconds += max(mean, *(expert_seconds(float(busiest_L[of]), model, cluster, back) for of, back in stretch))
    return seconds


def _stretches(meets_L: Sequence[bool]) -> Iterator[list[tuple[int, bool]]]:
    """The passes of a micro-batch, (layer, whether backward), in order; those together between which a rank may go on
    while others are still at one.

    All exchange counts before a layer's forward. Backward begins with rows that travel: whoever sends or receives some
    waits for all, and who does not goes on alone. ``meets_L``: whether every rank surely does.
    """
    stretch: list[tuple[int, bool]] = []
    forward = [(layer, False) for layer in range(len(meets_L))]
    for layer, backward in [*forward, *((layer, True) for layer, _ in reversed(forward))]:
        if stretch and (not backward or meets_L[layer]):
            yield stretch
            stretch = []
        stretch.append((layer, backward))
    yield stretch


def plan_bound_ms(step: Step) -> float:
    """Of a step whose layouts and splits are known: the busiest rank between meetings, or the busiest link of all.

    Of MegaKernels, which have tiles of their own and pull a row once for several experts if told to, less is sure.
    """
    model, cluster, strategy = step[0].model, step[0].cluster, step[0].strategy
    setting, sharding, layers = Setting(model, cluster, len(step[0].layers)), strategy.sharding, layers_of(step)
    fused = strategy.overlap if strategy.overlap.reaches_memory else None
    # Not of rows that are pulled once for several experts.
    known = () if fused and fused.deduplicate else step
    traffic = [[row_traffic(plan.tokens, model, cluster, strategy.overlap) for plan in of.layers] for of in known]
    loads = [[rows.loads(model, cluster) for rows in rows_L] for rows_L in traffic]
    if fused:
        rows_R = sum(plan.tokens.tokens_R for plan in layers)
        computing = _compute_seconds(float(np.max(rows_R)), setting)
    else:
        computing = sum(
            _computing(of.layers, [bool(by_kind["dispatch"].used_4R.any(axis=0).all()) for by_kind in loads_L], setting)
            for of, loads_L in zip(step, loads, strict=True)
        )
    link_busy = np.zeros(2 * (cluster.num_ranks + cluster.num_nodes))
    # Forward and backward.
    for by_kind in (by_kind for loads_L in loads for by_kind in loads_L):
        link_busy += 2 * sum(load.seconds_L for load in by_kind.values())
    for plan in layers:
        for bytes_RR in restore_bytes(plan.layout, model, cluster, sharding):
            link_busy += restores_per_step(sharding) * link_seconds(bytes_RR, cluster)
        for bytes_RR in reshard_bytes(plan.layout, model, cluster, sharding):
            link_busy += link_seconds(bytes_RR, cluster)
    return 1000 * max(computing, float(link_busy.max()))


def _computing(plans_L: Sequence[LayerPlan], meets_L: Sequence[bool], setting: Setting) -> float:
    """Seconds of a micro-batch's products."""
    return sum(
        float(np.sum([_products_seconds(plans_L[of], setting, back) for of, back in stretch], axis=0).max())
        for stretch in _stretches(meets_L)
    )


def _products_seconds(plan: LayerPlan, setting: Setting, backward: bool) -> FloatArray:
    """Seconds [R] of each rank's products, in whole tiles and waves; in chunks there would be more of them."""
    passes: tuple[ExpertPass, ...] = ("input_gradients", "weight_gradients") if backward else ("forward",)
    rows_RE = rows_of(plan.tokens)
    return np.sum([pass_seconds(rows_RE, setting.model, setting.cluster, of) for of in passes], axis=0)


def _compute_seconds(rows: float, setting: Setting) -> float:
    """Forward and backward, at the matmul rate: inside a MegaKernel it is less, by ``fused_rate``."""
    return rows * row_product_seconds(setting.model, setting.cluster)


def _sharding_seconds(strategy: Strategy, setting: Setting) -> float:
    """A layer's restores and reshard on the busiest way out of a node, where every expert is held by one rank.

    What leaves domains: for each expert held, a slice from every rank outside its holder's domain, and a slice of its
    gradient to each. There are R - g of those at least, g ranks in the largest domain; one node sends its N-th part.
    """
    model, cluster = setting.model, setting.cluster
    if not isinstance(strategy.sharding, Fsep):
        return 0.0
    wire_slice = -(-model.expert_parameters // cluster.num_ranks)
    travels = model.bytes_per_element * restores_per_step(strategy.sharding) + GRADIENT_BYTES
    outside = cluster.num_ranks - max(cluster.domain_sizes)
    out_of_a_node = model.num_experts * wire_slice * outside * travels / cluster.num_nodes
    return out_of_a_node / (cluster.inter_node_gb_per_s * 1e9)
