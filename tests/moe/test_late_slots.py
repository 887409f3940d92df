"""Experts that are chosen on the current counts: late slots, and whole layouts with lag=0, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Case, Stack, assert_same_bits, assert_same_training, run_cases, tokens_of, train

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.timeline import Timeline

SHAPE = ms.ModelShape(hidden_size=24, intermediate_size=16, num_experts=6, top_k=2)
# Computing is dear beside bytes, so that fetching pays although there are few tokens.
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, expert_tflops=1e-6)
THREE = ms.Fsep(slots_per_rank=3)
FSEP = ms.Strategy(name="fsep", sharding=THREE, balance=ms.Greedy(), split=ms.FlowSplit(), late_slots=1, lag=2)
BEHIND = FSEP.replace(sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=2, delay_reshard=True))
QUOTAS: dict[str, Any] = {"split": ms.Quotas(), "late_slots": 0, "lag": 0}
CHOOSING = {
    "fsep": FSEP,
    "hierarchical": FSEP.replace(sharding=ms.Fsep(slots_per_rank=3, restore="hierarchical")),
    "ep": FSEP.replace(sharding=ms.Ep(slots_per_rank=4), late_slots=2, balance=ms.Static()),
    "fsep, lag 0": FSEP.replace(late_slots=0, lag=0),
    "moon_ep": FSEP.replace(sharding=ms.Ep(slots_per_rank=4), balance=ms.MoonEp(), **QUOTAS),
    "llep": FSEP.replace(balance=ms.Llep(min_tokens=1), **QUOTAS),
    "ep, lag 0": FSEP.replace(sharding=ms.Ep(slots_per_rank=3), late_slots=0, lag=0, balance=ms.Eplb()),
}
OVERLAPS = (ms.Sequential(), ms.Pipelined(chunks=7))
TOKENS = [[37, 5, 64, 18], [0, 40, 9, 22]]


def test_overlap_changes_no_bit_of_what_is_planned_on_the_counts(ranks: LocalRanks) -> None:
    cases = [
        Case(SHAPE, strategy.replace(overlap=overlap), TOKENS, cluster=CLUSTER, skew=1.0, shuffle_layouts=True)
        for strategy in CHOOSING.values()
        for overlap in OVERLAPS
    ]
    for rank, results in enumerate(ranks.run(run_cases, cases)):
        for place, (name, strategy) in enumerate(CHOOSING.items()):
            first, *others = results[place * len(OVERLAPS) : (place + 1) * len(OVERLAPS)]
            assert_same_bits([first, *others], f"rank {rank}, {name}")
            assert all(other["layouts"] == first["layouts"] for other in others), name
            if isinstance(strategy.split, ms.Quotas):
                assert first["imbalance"][0] < 1.1, f"{name}: what the planner promises is not what was computed"
            if late := strategy.late_slots:
                filled = [e for layout in first["layouts"] for row in layout for e in row[-late:] if e >= 0]
                assert filled, f"{name}: nothing was fetched late"


@pytest.mark.parametrize("late_slots", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["late slots", "lag 0"])
def test_linking_and_recomputing_changes_no_bit(ranks: LocalRanks, late_slots: int) -> None:
    on_demand, behind = FSEP, BEHIND
    if not late_slots:
        on_demand, behind = (strategy.replace(lag=0, late_slots=0) for strategy in (FSEP, BEHIND))
    plain = ranks.run(train, SHAPE, on_demand, False, False, CLUSTER, 2)
    kept = behind.replace(sharding=behind.sharding.replace(reshard_after_forward=False), overlap=ms.Pipelined(chunks=2))
    for arguments in ((behind, True, True), (kept, True, False))[: 1 if late_slots else 2]:
        for before, after in zip(plain, ranks.run(train, SHAPE, *arguments, CLUSTER, 2), strict=True):
            assert_same_training(after, before, arguments)
    assert len({str(layouts) for layouts in plain[0]["layouts"]}) > 1


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


@pytest.mark.parametrize("sharding", ["fsep", "ep", "ep, ahead", "lag 0"])
def test_restored_bytes_and_spans(ranks: LocalRanks, sharding: str) -> None:
    lent = CHOOSING["ep"]
    strategy = {"ep": lent, "ep, ahead": lent.replace(sharding=lent.sharding.replace(prefetch_layers=1))}.get(
        sharding, BEHIND
    )
    strategy = strategy.replace(lag=0, late_slots=0) if sharding == "lag 0" else strategy
    R, parameters = CLUSTER.num_ranks, SHAPE.expert_parameters
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
