"""Lookahead: what the layers of a linked model know of each other, and what a layer does that is not linked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from moesys.moe.call import LayerCall, Neighbours
from moesys.moe.expert_store import ExpertStore
from moesys.moe.shards import Cross

if TYPE_CHECKING:
    from moesys.overlap.mega_executor import MegaHome

PLAN_TIMEOUT_S = 60.0


class SharedMegaHome:
    """Where MegaKernels meet, made when the first one runs; the layers of a linked model take turns on one."""

    def __init__(self) -> None:
        self._home: MegaHome | None = None

    def get(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> MegaHome:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.mega_executor import MegaHome

        if self._home is None:
            self._home = MegaHome(group, device, timeout_s)
        return self._home

    def check(self) -> None:
        """Waits for the device. Raises as ``MegaHome.check``."""
        if self._home is not None:
            self._home.check()


class Lookahead(Protocol):
    """What a layer's call asks of its surroundings, in this order: forward ``enter`` and ``entered``; backward
    ``behind_backward``, ``delay`` and ``after_backward``.

    ``plan_timeout_s``: how long a rank waits for layouts that are due. ``generation``: that of the newest call.
    """

    plan_timeout_s: float
    generation: int
    mega_home: SharedMegaHome

    def enter(self, store: ExpertStore) -> Neighbours:
        """A layer begins a micro-batch."""

    def entered(self, call: LayerCall) -> None:
        """The call of the layer that began."""

    def behind_backward(self, call: LayerCall) -> None:
        """A layer's output gradients have been dispatched: what waited for that may travel behind its experts."""

    def delay(self, store: ExpertStore, cross: Cross) -> bool:
        """Whether a gradient is sent home later, by ``cross``, and added to ``.grad`` from here."""

    def after_backward(self) -> None:
        """A layer's backward is through."""


class NoLookahead:
    """Of a layer that is not linked: it plans and restores on demand, and nothing travels behind other layers."""

    plan_timeout_s = PLAN_TIMEOUT_S

    def __init__(self) -> None:
        self.mega_home, self.generation = SharedMegaHome(), 0

    def enter(self, store: ExpertStore) -> Neighbours:
        return Neighbours()

    def entered(self, call: LayerCall) -> None:
        """Nobody comes after it."""

    def behind_backward(self, call: LayerCall) -> None:
        """Nothing waits."""

    def delay(self, store: ExpertStore, cross: Cross) -> bool:
        return False

    def after_backward(self) -> None:
        """Nothing is on its way."""


class Link:
    """A layer's lookahead of the moment. Backward asks for it anew: a graph that kept a closed runtime would keep all
    of its layers, in circles that Python's collector cannot see.
    """

    def __init__(self) -> None:
        self._none = NoLookahead()
        self.lookahead: Lookahead = self._none

    @property
    def linked(self) -> bool:
        return self.lookahead is not self._none

    def cut(self) -> None:
        """The layer is on its own again."""
        self.lookahead = self._none
