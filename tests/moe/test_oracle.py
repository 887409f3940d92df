"""The layer computes what transformers' MoE blocks compute: outputs and every gradient, whoever holds the experts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import Case, inputs, run_cases
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

OUTPUT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6
DEEPSEEK = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5}


# The classes of each block, the name of its number of experts, and fields of its shape beside the sizes.
MODELS: dict[str, tuple[type[nn.Module], type, str, dict[str, Any]]] = {
    "mixtral": (MixtralSparseMoeBlock, MixtralConfig, "num_local_experts", {"num_experts": 8, "top_k": 2}),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, "num_experts", {"num_experts": 16, "top_k": 4}),
    "olmoe": (
        OlmoeSparseMoeBlock,
        OlmoeConfig,
        "num_experts",
        {"num_experts": 10, "top_k": 3, "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        *(DeepseekV3MoE, DeepseekV3Config, "n_routed_experts"),
        {"num_experts": 16, "top_k": 4, "scoring_func": "sigmoid", **DEEPSEEK},
    ),
}


def block(model: str, H: int, I: int) -> tuple[ms.ModelShape, nn.Module]:
    kind, config_kind, experts, fields = MODELS[model]
    shape = ms.ModelShape(hidden_size=H, intermediate_size=I, **fields)
    of_config = {experts: shape.num_experts, "num_experts_per_tok": shape.top_k, "norm_topk_prob": shape.norm_topk_prob}
    sizes = {"hidden_size": H, "intermediate_size": I, "moe_intermediate_size": I}
    config = config_kind(**sizes, **of_config, **(DEEPSEEK if model == "deepseek_v3" else {}))
    config._experts_implementation = "eager"
    module = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(std=0.05, generator=generator)
    return shape, module


def strategies(num_experts: int, num_ranks: int) -> list[ms.Strategy]:
    """EP, and FSEP where another layout follows every micro-batch; all others are in test_matrix.py."""
    moving = {"balance": ms.Laer(), "split": ms.EvenSplit(), "overlap": ms.Pipelined(chunks=3)}
    sharding = ms.Fsep(slots_per_rank=-(-num_experts // num_ranks) + 2)
    return [ms.Strategy(name="ep"), ms.Strategy(name="fsep, moving, pipelined", sharding=sharding, **moving)]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# Other numbers of ranks are in test_matrix.py.
@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(2, (64, 48, 40)), pytest.param(4, (1024, 96, 24), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model", MODELS)
def test_agrees_with_transformers(ranks: LocalRanks, model: str, num_ranks: int, sizes: tuple[int, ...]) -> None:
    H, I, tokens = sizes
    shape, oracle = block(model, H, I)
    weights = {name: tensor.detach().clone() for name, tensor in oracle.state_dict().items()}
    counts = [[tokens + 3 * rank - 5 * batch for rank in range(num_ranks)] for batch in range(3)]
    cases = [
        Case(shape, strategy, counts, weights=weights, skew=0.5, shuffle_layouts=True)
        for strategy in strategies(shape.num_experts, num_ranks)
    ]
    expected = [_through_oracle(oracle, cases[0], batch) for batch in range(len(counts))]
    wanted = {name: p.grad for name, p in oracle.named_parameters()}
    experts = torch.cat([wanted.pop("experts.gate_up_proj").flatten(1), wanted.pop("experts.down_proj").flatten(1)], 1)
    wanted = {re.sub(r"^gate\.", "router.", name): gradient for name, gradient in wanted.items()}
    wanted["experts.masters"] = experts

    by_rank = ranks.run(run_cases, cases, num_ranks=num_ranks)
    for index, case in enumerate(cases):
        results = [result[index] for result in by_rank]
        for batch, (y, dx) in enumerate(expected):
            actual_y = torch.cat([result["outputs"][batch] for result in results])
            actual_dx = torch.cat([result["dx"][batch] for result in results])
            assert relative(actual_y, y) <= OUTPUT_TOLERANCE, case.strategy.name
            assert relative(actual_dx, dx) <= GRADIENT_TOLERANCE, case.strategy.name
        assert results[0]["gradients"].keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert relative(results[0]["gradients"][name], gradient) <= GRADIENT_TOLERANCE, (case.strategy.name, name)
        layouts = results[0]["layouts"]
        assert "moving" not in case.strategy.name or layouts[0] != layouts[1] != layouts[2]


def _through_oracle(oracle: nn.Module, case: Case, batch: int) -> tuple[Tensor, Tensor]:
    """All ranks' tokens through the block at once: (y, dx); gradients of parameters add up in the block."""
    pairs = [inputs(case, batch, rank) for rank in range(len(case.tokens[batch]))]
    x = torch.cat([x for x, _ in pairs])[None].requires_grad_()
    y = oracle(x)
    y.backward(torch.cat([dy for _, dy in pairs])[None])
    assert x.grad is not None
    return y[0].detach(), x.grad[0]


def test_state_returns_in_the_names_of_transformers() -> None:
    for model in MODELS:
        shape, oracle = block(model, 32, 16)
        layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
        layer.load_full_state_dict(oracle.state_dict())
        state = layer.full_state_dict()
        assert state.keys() == oracle.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in oracle.state_dict().items())
