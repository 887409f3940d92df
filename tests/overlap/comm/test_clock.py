"""On a GPU times are of its streams: told by events, read when somebody asks, and never by the host's clock."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from moesys.config import Fsep, ModelShape
from moesys.moe.pulled_experts import PulledExperts
from moesys.moe.store import ExpertTransfer
from moesys.overlap.comm import channel as channels
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import DeviceClock, Meter, Recorder
from moesys.timeline import Timeline


class Gpu:
    """A stream whose host runs ahead of it: ``does`` is what it is given, ``reaches`` how far it has come."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given_ms = self.reached_ms = 0.0
        self.capturing, self.waits = False, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.device = torch.device("cuda", 0)

            def record(self) -> None:
                assert not gpu.capturing
                self.at_ms = gpu.given_ms

            def query(self) -> bool:
                return self.at_ms <= gpu.reached_ms

            def synchronize(self) -> None:
                gpu.waits += not self.query()
                gpu.reached_ms = max(gpu.reached_ms, self.at_ms)

            def elapsed_time(self, end: Event) -> float:
                assert self.query()
                assert end.query()
                return end.at_ms - self.at_ms

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr("moesys.overlap.comm.record.torch.cuda.device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def does(self, ms: float) -> None:
        self.given_ms += ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def still_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock stands still: what takes time takes the GPU's."""
    monkeypatch.setattr(DeviceClock, "host_us", staticmethod(lambda: 1e6))


@pytest.mark.parametrize("ended", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_messages_keep_their_order_whichever_thread_reports_first(ended: tuple[int, ...]) -> None:
    recorder = Recorder(rank=0, enabled=True)
    issued_us, reported_us = (1.0, 2.0, 30.0), (10.0, 20.0, 40.0)
    for when, message in enumerate(ended):
        recorder.add("restore", "restore", issued_us[message], reported_us[when], f"layer {message}")
    spans = recorder.timeline().spans
    assert [span.detail for span in spans] == ["layer 0", "layer 1", "layer 2"]
    assert spans == recorder.timeline().spans, "asking twice tells the same"
    if ended == (0, 1, 2):
        assert [(span.start_us, span.end_us) for span in spans] == [(1, 10), (10, 20), (30, 40)]
    before = recorder.timeline()
    recorder.clear()
    recorder.add("restore", "restore", 35.0, 50.0, "issued before")
    (later,) = recorder.timeline().spans
    assert (later.start_us, later.end_us) == (40.0, 50.0), "its lane was busy, as what was told before says"
    assert len(Timeline([*before.spans, *recorder.timeline().spans], "measured").spans) == 4


@pytest.mark.usefixtures("still_host")
def test_meters_count_the_streams_time(gpu: Gpu) -> None:
    meter = Meter("cuda")
    with meter.exposed("dispatch"):
        gpu.does(3.0)
    with meter.planning():
        gpu.does(0.5)
    with meter.exposed("dispatch"):
        gpu.does(4.0)
    assert gpu.waits == 0, "the host goes on"
    assert (dict(meter.exposed_ms), meter.plan_ms) == ({"dispatch": 7.0}, 0.5)
    assert gpu.waits > 0
    meter.clear()
    assert (dict(meter.exposed_ms), meter.plan_ms) == ({}, 0.0)


def test_what_has_happened_is_read_without_waiting(gpu: Gpu) -> None:
    meter = Meter("cuda")
    for _ in range(100):
        with meter.exposed("combine"):
            gpu.does(1.0)
        gpu.reached_ms = gpu.given_ms - 2.5
    assert len(meter._unread) <= 4
    assert gpu.waits == 0
    assert sum(meter.exposed_ms.values()) == 100.0


def test_nothing_happens_while_a_graph_is_captured(gpu: Gpu) -> None:
    meter, gpu.capturing = Meter("cuda"), True
    with meter.planning():
        gpu.does(1.0)
    assert meter.plan_ms == 0.0


@pytest.mark.usefixtures("still_host")
def test_spans_are_when_the_stream_did_it(gpu: Gpu) -> None:
    recorder = Recorder(2, enabled=True, device_type="cuda")
    gpu.does(1.0)
    with recorder.span("compute", "experts", "forward 0"):
        gpu.does(5.0)
    assert gpu.waits == 0
    gpu.does(2.0)
    (span,) = recorder.timeline().spans
    # The host's clock says 1e6 µs when 8 ms have been done.
    assert (span.rank, span.lane, span.kind, span.detail) == (2, "compute", "experts", "forward 0")
    assert (span.start_us, span.end_us) == pytest.approx((1e6 - 7000, 1e6 - 2000))


@pytest.mark.usefixtures("still_host")
def test_a_message_ends_where_its_own_stream_does(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls back at once, on a stream that is as far as the message; the stream that waits may come later."""
    meter, recorder = Meter("cuda"), Recorder(0, enabled=True, device_type="cuda")
    channel = Channel(None, [0], recorder, meter, "cuda")
    channel.group = SimpleNamespace()  # type: ignore[assignment]

    class Work:
        def get_future(self) -> Any:
            future: Future[None] = Future()
            gpu.does(6.0)
            future.set_result(None)
            return future

        def wait(self) -> None:
            gpu.does(0.25)

    monkeypatch.setattr(channels, "exchange", lambda *_: Work())
    rows = torch.zeros(1, 1)
    transfer = channel.all_to_all(rows, rows, [1], [1], lane="dispatch", detail="forward 0")
    gpu.does(10.0)
    transfer.wait()
    assert dict(meter.exposed_ms) == {"dispatch": 0.25}
    (span,) = recorder.timeline().spans
    assert span.end_us - span.start_us == pytest.approx(6000)


@pytest.mark.usefixtures("still_host")
def test_a_pull_ends_where_its_own_stream_does(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring's stream has done it while what computes goes on."""
    streams: list[object] = []

    def on(stream: object) -> nullcontext[None]:
        streams.append(stream)
        return nullcontext()

    class Ring:
        stream = "its own"

        def start(self, *_: object) -> SimpleNamespace:
            gpu.does(6.0)
            return SimpleNamespace(wait=lambda: gpu.does(0.25))

    monkeypatch.setattr(torch.cuda, "stream", on)
    experts = PulledExperts(
        ModelShape(hidden_size=2, intermediate_size=2, num_experts=2, top_k=1), 0, [0], Fsep(slots_per_rank=2), None, 1
    )
    channel = Channel(None, [0], Recorder(0, enabled=True, device_type="cuda"), Meter("cuda"), "cuda")
    pull = experts._pull(Ring(), torch.zeros(1), [], torch.zeros(1), channel, "restore", "layer 0")  # type: ignore[arg-type]
    transfer = ExpertTransfer(pull)
    gpu.does(10.0)
    transfer.finish()
    (span,) = channel.recorder.timeline().spans
    assert (span.lane, span.detail, span.end_us - span.start_us) == ("restore", "layer 0", pytest.approx(6000))
    assert streams == ["its own"]
    assert dict(channel.meter.exposed_ms) == {"restore": 0.25}


def test_hosts_clocks_are_what_they_were() -> None:
    meter, recorder = Meter(), Recorder(0, enabled=True)
    with meter.exposed("dispatch"), recorder.span("compute", "experts"):
        pass
    (span,) = recorder.timeline().spans
    assert 0 <= span.end_us - span.start_us <= 1000 * meter.exposed_ms["dispatch"]
