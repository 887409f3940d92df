"""What an expert computes in, and its first parameters: one flat vector of P_e = 3·I·H (``expert_form``)."""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.config import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def initial_generator(seed: int, layer_index: int, expert: int | None) -> torch.Generator:
    """What an expert's first numbers are drawn from, or, for None, those of a layer's replicated weights."""
    # Distinct streams for distinct triples: a linear congruence of each part into 63 bits.
    part = 0 if expert is None else expert + 1
    key = (seed * 0x9E3779B97F4A7C15 + layer_index * 0xC2B2AE3D27D4EB4F + part * 0x165667B19E3779F9) % (1 << 63)
    return torch.Generator().manual_seed(key)


def initial_expert(shape: ModelShape, seed: int, layer_index: int, expert: int) -> Tensor:
    """The float32 [P_e] an expert starts from: normal, a function of (seed, layer, expert) and of nothing else."""
    generator = initial_generator(seed, layer_index, expert)
    return torch.randn(shape.expert_parameters, generator=generator, dtype=torch.float32).mul_(shape.initializer_range)
