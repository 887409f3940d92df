"""When something happened: on the host, or on a GPU, where the host only says what is to happen."""

from __future__ import annotations

import time

import torch

# µs of the monotonic clock, which all processes of a machine share; or an event on the stream that was current.
Moment = float | torch.cuda.Event


class Clock:
    """Of one kind of device. On a GPU a moment is when its stream comes there, and to read it is to wait for that."""

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"

    @staticmethod
    def host_us() -> float:
        """The host's clock."""
        return time.perf_counter_ns() / 1000

    def now(self) -> Moment | None:
        """This moment; None while a CUDA graph is captured, which happens at no time."""
        if not self._on_gpu:
            return self.host_us()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def is_past(moment: Moment) -> bool:
        """Whether it can be read without waiting."""
        return isinstance(moment, float) or moment.query()

    @staticmethod
    def ms_between(start: Moment, end: Moment) -> float:
        """Milliseconds between two moments of one device."""
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
