"""Training: which losses are the same bits, which are close, what a step tells, and what is left when it ends."""

from __future__ import annotations

import gc
import importlib
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import refusal
from torch import Tensor

import moesys as ms
from moesys.config.workload import Training
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.train import language_model, loop
from moesys.lab.train.language_model import LanguageModel
from moesys.lab.train.loop import StepResult, train
from moesys.lab.train.text import Text

# Narrow models start from wider weights: an update of Adam, which is as large in any width, is 5 % of 0.02.
SHAPE = ms.ModelShape(
    hidden_size=32,
    intermediate_size=32,
    num_experts=8,
    top_k=2,
    initializer_range=0.1,
    router_aux_loss_coef=0.01,
    router_z_loss_coef=0.001,
)
WORKLOAD = Training(num_layers=2, num_heads=2, context=32, batch=2, warmup=1, steps=3, learning_rate=3e-3)
EP = ms.Strategy(name="ep")
# LAER's planner does not price overlap and sharding, so that layouts depend on neither.
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), balance=ms.Laer(), split=ms.FlowSplit())
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=5), balance=ms.Laer(), split=ms.Proportional())
BEHIND = ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True, restore="hierarchical")
FOUR = (
    EP,
    EP.replace(name="ep+pipelined", overlap=ms.Pipelined(chunks=2)),
    FSEP,
    FSEP.replace(name="unified", sharding=BEHIND, overlap=ms.Pipelined(chunks=2)),
)


def cluster_of_all() -> ms.ClusterSpec:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ms.ClusterSpec(num_nodes=num_ranks // 2, ranks_per_node=2) if num_ranks > 1 else ms.ClusterSpec()


def start(strategy: ms.Strategy, workload: Training = WORKLOAD, **shape: Any) -> Iterator[StepResult]:
    return train(strategy, SHAPE.replace(**shape), cluster_of_all(), workload, seed=3)


def losses(trainings: list[tuple[ms.Strategy, Training]], shape: dict[str, Any] | None = None) -> list[list[float]]:
    return [[result.loss for result in start(*training, **(shape or {}))] for training in trainings]


def relative_differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]


# --- the same numbers under every strategy --------------------------------------------------------------------


def test_muon_has_the_same_losses_under_every_sharding(ranks: LocalRanks) -> None:
    workload = WORKLOAD.replace(optimizer="muon", steps=9)
    by_rank = ranks.run(losses, [(EP, workload), (FSEP, workload), (EP, WORKLOAD.replace(steps=9))], timeout_s=240)
    ep, fsep, adam = by_rank[0]
    assert max(relative_differences(fsep, ep)) <= 1e-5
    assert ep[-1] < 0.95 * ep[0]
    assert ep[1] != adam[1]


@pytest.mark.slow
def test_300_steps_of_every_strategy_end_at_the_same_loss_and_overlap_changes_no_bit(ranks: LocalRanks) -> None:
    by_rank = ranks.run(losses, [(strategy, WORKLOAD.replace(steps=299)) for strategy in FOUR], timeout_s=600)
    assert by_rank[1:] == by_rank[:-1]
    ep, pipelined, fsep, unified = by_rank[0]
    assert pipelined == ep
    assert unified == fsep
    first_50 = relative_differences(fsep[:50], ep[:50])
    assert first_50[0] == 0.0
    assert 0.0 < max(first_50) <= 1e-5, "or no expert was replicated, so that FSEP was not tested"
    assert sum(fsep[-50:]) == pytest.approx(sum(ep[-50:]), rel=0.01)
    assert ep[0] == pytest.approx(math.log(256), rel=0.1)
    assert ep[29] < 0.8 * ep[0]


# The demo always trains with overlaps to the same bits, and test_model_training.py with recomputation.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "overlapped"),
    [(EP, FOUR[1]), (FSEP, FOUR[3]), (LENT, LENT.replace(overlap=ms.Pipelined(chunks=3)))],
    ids=["ep", "fsep", "ep with replicas"],
)
def test_overlap_and_recomputation_change_no_bit_over_two_micro_batches(ranks, plain, overlapped):
    workload = WORKLOAD.replace(micro_batches=2)
    recomputed = workload.replace(recompute=True)
    trainings = [(plain, workload), (overlapped, workload), (overlapped, recomputed)]
    expected, *others = ranks.run(losses, trainings, num_ranks=2)[0]
    assert len(set(expected)) == 4
    assert all(other == expected for other in others)


def slice_of_one_batch(
    text: Text, step: int, micro_batch: int, rank: int, *, seed: int, batch: int, context: int
) -> tuple[Tensor, Tensor]:
    """The same four sequences at every step, whoever has them."""
    parts = 4 // batch // (dist.get_world_size() if dist.is_initialized() else 1)
    start_B = 1000 * torch.arange(4)[(rank * parts + micro_batch) * batch :][:batch]
    window_BC = text.tokens_N[start_B[:, None] + torch.arange(context + 1)].long()
    return window_BC[:, :-1], window_BC[:, 1:]


def losses_of_one_batch(workload: Training) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "batch", slice_of_one_batch)
        # Of the two router losses, only the z-loss is a mean over tokens, and so the same for parts of a batch.
        return losses([(EP, workload)], {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 1.0})[0]


def test_ranks_and_micro_batches_divide_a_batch_and_change_nothing(ranks: LocalRanks) -> None:
    whole = losses_of_one_batch(WORKLOAD.replace(batch=4))
    assert len(set(whole)) == 4
    parts = [
        losses_of_one_batch(WORKLOAD.replace(batch=1, micro_batches=4)),
        ranks.run(losses_of_one_batch, WORKLOAD.replace(batch=1, micro_batches=2), num_ranks=2)[0],
    ]
    for part in parts:
        assert max(relative_differences(part, whole)) < 1e-6


# --- what a step tells ----------------------------------------------------------------------------------------


def results(strategy: ms.Strategy, workload: Training) -> list[StepResult]:
    return list(start(strategy, workload))


@pytest.mark.parametrize("strategy", [pytest.param(EP, marks=pytest.mark.slow), FSEP], ids=["ep", "fsep"])
def test_a_step_tells_every_rank_the_same_and_its_numbers_add_up(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    by_rank = ranks.run(results, strategy, WORKLOAD.replace(micro_batches=2))
    assert by_rank[1:] == by_rank[:-1]
    assert [(result.step, result.timed) for result in by_rank[0]] == [(0, False), (1, True), (2, True), (3, True)]
    for result in by_rank[0]:
        loads_MLRE = torch.tensor(result.loads_MLRE)
        assert loads_MLRE.shape == (2, 2, 4, 8)
        assert (loads_MLRE.sum(dim=3) == 2 * 32 * 2).all()
        tokens_LE = loads_MLRE.sum(dim=(0, 2))
        assert result.tokens_LE == tokens_LE.tolist()
        share_LE = tokens_LE / tokens_LE.sum(dim=1, keepdim=True)
        assert result.router_entropy == pytest.approx(torch.special.entr(share_LE).sum(dim=1).mean() / math.log(8))
        assert 0 < result.plan_ms < result.step_ms
        assert 0 < result.exposed_ms < result.step_ms
        assert 1 <= result.load_max_over_mean <= 4
    # Slots are restored for forward and for backward of two micro-batches and two layers: two to four of each of four
    # ranks, as many as pay.
    slot_mib = 0.0 if strategy is EP else 2 * 2 * 2 * 3 * (SHAPE.expert_parameters // 4) * 4 / 2**20
    assert by_rank[0][-1].restored_mib in [slots * slot_mib for slots in range(4 * 2, 4 * 4 + 1)]


def test_compiled_kernels_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = importlib.import_module("moesys.kernels.experts.products")
    monkeypatch.setattr(numerics, "INTERPRETED", numerics.tl.constexpr(False))
    with pytest.raises(ValueError, match="start Python with TRITON_INTERPRET=1, or use interpret=False"):
        next(train(EP, SHAPE, cluster_of_all(), WORKLOAD.replace(interpret=True), seed=0))


def test_one_rank_without_a_process_group_trains() -> None:
    alone = list(start(FSEP.replace(sharding=ms.Fsep(slots_per_rank=8))))
    assert [result.loss for result in alone] == [result.loss for result in start(EP)]
    assert {(result.exposed_ms, result.restored_mib, result.load_max_over_mean) for result in alone} == {(0, 0, 1)}


def test_entropy_is_one_for_even_tokens_and_zero_for_one_expert() -> None:
    assert loop._relative_entropy(torch.tensor([[5, 5, 5, 5]]).numpy()) == 1.0
    assert loop._relative_entropy(torch.tensor([[9, 0, 0, 0]]).numpy()) == 0.0
    assert loop._relative_entropy(torch.tensor([[4, 4, 0, 0], [9, 0, 0, 0]]).numpy()) == 0.25
    assert loop._relative_entropy(torch.tensor([[9]]).numpy()) == 1.0


# --- what is left when it ends --------------------------------------------------------------------------------


def alive() -> dict[int, object]:
    """Returns threads, process groups and models by ``id``; other tests on the same ranks may have left some."""
    gc.collect()
    models = [thing for thing in gc.get_objects() if type(thing) in (LanguageModel, ms.MoELayer)]
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return {id(thing): thing for thing in (*threading.enumerate(), *models, *groups)}


def end_in_every_way(strategy: ms.Strategy) -> list[str]:
    before = alive()
    list(start(strategy))
    with closing(start(strategy)) as training:
        list(islice(training, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "clip_grad_norm_", fail)
        with pytest.raises(ArithmeticError):
            list(start(strategy))
    return [f"{type(thing).__name__} {thing}" for key, thing in alive().items() if key not in before]


def fail(*_: object) -> None:
    raise ArithmeticError


def test_nothing_is_left_however_a_training_ends(ranks: LocalRanks) -> None:
    assert end_in_every_way(EP) == []
    assert ranks.run(end_in_every_way, FSEP.replace(sharding=BEHIND), num_ranks=2) == [[], []]


def start_with_own_text() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            language_model, "load_text", lambda: Text(torch.full((1000,), dist.get_rank(), dtype=torch.uint8))
        )
        next(start(EP))


def test_ranks_with_different_text_are_refused(ranks: LocalRanks) -> None:
    for told in ranks.run(refusal, start_with_own_text, num_ranks=2):
        assert "rank 1 has another text than rank 0; give every host the same" in told
