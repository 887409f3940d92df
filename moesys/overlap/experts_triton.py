"""Experts on a GPU: Triton kernels that take all slots of a chunk at once, and gather rows as they multiply them.

Nothing is padded: a kernel sums a row in blocks of its own contraction, whichever rows share its tile. Only x and the
pre-activations are kept for backward, as on the CPU.

On one rank nothing travels, and kernels gather from the tokens themselves: a row's *entry* is its (token, k), K entries
a token. On several it is its arrival, one entry each, numbered from the chunk's first.

T tokens of a rank, K entries of each, P = T·K expert rows, M arrivals, H hidden, I expert width, S slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moesys.kernels.cpu.page_pool import Scratch
from moesys.kernels.experts.experts import (
    ExpertMatrices,
    ForwardState,
    experts_backward,
    experts_forward,
    first_product,
    hidden_gradients,
    input_gradient,
    second_product,
    weight_gradients,
)
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import INTERPRETED, SINGLE, blocks_of
from moesys.kernels.experts.tiles import RowTiles, groups_by_size, tile_table
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, WeightGradients, weight_gradient
from moesys.kernels.launch import HostCopy, to_device
from moesys.kernels.routing import SortedRouting, route
from moesys.overlap.exact_sum import BlockSums, largest_by_slot, largest_size
from moesys.overlap.executor import (
    Adapters,
    Arrivals,
    BackwardInputs,
    Executor,
    ExpertCompute,
    ExpertGradients,
    HeldExperts,
    LayerContext,
    SavedTensors,
    WaitForExperts,
)
from moesys.overlap.routes import ChunkRoutes, Routes, no_expert

ACTIVATION = "swiglu"


class SingleRankExecutor(Executor):
    """Runs the micro-batches of one rank alone, whose counts stay on the device until they are read."""

    planned_by = "nobody"

    def __init__(self, layer: LayerContext, compute: ExpertCompute) -> None:
        super().__init__(layer, compute)
        # Two numbers of each micro-batch: of choices that name an expert, which the device counts, and of all choices.
        self._counted: deque[tuple[HostCopy, int]] = deque()

    def sort(self, expert_TK: Tensor, turn: int) -> SingleRankRun:
        layer = self.layer
        with layer.channel.meter.planning():
            routing = route(expert_TK, layer.shape.num_experts)
        if not (expert_TK.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._counted.append((HostCopy(routing.first_G1[-1:]), expert_TK.numel()))
            # While a graph is captured, to ask whether a count has arrived would break the capture.
            self.check(wait=False)
        all_experts, tokens_E = tuple(range(layer.shape.num_experts)), routing.first_G1.diff().long()
        sums = layer.sums(all_experts, tokens_E, turn, expert_TK.device)
        return SingleRankRun(routing, sums, self.check)

    def check(self, wait: bool = True) -> None:
        """Raises ValueError if a micro-batch whose count has arrived had choices that name no expert. With ``wait`` the
        host waits for the counts of all micro-batches.
        """
        while self._counted and (wait or self._counted[0][0].ready()):
            counted, choices = self._counted.popleft()
            lost = choices - int(counted.read()[0])
            if not lost:
                continue
            self._counted.clear()
            found = f"expert_TK has choices that name no expert ({lost} of {choices})"
            raise no_expert(found, self.layer.shape.num_experts, self.layer.channel.identity.layer)


@dataclass(frozen=True)
class SingleRankRun:
    """Runs one micro-batch of one layer, whose rows are ``routing``'s, one group an expert. ``sums``: of weight
    gradients, where nothing may show that it is one rank.

    It records no spans: the host only launches, and does not know when the device computes.
    """

    routing: SortedRouting
    sums: BlockSums | None = None
    check: Callable[[], None] | None = None

    @property
    def tokens_E(self) -> Tensor:
        """The choices of each expert, int64 [E], on the device."""
        return self.routing.first_G1.diff().long()

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, SavedTensors]:
        """Returns the output [T, H] in x's dtype."""
        x_TH, experts = x_TH.contiguous(), stacked(wait_for_experts())
        y_TH, state = experts_forward(x_TH, self.routing, weight_TK.contiguous(), experts, self._blocks(x_TH, experts))
        return y_TH, SavedTensors(x_TH, state.h_PU, weight_TK)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, SavedTensors]:
        """Returns what ``forward`` does, but no output that is not ``read``."""
        if read:
            return self.forward(x_TH, weight_TK, wait_for_experts)
        x_TH, experts = x_TH.contiguous(), stacked(wait_for_experts())
        h_PU, *_ = first_product(x_TH, self.routing, weight_TK.shape[1], experts, self._blocks(x_TH, experts))
        return None, SavedTensors(x_TH, h_PU, weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); every expert's weight gradients are written into ``gradients``,
        or not computed where that is None.
        """
        held = wait_for_experts()
        weight_TK, experts = saved.weight_TK.contiguous(), stacked(held)
        state, blocks = ForwardState(saved.h_P2I, self.routing), self._blocks(dy_TH, experts)
        out = None if gradients is None else (gradients.gate_up, gradients.down)
        write = partial(write_gradients, weight_TK.shape[1], experts, blocks, self.sums, held.adapters)
        return experts_backward(dy_TH, saved.arrivals_MH, weight_TK, experts, state, blocks, out, write)

    def _blocks(self, like: Tensor, experts: ExpertMatrices) -> TileConfigs:
        return _blocks(like, experts, len(self.routing.entry_P))


def stacked(weights: HeldExperts) -> ExpertMatrices:
    """Returns the held experts as kernels take them; the expert of each group is that of its slot."""
    gate_up, down = weights.stacked()[:2]
    low_rank = (None, None) if weights.adapters is None else weights.adapters.stacked(gate_up.dtype)
    return ExpertMatrices(gate_up, down, ACTIVATION, low_rank)


def _blocks(rows: Tensor, experts: ExpertMatrices, num_rows: int) -> TileConfigs:
    """Returns the blocks for ``num_rows``, those of all chunks together, so that all chunks use the same."""
    return blocks_of(ShapeClass.of(rows, experts.down_EHI, num_rows, ACTIVATION), rows.device)


def write_gradients(
    top_k: int,
    experts: ExpertMatrices,
    blocks: TileConfigs,
    sums: BlockSums | None,
    adapters: Adapters | None,
    groups: OrderedGroups,
    sides: WeightGradients,
) -> None:
    """Writes both weight gradients of rows in ``groups``, where there are any, and those of ``adapters``. With ``sums``
    a collective.
    """
    row_blocks: list[RowBlocks | None] = [None] * 6
    if sums is not None:
        token_P = (groups.entry_P // top_k).clamp_min(0)
        of_tokens = (largest_size(rows, dim=1)[token_P] for rows in (sides.x_NH, sides.dy_NH))
        of_rows = (largest_size(rows, dim=1) for rows in (sides.dh_NU, sides.wa_NI))
        # Kernels have no biases, so they need no bound of routing weights.
        largest_S5 = functional.pad(largest_by_slot(groups.first_G1, *of_tokens, *of_rows), (0, 1))
        grids_SN = sums.agree(largest_S5, None if adapters is None else adapters.bounds_E4())
        found = [RowBlocks(sums.block_rows, each.contiguous()) for each in grids_SN.unbind(dim=1)]
        row_blocks = [*found[:2], *(found[4:] or row_blocks[2:])]
    factors = weight_gradients(groups, sides, top_k, experts, blocks, row_blocks)
    if adapters is not None:
        adapters.add(factors)


@dataclass(frozen=True)
class TritonExperts:
    """``ExpertCompute`` by Triton kernels; on the CPU only in Triton's interpreter.

    Blocks follow from the shape of a call and the device, and not from its chunks, which so change no bit.
    """

    min_rows = 1
    by_tables = True

    def forward(self, routes: Routes, x: Arrivals, weights: HeldExperts, scratch: Scratch) -> TritonForward:
        return TritonForward(routes, x, weights)

    def backward(
        self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts, scratch: Scratch
    ) -> TritonBackward:
        return TritonBackward(routes, inputs, weights)

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
        weight_TK = None if weight_TK is None else weight_TK.contiguous()
        out_TH.copy_(combine(rows_NH, place_TK.int(), weight_TK, out_TH.dtype))


class TritonForward:
    """``ForwardPass`` by kernels."""

    def __init__(self, routes: Routes, x: Arrivals, weights: HeldExperts) -> None:
        self.rows, self.matrices = x.rows.contiguous(), stacked(weights)
        self.blocks = _blocks(self.rows, self.matrices, routes.num_rows)
        self.h: list[Tensor] = []

    def experts(self, chunk: ChunkRoutes) -> Tensor:
        if not chunk.num_rows:
            return self.rows.new_empty(0, self.rows.shape[1])
        routing = _routing(chunk)
        a_PI, tiles = self._up(chunk, routing)
        return second_product(a_PI, routing, tiles, self.matrices, self.blocks)

    def first_product(self, chunk: ChunkRoutes) -> None:
        if chunk.num_rows:
            self._up(chunk, _routing(chunk))

    def _up(self, chunk: ChunkRoutes, routing: SortedRouting) -> tuple[Tensor, RowTiles]:
        """Keeps h and returns its activations and the tiles of its rows."""
        rows = self.rows[slice(*chunk.arrivals)]
        h_P2I, a_PI, tiles = first_product(rows, routing, 1, self.matrices, self.blocks)
        self.h.append(h_P2I)
        return a_PI, tiles

    def pre_activations(self) -> Tensor:
        if not self.h:
            return self.rows.new_empty(0, self.matrices.gate_up_EUH.shape[1])
        # Autograd keeps one tensor; several chunks' are copied together.
        return self.h[0] if len(self.h) == 1 else torch.cat(self.h)


class TritonBackward:
    """``BackwardPass`` by kernels. What weight gradients need is kept until they are asked for."""

    def __init__(self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts) -> None:
        self.routes, self.inputs, self.matrices, self.adapters = routes, inputs, stacked(weights), weights.adapters
        self.blocks = _blocks(inputs.dy.rows, self.matrices, routes.num_rows)
        self.dh: list[Tensor] = []
        self.wa: list[Tensor] = []

    def experts(self, chunk: ChunkRoutes) -> tuple[Tensor, Tensor]:
        arrivals = slice(*chunk.arrivals)
        rows, weight_M = self.inputs.dy.rows[arrivals], self.inputs.weight_M[arrivals]
        if not chunk.num_rows:
            return rows, torch.empty_like(weight_M)
        state = ForwardState(self.inputs.h_P2I[slice(*chunk.rows)], _routing(chunk))
        dh_P2I, wa_PI, dweight_M1, tiles = hidden_gradients(rows, weight_M[:, None], self.matrices, state, self.blocks)
        if self.inputs.gradients is not None:
            self.dh.append(dh_P2I)
            self.wa.append(wa_PI)
        return input_gradient(dh_P2I, state.routing, tiles, self.matrices, self.blocks), dweight_M1.view(-1)

    def weight_gradients(self) -> None:
        dy, x, _, weight_M, gradients, sums = self.inputs
        assert gradients is not None
        if not self.dh:
            if sums is not None:
                # The other ranks wait for this one.
                sums.agree(weight_M.new_zeros(len(self.matrices.down_EHI), 5))
            if gradients.gate_up is not None:
                gradients.gate_up.zero_()
                gradients.down.zero_()
            return
        arrival_P, dh_P2I, wa_PI = self._expert_order()
        first_G1 = self.routes.first_S1
        groups = OrderedGroups(arrival_P.int(), first_G1, groups_by_size(first_G1))
        sides = WeightGradients(dh_P2I, x.rows.contiguous(), gradients.gate_up, dy.rows, wa_PI, gradients.down)
        write_gradients(1, self.matrices, self.blocks, sums, self.adapters, groups, sides)

    def _expert_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all chunks' rows in expert order: the arrival of each, dh, and weighted activations."""
        routes = self.routes
        if len(routes.chunks) == 1:
            return routes.chunks[0].gather_P, self.dh[0], self.wa[0]
        # The kernels read one side of the product through an index and the other, these, as it lies.
        dh_P2I, wa_PI = (torch.cat(of).index_select(0, routes.order_row_P) for of in (self.dh, self.wa))
        return routes.order_arrival_P, dh_P2I, wa_PI


def _routing(chunk: ChunkRoutes) -> SortedRouting:
    """Returns the chunk's rows and entries; a held expert without rows is an empty group."""
    entry_P, row_M1 = chunk.gather_P - chunk.arrivals[0], chunk.return_M[:, None]
    return SortedRouting(entry_P.int(), row_M1.int(), chunk.first_S1)


def token_product(x_TA: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """Returns x @ weight [T, B] in their dtype, of ``weight`` [A, B], or [B, A] where it is ``transposed``."""
    if not len(x_TA):
        return x_TA.new_empty(0, weight.shape[0 if transposed else 1])
    tile, first_2 = _tile_of(x_TA), _one_group(x_TA)
    tiles = tile_table(first_2, len(x_TA), tile.rows)
    return grouped_gemm(x_TA.contiguous(), weight[None], first_2, tiles, tile, transposed=transposed)


def token_gradient(dy_TB: Tensor, x_TA: Tensor, num_tokens: int, grid: Tensor) -> Tensor:
    """Returns dyᵀ @ x summed over blocks of ``num_tokens``, float64 [B, A], on ``grid``, a float64 on the device."""
    entry_P = torch.arange(len(x_TA), dtype=torch.int32, device=x_TA.device)
    groups = OrderedGroups(entry_P, _one_group(x_TA), entry_P.new_zeros(1))
    blocks = RowBlocks(num_tokens, grid.view(1))
    return weight_gradient(dy_TB, x_TA, groups, 1, "right", _tile_of(x_TA), blocks=blocks)[0]


def _one_group(rows: Tensor) -> Tensor:
    """Returns where the one group of all rows begins and ends."""
    return to_device([0, len(rows)], rows.device, torch.int32)


def _tile_of(rows: Tensor) -> TileConfig:
    if rows.device.type == "cpu":
        return INTERPRETED
    return SINGLE if rows.dtype == torch.float32 else TileConfig()
