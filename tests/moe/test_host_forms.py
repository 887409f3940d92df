"""Experts in the forms in which other libraries keep them, each against that library's own definition of an expert.

H hidden, F expert width, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from shuffling_planner import ShufflingPlanner
from torch import Tensor, nn

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.outside import OutsideExperts, Parts

H, F, E, K = 24, 16, 6, 2
SHAPE = ms.ModelShape(hidden_size=H, intermediate_size=F, num_experts=E, top_k=K)
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
EP = ms.Strategy(name="ep")
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=4), **GREEDY)
FSEP = LENT.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=4))
ALONE = (EP, FSEP.replace(sharding=ms.Fsep(slots_per_rank=E)))
OVERLAPS = (ms.Sequential(), ms.Pipelined(chunks=2))
SCALING = 2.0

# What a library keeps: tensors of all experts, or a list of one for each.
Kept = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """The form of one library. ``shapes``: of one expert, by the library's names; ``listed``: one tensor per expert.
    ``expert``: the library's function of rows [N, H], their weights [N, 1] and one expert's tensors. ``cut``: where
    Fsep cuts an expert's tensor, 0 where it is not named, None if each rank has it whole.
    """

    expert: Callable[..., Tensor]
    read: Callable[[Kept], Parts]
    shapes: dict[str, tuple[int, ...]]
    cut: dict[str, int | None] = field(default_factory=dict)
    listed: bool = False
    options: dict[str, Any] = field(default_factory=dict)


silu = nn.functional.silu


def torchtitan(x: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return ((silu(x @ w1.T) * (x @ w3.T)) @ w2.T) * weight


def automodel(x: Tensor, weight: Tensor, gate_and_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_and_up).chunk(2, dim=-1)
    return (silu(gate) * up * weight) @ down


def te_grouped(x: Tensor, weight: Tensor, fc1: Tensor, fc2: Tensor, bias1: Tensor, bias2: Tensor) -> Tensor:
    gate, up = (x @ fc1.T + bias1).chunk(2, dim=-1)
    return (silu(gate) * up * weight) @ fc2.T + bias2 * weight


def squared_relu(x: Tensor, weight: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return (torch.relu(x @ fc1.T).square() * weight) @ fc2.T


def clamped(h: Tensor) -> Tensor:
    gate, up = h[..., ::2].clamp(max=0.4), h[..., 1::2].clamp(-0.4, 0.4)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


def gpt_oss(x: Tensor, weight: Tensor, mlp1: Tensor, bias1: Tensor, mlp2: Tensor, bias2: Tensor) -> Tensor:
    return (clamped(x @ mlp1 + bias1) @ mlp2 + bias2) * weight


def lora(x: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torchtitan(x, weight, w1 + SCALING * b @ a, w2, w3)


def swiglu_shapes(*names: str) -> dict[str, tuple[int, ...]]:
    return dict(zip(names, ((F, H), (H, F), (F, H)), strict=True))


ON_ACTIVATIONS = {"weights_on": "activations"}
FORMS = {
    "torchtitan and AutoEP": Form(
        torchtitan, lambda of: {"gate": of["w1"], "up": of["w3"], "down": of["w2"]}, swiglu_shapes("w1", "w2", "w3")
    ),
    "AutoModel": Form(
        automodel,
        lambda of: {"gate_up": of["gate_and_up"], "down": of["down"]},
        {"gate_and_up": (H, 2 * F), "down": (F, H)},
        options={"transposed": True, **ON_ACTIVATIONS},
    ),
    "Megatron, one tensor per expert, biases": Form(
        te_grouped,
        lambda of: dict(zip(WITH_BIASES, (of["fc1"], of["fc2"], of["bias1"], of["bias2"]), strict=True)),
        {"fc1": (2 * F, H), "fc2": (H, F), "bias1": (2 * F,), "bias2": (H,)},
        cut={"fc1": 1},
        listed=True,
        options=ON_ACTIVATIONS,
    ),
    "Megatron without a gate": Form(
        squared_relu,
        lambda of: {"up": of["fc1"], "down": of["fc2"]},
        {"fc1": (F, H), "fc2": (H, F)},
        listed=True,
        options={"activation": lambda h: torch.relu(h).square(), **ON_ACTIVATIONS},
    ),
    "three matrices [in, out]": Form(
        lambda x, weight, w1, w2, w3: torchtitan(x, weight, w1.T, w2.T, w3.T),
        lambda of: {"gate": of["w1"].mT, "up": of["w3"].mT, "down": of["w2"].mT},
        {"w1": (H, F), "w2": (F, H), "w3": (H, F)},
        cut=dict.fromkeys(("w1", "w2", "w3"), 1),
    ),
    "gpt-oss": Form(
        gpt_oss,
        lambda of: dict(zip(WITH_BIASES, (of["mlp1"], of["mlp2"], of["bias1"], of["bias2"]), strict=True)),
        {"mlp1": (H, 2 * F), "bias1": (2 * F,), "mlp2": (F, H), "bias2": (H,)},
        options={"transposed": True, "activation": clamped},
    ),
    "LoRA on gate": Form(
        lora,
        lambda of: {"gate": of["w1"] + SCALING * of["b"] @ of["a"], "up": of["w3"], "down": of["w2"]},
        swiglu_shapes("w1", "w2", "w3") | {"a": (3, H), "b": (F, 3)},
        cut={"a": None},
    ),
}
WITH_BIASES = ("gate_up", "down", "gate_up_bias", "down_bias")


def drawn(kept: Form) -> dict[str, Tensor]:
    """All experts, float64."""
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(E, *size, generator=generator).double() / 5 for name, size in kept.shapes.items()}


def batch(number: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, choices, weights and the output's gradient; the last of several ranks has no tokens in batch 0."""
    num_tokens = 0 if number == 0 and rank == num_ranks - 1 > 0 else 9 + 5 * rank + number
    generator = torch.Generator().manual_seed(100 * number + rank)
    x_TH, dy_TH = (torch.randn(num_tokens, H, generator=generator) for _ in range(2))
    expert_TK = torch.rand(num_tokens, E, generator=generator).topk(K).indices
    return x_TH, expert_TK, torch.rand(num_tokens, K, generator=generator), dy_TH


def here(kept: Form, name: str, whole: Tensor, strategy: ms.Strategy, rank: int, num_ranks: int) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(strategy.sharding, ms.Ep):
        return whole.chunk(num_ranks)[rank]
    dim = kept.cut.get(name, 0)
    return whole if dim is None else whole.chunk(num_ranks, dim=1 + dim)[rank]


def as_kept(kept: Form, tensors: dict[str, Tensor], strategy: ms.Strategy, rank: int, num_ranks: int) -> Kept:
    """This rank's leaves."""
    parts = {name: here(kept, name, of, strategy, rank, num_ranks).float().clone() for name, of in tensors.items()}
    if not kept.listed:
        return {name: nn.Parameter(part.contiguous()) for name, part in parts.items()}
    return {name: [nn.Parameter(each.contiguous()) for each in part] for name, part in parts.items()}


def gradients(leaves: Kept) -> dict[str, Tensor]:
    return {
        name: torch.stack([each.grad for each in leaf]) if isinstance(leaf, list) else leaf.grad
        for name, leaf in leaves.items()
    }


def run(name: str, strategy: ms.Strategy) -> dict[str, Tensor]:
    """Outputs and all gradients of this rank."""
    kept, alone = FORMS[name], not dist.is_initialized()
    rank, R = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    leaves = as_kept(kept, drawn(kept), strategy, rank, R)
    outside = OutsideExperts(lambda: kept.read(leaves), **kept.options)
    experts = ms.Experts(SHAPE, strategy, outside=outside)
    if strategy.balance == ms.Greedy():
        experts.schedule.source = ShufflingPlanner()
    found: dict[str, Tensor] = {}
    for number in range(2):
        x_TH, expert_TK, weight_TK, dy_TH = batch(number, rank, R)
        y_TH = experts(x_TH.requires_grad_(), expert_TK, weight_TK.requires_grad_())
        y_TH.backward(dy_TH)
        found |= {f"y{number}": y_TH.detach(), f"dx{number}": x_TH.grad, f"dweight{number}": weight_TK.grad}
    return found | gradients(leaves)


def expected(name: str, rank: int, num_ranks: int, strategy: ms.Strategy) -> dict[str, Tensor]:
    """What the library's definition gives this rank, in float64, with gradients of all ranks' tokens."""
    kept = FORMS[name]
    tensors = {each: of.requires_grad_() for each, of in drawn(kept).items()}
    found: dict[str, Tensor] = {}
    for source in range(num_ranks):
        for number in range(2):
            x_TH, expert_TK, weight_TK, dy_TH = batch(number, source, num_ranks)
            x_TH, weight_TK = x_TH.double().requires_grad_(), weight_TK.double().requires_grad_()
            y_TH = 0 * (x_TH + weight_TK.sum(dim=1, keepdim=True))
            for k in range(K):
                rows = [
                    kept.expert(x_TH[t : t + 1], weight_TK[t, k], *(of[expert_TK[t, k]] for of in tensors.values()))
                    for t in range(len(x_TH))
                ]
                y_TH = y_TH + torch.cat([*rows, x_TH[:0]])
            y_TH.backward(dy_TH.double())
            if source == rank:
                found |= {f"y{number}": y_TH.detach(), f"dx{number}": x_TH.grad, f"dweight{number}": weight_TK.grad}
    return found | {each: here(kept, each, of.grad, strategy, rank, num_ranks) for each, of in tensors.items()}


def all_of(name: str, strategies: Sequence[ms.Strategy]) -> list[list[dict[str, Tensor]]]:
    return [[run(name, strategy.replace(overlap=overlap)) for overlap in OVERLAPS] for strategy in strategies]


def assert_right(name: str, by_rank: list[Any], strategies: Sequence[ms.Strategy]) -> None:
    for strategy, *found in zip(strategies, *by_rank, strict=True):
        for sequential, pipelined in found:
            assert_equal(sequential, pipelined, strategy.name)
        if isinstance(strategy.sharding, ms.Fsep):
            # What every rank has whole has a part of its gradient on each.
            for what in (what for what, dim in FORMS[name].cut.items() if dim is None):
                total = sum(sequential[what] for sequential, _ in found)
                for sequential, _ in found:
                    sequential[what] = total
        for rank, (sequential, _) in enumerate(found):
            wanted = expected(name, rank, len(by_rank), strategy)
            assert sequential.keys() == wanted.keys()
            for what, each in wanted.items():
                where = f"{what} under {strategy.name}: "
                torch.testing.assert_close(sequential[what], each.float(), rtol=1e-4, atol=1e-5, msg=where.__add__)


@pytest.mark.parametrize("name", FORMS)
def test_one_rank_computes_what_the_library_defines(name: str) -> None:
    assert_right(name, [all_of(name, ALONE)], ALONE)


@pytest.mark.parametrize("name", FORMS)
def test_two_ranks_compute_what_the_library_defines(ranks: LocalRanks, name: str) -> None:
    strategies = EP, LENT, FSEP
    assert_right(name, ranks.run(all_of, name, strategies, num_ranks=2, timeout_s=120), strategies)
