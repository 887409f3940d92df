"""Experts modules of transformers, and what their tests share. transformers is the oracle: its models and its experts
modules with ``experts_implementation="eager"``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AriaTextConfig, DeepseekV4Config, GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import moesys as ms

ms.hf.register()

# A relative norm of differences. Both sides round in their own order.
OUTPUT_TOLERANCE = 2e-6


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        # A single number is a sum of thousands that cancel.
        assert relative(actual[name], tensor) <= tolerance * (1 if tensor.numel() > 1 else 30), name


def assert_no_worse(actual: dict[str, Tensor], peer: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Errors are at most 1.5 times the peer's. That of a single number is a matter of luck."""
    assert actual.keys() == peer.keys() == exact.keys()
    for name, tensor in exact.items():
        assert actual[name].dtype == peer[name].dtype, name
        if tensor.numel() > 1:
            assert relative(actual[name], tensor) <= 1.5 * relative(peer[name], tensor), name


# --- experts modules ---

H, I, E, K = 48, 40, 5, 2


def mixtral_experts(**options: Any) -> nn.Module:
    sizes = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E}
    return MixtralExperts(MixtralConfig(**sizes | options))


def gpt_oss_experts() -> nn.Module:
    return GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E))


def aria_experts() -> nn.Module:
    module = AriaExperts(AriaTextConfig(hidden_size=H, intermediate_size=I, moe_num_experts=E, num_attention_heads=4))
    if not hasattr(module, "is_transposed"):
        pytest.skip("this transformers has its experts apart from the interface")
    return module


def nemotron_experts() -> nn.Module:
    config = NemotronHConfig(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, mlp_hidden_act="relu2")
    return NemotronHExperts(config)


def deepseek_v4_experts() -> nn.Module:
    config = DeepseekV4Config(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, swiglu_limit=1.0)
    return DeepseekV4Experts(config)


def muse_experts() -> nn.Module:
    muse = pytest.importorskip("transformers.models.muse_spark", reason="this transformers has no norm behind experts")
    config = muse.MuseSparkTextConfig(moe_hidden_size=H, moe_intermediate_size=I, num_local_experts=E)
    return muse.modeling_muse_spark.MuseSparkExperts(config)


# Each says what is different about it.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "SwiGLU": mixtral_experts,
    "another activation": partial(mixtral_experts, hidden_act="gelu_pytorch_tanh"),
    "an activation with parameters": partial(mixtral_experts, hidden_act="xielu"),
    "a gate of its own": deepseek_v4_experts,
    "transposed": aria_experts,
    "transposed, with biases and an interleaved gate of its own": gpt_oss_experts,
    "no gate": nemotron_experts,
    "a norm behind": muse_experts,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def experts(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    module = make()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 1))
    return module.to(dtype)


class Batch(NamedTuple):
    x: Tensor
    index: Tensor
    weight: Tensor
    dy: Tensor

    def __getitem__(self, tokens: Any) -> Batch:
        return Batch(*(tensor[tokens] for tensor in self))


def batch(num_tokens: int = 37, dtype: torch.dtype = torch.float32, num_experts: int = E) -> Batch:
    """Distinct experts for each token, and some experts much more often than others."""
    generator = torch.Generator().manual_seed(3)
    preference = torch.rand(num_tokens, num_experts, generator=generator) * torch.arange(1, num_experts + 1)
    index = preference.topk(K, dim=1).indices
    x, dy = (torch.randn(num_tokens, H, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(num_tokens, K, generator=generator)
    return Batch(x, index, weight.to(torch.promote_types(dtype, torch.float32)), dy)


def run(module: Any, batch: Batch, implementation: str = "moesys", autocast: Any = None) -> dict[str, Tensor]:
    """Output and all gradients."""
    module.config._experts_implementation = implementation
    module.zero_grad()
    x, weight = batch.x.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = module(x, batch.index, weight)
    y.backward(batch.dy)
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, **gradients_of(module)}
