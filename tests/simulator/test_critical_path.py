"""The whole step and its critical path: exact lengths, conservation, and what may never make a step slower."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_case import dispatch_seconds, restore_seconds
from test_step_program import AHEAD, EP, FOUR, FREE, FSEP, HOME, MODEL, ON_DEMAND, chunked, fsep, plans, steps

import moesys as ms
from moesys import cost
from moesys.config.workload import Recompute
from moesys.simulator.mega_pass import ComputeSpan, MegaPass, RowTransfer, mega_pass
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import Lanes, Simulation, by_place, exposed_ms
from moesys.simulator.step_program import run_step
from moesys.timeline import Timeline

EVEN = np.full((4, 4), 100)
SLOWED = {"copy_share": 0.3, "memory_gb_per_s": 1.0, "multiprocessors": 3, "tile_rows": 8, "tile_columns": 16}
LATE = {"launch_us": 2.0, "intra_node_us": 3.0, "inter_node_us": 20.0}

rests = st.builds(
    RestOfStep,
    other_seconds=st.sampled_from([0.0, 1e-5]),
    recompute=st.sampled_from(get_args(Recompute)),
    optimizer_seconds=st.sampled_from([0.0, 1e-4]),
    travel_behind_rest=st.booleans(),
)


def step_of(strategy: ms.Strategy, cluster: ms.ClusterSpec, *loads: Any, **rest: Any) -> Simulation:
    return run_step(strategy, MODEL, cluster, [plans(strategy, cluster, *loads)], RestOfStep(**rest))


# --- the critical path ---


OVERLAPS = (ms.Pipelined(chunks=1), ms.Pipelined(chunks=3), ms.MegaKernel(), ms.MegaKernel())


@given(steps(*ON_DEMAND, *AHEAD), st.sampled_from(OVERLAPS), rests, st.booleans(), st.booleans())
def test_the_path_is_as_long_as_the_step_and_no_lane_is_longer(step, overlap, rest, slowed, late):
    strategy, cluster, layers = step
    cluster = cluster.replace(**(SLOWED if slowed else {}) | (LATE if late else {}))
    found = run_step(strategy.replace(overlap=overlap), MODEL, cluster, [layers, layers], rest)
    length = found.length_seconds
    assert sum(part.seconds for part in found.critical_path) == pytest.approx(length, rel=1e-9)
    assert sum(part.share for part in found.critical_path) == pytest.approx(1)
    assert min(part.seconds for part in found.critical_path) > 0
    assert found.timeline.length_us == pytest.approx(1e6 * length)
    computed_R = np.sum(list(found.computed_R.values()), axis=0)
    busy_R = [
        sum(s.duration_us for s in found.timeline.spans if (s.lane, s.rank) == ("compute", rank))
        for rank in range(cluster.num_ranks)
    ]
    assert 1e6 * computed_R == pytest.approx(busy_R)
    moved_L = np.sum(list(found.moved_L.values()), axis=0)
    assert max(computed_R.max(), moved_L.max()) <= length * (1 + 1e-9)
    waited_R = np.sum(list(found.waited_R.values()), axis=0)
    assert (computed_R + waited_R <= length * (1 + 1e-9)).all()
    # Whoever ends last has nothing but computing and waiting behind it.
    assert (computed_R + waited_R).max() == pytest.approx(length)
    # None overlap on a lane, or this would raise.
    assert Timeline(found.timeline.spans, "simulated").spans == tuple(sorted(found.timeline.spans))


@given(steps(*ON_DEMAND, *AHEAD), st.integers(1, 4), st.sampled_from(get_args(Recompute)))
def test_bytes_and_flops_are_those_of_the_plans(step, chunks, recompute):
    strategy, cluster, layers = step
    found = run_step(chunked(strategy, chunks), MODEL, cluster, [layers], RestOfStep(recompute=recompute))
    forward_R = sum(cost.expert_seconds(plan.tokens_R.astype(float), MODEL, cluster, False) for plan in layers)
    assert found.computed_R["weight_gradients"] == pytest.approx(forward_R)
    # Of forward, pre-activations are 4 of 6 H I flops a row.
    again = {"none": 0, "layers": 1, "selective": 2 / 3, "computing": 1}[recompute]
    assert found.computed_R["experts"] == pytest.approx((2 + again) * forward_R)
    sent, home = 2 + (recompute in ("layers", "selective")), 2 + (recompute == "layers")
    restores = cost.restores_per_step(strategy.sharding)
    expected: dict[str, Any] = {"dispatch": 0.0, "combine": 0.0, "restore": 0.0, "reshard": 0.0}
    for plan in layers:
        bytes_RR = cost.dispatch_bytes(plan, MODEL)
        expected["dispatch"] += sent * cost.link_seconds(bytes_RR, cluster)
        expected["combine"] += home * cost.link_seconds(bytes_RR.T, cluster)
        for moved_RR in cost.restore_bytes(plan.layout, MODEL, cluster, strategy.sharding):
            expected["restore"] += restores * cost.link_seconds(moved_RR, cluster)
        for moved_RR in cost.reshard_bytes(plan.layout, MODEL, cluster, strategy.sharding):
            expected["reshard"] += cost.link_seconds(moved_RR, cluster)
    for lane, seconds_L in expected.items():
        if np.any(seconds_L):
            assert found.moved_L[lane] == pytest.approx(seconds_L)


def test_the_path_names_the_link_that_is_too_slow():
    """All rows of node 0 go to rank 3 of node 1, and home again."""
    slow = FOUR.replace(inter_node_gb_per_s=0.01)
    loads = np.zeros((4, 4), dtype=int)
    loads[:2, 3] = 50
    found = step_of(EP, slow, loads)
    places = {where: share for where, _, share in by_place(found.critical_path)}
    assert sum(share for where, share in places.items() if "NIC" in where) > 0.99
    assert by_place(found.critical_path)[0][2] == max(places.values())
    assert {part.kind for part in found.critical_path} == {"dispatch", "combine", "experts", "weight_gradients"}


def test_the_path_names_the_rank_that_others_wait_for():
    loads = np.full((4, 4), 10)
    loads[:, 2] = 300
    found = step_of(EP, FREE, loads, other_seconds=1e-6)
    assert {part.rank for part in found.critical_path if part.kind == "experts"} == {2}
    assert by_place(found.critical_path)[0][0] == "rank 2's experts"
    assert all(part.detail.startswith("layer 0") for part in found.critical_path)


def test_one_slow_rank_is_waited_for_by_all():
    other_R = np.array([1e-4, 1e-4, 5e-4, 1e-4])
    found = run_step(EP, MODEL, FREE, [plans(EP, FREE, EVEN)], RestOfStep(other_seconds=other_R))
    assert found.length_seconds == pytest.approx(3 * 5e-4 + found.computed_R["experts"][0] * 1.5)
    assert found.waited_R["slower ranks"] == pytest.approx([4e-4, 4e-4, 0, 4e-4])
    assert by_place(found.critical_path)[0][0] == "rank 2's other"


# --- the whole step, in closed form ---


def test_recomputation_adds_a_forward_with_or_without_its_rows():
    bare, layers, computing = (
        step_of(EP, FOUR, EVEN, EVEN, other_seconds=1e-5, recompute=recompute).length_seconds
        for recompute in ("none", "layers", "computing")
    )
    (plan,) = plans(EP, FOUR, EVEN)
    forward = cost.expert_seconds(float(plan.tokens_R[0]), MODEL, FOUR, backward=False)
    assert computing == pytest.approx(bare + 2 * (forward + 1e-5))
    assert layers == pytest.approx(computing + 2 * 2 * dispatch_seconds(plan, MODEL, FOUR))


@given(steps(*ON_DEMAND, *AHEAD), st.integers(1, 3))
def test_micro_batches_follow_one_another(step, chunks):
    strategy, cluster, layers = step
    once, twice = (run_step(chunked(strategy, chunks), MODEL, cluster, [layers] * n) for n in (1, 2))
    assert twice.length_seconds == pytest.approx(2 * once.length_seconds)
    later = run_step(strategy, MODEL, cluster, [layers], RestOfStep(optimizer_seconds=1.0)).length_seconds
    assert later == pytest.approx(1 + run_step(strategy, MODEL, cluster, [layers]).length_seconds)


def test_every_message_has_its_latency():
    """Counts, dispatch and combine forward; weights, dispatch and combine backward. The weights' gradients travel while
    those of experts are computed.
    """
    late = FREE.replace(intra_node_us=1.0, inter_node_us=30.0)
    bare, slow = (step_of(EP, cluster, 50 * EVEN).timeline.length_us for cluster in (FREE, late))
    assert slow == pytest.approx(bare + 6 * 30)
    inside = FREE.replace(num_nodes=1, ranks_per_node=4, intra_node_us=1.0)
    assert step_of(EP, inside, 50 * EVEN).timeline.length_us == pytest.approx(bare + 6 * 1)


def test_rows_are_gathered_before_they_go_and_summed_when_they_are_home():
    cluster = FREE.replace(memory_gb_per_s=10)
    found = step_of(EP, cluster, EVEN)
    rows = np.full(4, 400.0)
    # Before dispatch and before combine, forward and backward; summed twice.
    assert found.computed_R["gather"] == pytest.approx(4 * cost.gather_seconds(rows, MODEL, cluster))
    assert found.computed_R["sum"] == pytest.approx(2 * cost.sum_seconds(rows, MODEL, cluster))
    experts = sum(
        cost.pass_seconds(plans(EP, FREE, EVEN)[0].computed_RE.astype(float), MODEL, cluster, of)
        for of in ("forward", "input_gradients", "weight_gradients")
    )
    assert found.length_seconds == pytest.approx(
        np.max(experts) + found.computed_R["gather"][0] + found.computed_R["sum"][0]
    )
    assert exposed_ms(found.timeline) == pytest.approx(0, abs=1e-9)


def test_launches_count_once_a_kernel():
    """Two gathers, two products and a sum a direction, and two products of weights."""
    bare, late = (step_of(EP, FREE.replace(launch_us=us), EVEN).timeline.length_us for us in (0.0, 10.0))
    assert late == pytest.approx(bare + 10 * (5 + 5 + 2))


def test_computing_loses_its_share_to_messages_beside_it():
    """The second of two chunks travels for d = e beside the first one's e, which so takes e / (1 - share)."""
    cluster = ms.ClusterSpec(num_nodes=1, ranks_per_node=2, intra_node_gb_per_s=1, expert_tflops=1)
    (plan,) = plans(EP, cluster, [[0, 0, 1000, 0], [0, 0, 0, 0]])
    d = dispatch_seconds(plan, MODEL, cluster)
    forward = cost.expert_seconds(1000.0, MODEL, cluster, backward=False)
    assert d > forward
    halves = [
        run_step(chunked(EP, 2), MODEL, cluster.replace(copy_share=share), [[plan]]).computed_R["experts"][1]
        for share in (0.0, 0.25, 0.5)
    ]
    # Forward and backward: the first chunk's experts beside the second's dispatch, the second's beside the first's
    # combine.
    assert halves == pytest.approx([2 * forward / (1 - share) for share in (0.0, 0.25, 0.5)])


def test_what_runs_alone_loses_nothing_to_messages():
    bare, shared = (step_of(EP, FOUR.replace(copy_share=share), EVEN, EVEN) for share in (0.0, 0.5))
    assert shared.length_seconds == pytest.approx(bare.length_seconds)


def test_experts_may_travel_behind_the_rest_of_a_layer():
    """As FSDP does with its limit of 1: only what is longer than the rest is waited for, and the last gradient."""
    strategy = fsep(slots_per_rank=1)
    layout = plans(strategy, FOUR, HOME)[0].layout
    restore = restore_seconds(layout, MODEL, FOUR, strategy.sharding)
    reshard = cost.reshard_seconds(layout, MODEL, FOUR, strategy.sharding)
    rest, forward = 10 * (restore + reshard), cost.expert_seconds(4000.0, MODEL, FOUR, backward=False)
    found = step_of(strategy, FOUR, HOME, HOME, HOME, other_seconds=rest, travel_behind_rest=True)
    # Backward begins without a rest that hides the last layer's experts.
    assert found.length_seconds == pytest.approx(3 * (3 * rest + 3 * forward) + restore)


def test_gradients_may_travel_in_fewer_bytes():
    wide, narrow = (step_of(FSEP, FOUR, EVEN, gradient_bytes=size).moved_L["reshard"] for size in (4, 2))
    assert narrow == pytest.approx(wide / 2)


def test_every_slot_may_have_its_own_messages():
    """Rank 0 holds expert 0 twice: half of what it holds is sent for nothing."""
    layout = ms.planning.ExpertLayout([[0, 0], [1, 2], [3, 1], [2, 3]], num_experts=4)
    plan = ms.planning.split_tokens(ms.planning.LoadMatrix(EVEN), layout, FOUR, ms.EvenSplit())
    once, twice = (
        run_step(fsep(), MODEL, FOUR, [[plan]], RestOfStep(every_slot_travels=every_slot)).moved_L
        for every_slot in (False, True)
    )
    for lane, sending in (("restore", 0), ("reshard", 1)):
        in_and_out = np.array([once[lane][:8], twice[lane][:8]]).reshape(2, 2, 4)
        received = in_and_out[:, 1 - sending]
        assert received[1] == pytest.approx(received[0] * [2, 1, 1, 1])


# --- MegaKernels ---


def test_a_pass_of_a_mega_kernel_is_that_of_its_own_simulator_where_it_is_alone():
    fused = EP.replace(overlap=ms.MegaKernel())
    (plan,) = plans(fused, FOUR, EVEN)
    start_R = np.zeros(4)
    forward = mega_pass(fused.overlap, MODEL, FOUR, plan, False, start_R)
    backward = mega_pass(fused.overlap, MODEL, FOUR, plan, True, forward.end_R)
    assert run_step(fused, MODEL, FOUR, [[plan]]).length_seconds == pytest.approx(backward.end_R.max())


@pytest.mark.parametrize(("of_weights", "end"), [((0, 1), 3.0), ((1, 0), 2.0)], ids=["same link", "another"])
def test_experts_on_the_same_links_slow_a_mega_kernel_down(of_weights, end):
    """Rank 0's rows take two seconds to rank 1, all of its pass. Experts take one on that link, or back."""
    two = ms.ClusterSpec(ranks_per_node=2, intra_node_gb_per_s=1)
    rows_RR, experts_RR = np.zeros((2, 2)), np.zeros((2, 2))
    rows_RR[0, 1], experts_RR[of_weights] = 2e9, 1e9
    lanes, rows, end_R = Lanes(two, 0.0), cost.link_load(rows_RR, two), np.full(2, 2.0)
    weights = lanes.send("weights", "restore", cost.link_load(experts_RR, two), "layer 1")
    moved = RowTransfer("dispatch", np.zeros(2), end_R, rows.seconds_L)
    computed = ComputeSpan("experts", np.zeros(2), np.ones(2))
    lanes.run_fused(MegaPass(end_R, (computed,), (moved,), np.arange(2)), rows, "layer 0 forward")
    assert lanes.now_R.tolist() == [end, end]
    assert sum(part.seconds for part in lanes.critical_path()) == end
    lanes.wait(weights)
    assert lanes.now_R.tolist() == [end, end]
    assert lanes.moved_L["dispatch"].max() == 2.0


# --- what may never make a step slower ---


@given(steps(ms.Ep(), ms.Ep(slots_per_rank=4), ms.Fsep(slots_per_rank=4)), st.sampled_from(["intra", "inter"]))
def test_faster_links_never_make_a_sequential_step_slower(step, which):
    strategy, cluster, layers = step
    name = f"{which}_node_gb_per_s"
    faster = cluster.replace(**{name: 3 * getattr(cluster, name)})
    lengths = [run_step(strategy, MODEL, of, [layers]).length_seconds for of in (cluster, faster)]
    assert lengths[1] <= lengths[0] * (1 + 1e-12)


@given(steps(*ON_DEMAND, *AHEAD), st.sampled_from(sorted(SLOWED) + sorted(LATE)))
def test_what_a_cluster_lacks_never_makes_a_sequential_step_faster(step, name):
    strategy, cluster, layers = step
    if strategy.sharding.prefetch_layers:
        # What is late may leave a link to others: no bound holds for steps that travel beside themselves.
        strategy = strategy.replace(sharding=strategy.sharding.replace(prefetch_layers=0, delay_reshard=False))
    lengths = [
        run_step(strategy, MODEL, of, [layers]).length_seconds
        for of in (cluster, cluster.replace(**{name: (SLOWED | LATE)[name]}))
    ]
    assert lengths[1] >= lengths[0] * (1 - 1e-9)


SLOWEST = {
    "intra_node_gb_per_s": 1e-9,
    "inter_node_gb_per_s": 1e-9,
    "memory_gb_per_s": 1e-9,
    "expert_tflops": 1e-12,
    "launch_us": 1e12,
    "flag_us": 1e12,
    "intra_node_us": 1e12,
    "inter_node_us": 1e12,
}


@pytest.mark.parametrize("overlap", [ms.Sequential(), ms.Pipelined(chunks=3), ms.MegaKernel()], ids=lambda of: of.kind)
@pytest.mark.parametrize("field", [*SLOWEST, "all"])
@pytest.mark.filterwarnings("error")
def test_the_slowest_cluster_that_can_be_declared_has_an_end(overlap, field):
    slowest = FOUR.replace(**(SLOWEST if field == "all" else {field: SLOWEST[field]}))
    strategy = FSEP.replace(overlap=overlap)
    found = run_step(strategy, MODEL, slowest, [plans(strategy, slowest, EVEN, EVEN)])
    assert 0 < found.length_seconds < 1e18
    assert sum(part.seconds for part in found.critical_path) == pytest.approx(found.length_seconds)
