"""Whole trainings on four ranks under one ``LayoutInvariant``: every loss of every strategy has the same bits."""

from __future__ import annotations

import pytest

import moesys as ms
from moesys.lab.runs.trials import run_measured

# Few rows a block, so that experts have many.
EP = ms.Strategy(name="ep", reduction=ms.LayoutInvariant(block_rows=16))
LENT = EP.replace(name="ep+lent", sharding=ms.Ep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())
FSEP = LENT.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True))
STRATEGIES = (EP, LENT, FSEP, FSEP.replace(name="unified", overlap=ms.Pipelined(chunks=3)))
CLUSTER = ms.ClusterSpec(ranks_per_node=4)
SHAPE = ms.ModelShape(
    hidden_size=32, intermediate_size=48, num_experts=8, top_k=2, router_aux_loss_coef=0.01, initializer_range=0.1
)
SIZES = {"context": 32, "batch": 2, "warmup": 0}


# Short ones run always: the demo, and cases of tests/moe/test_layout_invariant.py.
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("steps", [7, 300])
@pytest.mark.parametrize(
    "workload",
    [ms.Training(num_heads=2, **SIZES), ms.models.ModelTraining(model="olmoe-small", **SIZES)],
    ids=["own", "olmoe"],
)
def test_losses_of_all_strategies_have_the_same_bits(ranks, workload, steps):
    model = getattr(workload, "shape", SHAPE)
    losses, moved = {}, {}
    for strategy in STRATEGIES:
        arguments = strategy, model, CLUSTER, workload.replace(steps=steps), 0
        measured = ranks.run(run_measured, *arguments, timeout_s=3600)[0]
        losses[strategy.name], moved[strategy.name] = measured.losses, max(measured.samples["restored_mib"].values)
    assert len(losses["ep"]) == steps
    assert losses["ep"][-1] < losses["ep"][0]
    # Layouts differ, or nothing would be shown.
    assert moved.pop("ep") == 0 < min(moved.values())
    assert {name: of for name, of in losses.items() if of != losses["ep"]} == {}
