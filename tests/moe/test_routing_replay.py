"""Recorded and replayed routing of moesys' own layers: which experts, with which weights and gradients, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import Stack, gradients_of, plain_experts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

H, I, E, K, L = 24, 16, 8, 3, 2
SOFTMAX = ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K)
SHAPES = {
    "softmax": SOFTMAX,
    "not normalised": SOFTMAX.replace(norm_topk_prob=False, routed_scaling_factor=1.5),
    "sigmoid in groups": SOFTMAX.replace(
        scoring_func="sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5, router_aux_loss_coef=0.1
    ),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
FSEP = ms.Strategy(
    name="fsep", sharding=ms.Fsep(slots_per_rank=E // 2), balance=ms.Greedy(), split=ms.FlowSplit(), predictor=ms.Last()
)


def tokens(seed: int, num_tokens: int = 19) -> Tensor:
    return torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(seed))


def other_experts(seed: int, num_tokens: int = 19, layers: int = L) -> Tensor:
    """Any experts, of any group and in any order, [L, T, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(layers, num_tokens, E, generator=generator).argsort(dim=2)[:, :, :K]


def stack(shape: ms.ModelShape = SOFTMAX, strategy: ms.Strategy | None = None) -> Stack:
    model = Stack(shape, strategy or ms.presets.ep(), L)
    for layer in model.moe:
        nn.init.normal_(layer.router.weight, std=0.4, generator=torch.Generator().manual_seed(7))
        if shape.scoring_func == "sigmoid":
            nn.init.normal_(layer.router.e_score_correction_bias, generator=torch.Generator().manual_seed(8))
    return model


def plainly(model: Stack, x: Tensor) -> Tensor:
    return model(x)


def with_recompute(model: Stack, x: Tensor) -> Tensor:
    return model(x, checkpointed=True)


def with_checkpoint(model: Stack, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


Way = Callable[[Stack, Tensor], Tensor]
every_checkpoint = pytest.mark.parametrize("way", [with_recompute, with_checkpoint])


def results(model: Stack, num_tokens: Sequence[int] = (19, 19), way: Way = plainly) -> dict[str, Tensor]:
    """Outputs of micro-batches and the sum of their gradients; backwards come last to first, behind all forwards."""
    losses, outputs = [], {}
    for index, micro_batch in enumerate(num_tokens):
        y = way(model, tokens(index, micro_batch))
        outputs[f"y{index}"] = y.detach()
        losses.append(y.square().sum() + ms.router_loss(model))
    for loss in reversed(losses):
        loss.backward()
    return outputs | gradients_of(model)


# --- what is computed ---


def dense(state: dict[str, Tensor], shape: ms.ModelShape, x_TH: Tensor, expert_TK: Tensor) -> Tensor:
    """y [T, H] in plain torch, in the dtype of ``state``."""
    logits_TE = x_TH @ state["gate.weight"].T
    score_TE = logits_TE.sigmoid() if shape.scoring_func == "sigmoid" else logits_TE.softmax(dim=1)
    weight_TK = score_TE.gather(1, expert_TK)
    if shape.norm_topk_prob:
        weight_TK = weight_TK / weight_TK.sum(dim=1, keepdim=True)
    projections = (state[f"experts.{name}_proj"] for name in ("gate_up", "down"))
    return plain_experts(x_TH, expert_TK, shape.routed_scaling_factor * weight_TK, *projections)


@every_shape
def test_other_experts_have_the_weights_and_gradients_of_the_formula(shape: ms.ModelShape) -> None:
    layer = stack(shape.replace(router_aux_loss_coef=0.0)).moe[0]
    expert_LTK = other_experts(0, layers=1)
    x = tokens(0).requires_grad_()
    with ms.replay_routing(layer, expert_LTK):
        y = layer(x)
        y.square().sum().backward()
    exact = {name: tensor.double().requires_grad_() for name, tensor in layer.full_state_dict().items()}
    x_exact = tokens(0).double().requires_grad_()
    y_exact = dense(exact, shape, x_exact, expert_LTK[0])
    y_exact.square().sum().backward()
    actual = {"y": y, "dx": x.grad, "router": layer.router.weight.grad}
    expected = {"y": y_exact, "dx": x_exact.grad, "router": exact["gate.weight"].grad}
    for name, tensor in expected.items():
        assert (actual[name].double() - tensor).norm() <= 2e-6 * tensor.norm(), name
    experts = torch.cat([exact[f"experts.{name}_proj"].grad.flatten(1) for name in ("gate_up", "down")], dim=1)
    assert (layer.experts.masters.grad.double() - experts).norm() <= 2e-6 * experts.norm()


@every_shape
def test_replaying_what_was_recorded_changes_no_bit(shape: ms.ModelShape) -> None:
    plain = results(stack(shape))
    model = stack(shape)
    with ms.record_routing(model) as recorded:
        assert_equal(results(model), plain)
    assert [(ids.shape, ids.dtype) for ids in recorded] == [((L, 19, K), torch.uint8)] * 2
    model.zero_grad()
    with ms.replay_routing(model, recorded):
        assert_equal(results(model), plain)
    model.zero_grad()
    assert_equal(results(model), plain)


def test_the_balancing_loss_is_of_the_replayed_experts() -> None:
    layer = stack(SOFTMAX.replace(router_aux_loss_coef=1.0)).moe[0]
    crowded = torch.arange(K).expand(1, 19, K)
    with ms.replay_routing(layer, crowded):
        layer(tokens(0))
    logits_TE = tokens(0) @ layer.router.weight.T
    expected = E * logits_TE.softmax(dim=1)[:, :K].mean(dim=0).sum()
    assert ms.router_loss(layer).item() == pytest.approx(expected.item(), rel=1e-6)


def with_live_tokens(ids: Tensor) -> Tensor:
    """The ids, in which those of every third token of layer 0 and of every second of layer 1 are the router's."""
    ids = ids.clone()
    ids[0, ::3], ids[1, ::2] = -2, -2
    return ids


@every_shape
def test_tokens_without_ids_are_routed_live(shape: ms.ModelShape) -> None:
    """With the weights and the gradients that the router gives them."""
    plain = results(stack(shape))
    model = stack(shape)
    with ms.record_routing(model) as live:
        results(model)
    model.zero_grad()
    with ms.replay_routing(model, [with_live_tokens(ids.long()) for ids in live]):
        assert_equal(results(model), plain)
    other = with_live_tokens(other_experts(0))
    with torch.no_grad(), ms.replay_routing(model, other), ms.record_routing(model) as found:
        model(tokens(0))
    assert torch.equal(found[0][other >= 0], other[other >= 0].to(torch.uint8))
    assert torch.equal(found[0][0, ::3], live[0][0, ::3])


# --- recomputation ---


@every_checkpoint
def test_a_recomputation_repeats_the_experts_of_its_first_pass(way: Way) -> None:
    sizes = (19, 12, 19)
    ids = [with_live_tokens(other_experts(seed, num_tokens)) for seed, num_tokens in enumerate(sizes)]
    by_way = []
    for each in (plainly, way):
        with ms.replay_routing(model := stack(), ids):
            by_way.append(results(model, sizes, each))
    assert_equal(*by_way)


@every_checkpoint
def test_a_graph_that_is_kept_is_recomputed_alike_again(way: Way) -> None:
    with ms.replay_routing(model := stack(), other_experts(0)):
        loss = way(model, tokens(0)).square().sum()
    loss.backward(retain_graph=True)
    once = gradients_of(model)
    model.zero_grad()
    loss.backward()
    assert_equal(gradients_of(model), once)


@every_checkpoint
def test_a_pass_from_before_is_recomputed_with_its_own_choice(way: Way) -> None:
    model = stack()
    model(tokens(0)).square().sum().backward()
    plain = gradients_of(model)
    model.zero_grad()
    y = way(model, tokens(0))
    with ms.replay_routing(model, other_experts(0)):
        y.square().sum().backward()
        model(tokens(0))
    assert_equal(gradients_of(model), plain)


# --- ranks ---


def trained_with_live_tokens(predictor: ms.Last | ms.Oracle) -> tuple[Tensor, Tensor]:
    """Returns the recorded ids of the first layer, and the loads of its plan."""
    rank, model = dist.get_rank(), stack(strategy=FSEP.replace(predictor=predictor))
    with ms.replay_routing(model, with_live_tokens(other_experts(rank))), ms.record_routing(model) as recorded:
        model(tokens(rank)).sum().backward()
    return recorded[0][0], model.moe[0].experts.take_counts()


@pytest.mark.parametrize("predictor", [ms.Last(), ms.Oracle()], ids=lambda predictor: predictor.kind)
def test_ranks_route_live_what_has_no_ids(ranks: LocalRanks, predictor: ms.Last | ms.Oracle) -> None:
    """Also where layouts were planned without these tokens."""
    ids, counts = zip(*ranks.run(trained_with_live_tokens, predictor, num_ranks=2, timeout_s=60.0), strict=True)
    wanted_E = torch.cat(ids).flatten().long().bincount(minlength=E)
    assert wanted_E.sum() == 2 * 19 * K
    assert_equal(counts, [wanted_E] * 2)


def messages_of_replay(strategy: ms.Strategy) -> list[str]:
    """Returns the errors of ids of which those of rank 1 alone cannot be replayed. Then ranks go on together."""
    rank, model, said = dist.get_rank(), stack(SHAPES["sigmoid in groups"], strategy), []
    for fault, _ in FAULTS:
        ids = fault(other_experts(rank)) if rank == 1 else other_experts(rank)
        with pytest.raises((TypeError, ValueError), match="expert_") as error, ms.replay_routing(model, [ids]):
            model(tokens(rank))
        said.append(str(error.value))
        with ms.replay_routing(model, other_experts(rank)):
            model(tokens(rank)).sum().backward()
    return said


def replaced(ids: Tensor, place: Any, value: int | Tensor) -> Tensor:
    ids[place] = value
    return ids


# Each entry changes the ids, and has the words of the error.
FAULTS: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
    (lambda ids: replaced(ids, (0, 4), -1), " has -1 for token 4 in micro-batch 0"),
    (lambda ids: replaced(ids, (0, 4, 1), -2), "[0][0, 4] has -2; moe.0.router has experts 0 to 7"),
    (lambda ids: ids[:, 1:], " has 18 tokens in micro-batch 0, but moe.0.router"),
    (lambda ids: replaced(ids, (1, 4, 2), E), "[0][1, 4] has 8; moe.1.router has experts 0 to 7"),
    (lambda ids: replaced(ids, (1, 4), torch.tensor([0, 1, 0])), "[0][1, 4] has expert 0 twice, in [0, 1, 0]; a token"),
    (lambda ids: ids[:1], "[0] has shape (1, 19, 3); wanted [L, T, K] with L=2 routers (moe.0.router to moe.1.router)"),
    (lambda ids: ids.float(), "[0] has dtype torch.float32; ids of experts are integers"),
)


@pytest.mark.parametrize("predictor", [ms.Last(), ms.Oracle()], ids=lambda predictor: predictor.kind)
def test_ids_that_one_rank_cannot_replay_are_an_error_on_all(ranks: LocalRanks, predictor: ms.Last | ms.Oracle) -> None:
    messages_R = ranks.run(messages_of_replay, FSEP.replace(predictor=predictor), num_ranks=2, timeout_s=60.0)
    for (_, words), others, own in zip(FAULTS, *messages_R, strict=True):
        assert own.startswith(f"expert_LTK{words}")
        assert others.startswith("expert_TK of rank 1 has the id -1, and the 8 experts of layer 0 have ids from 0 to 7")


# --- what is taken, what is refused ---


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_is_taken(dtype: torch.dtype) -> None:
    model, ids = stack(), other_experts(0)
    with ms.replay_routing(model, ids):
        expected = model(tokens(0))
    with ms.replay_routing(model, ids.to(dtype)):
        assert torch.equal(model(tokens(0)), expected)
    buffer = np.frombuffer(ids.to(dtype).numpy().tobytes(), dtype=ids.to(dtype).numpy().dtype)
    with ms.replay_routing(model, buffer.reshape(L, 19, K)):
        assert torch.equal(model(tokens(0)), expected)


def test_many_experts_are_recorded_in_16_bits() -> None:
    layer = ms.MoELayer(ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=300, top_k=2), ms.presets.ep())
    with ms.record_routing(layer) as recorded:
        layer(torch.randn(40, 8))
    assert recorded[0].dtype == torch.int16
    assert recorded[0].max() > 127


def test_lists_and_other_numbers_of_micro_batches_are_refused() -> None:
    model = stack()
    with pytest.raises(TypeError, match=r"expert_LTK\[0\] is a list; give a tensor or an array \[L, T, K\], or a list"):
        ms.replay_routing(model, [[0, 1, 2]]).__enter__()
    with ms.replay_routing(model, other_experts(0)):
        model(tokens(0))
        with pytest.raises(ValueError, match=r"moe\.0\.router runs a micro-batch more than the 1 of expert_LTK"):
            model(tokens(1))
    replay = ms.replay_routing(model, [other_experts(0)] * 2)
    replay.__enter__()
    model(tokens(0))
    with pytest.raises(ValueError, match=r"expert_LTK has 2 micro-batches, but moe\.0\.router ran 1;"):
        replay.__exit__(None, None, None)


def test_layers_that_run_unequally_often_are_no_record() -> None:
    model = stack()
    record = ms.record_routing(model)
    record.__enter__()
    model.moe[1](tokens(0))
    with pytest.raises(RuntimeError, match=r"moe\.0\.router 0, moe\.1\.router 1"):
        record.__exit__(None, None, None)


def test_an_error_leaves_the_routers_as_they_were() -> None:
    model = stack()
    with pytest.raises(KeyError), ms.record_routing(model) as recorded, ms.replay_routing(model, other_experts(0)):
        raise KeyError
    assert recorded == []
    assert not any(layer.router.chooser._forward_hooks for layer in model.moe)
