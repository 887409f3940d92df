"""Simulated MegaKernels: exact times where there are some, bounds and sums, and what may never make a pass slower."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_case import GPU, PLAIN, dispatch_seconds, drawn_case, plan_of, shape

import moesys as ms
from moesys import cost
from moesys.simulator.mega_pass import MegaPass, mega_pass, publish_seconds
from moesys.simulator.step_program import run_step

SMALL = ms.ModelShape(hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, dtype="bfloat16")
APART = ms.MegaKernel(fused="none", overlap_weight_gradients=False)
FOUR, ALONE = (of.replace(ranks_per_node=4) for of in (GPU, PLAIN))


def length(found: MegaPass) -> float:
    return float(found.end_R.max())


def seconds_by_kind(found: MegaPass) -> list[tuple[str, np.ndarray]]:
    return [(of.kind, of.end_R - of.start_R) for of in found.computed]


# --- exact times ---


@pytest.mark.parametrize(
    ("overlap", "slower"),
    [
        (ms.MegaKernel(), (True, True, True)),
        (ms.MegaKernel(fused="dispatch"), (True, False, True)),
        (ms.MegaKernel(fused="combine"), (False, True, True)),
        (APART, (False, False, False)),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_products_that_share_a_kernel_run_at_the_fused_rate(overlap, slower, backward):
    plan, factor_of = plan_of(SMALL, 4, 900, 1.0), {True: 2.0, False: 1.0}
    alone, shared = (
        seconds_by_kind(mega_pass(overlap, SMALL, ALONE.replace(fused_rate=of), plan, backward, np.zeros(4)))
        for of in (1.0, 0.5)
    )
    expected = [factor_of[of] for of in slower[:2]] + [factor_of[slower[2]]] * backward
    products = [(kind, of) for kind, of in alone if kind != "sum"]
    assert len(products) == len(expected)
    found = [(kind, of) for kind, of in shared if kind != "sum"]
    for (_, before_R), (_, after_R), factor in zip(products, found, expected, strict=True):
        np.testing.assert_allclose(after_R, factor * before_R)


def test_tiles_of_gradients_have_their_own_rate():
    plan, slow = plan_of(SMALL, 4, 900, 1.0), ALONE.replace(backward_tflops=PLAIN.expert_tflops / 2)
    for backward, factor in ((False, 1.0), (True, 2.0)):
        before, after = (
            seconds_by_kind(mega_pass(ms.MegaKernel(), SMALL, of, plan, backward, np.zeros(4))) for of in (ALONE, slow)
        )
        for (kind, before_R), (_, after_R) in zip(before, after, strict=True):
            np.testing.assert_allclose(after_R, factor * before_R, err_msg=kind)


EVEN = product(["UniEP's test", "160 experts"], [(2, 0.0, 1), (2, 1.0, 1), (8, 0.0, 1), (8, 0.0, 10)])


@pytest.mark.parametrize(("name", "layer"), [*EVEN, *product(["Qwen3-30B", "160 experts", "Mixtral"], [(8, 1.0, 1)])])
def test_one_kernel_after_another_takes_as_long_as_sequential(name, layer):
    """Without what either has of its own: kernels publish, ``Sequential`` copies."""
    num_ranks, skew, scale = layer
    model, plan = shape(name), plan_of(shape(name), num_ranks, 1000, skew)
    cluster = PLAIN.replace(
        ranks_per_node=num_ranks,
        multiprocessors=13 * scale,
        expert_tflops=62 * scale,
        intra_node_gb_per_s=36 * scale,
    )
    sequential = run_step(ms.Strategy(name="ep"), model, cluster, [[plan]]).timeline.length_us * 1e-6
    found = sum(length(mega_pass(APART, model, cluster, plan, of, np.zeros(num_ranks))) for of in (False, True))
    assert found == pytest.approx(sequential, rel=0.02)


def test_a_rank_alone_takes_its_waves():
    cluster, plan = PLAIN.replace(ranks_per_node=1), plan_of(SMALL, 1, 1000, 1.0)
    row_tiles = int((-(-plan.load.tokens_E // 128)).sum())
    tile = 2 * 128 * 256 * 13 / 62e12
    # gate_up: 256 columns of 2·I = 512, over H; down: of H = 512, over I.
    forward = -(-row_tiles * 2 // 13) * tile * 512 + -(-row_tiles * 2 // 13) * tile * 256
    assert length(mega_pass(ms.MegaKernel(), SMALL, cluster, plan, False, np.zeros(1))) == pytest.approx(forward)


def test_what_travels_alone_takes_its_link():
    """All of rank 0's rows go to rank 1 and home; nothing else takes time."""
    cluster = PLAIN.replace(ranks_per_node=2, expert_tflops=1e9)
    load = ms.planning.LoadMatrix([[0, 0, 0, 0, 2000, 0, 0, 0], [0] * 8])
    plan = ms.planning.plan_layer(ms.Strategy(name="ep"), SMALL, cluster, load).tokens
    seconds = 2 * dispatch_seconds(plan, SMALL, cluster)
    assert length(mega_pass(ms.MegaKernel(), SMALL, cluster, plan, False, np.zeros(2))) == pytest.approx(seconds, 1e-3)


def test_kernels_wait_for_their_launches_and_flags():
    late = ALONE.replace(launch_us=1000, flag_us=100)
    plan = plan_of(SMALL, 4, 900)
    for overlap, launches in ((ms.MegaKernel(), 2), (APART, 5)):
        before, after = (length(mega_pass(overlap, SMALL, of, plan, False, np.zeros(4))) for of in (ALONE, late))
        # Publishing is a launch too; a flag says that rows are there, another that results are.
        assert after - before == pytest.approx((launches + 1) * 1e-3 + 1e-4, abs=2e-4)


# --- bounds and sums ---


@st.composite
def layers(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of a pass of a small layer, on one node or two."""
    case = drawn_case(draw(st.integers(0, 2**32)), deduplicate=draw(st.booleans()))
    two_nodes = GPU.replace(num_nodes=2, ranks_per_node=(1, 2))
    cluster = draw(st.sampled_from([GPU.replace(ranks_per_node=1), FOUR, two_nodes]))
    plan = plan_of(SMALL, cluster.num_ranks, draw(st.sampled_from([1, 70, 900])), draw(st.sampled_from([0.0, 2.0])))
    programs = draw(st.sampled_from([None, 1, 5]))
    start_R = np.array([draw(st.sampled_from([0.0, 1e-4])) for _ in range(cluster.num_ranks)])
    return case.overlap.replace(programs=programs), SMALL, cluster, plan, draw(st.booleans()), start_R


@given(layers())
def test_no_pass_is_shorter_than_its_path_or_its_busiest_lane_and_nothing_is_lost(layer):
    overlap, model, cluster, plan, backward, start_R = layer
    found = mega_pass(*layer)
    pulls = 1 if overlap.keep_x or not backward else 2
    bytes_L = pulls * cost.link_seconds(cost.dispatch_bytes(plan, model), cluster)
    home_L = cost.link_seconds(cost.dispatch_bytes(plan, model).T, cluster)
    ends_R = start_R
    for computed in found.computed:
        assert (computed.start_R >= ends_R - 1e-12).all()
        assert (computed.end_R >= computed.start_R).all()
        ends_R = computed.end_R
    assert (found.end_R >= ends_R - 1e-12).all()
    dispatch, combine = found.moved
    for moved, seconds_L in ((dispatch, bytes_L), (combine, home_L)):
        if not overlap.deduplicate or moved is combine:
            assert moved.link_seconds_L == pytest.approx(seconds_L, rel=1e-9)
        assert (moved.link_seconds_L <= seconds_L * (1 + 1e-9)).all()
        assert (start_R <= moved.start_R).all()
        assert (moved.start_R <= moved.end_R).all()
        assert (moved.end_R <= found.end_R + 1e-12).all()
        assert (moved.end_R - moved.start_R).max() >= 0
    # The queue has weight gradients behind pushes, and a kernel that pushes follows one that multiplies.
    products, gradients = found.computed[1], [of for of in found.computed if of.kind == "weight_gradients"]
    assert len(gradients) == backward
    assert all((of.start_R >= combine.end_R - 1e-12).all() for of in gradients)
    if overlap.fused in ("none", "dispatch"):
        assert (combine.start_R >= products.end_R - 1e-12).all()
    # Both transfers follow one another, as rows come home after they have come.
    assert length(found) >= (dispatch.link_seconds_L + combine.link_seconds_L)[: 2 * cluster.num_ranks].max() * (
        1 - 1e-9
    )
    # Flops of all ranks at the rate of all.
    flops = (2 if backward else 1) * 6 * model.hidden_size * model.intermediate_size * plan.load.total
    computed_R = sum(of.end_R - of.start_R for of in found.computed if of.kind != "sum")
    assert computed_R.sum() >= flops / cost.product_rate(cluster, backward) * (1 - 1e-9)


def test_flops_of_whole_tiles_are_those_of_the_layer():
    cluster = FOUR.replace(memory_gb_per_s=None, fused_rate=1.0)
    plan = ms.planning.plan_layer(
        ms.Strategy(name="ep"), SMALL, cluster, ms.planning.LoadMatrix(np.full((4, 8), 256))
    ).tokens
    for backward in (False, True):
        found = mega_pass(ms.MegaKernel(), SMALL, cluster, plan, backward, np.zeros(4))
        flops = (2 if backward else 1) * 6 * 512 * 256 * plan.load.total
        computed = sum(seconds_R.sum() for _, seconds_R in seconds_by_kind(found))
        assert computed == pytest.approx(flops / cost.product_rate(cluster, backward), rel=1e-12)


# --- what may never make a pass slower ---

FASTER = {
    "intra_node_gb_per_s": 3.0,
    "inter_node_gb_per_s": 3.0,
    "expert_tflops": 2.0,
    "memory_gb_per_s": 2.0,
    "launch_us": 0.5,
    "flag_us": 0.5,
    "intra_node_us": 0.5,
    "inter_node_us": 0.5,
}


@given(layers(), st.sampled_from(sorted(FASTER)))
def test_no_faster_part_makes_a_pass_slower(layer, name):
    overlap, model, cluster, plan, backward, start_R = layer
    faster = cluster.replace(**{name: FASTER[name] * getattr(cluster, name)})
    before, after = (mega_pass(overlap, model, of, plan, backward, start_R).end_R for of in (cluster, faster))
    assert (after <= before * (1 + 1e-12)).all()


@given(layers())
def test_no_more_programs_make_a_pass_slower(layer):
    overlap, *of_layer = layer
    ends_R = [mega_pass(overlap.replace(programs=programs), *of_layer).end_R for programs in (1, 2, 5, 13)]
    for before_R, after_R in pairwise(ends_R):
        assert (after_R <= before_R * (1 + 1e-12)).all()


@given(layers(), st.integers(1, 9), st.integers(1, 31))
def test_no_more_rows_make_a_pass_faster(layer, tiles, more):
    """Sources have rows for each expert that together fill ``tiles``, or fewer or more. Transfers of fused kernels
    overlap better if there are more tiles, so these have no more.
    """
    overlap, model, cluster, _, backward, start_R = layer
    R, load = cluster.num_ranks, ms.planning.LoadMatrix
    full = tiles * 128 // R
    apart = overlap.replace(fused="none", combine_share=0.0)
    for point, rows in ((overlap, (full - more, full)), (apart, (full - more, full, full + more))):
        loads = [load(np.full((R, model.num_experts), of_each)) for of_each in rows]
        plans = [ms.planning.plan_layer(ms.Strategy(name="ep"), model, cluster, of).tokens for of in loads]
        ends_R = [mega_pass(point, model, cluster, plan, backward, start_R).end_R for plan in plans]
        for fewer_R, more_R in pairwise(ends_R):
            assert (fewer_R <= more_R * (1 + 1e-12)).all()


@pytest.mark.parametrize("fused", ["both", "dispatch", "combine", "none"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_second_tile_of_each_expert_makes_no_pass_faster(fused, backward):
    """Memory bounds these products: their bytes are no more in a wave that is not full."""
    model, cluster, found = ms.presets.QWEN3_30B_A3B, ms.presets.h100(1), []
    R, E = cluster.num_ranks, model.num_experts
    for rows in (1, 8, 16, 17, 18, 32, 33):
        load = ms.planning.LoadMatrix(np.full((R, E), rows))
        plan = ms.planning.plan_layer(ms.Strategy(name="ep"), model, cluster, load).tokens
        found.append(length(mega_pass(ms.MegaKernel(fused=fused), model, cluster, plan, backward, np.zeros(R))))
    assert found == sorted(found)


@given(layers())
def test_tiles_as_fast_as_alone_make_no_fused_pass_slower_than_one_kernel_after_another(layer):
    overlap, model, cluster, plan, backward, start_R = layer
    apart = overlap.replace(fused="none", combine_share=0.0, overlap_weight_gradients=False, reduce_share=0.0)
    cluster = cluster.replace(intra_node_us=0, inter_node_us=0)
    fused, one_by_one = (mega_pass(of, model, cluster, plan, backward, start_R).end_R for of in (overlap, apart))
    assert (fused <= one_by_one * (1 + 1e-12)).all()


@pytest.mark.parametrize("backward", [False, True])
def test_pulls_before_all_products_hide_nothing(backward):
    """With all pulls first, kernel A takes as long as one kernel after another, but for a launch."""

    def first_kernel_R(overlap: ms.MegaKernel) -> np.ndarray:
        cluster = FOUR.replace(multiprocessors=132)
        return mega_pass(overlap, SMALL, cluster, plan_of(SMALL, 4, 4000), backward, np.zeros(4)).computed[0].end_R

    first_R, apart_R = (first_kernel_R(ms.MegaKernel(fused=of, dispatch_share=1.0)) for of in ("dispatch", "none"))
    assert apart_R - first_R == pytest.approx(3e-6, rel=1e-6)
    assert (first_kernel_R(ms.MegaKernel(fused="dispatch")) < 0.9 * first_R).all()


@given(layers())
def test_a_pass_repeats_and_moves_with_its_ranks(layer):
    overlap, model, cluster, plan, backward, start_R = layer
    first, second = mega_pass(*layer), mega_pass(*layer)
    assert (first.end_R == second.end_R).all()
    assert (first.waited_for_R == second.waited_for_R).all()
    later = mega_pass(overlap, model, cluster, plan, backward, start_R + 1e-3)
    assert later.end_R - 1e-3 == pytest.approx(first.end_R, rel=1e-6)
    # Experts that are there when they are needed are as good as experts that always were.
    needed_R = start_R + publish_seconds(overlap, model, cluster, plan, backward)
    assert (mega_pass(*layer, needed_R).end_R == first.end_R).all()
    assert length(mega_pass(*layer, needed_R + 1e-3)) >= length(first)


def test_a_late_rank_is_waited_for():
    plan, start_R = plan_of(SMALL, 4, 900), np.array([0.0, 0.0, 1e-2, 0.0])
    for late, expected in ((start_R, 1e-2), (np.zeros(4), 0.0)):
        result = mega_pass(ms.MegaKernel(), SMALL, FOUR, plan, False, late)
        assert (result.end_R > expected).all()
    # Its experts are late: the others have only its results to wait for.
    result = mega_pass(ms.MegaKernel(), SMALL, FOUR, plan, False, np.zeros(4), start_R)
    assert set(result.waited_for_R[[0, 1, 3]]) == {2}
