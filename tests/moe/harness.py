"""Runs a layer on ranks and brings everything back whole: what the tests of the layer share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shuffling_planner import ShufflingPlanner
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.moe.layer import MoELayer


def plain_experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor) -> Tensor:
    """The output of SwiGLU experts in plain torch: every expert computes every token, and most of that counts 0."""
    weight_TE = weight_TK.new_zeros(len(x_TH), len(down_EHI)).scatter(1, expert_TK, weight_TK)
    gate, up = torch.einsum("th,euh->teu", x_TH, gate_up_EUH).chunk(2, dim=2)
    y_TEH = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, down_EHI)
    return (weight_TE[:, :, None] * y_TEH).sum(1)


@dataclass
class Case:
    """One comparison: a layer, the tokens each rank has in each micro-batch, and what they are made from."""

    shape: ms.ModelShape
    strategy: ms.Strategy
    tokens: list[list[int]]  # of each micro-batch, of each rank
    seed: int = 0
    cluster: ms.ClusterSpec | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    skew: float = 0.0
    shuffle_layouts: bool = False  # another layout for every micro-batch, whatever the planner would say
    kernels: bool = False  # experts on Triton's kernels, as on a GPU


def inputs(case: Case, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """(x, dy) of one rank and micro-batch, both [T, H]; ``skew`` pulls all tokens towards one direction."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + micro_batch * 100 + rank)
    num_tokens, H = case.tokens[micro_batch][rank], case.shape.hidden_size
    x_TH = torch.randn(num_tokens, H, generator=generator)
    x_TH += case.skew * torch.randn(H, generator=torch.Generator().manual_seed(case.seed))
    return x_TH, torch.randn(num_tokens, H, generator=generator)


def make_layer(case: Case) -> MoELayer:
    layer = ms.MoELayer(case.shape, case.strategy, cluster=case.cluster, seed=case.seed)
    if case.weights:
        layer.load_full_state_dict(case.weights)
    if case.shuffle_layouts:
        layer.experts.schedule.source = ShufflingPlanner()
    if case.kernels:
        # Here, so that ranks without such a case do not load Triton.
        from moesys.overlap.experts_triton import TritonExperts

        layer.experts.expert_compute = TritonExperts()
    return layer


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def summed(tensor: Tensor) -> Tensor:
    """Over ranks, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).sum(0)


def run_layer(case: Case) -> dict[str, Any]:
    """All micro-batches forward and backward: this rank's outputs and dx of each, whole gradients by name."""
    layer = make_layer(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    outputs, dxs, imbalance, layouts = [], [], [], []
    for micro_batch in range(len(case.tokens)):
        x_TH, dy_TH = inputs(case, micro_batch, rank)
        x_TH.requires_grad_()
        y_TH = layer(x_TH)
        y_TH.backward(dy_TH)
        outputs.append(y_TH.detach())
        dxs.append(x_TH.grad)
        imbalance.append(layer.last_plan.tokens.max_over_mean)
        layouts.append(layer.last_plan.layout.expert_RS.tolist())
    already = {id(parameter) for parameter in layer.summed_in_backward()}
    gradients = {
        name: whole(p.grad) if isinstance(p.grad, DTensor) or id(p) in already else summed(p.grad)
        for name, p in layer.named_parameters()
        if p.grad is not None
    }
    local_router_gradient = layer.router.weight.grad
    return {
        "outputs": outputs,
        "dx": dxs,
        "gradients": gradients,
        "local_router_gradient": local_router_gradient,
        "imbalance": imbalance,
        "layouts": layouts,
        "state": layer.full_state_dict(),
    }


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases in one visit to the ranks."""
    return [run_layer(case) for case in cases]


def assert_same_bits(results: list[dict[str, Any]], what: str) -> None:
    names = ("outputs", "dx", "local_router_gradient")
    first, *others = ([*(each[name] for name in names), each["gradients"]["experts.masters"]] for each in results)
    for index, other in enumerate(others):
        where = f"{what}, variant {index}: "
        torch.testing.assert_close(other, first, rtol=0, atol=0, msg=where.__add__)


def small_model() -> Any:
    """A model of transformers, in training."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    attention = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48}
    config = Qwen3MoeConfig(vocab_size=64, hidden_size=32, use_cache=False, **attention, **experts)
    return Qwen3MoeForCausalLM(config).train()


class Stack(nn.Module):
    """A few MoE layers with residuals and linear maps between: enough of a model to have an order and a first layer."""

    def __init__(self, shape: ms.ModelShape, strategy: ms.Strategy, num_layers: int, seed: int = 0, **options: Any):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mixers = nn.ModuleList(nn.Linear(shape.hidden_size, shape.hidden_size) for _ in range(num_layers))
        for parameter in self.mixers.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        self.moe = nn.ModuleList(
            ms.MoELayer(shape, strategy, layer_index=index, seed=seed, **options) for index in range(num_layers)
        )

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        for mixer, moe in zip(self.mixers, self.moe, strict=True):
            block = partial(_block, mixer, moe)
            x = checkpoint(block, x, use_reentrant=False, context_fn=ms.recompute) if checkpointed else block(x)
        return x


def _block(mixer: nn.Module, moe: nn.Module, x: Tensor) -> Tensor:
    return x + moe(torch.tanh(mixer(x)))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of sharded parameters, this rank's of the others."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens_of(batch: int, hidden_size: int, rank: int | None = None) -> Tensor:
    """A rank's tokens of a micro-batch; each later one is pulled farther, in a direction of its own."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * batch + rank)
    drift_H = torch.randn(hidden_size, generator=torch.Generator().manual_seed(batch))
    return torch.randn(11 + 7 * rank + batch, hidden_size, generator=generator) + batch * drift_H


def train(
    shape: ms.ModelShape,
    strategy: ms.Strategy,
    linked: bool,
    checkpointed: bool = False,
    cluster: ms.ClusterSpec | None = None,
    steps: int = 3,
) -> dict[str, Any]:
    """Clipped optimizer steps of two micro-batches each: losses, the last norm and gradients, layouts used."""
    model = Stack(shape, strategy, num_layers=3, cluster=cluster)
    runtime = ms.link(model) if linked else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, layouts = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in (2 * step, 2 * step + 1):
            loss = model(tokens_of(batch, shape.hidden_size), checkpointed).square().sum()
            loss.backward()
            losses.append(loss.item())
            layouts.append([moe.last_plan.layout.expert_RS.tolist() for moe in model.moe])
        ms.sync_gradients(model)
        norm = ms.clip_grad_norm_(model, 1.0)
        optimizer.step()
    if runtime is not None:
        assert runtime.events == []
        runtime.close()
    return {"losses": losses, "layouts": layouts, "norm": norm, "gradients": gradients_of(model)}


def assert_same_training(found: dict[str, Any], wanted: dict[str, Any], what: object = "") -> None:
    """Layouts, losses and gradients of ``train``, to the last bit."""
    assert found["layouts"] == wanted["layouts"], what
    assert found["losses"] == wanted["losses"], what
    gradients = (each["gradients"] for each in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=0, atol=0, msg=lambda difference: f"{what} {difference}")
