"""The clocks of simulated ranks, and the simulated step that they give: a timeline, and what its length follows from.

The critical path of a step is a chain of blocks from its start to its end, each of which began when the one before it
ended. The step is shortened only by shortening one of them. The simulator records what each block waited for; nothing
is inferred from times.

R ranks, N nodes, L links as in ``cost.LinkLoad``. Times in seconds, except for the blocks of a timeline, which are in
microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray, LinkLoad
from moesys.display import Columns, Display, by_column
from moesys.load import IntArray
from moesys.simulator.links import ChannelName, Flow, Links, links_of_ranks
from moesys.simulator.mega_pass import MegaPass
from moesys.timeline import Block, Timeline

# The kinds of spans on the lane ``compute``.
COMPUTED_KINDS = ("experts", "weight_gradients", "gather", "sum", "other", "optimizer")
# The name of what a rank waits for if an all-to-all has not begun: the ranks that have not reached it yet.
SLOWER_RANKS = "slower ranks"


class Lanes:
    """The clocks of all ranks, and what has happened until then.

    copy_share: the share of its computing rate that a rank loses while its messages move. latency_seconds: the time
    before the first byte of every all-to-all of rows, experts or gradients, in addition to the cluster's latency.

    now_R: the time of each rank. waited_R: seconds [R] that each rank waited, by what it waited for. moved_L: seconds
    of each link at full rate, by lane. other_domains_R: the part of the waiting for slower ranks that was for ranks
    with which the all-to-all exchanges no messages. layer: the layer that ranks run, None outside of layers. spent_R:
    seconds [R] that each rank computed or waited, by layer and kind. suffix: added to the detail of every block.
    """

    def __init__(self, cluster: ClusterSpec, copy_share: float, latency_seconds: float = 0.0) -> None:
        self.cluster, self._copy_share, self._latency_seconds = cluster, copy_share, latency_seconds
        self.suffix = ""
        self.now_R = np.zeros(cluster.num_ranks)
        self.waited_R: dict[str, FloatArray] = {}
        self.other_domains_R = np.zeros(cluster.num_ranks)
        self.moved_L: dict[str, FloatArray] = {}
        self.layer: int | None = None
        self.spent_R: dict[int | None, dict[str, FloatArray]] = {}
        self._links = Links(cluster)
        # The number of the event that each rank has waited for last.
        self._cause_R = np.full(cluster.num_ranks, START)
        self._events: list[Event] = []
        self._newest_of: dict[ChannelName, int] = {"tokens": START, "weights": START}
        self._drawn: list[Block | AllToAll] = []

    # --- computing ------------------------------------------------------------------------------------------

    def compute(self, seconds_R: FloatArray | float, kind: str, detail: str) -> None:
        """Lets each rank compute for so many seconds, or longer while its messages move."""
        detail += self.suffix
        end_R = self._end_of_work(np.broadcast_to(seconds_R, self.now_R.shape))
        if (end_R > self.now_R).any():
            self._drawn.append(_block("compute", kind, detail, self.now_R, end_R))
            self.spend(kind, end_R - self.now_R)
            self._work(kind, detail, end_R, np.arange(len(end_R)))

    def run_fused(self, found: MegaPass, load: LinkLoad, detail: str) -> None:
        """Runs a pass of a layer whose kernels compute and move rows at once. Each rank ends when it would by itself,
        or when its rows have moved over links that other transfers use as well.
        """
        detail += self.suffix
        # Rows that have moved before the last rank began do not move again.
        transfer = self._put("tokens", "mega_kernel", self._in_time(load, found.end_R), detail)
        for computed in found.computed:
            # Rounding lets sums of many terms end slightly outside of the pass.
            start_R, end_R = (np.clip(at_R, self.now_R, found.end_R) for at_R in (computed.start_R, computed.end_R))
            self._drawn.append(_block("compute", computed.kind, detail, start_R, end_R))
            self.spend(computed.kind, end_R - start_R)
        self._drawn.append(_block("mega_kernel", "mega_kernel", detail, self.now_R, found.end_R))
        for moved in found.moved:
            self._drawn.append(_block(moved.kind, moved.kind, detail, moved.start_R, moved.end_R))
            self._count_moved(moved.kind, moved.link_seconds_L)
        busy_R = sum((computed.end_R - computed.start_R for computed in found.computed), np.zeros_like(self.now_R))
        self._count_waited("mega_kernel", found.end_R - self.now_R - busy_R)
        self._work("mega_kernel", detail, found.end_R, found.waited_for_R)
        self.wait(transfer)

    def _in_time(self, load: LinkLoad, end_R: FloatArray) -> LinkLoad:
        """Limits a load to what moves between now and the end of each rank on links that nothing else uses."""
        room_R, link_4R = np.maximum(end_R - self.now_R.max(), 0.0), links_of_ranks(self.cluster)
        room_L = np.full(len(load.seconds_L), np.inf)
        np.minimum.at(room_L, link_4R[load.used_4R], np.broadcast_to(room_R, link_4R.shape)[load.used_4R])
        return LinkLoad(np.minimum(load.seconds_L, room_L), load.used_4R)

    def _work(self, kind: str, detail: str, end_R: FloatArray, by_R: np.ndarray) -> None:
        work = Computing(len(self._events), kind, detail, self.now_R, end_R, self._cause_R, by_R)
        self._cause_R = np.where(end_R > self.now_R, work.number, self._cause_R)
        self._events.append(work)
        self.now_R = end_R

    def _end_of_work(self, seconds_R: FloatArray) -> FloatArray:
        """Returns when computing that begins now ends: a rank loses ``copy_share`` while its messages move."""
        moving = self._links.if_nothing_follows() if self._copy_share else []
        start_FR = np.array([np.full(len(end_R), start) for start, end_R in moving]).reshape(-1, len(seconds_R))
        end_FR = np.array([end_R for _, end_R in moving]).reshape(-1, len(seconds_R))
        at_R, left_R = self.now_R, seconds_R
        for until_R in np.sort(np.concatenate([start_FR, end_FR]), axis=0):
            if (until_R <= at_R).all():
                continue
            if not left_R.any():
                break
            until_R = np.maximum(until_R, at_R)
            beside_R = ((start_FR <= at_R) & (at_R < end_FR)).any(axis=0)
            rate_R = np.where(beside_R, 1 - self._copy_share, 1.0)
            # Compared and not subtracted: a remainder from rounding would last until the messages have moved.
            through_R = left_R / rate_R <= until_R - at_R
            end_R = np.where(through_R, at_R + left_R / rate_R, until_R)
            left_R = np.where(through_R, 0.0, left_R - (until_R - at_R) * rate_R)
            at_R = end_R
        return at_R + left_R

    # --- moving ---------------------------------------------------------------------------------------------

    def send(self, channel: ChannelName, lane: str, load: LinkLoad, detail: str) -> AllToAll:
        """Issues an all-to-all of rows, experts or gradients, which begins when every rank has reached it."""
        return self._send(channel, lane, load, detail, self._latency_seconds)

    def message(self, lane: str, load: LinkLoad, detail: str) -> AllToAll:
        """Issues an all-to-all of a few numbers between the ranks of ``load``, as messages without bytes."""
        return self._send("tokens", lane, load.messages(), detail, 0.0)

    def wait(self, transfer: AllToAll) -> None:
        """Lets every rank go on when its own messages have moved."""
        end_R = self._links.end_of(transfer.flow)
        begun_R = np.clip(transfer.flow.start, self.now_R, np.maximum(end_R, self.now_R))
        self._count_waited(SLOWER_RANKS, begun_R - self.now_R)
        self.other_domains_R += begun_R - np.clip(transfer.needed_R, self.now_R, begun_R)
        self._count_waited(transfer.lane, end_R - begun_R)
        self._cause_R = np.where(end_R > self.now_R, transfer.number, self._cause_R)
        self.now_R = np.maximum(self.now_R, end_R)

    def _send(self, channel: ChannelName, lane: str, load: LinkLoad, detail: str, latency_seconds: float) -> AllToAll:
        transfer = self._put(channel, lane, load, detail + self.suffix, latency_seconds)
        self._drawn.append(transfer)
        self._count_moved(lane, load.seconds_L)
        return transfer

    def _put(
        self, channel: ChannelName, lane: str, load: LinkLoad, detail: str, latency_seconds: float = 0.0
    ) -> AllToAll:
        last = int(self.now_R.argmax())
        issued, number = float(self.now_R[last]), len(self._events)
        flow = self._links.issue(channel, issued, load, latency_seconds)
        behind = self._newest_of[channel]
        if load.used_4R.any():
            self._newest_of[channel] = number
        cause, needed_R = int(self._cause_R[last]), self._needed_R(load)
        transfer = AllToAll(number, flow, lane, detail, issued, last, cause, behind, needed_R)
        self._events.append(transfer)
        return transfer

    def _needed_R(self, load: LinkLoad) -> FloatArray:
        domain_R = np.zeros_like(self.now_R, dtype=int)
        if not load.used_4R[2:].any():
            domain_R = np.asarray(self.cluster.domain_of_rank)
        last_D = np.zeros(domain_R[-1] + 1)
        np.maximum.at(last_D, domain_R, self.now_R)
        return last_D[domain_R]

    # --- what has happened ----------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks of the timeline, in order on each lane."""
        for drawn in self._drawn:
            block = drawn if isinstance(drawn, Block) else self._block(drawn)
            if (block.end_us_R > block.start_us_R).any():
                yield block

    def critical_path(self) -> tuple[PathPart, ...]:
        """Returns the critical path to the rank that ends last."""
        last = int(self.now_R.argmax())
        return walk_back(self._events, int(self._cause_R[last]), last, float(self.now_R[last]), self.cluster)

    def _block(self, transfer: AllToAll) -> Block:
        end_R = self._links.end_of(transfer.flow)
        start_R = np.full(len(end_R), transfer.flow.start)
        return _block(transfer.lane, transfer.lane, transfer.detail, start_R, np.where(end_R < start_R, np.nan, end_R))

    def _count_moved(self, lane: str, seconds_L: FloatArray) -> None:
        self.moved_L[lane] = self.moved_L.get(lane, 0.0) + seconds_L

    def _count_waited(self, kind: str, seconds_R: FloatArray) -> None:
        self.waited_R[kind] = self.waited_R.get(kind, 0.0) + np.maximum(seconds_R, 0.0)
        self.spend(kind, np.maximum(seconds_R, 0.0))

    def spend(self, kind: str, seconds_R: FloatArray) -> None:
        """Adds seconds of each rank to the current layer."""
        of_layer_R = self.spent_R.setdefault(self.layer, {})
        of_layer_R[kind] = of_layer_R.get(kind, 0.0) + seconds_R


def _block(lane: str, kind: str, detail: str, start_R: FloatArray, end_R: FloatArray) -> Block:
    return Block(lane, kind, detail, 1e6 * start_R, 1e6 * end_R)


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Display):
    """A simulated step: its ``timeline`` of blocks, and what its length follows from.

    forward_R: seconds [R] until each rank has ended the forward of the last micro-batch. forward_waited_R,
        forward_moved_L: the values of ``waited_R`` and ``moved_L`` at that time.
    waited_R: seconds [R] that each rank waited, by the lane of the all-to-all that it waited for, by ``SLOWER_RANKS``
        if that had not begun, and by ``mega_kernel`` inside of MegaKernels. With ``computed_R``, and the time after a
        rank that ends early, they add up to the step.
    moved_L: seconds that each link would have been busy at its full rate, [2·R + 2·N] as in ``LinkLoad``, by lane.
    spent_R: seconds [R] of each rank, by layer (None outside of layers) and by kind: computing as in ``computed_R``,
        and waiting as in ``waited_R``. A rank that ends early waits for slower ranks in the last layer, so that the
        seconds of every rank add up to ``length_seconds``.
    other_domains_R: the part of ``waited_R`` for slower ranks, in seconds [R], that is for ranks of other domains
        although all messages stay inside domains. In a real step these seconds pass in the next collective of all
        ranks.
    """

    cluster: ClusterSpec
    timeline: Timeline
    forward_R: FloatArray
    forward_waited_R: dict[str, FloatArray]
    forward_moved_L: dict[str, FloatArray]
    waited_R: dict[str, FloatArray]
    moved_L: dict[str, FloatArray]
    spent_R: dict[int | None, dict[str, FloatArray]]
    other_domains_R: FloatArray
    _lanes: Lanes

    @property
    def forward_seconds(self) -> float:
        """Seconds until the last rank has ended the forward of the last micro-batch."""
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

    def _facts(self) -> str:
        exposed = f"{exposed_ms(self.timeline):,.3f} ms exposed"
        return f"{self.timeline._facts()}, {exposed}, forward {1e3 * self.forward_seconds:,.3f} ms"

    def _columns(self) -> Columns:
        rows = [
            (rank, layer, kind, 1e3 * seconds)
            for layer, seconds_of in self.spent_R.items()
            for kind, seconds_R in seconds_of.items()
            for rank, seconds in enumerate(seconds_R.tolist())
        ]
        return by_column(("rank", "layer", "kind", "ms"), rows)

    def _shown(self) -> Columns:
        mean_ms = {kind: 1e3 * float(np.mean(by_rank)) for kind, by_rank in (self.computed_R | self.waited_R).items()}
        return {"computing or waiting for": list(mean_ms), "ms, mean of ranks": list(mean_ms.values())}

    @cached_property
    def critical_path(self) -> tuple[PathPart, ...]:
        """The path from the start of the step to its end, without gaps: its seconds add up to ``length_seconds``."""
        return self._lanes.critical_path()


def exposed_ms(timeline: Timeline) -> float:
    """Returns the mean over ranks of the milliseconds in which a rank does not compute until the last rank ends:
    exposed communication, and waiting for slower ranks.
    """
    busy_us = timeline.busy_us("compute")
    return (timeline.length_us - sum(busy_us.values()) / len(busy_us)) / 1000 if busy_us else 0.0


def critical_rank(timeline: Timeline) -> int:
    """Returns the rank that computes longest, the lowest of equals; 0 for an empty timeline."""
    busy_us = timeline.busy_us("compute")
    return min(busy_us, key=lambda rank: (-busy_us[rank], rank), default=0)


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
