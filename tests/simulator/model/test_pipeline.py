"""Pipelines: published closed forms where all parts are equal, and what holds for any parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.simulator.model.pipeline import PartSeconds, PassSeconds, PipelineRun, Work, run_pipeline

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


LANES = st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda drawn: PassSeconds(*map(float, drawn)))


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(1, 1, 6), (2, 2, 8), (4, 2, 16), (4, 4, 8)])
def test_pairs_of_equal_parts_take_what_both_compute(stages: int, chunks: int, micro_batches: int) -> None:
    """All exchanges but those of warm-up and drain are hidden; a stage holds no forward more."""
    seconds = PartSeconds(2.0, 4.0, 0.0, (PassSeconds(1.0, 1.0), PassSeconds(2.0, 2.0)))
    parts = equal_parts(stages, chunks, seconds)
    plain, found = (run_pipeline(parts, micro_batches, overlap=overlap) for overlap in (False, True))
    total = chunks * micro_batches
    # A stage is so far ahead, and the last one's first forward has come through all stages.
    ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages + 1 if stages > 1 else 1 for stage in range(stages)]
    # A pair takes 4 seconds, for 3 of computing and 6 alone: no less than its backward.
    assert found.spans[0][-1][2] >= 2.0 * ahead[0] + 4.0 * (total - ahead[0]) + 4.0 * ahead[0]
    if stages == 1:
        assert found.seconds == 2.0 + 4.0 * (total - 1) + 4.0
    assert found.seconds < plain.seconds
    assert found.most_held == plain.most_held == tuple(min(each, total) for each in ahead)


@given(forward=LANES, backward=LANES, layers=st.integers(1, 8))
def test_a_pair_is_what_a_simulation_of_both_comes_to(forward: PassSeconds, backward: PassSeconds, layers: int) -> None:
    """Layers compute and then send, each what it comes from its own layer before; one processor, one link. Whoever can
    begin first does. No order is faster than the formula, and this one is slower by a layer of each at most.
    """
    alone = [layers * (lanes.computed + lanes.exchanged) for lanes in (forward, backward)]
    whole = [PassSeconds(layers * lanes.computed, layers * lanes.exchanged) for lanes in (forward, backward)]
    part = PartSeconds(*alone, 0.0, (whole[0], whole[1]))
    found = events([[*forward] * layers, [*backward] * layers])
    formula = part.beside(part)
    assert formula <= found <= formula + sum(forward) + sum(backward)


def events(chains: list[list[float]]) -> float:
    """Chains of computing and sending in turn, on two machines that do one thing at a time."""
    machine, ready, done = [0.0, 0.0], [0.0 for _ in chains], [0 for _ in chains]
    while any(count < len(chain) for count, chain in zip(done, chains, strict=True)):
        # Of what begins first, the chain with most left.
        start, _, which = min(
            (max(machine[done[which] % 2], ready[which]), -sum(chain[done[which] :]), which)
            for which, chain in enumerate(chains)
            if done[which] < len(chain)
        )
        on = done[which] % 2
        machine[on] = ready[which] = start + chains[which][done[which]]
        done[which] += 1
    return max(ready)


@given(
    parts=st.integers(1, 4).flatmap(
        lambda stages: st.integers(2 if stages > 1 else 1, 3 if stages > 1 else 1).flatmap(
            lambda chunks: st.lists(
                st.lists(st.tuples(LANES, LANES), min_size=chunks, max_size=chunks),
                min_size=stages,
                max_size=stages,
            )
        )
    ),
    groups=st.integers(1, 4),
)
def test_pairs_wait_for_what_they_need(parts: list[list[tuple[PassSeconds, PassSeconds]]], groups: int) -> None:
    seconds = [[PartSeconds(sum(f), sum(b), 0.0, (f, b)) for f, b in stage] for stage in parts]
    stages, chunks = len(parts), len(parts[0])
    run = run_pipeline(seconds, groups * stages, overlap=True)
    ends = _ends(run)
    assert len(ends) == 2 * stages * chunks * groups * stages
    for stage, spans in enumerate(run.spans):
        for work, start, end in spans:
            part = stage + stages * work.chunk
            alone = seconds[stage][work.chunk]
            assert end - start >= (alone.forward if work.of == "forward" else alone.backward) - 1e-9
            before = part - 1 if work.of == "forward" else part + 1
            if 0 <= before < stages * chunks:
                assert start >= ends[work.of, before, work.micro_batch] - 1e-9
            if work.of == "backward":
                assert start >= ends["forward", part, work.micro_batch] - 1e-9
    assert 0 <= run.bubble_share < 1


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
