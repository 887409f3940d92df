"""MegaKernels write down when each of their tasks ran: all of them, in the order that they need, and no bit changes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import moesys as ms
from moesys.kernels.mega.tasks import TaskTimes
from moesys.moe.store import RestoredExperts
from moesys.overlap.comm.record import Recorder, SpanRecord, stage
from moesys.timeline import Timeline

H, I, TILE, COLUMNS = 40, 24, 16, 32
TOKENS = (19, 5)
SIZES = {"tile_rows": TILE, "tile_columns": COLUMNS, "fetch_rows": TILE, "sum_tokens": TILE}
OVERLAPS = {
    "fused": ms.MegaKernel(**SIZES),
    "one launch after another": ms.MegaKernel(**SIZES, fused="none", overlap_weight_gradients=False),
    "pushes apart, whole experts": ms.MegaKernel(**SIZES, combine_share=0.5, granularity="expert", deduplicate=True),
}


@dataclass(frozen=True)
class Step:
    """One rank's forward and backward: what was recorded, as it was and as a timeline; what came out; who had what."""

    records: list[SpanRecord]
    timeline: Timeline
    results: list[torch.Tensor]
    rows_of_expert: dict[int, int]


def step(overlap: ms.MegaKernel, num_experts: int, record_spans: bool, late_s: float = 0.0) -> Step:
    """``late_s``: rank 1 has its experts by so much later."""
    rank = dist.get_rank()
    shape = ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=num_experts, top_k=2)
    # Three experts in four slots, or two in two.
    sharding = ms.Fsep(slots_per_rank=-(-num_experts // 2))
    layer = ms.MoELayer(shape, ms.Strategy(name="mega", sharding=sharding, overlap=overlap))
    runtime = ms.link(layer, record_spans=record_spans)
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(TOKENS[rank], H, generator=generator, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        stacked = RestoredExperts.stacked
        patch.setattr(RestoredExperts, "stacked", lambda self: (time.sleep(late_s * rank), stacked(self))[1])
        y_TH = layer(x_TH)
        y_TH.backward(torch.randn(y_TH.shape, generator=generator))
    records = [record for read in runtime.recorder._later for record in read()]
    # Read once, so here what the timeline would add.
    runtime.recorder._later = [lambda: records] if record_spans else runtime.recorder._later
    held, plan = layer.last_plan.layout.held_by_rank[rank], layer.last_plan.tokens
    rows_of_expert = {expert: int(plan.tokens_RER[:, expert, rank].sum()) for expert in held}
    timeline = runtime.timeline()
    runtime.close()
    results = [y_TH.detach(), x_TH.grad, layer.router.weight.grad, layer.experts.masters.grad.to_local()]
    return Step(records, timeline, results, rows_of_expert)


def both_ways(overlap: ms.MegaKernel) -> tuple[Step, Step]:
    return step(overlap, 3, record_spans=True), step(overlap, 3, record_spans=False)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in [*OVERLAPS][:2]), [*OVERLAPS][2]]
)
def test_every_task_is_recorded_once_and_no_bit_changes(ranks, name):
    overlap = OVERLAPS[name]
    for rank, (recorded, plain) in enumerate(ranks.run(both_ways, overlap, num_ranks=2)):
        tasks = Counter((record.detail.split(",")[0], record.kind) for record in recorded.records)
        assert {key: count for key, count in tasks.items() if key[1] != "wait"} == expected_tasks(
            overlap, recorded.rows_of_expert, TOKENS[rank]
        )
        assert all(map(torch.equal, recorded.results, plain.results))
        assert plain.timeline.spans == ()


def expected_tasks(overlap: ms.MegaKernel, rows_of_expert: dict[int, int], tokens: int) -> dict[tuple[str, str], int]:
    row_tiles = sum(-(-rows // TILE) for rows in rows_of_expert.values())
    hidden, narrow, halved = -(-H // COLUMNS), -(-I // COLUMNS), -(-2 * I // COLUMNS)
    expected = Counter()
    for launch, columns in (("dispatch_up", halved), ("dispatch_activation_gradient", narrow)):
        expected[launch, "fetch"] = row_tiles
        expected[launch, "product"] = row_tiles * columns
    for launch in ("down_combine", "input_gradient_combine"):
        expected[launch, "product"] = row_tiles * hidden
        expected[launch, "sum"] = -(-tokens // TILE) * hidden
        expected[launch, "push"] = row_tiles * (overlap.combine_share > 0 or overlap.fused == "none")
    tiles_of_expert = -(-2 * I // TILE) * hidden + -(-H // TILE) * narrow
    outer_products = len(rows_of_expert) * tiles_of_expert * overlap.overlap_weight_gradients
    expected["input_gradient_combine", "outer_product"] = outer_products
    return {key: count for key, count in expected.items() if count}


def test_tasks_run_in_the_order_that_they_need(ranks):
    # Two experts of each token, each on one rank: every sum is of both ranks' rows, and one flag stands for an expert.
    overlap = ms.MegaKernel(tile_columns=64, granularity="expert")
    recorded = ranks.run(step, overlap, 2, True, 0.3, num_ranks=2)
    for this in recorded:
        lane_end_us = 0.0
        for record in this.records:
            assert record.start_us >= lane_end_us
            assert record.end_us >= record.start_us
            lane_end_us = record.end_us
        for product in of(this, "product", "dispatch_up"):
            fetches = of(this, "fetch", product.detail)
            assert fetches
            assert product.start_us >= max(fetch.end_us for fetch in fetches)
        for launch in ("down_combine", "input_gradient_combine"):
            assert of(this, "sum", launch)
            last_push_us = max(push.start_us for peer in recorded for push in of(peer, "product", launch))
            assert min(record.start_us for record in of(this, "sum", launch)) >= last_push_us
    # Who waits is seen: the rank whose peer came late, in its first sum.
    waits = [record for record in recorded[0].records if (record.kind, record.detail) == ("wait", "sum, down_combine")]
    assert waits[0].end_us - waits[0].start_us > 0.1e6


def of(recorded: Step, kind: str, detail: str) -> list[SpanRecord]:
    return [record for record in recorded.records if record.kind == kind and record.detail.startswith(detail)]


def test_what_no_program_wrote_is_no_task():
    times = TaskTimes()
    records = times.of_launch("dispatch_up", 3, torch.device("cpu"))
    records[1] = torch.tensor([2, 5, 7, 1_000, 2_000, 4_000])
    (task,) = times.read()
    assert task == ("dispatch_up", 1, "product", 5, 7, 1.0, 2.0, 4.0)
    assert times.read() == []


def test_spans_that_come_later_are_read_when_they_are_asked_for():
    recorder = Recorder(0, enabled=True)
    asked = []
    recorder.add_later(lambda: asked.append(1) or [SpanRecord("program 000", "sum", 1.0, 2.0, "")])
    assert asked == []
    assert [span.kind for span in recorder.timeline().spans] == ["sum"]
    assert len(recorder.timeline().spans) == len(asked) == 1
    recorder.add_later(lambda: [SpanRecord("program 000", "sum", 3.0, 4.0, "")])
    recorder.clear()
    assert recorder.timeline().spans == ()


def test_stages_are_nothing_where_no_gpu_is():
    with stage("dispatch and up", torch.device("cpu")) as entered:
        assert entered is None
