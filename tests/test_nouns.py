"""The computed nouns: what is always true of them, and what each says when it is not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.timeline import Span, Timeline

LOAD = LoadMatrix([[4, 0, 1], [2, 3, 0]])
LAYOUT = ExpertLayout([[0, 1], [2, 0]], num_experts=3)
PLAN = TokenPlan(np.array([[0, 0, 0, 1], [0, 0, 1, 3], [0, 2, 1, 1], [1, 0, 1, 2], [1, 1, 0, 3]]), LOAD, LAYOUT)


def test_a_span_has_a_length():
    assert (span(2.0, 5.0).duration_us, span(2.0, 2.0).duration_us) == (3.0, 0.0)
    with pytest.raises(ValueError, match=r"span experts on lane compute ends at 1\.0 before it starts"):
        span(2.0, 1.0)


# --- LoadMatrix ---


def test_a_load_counts():
    assert (LOAD.num_ranks, LOAD.num_experts, LOAD.total) == (2, 3, 10)
    assert LOAD.tokens_E.tolist() == [6, 3, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_a_load_takes_any_integers_and_keeps_its_own(dtype):
    given_RE = np.array([[1, 2]], dtype=dtype)
    load = LoadMatrix(given_RE)
    given_RE[0, 0] = 9
    assert load.tokens_RE.dtype == np.int64
    assert load == LoadMatrix([[1, 2]])
    assert load != LoadMatrix([[1, 3]])
    with pytest.raises(ValueError, match="read-only"):
        load.tokens_RE[0, 0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        load.tokens_RE = given_RE


# --- ExpertLayout ---


def test_a_layout_knows_who_holds_what():
    layout = ExpertLayout([[0, 1, 0], [2, EMPTY, EMPTY]], num_experts=3)
    assert (layout.num_ranks, layout.num_slots, layout.num_duplicates) == (2, 3, 1)
    assert layout.replicas_RE.tolist() == [[2, 1, 0], [0, 0, 1]]
    assert layout.filled_R.tolist() == [3, 1]
    assert (layout.experts_of(0), layout.experts_of(1)) == ((0, 1, 0), (2,))
    assert str(layout) == "rank 0: 0 1 0\nrank 1: 2 . ."
    with_none = ExpertLayout([[0, 1], [EMPTY, EMPTY], [0, 1]], num_experts=2)
    assert (with_none.num_duplicates, with_none.experts_of(1)) == (0, ())


def test_layouts_are_equal_by_content():
    same = ExpertLayout(np.array([[0, 1], [2, 0]], dtype=np.int32), num_experts=3)
    assert same == LAYOUT
    assert same.fingerprint() == LAYOUT.fingerprint()
    others = [
        ExpertLayout([[1, 0], [2, 0]], num_experts=3),
        ExpertLayout([[0, 1, 2, 0]], num_experts=3),
        ExpertLayout([[0, 1], [2, 0], [EMPTY, EMPTY]], num_experts=3),
        ExpertLayout([[0, 1], [2, 3]], num_experts=4),
    ]
    assert all(other != LAYOUT for other in others)
    assert len({layout.fingerprint() for layout in [LAYOUT, *others]}) == 5


# --- TokenPlan ---


def test_a_plan_counts():
    assert PLAN.tokens_R.tolist() == [4, 6]
    assert PLAN.max_over_mean == pytest.approx(6 / 5)
    assert PLAN.inter_node_tokens((0, 1)) == 3 + 1 + 3
    assert PLAN.inter_node_tokens((0, 0)) == 0
    assert PLAN.tokens_RER[0].tolist() == [[1, 3], [0, 0], [0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        PLAN.entries[0, 3] = 9


def test_a_plan_for_no_tokens():
    nothing = LoadMatrix(np.zeros((2, 3), int))
    plan = TokenPlan.from_dense(np.zeros((2, 3, 2), int), nothing, LAYOUT)
    assert plan.entries.shape == (0, 4)
    assert (plan.tokens_R.tolist(), plan.max_over_mean, plan.inter_node_tokens((0, 1))) == ([0, 0], 1.0, 0)


@st.composite
def dense_plans(draw):
    """A layout, and tokens only from anywhere to holders: [R, E, R] that sums to some load."""
    R, E, S = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    expert_RS = np.full((R, S + E), EMPTY)
    expert_RS[:, :S] = rng.integers(EMPTY, E, size=(R, S))
    expert_RS[rng.integers(0, R, size=E), S + np.arange(E)] = np.arange(E)
    layout = ExpertLayout(expert_RS, E)
    tokens_RER = rng.integers(0, 4, size=(R, E, R)) * (layout.replicas_RE.T > 0)
    return tokens_RER, LoadMatrix(tokens_RER.sum(axis=2)), layout


@settings(deadline=None)
@given(dense_plans())
def test_dense_and_sparse_plans_are_one(dense):
    tokens_RER, load, layout = dense
    plan = TokenPlan.from_dense(tokens_RER, load, layout)
    assert np.array_equal(plan.tokens_RER, tokens_RER)
    assert plan == TokenPlan(plan.entries, load, layout) == TokenPlan.from_dense(plan.tokens_RER, load, layout)
    assert np.array_equal(plan.tokens_R, tokens_RER.sum(axis=(0, 1)))
    assert plan.tokens_R.dtype == np.int64
    node = np.arange(load.num_ranks) // 2
    assert plan.inter_node_tokens(tuple(node)) == tokens_RER.sum(axis=1)[node[:, None] != node].sum()


def test_plans_are_equal_by_content():
    assert TokenPlan(PLAN.entries, LOAD, ExpertLayout([[1, 0], [2, 0]], num_experts=3)) != PLAN
    other = [[0, 0, 0, 2], [0, 0, 1, 2], [0, 2, 1, 1], [1, 0, 1, 2], [1, 1, 0, 3]]
    assert TokenPlan(np.array(other), LOAD, LAYOUT) != PLAN


# --- Span and Timeline ---


def span(start_us, end_us, rank=0, lane="compute", kind="experts"):
    return Span(rank, lane, start_us, end_us, kind)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [((0, 2), (1, 3), True), ((0, 9), (1, 2), True), ((0, 1), (1, 2), False), ((0, 1), (2, 3), False)],
)
def test_spans_overlap(first, second, overlap):
    assert span(*first).overlaps(span(*second)) is overlap
    assert span(*second).overlaps(span(*first)) is overlap


def test_a_timeline_sorts_and_finds_its_spans():
    dispatch = span(0.0, 1.0, lane="comm", kind="dispatch")
    late, early, other = span(5.0, 6.0), span(1.0, 5.0), span(0.5, 7.0, rank=1)
    timeline = Timeline((other, late, early, dispatch), "simulated")
    assert timeline.spans == (dispatch, early, late, other)
    assert timeline.of("experts") == (early, late, other)
    assert timeline.of("experts", rank=0) == (early, late)
    assert timeline.length_us == 7.0
    assert Timeline((), "measured").length_us == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, 1), st.sampled_from("ab")), max_size=8))
def test_a_lane_is_never_used_twice_at_once(drawn):
    spans = tuple(span(float(start), float(start + length), rank, lane) for start, length, rank, lane in drawn)
    clash = any(
        a.overlaps(b) for i, a in enumerate(spans) for b in spans[i + 1 :] if (a.rank, a.lane) == (b.rank, b.lane)
    )
    if clash:
        with pytest.raises(ValueError, match=r"spans overlap on lane [ab] of rank [01]: Span\(.*\) and Span\("):
            Timeline(spans, "measured")
    else:
        assert len(Timeline(spans, "measured").spans) == len(spans)
