"""Layers whose layouts are planned for the very loads that replayed routing brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import refusal
from harness import Stack
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

E, K, L, S = 8, 2, 2, 4
SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=E, top_k=K)
FORESEEING = ms.Strategy(
    name="oracle", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Eplb(), split=ms.FlowSplit(), predictor=ms.Oracle()
)
CLUSTER = ms.ClusterSpec(ranks_per_node=4)


def skewed(rank: int, micro_batch: int) -> Tensor:
    """Ids [L, T, K] of which some experts have most, others in each micro-batch; ranks have different T."""
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    preference = torch.rand(L, 20 + 7 * rank, E, generator=generator)
    preference[0, :, micro_batch] += 0.7
    preference[1, :, E - 1 - micro_batch] += 0.7
    return preference.topk(K, dim=2).indices


def tokens(rank: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(20 + 7 * rank, 16, generator=generator)


def trained(strategy: ms.Strategy, linked: bool) -> tuple[list[Any], str]:
    """Two steps of ``S`` micro-batches, an evaluation between them, then one without replay: layouts, and its error."""
    model, rank = Stack(SHAPE, strategy, L), dist.get_rank()
    runtime = ms.link(model, plan_timeout_s=7.0) if linked else None
    layouts: list[list[list[list[int]]]] = []
    for step in range(2):
        ids = [skewed(rank, (micro_batch + step) % S) for micro_batch in range(S)]
        with ms.replay_routing(model, ids):
            for micro_batch in range(S):
                model(tokens(rank, micro_batch)).square().sum().backward()
                layouts.append([layer.last_plan.layout.expert_RS.tolist() for layer in model.moe])
        with torch.no_grad(), ms.replay_routing(model.eval(), ids[:1]):
            model(tokens(rank, 0))
        model.train()
    said = refusal(model, tokens(rank, 0))
    if runtime is not None:
        runtime.close()
    return layouts, said


@pytest.mark.parametrize("linked", [pytest.param(False, marks=pytest.mark.slow), True], ids=["alone", "linked"])
def test_every_layout_is_planned_for_the_load_that_it_serves(ranks: LocalRanks, linked: bool) -> None:
    wanted = []
    for step in range(2):
        for micro_batch in range(S):
            counts_RLE = [
                [np.bincount(layer.flatten(), minlength=E) for layer in skewed(rank, (micro_batch + step) % S).numpy()]
                for rank in range(4)
            ]
            loads = [ms.planning.LoadMatrix(np.array(counts_RE)) for counts_RE in zip(*counts_RLE, strict=True)]
            slots_R = FORESEEING.slots(SHAPE, CLUSTER)
            layouts = [ms.plan_layout(load, CLUSTER, FORESEEING.balance, slots_R) for load in loads]
            wanted.append([layout.expert_RS.tolist() for layout in layouts])
    assert len({str(layouts) for layouts in wanted}) == S
    for layouts, said in ranks.run(trained, FORESEEING, linked, timeout_s=100.0):
        assert layouts == wanted
        assert "train inside of ms.replay_routing" in said
