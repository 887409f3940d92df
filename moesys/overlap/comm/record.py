"""Records of a rank while it runs: spans on lanes, bytes on the wire, milliseconds spent waiting."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from moesys.timeline import Span, Timeline

# µs of the monotonic clock, which all processes of a machine share; or an event on the stream that was current.
Moment = float | torch.cuda.Event


class DeviceClock:
    """The clock of one kind of device. On a GPU a moment is when the current stream reaches it, for which the
    reader waits.
    """

    def __init__(self, device_type: str) -> None:
        self.on_gpu = device_type == "cuda"

    @staticmethod
    def host_us() -> float:
        """Returns the time of the host's clock."""
        return time.perf_counter_ns() / 1000

    def now(self) -> Moment | None:
        """Returns this moment; None while a CUDA graph is captured, which happens at no time."""
        if not self.on_gpu:
            return self.host_us()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def is_past(moment: Moment) -> bool:
        """Returns whether the moment can be read without waiting."""
        return isinstance(moment, float) or moment.query()

    @staticmethod
    def ms_between(start: Moment, end: Moment) -> float:
        """Returns the milliseconds between two moments of one device."""
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) / 1000
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end)

    def us_of(self, moments: list[Moment]) -> list[float]:
        """Returns them on the host's clock."""
        events = [moment for moment in moments if not isinstance(moment, float)]
        if not events:
            return [moment for moment in moments if isinstance(moment, float)]
        with torch.cuda.device(events[0].device):
            here = torch.cuda.Event(enable_timing=True)
            here.record()
            here.synchronize()
        here_us = self.host_us()
        return [
            moment if isinstance(moment, float) else here_us - 1000 * moment.elapsed_time(here) for moment in moments
        ]


class Meter:
    """Counters of one layer.

    ``wire_bytes``: received from other ranks, by (lane, "intra_node" or "inter_node").
    ``exposed_ms``: how long what computes was blocked by communication, by lane: the thread, or the GPU's stream.
    ``plan_ms``: how long it planned. To read either is to wait for a GPU.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.wire_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._clock = DeviceClock(device_type)
        self._exposed_ms: dict[str, float] = defaultdict(float)
        self._plan_ms = 0.0
        # Intervals that may not have ended yet, in their order: the lane that is waited for, None for planning.
        self._unread: deque[tuple[str | None, Moment, Moment]] = deque()

    def planning(self) -> AbstractContextManager[None]:
        """Measures the time inside as planning."""
        return self.exposed(None)

    @contextmanager
    def exposed(self, lane: str | None) -> Iterator[None]:
        """Measures the time inside as exposed communication on a lane; as planning, if there is none."""
        start = self._clock.now()
        yield
        self._add(lane, start, self._clock.now())

    @property
    def exposed_ms(self) -> dict[str, float]:
        self._read_all()
        return self._exposed_ms

    @property
    def plan_ms(self) -> float:
        self._read_all()
        return self._plan_ms

    def bytes_of(self, lane: str) -> int:
        return sum(count for (which, _), count in self.wire_bytes.items() if which == lane)

    def clear(self) -> None:
        self.wire_bytes.clear()
        self._read_all()
        self._exposed_ms.clear()
        self._plan_ms = 0.0

    def _add(self, lane: str | None, start: Moment | None, end: Moment | None) -> None:
        if start is None or end is None:
            return
        self._unread.append((lane, start, end))
        # Intervals that have ended are read now, so that no later call has to wait for them.
        while self._unread and self._clock.is_past(self._unread[0][2]):
            self._read_one()

    def _read_all(self) -> None:
        while self._unread:
            self._read_one()

    def _read_one(self) -> None:
        lane, start, end = self._unread.popleft()
        took_ms = self._clock.ms_between(start, end)
        if lane is None:
            self._plan_ms += took_ms
        else:
            self._exposed_ms[lane] += took_ms


class SpanRecord(NamedTuple):
    """The arguments of ``Recorder.add``."""

    lane: str
    kind: str
    start_us: float
    end_us: float
    detail: str


class Recorder:
    """Spans of one rank, kept while ``enabled`` is set.

    Times are of the monotonic clock, which all processes of a machine share; where a GPU computes, they are when it did
    what a span is of (``DeviceClock``). Communication threads report completions, hence the lock.
    """

    def __init__(self, rank: int, enabled: bool = False, device_type: str = "cpu") -> None:
        self.rank = rank
        self.enabled = enabled
        self.clock = DeviceClock(device_type)
        self._spans: list[Span] = []
        self._later: list[Callable[[], Iterable[SpanRecord]]] = []
        self._lock = threading.Lock()
        # When the cleared spans of each lane ended, so that later ones do not overlap them.
        self._free_us: dict[str, float] = defaultdict(float)

    def add(self, lane: str, kind: str, start_us: float, end_us: float, detail: str = "") -> None:
        """Records a span, in any order: threads may learn of the end of a message after that of a later one."""
        if self.enabled:
            with self._lock:
                self._spans.append(Span(self.rank, lane, start_us, max(start_us, end_us), kind, detail))

    def add_between(self, lane: str, kind: str, start: Moment | None, end: Moment | None, detail: str = "") -> None:
        """Records a span whose moments may not have come yet."""
        if start is None or end is None:
            return
        if isinstance(start, float) and isinstance(end, float):
            self.add(lane, kind, start, end, detail)
            return

        def read() -> list[SpanRecord]:
            start_us, end_us = self.clock.us_of([start, end])
            return [SpanRecord(lane, kind, start_us, end_us, detail)]

        self.add_later(read)

    def span(self, lane: str, kind: str, detail: str = "") -> AbstractContextManager[None]:
        """Records what runs inside as a span."""
        return self._span(lane, kind, detail) if self.enabled else nullcontext()

    @contextmanager
    def _span(self, lane: str, kind: str, detail: str) -> Iterator[None]:
        start = self.clock.now()
        yield
        self.add_between(lane, kind, start, self.clock.now(), detail)

    def add_later(self, read: Callable[[], Iterable[SpanRecord]]) -> None:
        """Adds spans that are read when the timeline is asked for, because reading a device's records waits for it."""
        if self.enabled:
            self._later.append(read)

    def timeline(self) -> Timeline:
        """Returns all spans. A lane does one thing at a time: what is issued while it is busy starts after that."""
        later, self._later = self._later, []
        for read in later:
            for record in read():
                self.add(*record)
        with self._lock:
            # Spans of a GPU are recorded in the order of its streams, and their times are less exact than this order.
            spans = self._spans.copy() if self.clock.on_gpu else sorted(self._spans)
            free_us = self._free_us.copy()
        for place, span in enumerate(spans):
            start_us = max(span.start_us, free_us[span.lane])
            free_us[span.lane] = end_us = max(start_us, span.end_us)
            spans[place] = replace(span, start_us=start_us, end_us=end_us)
        return Timeline(spans, "measured")

    def clear(self) -> None:
        with self._lock:
            for span in self._spans:
                self._free_us[span.lane] = max(self._free_us[span.lane], span.end_us)
            self._spans.clear()
        self._later.clear()


def stage(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Shows what is launched inside as a range of that name in NVIDIA's profilers; does nothing on other devices."""
    return torch.cuda.nvtx.range(f"moesys {name}") if device.type == "cuda" else nullcontext()
