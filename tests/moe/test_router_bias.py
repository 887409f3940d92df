"""Balance over the whole batch: counts, biases and losses of ranks are those of one process that saw all tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of
from moesys.moe.router_bias import BINS

SHAPE = ms.ModelShape(
    hidden_size=16, intermediate_size=12, num_experts=6, top_k=2, scoring_func="sigmoid", router_bias_update_rate=0.05
)
EP = ms.Strategy(name="ep")
STEPS, MICRO_BATCHES = 2, 2


def model_of(shape: ms.ModelShape) -> nn.Sequential:
    return nn.Sequential(*(ms.MoELayer(shape, EP, layer_index=layer, seed=2) for layer in range(2)))


INVARIANT = EP.replace(reduction=ms.LayoutInvariant())
# Tokens of each rank and micro-batch, in blocks of ``LayoutInvariant``.
BLOCKS = ((64, 32), (32, 0))
Balanced = list[tuple[list[Tensor], list[Tensor]]]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ms.MoELayer(SHAPE, INVARIANT, layer_index=layer, seed=2) for layer in range(2))

    def forward(self, x_TH: Tensor, mask_T: Tensor) -> Tensor:
        for layer in self.layers:
            x_TH = x_TH + layer(x_TH, mask_T)
        return x_TH


def padded(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    # A common part, so that experts have uneven loads.
    common = torch.randn(16, generator=torch.Generator().manual_seed(step))
    x_TH = torch.randn(BLOCKS[micro_batch][rank], 16, generator=generator) + common
    return x_TH, torch.rand(len(x_TH), generator=generator) < 0.8


def tokens(step: int, micro_batch: int, rank: int) -> Tensor:
    return padded(step, micro_batch, rank)[0]


def balanced(batches_SM: list[list[tuple[Tensor, Tensor]]], by_quantiles: bool) -> Balanced:
    """Counts, or histograms, of each step over all ranks, and biases after it. Layers recompute; evaluation comes
    between the micro-batches.
    """
    model, found = Blocks(), []
    balancer = ms.QuantileBalancer(model) if by_quantiles else None
    for batches in batches_SM:
        for x_TH, mask_T in batches:
            checkpoint(model, x_TH.requires_grad_(), mask_T, use_reentrant=False).square().sum().backward()
            with torch.no_grad():
                model(x_TH, mask_T)
            model.eval()(x_TH, mask_T).sum().backward()
            model.train()
        if balancer is None:
            counted = [layer.counted_E for layer in experts_of(model)]
            ms.update_router_bias(model)
        else:
            counted = [each.counted.clone() for each in balancer._histograms.values()]
            for each in counted if dist.is_initialized() else ():
                dist.all_reduce(each)
            balancer.update()
        assert all(layer.counted_E.count_nonzero() == 0 for layer in experts_of(model))
        found.append((counted, [layer.router.e_score_correction_bias.clone() for layer in model.layers]))
    return found


def balanced_on_ranks(by_quantiles: bool) -> Balanced:
    rank = dist.get_rank()
    batches_SM = [[padded(step, batch, rank) for batch in range(MICRO_BATCHES)] for step in range(STEPS)]
    return balanced(batches_SM, by_quantiles)


@pytest.mark.filterwarnings("ignore:layer . trains in evaluation mode")
@pytest.mark.parametrize("by_quantiles", [False, True], ids=["by counts", "by quantiles"])
def test_counts_and_biases_are_those_of_one_process_with_the_whole_batch(ranks: LocalRanks, by_quantiles: bool) -> None:
    whole_S = []
    for step in range(STEPS):
        parts = [padded(step, batch, rank) for batch in range(MICRO_BATCHES) for rank in range(2)]
        whole_S.append((torch.cat([x_TH for x_TH, _ in parts]), torch.cat([mask_T for _, mask_T in parts])))
    expected = balanced([[whole] for whole in whole_S], by_quantiles)
    for (counted, _), (_, mask_T) in zip(expected, whole_S, strict=True):
        for each in counted:
            # Each token has a place in the histogram of each expert, and two experts that it counts for.
            of_tokens = each[:-1].view(6, BINS).sum(dim=1) if by_quantiles else each.sum()[None] / 2
            assert (of_tokens == mask_T.sum()).all()
    assert_equal(ranks.run(balanced_on_ranks, by_quantiles, num_ranks=2), [expected] * 2)


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
def test_loss_over_the_global_batch_is_of_one_process(ranks: LocalRanks, scoring_func: str, together: bool) -> None:
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
    for batch in (0, 1):
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
    layer.eval()
    assert ms.router_loss(layer, over="global_batch").item() == 0


def test_a_call_that_has_nothing_to_move_is_refused() -> None:
    """Unless the rate is 0, with which it only ends the counts of a step."""
    layer = model_of(loss_shape("softmax"))[0]
    layer(tokens(0, 0, 0))
    named = r"no buffer, and no parameter without requires_grad, is named e_score\w+ or expert_bias or balancing_biases"
    with pytest.raises(ValueError, match=rf"MoELayer has no correction bias that rate=0\.1 could move: {named}; move"):
        ms.update_router_bias(layer, rate=0.1)
    block = Block(0)
    for rate in (None, 0.1):
        del block.gate._buffers["e_score_correction_bias"]
        block.gate.register_buffer("another_bias", torch.zeros(6))
        with pytest.raises(ValueError, match=r"Block has no correction bias that rate=\S+ could move: .* rate=0"):
            ms.update_router_bias(block, rate=rate)
        block = Block(0)
    assert layer.experts.counted_E.count_nonzero() > 0
    ms.update_router_bias(layer)
    assert layer.experts.counted_E.count_nonzero() == 0
    with pytest.raises(ValueError, match=r"Block has no router of moesys, whose losses .* add outputs\.aux_loss"):
        ms.router_loss(block)


def test_a_bias_of_another_length_is_refused_by_name() -> None:
    block = Block(0)
    block.gate.balancing_biases = block.gate._buffers.pop("e_score_correction_bias").new_zeros(7)
    block.gate.register_buffer("balancing_biases", block.gate.__dict__.pop("balancing_biases"))
    with pytest.raises(ValueError, match=r"gate\.balancing_biases has 7 elements and tokens_E has 6; give one count"):
        ms.update_router_bias(block, rate=0.1)


# --- the quantile rule ---


def skewed_layer() -> tuple[ms.MoELayer, Tensor]:
    """A layer whose router prefers experts by far, and tokens."""
    shape = SHAPE.replace(num_experts=16, top_k=3)
    layer = ms.MoELayer(shape, EP, seed=2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        layer.router.weight.copy_(0.3 * torch.randn(16, 16, generator=generator))
        layer.router.weight[:, 0] = torch.linspace(-1.5, 1.5, 16)
    x_TH = torch.randn(2000, 16, generator=generator)
    x_TH[:, 0] = 1
    return layer, x_TH


def imbalance(layer: ms.MoELayer, x_TH: Tensor) -> float:
    tokens_E = layer.router(x_TH).expert_TK.flatten().bincount(minlength=16)
    return (tokens_E.max() / tokens_E.double().mean()).item()


def test_a_few_steps_balance_a_skewed_router() -> None:
    layer, x_TH = skewed_layer()
    balancer = ms.QuantileBalancer(layer)
    assert imbalance(layer, x_TH) > 2.5
    for _ in range(4):
        layer(x_TH)
        balancer.update()
    assert imbalance(layer, x_TH) < 1.15


class Gate(nn.Module):
    """Another library's router, whose logits come first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("e_score_correction_bias", torch.zeros(6))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = x_TH @ self.weight.T
        score_TE = logits_TE.sigmoid()
        expert_TK = (score_TE + self.e_score_correction_bias).topk(2, dim=1).indices
        return logits_TE, score_TE.gather(1, expert_TK), expert_TK


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.gate, self.experts = Gate(seed), ms.Experts(SHAPE, EP, layer_index=seed)

    def forward(self, x_TH: Tensor) -> Tensor:
        _, weight_TK, expert_TK = self.gate(x_TH)
        y_TH: Tensor = x_TH + self.experts(x_TH, expert_TK, weight_TK)
        return y_TH


def keep_sigmoids(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = operation is torch.ops.aten.sigmoid.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", ["kept", "selective"])
def test_another_librarys_router_is_seen_once_and_changes_no_gradient(how: str) -> None:
    def trained(*, counted: bool) -> tuple[Tensor, list[Tensor]]:
        model = nn.Sequential(Block(0), Block(1))
        histograms = ms.QuantileBalancer(model, scoring_func="sigmoid")._histograms.values() if counted else ()
        x_TH = tokens(0, 0, 0).requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, keep_sigmoids)
        y_TH = model(x_TH) if how == "kept" else checkpoint(model, x_TH, use_reentrant=False, context_fn=contexts)
        y_TH.square().sum().backward()
        assert x_TH.grad is not None
        return x_TH.grad, [each.counted for each in histograms]

    gradient, counted = trained(counted=True)
    assert torch.equal(gradient, trained(counted=False)[0])
    assert [each.sum() for each in counted] == [6 * BLOCKS[0][0]] * 2


def test_a_step_without_tokens_leaves_biases_as_they_are() -> None:
    layer, x_TH = skewed_layer()
    bias_E = layer.router.e_score_correction_bias.copy_(torch.linspace(0, 1, 16))
    balancer = ms.QuantileBalancer(layer)
    layer(x_TH[:0])
    balancer.update()
    assert torch.equal(bias_E, torch.linspace(0, 1, 16))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_balancer_and_counts_nothing(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer, x_TH = skewed_layer()
    balancer = ms.QuantileBalancer(layer)
    other = copied(layer)
    other(x_TH)
    ms.QuantileBalancer(other)
    (histogram,) = balancer._histograms.values()
    assert histogram._seen is None
    assert histogram.counted.sum() == 0
    layer(x_TH)
    assert histogram.counted[:BINS].sum() == len(x_TH)


def test_routers_that_quantiles_cannot_balance_are_refused() -> None:
    with pytest.raises(ValueError, match="MoELayer has no correction bias"):
        ms.QuantileBalancer(model_of(loss_shape("softmax"))[0])
    for limits in ({"top_k": 6}, {"n_group": 3, "topk_group": 1}):
        with pytest.raises(ValueError, match=r"router.e_score_correction_bias is of a router that chooses all 6 exp"):
            ms.QuantileBalancer(ms.MoELayer(SHAPE.replace(**limits), EP))
    layer, x_TH = skewed_layer()
    balancer = ms.QuantileBalancer(layer)
    with pytest.raises(ValueError, match=r"router.e_score_correction_bias has a QuantileBalancer already"):
        ms.QuantileBalancer(layer)
    with ms.replay_routing(layer, torch.tensor([0, 1, 2]).expand(1, 2000, 3)):
        layer(x_TH)
    with pytest.raises(ValueError, match=r"\d+ of 2000 tokens have others than the experts of the highest"):
        balancer.update()
    assert layer.router.e_score_correction_bias.count_nonzero() == 0
