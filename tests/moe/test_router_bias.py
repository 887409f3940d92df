"""Balance over the whole batch: counts, biases and losses of ranks are those of one process that saw all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

SHAPE = ms.ModelShape(
    hidden_size=16, intermediate_size=12, num_experts=6, top_k=2, scoring_func="sigmoid", router_bias_update_rate=0.05
)
EP = ms.Strategy(name="ep")
STEPS, MICRO_BATCHES = 2, 3
# Tokens of each rank and micro-batch.
SIZES = ((20, 33), (7, 0), (15, 31))


def model_of(shape: ms.ModelShape) -> nn.Sequential:
    return nn.Sequential(*(ms.MoELayer(shape, EP, layer_index=layer, seed=2) for layer in range(2)))


def tokens(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    # A common part, so that experts have uneven loads.
    common = torch.randn(16, generator=torch.Generator().manual_seed(step))
    return torch.randn(SIZES[micro_batch][rank], 16, generator=generator) + common


def balanced(batches_SM: list[list[Tensor]]) -> list[tuple[list[list[int]], list[Tensor]]]:
    """Counts of each step, and biases after it. Layers recompute; evaluation comes between the micro-batches."""
    model = model_of(SHAPE)
    found = []
    for batches in batches_SM:
        for x_TH in batches:
            checkpoint(model, x_TH.requires_grad_(), use_reentrant=False).square().sum().backward()
            with torch.no_grad():
                model(x_TH)
            model.eval()(x_TH).sum().backward()
            model.train()
        counts = [layer.counted_E.tolist() for layer in experts_of(model)]
        ms.update_router_bias(model)
        found.append((counts, [layer.router.e_score_correction_bias.clone() for layer in model]))
    return found


def balanced_on_ranks() -> list[tuple[list[list[int]], list[Tensor]]]:
    rank = dist.get_rank()
    return balanced([[tokens(step, batch, rank) for batch in range(MICRO_BATCHES)] for step in range(STEPS)])


def test_counts_and_biases_are_those_of_one_process_with_the_whole_batch(ranks: LocalRanks) -> None:
    whole_S = [
        torch.cat([tokens(step, batch, rank) for batch in range(MICRO_BATCHES) for rank in range(2)])
        for step in range(STEPS)
    ]
    expected = balanced([[whole_TH] for whole_TH in whole_S])
    assert [sum(counts[0]) for counts, _ in expected] == [2 * sum(map(sum, SIZES))] * STEPS
    for of_rank in ranks.run(balanced_on_ranks, num_ranks=2):
        for (counts, biases), (whole_counts, whole_biases) in zip(of_rank, expected, strict=True):
            assert counts == whole_counts
            assert all(map(torch.equal, biases, whole_biases))


def loss_shape(scoring_func: Any) -> ms.ModelShape:
    rate = 0.0 if scoring_func == "softmax" else 0.05
    coefs = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    return SHAPE.replace(scoring_func=scoring_func, router_bias_update_rate=rate, **coefs)


def global_losses(scoring_func: str, together: bool) -> tuple[Tensor, list[Tensor]]:
    """The mean over ranks of a loss over the global batch, and the routers' gradients of it. ``together``: one call for
    two micro-batches, over which it is a sum.
    """
    model, rank = model_of(loss_shape(scoring_func)), dist.get_rank()
    batches = (0, 1) if together else (0,)
    outputs = [model(tokens(0, batch, rank)) for batch in batches]
    loss = ms.router_loss(model, over="global_batch") / (dist.get_world_size() * len(batches))
    # Routers of this test get gradients of their own loss only.
    (loss + 0 * sum(y_TH.sum() for y_TH in outputs)).backward()
    found = [loss.detach(), *(layer.router.weight.grad for layer in model)]
    for each in found:
        dist.all_reduce(each)
    return found[0], found[1:]


@pytest.mark.parametrize("together", [False, True], ids=["one", "two_together"])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_loss_over_the_global_batch_is_that_of_one_process(
    ranks: LocalRanks, scoring_func: str, together: bool
) -> None:
    model = model_of(loss_shape(scoring_func))
    batches = (0, 1) if together else (0,)
    y_TH = model(torch.cat([tokens(0, batch, rank) for batch in batches for rank in range(2)]))
    expected = ms.router_loss(model)
    (expected + 0 * y_TH.sum()).backward()
    for loss, gradients in ranks.run(global_losses, scoring_func, together, num_ranks=2):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        for gradient, layer in zip(gradients, model, strict=True):
            torch.testing.assert_close(gradient, layer.router.weight.grad, rtol=1e-4, atol=1e-7)


def test_shares_are_those_of_all_micro_batches_so_far() -> None:
    layer = model_of(loss_shape("softmax").replace(router_z_loss_coef=0.0))[0]
    tokens_E = torch.zeros(6, dtype=torch.int64)
    for batch in (0, 2):
        x_TH = tokens(0, batch, 0)
        y_TH = layer(x_TH)
        loss = ms.router_loss(layer, over="global_batch")
        logits_TE = x_TH.double() @ layer.router.weight.detach().double().T
        tokens_E += torch.bincount(logits_TE.topk(2, dim=1).indices.flatten(), minlength=6)
        share_E = 2 * tokens_E.double() / tokens_E.sum()
        expected = 0.5 * 6 * (share_E * logits_TE.softmax(dim=1).mean(dim=0)).sum()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        (loss + 0 * y_TH.sum()).backward()
    ms.update_router_bias(layer)
    assert layer.experts.counted_E.count_nonzero() == 0


def test_a_router_without_experts_has_no_loss_over_the_global_batch() -> None:
    layer = model_of(loss_shape("softmax"))[0]
    layer.router(tokens(0, 0, 0))
    with pytest.raises(ValueError, match=r"has no ms\.Experts of its own in the module around it"):
        ms.router_loss(layer.router, over="global_batch")
    with pytest.raises(ValueError, match="over='batch' is not known"):
        ms.router_loss(layer, over="batch")
    layer.eval()
    assert ms.router_loss(layer, over="global_batch").item() == 0


@pytest.mark.parametrize(
    ("bias_E", "tokens_E", "error", "words"),
    [
        (torch.zeros(2), torch.tensor([1.0, 3.0]), TypeError, "torch.float32, which is not exact"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1, 3]), ValueError, "torch.bfloat16, in which small"),
        (torch.zeros(3), torch.tensor([1, 3]), ValueError, "the bias has 3 elements and tokens_E has 2"),
    ],
)
def test_a_bias_that_would_move_wrongly_is_refused(
    bias_E: Tensor, tokens_E: Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ms.move_router_bias(bias_E, tokens_E, 0.1)
