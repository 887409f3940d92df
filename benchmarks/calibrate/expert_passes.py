"""What layers do to rows of a rank's experts, as calls to be timed: by their own GEMMs on a CPU, by Triton's kernels on
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.balance.splits import split_tokens
from moesys.config import ClusterSpec, DType, EvenSplit, ModelShape
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.moe.expert_parameters import DTYPES
from moesys.overlap.expert_compute import Arrivals, BackwardInputs, Workplace
from moesys.overlap.experts_on_device import experts_on_device
from moesys.overlap.held_experts import ExpertGradients, ExpertWeights
from moesys.overlap.routes import Routes, build_routes, chunk_counts

# "backward" has the gradients of inputs and of weights; "input_gradients" alone, as where those of weights come later.
Pass = Literal["forward", "input_gradients", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "input_gradients", "backward")

# More than a rank's caches keep: weights come from memory, as they do when layers take turns.
COLD_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# So many random numbers are drawn, and repeated.
NUM_DRAWN = 1 << 20


@dataclass(frozen=True)
class ExpertCase:
    """A rank's experts: ``rows`` of each, through gate and up [2I, H] and down [H, I]. ``held_out``: of a case that
    nothing is fitted to.
    """

    rows: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    held_out: bool = False

    @property
    def flops(self) -> int:
        """Of forward; backward has twice as many."""
        return 6 * sum(self.rows) * self.hidden_size * self.intermediate_size

    @property
    def num_weights(self) -> int:
        return 3 * len(self.rows) * self.hidden_size * self.intermediate_size

    def shape(self, dtype: DType) -> ModelShape:
        """Of a layer with these experts alone."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=len(self.rows),
            top_k=1,
            dtype=dtype,
        )


class Numbers(NamedTuple):
    """What cases take turns with: weights of several layers, but of the largest case one, and where gradients go."""

    weights_N: Tensor
    gradients_N: Tensor


def numbers_of(cases: Sequence[ExpertCase], dtype: DType, device: torch.device) -> Numbers:
    """Random weights, and float32 for gradients."""
    largest = max(case.num_weights for case in cases)
    torch_dtype = DTYPES[dtype]
    size = max(COLD_BYTES[device.type] // torch_dtype.itemsize, largest)
    weights_N = torch.empty(size, dtype=torch_dtype, device=device)
    drawn = torch.randn(NUM_DRAWN, device=device).mul_(0.02)
    for part in weights_N.split(NUM_DRAWN):
        part.copy_(drawn[: len(part)])
    return Numbers(weights_N, torch.empty(largest, device=device))


class ExpertPasses:
    """The passes of one case; each call has the next layer's weights."""

    def __init__(self, case: ExpertCase, dtype: DType, numbers: Numbers) -> None:
        device, torch_dtype = numbers.weights_N.device, numbers.weights_N.dtype
        self._compute = experts_on_device(case.shape(dtype), torch_dtype, device.type)
        self._routes = _routes(case.rows, self._compute.min_rows, device)
        memory = PagePool()
        self._at = Workplace(memory, Scratch(memory, device))
        size = (sum(case.rows), case.hidden_size)
        x_MH, dy_MH = (torch.randn(size, device=device).to(torch_dtype) for _ in range(2))
        self._x, self._dy = Arrivals(x_MH, None), Arrivals(dy_MH, None)
        self._weight_M = torch.rand(size[0], device=device)
        self._layers = cycle(_layers(case, numbers.weights_N))
        (written,) = _layers(case, numbers.gradients_N[: case.num_weights])
        self._gradients = ExpertGradients(written.gate_up_SUH, written.down_SHI)
        self._h_PU = self.forward()

    def call(self, of: Pass) -> Callable[[], object]:
        match of:
            case "forward":
                return self.forward
            case "input_gradients":
                return lambda: self._backward(None)
            case "backward":
                return lambda: self._backward(self._gradients)

    def forward(self) -> Tensor:
        """Returns the pre-activations."""
        running = self._compute.forward(self._routes, self._x, next(self._layers), self._at)
        running.experts(self._routes.chunks[0])
        return running.pre_activations()

    def _backward(self, gradients: ExpertGradients | None) -> None:
        inputs = BackwardInputs(self._dy, self._x, self._h_PU, self._weight_M, gradients)
        running = self._compute.backward(self._routes, inputs, next(self._layers), self._at)
        running.experts(self._routes.chunks[0])
        if gradients is not None:
            running.weight_gradients()


@dataclass(frozen=True)
class _Layer:
    """``HeldExperts`` of one layer."""

    gate_up_SUH: Tensor
    down_SHI: Tensor

    def __len__(self) -> int:
        return len(self.down_SHI)

    def __getitem__(self, slot: int) -> ExpertWeights:
        return ExpertWeights(self.gate_up_SUH[slot], self.down_SHI[slot])

    def stacked(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_SUH, self.down_SHI)


def _layers(case: ExpertCase, pool_N: Tensor) -> list[_Layer]:
    experts, H, I = len(case.rows), case.hidden_size, case.intermediate_size
    num_layers = len(pool_N) // case.num_weights
    weights_LN = pool_N[: num_layers * case.num_weights].view(num_layers, case.num_weights)
    gate_up_LEUH = weights_LN[:, : experts * 2 * I * H].unflatten(1, (experts, 2 * I, H))
    down_LEHI = weights_LN[:, experts * 2 * I * H :].unflatten(1, (experts, H, I))
    return [_Layer(gate_up_EUH, down_EHI) for gate_up_EUH, down_EHI in zip(gate_up_LEUH, down_LEHI, strict=True)]


def _routes(rows: Sequence[int], min_rows: int, device: torch.device) -> Routes:
    """Of a rank that holds every expert and has so many rows for each."""
    num_experts = len(rows)
    expert_TK = torch.arange(num_experts).repeat_interleave(torch.tensor(rows))[:, None].to(device)
    layout = ExpertLayout(np.arange(num_experts)[None], num_experts)
    plan = split_tokens(LoadMatrix(np.array([rows])), layout, ClusterSpec(), EvenSplit())
    tokens_CRE = chunk_counts(expert_TK, num_experts, 1)[:, None].cpu().numpy()
    return build_routes(expert_TK, tokens_CRE, plan, 0, min_rows)
