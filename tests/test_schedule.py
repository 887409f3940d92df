"""Schedules: whatever the overlap, stages come once, behind those they wait for, and beside messages under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.config import Overlap
from moesys.schedule import Direction, Schedule, Stage, schedule_of

MESSAGES = {"dispatch_weights", "dispatch", "combine", "combine_dweights"}

overlaps = st.one_of(
    st.just(ms.Sequential()), st.builds(ms.Pipelined, chunks=st.integers(1, 70)), st.just(ms.MegaKernel())
)
directions = st.sampled_from(["forward", "backward"])


def words(schedule: Schedule) -> list[str]:
    return [f"{stage.kind} {stage.chunk}" for stage in schedule]


def in_flight(schedule: Schedule, stage: Stage) -> set[Stage]:
    """Messages that have been issued before a stage, and that neither it nor any stage before it waits for."""
    issued: set[Stage] = set()
    for other, earlier in schedule.items():
        issued -= set(earlier)
        if other == stage:
            return issued
        if other.kind in MESSAGES:
            issued.add(other)
    raise AssertionError(f"{stage} is not in the schedule")


@given(overlaps, directions)
def test_stages_wait_for_stages_before_them_and_for_each_once_and_every_message_is_waited_for(overlap, direction):
    """A mapping holds each stage once."""
    schedule, behind = schedule_of(overlap, direction, 1), set()
    for stage, earlier in schedule.items():
        assert set(earlier) <= behind
        assert len(set(earlier)) == len(earlier)
        behind.add(stage)
    waited_for = {earlier for all_earlier in schedule.values() for earlier in all_earlier}
    assert {stage for stage in schedule if stage.kind in MESSAGES} <= waited_for


@given(st.integers(1, 70), directions)
def test_every_chunk_goes_all_the_way(chunks: int, direction: Direction):
    schedule = schedule_of(ms.Pipelined(chunks=chunks), direction, 1)
    for kind in ("dispatch", "experts", "combine", "sum"):
        assert [stage.chunk for stage in schedule if stage.kind == kind] == list(range(chunks))
    of_all_chunks = [stage.kind for stage in schedule if stage.kind not in ("dispatch", "experts", "combine", "sum")]
    expected = ["wait_for_experts"]
    if direction == "backward":
        expected = ["dispatch_weights", *expected, "combine_dweights", "weight_gradients", "gather_dweights"]
    assert of_all_chunks == expected


@given(st.integers(2, 70), directions)
def test_while_a_chunk_is_computed_the_next_arrives_and_the_last_goes_home(chunks: int, direction: Direction):
    schedule = schedule_of(ms.Pipelined(chunks=chunks), direction, 1)
    for chunk in range(chunks):
        expected = set()
        if chunk < chunks - 1:
            expected.add(Stage("dispatch", chunk + 1))
        if chunk > 0:
            expected.add(Stage("combine", chunk - 1))
        assert in_flight(schedule, Stage("experts", chunk)) == expected


@given(st.integers(1, 70))
def test_weight_gradients_are_computed_while_the_last_of_several_chunks_goes_home(chunks: int):
    schedule = schedule_of(ms.Pipelined(chunks=chunks), "backward", 1)
    beside = {Stage("combine", chunks - 1)} if chunks > 1 else set()
    assert in_flight(schedule, Stage("weight_gradients")) == beside | {Stage("combine_dweights")}


@pytest.mark.parametrize("overlap", [ms.Sequential(), ms.Pipelined(chunks=1)])
def test_sequential_does_one_thing_after_another(overlap: Overlap):
    forward = ["dispatch 0", "wait_for_experts 0", "experts 0", "combine 0", "sum 0"]
    assert words(schedule_of(overlap, "forward", 1)) == forward
    gradients = ["combine_dweights 0", "weight_gradients 0", "gather_dweights 0"]
    assert words(schedule_of(overlap, "backward", 1)) == ["dispatch_weights 0", *forward, *gradients]


def test_a_schedule_of_two_chunks():
    before = ["dispatch_weights 0", "dispatch 0", "dispatch 1", "wait_for_experts 0"]
    chunks = ["experts 0", "combine 0", "experts 1", "combine 1", "sum 0"]
    gradients = ["combine_dweights 0", "weight_gradients 0", "sum 1", "gather_dweights 0"]
    assert words(schedule_of(ms.Pipelined(chunks=2), "backward", 1)) == before + chunks + gradients


def test_a_part_is_spread_while_the_next_crosses_and_goes_home_while_the_next_is_collected():
    overlap = ms.Sequential(node_dispatch="once", combine="per_node")
    schedule = schedule_of(overlap, "forward", 2, 3)
    assert [(stage.kind, stage.part) for stage in schedule] == [
        ("dispatch_weights", 0),
        *(("dispatch", part) for part in range(3)),
        ("spread", 0),
        ("wait_for_experts", 0),
        ("experts", 0),
        *(("combine", part) for part in range(3)),
        ("send_sums", 0),
        ("sum", 0),
    ]
    for kind, last in (("dispatch", Stage("spread")), ("combine", Stage("send_sums"))):
        for part in (1, 2):
            assert schedule[Stage(kind, 0, part)] == (Stage(kind, 0, part - 1),)
        assert schedule[last] == (Stage(kind, 0, 2),)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_mega_kernels_overlap_by_themselves(direction: Direction):
    assert words(schedule_of(ms.MegaKernel(), direction, 1)) == ["publish 0", "wait_for_experts 0", "mega_kernels 0"]


def test_a_schedule_cannot_be_changed():
    with pytest.raises(TypeError):
        schedule_of(ms.Sequential(), "forward", 1)[Stage("experts")] = ()
