"""Shared experts: the SwiGLU that every token passes, beside the routed ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moesys.config import ModelShape
from moesys.moe.expert_parameters import DTYPES
from moesys.moe.token_blocks import TokenBlocks


class SharedExperts(nn.Module):
    """``n_shared_experts`` fused into one SwiGLU of n·I, with DeepSeek-V3's names and shapes; replicated masters."""

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        super().__init__()
        width = shape.n_shared_experts * shape.intermediate_size
        self.dtype = DTYPES[shape.dtype]
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False, dtype=torch.float32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=shape.initializer_range, generator=generator)

    def forward(self, x_TH: Tensor, blocks: TokenBlocks | None = None) -> Tensor:
        """Returns [T, H] in x's dtype, computed in the shape's dtype, under autocast too. ``blocks``: given if no
        bit may depend on the number of tokens.
        """
        x = x_TH.to(self.dtype)
        with torch.autocast(x_TH.device.type, enabled=False):
            if blocks is not None:
                hidden = blocks.elementwise(_swiglu, blocks.linear(x, self.gate_proj.weight, self.up_proj.weight))
                return blocks.linear(hidden, self.down_proj.weight).to(x_TH.dtype)
            gate, up, down = (layer.weight.to(self.dtype) for layer in (self.gate_proj, self.up_proj, self.down_proj))
            hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            return functional.linear(hidden, down).to(x_TH.dtype)


def _swiglu(h_TU: Tensor) -> Tensor:
    gate, up = h_TU.chunk(2, dim=1)
    return functional.silu(gate) * up
