"""Cases: the computations that a calibration times on one rank, and the seconds that the cost model predicts for them.

A case is one size of one kind of work: the experts of a rank, attention, or the elementwise work of a block. T tokens,
H hidden, I expert width, S slots, M rows, P padded rows, U = 2I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moesys.balance.even_split import EvenSplit
from moesys.balance.planners import split_tokens
from moesys.config import ClusterSpec, DType, ModelShape
from moesys.cost import ExpertPass, attention_rate, elementwise_seconds, pass_seconds
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.moe.masters import DTYPES
from moesys.overlap.executor import Arrivals, BackwardInputs, ExpertGradients, ExpertWeights
from moesys.overlap.experts_cpu import experts_on_device
from moesys.overlap.routes import build_routes, chunk_counts

# "backward" computes the gradients of inputs and weights; "input_gradients" computes those of inputs alone, as a layer
# does that delays its weight gradients.
Pass = Literal["forward", "input_gradients", "backward"]
Calls = dict[Pass, Callable[[], object]]

# The weights of all layers together exceed a rank's caches, so each call reads its weights from memory.
COLD_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
EPSILON = 1e-6
ROTARY_WIDTH = 64


class Pool:
    """The memory that all cases of one timing share: ``weights_N``, random weights of several layers, or of one layer
    of the largest case, and ``gradients_N``, float32, where weight gradients are written.
    """

    def __init__(self, cases: Sequence[Case], dtype: DType, device: torch.device) -> None:
        self.dtype, self.torch_dtype, self.device = dtype, DTYPES[dtype], device
        largest = max((case.num_weights for case in cases if isinstance(case, ExpertCase)), default=0)
        size = max(COLD_BYTES[device.type] // self.torch_dtype.itemsize, largest) if largest else 0
        self.weights_N = torch.empty(size, dtype=self.torch_dtype, device=device).normal_(std=0.02)
        self.gradients_N = torch.empty(largest, device=device)

    def draw(self, count: int, *shape: int) -> list[Tensor]:
        """Returns ``count`` random tensors of this shape that require gradients."""
        drawn = (torch.randn(shape, device=self.device).to(self.torch_dtype) for _ in range(count))
        return [tensor.requires_grad_() for tensor in drawn]


# --- experts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertCase:
    """The experts of one rank: ``rows`` of each, through gate and up [2I, H] and down [H, I].

    Nothing is fitted to a case that is ``held_out``.
    """

    rows: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    held_out: bool = False

    @property
    def words(self) -> str:
        """Describes the size, as in ``8 × 21 rows, H 256, I 512``."""
        rows = self.rows
        each = f"{len(rows)} × {rows[0]}" if len(set(rows)) == 1 else ", ".join(map(str, rows))
        return f"{each} rows, H {self.hidden_size}, I {self.intermediate_size}"

    @property
    def num_weights(self) -> int:
        return 3 * len(self.rows) * self.hidden_size * self.intermediate_size

    def flops(self, of: Pass) -> int:
        """Returns the flops of a pass; backward has twice as many as forward."""
        return (12 if of == "backward" else 6) * sum(self.rows) * self.hidden_size * self.intermediate_size

    def shape(self, dtype: DType) -> ModelShape:
        """Returns a layer that has only these experts."""
        H, I = self.hidden_size, self.intermediate_size
        return ModelShape(hidden_size=H, intermediate_size=I, num_experts=len(self.rows), top_k=1, dtype=dtype)

    def seconds(self, of: Pass, cluster: ClusterSpec, dtype: DType) -> float:
        """Predicts a pass on one rank."""
        parts: tuple[ExpertPass, ...] = ("input_gradients", "weight_gradients") if of == "backward" else (of,)
        rows_RE = np.array([self.rows], dtype=np.float64)
        return float(sum(pass_seconds(rows_RE, self.shape(dtype), cluster, part)[0] for part in parts))

    def calls(self, pool: Pool) -> Calls:
        passes = ExpertPasses(self, pool)
        backward = partial(passes.backward, passes.gradients)
        return {"forward": passes.forward, "input_gradients": partial(passes.backward, None), "backward": backward}


class ExpertPasses:
    """The passes of one case, by the GEMMs that layers use on this device. Each call uses the next layer's weights."""

    def __init__(self, case: ExpertCase, pool: Pool) -> None:
        device = pool.device
        self._compute = experts_on_device(case.shape(pool.dtype), pool.torch_dtype, device.type)
        num_experts = len(case.rows)
        expert_TK = torch.arange(num_experts).repeat_interleave(torch.tensor(case.rows))[:, None].to(device)
        tokens_CRE = chunk_counts(expert_TK, num_experts, 1)[:, None].cpu().numpy()
        self._routes = build_routes(expert_TK, tokens_CRE, one_rank_plan(case.rows), 0, self._compute.min_rows)
        memory = PagePool()
        self._scratch = Scratch(memory, device)
        x_MH, dy_MH = (of.detach() for of in pool.draw(2, sum(case.rows), case.hidden_size))
        self._x, self._dy = Arrivals(x_MH, None), Arrivals(dy_MH, None)
        self._weight_M = torch.rand(len(x_MH), device=device)
        self._layers = cycle(layers_of(case, pool.weights_N))
        (written,) = layers_of(case, pool.gradients_N[: case.num_weights])
        self.gradients = ExpertGradients(*written.stacked()[:2])
        self._h_PU = self.forward()

    def forward(self) -> Tensor:
        """Returns the pre-activations."""
        running = self._compute.forward(self._routes, self._x, next(self._layers), self._scratch)
        running.experts(self._routes.chunks[0])
        return running.pre_activations()

    def backward(self, gradients: ExpertGradients | None) -> None:
        """Computes input gradients, and weight gradients if there is a place for them."""
        inputs = BackwardInputs(self._dy, self._x, self._h_PU, self._weight_M, gradients)
        running = self._compute.backward(self._routes, inputs, next(self._layers), self._scratch)
        running.experts(self._routes.chunks[0])
        if gradients is not None:
            running.weight_gradients()


class StackedExperts(list[ExpertWeights]):
    """``HeldExperts`` whose weights are two tensors, [S, 2I, H] and [S, H, I]."""

    def __init__(self, gate_up_SUH: Tensor, down_SHI: Tensor) -> None:
        super().__init__(map(ExpertWeights, gate_up_SUH, down_SHI))
        self._stacked = ExpertWeights(gate_up_SUH, down_SHI)

    def by_slot(self) -> StackedExperts:
        return self

    def stacked(self) -> ExpertWeights:
        return self._stacked


def layers_of(case: ExpertCase, pool_N: Tensor) -> list[StackedExperts]:
    """Returns as many layers as the pool has weights for."""
    experts, H, I = len(case.rows), case.hidden_size, case.intermediate_size
    weights_LN = pool_N[: len(pool_N) // case.num_weights * case.num_weights].view(-1, case.num_weights)
    gate_up_LSUH = weights_LN[:, : experts * 2 * I * H].unflatten(1, (experts, 2 * I, H))
    down_LSHI = weights_LN[:, experts * 2 * I * H :].unflatten(1, (experts, H, I))
    return [StackedExperts(*of_layer) for of_layer in zip(gate_up_LSUH, down_LSHI, strict=True)]


def one_rank_plan(rows: Sequence[int]) -> TokenPlan:
    """Returns the plan of a single rank that holds every expert and has this number of rows for each."""
    layout = ExpertLayout(np.arange(len(rows))[None], len(rows))
    return split_tokens(LoadMatrix(np.array([rows])), layout, ClusterSpec(), EvenSplit())


# --- the rest of a block ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """Torch's causal attention on one sequence, with as many heads of keys as of queries."""

    num_heads: int
    head_dim: int
    seq_len: int
    held_out: bool = False

    @property
    def words(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim}, {self.seq_len} tokens"

    def flops(self, of: Pass) -> int:
        """Returns the flops of the scores within the mask and of the sums of values that they weight
        (``simulator.model.model_cost``). Backward computes the scores again, and two products for each of these
        two.
        """
        forward = 4 * self.num_heads * self.head_dim * (self.seq_len * (self.seq_len + 1) // 2)
        return forward * 5 // 2 if of == "backward" else forward

    def seconds(self, of: Pass, cluster: ClusterSpec, dtype: DType) -> float:
        """Predicts a pass as ``simulator.model.rest_seconds`` does."""
        return self.flops(of) / attention_rate(cluster, of == "backward") + cluster.launch_us * 1e-6

    def calls(self, pool: Pool) -> Calls:
        query, key, value, gradient = pool.draw(4, 1, self.num_heads, self.seq_len, self.head_dim)

        def forward() -> tuple[Tensor, ...]:
            return (functional.scaled_dot_product_attention(query, key, value, is_causal=True),)

        return _both_ways(forward, [query, key, value], [gradient])


@dataclass(frozen=True)
class ElementwiseCase:
    """The elementwise work of a block whose dense MLP is as wide as H, and which has as many heads of keys as of
    queries: two norms, rotary embeddings of queries and keys, SwiGLU and two residuals, each as eager torch runs it.
    """

    num_tokens: int
    hidden_size: int
    held_out: bool = False

    # Each of the six operations counts as one kernel.
    num_kernels: ClassVar[int] = 6

    @property
    def words(self) -> str:
        return f"{self.num_tokens} tokens of {self.hidden_size}"

    def flops(self, of: Pass) -> int | None:
        """Returns None: the time depends on bytes, not on flops."""
        return None

    def num_bytes(self, of: Pass, element_bytes: int) -> int:
        """Returns the fewest bytes that can be read and written. In rows of H: each norm 2, rotary 4, SwiGLU 3, each
        residual 3; backward, each norm 3, rotary 4, SwiGLU 5, each residual 3.
        """
        return (21 if of == "backward" else 17) * self.num_tokens * self.hidden_size * element_bytes

    def seconds(self, of: Pass, cluster: ClusterSpec, dtype: DType) -> float:
        """Predicts a pass as ``simulator.model.rest_seconds`` does."""
        moved = elementwise_seconds(self.num_bytes(of, DTYPES[dtype].itemsize), cluster, of == "backward")
        return moved + self.num_kernels * cluster.launch_us * 1e-6

    def calls(self, pool: Pool) -> Calls:
        """The outputs of products are inputs here, and what products read is an output."""
        T, H = self.num_tokens, self.hidden_size
        x, attended, gate, up, mlp, *gradients = pool.draw(9, T, H)
        query_key, query_key_gradient = pool.draw(2, 1, 2 * H // ROTARY_WIDTH, T, ROTARY_WIDTH)
        first, second = pool.draw(2, H)
        cosine, sine = (part.detach() for part in pool.draw(2, 1, 1, T, ROTARY_WIDTH))

        def forward() -> tuple[Tensor, ...]:
            normed = _norm(x, first)
            left, right = query_key.chunk(2, dim=-1)
            # Rotary embeddings (arXiv 2104.09864), with halves in place of neighbours.
            rotated = query_key * cosine + torch.cat((-right, left), dim=-1) * sine
            between = x + attended
            return normed, _norm(between, second), functional.silu(gate) * up, between + mlp, rotated

        inputs = [x, attended, gate, up, mlp, query_key, first, second]
        return _both_ways(forward, inputs, [*gradients, query_key_gradient])


Case = ExpertCase | AttentionCase | ElementwiseCase


def _both_ways(forward: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor], gradients: list[Tensor]) -> Calls:
    outputs, gradients = forward(), [gradient.detach() for gradient in gradients]
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True),
    }


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """Computes RMSNorm in float32 (arXiv 1910.07467)."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


# --- what is measured on each kind of device --------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Everything that is measured on one kind of device.

    fitted, held_out: arguments of cases by kind; nothing is fitted to the second. tiles: (rows, columns) from which the
    fit chooses, in rising order. parameters: shapes that the optimizer updates. memory_bytes: size of a memory copy.
    message_bytes: sizes of messages, in rising order; those that would take longer than ``longest_message_s`` are left
    out. mega: tokens, H, I, experts and choices per token of the MegaKernels' layer.
    """

    dtype: DType
    fitted: dict[str, Sequence[tuple[Any, ...]]]
    held_out: dict[str, Sequence[tuple[Any, ...]]]
    tiles: tuple[tuple[int, int], ...]
    parameters: tuple[tuple[int, int], ...]
    beside_copies: ExpertCase
    memory_bytes: int
    message_bytes: tuple[int, ...]
    mega: tuple[int, int, int, int, int] = (8192, 2048, 768, 128, 8)
    longest_message_s: float = 0.25

    def cases(self, kind: str) -> list[Case]:
        fitted = [KINDS[kind](*size) for size in self.fitted[kind]]
        return fitted + [KINDS[kind](*size, held_out=True) for size in self.held_out[kind]]


KINDS: dict[str, Callable[..., Case]] = {
    "experts": ExpertCase,
    "attention": AttentionCase,
    "elementwise": ElementwiseCase,
}
_CPU_ROWS = [*((each,) for each in (7, 21, 71, 151, 401, 1001)), (21,) * 8, (101,) * 8]
_CUDA_ROWS = [*((each,) for each in (1, 24, 100, 300, 1000, 4096, 16384)), (100,) * 32, (512,) * 32]

CPU_GRID = Grid(
    dtype="float32",
    fitted={
        "experts": [(rows, H, I) for H, I in ((256, 512), (512, 512), (512, 1024)) for rows in _CPU_ROWS],
        "attention": [(4, 64, 256), (8, 64, 256), (4, 128, 256), (8, 32, 512), (8, 64, 512), (8, 64, 1024)],
        "elementwise": [(512, 512), (1024, 256), (1024, 512), (2048, 256), (2048, 512)],
    },
    held_out={
        "experts": [(rows, 384, 768) for rows in ((111,), (300, 120, 60, 30, 20, 10, 5, 0))]
        + [(rows, 768, 384) for rows in ((601,), (64,) * 4)],
        "attention": [(6, 64, 384), (12, 32, 768)],
        "elementwise": [(1024, 384), (1536, 256)],
    },
    # Only rows are rounded up: packing a matrix for the CPU's GEMM costs as much as some rows.
    tiles=tuple((rows, 1) for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64)),
    parameters=((512, 1024),) * 16,
    beside_copies=ExpertCase((256,), 512, 512),
    memory_bytes=64 << 20,
    message_bytes=tuple(1 << power for power in range(10, 24, 2)),
)
CUDA_GRID = Grid(
    dtype="bfloat16",
    fitted={
        "experts": [(rows, H, I) for H, I in ((2048, 768), (7168, 2048), (4096, 14336)) for rows in _CUDA_ROWS],
        "attention": [(32, 128, 2048), (32, 128, 4096), (128, 128, 4096), (32, 64, 4096), (32, 128, 8192)],
        "elementwise": [(4096, 2048), (8192, 4096), (4096, 7168), (16384, 2048)],
    },
    held_out={
        "experts": [((2000,), 5120, 1536), ((4000, 1000, 300, 100, 30, 10, 3, 0) * 4, 5120, 1536)],
        "attention": [(64, 128, 3072)],
        "elementwise": [(8192, 2048)],
    },
    tiles=tuple((rows, columns) for rows in (64, 128, 256) for columns in (64, 128, 256)),
    parameters=((4096, 4096),) * 16,
    beside_copies=ExpertCase((4096,), 4096, 2048),
    memory_bytes=1 << 30,
    message_bytes=tuple(1 << power for power in range(12, 28, 3)),
)
GRIDS = {"cpu": CPU_GRID, "cuda": CUDA_GRID}
