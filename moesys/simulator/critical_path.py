"""The critical path of a simulated step: a chain of blocks from its start to its end, each of which began when the one
before it ended. The step is shortened only by shortening one of them.

The simulator records what each block waited for; nothing is inferred from times.

R ranks. Times in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.load import IntArray
from moesys.simulator.links import Flow, links_of_ranks

# The value of ``Computing.cause_R`` and ``AllToAll.cause`` if nothing but the start of the step was waited for.
START = -1
LINK_LANES = ("link out", "link in", "NIC out", "NIC in")


@dataclass(frozen=True)
class PathPart:
    """A piece of the critical path.

    rank: the rank that computes or whose link it is; for a NIC, the number of its node.
    lane: ``compute`` or one of ``LINK_LANES``. share: the part of the step's length.
    """

    rank: int
    lane: str
    kind: str
    detail: str
    seconds: float
    share: float

    @property
    def is_of_rank(self) -> bool:
        """This is true if ``rank`` is the number of a rank, and false if it is that of a node."""
        return not self.lane.startswith("NIC")

    @property
    def where(self) -> str:
        """The place in words, such as ``rank 17's link in`` or ``rank 3's experts``."""
        owner = "rank" if self.is_of_rank else "node"
        return f"{owner} {self.rank}'s {self.kind.replace('_', ' ') if self.lane == 'compute' else self.lane}"


@dataclass(frozen=True, eq=False)
class Computing:
    """Computing on all ranks, event ``number``.

    cause_R: number of the event that each rank waited for before it began.
    by_R: the rank whose work each rank waited for at the end; its own number if it waited for none.
    """

    number: int
    kind: str
    detail: str
    start_R: FloatArray
    end_R: FloatArray
    cause_R: IntArray
    by_R: IntArray


@dataclass(frozen=True, eq=False)
class AllToAll:
    """An all-to-all that has been issued, event ``number``.

    issued: when the last rank, ``issued_by``, issued it; that rank had waited for event ``cause``.
    behind: number of the event before it on its channel.
    needed_R: when the last rank issued it with which each rank exchanges messages: of its domain, or of all.
    """

    number: int
    flow: Flow
    lane: str
    detail: str
    issued: float
    issued_by: int
    cause: int
    behind: int
    needed_R: FloatArray


Event = Computing | AllToAll


def walk_back(
    events: Sequence[Event], cause: int, rank: int, length: float, cluster: ClusterSpec
) -> tuple[PathPart, ...]:
    """Returns the path from the start of the step, whose length is ``length``, to the end of event ``cause`` on
    ``rank``.
    """
    parts: list[PathPart] = []
    link_4R, node_R = links_of_ranks(cluster), cluster.node_of_rank

    def add(owner: int, lane: str, event: Event, seconds: float) -> None:
        if seconds > 0:
            kind = event.kind if isinstance(event, Computing) else event.lane
            parts.append(PathPart(owner, lane, kind, event.detail, seconds, seconds / length))

    while cause != START:
        event = events[cause]
        match event:
            case Computing():
                by = int(event.by_R[rank])
                add(by, "compute", event, float(event.end_R[rank] - event.start_R[by]))
                cause, rank = int(event.cause_R[by]), by
            case AllToAll():
                link, end = _last_link(event.flow, rank, link_4R)
                add(rank if link < 2 else node_R[rank], LINK_LANES[link], event, end - event.flow.start)
                if event.flow.start > event.issued:
                    behind = events[event.behind]
                    assert isinstance(behind, AllToAll)
                    assert behind.flow.end_R is not None
                    cause, rank = event.behind, int(behind.flow.end_R.argmax())
                else:
                    cause, rank = event.cause, event.issued_by
    return tuple(reversed(parts))


def _last_link(flow: Flow, rank: int, link_4R: IntArray) -> tuple[int, float]:
    """Returns which of its four links ended last for a rank, and when."""
    assert flow.end_L is not None
    ends_4 = np.where(flow.load.used_4R[:, rank], flow.end_L[link_4R[:, rank]], -np.inf)
    link = int(ends_4.argmax())
    return link, float(ends_4[link])


def by_place(path: Iterable[PathPart]) -> list[tuple[str, float, float]]:
    """Returns (where, seconds, share of the step) of each place on a path, most seconds first."""
    seconds: dict[str, float] = defaultdict(float)
    share: dict[str, float] = defaultdict(float)
    for part in path:
        seconds[part.where] += part.seconds
        share[part.where] += part.share
    return sorted(((where, seconds[where], share[where]) for where in seconds), key=lambda row: -row[1])
