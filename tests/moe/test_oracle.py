"""The layer computes what transformers' MoE blocks compute: outputs, every gradient, and the names of its state.

tests/moe/test_matrix.py compares every strategy and number of ranks with the same computation.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import moesys as ms

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


def results(module: nn.Module) -> dict[str, Tensor]:
    """Output and gradients of two batches; those of parameters add up."""
    found = {}
    for batch in range(2):
        x, dy = torch.randn(2, 1, 40 - 5 * batch, 64, generator=torch.Generator().manual_seed(batch))
        y = module(x.requires_grad_())
        y.backward(dy)
        found |= {f"y {batch}": y.detach(), f"dx {batch}": x.grad}
    return found | {name: each.grad for name, each in module.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
def test_agrees_with_transformers(model: str) -> None:
    shape, oracle = block(model, 64, 48)
    layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
    layer.load_full_state_dict(oracle.state_dict())
    state = layer.full_state_dict()
    assert state.keys() == oracle.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in oracle.state_dict().items())
    found, wanted = results(layer), results(oracle)
    experts = [wanted.pop(f"experts.{name}_proj").flatten(1) for name in ("gate_up", "down")]
    wanted = {re.sub(r"^gate\.", "router.", name): gradient for name, gradient in wanted.items()}
    wanted["experts.masters"] = torch.cat(experts, dim=1)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        tolerance = OUTPUT_TOLERANCE if name.startswith(("y ", "dx ")) else GRADIENT_TOLERANCE
        assert (found[name].double() - each.double()).norm() <= tolerance * each.double().norm(), name
