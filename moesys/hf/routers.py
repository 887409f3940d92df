"""The routers of a model: moesys' own, and those of transformers that are known, with what their weights are.

Each of transformers' returns (logits [T, E], weights [T, K], experts [T, K]), and its weights are a function of the
logits at the experts. T tokens, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesys.moe.experts import require_module
from moesys.moe.router import SUM_EPS, Router
from moesys.moe.routing_replay import ForwardHook, ReplayableRouter

WeightsAt = Callable[[Any, Tensor, Tensor], Tensor]


def routers_of(model: nn.Module) -> list[ReplayableRouter]:
    """Returns the routers in ``model``, in the order of its modules.

    Raises ValueError for an unknown router or a model without any, and TypeError if ``model`` is not a module.
    """
    require_module(model)
    routers = []
    for name, module in model.named_modules():
        if isinstance(module, Router):
            routers.append(ReplayableRouter.of(name, module))
        elif (weights_at := _weights_at(module)) is not None:
            hook = partial(_hook, module, weights_at)
            routers.append(ReplayableRouter(name, module.num_experts, module.top_k, hook))
        elif "experts" in module._modules:
            _check_block(name, module)
    if not routers:
        raise ValueError(f"{type(model).__name__} has no router; known are {_known()}")
    return routers


def _weights_at(module: nn.Module) -> WeightsAt | None:
    """Also of a subclass, which FSDP makes of the modules that it wraps."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.models.") and kind.__name__ in WEIGHTS_AT:
            return WEIGHTS_AT[kind.__name__]
    return None


def _check_block(name: str, block: nn.Module) -> None:
    """Raises ValueError where a module with experts has no router that is known."""
    if any(isinstance(child, Router) or _weights_at(child) is not None for child in block.modules()):
        return
    router = block._modules.get("gate", block._modules.get("router"))
    found = "neither gate nor router" if router is None else type(router).__name__
    raise ValueError(
        f"{name} has experts, but no router that can be recorded or replayed ({found}); known are {_known()}"
    )


def _known() -> str:
    return ", ".join([f"moesys' {Router.__name__}", *WEIGHTS_AT])


def _hook(router: nn.Module, weights_at: WeightsAt, choose: Callable[[Tensor], Tensor]) -> ForwardHook:
    def change(output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits_TE, _, live_TK = output
        expert_TK = choose(live_TK)
        return output if expert_TK is live_TK else (logits_TE, weights_at(router, logits_TE, expert_TK), expert_TK)

    return ForwardHook(router, change)


# --- weights at experts, by family: dtypes and order of operations are those of the family's router ---


def _softmax_divided_by_sum(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK)
    return weight_TK / weight_TK.sum(dim=1, keepdim=True)


def _softmax(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK)
    if router.norm_topk_prob:
        weight_TK = weight_TK / weight_TK.sum(dim=1, keepdim=True)
    return weight_TK.to(logits_TE.dtype)


def _softmax_scaled(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    return logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK) * router.routed_scaling_factor


def _sigmoid_scaled(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.sigmoid().gather(1, expert_TK)
    if router.norm_topk_prob:
        weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + SUM_EPS)
    return weight_TK * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    chosen_TK = logits_TE.gather(1, expert_TK)
    return chosen_TK.softmax(dim=1, dtype=chosen_TK.dtype)


WEIGHTS_AT: dict[str, WeightsAt] = {
    "MixtralTopKRouter": _softmax_divided_by_sum,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "DeepseekV2TopkRouter": _softmax_scaled,
    "DeepseekV3TopkRouter": _sigmoid_scaled,
    "Glm4MoeTopkRouter": _sigmoid_scaled,
    "GptOssTopKRouter": _softmax_of_chosen,
}
