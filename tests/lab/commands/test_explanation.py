"""explain: its figures are those of the plan, moved experts are named, every bound is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lab_cases import experiment

from moesys import Eplb, EvenSplit, FlowSplit, Greedy, explain, plan_layout
from moesys.balance.replay import replay_steps
from moesys.balance.run_planner import split_tokens
from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Strategy, WindowMean
from moesys.config.experiment import Experiment
from moesys.config.overlap import Pipelined
from moesys.config.workload import Generated, Replay, Training
from moesys.cost import link_load
from moesys.lab.commands.explain import explanation_tree
from moesys.lab.runs.trials import run_simulated
from moesys.load import LoadMatrix
from moesys.simulator.simulation import SLOWER_RANKS, Lanes
from moesys.simulator.step_program import simulation
from moesys.traces import Trace, generate, save_trace

MODEL = ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=3), balance=Greedy(), split=FlowSplit())
SLOW = FSEP.replace(
    name="slow",
    predictor=WindowMean(steps=2),
    replan_every=2,
    lag=3,
    balance=Eplb(),
    overlap=Pipelined(chunks=3),
    sharding=Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True, restore="hierarchical"),
)
LENT = Strategy(name="lent", sharding=Ep(slots_per_rank=2), balance=Eplb())
DRAWN = Generated(warmup=2, steps=5, tokens_per_rank=64, num_layers=3, drift=0.6, skew=1.5)


def declared(*strategies: Strategy, **changes) -> Experiment:
    return experiment(model=MODEL, cluster=CLUSTER, strategies=strategies, workload=DRAWN, **changes)


def replayed(tmp_path: Path, tokens_SLRE, *strategies: Strategy) -> Experiment:
    """An experiment that replays these counts, one slot a rank unless the strategies say otherwise."""
    counts_SLRE = np.array(tokens_SLRE)
    save_trace(Trace(counts_SLRE, top_k=1), tmp_path / "trace.npz")
    R, E = counts_SLRE.shape[2:]
    return experiment(
        model=MODEL.replace(num_experts=E, top_k=1),
        cluster=ClusterSpec(ranks_per_node=R),
        strategies=strategies,
        workload=Replay(trace=str(tmp_path / "trace.npz")),
        seeds=(0,),
    )


# --- figures ------------------------------------------------------------------------------------------------------


def test_every_count_is_that_of_the_plans_own_entries():
    strategy = FSEP.replace(balance=Eplb())
    step = explain(strategy, declared(strategy), micro_batch=3)
    trace = generate(DRAWN, 4, 6, 2, seed=0)
    for layer, found in enumerate(step.layers):
        model = declared(strategy).model
        layout = plan_layout(LoadMatrix(np.ones((4, 6), dtype=int)), CLUSTER, Eplb(), 3, model=model)
        for tokens_RE in trace.tokens_SLRE[:3, layer]:
            load = LoadMatrix(tokens_RE)
            known = {"model": model, "previous": layout, "strategy": strategy}
            layout = plan_layout(load, CLUSTER, Eplb(), 3, **known)
        load = LoadMatrix(trace.tokens_SLRE[3, layer])
        plan = split_tokens(load, layout, CLUSTER, strategy.split, turn=3)
        even = split_tokens(load, layout, CLUSTER, EvenSplit(), turn=3)

        places = {"rank": 0, "node": 0, "other": 0}
        row_bytes = {True: 0, False: 0}
        for source, _, destination, tokens in plan.entries.tolist():
            same_node = source // 2 == destination // 2
            places["rank" if source == destination else "node" if same_node else "other"] += tokens
            row_bytes[same_node] += tokens * 16 * 4 * (source != destination)
        # Every other rank sends its ceil(384 / 4) parameters of each distinct expert that a rank holds.
        held = sum(len(set(layout.experts_of(rank))) for rank in range(4))
        restored = {True: held * 96 * 4, False: 2 * held * 96 * 4}

        assert found.tokens_E == load.tokens_E.tolist()
        assert found.experts_R == [list(layout.experts_of(rank)) for rank in range(4)]
        assert found.tokens_R == plan.tokens_R.tolist()
        assert (found.max_over_mean, found.even_max_over_mean) == (plan.max_over_mean, even.max_over_mean)
        assert found.least_max_over_mean == found.max_over_mean, "a flow split attains the bound"
        assert (found.on_rank, found.within_node, found.between_nodes) == tuple(places.values())
        traffic = {of.kind: (of.intra_node_bytes, of.inter_node_bytes, of.times) for of in found.traffic}
        assert traffic == {
            "dispatch": (row_bytes[True], row_bytes[False], 2),
            "combine": (row_bytes[True], row_bytes[False], 2),
            "restore": (restored[True], restored[False], 2),
            "reshard": (restored[True], restored[False], 1),
        }
        assert found.tokens_R[found.busiest_rank] == max(found.tokens_R)


@pytest.mark.parametrize("strategy", [Strategy(name="ep"), LENT, FSEP, SLOW], ids=lambda strategy: strategy.name)
def test_a_step_takes_as_long_as_in_a_simulated_trial(strategy):
    trial = run_simulated(strategy, MODEL, CLUSTER, DRAWN, seed=0)
    for index in (0, DRAWN.steps - 1):
        step = explain(strategy, declared(strategy), micro_batch=DRAWN.warmup + index)
        imbalance = np.mean([layer.max_over_mean for layer in step.layers])
        found = {"step_ms": step.step_ms, "exposed_ms": step.exposed_ms, "load_max_over_mean": imbalance}
        assert found == {name: trial.samples[name].values[index] for name in found}


@pytest.mark.parametrize("strategy", [Strategy(name="ep"), LENT, FSEP, SLOW], ids=lambda strategy: strategy.name)
def test_computing_and_waiting_add_up_to_the_step_as_layers_and_the_critical_path_do(strategy):
    step = explain(strategy, declared(strategy))
    waits = sum(ms for kind, ms in step.mean_ms.items() if kind not in ("experts", "weight_gradients"))
    assert waits == pytest.approx(step.exposed_ms)
    for by_kind, of_layers in (
        (step.mean_ms, [layer.mean_ms for layer in step.layers]),
        (step.critical_ms, [layer.critical_ms for layer in step.layers]),
    ):
        assert sum(by_kind.values()) == pytest.approx(step.step_ms)
        for kind, ms in by_kind.items():
            assert sum(of_layer.get(kind, 0.0) for of_layer in of_layers) == pytest.approx(ms)
    assert sum(place.ms for place in step.critical_path) == pytest.approx(step.step_ms)
    assert sum(place.share for place in step.critical_path) == pytest.approx(1)
    first = step.critical_path[0]
    assert first.ms == max(place.ms for place in step.critical_path)
    assert f"{first.where}: {100 * first.share:.0f} % of the step" in str(step)


def test_what_a_workload_says_of_the_rest_of_a_step_is_explained():
    rest = DRAWN.replace(other_ms=2.0, recompute="computing")
    step = explain(FSEP, declared(FSEP).replace(workload=rest))
    assert step.mean_ms["other"] == pytest.approx(3 * (1 + 1 + 2) * 2.0)
    assert "computes other" in str(step)
    kept = explain(FSEP, declared(FSEP).replace(workload=DRAWN.replace(other_ms=2.0)))
    assert kept.exposed_ms == pytest.approx(explain(FSEP, declared(FSEP)).exposed_ms)
    assert step.mean_ms["experts"] == pytest.approx(1.5 * kept.mean_ms["experts"])


@pytest.mark.parametrize("strategy", [Strategy(name="ep"), SLOW], ids=lambda strategy: strategy.name)
def test_the_optimizer_is_of_no_layer(strategy):
    step = explain(strategy, declared(strategy).replace(workload=DRAWN.replace(optimizer_ms=2.0)))
    bare = explain(strategy, declared(strategy))
    assert step.mean_ms["optimizer"] == step.critical_ms["optimizer"] == pytest.approx(2.0)
    assert step.step_ms == pytest.approx(bare.step_ms + 2.0)
    assert sum(step.mean_ms.values()) == pytest.approx(step.step_ms)
    assert not any("optimizer" in layer.mean_ms for layer in step.layers)
    for kind in ("experts", "weight_gradients"):
        assert sum(layer.mean_ms[kind] for layer in step.layers) == pytest.approx(step.mean_ms[kind])
    assert "computes optimizer" in str(step)


@pytest.mark.parametrize("strategy", [LENT, FSEP, SLOW], ids=lambda strategy: strategy.name)
def test_times_are_those_that_the_simulator_counted(strategy):
    step, trace = explain(strategy, declared(strategy)), generate(DRAWN, 4, 6, 2, seed=0)
    *_, last = replay_steps(strategy, MODEL, CLUSTER, trace.tokens_SLRE)
    simulated = simulation([last])
    waited_ms = {kind: 1e3 * seconds_R.mean() for kind, seconds_R in simulated.waited_R.items()}
    computed_ms = {kind: 1e3 * seconds_R.mean() for kind, seconds_R in simulated.computed_R.items()}
    for kind, ms in {**waited_ms, **computed_ms}.items():
        if kind != SLOWER_RANKS:
            assert step.mean_ms.get(kind, 0.0) == pytest.approx(ms)
    # Ranks that are through before the last one wait for it.
    assert step.mean_ms.get(SLOWER_RANKS, 0.0) >= waited_ms[SLOWER_RANKS] * (1 - 1e-9)


def test_a_wait_counts_in_the_layer_that_waits_for_what_has_begun_or_for_slower_ranks():
    lanes = Lanes(CLUSTER, copy_share=0.0)
    lanes.layer = 0
    lanes.compute(np.array([1.0, 2.0, 3.0, 3.0]), "experts", "layer 0")
    bytes_RR = 1e9 * (1 - np.eye(4))
    transfer = lanes.send("tokens", "dispatch", link_load(bytes_RR, CLUSTER), "layer 0")
    lanes.layer = 1
    lanes.wait(transfer)
    assert lanes.spent_R[0] == {"experts": pytest.approx([1, 2, 3, 3])}
    assert lanes.spent_R[1][SLOWER_RANKS] == pytest.approx([2, 1, 0, 0])
    assert lanes.spent_R[1]["dispatch"] == pytest.approx(lanes.now_R - 3)
    assert (lanes.now_R > 3).all()


# --- what moved ---------------------------------------------------------------------------------------------------

# Three ranks, two experts: even, even, then expert 1 is wanted ten times as much.
TURN = [[[[4, 4]] * 3], [[[4, 4]] * 3], [[[1, 10]] * 3], [[[1, 10]] * 3], [[[1, 10]] * 3]]


def test_an_expert_that_became_hot_is_named_with_its_new_replica_and_so_are_plans_that_move_nothing(tmp_path):
    strategy = Strategy(name="eplb [hot]", sharding=Fsep(slots_per_rank=1), balance=Eplb(hierarchical=True))
    of = replayed(tmp_path, TURN, strategy)
    before, step, after = (explain(strategy, of, micro_batch=number) for number in (2, 3, 4))
    (layer,) = step.layers
    hot, cold = layer.change.experts
    assert (hot.expert, hot.replicas_before, hot.replicas_after) == (1, 1, 2)
    assert (cold.expert, cold.replicas_before, cold.replicas_after) == (0, 2, 1)
    assert (hot.load_over_mean, cold.load_over_mean) == (30 / 16.5, 3 / 16.5)
    assert (hot.gained_ranks, hot.lost_ranks) == (cold.lost_ranks, cold.gained_ranks)
    (rank,) = hot.gained_ranks
    assert layer.experts_R[rank] == [1]
    assert layer.change.max_over_mean_before > layer.change.max_over_mean_after
    assert (before.layers[0].change, before.layers[0].num_kept) == (None, 2)
    for found, kept in ((layer, 0), (after.layers[0], 1)):
        assert (found.change.since, found.change.history, found.num_kept) == (3, (2, 2), kept)
    text = str(step)
    assert text.startswith("SIMULATED: eplb [hot] of tiny, micro-batch 3 of 0 to 4, seed 0\n")
    assert f"expert 1: 1 -> 2 replicas, it has 1.82 × the mean load; new on rank {rank}\n" in text
    assert f"expert 0: 2 -> 1 replicas, it has 0.18 × the mean load; gone from rank {rank}\n" in text
    assert "layout: planned by eplb(hierarchical=True) on micro-batch 2 (last), in use since 3\n" in text
    assert f"load: replayed from {tmp_path / 'trace.npz'}\n" in text


def test_what_moved_is_told_of_a_split_by_seconds_too():
    by_seconds = FSEP.replace(split=FlowSplit(max_inter_node="seconds"))
    assert any(layer.change for layer in explain(by_seconds, declared(by_seconds)).layers)


def test_the_history_that_a_plan_was_made_on_follows_predictor_lag_and_replan_every():
    """Plans are made after micro-batches 1, 3 and 5, on two loads each, and used three micro-batches later."""
    trace = generate(DRAWN, 4, 6, 2, seed=0)
    step = explain(SLOW, declared(SLOW), micro_batch=6)
    for index, layer in enumerate(step.layers):
        assert layer.change.history in ((0, 1), (2, 3))
        assert layer.change.since == layer.change.history[1] + 3
        planned_for = trace.tokens_SLRE[2:4, index].sum(axis=0)
        expected = plan_layout(LoadMatrix(planned_for), CLUSTER, SLOW.balance, 3)
        assert layer.experts_R == [list(expected.experts_of(rank)) for rank in range(4)]


# --- the tree -----------------------------------------------------------------------------------------------------


def test_the_hottest_experts_are_named_and_a_layer_without_any_token_is_explained_too(tmp_path):
    strategy = Strategy(name="ep")
    step = explain(strategy, replayed(tmp_path, [[[[5, 0, 3], [5, 0, 3]]]], strategy))
    assert "load of 16 tokens: expert 0 10 (1.88 × the mean), expert 2 6 (1.12 × the mean)\n" in str(step)
    step = explain(strategy, replayed(tmp_path, [[[[0, 0], [0, 0]], [[1, 0], [0, 1]]]], strategy))
    assert step.layers[0].num_tokens == 0
    assert "load of 0 tokens: none\n" in str(step)


def test_a_trainings_load_is_drawn_and_the_tree_says_so():
    workload = Training(num_layers=3, context=16, batch=2, micro_batches=2, warmup=1, steps=4)
    step = explain(FSEP, declared(FSEP).replace(workload=workload))
    assert (len(step.layers), step.num_micro_batches) == (3, 10)
    assert {layer.num_tokens for layer in step.layers} == {4 * 16 * 2 * 2}
    words = "load: drawn, log_normal with skew 1, drift 0.05, spread 0.1; what a training's own routers want"
    assert words in str(step)


def test_a_static_layout_has_no_history_and_the_least_even_layer_is_in_detail_unless_one_is_chosen():
    step = explain(Strategy(name="ep"), declared(Strategy(name="ep")))
    assert all(layer.change is None and layer.num_kept == 0 for layer in step.layers)
    assert "layout: the first one, made before any load was known, and for ever" in str(step)
    worst = max(step.layers, key=lambda layer: layer.max_over_mean).layer
    for chosen in (None, 0, 1, 2):
        label = explanation_tree(step, chosen).children[-1].label
        assert str(label) == f"layer {worst if chosen is None else chosen}"


def test_late_slots_are_named_and_their_bytes_counted(tmp_path):
    # Expert 0 is hot only in the last micro-batch, and has one replica.
    calm, hot = [[[8, 8, 8, 8]] * 4], [[[64, 1, 1, 1]] * 4]
    late = FSEP.replace(name="late", sharding=Fsep(slots_per_rank=2, prefetch_layers=1), late_slots=1, balance=Eplb())
    declared = replayed(tmp_path, [calm, calm, hot], late)
    slow = declared.cluster.replace(expert_tflops=1e-6)
    found = explain(late, declared.replace(cluster=slow))
    (layer,) = found.layers
    ranks = [rank for rank, experts in enumerate(layer.late_experts_R) if experts == [0]]
    assert ranks
    assert layer.late_experts_R == [[0] if rank in ranks else [] for rank in range(4)]
    assert all(layer.experts_R[rank][-1] == 0 for rank in ranks)
    (traffic,) = [one for one in layer.traffic if one.kind == "late restore"]
    expert_bytes = 4 * 3 * 16 * 8
    assert traffic.intra_node_bytes + traffic.inter_node_bytes == len(ranks) * expert_bytes * 3 // 4
    text = str(found)
    assert f"expert 0 on rank {ranks[0]}" in text
    assert "late_slots=1" in text


def test_a_layout_planned_on_the_counts_says_so(tmp_path):
    now = FSEP.replace(name="now", sharding=Fsep(slots_per_rank=2), balance=Eplb(), lag=0)
    text = str(explain(now, replayed(tmp_path, [[[[64, 1, 1, 1]] * 4]] * 2, now)))
    assert "planned by eplb on this micro-batch's own counts" in text
