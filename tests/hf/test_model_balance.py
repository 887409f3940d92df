"""Biases and losses of transformers' routers over the whole batch: those of one process with transformers' own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks
from hf_models import SMALL, drawn, lent, text, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import ZayaConfig, ZayaForCausalLM

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of
from moesys.moe.router_bias import BINS

RATE, STEPS, MICRO_BATCHES = 0.05, 2, 3


def ids_of(step: int, micro_batch: int, rank: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    return text(100 * step + 10 * micro_batch + rank, num_rows=2 + rank)


def biases_of(model: nn.Module) -> list[Tensor]:
    state = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for name, tensor in state if name.endswith("e_score_correction_bias")]


def evaluate(model: Any, ids: Tensor) -> None:
    """Three passes that do not count: without gradients, in evaluation, and both."""
    with torch.no_grad():
        model(input_ids=ids)
        model.eval()(input_ids=ids)
    model(input_ids=ids)
    model.train()


Found = list[tuple[list[list[int]], list[Tensor]]]


def balanced(family: str, groups: tuple[int, int] | None) -> Found:
    """Counts of each step and biases after it, with activations recomputed, and evaluation between micro-batches.
    ``groups``: of experts, and the ranks of each.
    """
    model = drawn(family)
    mesh = None if groups is None else init_device_mesh("cpu", groups, mesh_dim_names=("dp", "ep"))
    ms.parallelize(model, ms.Strategy(name="ep") if groups else lent(2), mesh)
    model.activation_checkpointing_enable({"use_reentrant": False})
    if family == "deepseek_v3":
        with pytest.raises(ValueError, match="all 8 experts, or among some of 4 groups, which quantiles do not"):
            ms.QuantileBalancer(model, dist.group.WORLD, scoring_func="sigmoid")
    found = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            ids = ids_of(step, micro_batch, dist.get_rank())
            model(input_ids=ids, labels=ids).loss.backward()
            evaluate(model, ids)
        counts = torch.stack([layer.counted_E for layer in experts_of(model)])
        if groups:
            dist.all_reduce(counts)
            with pytest.raises(ValueError, match="the experts' group has 1 of 2 ranks"):
                ms.update_router_bias(model, rate=RATE)
        ms.update_router_bias(model, dist.group.WORLD if groups else None, rate=RATE)
        found.append((counts.tolist(), [whole(bias).clone() for bias in biases_of(model)]))
    return found


def alone(family: str) -> Found:
    """The same of one process with the whole batch, by transformers' own experts."""
    model = drawn(family)
    chosen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
    found: Found = []
    for step in range(STEPS):
        batch = [ids_of(step, micro_batch, rank) for micro_batch in range(MICRO_BATCHES) for rank in range(2)]
        model(input_ids=torch.cat(batch))
        counts = [torch.bincount(expert_TK.flatten(), minlength=8) for expert_TK in chosen]
        chosen.clear()
        with torch.no_grad():
            for bias, tokens_E in zip(biases_of(model), counts, strict=True):
                bias += RATE * (tokens_E.double().mean() - tokens_E).sign().float().view(bias.shape)
        found.append(([each.tolist() for each in counts], [bias.detach().clone() for bias in biases_of(model)]))
    return found


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("deepseek_v3", (2, 1)),
        ("ernie", None),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("deepseek_v3", None), ("ernie", (2, 1)), ("glm4_moe", None), ("glm4_moe", (2, 1)))
        ),
    ],
)
def test_counts_and_biases_are_those_of_one_process_with_the_whole_batch(
    ranks: LocalRanks, family: str, groups: tuple[int, int] | None
) -> None:
    expected = alone(family)
    assert expected[0][0] != expected[1][0]
    assert_equal(ranks.run(balanced, family, groups, num_ranks=2), [expected] * 2)


def balanced_by_quantiles(family: str, scoring_func: Any, groups: tuple[int, int] | None) -> list[dict[str, list[Any]]]:
    """What routers gave to real tokens in the passes of each step, their histograms, and biases before and after."""
    model, group = drawn(family), None
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    if family == "ernie":
        # FSDP shards such routers, with their biases, by themselves.
        model.bfloat16()
        for gate in gates:
            gate.float()
    mesh = None if groups is None else init_device_mesh("cpu", groups, mesh_dim_names=("dp", "ep"))
    ms.parallelize(model, ms.Strategy(name="ep") if groups else lent(2), mesh)
    model.activation_checkpointing_enable({"use_reentrant": False})
    if groups:
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="the experts' group has 1 of 2 ranks"):
            ms.QuantileBalancer(model, scoring_func=scoring_func)
    with pytest.raises(ValueError, match=r"gate.*_bias is the bias of another library's router, and scoring_func=None"):
        ms.QuantileBalancer(model, group)
    balancer = ms.QuantileBalancer(model, group, scoring_func=scoring_func)
    logits: list[Tensor] = []
    for gate in gates:
        gate.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0].detach()))
    found = []
    for step in range(STEPS):
        before, given = [whole(bias).clone() for bias in biases_of(model)], []
        for micro_batch in range(MICRO_BATCHES):
            ids = ids_of(step, micro_batch, dist.get_rank())
            mask = torch.ones_like(ids)
            mask[0, micro_batch + 3 :] = 0
            logits.clear()
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            given.append([scores(each, scoring_func)[mask.flatten().bool()].numpy() for each in logits])
            loss.backward()
            evaluate(model, ids)
        counted = [each.counted[:-1].view(-1, BINS).numpy().copy() for each in balancer._histograms.values()]
        balancer.update()
        after = [whole(bias).clone() for bias in biases_of(model)]
        found.append({"scores": given, "counted": counted, "before": before, "after": after})
    return found


def scores(logits_TE: Tensor, scoring_func: str) -> Tensor:
    return logits_TE.sigmoid() if scoring_func == "sigmoid" else logits_TE.softmax(dim=1)


@pytest.mark.parametrize(
    ("family", "scoring_func", "groups"),
    [("glm4_moe", "sigmoid", (2, 1)), pytest.param("ernie", "softmax", None, marks=pytest.mark.slow)],
)
def test_biases_are_quantiles_over_the_whole_batch(
    ranks: LocalRanks, family: str, scoring_func: str, groups: tuple[int, int] | None
) -> None:
    of_ranks = ranks.run(balanced_by_quantiles, family, scoring_func, groups, num_ranks=2)
    num_layers = len(of_ranks[0][0]["before"])
    for step, layer in np.ndindex(STEPS, num_layers):
        before_E = whole(of_ranks[0][step]["before"][layer]).numpy().flatten()
        score_TE = np.concatenate([given[layer] for of_rank in of_ranks for given in of_rank[step]["scores"]])
        required_TE = np.sort(score_TE + before_E, axis=1)[:, [-3]] - score_TE
        low, width = before_E.min() - 1, (before_E.max() - before_E.min() + 2) / BINS
        bin_TE = ((required_TE - low) / ((before_E.max() + 1 - low) / np.float32(BINS))).astype(np.int64)
        counted_EB = sum(of_rank[step]["counted"][layer] for of_rank in of_ranks)
        assert np.array_equal(counted_EB, [np.bincount(bin_T, minlength=BINS) for bin_T in bin_TE.T])
        quantile_E = np.quantile(required_TE.astype(np.float64), 2 / 8, axis=0, method="inverted_cdf")
        for of_rank in of_ranks:
            after_E = of_rank[step]["after"][layer].double().numpy().flatten()
            assert np.abs(after_E - (quantile_E - quantile_E.mean())).max() < 2 * width
            assert np.array_equal(after_E, of_ranks[0][step]["after"][layer].double().numpy().flatten())


def global_loss(family: str, micro_batches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over ranks of a loss over the global batch, and its gradients, which FSDP makes means too."""
    model = with_uneven_biases(drawn(family))
    ms.parallelize(model, lent(2))
    for micro_batch in range(micro_batches):
        ids, mask = padded(ids_of(0, micro_batch, dist.get_rank()))
        outputs = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        loss = ms.global_aux_loss(model, outputs.router_logits, attention_mask=mask)
    (loss + 0 * outputs.logits.sum()).backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    ms.update_router_bias(model, rate=0)
    assert not any(layer.preferred_E.count_nonzero() for layer in experts_of(model))
    return mean / dist.get_world_size(), gates(model)


def padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    return ids, mask


def with_uneven_biases(model: Any) -> Any:
    with torch.no_grad():
        for bias in biases_of(model):
            bias.copy_(torch.linspace(-1, 1, bias.numel()).view_as(bias))
    return model


def gates(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each.grad) for name, each in model.named_parameters() if name.endswith("gate.weight")}


@pytest.mark.parametrize(
    "family",
    ["ernie", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "qwen3_moe", "minimax_m2"))],
)
def test_loss_over_the_global_batch_is_transformers_own_of_one_process(ranks: LocalRanks, family: str) -> None:
    """Whatever chooses the experts: transformers' loss is of the logits alone."""
    model = with_uneven_biases(drawn(family))
    batches = [padded(ids_of(0, 0, rank)) for rank in range(2)]
    ids, mask = (torch.cat(each) for each in zip(*batches, strict=True))
    outputs = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    outputs.aux_loss.backward()
    for loss, gradients in ranks.run(global_loss, family, 1, num_ranks=2):
        torch.testing.assert_close(loss, outputs.aux_loss.detach(), rtol=1e-5, atol=0)
        assert gradients.keys() == gates(model).keys()
        for name, expected in gates(model).items():
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-7)


def test_shares_of_preferred_experts_are_those_of_all_micro_batches(ranks: LocalRanks) -> None:
    model, tokens_E = with_uneven_biases(drawn("ernie")), torch.zeros(8)
    for micro_batch in range(2):
        outputs = [
            (model(input_ids=ids, attention_mask=mask, output_router_logits=True), mask)
            for ids, mask in (padded(ids_of(0, micro_batch, rank)) for rank in range(2))
        ]
        logits_TE = torch.cat([each[mask.flatten() > 0] for output, mask in outputs for each in output.router_logits])
        tokens_E += torch.bincount(logits_TE.topk(2, dim=1).indices.flatten(), minlength=8)
    expected = 8 * (2 * tokens_E / tokens_E.sum() * logits_TE.softmax(dim=1).mean(dim=0)).sum()
    for loss, _ in ranks.run(global_loss, "ernie", 2, num_ranks=2):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)


def zaya() -> Any:
    config = ZayaConfig(**SMALL, head_dim=12, num_experts=8, moe_intermediate_size=24, router_hidden_size=16)
    return ZayaForCausalLM._from_config(config, attn_implementation="eager").train()


@on_ranks(2)
def test_a_bias_for_more_than_experts_is_refused_by_name() -> None:
    """Zaya's routers may choose no expert, which its experts do not count."""
    model = zaya()
    ms.parallelize(model, ms.Strategy(name="ep"))
    ids = ids_of(0, 0, dist.get_rank())
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with pytest.raises(ValueError, match=r"\.balancing_biases has 9 elements and tokens_E has 8; .* such as Zaya's"):
        ms.update_router_bias(model, rate=RATE)
    ms.update_router_bias(model, rate=0)


def test_models_whose_biases_cannot_move_are_refused() -> None:
    model = drawn("deepseek_v3", experts_implementation=ms.hf.register())
    with pytest.raises(ValueError, match=r"gate.e_score_correction_bias is the bias of a router that declares no rate"):
        ms.update_router_bias(model)
    with pytest.raises(ValueError, match=r"gate.e_score_correction_bias belongs to experts that do not count"):
        ms.update_router_bias(model, rate=RATE)
    with pytest.raises(ValueError, match=r"gate.e_score_correction_bias belongs to experts that do not count"):
        ms.QuantileBalancer(model, scoring_func="sigmoid")
    ms.update_router_bias(model, rate=0.0)
    with pytest.raises(ValueError, match=r"router_logits has 1 layers with \[8\] columns, and the model has 0 of"):
        ms.global_aux_loss(model, [torch.zeros(3, 8)])
