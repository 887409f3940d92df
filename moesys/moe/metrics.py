"""Metrics of one layer: its loads, its traffic, waiting and planning, and where its values are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.balance.plan import LayerPlan
from moesys.load import IntArray
from moesys.moe.planners import PlanReader
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
    def of(cls, plan: LayerPlan) -> LayerLoad:
        return cls(plan.tokens.max_over_mean, plan.load.tokens_E)


class NonFiniteValue(NamedTuple):
    """NaN or infinity in the values of a layer; ``what`` names them."""

    layer: int
    micro_batch: int
    what: str


class FiniteChecks:
    """The checks of a rank's layers for NaN and infinity, in the order in which they were made. None waits for the
    device before ``first`` is called.
    """

    def __init__(self) -> None:
        self._checks: list[tuple[NonFiniteValue, Tensor]] = []

    def add(self, layer: int, micro_batch: int, what: str, *tensors: Tensor) -> None:
        finite = [tensor.detach().isfinite().all() for tensor in tensors]
        self._checks.append((NonFiniteValue(layer, micro_batch, what), torch.stack(finite).all()))

    def first(self) -> NonFiniteValue | None:
        """Returns the first one that failed, and forgets them all; None if all values are finite."""
        checks, self._checks = self._checks, []
        if not checks:
            return None
        # One copy, because the host waits for each. Parameters may be on another device than what a layer computes.
        device = checks[0][1].device
        finite = torch.stack([finite.to(device) for _, finite in checks]).tolist()
        return next((value for (value, _), is_finite in zip(checks, finite, strict=True) if not is_finite), None)

    def clear(self) -> None:
        self._checks.clear()


class LoadLog:
    """The loads of a layer's training micro-batches since they were last taken, for ``Watch``, and checks of the
    values that were computed in them.

    A plan that lies on a device is read when it is taken, so that no micro-batch waits for it.
    """

    def __init__(self, checks: FiniteChecks) -> None:
        self._loads: list[LayerLoad | PlanReader] = []
        self._checks = checks

    def add(self, plan: LayerPlan | PlanReader) -> None:
        self._loads.append(LayerLoad.of(plan) if isinstance(plan, LayerPlan) else plan)

    def check(
        self, layer: int, micro_batch: int, x_TH: Tensor, weight_TK: Tensor, masters: Sequence[Tensor], y_TH: Tensor
    ) -> None:
        """Checks the values of a micro-batch, and in backward the gradient of its output."""
        self._checks.add(layer, micro_batch, "the input", x_TH)
        self._checks.add(layer, micro_batch, "the routing weights", weight_TK)
        if len(self._loads) == 1:
            # Parameters change between steps only.
            self._checks.add(layer, micro_batch, "the parameters of experts", *masters)
        self._checks.add(layer, micro_batch, "the output", y_TH)
        if y_TH.requires_grad:
            checks = self._checks
            y_TH.register_hook(lambda dy_TH: checks.add(layer, micro_batch, "the gradient of the output", dy_TH))

    def take(self) -> list[LayerLoad]:
        """Returns them in their order. Waits for the device."""
        loads, self._loads = self._loads, []
        return [load if isinstance(load, LayerLoad) else LayerLoad.of(load()) for load in loads]

    def clear(self) -> None:
        self._loads.clear()
