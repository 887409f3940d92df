"""StepPlan: all layers of a step, to be printed, kept and simulated."""

from __future__ import annotations

import numpy as np
import pytest

import moesys as ms
from moesys.balance.plan import StepPlan
from moesys.simulator.step_program import simulate

MODEL = ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=3, top_k=2)
CLUSTER = ms.ClusterSpec(num_nodes=1, ranks_per_node=2)
STRATEGY = ms.Strategy(
    name="both",
    sharding=ms.Fsep(slots_per_rank=2, prefetch_layers=1),
    balance=ms.Greedy(),
    split=ms.FlowSplit(),
    overlap=ms.Pipelined(chunks=2),
)


def plan_of(tokens_RE: object, turn: int = 0) -> ms.planning.LayerPlan:
    return ms.planning.plan_layer(STRATEGY, MODEL, CLUSTER, ms.planning.LoadMatrix(np.array(tokens_RE)), turn=turn)


LAYERS = (plan_of([[3, 3, 3], [1, 0, 0]], turn=3), plan_of([[0, 9, 1], [1, 9, 0]], turn=np.int64(3)))
STEP = StepPlan(STRATEGY, MODEL, CLUSTER, LAYERS)
EMPTY = StepPlan(STRATEGY, MODEL, CLUSTER, (plan_of(np.zeros((2, 3), dtype=int)),))


@pytest.mark.parametrize("step", [STEP, EMPTY], ids=["two layers", "no tokens"])
def test_a_step_survives_json(step):
    assert StepPlan.from_json(step.to_json()) == step


def test_a_step_that_was_kept_simulates_as_before():
    timeline = simulate(STEP)
    assert timeline == simulate(StepPlan.from_json(STEP.to_json()))
    assert timeline.source == "simulated"
    assert {span.lane for span in timeline.spans} == {"compute", "dispatch", "combine", "restore", "reshard"}
    # The rest of the layers and latency reach the simulator.
    assert simulate(STEP, other_seconds=0.001).length_us >= 2 * 3000 > timeline.length_us
    assert simulate(STEP, latency_seconds=0.001).length_us >= 8000 > timeline.length_us


def test_a_step_prints_every_layer():
    assert str(STEP).splitlines()[1:] == [
        "layer  rank  tokens  experts",
        "    0     0       5  0 1",
        "    0     1       5  0 2",
        "    1     0      10  1 2",
        "    1     1      10  0 1",
    ]
