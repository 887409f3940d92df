"""Plans of a micro-batch whose counts the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesys.config import ClusterSpec, MegaKernel, ModelShape, Strategy
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.comm.record import Recorder
from moesys.step import LayerPlan, device_split, plan_layer

if TYPE_CHECKING:
    from moesys.kernels.mega.exchange import Replicas
    from moesys.overlap.device_split import DeviceSplit, PendingPlan
    from moesys.overlap.mega_executor import MegaExecutor, MegaHome


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


@dataclass(frozen=True)
class RanksPlan:
    """The plan of several ranks over ``layout``, which their devices make in the forward of the micro-batch."""

    layout: ExpertLayout
    pending: PendingPlan

    @property
    def tokens_E(self) -> Tensor:
        """Choices of each expert on all ranks, int64 [E], on the device; from the launch of forward on."""
        return self.pending.wanted_RE().sum(0)

    def load(self) -> LoadMatrix:
        """Who wants what. Waits for the device."""
        return LoadMatrix(self.pending.wanted_RE().cpu().numpy())

    def read(self) -> LayerPlan:
        """The plan on the host, as the device made it. Waits for the device."""
        tokens = TokenPlan(self.pending.entries().numpy(), self.load(), self.layout)
        return LayerPlan(tokens, self.pending.turn)


class DevicePlanner:
    """Makes the executors of one layer on one of several ranks, whose forwards plan, as ``plans_on_device`` allows."""

    def __init__(self, strategy: Strategy, shape: ModelShape, cluster: ClusterSpec, rank: int) -> None:
        assert isinstance(strategy.overlap, MegaKernel)
        self._overlap, self._split = strategy.overlap, strategy.split
        self._shape, self._cluster, self._rank = shape, cluster, rank
        # Tables of the newest layout, on the device since it was settled.
        self._tables: tuple[ExpertLayout, DeviceSplit, Replicas] | None = None

    def begin(
        self, home: MegaHome, expert_TK: Tensor, layout: ExpertLayout, turn: int, dtype: torch.dtype, recorder: Recorder
    ) -> tuple[MegaExecutor, RanksPlan]:
        """One micro-batch, number ``turn``. Raises as ``plan_mega_later``."""
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.mega_executor import plan_mega_later, replicas_of

        device = expert_TK.device
        if self._tables is None or self._tables[0] is not layout:
            split = device_split(layout, self._cluster, self._split, device)
            self._tables = layout, split, replicas_of(layout, self._rank, device)
        _, split, replicas = self._tables
        E, H = self._shape.num_experts, self._shape.hidden_size
        executor, pending = plan_mega_later(
            self._overlap, home, expert_TK, E, split, replicas, turn, H, dtype, recorder
        )
        return executor, RanksPlan(layout, pending)
