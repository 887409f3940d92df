"""What a rank records while it runs: spans on lanes, bytes on the wire, milliseconds spent waiting."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from moesys.timeline import Span, Timeline


class Meter:
    """Counters of one layer.

    ``wire_bytes``: received from other ranks, by (lane, "intra_node" or "inter_node").
    ``exposed_ms``: how long the computing thread was blocked by communication, by lane.
    ``plan_ms``: how long it planned.
    """

    def __init__(self) -> None:
        self.wire_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.exposed_ms: dict[str, float] = defaultdict(float)
        self.plan_ms = 0.0

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Count the time inside as planning."""
        start_ns = time.perf_counter_ns()
        yield
        self.plan_ms += (time.perf_counter_ns() - start_ns) / 1e6

    def bytes_of(self, lane: str) -> int:
        return sum(count for (which, _), count in self.wire_bytes.items() if which == lane)

    def clear(self) -> None:
        self.wire_bytes.clear()
        self.exposed_ms.clear()
        self.plan_ms = 0.0


class Record(NamedTuple):
    """What ``Recorder.add`` is told."""

    lane: str
    kind: str
    start_us: float
    end_us: float
    detail: str


class Recorder:
    """Spans of one rank, kept while ``enabled`` is set.

    Times come from the monotonic clock, which all processes of a machine share. Communication threads report
    completions, hence the lock.
    """

    def __init__(self, rank: int, enabled: bool = False) -> None:
        self.rank = rank
        self.enabled = enabled
        self._spans: list[Span] = []
        self._later: list[Callable[[], Iterable[Record]]] = []
        self._lane_end_us: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @staticmethod
    def now_us() -> float:
        return time.perf_counter_ns() / 1000

    def add(self, lane: str, kind: str, start_us: float, end_us: float, detail: str = "") -> None:
        """Record a span. A lane does one thing at a time: what is issued while it is busy starts when it is free."""
        if not self.enabled:
            return
        with self._lock:
            start_us = max(start_us, self._lane_end_us[lane])
            end_us = max(start_us, end_us)
            self._lane_end_us[lane] = end_us
            self._spans.append(Span(self.rank, lane, start_us, end_us, kind, detail))

    @contextmanager
    def span(self, lane: str, kind: str, detail: str = "") -> Iterator[None]:
        start_us = self.now_us()
        yield
        self.add(lane, kind, start_us, self.now_us(), detail)

    def add_later(self, read: Callable[[], Iterable[Record]]) -> None:
        """Spans that are read when the timeline is asked for: to read what a device has recorded is to wait for it."""
        if self.enabled:
            self._later.append(read)

    def timeline(self) -> Timeline:
        later, self._later = self._later, []
        for read in later:
            for record in read():
                self.add(*record)
        with self._lock:
            return Timeline(tuple(self._spans), "measured")

    def clear(self) -> None:
        with self._lock:
            self._spans.clear()
        self._later.clear()


def stage(name: str, device: torch.device) -> AbstractContextManager[object]:
    """What is launched inside, as a range of that name in NVIDIA's profilers; elsewhere nothing."""
    return torch.cuda.nvtx.range(f"moesys {name}") if device.type == "cuda" else nullcontext()
