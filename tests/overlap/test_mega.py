"""MegaKernels change no bit: any shape, routing and layout, at any point of their search space."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mega_case import Case, Drawn, MegaRun, differences, new_heaps

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

# The sweep tries more, each at a few points.
SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
NUM_CASES, MOST_TOKENS, MOST_WIDTH = (200, 44, 72) if SWEEP else (1, 24, 40)


@st.composite
def points(draw: st.DrawFn, most_tokens: tuple[int | None, ...]) -> ms.MegaKernel:
    """``most_tokens``: with a number, the device makes the plan."""
    fused = draw(st.sampled_from(["both", "dispatch", "combine", "none"]))
    overlaps = draw(st.booleans())
    tile_rows = draw(st.sampled_from([None, 16, 32]))
    return ms.MegaKernel(
        fused=fused,
        dispatch_share=draw(st.sampled_from([0.0, 0.25, 0.7, 1.0])),
        combine_share=draw(st.sampled_from([0.0, 0.3, 0.99])) if fused in ("both", "combine") else 0.0,
        reduce_share=draw(st.sampled_from([0.0, 0.5, 1.0])) if overlaps else 0.0,
        granularity=draw(st.sampled_from(["tile", "expert"])),
        tile_order=draw(st.sampled_from(["largest_first", "slots"])),
        deduplicate=draw(st.booleans()),
        keep_x=draw(st.booleans()),
        overlap_weight_gradients=overlaps,
        fetch_rows=draw(st.sampled_from([4, 16] if tile_rows == 16 else [8, 32])),
        sum_tokens=draw(st.sampled_from([4, 16])),
        tile_rows=tile_rows,
        tile_columns=draw(st.sampled_from([None, 32, 64])),
        programs=draw(st.sampled_from([None, 1, 7])),
        most_tokens=draw(st.sampled_from(most_tokens)),
        # All rows on one of the most ranks there are: what a plan drawn at random may ask for.
        rows_cap=4.0,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 4]))
    num_experts = draw(st.integers(1, 7))
    tokens = draw(st.lists(st.one_of(st.just(0), st.integers(1, MOST_TOKENS)), min_size=num_ranks, max_size=num_ranks))
    split = draw(st.sampled_from([None, ms.EvenSplit(), ms.Proportional(), ms.FlowSplit()]))
    # Ranks may have more memory than they need.
    bound = max(1, max(tokens)) + draw(st.sampled_from([0, 9]))
    homes = (None,) if split is None else (None, bound, bound)
    late = draw(st.one_of(st.just(0.0), st.floats(0.1, 1.0)))
    return Case(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        hidden=draw(st.integers(1, MOST_WIDTH)),
        width=draw(st.integers(1, MOST_WIDTH)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        tokens=tuple(tokens),
        slots=-(-num_experts // num_ranks) + draw(st.integers(0, 3)),
        # One resident program of a rank is always among them.
        points=(ms.MegaKernel(programs=1, rows_cap=4.0), *draw(st.lists(points(homes), min_size=2, max_size=3))),
        seed=draw(st.integers(0, 10_000)),
        dropped=draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, 0.3, 1.0])),
        repeats=draw(st.booleans()),
        split=split,
        turn=draw(st.integers(0, 3)),
        reversed_backward=draw(st.booleans()),
        late=(draw(st.integers(0, num_ranks - 1)), late, draw(st.sampled_from(["forward", "experts", "backward"]))),
    )


@pytest.mark.timeout(7200)
@settings(max_examples=NUM_CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_no_point_changes_a_bit(ranks: LocalRanks, case: Case) -> None:
    found = ranks.run(differences, case, num_ranks=case.num_ranks, timeout_s=600)
    assert not any(found), found


SOME = (
    ms.MegaKernel(programs=1, deduplicate=True, granularity="expert", rows_cap=4.0),
    ms.MegaKernel(
        combine_share=0.5, reduce_share=0.5, deduplicate=True, keep_x=False, tile_rows=16, fetch_rows=4, rows_cap=4.0
    ),
)
USUAL = Case(5, 2, 40, 24, "float32", (35, 22, 9, 17), 3, SOME)
# Its plan is made on the device.
PLANNED = replace(USUAL, points=(SOME[0].replace(most_tokens=50),), split=ms.EvenSplit(), turn=3)
# Each case says which edge it is. Drawn cases of MOESYS_SWEEP have all others: fewer experts than ranks, more choices
# than ranks, experts that a token chooses twice, sizes of one, and no choice that stays.
EDGES = {
    "planned there, no token anywhere": replace(PLANNED, tokens=(0, 0, 0, 0)),
    "planned there, some dropped, one late rank, backward from the last": replace(
        PLANNED, tokens=(5, 0, 23), dropped=0.3, late=(1, 1.0, "forward"), reversed_backward=True
    ),
    "no token anywhere": replace(USUAL, tokens=(0, 0, 0, 0)),
    "sizes that nothing divides": replace(USUAL, tokens=(19, 12), hidden=37, width=13, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(ranks: LocalRanks, name: str) -> None:
    case = EDGES[name]
    found = ranks.run(differences, case, num_ranks=case.num_ranks, timeout_s=200)
    assert not any(found), found


def test_rows_of_x_stay_only_where_they_are_kept() -> None:
    """Of 35 tokens that choose two experts each."""
    run = MegaRun(Drawn(replace(USUAL, tokens=(35,), num_experts=3)), 0, new_heaps(1))
    x_TH = run.drawn.x_RTH[0]
    again = ms.MegaKernel(keep_x=False)
    assert run.forward(again)[2].arrivals_MH is x_TH
    assert run.forward(ms.MegaKernel())[2].arrivals_MH.shape == (70, 40)
