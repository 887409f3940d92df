"""What computes a layer's experts on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesys.config import ModelShape
from moesys.kernels.cpu.row_invariant_gemm import RowRule, projection_rule
from moesys.kernels.cpu.row_invariant_ops import RowFunction
from moesys.overlap.expert_compute import ExpertCompute
from moesys.overlap.experts_cpu import SWIGLU, CpuExperts


@dataclass(frozen=True)
class ExpertFunction:
    """What an expert computes between and around its projections.

    ``activation``: SwiGLU, or any other. ``transposed``: projections are [in, out]. ``biases``: both have one.
    """

    activation: RowFunction = SWIGLU
    transposed: bool = False
    biases: bool = False

    @property
    def has_kernels(self) -> bool:
        """Whether Triton's kernels compute it."""
        return self.activation is SWIGLU and not self.transposed and not self.biases


OURS = ExpertFunction()


def experts_on_device(
    shape: ModelShape, dtype: torch.dtype, device_type: str, function: ExpertFunction = OURS
) -> ExpertCompute:
    """Returns Triton's kernels on a GPU where they compute ``function``, and a GEMM a slot elsewhere."""
    if device_type == "cuda" and function.has_kernels:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.experts_triton import TritonExperts

        return TritonExperts()
    H, I = shape.hidden_size, shape.intermediate_size
    up = projection_rule(H, function.activation.halves * I, dtype, device_type, function.transposed)
    down = projection_rule(I, H, dtype, device_type, function.transposed)
    return CpuExperts(RowRule.all_of([up, down]), function.activation, transposed=function.transposed)
