"""Plans of a micro-batch that nobody has read: counts may lie on a device, and experts have numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from moesys.balance.homes import Homes
from moesys.balance.plan import LayerPlan, plan_layer
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix

if TYPE_CHECKING:
    from moesys.overlap.device_routes import RoutedPlan
    from moesys.overlap.device_split import PendingPlan


@dataclass(frozen=True)
class SingleRankPlan:
    """One rank's plan, of which only ``tokens_E`` int64 [E] is needed to compute; that lies where it was counted."""

    strategy: Strategy
    shape: ModelShape
    cluster: ClusterSpec
    layout: ExpertLayout
    turn: int
    tokens_E: Tensor

    def read(self) -> LayerPlan:
        """Returns the plan on the host, which waits for the device."""
        load = LoadMatrix(self.tokens_E[None].cpu().numpy())
        return plan_layer(self.strategy, self.shape, self.cluster, load, layout=self.layout, turn=self.turn)


@dataclass(frozen=True)
class DevicesPlan:
    """The plan of several ranks over ``layout``, which their devices make, in the forward of the micro-batch or before
    it.
    """

    layout: ExpertLayout
    pending: PendingPlan | RoutedPlan

    @property
    def tokens_E(self) -> Tensor:
        """Choices of each expert on all ranks, int64 [E], on the device; from the launch of forward on."""
        return self.pending.wanted_RE().sum(0)

    def load(self) -> LoadMatrix:
        """Returns who wants what. Waits for the device."""
        return LoadMatrix(self.pending.counts_RE())

    def read(self) -> LayerPlan:
        """Returns the plan on the host, as the device made it. Waits for the device."""
        tokens = TokenPlan(self.pending.entries().numpy(), self.load(), self.layout)
        return LayerPlan(tokens, self.pending.turn)


@dataclass(frozen=True)
class UnreadPlan:
    """A plan in the numbers of ``homes``."""

    plan: LayerPlan | SingleRankPlan | DevicesPlan
    homes: Homes

    def read(self) -> LayerPlan:
        """Returns the plan on the host, in the model's ids. May wait for the device."""
        plan = self.plan if isinstance(self.plan, LayerPlan) else self.plan.read()
        return replace(plan, tokens=self.homes.plan_by_id(plan.tokens)) if self.homes.moved else plan
