"""Metrics of one layer: its loads, and its traffic, waiting and planning."""

from __future__ import annotations

from dataclasses import dataclass

from moesys.balance.plan import LayerPlan
from moesys.load import IntArray
from moesys.moe.planners import UnreadPlan
from moesys.overlap.comm.record import Meter


@dataclass(frozen=True)
class LayerMetrics:
    """One layer's newest micro-batch, and its traffic, waiting and planning since metrics were last read.

    ``load_max_over_mean``: the busiest rank's tokens over the mean. ``tokens_E`` over all ranks.
    ``restored_mib``: received by this rank to have its experts. ``exposed_ms``: this rank blocked by communication.
    ``plan_ms``: this rank's planning on the critical path, split and routes, without exchange of counts or waiting.
    """

    layer: int
    micro_batch: int
    load_max_over_mean: float
    tokens_E: tuple[int, ...]
    experts_without_tokens: int
    restored_mib: float
    exposed_ms: float
    plan_ms: float

    @classmethod
    def of(cls, layer: int, plan: LayerPlan, meter: Meter) -> LayerMetrics:
        """Returns the metrics of the micro-batch of ``plan``; ``meter`` has counted since they were last read."""
        tokens_E = plan.load.tokens_E
        return cls(
            layer=layer,
            micro_batch=plan.turn,
            load_max_over_mean=plan.tokens.max_over_mean,
            tokens_E=tuple(tokens_E.tolist()),
            experts_without_tokens=int((tokens_E == 0).sum()),
            restored_mib=meter.bytes_of("restore") / 2**20,
            exposed_ms=sum(meter.exposed_ms.values()),
            plan_ms=meter.plan_ms,
        )


@dataclass(frozen=True)
class LayerLoad:
    """One layer's load in one micro-batch. ``tokens_E`` int64 [E] over all ranks."""

    max_over_mean: float
    tokens_E: IntArray

    @classmethod
    def of(cls, unread: UnreadPlan) -> LayerLoad:
        plan = unread.read()
        return cls(plan.tokens.max_over_mean, plan.load.tokens_E)


class LoadLog:
    """The loads of a layer's training micro-batches since they were last taken, for who watches the layer.

    A plan that lies on a device is read when it is taken, so that no micro-batch waits for it.
    """

    def __init__(self) -> None:
        self._loads: list[LayerLoad | UnreadPlan] = []

    def add(self, unread: UnreadPlan) -> None:
        self._loads.append(LayerLoad.of(unread) if isinstance(unread.plan, LayerPlan) else unread)

    def take(self) -> list[LayerLoad]:
        """Returns them in their order. Waits for the device."""
        loads, self._loads = self._loads, []
        return [load if isinstance(load, LayerLoad) else LayerLoad.of(load) for load in loads]

    def clear(self) -> None:
        self._loads.clear()
