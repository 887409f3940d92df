"""The layer computes what transformers' MoE blocks compute: outputs and every gradient, on one rank; that ranks and
strategies change nothing is proved by test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import Case, inputs, run_layer
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import moesys as ms

OUTPUT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6


def mixtral(H: int, I: int) -> tuple[ms.ModelShape, nn.Module]:
    config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=8, num_experts_per_tok=2)
    return ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=8, top_k=2), block(
        MixtralSparseMoeBlock, config
    )


def qwen3_moe(H: int, I: int) -> tuple[ms.ModelShape, nn.Module]:
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True
    )
    return ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=16, top_k=4), block(
        Qwen3MoeSparseMoeBlock, config
    )


def olmoe(H: int, I: int) -> tuple[ms.ModelShape, nn.Module]:
    config = OlmoeConfig(
        hidden_size=H, intermediate_size=I, num_experts=10, num_experts_per_tok=3, norm_topk_prob=False
    )
    shape = ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=10, top_k=3, norm_topk_prob=False)
    return shape, block(OlmoeSparseMoeBlock, config)


def deepseek_v3(H: int, I: int) -> tuple[ms.ModelShape, nn.Module]:
    config = DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=I,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    shape = ms.ModelShape(
        hidden_size=H,
        intermediate_size=I,
        num_experts=16,
        top_k=4,
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    return shape, block(DeepseekV3MoE, config)


def block(kind: type[nn.Module], config: object) -> nn.Module:
    config._experts_implementation = "eager"  # type: ignore[attr-defined]
    module = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(std=0.05, generator=generator)
    return module


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


MODELS = (mixtral, qwen3_moe, olmoe, deepseek_v3)


@pytest.mark.parametrize(("H", "I", "tokens"), [(64, 48, 80), (1024, 96, 24)], ids=["small", "wide"])
@pytest.mark.parametrize("model", MODELS)
def test_agrees_with_transformers(
    model: Callable[[int, int], tuple[ms.ModelShape, nn.Module]], H: int, I: int, tokens: int
) -> None:
    shape, oracle = model(H, I)
    weights = {name: tensor.detach().clone() for name, tensor in oracle.state_dict().items()}
    counts = [[tokens - 5 * batch] for batch in range(3)]
    case = Case(shape, ms.Strategy(name="ep"), counts, weights=weights, skew=0.5)
    expected = [_through_oracle(oracle, case, batch) for batch in range(len(counts))]
    wanted = {name: p.grad for name, p in oracle.named_parameters()}
    experts = torch.cat([wanted.pop("experts.gate_up_proj").flatten(1), wanted.pop("experts.down_proj").flatten(1)], 1)
    wanted = {
        name.replace("gate.", "router.", 1) if name.startswith("gate.") else name: g for name, g in wanted.items()
    }
    wanted["experts.masters"] = experts

    found = run_layer(case)
    for batch, (y, dx) in enumerate(expected):
        assert relative(found["outputs"][batch], y) <= OUTPUT_TOLERANCE
        assert relative(found["dx"][batch], dx) <= GRADIENT_TOLERANCE
    assert found["gradients"].keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert relative(found["gradients"][name], gradient) <= GRADIENT_TOLERANCE, name


def _through_oracle(oracle: nn.Module, case: Case, batch: int) -> tuple[Tensor, Tensor]:
    """The same tokens through the block: (y, dx); gradients of parameters add up in the block."""
    x, dy = (tensor[None] for tensor in inputs(case, batch, 0))
    y = oracle(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    return y[0].detach(), x.grad[0]


def test_state_returns_in_the_names_of_transformers() -> None:
    for model in MODELS:
        shape, oracle = model(32, 16)
        layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
        layer.load_full_state_dict(oracle.state_dict())
        state = layer.full_state_dict()
        assert state.keys() == oracle.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in oracle.state_dict().items())


def test_state_of_another_shape_is_refused() -> None:
    shape, oracle = mixtral(32, 16)
    layer = ms.MoELayer(shape.replace(intermediate_size=24), ms.Strategy(name="ep"))
    with pytest.raises(
        ValueError, match=r"experts.gate_up_proj has shape \(8, 32, 32\); this layer's is \(8, 48, 32\)"
    ):
        layer.load_full_state_dict(oracle.state_dict())
