"""What computes a layer's experts on a device."""

from __future__ import annotations

import torch

from moesys.config import ModelShape
from moesys.kernels.cpu.row_invariant_gemm import RowRule, projection_rule
from moesys.overlap.expert_compute import ExpertCompute
from moesys.overlap.experts_cpu import CpuExperts


def experts_on_device(shape: ModelShape, dtype: torch.dtype, device_type: str) -> ExpertCompute:
    """Returns Triton's kernels on a GPU, and a GEMM a slot elsewhere."""
    if device_type == "cuda":
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.experts_triton import TritonExperts

        return TritonExperts()
    H, I = shape.hidden_size, shape.intermediate_size
    up = projection_rule(H, 2 * I, dtype, device_type)
    down = projection_rule(I, H, dtype, device_type)
    return CpuExperts(RowRule.all_of([up, down]))
