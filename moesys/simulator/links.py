"""The links of a simulated cluster: how all-to-alls share them, and when each ends on each rank.

As in the layers of a linked model there are two channels: tokens on one, experts and their gradients on the other. A
channel runs one all-to-all at a time, in the order in which they are issued. An all-to-all of either channel uses many
links at once; if both channels use a link, each gets half of it. An all-to-all ends for a rank with the last of the
rank's own links, when the rank has sent and received its own messages, whether or not others still send (the
all-to-alls of NCCL and gloo are messages between pairs). The ranks of a node share its links, and end there together.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray, LinkLoad
from moesys.load import IntArray

ChannelName = Literal["tokens", "weights"]


@dataclass(eq=False)
class Flow:
    """One all-to-all. Times are in seconds; ``end_L`` and ``end_R`` are final once they are not None.

    start: when the last rank has issued it, or later, when its channel is free.
    latency_L: the time from then on until the first byte of each link.
    left_L: seconds that each link still needs for it at full rate. end_L: when each link ended, if nothing is left.
    end_R: when it ends for each rank, found for all at once; -inf for a rank that sends and receives nothing.
    """

    start: float
    load: LinkLoad
    latency_L: FloatArray
    left_L: FloatArray
    end_L: FloatArray | None = None
    end_R: FloatArray | None = None

    def begin_L(self, clock: float) -> FloatArray:
        return np.maximum(self.start + self.latency_L, clock)


class Links:
    """Runs flows on two channels of ``cluster``.

    The latency of a message is ``intra_node_us`` inside a domain, and otherwise ``inter_node_us``; all messages of a
    flow are sent at once.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        R, N = cluster.num_ranks, cluster.num_nodes
        self.cluster = cluster
        self._latency_L = np.repeat(np.array([cluster.intra_node_us, cluster.inter_node_us]) * 1e-6, (2 * R, 2 * N))
        self._link_4R = links_of_ranks(cluster)
        self._clock = 0.0
        self._queues: dict[ChannelName, deque[Flow]] = {"tokens": deque(), "weights": deque()}
        # The result of ``if_nothing_follows``, until a flow is issued or time goes on.
        self._foreseen: list[tuple[float, FloatArray]] | None = None

    def issue(self, channel: ChannelName, ready: float, load: LinkLoad, latency_seconds: float = 0.0) -> Flow:
        """Queues a flow. ``ready`` must not be before the end of a flow that has been waited for. ``latency_seconds``:
        of its messages, in addition to the cluster's. A flow without messages ends at once and delays no other.
        """
        assert ready >= self._clock
        flow = Flow(ready, load, self._latency_L + latency_seconds, load.seconds_L)
        if load.used_4R.any():
            self._queues[channel].append(flow)
            self._foreseen = None
        else:
            flow.end_L, flow.end_R = flow.begin_L(ready), np.full(self.cluster.num_ranks, -np.inf)
        return flow

    def end_of(self, flow: Flow) -> FloatArray:
        """Returns when the flow ends for each rank, [R]. Later flows must not be ready before that time, so that none
        of them slows it; this holds if all ranks wait for the flow.
        """
        while flow.end_R is None:
            self._advance()
        return flow.end_R

    def if_nothing_follows(self) -> list[tuple[float, FloatArray]]:
        """Returns (start, end of each rank) of all flows that have not ended, if no more are issued."""
        if not any(self._queues.values()):
            return []
        if self._foreseen is not None:
            return self._foreseen
        # A flow's arrays are replaced and never changed, so that copies may share them.
        rest = copy(self)
        rest._queues = {name: deque(map(copy, queue)) for name, queue in self._queues.items()}
        flows = [flow for queue in rest._queues.values() for flow in queue]
        ends = [rest.end_of(flow) for flow in flows]
        self._foreseen = [(flow.start, end_R) for flow, end_R in zip(flows, ends, strict=True)]
        return self._foreseen

    def _advance(self) -> None:
        """Advances to the next time at which a flow ends."""
        self._foreseen = None
        heads = [queue[0] for queue in self._queues.values() if queue]
        ends = _ends(heads, self._clock)
        ends_R = [self._ends_of_ranks(flow, end_L) for flow, end_L in zip(heads, ends, strict=True)]
        ends_of_all = [max(flow.start, float(end_R.max())) for flow, end_R in zip(heads, ends_R, strict=True)]
        until = min(ends_of_all)
        left = _left_after(heads, self._clock, until)
        for flow, end_L, end_R, end, left_L in zip(heads, ends, ends_R, ends_of_all, left, strict=True):
            flow.end_L = end_L
            flow.left_L = np.where(end_L <= until, 0.0, left_L)
            if end <= until:
                flow.end_R = end_R
        self._clock = until
        for queue in self._queues.values():
            if queue and queue[0].end_R is not None:
                queue.popleft()
                if queue:
                    queue[0].start = max(queue[0].start, until)

    def _ends_of_ranks(self, flow: Flow, end_L: FloatArray) -> FloatArray:
        return np.where(flow.load.used_4R, end_L[self._link_4R], -np.inf).max(axis=0)


def links_of_ranks(cluster: ClusterSpec) -> IntArray:
    """Returns the four links of each rank, [4, R]: out of the rank and into it, inside its domain; out of its node and
    into it, between domains.
    """
    R, N, node_R = cluster.num_ranks, cluster.num_nodes, np.asarray(cluster.node_of_rank)
    return np.stack([np.arange(R), R + np.arange(R), 2 * R + node_R, 2 * R + N + node_R])


def _ends(heads: list[Flow], clock: float) -> list[FloatArray]:
    """Returns when each link ends each of at most two flows. If both use a link, each has half of it: of a and b
    seconds of work that have both begun, the first ends after a + min(a, b).
    """
    begins = [flow.begin_L(clock) for flow in heads]
    if len(heads) == 1:
        return [_end_of(heads[0], begins[0], begins[0] + heads[0].left_L)]
    both_L = np.maximum(*begins)
    alone = [np.minimum(both_L - begin_L, flow.left_L) for flow, begin_L in zip(heads, begins, strict=True)]
    shared = [flow.left_L - alone_L for flow, alone_L in zip(heads, alone, strict=True)]
    together_L = both_L + np.minimum(*shared)
    return [
        _end_of(flow, begin_L, np.where(shared_L > 0, together_L + shared_L, begin_L + flow.left_L))
        for flow, begin_L, shared_L in zip(heads, begins, shared, strict=True)
    ]


def _end_of(flow: Flow, begin_L: FloatArray, end_L: FloatArray) -> FloatArray:
    """Returns ``end_L``, but the earlier end of links that have ended already."""
    return end_L if flow.end_L is None else np.where(flow.left_L > 0, end_L, flow.end_L)


def _left_after(heads: list[Flow], clock: float, until: float) -> list[FloatArray]:
    """Returns the seconds that are left for each link at ``until``. A flow has a link at full rate while it is alone,
    and at half rate until the other flow ends.
    """
    begins = [flow.begin_L(clock) for flow in heads]
    both_L = np.maximum(*begins) if len(heads) == 2 else np.full_like(begins[0], np.inf)
    shared = []
    for flow, begin_L in zip(heads, begins, strict=True):
        alone_L = np.maximum(np.minimum(both_L, until) - begin_L, 0.0)
        shared.append(np.maximum(flow.left_L - alone_L, 0.0))
    if len(heads) == 1:
        return shared
    together_L = np.maximum(until - both_L, 0.0)
    return [
        np.maximum(mine_L - np.maximum(together_L / 2, together_L - other_L), 0.0)
        for mine_L, other_L in (shared, reversed(shared))
    ]
