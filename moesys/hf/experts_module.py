"""The description of an experts module of transformers: what it computes, and with which parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ExpertsModule:
    """The computation of an experts module, in the terms of transformers' ``use_experts_implementation``.

    names: of the up and down projection, then of their biases if there are any.
    transposed: projections are [E, in, out], not [E, out, in].
    swiglu: the activation is SwiGLU of ``[gate | up]``, so that its kernel may take its place.
    dtype: of the projections.
    norm: of an expert's output, before the routing weight.
    parameters: all others of the module, which activation and norm may use.
    """

    names: tuple[str, ...]
    transposed: bool
    swiglu: bool
    dtype: torch.dtype
    activation: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor] | None
    parameters: tuple[nn.Parameter, ...]

    @property
    def has_kernels(self) -> bool:
        """Returns whether ``kernels.experts`` computes the same: SwiGLU, with nothing besides, in 32 or 16 bits."""
        plain = self.swiglu and not self.transposed and self.norm is None and len(self.names) == 2
        return plain and self.dtype != torch.float64

    @staticmethod
    def of(module: Any) -> ExpertsModule:
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        if module.has_bias:
            names += [f"{name}_bias" for name in names]
        # older versions do not have it
        has_norm = getattr(module, "has_post_expert_norm", False)
        return ExpertsModule(
            names=tuple(names),
            transposed=module.is_transposed,
            swiglu=_is_swiglu(module),
            dtype=module.down_proj.dtype,
            activation=module._apply_gate if module.has_gate else module.act_fn,
            norm=module.post_expert_norm if has_norm else None,
            parameters=tuple(p for name, p in module.named_parameters() if name not in names),
        )


def is_experts(module: nn.Module) -> bool:
    """Returns whether transformers has made this module one of experts."""
    # The class is checked, because PEFT's wrappers forward attributes of the module inside.
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _is_swiglu(module: Any) -> bool:
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    if not module.has_gate or type(module)._apply_gate is not moe._default_apply_gate:
        return False
    return module.act_fn is nn.functional.silu or isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of the products: autocast's, or else that of the weights."""
    if weight.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f'experts have dtype {weight.dtype}; experts_implementation="moesys" takes {names}')
    device_type = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype
