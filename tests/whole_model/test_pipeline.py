"""Pipelines: published closed forms where all parts are equal, and what holds for any parts."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.whole_model.pipeline import PartSeconds, PipelineRun, Work, run_pipeline

SECONDS = st.integers(1, 5).map(float)


def equal_parts(stages: int, chunks: int, seconds: PartSeconds) -> list[list[PartSeconds]]:
    return [[seconds] * chunks] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (4, 8), (8, 32), (5, 3)])
def test_one_forward_one_backward_takes_what_the_paper_says(stages: int, micro_batches: int) -> None:
    """PipeDream-Flush (arXiv 2104.04473): (m + p - 1) times a forward and a backward; stage s holds p - s."""
    run = run_pipeline(equal_parts(stages, 1, PartSeconds(1.0, 2.0)), micro_batches)
    assert run.seconds == 3.0 * (micro_batches + stages - 1)
    assert run.most_held == tuple(min(stages - stage, micro_batches) for stage in range(stages))
    assert run.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(4, 2, 8), (8, 4, 32), (2, 3, 2)])
def test_chunks_divide_the_bubble(stages: int, chunks: int, micro_batches: int) -> None:
    """arXiv 2104.04473, section 2.2: the bubble is (p - 1) / v of a whole stage."""
    run = run_pipeline(equal_parts(stages, chunks, PartSeconds(1.0, 2.0)), micro_batches)
    assert run.seconds == 3.0 * (micro_batches * chunks + stages - 1)
    # Its schedule's warm-up and the forward after it.
    ahead = 2 * (stages - 1) + (chunks - 1) * stages + 1
    assert run.most_held[0] == min(ahead, chunks * micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 32), (4, 30), (16, 64)])
def test_zero_bubble_takes_what_the_paper_says(stages: int, micro_batches: int) -> None:
    """ZB-H1 (arXiv 2401.10241, table 2): a bubble of (p - 1) (F + B - W), here of F = B = W; no stage holds over p."""
    run = run_pipeline(equal_parts(stages, 1, PartSeconds(1.0, 2.0, 1.0)), micro_batches, "zero_bubble")
    assert run.seconds == 3.0 * micro_batches + (stages - 1)
    assert max(run.most_held) == stages


@given(
    parts=st.integers(1, 4).flatmap(
        lambda stages: st.integers(1, 3).flatmap(
            lambda chunks: st.lists(
                st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=chunks, max_size=chunks),
                min_size=stages,
                max_size=stages,
            )
        )
    ),
    groups=st.integers(1, 4),
    zero_bubble=st.booleans(),
    hop_seconds=st.sampled_from([0.0, 0.5]),
)
def test_all_is_done_once_and_in_order(
    parts: list[list[tuple[float, float, float]]], groups: int, zero_bubble: bool, hop_seconds: float
) -> None:
    stages, chunks = len(parts), len(parts[0])
    zero_bubble = zero_bubble and chunks == 1
    seconds = [[PartSeconds(f, b + w, w) for f, b, w in stage] for stage in parts]
    micro_batches = groups * stages
    run = run_pipeline(seconds, micro_batches, "zero_bubble" if zero_bubble else "1f1b", hop_seconds)
    ends = _ends(run)
    kinds = ("forward", "backward", "weight_gradients") if zero_bubble else ("forward", "backward")
    assert len(ends) == sum(map(len, run.spans)) == len(kinds) * stages * chunks * micro_batches
    for stage, spans in enumerate(run.spans):
        for (_, _, end), (_, start, _) in pairwise(spans):
            assert start >= end
        for work, start, end in spans:
            part = stage + stages * work.chunk
            whole = seconds[stage][work.chunk]
            split = whole.weight_gradients if zero_bubble else 0.0
            lasts = {"forward": whole.forward, "backward": whole.backward - split, "weight_gradients": split}
            assert end - start == pytest.approx(lasts[work.of])
            if work.of == "weight_gradients":
                assert start >= ends["backward", part, work.micro_batch]
                continue
            before = part - 1 if work.of == "forward" else part + 1
            if 0 <= before < stages * chunks:
                hop = hop_seconds if stages > 1 else 0.0
                assert start >= ends[work.of, before, work.micro_batch] + hop
            if work.of == "backward":
                assert start >= ends["forward", part, work.micro_batch]
    assert 0 <= run.bubble_share < 1


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5]),
)
def test_the_zero_bubble_is_never_slower(
    parts: list[tuple[float, float, float]], micro_batches: int, hop_seconds: float
) -> None:
    """However uneven stages are, and no stage holds more than the first one of ``1f1b``."""
    seconds = [[PartSeconds(f, b + w, w)] for f, b, w in parts]
    found = run_pipeline(seconds, micro_batches, "zero_bubble", hop_seconds)
    plain = run_pipeline(seconds, micro_batches, "1f1b", hop_seconds)
    assert found.seconds <= plain.seconds + 1e-9
    assert max(found.most_held) <= max(plain.most_held)


def _ends(run: PipelineRun) -> dict[tuple[str, int, int], float]:
    return {
        (work.of, stage + len(run.spans) * work.chunk, work.micro_batch): end
        for stage, spans in enumerate(run.spans)
        for work, _, end in spans
    }


def test_a_slow_stage_sets_the_pace() -> None:
    quick, slow = [PartSeconds(1.0, 2.0)], [PartSeconds(2.0, 4.0)]
    run = run_pipeline([quick, slow, quick], 10)
    # It begins after the first forward, once waits a second for the first gradient, and one backward comes after it.
    assert run.seconds == 1.0 + 10 * 6.0 + 1.0 + 2.0
    assert run.spans[1][0] == (Work("forward", 0, 0), 1.0, 3.0)


def test_what_cannot_be_is_refused() -> None:
    parts = equal_parts(4, 2, PartSeconds(1.0, 2.0))
    with pytest.raises(ValueError, match=re.escape("virtual_stages=2 goes through micro-batches in groups of")):
        run_pipeline(parts, 6)
    with pytest.raises(ValueError, match="schedule='zero_bubble' has one chunk a stage, not 2"):
        run_pipeline(parts, 8, "zero_bubble")
