"""Clocks of simulated ranks: what computes and what moves, and what everything waited for.

R ranks, L links as in ``cost.LinkLoad``. Times in seconds, but for the blocks of a timeline.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray, LinkLoad
from moesys.simulator.critical_path import START, AllToAll, Computing, Event, PathPart, walk_back
from moesys.simulator.links import ChannelName, Links, links_of_ranks
from moesys.simulator.mega.layer_pass import MegaPass
from moesys.timeline import Block

# What a rank waits for where an all-to-all has not begun: those that have not come to it yet.
SLOWER_RANKS = "slower ranks"


class Lanes:
    """``now_R``: how far each rank is.

    copy_share: part of its computing that a rank loses while its messages move.
    waited_R: seconds [R] that each rank waited, by what for; moved_L: seconds of each link at full rate, by lane.
    other_domains_R: of the waiting for slower ranks, that for ranks with which the all-to-all has no messages.
    layer: the layer that ranks run, None outside of layers. spent_R: seconds [R] that each rank computed or waited, by
    layer and kind.
    """

    def __init__(self, cluster: ClusterSpec, copy_share: float) -> None:
        self.cluster, self._copy_share = cluster, copy_share
        self.now_R = np.zeros(cluster.num_ranks)
        self.waited_R: dict[str, FloatArray] = {}
        self.other_domains_R = np.zeros(cluster.num_ranks)
        self.moved_L: dict[str, FloatArray] = {}
        self.layer: int | None = None
        self.spent_R: dict[int | None, dict[str, FloatArray]] = {}
        self._links = Links(cluster)
        # What has held up each rank until now, by its number among the events.
        self._cause_R = np.full(cluster.num_ranks, START)
        self._events: list[Event] = []
        self._newest_of: dict[ChannelName, int] = {"tokens": START, "weights": START}
        self._drawn: list[Block | AllToAll] = []

    # --- computing ------------------------------------------------------------------------------------------

    def compute(self, seconds_R: FloatArray | float, kind: str, detail: str) -> None:
        end_R = self._end_of_work(np.broadcast_to(seconds_R, self.now_R.shape))
        if (end_R > self.now_R).any():
            self._drawn.append(_block("compute", kind, detail, self.now_R, end_R))
            self.spend(kind, end_R - self.now_R)
            self._work(kind, detail, end_R, np.arange(len(end_R)))

    def run_fused(self, found: MegaPass, load: LinkLoad, detail: str) -> None:
        """A pass of a layer whose kernels compute and move at once. Beside what else moves, its rows take longer: each
        rank ends when it would alone, or when its rows have moved on links that others want too.
        """
        # What has moved before the last rank began is not moved again.
        transfer = self._put("tokens", "mega_kernel", self._in_time(load, found.end_R), detail)
        for computed in found.computed:
            # Sums of many terms end a rounding beside their own end.
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
        """No more than moves between now and the end of each rank on links that nobody else uses."""
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
        """Of computing that begins now: while messages of a rank move, it loses ``copy_share`` to them."""
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
            # Compared and not subtracted: what a rounding left over would last until the messages have moved.
            through_R = left_R / rate_R <= until_R - at_R
            end_R = np.where(through_R, at_R + left_R / rate_R, until_R)
            left_R = np.where(through_R, 0.0, left_R - (until_R - at_R) * rate_R)
            at_R = end_R
        return at_R + left_R

    # --- moving ---------------------------------------------------------------------------------------------

    def send(
        self, channel: ChannelName, lane: str, load: LinkLoad, detail: str, latency_seconds: float = 0.0
    ) -> AllToAll:
        """Issue an all-to-all, on every rank as soon as it is there."""
        transfer = self._put(channel, lane, load, detail, latency_seconds)
        self._drawn.append(transfer)
        self._count_moved(lane, load.seconds_L)
        return transfer

    def wait(self, transfer: AllToAll) -> None:
        """Every rank goes on when its own messages have moved."""
        end_R = self._links.end_of(transfer.flow)
        begun_R = np.clip(transfer.flow.start, self.now_R, np.maximum(end_R, self.now_R))
        self._count_waited(SLOWER_RANKS, begun_R - self.now_R)
        self.other_domains_R += begun_R - np.clip(transfer.needed_R, self.now_R, begun_R)
        self._count_waited(transfer.lane, end_R - begun_R)
        self._cause_R = np.where(end_R > self.now_R, transfer.number, self._cause_R)
        self.now_R = np.maximum(self.now_R, end_R)

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
        """Of a timeline, lane by lane in order."""
        for drawn in self._drawn:
            block = drawn if isinstance(drawn, Block) else self._block(drawn)
            if (block.end_us_R > block.start_us_R).any():
                yield block

    def critical_path(self) -> tuple[PathPart, ...]:
        """To the rank that is through last."""
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
        """Counts seconds of each rank in the current layer."""
        of_layer_R = self.spent_R.setdefault(self.layer, {})
        of_layer_R[kind] = of_layer_R.get(kind, 0.0) + seconds_R


def _block(lane: str, kind: str, detail: str, start_R: FloatArray, end_R: FloatArray) -> Block:
    return Block(lane, kind, detail, 1e6 * start_R, 1e6 * end_R)
