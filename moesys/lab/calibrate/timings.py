"""Timings on one rank: cases, launches, memory, the optimizer, messages, and products while messages travel.

A case is one size of one kind of work: the experts of a rank, attention, or the elementwise work of a block; it states
the seconds that the cost model predicts for it. T tokens, H hidden, I expert width, S slots, M rows, P padded rows,
U = 2I.

Each function of ``Ranks.run`` is called on all ranks at once and times its rank while the others do the same, as in
training. Samples are seconds per call, each the mean of a window of calls. All ranks time the same number of calls and
start each window together. Without a process group, one rank times alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moesys.balance.even_split import EvenSplit
from moesys.balance.run_planner import split_tokens
from moesys.config import BYTES_PER_GB, ClusterSpec, DType, ModelShape
from moesys.cost import ExpertPass, attention_rate, elementwise_seconds, pass_seconds
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.lab.ranks.process import rank_device
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.moe.masters import DTYPES
from moesys.overlap.comm.channel import Messages, exchange
from moesys.overlap.comm.record import Meter
from moesys.overlap.executor import Adapters, Arrivals, BackwardInputs, ExpertGradients, ExpertWeights
from moesys.overlap.experts_cpu import experts_on_device
from moesys.overlap.routes import build_routes, chunk_counts
from moesys.torch_private import hold_stream

# "backward" computes the gradients of inputs and weights; "input_gradients" computes those of inputs alone, as a layer
# does that delays its weight gradients.
Pass = Literal["forward", "input_gradients", "backward"]
Calls = dict[Pass, Callable[[], object]]

# The weights of all layers together exceed a rank's caches, so each call reads its weights from memory.
COLD_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
EPSILON = 1e-6
ROTARY_WIDTH = 64
# A window has at most this many calls. A GPU's are launched before the first starts; a stream takes about 1,000.
MOST_CALLS = {"cpu": 10_000, "cuda": 16}
# A stream is held for this many times as long as the calls took before, and no longer than the host may need: longer
# holds would end further apart on the ranks of an all-to-all.
HELD, MOST_HELD_S = 1.2, 0.05
# The most bytes that a rank sends to a peer while it computes.
MOST_COPY_BYTES = 256 << 20
# A line through messages needs at least this many sizes.
FEWEST_SIZES = 3


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
        self._scratch = Scratch(PagePool(), device)
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

    adapters: Adapters | None = None

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
        """Returns the passes, in which the outputs of products are inputs, and what products read is an output."""
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
    return {"forward": forward, "backward": lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)}


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
    # It takes longer than the host needs to launch it.
    beside_copies=ExpertCase((16384,), 7168, 2048),
    memory_bytes=1 << 30,
    message_bytes=tuple(1 << power for power in range(12, 28, 3)),
)
GRIDS = {"cpu": CPU_GRID, "cuda": CUDA_GRID}


# --- windows of calls -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of windows, and seconds per window. A call that takes longer is a window of its own."""

    repeats: int = 7
    window_s: float = 0.03


def timed(works: Sequence[Callable[[], object]], effort: Effort, device: torch.device) -> list[list[float]]:
    """Returns seconds per call of each work, by window. Works take turns, so that a temporary disturbance of the
    machine affects all of them.
    """
    warm_s = [warm_seconds(work, device) for work in works]
    calls = [calls_of(seconds, effort, device) for seconds in warm_s]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(effort.repeats):
        for work, seconds, num_calls, windows in zip(works, warm_s, calls, samples, strict=True):
            if dist.is_initialized():
                dist.barrier()
            held_s = min(HELD * num_calls * seconds, MOST_HELD_S)
            windows.append(seconds_of(work, num_calls, device, held_s) / num_calls)
    return samples


def warm_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns seconds per call after two calls of warm-up, on the rank on which they are most."""
    seconds_of(work, 2, device)
    seconds = seconds_of(work, 2, device) / 2
    if not dist.is_initialized():
        return seconds
    longest_1 = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest_1, dist.ReduceOp.MAX)
    return longest_1.item()


def seconds_of(work: Callable[[], object], calls: int, device: torch.device, held_s: float = 0.0) -> float:
    """Returns the seconds that the device takes for all calls; copies on other streams are not waited for. The stream
    of a GPU is held while the host launches for ``held_s``: in a step the host is ahead, so that its own time, 1 ms for
    the experts of a layer, does not count.
    """
    meter = Meter(device.type)
    if held_s and device.type == "cuda":
        hold_stream(held_s)
        # Ranks that come late to the first all-to-all are not in the time.
        work()
    with meter.exposed("calls"):
        for _ in range(calls):
            work()
    return meter.exposed_ms["calls"] / 1000


def calls_of(seconds: float, effort: Effort, device: torch.device) -> int:
    """Returns the number of calls of a window if a call takes so many seconds."""
    return max(1, min(MOST_CALLS[device.type], math.ceil(effort.window_s / max(seconds, 1e-9))))


# --- computing --------------------------------------------------------------------------------------------------------


def gpu_facts() -> tuple[str, int, float]:
    """Returns the name, multiprocessors and memory (1e9 bytes) of this rank's GPU."""
    found = torch.cuda.get_device_properties(rank_device("cuda"))
    return found.name, found.multi_processor_count, found.total_memory / BYTES_PER_GB


def basics(
    copied_bytes: int, parameters: Sequence[tuple[int, int]], effort: Effort, device_type: str
) -> dict[str, list[float]]:
    """Measures a product of one element, a memory copy, and an AdamW update of float32 parameters of these shapes."""
    device = rank_device(device_type)
    one_11 = torch.ones(1, 1, device=device)
    out_11 = torch.empty_like(one_11)
    source, target = (torch.ones(copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    updated = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in parameters]
    for parameter in updated:
        parameter.grad = torch.randn_like(parameter)
    works = {
        "launch": lambda: torch.mm(one_11, one_11, out=out_11),
        "memory copy": lambda: target.copy_(source),
        "update": torch.optim.AdamW(updated, lr=1e-4).step,
    }
    return dict(zip(works, timed(list(works.values()), effort, device), strict=True))


def passes(cases: Sequence[Case], dtype: DType, effort: Effort, device_type: str) -> list[dict[Pass, list[float]]]:
    """Measures each pass of each case."""
    device = rank_device(device_type)
    pool = Pool(cases, dtype, device)
    calls = [case.calls(pool) for case in cases]
    windows = iter(timed([call for of_case in calls for call in of_case.values()], effort, device))
    return [{of: next(windows) for of in of_case} for of_case in calls]


# --- messages ---------------------------------------------------------------------------------------------------------


def all_to_alls(
    sizes: Sequence[int], peers_RR: npt.NDArray[np.bool_], longest_s: float, effort: Effort, device_type: str
) -> dict[int, list[float]]:
    """Measures all-to-alls in which each rank sends one of ``sizes`` bytes to each of its peers, a row of ``peers_RR``.

    Sizes rise; the first that is expected to take longer than ``longest_s`` on any rank, and all larger ones, are left
    out, but never the first ``FEWEST_SIZES``.
    """
    device, peers_R = rank_device(device_type), peers_RR[dist.get_rank()].tolist()

    def all_to_all(size: int) -> Callable[[], object]:
        begin = _exchange(size, peers_R, device)
        return lambda: begin().wait()

    works: dict[int, Callable[[], object]] = {}
    longest, before = 0.0, 1
    for size in sizes:
        if len(works) >= FEWEST_SIZES and longest * size / before > longest_s:
            break
        works[size] = all_to_all(size)
        longest, before = warm_seconds(works[size], device), size
    return dict(zip(works, timed(list(works.values()), effort, device), strict=True))


def products_beside_copies(
    case: ExpertCase, dtype: DType, bytes_per_s: float, effort: Effort, device_type: str
) -> list[tuple[float, float]]:
    """Measures forward of a case alone and while an all-to-all is under way, by window. Windows in which the all-to-all
    ended first are left out. ``bytes_per_s``: the rate at which a rank is expected to send to each peer; it sends three
    windows' worth.
    """
    device, here = rank_device(device_type), dist.get_rank()
    work = ExpertPasses(case, Pool([case], dtype, device)).forward
    seconds = warm_seconds(work, device)
    calls = calls_of(seconds, effort, device)
    num_bytes = min(MOST_COPY_BYTES, max(1, int(3 * calls * seconds * bytes_per_s)))
    begin = _exchange(num_bytes, [peer != here for peer in range(dist.get_world_size())], device)
    begin().wait()
    samples = []
    for _ in range(effort.repeats):
        dist.barrier()
        alone = seconds_of(work, calls, device)
        dist.barrier()
        travelling = begin()
        # ``Messages`` notice their end only after they were asked for a future.
        travelling.get_future()
        beside = seconds_of(work, calls, device)
        if not travelling.is_completed():
            samples.append((alone / calls, beside / calls))
        travelling.wait()
    return samples


def _exchange(num_bytes: int, peers_R: Sequence[bool], device: torch.device) -> Callable[[], dist.Work | Messages]:
    """Returns a function that starts an all-to-all with these peers in the same way as layers do."""
    group, splits = dist.group.WORLD, [num_bytes if is_peer else 0 for is_peer in peers_R]
    assert group is not None
    sent, received = (torch.ones(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: exchange(received, sent, splits, splits, group)
