"""Overlap is real: spans show communication in flight while experts compute.

Tests ask what is in flight beside what, and never how long anything takes: that is what benchmarks are for. So that no
busy machine decides, nobody hears of a transfer until somebody waits for it, and experts take as long as whatever is in
flight needs to arrive by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Stack
from torch.futures import Future

import moesys as ms
from benchmarks.harness.paced_link import PacedLink
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.runtime import MoERuntime
from moesys.overlap.comm import channel
from moesys.overlap.comm.channel import Messages
from moesys.timeline import Span, Timeline

SHAPE = ms.ModelShape(hidden_size=64, intermediate_size=128, num_experts=4, top_k=2)
NUM_TOKENS = 256
NUM_CHUNKS = 4
ARRIVAL_TIMEOUT_S = 30.0
TOKENS_GB_PER_S, EXPERTS_GB_PER_S = 1e-2, 2e-2

EP = ms.Strategy(name="ep")
FSEP = EP.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=2))
# Rank 0 lends experts 0 and 1, and rank 1 lends 2.
LENT = EP.replace(name="lent", sharding=ms.Ep(slots_per_rank=3))


@dataclass(frozen=True)
class Step:
    """What one rank recorded of one micro-batch."""

    forward: Timeline
    backward: Timeline


class HeldTransfer:
    """A transfer under way, which is done when somebody waits for it; a ``dist.Work`` as far as channels need one."""

    def __init__(self, work: Messages) -> None:
        self._work = work
        work.get_future()
        self._future: Future[None] = Future()

    def wait(self) -> bool:
        self._work.wait()
        self._future.set_result(None)
        return True

    def get_future(self) -> Future[None]:
        return self._future

    def arrive(self) -> None:
        """Returns when its bytes are there, which takes nobody's help."""
        until_s = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not self._work.is_completed():
            assert time.monotonic() < until_s, "what is in flight does not arrive while experts compute"
            time.sleep(0.001)


@contextmanager
def held_transfers(runtime: MoERuntime) -> Iterator[None]:
    """All-to-alls are held, and experts compute until those that are in flight have arrived."""
    transfers: list[HeldTransfer] = []
    send, span = channel.exchange, runtime.recorder.span

    def held(*arguments: Any, **options: Any) -> HeldTransfer:
        transfers.append(HeldTransfer(send(*arguments, **options)))
        return transfers[-1]

    @contextmanager
    def until_arrived(lane: str, kind: str, detail: str = "") -> Iterator[None]:
        with span(lane, kind, detail):
            if kind == "experts":
                for transfer in transfers:
                    transfer.arrive()
            yield

    with mock.patch.object(channel, "exchange", held), mock.patch.object(runtime.recorder, "span", until_arrived):
        yield


def step(strategy: ms.Strategy, num_layers: int) -> Step:
    """Forward and backward of layers, with transfers held."""
    model = Stack(SHAPE, strategy, num_layers)
    runtime = ms.link(model, record_spans=True)
    with held_transfers(runtime):
        return recorded_step(model, runtime)


def paced_step(strategy: ms.Strategy) -> Step:
    """Forward and backward of one layer whose tokens and experts travel over two paced links."""
    model = Stack(SHAPE, strategy, 1)
    runtime = ms.link(model, record_spans=True)
    links = [PacedLink(dist.group.WORLD, pace) for pace in (TOKENS_GB_PER_S, EXPERTS_GB_PER_S)]
    for experts in runtime.layers:
        experts.token_channel.link, experts.store.channel.link = links
    recorded = recorded_step(model, runtime)
    for link in links:
        link.close()
    return recorded


def recorded_step(model: Stack, runtime: MoERuntime) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(NUM_TOKENS, SHAPE.hidden_size, generator=generator, requires_grad=True)

    def recorded() -> Timeline:
        timeline = runtime.timeline()
        runtime.recorder.clear()
        return timeline

    # The first forward teaches the runtime the order of the layers.
    with torch.no_grad():
        model(x_TH[:1])
    recorded()
    y_TH = model(x_TH)
    forward = recorded()
    y_TH.sum().backward()
    backward = recorded()
    runtime.close()
    return Step(forward, backward)


def experts_in_order(timeline: Timeline) -> list[Span]:
    """Spans of experts: of every chunk where the model has one layer, of every layer where it has one chunk."""
    return sorted(timeline.of("experts"), key=lambda span: span.start_us)


def in_flight(timeline: Timeline, lane: str, number: int, during: Span) -> bool:
    """Whether a transfer of this chunk (of this layer, for experts) was under way while ``during`` ran."""
    spans = [span for span in timeline.of(lane) if span.detail.split()[-1] == str(number)]
    assert spans, f"no {lane} of {number}: {sorted({span.detail for span in timeline.of(lane)})}"
    return any(span.overlaps(during) for span in spans)


def both_ways(results: list[Step]) -> list[tuple[str, Timeline]]:
    return [
        (f"{direction} of rank {rank}", getattr(result, direction))
        for rank, result in enumerate(results)
        for direction in ("forward", "backward")
    ]


def test_chunks_travel_while_others_are_computed(ranks: LocalRanks) -> None:
    results = ranks.run(step, EP.replace(overlap=ms.Pipelined(chunks=NUM_CHUNKS)), 1, num_ranks=2)
    for where, timeline in both_ways(results):
        direction = where.split()[0]
        experts = experts_in_order(timeline)
        assert [span.detail for span in experts] == [f"{direction} {chunk}" for chunk in range(NUM_CHUNKS)]
        for chunk, span in enumerate(experts):
            if chunk + 1 < NUM_CHUNKS:
                assert in_flight(timeline, "dispatch", chunk + 1, span), f"{where}: dispatch {chunk + 1}"
            if chunk > 0:
                assert in_flight(timeline, "combine", chunk - 1, span), f"{where}: combine {chunk - 1}"
    for rank, result in enumerate(results):
        (weight_gradients,) = result.backward.of("weight_gradients")
        assert in_flight(result.backward, "combine", NUM_CHUNKS - 1, weight_gradients), f"rank {rank}: the last chunk"


def test_sequential_computes_experts_while_nothing_travels(ranks: LocalRanks) -> None:
    for where, timeline in both_ways(ranks.run(step, EP, 1, num_ranks=2)):
        (experts,) = timeline.of("experts")
        travelling = [span for lane in ("dispatch", "combine") for span in timeline.of(lane)]
        assert len(travelling) >= 2
        assert not [span for span in travelling if span.overlaps(experts)], where


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetched and delayed"])
@pytest.mark.parametrize("strategy", [FSEP, LENT], ids=lambda strategy: strategy.name)
def test_experts_and_their_gradients_travel_behind_other_layers(
    ranks: LocalRanks, strategy: ms.Strategy, ahead: bool
) -> None:
    num_layers, sharding = 3, strategy.sharding.replace(prefetch_layers=int(ahead), delay_reshard=ahead)
    results = ranks.run(step, strategy.replace(sharding=sharding), num_layers, num_ranks=2)
    for rank, result in enumerate(results):
        forward = experts_in_order(result.forward)
        backward = experts_in_order(result.backward)[::-1]
        assert len(forward) == len(backward) == num_layers
        for layer in range(num_layers - 1):
            told = f"rank {rank}, layers {layer} and {layer + 1}"
            assert in_flight(result.forward, "restore", layer + 1, forward[layer]) == ahead, told
            if sharding.reshard_after_forward:
                assert in_flight(result.backward, "restore", layer, backward[layer + 1]) == ahead, told
            else:
                assert not result.backward.of("restore"), told
            assert in_flight(result.backward, "reshard", layer + 1, backward[layer]) == ahead, told


def test_timelines_of_ranks_merge(ranks: LocalRanks) -> None:
    strategy = FSEP.replace(overlap=ms.Pipelined(chunks=2))
    results = ranks.run(paced_step, strategy, num_ranks=2)
    # Making a timeline checks that no lane does two things at once.
    merged = Timeline((span for _, timeline in both_ways(results) for span in timeline.spans), "measured")
    for rank in (0, 1):
        kinds = {span.kind for span in merged.spans if span.rank == rank}
        assert kinds == {"counts", "restore", "dispatch", "experts", "combine", "weight_gradients", "reshard"}
    # One clock for all ranks: a transfer has begun on every rank before it ends on any.
    for zero, one in zip(merged.of("dispatch", 0), merged.of("dispatch", 1), strict=True):
        assert zero.detail == one.detail
        assert zero.overlaps(one)
