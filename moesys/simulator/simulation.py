"""A simulated step: its timeline, and what its length follows from.

R ranks, N nodes. Seconds inside, microseconds in the ``Timeline``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.simulator.critical_path import PathPart
from moesys.simulator.lanes import Lanes
from moesys.timeline import Timeline

# Of spans on the lane ``compute``.
COMPUTED_KINDS = ("experts", "weight_gradients", "gather", "sum", "other", "optimizer")


@dataclass(frozen=True, eq=False)
class Simulation:
    """A step: ``timeline`` of blocks, and what its length follows from. ``forward_R``: seconds [R] until each rank was
    through the forward of the last micro-batch. ``forward_waited_R``, ``forward_moved_L``: ``waited_R`` and ``moved_L``
    then.
    """

    cluster: ClusterSpec
    timeline: Timeline
    forward_R: FloatArray
    forward_waited_R: dict[str, FloatArray]
    forward_moved_L: dict[str, FloatArray]
    _lanes: Lanes

    @property
    def forward_seconds(self) -> float:
        """Until the last rank was through the forward of the last micro-batch."""
        return float(self.forward_R.max())

    @property
    def length_seconds(self) -> float:
        return float(self._lanes.now_R.max())

    @cached_property
    def computed_R(self) -> dict[str, FloatArray]:
        """Seconds [R] that each rank computed, by kind."""
        computed_R: dict[str, FloatArray] = {}
        for block in self.timeline.blocks:
            if block.lane == "compute":
                computed_R[block.kind] = computed_R.get(block.kind, 0.0) + 1e-6 * (block.end_us_R - block.start_us_R)
        return computed_R

    @property
    def waited_R(self) -> dict[str, FloatArray]:
        """Seconds [R] that each rank waited, by the lane of what it waited for, as ``SLOWER_RANKS`` where that had not
        begun, and as ``mega_kernel`` inside of one. With ``computed_R``, and the end of a rank that is through early,
        that is all of its step.
        """
        return self._lanes.waited_R

    @property
    def spent_R(self) -> dict[int | None, dict[str, FloatArray]]:
        """Seconds [R] of each rank, by layer (None outside of layers) and by kind: computing as in ``computed_R``, and
        waiting as in ``waited_R``. A rank that is through early waits for slower ranks in the last layer, so that the
        seconds of every rank add up to ``length_seconds``.
        """
        return self._lanes.spent_R

    @property
    def other_domains_R(self) -> FloatArray:
        """Of ``waited_R`` for slower ranks, seconds [R] for ranks of other domains where messages stay inside: in a
        real step they pass in the next collective of all ranks.
        """
        return self._lanes.other_domains_R

    @property
    def moved_L(self) -> dict[str, FloatArray]:
        """Seconds that each link would have been busy at its full rate, [2·R + 2·N] as in ``LinkLoad``, by lane."""
        return self._lanes.moved_L

    @cached_property
    def critical_path(self) -> tuple[PathPart, ...]:
        """From the start of the step to its end without a gap: its seconds add up to ``length_seconds``."""
        return self._lanes.critical_path()


def exposed_ms(timeline: Timeline) -> float:
    """Mean over ranks of the milliseconds in which a rank does not compute, until the last one is done: communication
    that nothing hides, and waiting for slower ranks.
    """
    busy_us = timeline.busy_us("compute")
    return (timeline.length_us - sum(busy_us.values()) / len(busy_us)) / 1000 if busy_us else 0.0


def critical_rank(timeline: Timeline) -> int:
    """The rank that computes longest, for which others wait; the lowest of equals, and 0 of an empty timeline."""
    busy_us = timeline.busy_us("compute")
    return min(busy_us, key=lambda rank: (-busy_us[rank], rank), default=0)
