"""A person's own planner on real ranks: it trains, and what it gets wrong ends every rank, none of which waits."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from foreign_planners import FaultyBalance, FaultySplit, FirstHolder, Rotated
from harness import Stack, gradients_of

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
# The last rank has fewer slots.
SLOTS = (4, 4, 3)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=SLOTS, prefetch_layers=1), split=ms.FlowSplit())
OWN = FSEP.replace(name="own", balance=Rotated(), split=FirstHolder())
RANKS, TIMEOUT_S = len(SLOTS), 60


def steps(strategy: ms.Strategy, linked: bool) -> dict[str, torch.Tensor]:
    """Two micro-batches and one on the layouts of the second."""
    model = Stack(SHAPE, strategy, num_layers=2)
    runtime = ms.link(model) if linked else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    try:
        for step in range(3):
            x = torch.randn(5, SHAPE.hidden_size, generator=generator)
            y = model(x)
            y.square().sum().backward()
            found[f"y {step}"] = y.detach()
    finally:
        if runtime is not None:
            runtime.close()
    # The layout that it began with is not the last one.
    assert strategy != OWN or any(moe.last_plan.layout.experts_of(0) != (0, 1, 2, 3) for moe in model.moe)
    return found | gradients_of(model)


def largest_difference(linked: bool) -> float:
    """Of what one's own and moesys' planner train, over all outputs and gradients."""
    own, ours = steps(OWN, linked), steps(FSEP, linked)
    return max(float((own[name] - ours[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("linked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_planner_of_ones_own_trains_the_same_model(ranks: LocalRanks, linked: bool) -> None:
    assert max(ranks.run(largest_difference, linked, num_ranks=RANKS, timeout_s=TIMEOUT_S)) < 1e-5


def said_by(strategies: list[ms.Strategy], linked: bool) -> list[str]:
    """What ends each of them here, in a line."""
    said = []
    for strategy in strategies:
        with pytest.raises((ValueError, RuntimeError)) as ended:
            steps(strategy, linked)
        said.append(str(ended.value).splitlines()[0])
    return said


BALANCE_FAULTS = {
    "raises": "foreign_planners:FaultyBalance: layout(problem) raised KeyError: 'an idea that I did not have'",
    "exits": "foreign_planners:FaultyBalance: layout(problem) raised SystemExit: enough",
    "loses": "foreign_planners:FaultyBalance: layout(problem) raised ValueError: no rank holds experts [5]",
    "overfills": "foreign_planners:FaultyBalance: layout(problem) put 4 experts on rank 2, which has 3 slots",
    "twice": "foreign_planners:FaultyBalance: layout(problem) put expert 0 on rank 0 4 times",
    "shape": "foreign_planners:FaultyBalance: layout(problem) returned expert_RS of shape [3, 5] for 6 experts",
    "list": "foreign_planners:FaultyBalance: layout(problem) returned list; let it return an ms.planning.ExpertLayout",
}
SPLIT_FAULTS = {
    "raises": "foreign_planners:FaultySplit: split(problem) raised KeyError: 'an idea that I did not have'",
    "stranger": "which does not hold it",
    "loses": "the plan sends 0 tokens of source",
    "list": "foreign_planners:FaultySplit: split(problem) returned list; let it return an ms.planning.TokenPlan",
}


@pytest.mark.parametrize("linked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_it_gets_wrong_ends_every_rank(ranks: LocalRanks, linked: bool) -> None:
    strategies = [FSEP.replace(name="faulty", balance=FaultyBalance(fault=fault)) for fault in BALANCE_FAULTS]
    strategies += [FSEP.replace(name="faulty", split=FaultySplit(fault=fault)) for fault in SPLIT_FAULTS]
    wanted = [*BALANCE_FAULTS.values(), *SPLIT_FAULTS.values()]
    for said in ranks.run(said_by, strategies, linked, num_ranks=RANKS, timeout_s=TIMEOUT_S):
        assert [message for message, words in zip(said, wanted, strict=True) if words not in message] == []


@pytest.mark.parametrize("fault", ["raises", "list"])
def test_one_rank_alone_meets_errors_in_its_first_forward_pass(fault: str) -> None:
    alone = FSEP.replace(sharding=ms.Fsep(slots_per_rank=6))
    for own, words in (
        ({"balance": FaultyBalance(fault=fault)}, BALANCE_FAULTS[fault]),
        ({"split": FaultySplit(fault=fault)}, SPLIT_FAULTS[fault]),
    ):
        layer = ms.MoELayer(SHAPE, alone.replace(name="faulty", **own))
        with pytest.raises(ValueError, match=re.escape(words)):
            layer(torch.randn(5, SHAPE.hidden_size))


def test_what_goes_wrong_on_one_rank_ends_all(ranks: LocalRanks) -> None:
    strategies = [FSEP.replace(name="one", split=FaultySplit(fault="raises on rank 1"))]
    strategies += [FSEP.replace(name="one", balance=FaultyBalance(fault="raises on rank 1"))]
    for said in ranks.run(said_by, strategies, True, num_ranks=RANKS, timeout_s=TIMEOUT_S):
        assert ["raised AssertionError: not here" in message for message in said] == [True] * 2


def test_ranks_that_plan_differently_all_end(ranks: LocalRanks) -> None:
    # as many slots on all ranks, so that rows may change places
    even = FSEP.replace(sharding=ms.Fsep(slots_per_rank=4))
    strategies = [even.replace(balance=FaultyBalance(fault="impure")), even.replace(split=FaultySplit(fault="impure"))]
    for said in ranks.run(said_by, strategies, False, num_ranks=RANKS, timeout_s=TIMEOUT_S):
        assert ["planned differently from the same counts" in message for message in said] == [True] * 2
