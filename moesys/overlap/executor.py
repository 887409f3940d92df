"""Executors of the micro-batches of a layer, and the computation of its experts: the seam between plans and computing.

An *executor* is chosen once for a strategy, a device and a group, by the name that the overlap declares. It takes plans
and returns *runs*: a run is one micro-batch of one layer, forward and backward. A run has its expert rows computed by
an ``ExpertCompute``, chunk by chunk: ``experts_cpu`` calls a GEMM for each slot, ``experts_triton`` has kernels for all
slots at once. With both the result of a row does not depend on its chunk, and weight gradients sum rows in expert
order.

T tokens of this rank, H hidden, I expert width, K top-k, C chunks, R ranks, E experts, M arrivals, P expert rows, S
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moesys.balance.plan import LayerPlan
from moesys.config import ClusterSpec, LayoutInvariant, ModelShape, Strategy
from moesys.frames import Position
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.launch import to_device
from moesys.layout import ExpertLayout
from moesys.load import IntArray
from moesys.overlap.comm.channel import Channel
from moesys.overlap.exact_sum import BlockSums
from moesys.overlap.routes import ChunkRoutes, Routes


class ExpertWeights(NamedTuple):
    """One expert: ``gate_up`` [2I, H], ``down`` [H, I]; or several, stacked: [S, 2I, H], [S, H, I].

    Experts of other libraries may have projections the other way round, no gate, and biases [2I] and [H]; those are
    never asked for by ``stacked``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


# LoRA as autograd has it: two tensors of each projection, which may be None.
Factors = Sequence[Tensor | None]
NUM_FACTORS = 4


class LowRank(NamedTuple):
    """Matrices ``outward @ inward`` that LoRA adds to a projection: [out, r] and [r, in], or of all experts,
    [E, out, r] and [E, r, in]. r is a multiple of 16, which products by rows need.
    """

    inward: Tensor
    outward: Tensor


class Adapters(NamedTuple):
    """LoRA on experts: what ``up`` and ``down`` of all experts have, and where gradients of these are added, which are
    None where they are not computed. ``expert_S``: the expert in each slot.
    """

    expert_S: tuple[int, ...]
    up: LowRank | None
    down: LowRank | None
    dup: LowRank | None = None
    ddown: LowRank | None = None

    @staticmethod
    def of(expert_S: Sequence[int], factors: Factors, dfactors: Factors = (None,) * NUM_FACTORS) -> Adapters | None:
        """Returns LoRA by its ``factors``, inward and outward of up and of down; None if there is none."""
        pairs = [
            None if inward is None or outward is None else LowRank(inward, outward)
            for inward, outward in (factors[:2], factors[2:], dfactors[:2], dfactors[2:])
        ]
        return Adapters(tuple(expert_S), *pairs) if any(pairs) else None

    def by_slot(self, pair: LowRank | None) -> Sequence[LowRank] | None:
        """Returns views of what the expert of each slot has of ``pair``."""
        if pair is None:
            return None
        of_expert = [LowRank(*of) for of in zip(*map(Tensor.unbind, pair), strict=True)]
        return [of_expert[expert] for expert in self.expert_S]

    def stacked(self, dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
        """Returns what ``up`` and ``down`` have in each slot, in ``dtype``."""
        pairs = self.up, self.down
        expert_S = to_device(self.expert_S, next(pair for pair in pairs if pair).inward.device)
        up, down = (pair and LowRank(*(each.index_select(0, expert_S).to(dtype) for each in pair)) for pair in pairs)
        return up, down

    def on_meta(self) -> Adapters:
        """Returns the same without values, with gradients."""
        pairs = [pair and LowRank(*(each.to("meta") for each in pair)) for pair in (self.up, self.down)]
        return Adapters(self.expert_S, *pairs, *pairs)

    @property
    def gradients(self) -> list[Tensor | None]:
        """Returns where gradients are added, inward and outward of up and of down."""
        return [each for pair in (self.dup, self.ddown) for each in pair or (None, None)]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of the factors in each slot, inward and outward of up and of down."""
        expert_S = to_device(self.expert_S, next(each for each in gradients if each is not None).device)
        for total, gradient in zip(self.gradients, gradients, strict=True):
            if total is not None and gradient is not None:
                # The second slot of an expert has zeros.
                total.index_add_(0, expert_S, gradient.to(total.dtype))

    def bounds_E4(self) -> Tensor:
        """Returns by how much larger than a gradient of ``up`` or ``down`` those of its inward and outward factors can
        be, float64: as much as a product by the other factor can be larger than its rows, and twice that for rounding.
        """
        others = [each for pair in (self.up, self.down) for each in reversed(pair or (None, None))]
        some = next(each for each in others if each is not None)
        none_E = some.new_zeros(len(some), dtype=torch.float64)
        return torch.stack([none_E if each is None else 2 * each.double().abs().sum((1, 2)) for each in others], dim=1)


def zeros_like_factors(factors: Factors, least: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Returns where gradients of factors are added, in a dtype of at least ``least``."""
    return [
        None if each is None else torch.zeros_like(each, dtype=torch.promote_types(each.dtype, least))
        for each in factors
    ]


class HeldExperts(Protocol):
    """The experts that a rank holds, one per slot; float32 masters are cast just before each use."""

    adapters: Adapters | None

    def __len__(self) -> int: ...

    def by_slot(self) -> Sequence[ExpertWeights]:
        """Returns the experts by slot index, in the dtype that they have."""

    def stacked(self) -> ExpertWeights:
        """Returns all of them in the compute dtype. Each matrix is contiguous, but others may lie between two."""


class ExpertGradients(NamedTuple):
    """The memory of the weight gradients of all held experts, float32, or in the masters' dtype where nothing is added
    to them: [S, 2I, H] and [S, H, I], each matrix contiguous, but others may lie between two. Biases as in
    ``ExpertWeights``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that backward needs: arrived rows of x [M, H] (x itself on one rank, and where it is pulled again),
    pre-activations h [P, 2I], and routing weights float32 [T, K].
    """

    arrivals_MH: Tensor
    h_P2I: Tensor
    weight_TK: Tensor


WaitForExperts = Callable[[], HeldExperts]


class MicroBatchRun(Protocol):
    """One micro-batch of one layer on one rank, for one routing: forward, recomputed or not, and then backward."""

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, SavedTensors]:
        """Returns the output [T, H] in x's dtype, of routing weights float32 [T, K]. ``wait_for_experts`` is called
        once, when they are needed.
        """

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, SavedTensors]:
        """Returns what ``forward`` returns of the same arguments; None for the output where no rank says that it is
        ``read``. A collective: ``read`` may differ between ranks.
        """

    def backward(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None.
        """


# --- executors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostPlan:
    """A plan that hosts have made. ``tokens_RCE``: the choices of each rank's chunks for each expert; ``most_tokens``:
    the tokens of the rank with most, with padding.
    """

    plan: LayerPlan
    tokens_RCE: IntArray
    most_tokens: int


class DevicePlan(Protocol):
    """A plan that a device makes. The host waits for the device when it reads the plan."""

    @property
    def turn(self) -> int:
        """The number of the micro-batch."""

    @property
    def tokens_RE(self) -> Tensor:
        """The choices of each rank for each expert, int64 [R, E], on the device, once forward is launched."""

    def counts_RE(self) -> IntArray:
        """Returns ``tokens_RE`` on the host."""

    def entries(self) -> Tensor:
        """Returns rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``, on the host."""


class DeviceLaunch(NamedTuple):
    """A micro-batch that devices plan. ``check`` waits for the device and raises the errors that the host did not know
    of when forward was launched; None if it knows all of them by then.
    """

    run: MicroBatchRun
    plan: DevicePlan
    check: Callable[[], None] | None = None


class SharedMemory(Protocol):
    """Memory that the executors of a linked model's layers share."""

    def check(self) -> None:
        """Waits for the device, and raises the errors of what ran there."""


@dataclass
class LayerContext:
    """The layer and the rank that an executor is chosen for. ``memory``: where large tensors lie. ``add_event``:
    records a sentence about a micro-batch, given by its number. ``shared_memory``: what the executors of a linked
    model's layers share, by the name of what it is for.
    """

    strategy: Strategy
    shape: ModelShape
    cluster: ClusterSpec
    channel: Channel
    memory: PagePool
    add_event: Callable[..., None]
    shared_memory: dict[str, SharedMemory]

    def sums_of(self, plan: LayerPlan, device: torch.device) -> BlockSums | None:
        """Returns how weight gradients are summed under ``LayoutInvariant``; None for other reductions."""
        held = plan.layout.held_by_rank[self.channel.rank]
        return self.sums(held, plan.load.tokens_E, plan.turn, device)

    def sums(
        self, expert_S: tuple[int, ...], tokens_E: IntArray | Tensor, turn: int, device: torch.device
    ) -> BlockSums | None:
        """Returns ``sums_of`` a micro-batch, number ``turn``, from the experts in the slots of this rank, and the
        choices of each expert on all ranks.
        """
        reduction = self.strategy.reduction
        if not isinstance(reduction, LayoutInvariant):
            return None
        rows_E = tokens_E if isinstance(tokens_E, Tensor) else to_device(tokens_E, device)
        channel = self.channel.tagged(self.channel.generation)
        return BlockSums(reduction.block_rows, expert_S, rows_E, channel, partial(self.add_event, micro_batch=turn))


class SortedRun(MicroBatchRun, Protocol):
    """A run on one rank alone."""

    @property
    def tokens_E(self) -> Tensor:
        """Returns the choices of each expert, int64 [E], where they were counted."""

    @property
    def check(self) -> Callable[[], None] | None:
        """Waits for the device, and raises errors that the host did not know of; None where it knows all of them."""


class Executor:
    """Runs the micro-batches of one layer, which ``planned_by`` plan: "nobody" on one rank alone (``sort``), "hosts"
    (``run``) or "devices" (``launch``). ``num_chunks``: the chunks in which hosts count tokens.
    """

    planned_by: Literal["nobody", "hosts", "devices"] = "hosts"
    num_chunks = 1

    def __init__(self, layer: LayerContext, compute: ExpertCompute) -> None:
        self.layer, self.compute = layer, compute

    def sort(self, expert_TK: Tensor, turn: int) -> SortedRun:
        """Returns the run of a micro-batch, number ``turn``, on one rank. Raises ValueError for choices that name no
        expert, at once or, on a GPU, in a later call.
        """
        raise NotImplementedError

    def run(self, expert_TK: Tensor, planned: HostPlan) -> MicroBatchRun:
        """Returns the run of a plan. All ranks call it, as MegaKernels may grow their heaps here."""
        raise NotImplementedError

    def launch(self, expert_TK: Tensor, layout: ExpertLayout, at: Position) -> DeviceLaunch:
        """Launches the plan of the forward ``at`` over ``layout``. A collective."""
        raise NotImplementedError

    def check(self) -> None:
        """Waits for the device. Raises errors of micro-batches that the host did not know of when it launched them; by
        default it knows all of them.
        """


def executor_of(layer: LayerContext, compute: ExpertCompute) -> Executor:
    """Returns the executor that the layer's overlap names, which computes experts by ``compute``."""
    channel = layer.channel
    path = layer.strategy.overlap.executor(channel.num_ranks, channel.num_nodes, compute.by_tables)
    module, _, name = path.partition(":")
    # An executor is imported when it is named, so that Triton is loaded only where it runs.
    executor: Executor = getattr(import_module(module), name)(layer, compute)
    return executor


# --- expert compute -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """Rows by arrival. On one rank alone no row is sent: arrivals are the tokens' rows themselves, by ``index``."""

    rows: Tensor
    index: Tensor | None = None

    def place(self, arrival_N: Tensor) -> Tensor:
        """Returns the places of arrivals in ``rows``."""
        return arrival_N if self.index is None else self.index[arrival_N]


class BackwardInputs(NamedTuple):
    """The inputs of backward: gradients of the output, tokens and routing weights, float32, by arrival, and
    pre-activations [P, 2I]. ``gradients``: where ``weight_gradients`` will write, None where it will not be called;
    ``sums``: how it sums under ``LayoutInvariant``, into float64.
    """

    dy: Arrivals
    x: Arrivals
    h_P2I: Tensor
    weight_M: Tensor
    gradients: ExpertGradients | None
    sums: BlockSums | None = None


class ForwardPass(Protocol):
    """Forward of one micro-batch, which is made once its experts have arrived, and called for each chunk in turn."""

    def experts(self, chunk: ChunkRoutes) -> Tensor:
        """Returns y [P, H] of the chunk's expert rows, before routing weights."""

    def first_product(self, chunk: ChunkRoutes) -> None:
        """Computes the chunk's pre-activations, instead of ``experts``."""

    def pre_activations(self) -> Tensor:
        """Returns h [P, 2I] of all chunks, after the last."""


class BackwardPass(Protocol):
    """Backward of one micro-batch, which is made once its experts have arrived, and called for each chunk in turn."""

    def experts(self, chunk: ChunkRoutes) -> tuple[Tensor, Tensor]:
        """Returns (dx [P, H] of the chunk's expert rows, dweight float32 [M] of its arrivals)."""

    def weight_gradients(self) -> None:
        """Writes the weight gradients of every held expert, after the last chunk; zeros for one without rows."""


class ExpertCompute(Protocol):
    """A way to compute experts. ``min_rows``: routes are padded to at least so many rows per slot (``build_routes``).
    ``by_tables``: whether it reads only tables, which may be on a device, and not ``ChunkRows.slots``, which only a
    host that plans knows.
    """

    @property
    def min_rows(self) -> int: ...

    @property
    def by_tables(self) -> bool: ...

    def forward(self, routes: Routes, x: Arrivals, weights: HeldExperts, scratch: Scratch) -> ForwardPass: ...

    def backward(
        self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts, scratch: Scratch
    ) -> BackwardPass: ...

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
        """Writes into ``out[t]`` the sum over k = 0..K-1, in that order, of ``rows[place[t, k]]`` times its weight, if
        any; in float32, rounded once.
        """
