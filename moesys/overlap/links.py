"""The links of a simulated cluster: which all-to-all gets how much of which link, and when it ends.

As in the layers of a linked model there are two channels: tokens on one, experts and their gradients on the other. A
channel runs one all-to-all at a time, in the order in which they are issued. An all-to-all of either channel uses many
links at once; where both channels want a link, each gets half of it. It ends, for all ranks, with its last link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesys.cost import FloatArray

ChannelName = Literal["tokens", "weights"]


@dataclass(eq=False)
class Flow:
    """One all-to-all. Times in seconds, settled once ``end`` is there.

    start: when the last rank has issued it, or later, when its channel is free.
    left_L: seconds that each link still needs for it at full rate.
    """

    start: float
    left_L: FloatArray
    end: float | None = None


class Links:
    """Runs flows on two channels. ``latency_seconds``: what every flow takes before its first byte moves."""

    def __init__(self, latency_seconds: float = 0.0) -> None:
        self._latency = latency_seconds
        self._clock = 0.0
        self._queues: dict[ChannelName, deque[Flow]] = {"tokens": deque(), "weights": deque()}

    def issue(self, channel: ChannelName, ready: float, seconds_L: FloatArray) -> Flow:
        """Queue a flow. ``ready`` must not lie before the end of a flow that has been waited for."""
        assert ready >= self._clock
        flow = Flow(ready, seconds_L)
        self._queues[channel].append(flow)
        return flow

    def end_of(self, flow: Flow) -> float:
        """When the flow ends. Everything that is issued later must be ready at that time or later, as when all ranks
        wait for it: then nothing that is still unknown can slow it.
        """
        while flow.end is None:
            self._advance()
        return flow.end

    def _advance(self) -> None:
        """Go to the next time at which a flow begins to move or ends."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        moving = [flow for flow in heads if flow.start + self._latency <= self._clock]
        beginnings = [flow.start + self._latency for flow in heads if flow not in moving]
        ends = [self._clock + seconds for seconds in _seconds_left(moving)]
        until = min([*beginnings, *ends])
        for flow, left_L in zip(moving, _left_after(moving, until - self._clock), strict=True):
            flow.left_L = left_L
        self._clock = until
        for flow, end in zip(moving, ends, strict=True):
            if end <= until:
                flow.end = until
        for queue in self._queues.values():
            if queue and queue[0].end is not None:
                queue.popleft()
                if queue:
                    queue[0].start = max(queue[0].start, until)


def _seconds_left(moving: list[Flow]) -> list[float]:
    """How long each of at most two flows takes from now on. A link with a and b seconds of work for two flows, half of
    it for each while both want it, is through with the first after a + min(a, b).
    """
    if len(moving) < 2:
        return [float(flow.left_L.max()) for flow in moving]
    first, second = moving
    shared_L = np.minimum(first.left_L, second.left_L)
    return [float((flow.left_L + shared_L).max()) for flow in moving]


def _left_after(moving: list[Flow], seconds: float) -> list[FloatArray]:
    """What is left for each link after so many seconds: it gave a flow half of them, or all that the other left."""
    if len(moving) < 2:
        return [np.maximum(flow.left_L - seconds, 0.0) for flow in moving]
    first, second = moving
    return [
        np.maximum(mine.left_L - np.maximum(seconds / 2, seconds - other.left_L), 0.0)
        for mine, other in ((first, second), (second, first))
    ]
