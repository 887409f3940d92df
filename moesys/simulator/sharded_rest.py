"""Parameters of a model's units that data-parallel ranks shard: gathered one unit ahead, gradients reduced behind.

As FSDP2 does it (``fully_shard`` of torch.distributed.fsdp, ``_fsdp_param_group``): before a unit runs its own gather
is waited for, and that of the next unit is under way; in backward all but kept ones come again; a unit's gradients set
off behind its backward, and all are waited for at the end of backward. On CPUs, whose collectives block, each is waited
for where it is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesys.cost import LinkLoad
from moesys.simulator.critical_path import AllToAll
from moesys.simulator.lanes import Lanes
from moesys.simulator.rest_of_step import RestUnit


class ShardedRest:
    """Of one micro-batch. ``issue``: sends a load on the lane of that name. ``blocks``: nothing is under way beside
    computing.
    """

    def __init__(
        self, units: Sequence[RestUnit], lanes: Lanes, issue: Callable[[str, LinkLoad, str], AllToAll], blocks: bool
    ) -> None:
        self._units, self._lanes, self._issue, self._blocks = units, lanes, issue, blocks
        self._gathers: dict[int, AllToAll | None] = {}
        self._reductions: list[AllToAll] = []

    def before_forward(self, place: int) -> None:
        for one in (place,) if self._blocks else (place, place + 1):
            self._gather(one)
        self._wait(place)

    def before_backward(self, place: int) -> None:
        for one in (place,) if self._blocks else (place, place - 1):
            if one >= 0 and not self._units[one].kept:
                self._gather(one)
        self._wait(place)

    def after_backward(self, place: int) -> None:
        if (reduced := self._units[place].reduced) is not None:
            self._reductions.append(self._issue("reduce_scatter", reduced, f"unit {place}"))
            if self._blocks:
                self.finish()

    def finish(self) -> None:
        while self._reductions:
            self._lanes.wait(self._reductions.pop(0))

    def _gather(self, place: int) -> None:
        """Unless it is under way."""
        if place < len(self._units) and place not in self._gathers:
            load = self._units[place].gathered
            self._gathers[place] = None if load is None else self._issue("all_gather", load, f"unit {place}")

    def _wait(self, place: int) -> None:
        if (gather := self._gathers.pop(place, None)) is not None:
            self._lanes.wait(gather)
