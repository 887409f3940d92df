"""A lower bound on a step's time by its busiest lane, which rules a point out before it is simulated.

R ranks. It is a bound of the simulated step, whatever the strategy overlaps with what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moesys.balance.plan import LayerPlan, StepPlan
from moesys.cost import (
    ExpertPass,
    FloatArray,
    link_seconds,
    pass_seconds,
    reshard_bytes,
    restore_bytes,
    restores_per_step,
    row_product_seconds,
    rows_of,
)
from moesys.row_traffic import row_traffic


def plan_bound_ms(step: Sequence[StepPlan]) -> float:
    """Returns the milliseconds of the busiest rank between meetings of all ranks, or of the busiest link of all.

    The bound of MegaKernels is lower: they have tiles of their own, and pull a row once for several experts if told to.
    """
    model, cluster, strategy = step[0].model, step[0].cluster, step[0].strategy
    sharding, layers = strategy.sharding, [plan for micro_batch in step for plan in micro_batch.layers]
    fused = strategy.overlap if strategy.overlap.reaches_memory else None
    # Rows that are pulled once for several experts are not counted.
    counted = () if fused and fused.deduplicate else step
    traffic = [[row_traffic(plan.tokens, model, cluster, strategy.overlap) for plan in of.layers] for of in counted]
    loads = [[rows.loads(model, cluster) for rows in rows_L] for rows_L in traffic]
    if fused:
        # At the matmul rate; inside of a MegaKernel it takes longer, by ``fused_rate``.
        rows_R = sum(plan.tokens.tokens_R for plan in layers)
        computing = float(np.max(rows_R)) * row_product_seconds(model, cluster)
    else:
        computing = sum(
            _computing(of, [bool(by_kind["dispatch"].used_4R.any(axis=0).all()) for by_kind in loads_L])
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


def _computing(micro_batch: StepPlan, meets_L: Sequence[bool]) -> float:
    """Returns the seconds of a micro-batch's products."""

    def seconds_R(plan: LayerPlan, backward: bool) -> FloatArray:
        # In whole tiles and waves; chunks would need more of them.
        passes: tuple[ExpertPass, ...] = ("input_gradients", "weight_gradients") if backward else ("forward",)
        rows_RE = rows_of(plan.tokens)
        return np.sum([pass_seconds(rows_RE, micro_batch.model, micro_batch.cluster, of) for of in passes], axis=0)

    return sum(
        float(np.sum([seconds_R(micro_batch.layers[layer], backward) for layer, backward in stretch], axis=0).max())
        for stretch in _stretches(meets_L)
    )


def _stretches(meets_L: Sequence[bool]) -> Iterator[list[tuple[int, bool]]]:
    """Yields the passes of a micro-batch, (layer, whether backward), in order, in lists in which a rank may go on while
    others are still at an earlier pass.

    All ranks exchange counts before a layer's forward. Backward begins with rows that travel: a rank that sends or
    receives rows waits for all, and a rank that does not goes on alone. ``meets_L``: whether every rank has such rows.
    """
    stretch: list[tuple[int, bool]] = []
    forward = [(layer, False) for layer in range(len(meets_L))]
    for layer, backward in [*forward, *((layer, True) for layer, _ in reversed(forward))]:
        if stretch and (not backward or meets_L[layer]):
            yield stretch
            stretch = []
        stretch.append((layer, backward))
    yield stretch
