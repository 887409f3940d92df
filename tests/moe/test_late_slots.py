"""Tests what travels for experts that are chosen on the current counts, in late slots and with lag=0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Stack, tokens_of

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.timeline import Timeline

SHAPE = ms.ModelShape(hidden_size=24, intermediate_size=16, num_experts=6, top_k=2)
# Computing is dear beside bytes, so that fetching pays although there are few tokens.
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, expert_tflops=1e-6)
AHEAD = ms.Fsep(slots_per_rank=3, prefetch_layers=2, delay_reshard=True)
FSEP = ms.Strategy(name="fsep", sharding=AHEAD, balance=ms.Greedy(), split=ms.FlowSplit(), late_slots=1, lag=2)
LENT = FSEP.replace(sharding=ms.Ep(slots_per_rank=4), late_slots=2, balance=ms.Static())
STRATEGIES = {
    "fsep": FSEP,
    "ep": LENT,
    "ep, ahead": LENT.replace(sharding=ms.Ep(slots_per_rank=4, prefetch_layers=1)),
    "lag 0": FSEP.replace(lag=0, late_slots=0),
}


def step(strategy: ms.Strategy) -> tuple[Timeline, list[Any], dict[tuple[str, str], int]]:
    """A forward of two linked layers whose order is known: its spans, layouts, and bytes received by the second."""
    model = Stack(SHAPE, strategy, num_layers=2, cluster=CLUSTER)
    runtime = ms.link(model, record_spans=True)
    with torch.no_grad():
        model(tokens_of(1, SHAPE.hidden_size))
        runtime.recorder.clear()
        for moe in model.moe:
            moe.experts.meter.clear()
        model(tokens_of(2, SHAPE.hidden_size))
    layouts = [moe.last_plan.layout.expert_RS.tolist() for moe in model.moe]
    received = {key: count for key, count in model.moe[1].experts.meter.wire_bytes.items() if key[0] == "restore"}
    timeline = runtime.timeline()
    runtime.close()
    return timeline, layouts, received


@pytest.mark.parametrize("sharding", STRATEGIES)
def test_restored_bytes_and_spans(ranks: LocalRanks, sharding: str) -> None:
    strategy, R, parameters = STRATEGIES[sharding], CLUSTER.num_ranks, SHAPE.expert_parameters
    for rank, (timeline, layouts, received) in enumerate(ranks.run(step, strategy)):
        layout = ms.planning.ExpertLayout(layouts[1], SHAPE.num_experts)
        held = set(layout.experts_of(rank))
        assert layout.num_duplicates == 0
        if isinstance(strategy.sharding, ms.Ep):
            borrowed = [expert for expert in held if expert // 2 != rank]
            assert sum(received.values()) == 4 * parameters * len(borrowed)
        else:
            assert sum(received.values()) == 4 * -(-parameters // R) * (R - 1) * len(held)
        restores = [span.detail for span in timeline.of("restore")]
        if strategy.late_slots:
            assert (layout.expert_RS[:, -strategy.late_slots :] >= 0).any()
        # What comes ahead comes in a message of its own; what nobody brings ahead comes together with late ones.
        late = ["layer 1 late"] if sharding in ("fsep", "ep, ahead") else []
        assert restores == ["layer 0", "layer 1", *late]
