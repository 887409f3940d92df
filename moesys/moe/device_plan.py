"""The plan of a micro-batch whose counts the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.step import LayerPlan, plan_layer


@dataclass(frozen=True)
class DevicePlan:
    """One rank's plan, of which only ``tokens_E`` int64 [E] is needed to compute; that lies where it was counted."""

    strategy: Strategy
    shape: ModelShape
    cluster: ClusterSpec
    layout: ExpertLayout
    turn: int
    tokens_E: Tensor

    def read(self) -> LayerPlan:
        """The plan on the host, which waits for the device."""
        load = LoadMatrix(self.tokens_E[None].cpu().numpy())
        return plan_layer(self.strategy, self.shape, self.cluster, load, layout=self.layout, turn=self.turn)
