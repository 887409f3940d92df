"""The simulated step: closed forms where there are some, bounds and orders where there are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated_case import dispatch_seconds, restore_seconds

import moesys as ms
from moesys import cost
from moesys.lab.ranks.pool import LocalRanks
from moesys.simulator.simulation import Lanes, critical_rank, exposed_ms
from moesys.simulator.step_program import RestOfStep, run_step
from moesys.timeline import Timeline

MODEL = ms.ModelShape(hidden_size=64, intermediate_size=96, num_experts=4, top_k=2, dtype="bfloat16")
FOUR = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=50, inter_node_gb_per_s=20, expert_tflops=1)
# Beyond what a float holds once it is in bytes a second: communication takes exactly no time.
FREE = FOUR.replace(intra_node_gb_per_s=1e300, inter_node_gb_per_s=1e300)

EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=2))
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=2), split=ms.FlowSplit())


def simulate_step(
    strategy: ms.Strategy,
    model: ms.ModelShape,
    cluster: ms.ClusterSpec,
    layers: list[ms.planning.TokenPlan],
    **rest: float,
) -> Timeline:
    """One micro-batch through layers with these plans, in order; ``rest`` as in ``RestOfStep``."""
    return run_step(strategy, model, cluster, [layers], RestOfStep(**rest)).timeline


def plans(strategy: ms.Strategy, cluster: ms.ClusterSpec, *loads: Any) -> list[ms.planning.TokenPlan]:
    return [
        ms.planning.plan_layer(strategy, MODEL, cluster, ms.planning.LoadMatrix(tokens_RE)).tokens
        for tokens_RE in loads
    ]


def fsep(**options: Any) -> ms.Strategy:
    return FSEP.replace(sharding=ms.Fsep(**({"slots_per_rank": 2} | options)))


def chunked(strategy: ms.Strategy, chunks: int) -> ms.Strategy:
    return strategy.replace(overlap=ms.Pipelined(chunks=chunks))


@st.composite
def steps(
    draw: st.DrawFn, *shardings: ms.Ep | ms.Fsep
) -> tuple[ms.Strategy, ms.ClusterSpec, list[ms.planning.TokenPlan]]:
    """A strategy without chunks, a cluster of uneven nodes, and plans of one to three layers; idle ranks included."""
    sizes = draw(st.sampled_from([(1,), (3,), (2, 2), (1, 3), (1, 2, 1)]))
    speed = st.sampled_from([0.1, 1.0, 10.0, 1000.0])
    cluster = ms.ClusterSpec(
        num_nodes=len(sizes),
        ranks_per_node=sizes,
        intra_node_gb_per_s=draw(speed),
        inter_node_gb_per_s=draw(speed),
        expert_tflops=0.1,
    )
    sharding = draw(st.sampled_from(shardings))
    strategy = ms.Strategy(
        name="drawn",
        sharding=sharding,
        balance=ms.Static() if sharding == ms.Ep() else draw(st.sampled_from([ms.Static(), ms.Greedy()])),
        split=draw(st.sampled_from([ms.EvenSplit(), ms.FlowSplit()])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (cluster.num_ranks, MODEL.num_experts)
    loads = [rng.integers(0, 200, shape) * rng.integers(0, 2, shape) for _ in range(draw(st.integers(1, 3)))]
    assume(all(load.any() for load in loads))
    return strategy, cluster, plans(strategy, cluster, *loads)


ON_DEMAND = (
    ms.Ep(),
    ms.Ep(slots_per_rank=4),
    ms.Ep(slots_per_rank=4, lend="hierarchical"),
    ms.Fsep(slots_per_rank=4),
    ms.Fsep(slots_per_rank=4, restore="hierarchical"),
    ms.Fsep(slots_per_rank=4, reshard="hierarchical"),
    ms.Fsep(slots_per_rank=4, reshard_after_forward=False),
)
AHEAD = (
    ms.Ep(slots_per_rank=4, prefetch_layers=1),
    ms.Ep(slots_per_rank=4, lend="hierarchical", prefetch_layers=2, delay_reshard=True),
    ms.Fsep(slots_per_rank=4, prefetch_layers=1),
    ms.Fsep(slots_per_rank=4, prefetch_layers=2, delay_reshard=True),
    ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True, restore="hierarchical", reshard="hierarchical"),
)


def expert_seconds(plan: ms.planning.TokenPlan, cluster: ms.ClusterSpec) -> np.ndarray:
    """Forward and backward, [R]."""
    rows_R = plan.tokens_R.astype(float)
    return cost.expert_seconds(rows_R, MODEL, cluster, False) + cost.expert_seconds(rows_R, MODEL, cluster, True)


# --- closed forms ---


@pytest.mark.parametrize("strategy", [EP, FSEP, chunked(EP, 4)], ids=["ep", "fsep", "pipelined"])
def test_a_balanced_step_without_communication_takes_the_time_of_its_flops(strategy):
    even = np.full((4, 4), 128)
    timeline = simulate_step(strategy, MODEL, FREE, plans(strategy, FREE, even, even))
    flops = 2 * 18 * (4 * 128) * MODEL.hidden_size * MODEL.intermediate_size
    assert timeline.length_us == pytest.approx(flops / 1e12 * 1e6, rel=1e-12)
    assert exposed_ms(timeline) == pytest.approx(0, abs=1e-9)
    assert timeline.source == "simulated"


def test_without_communication_the_busiest_rank_sets_the_pace_of_each_layer():
    first, second = np.full((4, 4), 10), np.full((4, 4), 10)
    first[:, 1], second[:, 2] = 70, 50
    timeline = simulate_step(EP, MODEL, FREE, plans(EP, FREE, first, second))
    seconds = 18 * (4 * 70 + 4 * 50) * 64 * 96 / 1e12
    assert timeline.length_us == pytest.approx(1e6 * seconds)
    assert critical_rank(timeline) == 1
    busy_R = np.array([80, 320, 240, 80])
    assert exposed_ms(timeline) == pytest.approx(1000 * (seconds - 18 * busy_R.mean() * 64 * 96 / 1e12))


def test_a_sequential_layer_is_a_sum():
    load = np.array([[50, 20, 0, 9], [5, 5, 5, 5], [0, 0, 0, 80], [31, 0, 2, 1]])
    (plan,) = plans(EP, FOUR, load)
    seconds = 4 * dispatch_seconds(plan, MODEL, FOUR) + expert_seconds(plan, FOUR).max()
    assert simulate_step(EP, MODEL, FOUR, [plan]).length_us == pytest.approx(1e6 * seconds)


@pytest.mark.parametrize("gb_per_s", [1, 10])
def test_two_chunks_hide_all_but_the_ends(gb_per_s):
    """All of rank 0's rows go to rank 1 in d seconds, and home in d; experts take e, weight gradients e once more."""
    cluster = ms.ClusterSpec(num_nodes=1, ranks_per_node=2, intra_node_gb_per_s=gb_per_s, expert_tflops=1)
    (plan,) = plans(EP, cluster, [[0, 0, 1000, 0], [0, 0, 0, 0]])
    d = dispatch_seconds(plan, MODEL, cluster)
    e = cost.expert_seconds(1000.0, MODEL, cluster, backward=False)
    slow_links = gb_per_s == 1
    assert (d > e) is slow_links
    assert simulate_step(EP, MODEL, cluster, [plan]).length_us == pytest.approx(1e6 * (4 * d + 3 * e))
    timeline = simulate_step(chunked(EP, 2), MODEL, cluster, [plan])
    assert timeline.length_us == pytest.approx(1e6 * (4 * d if slow_links else (d + e) + (d / 2 + 2 * e)))
    assert [span.detail for span in timeline.of("weight_gradients", rank=1)] == ["layer 0 backward"]


HOME = np.diag([4000] * 4)
# Ranks hold the experts 0 and 1 or 2 and 3, and choose one of these.
HELD = HOME[[0, 2, 1, 3]]


def local_step(lent: bool = False, **options: Any) -> tuple[float, float, float, float]:
    """Microseconds of three layers whose tokens stay where they are, and of a restore, a reshard, forward experts."""
    strategy = (
        fsep(slots_per_rank=1, **options) if not lent else LENT.replace(sharding=LENT.sharding.replace(**options))
    )
    layers = plans(strategy, FOUR, *[HELD if lent else HOME] * 3)
    restore = restore_seconds(layers[0].layout, MODEL, FOUR, strategy.sharding)
    reshard = cost.reshard_seconds(layers[0].layout, MODEL, FOUR, strategy.sharding)
    forward = cost.expert_seconds(4000.0, MODEL, FOUR, backward=False)
    assert restore < forward
    assert restore + reshard < 2 * forward
    length_us = simulate_step(strategy, MODEL, FOUR, layers).length_us
    return length_us, 1e6 * restore, 1e6 * reshard, 1e6 * forward


Form = Callable[[float, float, float], float]
# Of three layers, by the seconds of a restore, a reshard and forward's experts. Copies are kept for backward, so that
# only forward waits for some.
EXPOSED: dict[str, tuple[dict[str, Any], Form]] = {
    "on demand all": ({}, lambda restore, reshard, forward: 3 * (2 * restore + 3 * forward + reshard)),
    "what is kept once": (
        {"reshard_after_forward": False},
        lambda restore, reshard, forward: 3 * (restore + 3 * forward + reshard),
    ),
    "ahead the first of each direction": (
        {"prefetch_layers": 1},
        lambda restore, reshard, forward: 2 * restore + 3 * (3 * forward + reshard),
    ),
    "delayed the last reshard": (
        {"prefetch_layers": 1, "delay_reshard": True},
        lambda restore, reshard, forward: 2 * restore + 3 * 3 * forward + reshard,
    ),
    "copies all": ({"lent": True}, lambda restore, reshard, forward: 3 * (restore + 3 * forward + reshard)),
    "copies ahead the first layer's": (
        {"lent": True, "prefetch_layers": 1},
        lambda restore, reshard, forward: restore + 3 * (3 * forward + reshard),
    ),
    "copies ahead and delayed": (
        {"lent": True, "prefetch_layers": 1, "delay_reshard": True},
        lambda restore, reshard, forward: restore + 3 * 3 * forward + reshard,
    ),
}


@pytest.mark.parametrize("case", EXPOSED)
def test_these_restores_and_reshards_are_exposed(case):
    options, form = EXPOSED[case]
    length, *parts = local_step(**options)
    assert length == pytest.approx(form(*parts))


def test_late_experts_are_exposed_beside_those_that_came_ahead():
    """The second layer's settled experts travel behind the first, and late ones when its counts are here."""
    cluster = FOUR.replace(expert_tflops=1e-3)
    strategy = fsep(slots_per_rank=2, prefetch_layers=1).replace(late_slots=1, split=ms.FlowSplit())
    hot = np.array([[64, 1, 1, 1]] * 4)
    layers = plans(strategy, cluster, hot, hot)
    late_RS = layers[1].layout.expert_RS[:, 1:]
    assert (late_RS >= 0).any()
    spans = simulate_step(strategy, MODEL, cluster, layers).of("restore")
    details = [span.detail for span in spans if span.rank == 0][:3]
    assert details == ["layer 0", "layer 1", "layer 1 late"]
    layout = layers[1].layout
    ahead = restore_seconds(layout.without_last(1), MODEL, cluster, strategy.sharding)
    missing = cost.restore_bytes(layout, MODEL, cluster, strategy.sharding, here=layout.without_last(1))
    late_us = max(span.end_us - span.start_us for span in spans if span.detail == "layer 1 late")
    # Tokens are on their way beside it.
    assert late_us >= 1e6 * sum(cost.transfer_seconds(each, cluster) for each in missing)
    assert restore_seconds(layout, MODEL, cluster, strategy.sharding) <= ahead + late_us * 1e-6


@pytest.mark.parametrize("lag", [0, 1])
def test_a_layout_planned_on_the_counts_brings_nothing_ahead(lag):
    strategy, cluster = fsep(prefetch_layers=1).replace(lag=lag), FOUR.replace(intra_node_us=5, inter_node_us=5)
    timeline = simulate_step(strategy, MODEL, cluster, plans(strategy, cluster, *[np.full((4, 4), 512)] * 2))
    counted_us = min(span.end_us for span in timeline.of("counts") if span.detail == "layer 1")
    restored = [span for span in timeline.of("restore") if span.detail == "layer 1"]
    assert (min(span.start_us for span in restored) >= counted_us) == (lag == 0)


@pytest.mark.parametrize("other_us", [0, 100])
def test_delayed_gradients_are_summed_inside_nodes_before_the_layer_behind(other_us):
    """What goes from node to node travels behind it. What goes inside is exposed unless there is more to compute."""
    strategy = fsep(slots_per_rank=1, prefetch_layers=1, delay_reshard=True, reshard="hierarchical")
    layers = plans(strategy, FOUR, HOME, HOME, HOME)
    inside, between = (
        1e6 * cost.transfer_seconds(bytes_RR, FOUR)
        for bytes_RR in cost.reshard_bytes(layers[0].layout, MODEL, FOUR, strategy.sharding)
    )
    restore = 1e6 * restore_seconds(layers[0].layout, MODEL, FOUR, strategy.sharding)
    computed = 3 * (3e6 * cost.expert_seconds(4000.0, MODEL, FOUR, backward=False) + 3 * other_us)
    length = simulate_step(strategy, MODEL, FOUR, layers, other_seconds=other_us * 1e-6).length_us
    assert 0 < inside < 200
    exposed = 3 * inside if other_us == 0 else 0.0
    assert length == pytest.approx(2 * restore + computed + exposed + between)


def test_the_rest_of_a_layer_is_computed_once_forward_and_twice_backward():
    layers = plans(EP, FREE, np.full((4, 4), 3), np.full((4, 4), 5))
    bare = simulate_step(EP, MODEL, FREE, layers)
    timeline = simulate_step(EP, MODEL, FREE, layers, other_seconds=0.01)
    assert timeline.length_us == pytest.approx(bare.length_us + 2 * 3 * 10_000)
    assert len(timeline.of("other", rank=0)) == 4


def test_every_all_to_all_has_its_latency():
    layers = plans(FSEP, FOUR, np.full((4, 4), 3))
    bare, late = (simulate_step(FSEP, MODEL, FREE, layers, latency_seconds=seconds) for seconds in (0.0, 0.001))
    # Dispatch and combine twice, the reshard; both restores run beside a dispatch.
    assert late.length_us == pytest.approx(bare.length_us + 5000)


# --- whatever the step ---


@given(steps(*ON_DEMAND, *AHEAD), st.integers(1, 5))
def test_a_step_is_neither_shorter_than_any_lane_nor_longer_than_everything_in_turn(step, chunks):
    strategy, cluster, layers = step
    length = simulate_step(chunked(strategy, chunks), MODEL, cluster, layers).length_us / 1e6
    restores = 1 if isinstance(strategy.sharding, ms.Ep) or not strategy.sharding.reshard_after_forward else 2
    traffic = []
    for plan in layers:
        bytes_RR = cost.dispatch_bytes(plan, MODEL)
        traffic += [bytes_RR, bytes_RR.T] * 2
        traffic += cost.restore_bytes(plan.layout, MODEL, cluster, strategy.sharding) * restores
        traffic += cost.reshard_bytes(plan.layout, MODEL, cluster, strategy.sharding)
    links = [cost.link_seconds(bytes_RR, cluster) for bytes_RR in traffic]
    compute = [expert_seconds(plan, cluster) for plan in layers]
    assert length >= max(np.sum(links, axis=0).max(), np.sum(compute, axis=0).max()) * (1 - 1e-9)
    in_turn = sum(link.max() for link in links) + sum(seconds_R.max() for seconds_R in compute)
    assert length <= in_turn * (1 + 1e-9)


@given(steps(ms.Ep()), st.integers(1, 6))
def test_chunks_never_make_a_step_slower_where_only_tokens_travel(step, chunks):
    # Beside a restore on demand the whole of an undivided dispatch travels unseen, and only two of many chunks.
    strategy, cluster, layers = step
    whole = simulate_step(strategy, MODEL, cluster, layers)
    assert simulate_step(chunked(strategy, chunks), MODEL, cluster, layers).length_us <= whole.length_us * (1 + 1e-9)


@given(steps(ms.Ep()), st.data())
def test_more_tokens_for_one_expert_never_make_a_sequential_step_faster(step, data):
    strategy, cluster, layers = step
    before = layers[0].load.tokens_RE
    after = before.copy()
    source = data.draw(st.integers(0, cluster.num_ranks - 1))
    expert = data.draw(st.integers(0, MODEL.num_experts - 1))
    after[source, expert] += data.draw(st.integers(1, 500))
    less, more = (simulate_step(strategy, MODEL, cluster, plans(strategy, cluster, load)) for load in (before, after))
    assert more.length_us >= less.length_us * (1 - 1e-12)


def test_one_rank_alone_waits_for_nothing():
    alone = ms.ClusterSpec()
    strategy = fsep(slots_per_rank=4)
    timeline = simulate_step(strategy, MODEL, alone, plans(strategy, alone, [[5, 0, 7, 1]]))
    assert {span.lane for span in timeline.spans} == {"compute"}
    assert exposed_ms(timeline) == pytest.approx(0, abs=1e-12)


def test_a_rank_without_rows_counts_as_one_that_waits():
    """Rank 0 computes for itself, others have nothing to do: three of four ranks wait all the time."""
    (plan,) = plans(EP, FREE, np.diag([8, 0, 0, 0]))
    timeline = simulate_step(EP, MODEL, FREE, [plan])
    assert exposed_ms(timeline) == pytest.approx(0.75 * timeline.length_us / 1000)


def test_an_empty_timeline_has_no_exposed_time():
    empty = Timeline((), "simulated")
    assert (exposed_ms(empty), critical_rank(empty)) == (0.0, 0)


# --- the program is that of the layers ---


LENT_AHEAD = ms.Ep(slots_per_rank=4, lend="hierarchical", prefetch_layers=1, delay_reshard=True)


def issued_by_layers(strategy: ms.Strategy, cluster: ms.ClusterSpec) -> list[tuple[str, str]]:
    """Lane and detail of every all-to-all of a step, as a linked model of three layers issues them on one rank."""
    layers = torch.nn.ModuleList(ms.MoELayer(MODEL, strategy, cluster=cluster, layer_index=index) for index in range(3))
    runtime = ms.link(layers)
    issued: list[tuple[str, str]] = []

    def listen(channel: Any, layer: int) -> None:
        original = channel.all_to_all

        def all_to_all(*args: Any, lane: str, detail: str = "") -> Any:
            issued.append((lane, detail if lane in ("restore", "reshard") else f"layer {layer} {detail}"))
            return original(*args, lane=lane, detail=detail)

        channel.all_to_all = all_to_all

    for layer in layers:
        listen(layer.experts.token_channel, layer.experts.layer_index)
        listen(layer.experts.store.channel, layer.experts.layer_index)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        issued.clear()
        x = torch.randn(32, MODEL.hidden_size, generator=generator, requires_grad=True)
        y = x
        for layer in layers:
            y = y + layer(y)
        y.sum().backward()
    runtime.close()
    return [(lane, detail) for lane, detail in issued if "weights" not in detail]


@pytest.mark.parametrize(
    "strategy",
    [
        EP,
        pytest.param(chunked(fsep(prefetch_layers=1, delay_reshard=True), 2), marks=pytest.mark.slow),
        pytest.param(chunked(LENT.replace(sharding=LENT_AHEAD), 2), marks=pytest.mark.slow),
        chunked(fsep(prefetch_layers=1, delay_reshard=True, restore="hierarchical", reshard="hierarchical"), 2),
        fsep(prefetch_layers=1).replace(lag=0),
        *(
            pytest.param(strategy, marks=pytest.mark.slow)
            for strategy in (
                chunked(EP, 3),
                chunked(LENT.replace(sharding=LENT_AHEAD.replace(prefetch_layers=0, delay_reshard=False)), 2),
                fsep(),
                fsep(prefetch_layers=2, restore="hierarchical"),
                fsep(reshard="hierarchical"),
                chunked(fsep(reshard_after_forward=False, delay_reshard=True), 1),
            )
        ),
    ],
    ids=[
        *("ep", "fsep-ahead-2", "lent-ahead-2", "home-ahead-2", "lag-0"),
        *("ep-3", "lent by node", "fsep", "hierarchical-ahead", "home", "kept"),
    ],
)
def test_all_to_alls_are_issued_in_the_order_of_the_layers(ranks: LocalRanks, monkeypatch, strategy):
    simulated: list[tuple[str, str]] = []
    original = Lanes.send

    def send(self: Any, channel: Any, lane: str, load: Any, detail: str) -> Any:
        simulated.append((lane, detail))
        return original(self, channel, lane, load, detail)

    monkeypatch.setattr(Lanes, "send", send)
    simulate_step(strategy, MODEL, FOUR, plans(strategy, FOUR, *[np.full((4, 4), 16)] * 3))
    for measured in ranks.run(issued_by_layers, strategy, FOUR):
        without_phase = [
            (lane, detail.removesuffix(" between nodes").removesuffix(" inside nodes")) for lane, detail in measured
        ]
        assert without_phase == simulated


@pytest.mark.parametrize("overlap", [ms.Sequential(), ms.Pipelined(chunks=2), ms.MegaKernel()])
def test_nodes_that_nvlink_joins_send_nothing_over_nics(overlap):
    strategy = fsep(slots_per_rank=2).replace(overlap=overlap)
    layers = plans(strategy, FOUR, np.full((4, 4), 50), np.arange(16).reshape(4, 4) * 9)

    def length_us(cluster: ms.ClusterSpec) -> float:
        return simulate_step(strategy, MODEL, cluster, layers).length_us

    joined = length_us(FOUR.replace(ranks_per_domain=4))
    assert joined < length_us(FOUR)
    assert joined == length_us(ms.ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=50, expert_tflops=1))
    assert length_us(FOUR.replace(ranks_per_domain=1)) > length_us(FOUR)


@pytest.mark.parametrize(("strategy", "muon", "legs"), [(EP, "own", 0), (FSEP, "own", 1), (FSEP, "outside", 2)])
def test_muon_adds_products_or_messages_of_each_layer(
    strategy: ms.Strategy, muon: Literal["own", "outside"], legs: int
) -> None:
    """Counted by hand: each rank makes a quarter of the matrices orthogonal, and under ``Fsep`` sends parts of them."""
    H, I, E = MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_experts
    flops = 3 * E * 5 * (4 * H * H * I + 2 * H**3) / 4
    slow, layers = FOUR.replace(expert_tflops=1e-6), plans(strategy, FREE, *[np.full((4, 4), 6)] * 2)
    for cluster, seconds in (
        (slow, 2 * flops / 1e6),
        # A sixteenth of a layer goes from each of a node's two ranks to each of the other node's, by one link.
        (FOUR.replace(expert_tflops=1e12), 2 * legs * 3 * E * H * I * 2 / 16 * 4 / 20e9),
    ):
        without, found = (
            run_step(strategy, MODEL, cluster, [layers], RestOfStep(muon=of)).length_seconds for of in ("none", muon)
        )
        assert found - without == pytest.approx(seconds, rel=1e-3, abs=1e-9)
