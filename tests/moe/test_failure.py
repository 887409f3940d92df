"""A dead rank ends every other rank within its time-out, with an error that names it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from harness import Stack

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "fsep": ms.Strategy(
        name="fsep",
        sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True),
        balance=ms.Greedy(),
        overlap=ms.Pipelined(chunks=2),
    ),
}
GRACE_S = 1.5
COLLECTIVE_TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4, timeouts=RankTimeouts(run_s=40, collective_s=COLLECTIVE_TIMEOUT_S)) as pool:
        yield pool


def train_until(victim: int, signal_number: int, strategy: ms.Strategy, linked: bool) -> None:
    """Steps without end; in its third, ``victim`` gets a signal in the middle of its forward."""
    model = Stack(SHAPE, strategy, num_layers=2)
    if linked:
        ms.link(model)
    for moe in model.moe:
        moe.experts.token_channel.failure_grace_s = moe.experts.store.channel.failure_grace_s = GRACE_S
    for step in range(1000):
        x = torch.randn(20, 16)
        if step == 2 and dist.get_rank() == victim:
            model.mixers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal_number))
        model(x).sum().backward()


@pytest.mark.parametrize(
    ("name", "linked", "victim", "signal_number"),
    [
        pytest.param("ep", False, 2, signal.SIGKILL, marks=pytest.mark.slow),
        ("ep", False, 1, signal.SIGSTOP),
        pytest.param("fsep", True, 2, signal.SIGKILL, marks=pytest.mark.slow),
        ("fsep", True, 0, signal.SIGKILL),
        pytest.param("fsep", True, 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["killed", "hung", "linked, killed", "linked, first rank killed", "linked, hung"],
)
def test_a_dead_rank_is_named_by_all_others(
    mortal_ranks: LocalRanks, name: str, linked: bool, victim: int, signal_number: int
) -> None:
    outcomes = mortal_ranks.outcomes(train_until, victim, signal_number, STRATEGIES[name], linked, expect_dead={victim})
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.kind == "raised", outcome
            assert f"rank {victim} did not answer: dead or hung" in outcome.trace, outcome.trace
            # Its time-out, the grace that names the dead, and what a busy machine adds.
            assert outcome.seconds < COLLECTIVE_TIMEOUT_S + GRACE_S + 10
