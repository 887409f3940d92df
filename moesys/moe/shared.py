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

    def __init__(self, shape: ModelShape, generator: torch.Generator, blocks: TokenBlocks | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        width = shape.n_shared_experts * shape.intermediate_size
        self.dtype = DTYPES[shape.dtype]
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False, dtype=torch.float32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=shape.initializer_range, generator=generator)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] of any dtype in, the same out; computed in the shape's dtype."""
        x = x_TH.to(self.dtype)
        gate = self._linear(x, self.gate_proj)
        gate = functional.silu(gate) if self.blocks is None else self.blocks.elementwise(functional.silu, gate)
        return self._linear(gate * self._linear(x, self.up_proj), self.down_proj).to(x_TH.dtype)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.blocks is None:
            return functional.linear(x, layer.weight.to(self.dtype))
        return self.blocks.linear(x, layer.weight)
