"""Trials: what a training or a walk through the cost model gives to its record."""

import numpy as np
import pytest

from moesys import FlowSplit, Generated, Greedy, MegaKernel, Replay, Training
from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Strategy
from moesys.lab.runs.trials import METRICS, run_measured, run_simulated
from moesys.traces import Trace, save_trace

MODEL = ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=1)
EP = Strategy(name="ep")
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=3), balance=Greedy(), split=FlowSplit())


def replay(tmp_path, tokens_SLRE, **changes):
    save_trace(Trace(np.array(tokens_SLRE), top_k=2), tmp_path / "trace.npz")
    return Replay(trace=str(tmp_path / "trace.npz"), **changes)


def values(measurement):
    return {name: samples.values for name, samples in measurement.samples.items()}


def test_a_simulated_trial_has_one_sample_a_timed_step_and_is_a_function_of_its_arguments():
    ticks, workload = [], Generated(warmup=2, steps=3, tokens_per_rank=64)
    measurement = run_simulated(FSEP, MODEL, CLUSTER, workload, seed=0, tick=lambda: ticks.append(1))
    names = ["step_ms", "exposed_ms", "load_max_over_mean", "restored_mib", "inter_node_share"]
    assert list(measurement.samples) == names
    assert {len(samples.values) for samples in measurement.samples.values()} == {3}
    assert (len(ticks), measurement.losses) == (5, [])
    assert np.sum(measurement.tokens_LE, axis=1).tolist() == [3 * 2 * 64 * 2] * 2
    assert all((samples.unit, samples.better) == METRICS[name] for name, samples in measurement.samples.items())
    again, other = (run_simulated(FSEP, MODEL, CLUSTER, workload, seed) for seed in (0, 1))
    assert again == measurement
    assert again.samples != other.samples


def test_a_simulated_trial_says_what_stands_against_it():
    workload, fused = Generated(steps=1, tokens_per_rank=100), EP.replace(name="fused", overlap=MegaKernel())
    nodes = ClusterSpec(num_nodes=2, ranks_per_node=1)
    against, without = (run_simulated(of, MODEL, nodes, workload, seed=0).would_not_run for of in (fused, EP))
    assert against.startswith("overlap=MegaKernel() reaches the ranks of one domain")
    assert without == ""


def test_a_step_of_several_micro_batches_has_one_sample_and_all_their_bytes():
    two, ticks = Generated(warmup=1, steps=3, micro_batches=2, tokens_per_rank=64), []
    of_two = values(run_simulated(FSEP, MODEL, CLUSTER, two, seed=0, tick=lambda: ticks.append(1)))
    of_one = values(run_simulated(FSEP, MODEL, CLUSTER, two.replace(steps=6, micro_batches=1), seed=0))
    assert len(ticks) == 1 + 3 * 2
    names = ("step_ms", "restored_mib", "exposed_ms", "load_max_over_mean", "inter_node_share")
    for name, share in zip(names, (1, 1, 1, 1 / 2, 1 / 2), strict=True):
        assert of_two[name] == pytest.approx(share * np.array(of_one[name]).reshape(3, 2).sum(axis=1))


def test_a_trace_must_hold_a_whole_step(tmp_path):
    workload = replay(tmp_path, [[[[2, 1, 1, 0], [1, 2, 0, 1]]]] * 3, micro_batches=2)
    assert len(values(run_simulated(EP, MODEL, CLUSTER, workload, seed=0))["step_ms"]) == 1
    for changes in ({"warmup": 2}, {"micro_batches": 4}):
        with pytest.raises(ValueError, match=r" a step; use warmup and micro_batches that are at most 3 together"):
            run_simulated(EP, MODEL, CLUSTER, workload.replace(**changes), seed=0)


def test_shares_and_balance_are_those_of_the_plan(tmp_path):
    # Experts 0 and 1 are on rank 0: it computes 6 of 8 rows, and 3 rows leave their node.
    measurement = run_simulated(EP, MODEL, CLUSTER, replay(tmp_path, [[[[2, 1, 1, 0], [1, 2, 0, 1]]]]), seed=0)
    assert values(measurement)["load_max_over_mean"] == [1.5]
    assert values(measurement)["inter_node_share"] == [0.5]
    assert values(measurement)["restored_mib"] == [0.0]
    assert measurement.tokens_LE == [[3, 3, 1, 1]]


def test_experts_that_are_given_back_are_restored_twice(tmp_path):
    workload = replay(tmp_path, [[[[2, 1, 1, 0], [1, 2, 0, 1]]]])
    kept = FSEP.replace(name="kept", sharding=Fsep(slots_per_rank=3, reshard_after_forward=False))
    twice, once = (
        values(run_simulated(strategy, MODEL, CLUSTER, workload, seed=0))["restored_mib"] for strategy in (FSEP, kept)
    )
    # Two ranks receive half of each of the experts that they hold.
    assert once == [pytest.approx(6 * 3 * 16 * 8 / 2 * 4 / 2**20)]
    assert twice == [2 * once[0]]


def test_a_replay_is_folded_and_scaled_to_the_cluster(tmp_path):
    workload = replay(tmp_path, [[[[1, 1, 0, 0]]], [[[0, 0, 1, 1]]]], tokens_per_rank=5)
    measurement = run_simulated(EP, MODEL, CLUSTER, workload, seed=0)
    assert measurement.tokens_LE == [[5, 5, 5, 5]]
    assert values(measurement)["inter_node_share"] == [0.0]


def test_each_seed_replays_its_own_trace_after_the_warm_up(tmp_path):
    for seed, tokens_E in ((0, [1, 1, 0, 0]), (1, [0, 0, 1, 1])):
        save_trace(Trace(np.array([[[tokens_E, tokens_E]]] * 3), top_k=2), tmp_path / f"trace-{seed}.npz")
    workload = Replay(trace=f"{tmp_path}/trace-{{seed}}.npz", warmup=1)
    zero, one = (run_simulated(EP, MODEL, CLUSTER, workload, seed) for seed in (0, 1))
    assert (zero.tokens_LE, one.tokens_LE) == ([[4, 4, 0, 0]], [[0, 0, 4, 4]])
    assert len(zero.samples["step_ms"].values) == 2


@pytest.mark.parametrize("changes", [{"num_experts": 8}, {"top_k": 1}], ids=str)
def test_a_replay_on_another_model_is_refused(tmp_path, changes):
    workload = replay(tmp_path, [[[[1, 1, 0, 0], [1, 1, 0, 0]]]])
    with pytest.raises(ValueError, match=r"trace\.npz is of 4 experts and top_k=2, but the model has num_experts="):
        run_simulated(EP, MODEL.replace(**changes), CLUSTER, workload, seed=0)


def test_a_measured_trial_keeps_losses_samples_and_routing():
    workload = Training(num_layers=2, num_heads=2, context=16, batch=2, micro_batches=2, warmup=1, steps=2)
    lent = Strategy(name="lent", sharding=Ep())
    measurement = run_measured(lent, MODEL, ClusterSpec(), workload, 3)
    assert measurement is not None
    assert len(measurement.losses) == 3
    assert measurement.samples["loss"].values == measurement.losses[1:]
    assert {len(samples.values) for samples in measurement.samples.values()} == {2}
    assert set(METRICS) - set(measurement.samples) == {"inter_node_share"}
    routing = measurement.routing
    assert routing is not None
    assert routing.tokens_SLRE.shape == (4, 2, 1, 4)
    assert routing.top_k == 2
    assert routing.tokens_SLRE.sum(axis=-1).tolist() == [[[2 * 16 * 2]] * 2] * 4
    assert measurement.tokens_LE == routing.tokens_SLRE.sum(axis=(0, 2)).tolist()
    assert routing.meta["seed"] == "3"
