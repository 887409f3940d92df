"""What one rank times of a transformer's block beside its products: attention, what is no product, and the optimizer.

As models of transformers do it on a rank that compiles nothing: torch's attention, and norms, rotary embeddings,
activations and residuals step by step. Called on all ranks at once, as ``rank_timings``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.calibrate.windows import Effort, timed
from moesys.config import DType
from moesys.lab.ranks.torchrun_ranks import rank_device
from moesys.moe.expert_parameters import DTYPES

EPSILON = 1e-6
ROTARY_WIDTH = 64


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention of one sequence, with as many heads of keys as of queries."""

    num_heads: int
    head_dim: int
    seq_len: int
    held_out: bool = False

    @property
    def flops(self) -> int:
        """Of forward: scores of pairs within the mask, and what they sum (``simulator.model.layer_operations``)."""
        return 4 * self.num_heads * self.head_dim * (self.seq_len * (self.seq_len + 1) // 2)

    @property
    def backward_flops(self) -> int:
        """Scores again, and two products for each of both."""
        return self.flops * 5 // 2


@dataclass(frozen=True)
class ElementwiseCase:
    """What is no product of a block with a dense MLP as wide as H, and as many heads of keys as of queries: two norms,
    rotary embeddings of queries and keys, SwiGLU, two residuals.
    """

    num_tokens: int
    hidden_size: int
    held_out: bool = False

    # Kernels, were each of those one.
    num_kernels = 6

    def forward_bytes(self, element_bytes: int) -> int:
        """Read and written at least: norms 2 rows each, rotary 4, SwiGLU 3, residuals 3 each."""
        return 17 * self.num_tokens * self.hidden_size * element_bytes

    def backward_bytes(self, element_bytes: int) -> int:
        """Norms 3 rows each, rotary 4, SwiGLU 5, residuals 3 each."""
        return 21 * self.num_tokens * self.hidden_size * element_bytes


def attention(
    cases: Sequence[AttentionCase], dtype: DType, effort: Effort, device_type: str
) -> list[tuple[list[float], list[float]]]:
    """Seconds of forward and of backward of each case, by window."""
    return _both_ways([_attention(case, dtype, rank_device(device_type)) for case in cases], effort, device_type)


def elementwise(
    cases: Sequence[ElementwiseCase], dtype: DType, effort: Effort, device_type: str
) -> list[tuple[list[float], list[float]]]:
    """Seconds of forward and of backward of each case, by window."""
    return _both_ways([_elementwise(case, dtype, rank_device(device_type)) for case in cases], effort, device_type)


def adam_updates(shapes: Sequence[tuple[int, int]], effort: Effort, device_type: str) -> list[float]:
    """Seconds of an AdamW update of float32 parameters of these shapes, by window."""
    device = rank_device(device_type)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return timed([torch.optim.AdamW(parameters, lr=1e-4).step], effort, device)[0]


@dataclass(frozen=True)
class _Differentiable:
    """forward: from ``inputs`` to outputs. gradients: of the outputs."""

    forward: Callable[[], tuple[Tensor, ...]]
    inputs: list[Tensor]
    gradients: list[Tensor]

    def backward(self) -> Callable[[], object]:
        outputs = self.forward()
        return lambda: torch.autograd.grad(outputs, self.inputs, self.gradients, retain_graph=True)


def _both_ways(
    works: Sequence[_Differentiable], effort: Effort, device_type: str
) -> list[tuple[list[float], list[float]]]:
    calls = [call for work in works for call in (work.forward, work.backward())]
    windows = timed(calls, effort, rank_device(device_type))
    return list(zip(windows[::2], windows[1::2], strict=True))


def _drawn(count: int, shape: tuple[int, ...], dtype: DType, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_() for _ in range(count)]


def _attention(case: AttentionCase, dtype: DType, device: torch.device) -> _Differentiable:
    shape = (1, case.num_heads, case.seq_len, case.head_dim)
    query, key, value, gradient = _drawn(4, shape, dtype, device)

    def forward() -> tuple[Tensor, ...]:
        return (functional.scaled_dot_product_attention(query, key, value, is_causal=True),)

    return _Differentiable(forward, [query, key, value], [gradient.detach()])


def _elementwise(case: ElementwiseCase, dtype: DType, device: torch.device) -> _Differentiable:
    """Outputs of products, which stand between these steps, are inputs, and what goes into products is an output."""
    T, H = case.num_tokens, case.hidden_size
    x, attended, gate, up, mlp, *gradients = _drawn(9, (T, H), dtype, device)
    query_key, query_key_gradient = _drawn(2, (1, 2 * H // ROTARY_WIDTH, T, ROTARY_WIDTH), dtype, device)
    first, second = _drawn(2, (H,), dtype, device)
    cosine, sine = (part.detach() for part in _drawn(2, (1, 1, T, ROTARY_WIDTH), dtype, device))

    def forward() -> tuple[Tensor, ...]:
        normed = _norm(x, first)
        turned = query_key * cosine + _half_turned(query_key) * sine
        between = x + attended
        mlp_rows = _norm(between, second)
        activated = functional.silu(gate) * up
        return normed, mlp_rows, activated, between + mlp, turned

    inputs = [x, attended, gate, up, mlp, query_key, first, second]
    return _Differentiable(forward, inputs, [of.detach() for of in (*gradients, query_key_gradient)])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float32 (arXiv 1910.07467)."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def _half_turned(x: Tensor) -> Tensor:
    """Of rotary embeddings (arXiv 2104.09864), with halves in place of neighbours."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
