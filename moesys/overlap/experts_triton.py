"""Experts on a GPU: Triton kernels that take all slots of a chunk at once, and gather rows as they multiply them.

Nothing is padded: a kernel's row is summed in blocks of its own contraction, whoever shares its tile. Only x and the
pre-activations are kept for backward, as on the CPU.

On one rank nothing travels, and kernels gather from the tokens themselves: a row's *entry* is its (token, k), K entries
a token. On several it is its arrival, one entry each. Either way a chunk's entries are numbered from its first.

T tokens or arrivals of a chunk, K entries of each, P = T·K expert rows, M arrivals, H hidden, I expert width, S slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from moesys.kernels.cpu.page_pool import Scratch
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.experts import (
    ExpertMatrices,
    Kept,
    experts_backward,
    experts_forward,
    experts_recomputed,
    hidden_gradients,
    input_gradient,
)
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import INTERPRETED, SINGLE, blocks_of
from moesys.kernels.experts.tiles import RowGroups, RowTiles, groups_by_size, tile_table
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, block_gradient, weight_gradient
from moesys.kernels.host_copies import HostCopy, to_device
from moesys.kernels.routing.routing import Routing, route
from moesys.overlap.exact_sum import BlockSums, largest_by_slot, row_sizes_on_device
from moesys.overlap.executor import (
    Arrivals,
    BackwardInputs,
    Executor,
    ExpertCompute,
    ExpertGradients,
    HeldExperts,
    LayerContext,
    Saved,
    WaitForExperts,
    Workplace,
)
from moesys.overlap.routes import ChunkRoutes, Routes, no_expert

ACTIVATION = "swiglu"


class SingleRankExecutor(Executor):
    """Runs the micro-batches of one rank alone, whose counts stay on the device until they are read."""

    planned_by = "nobody"

    def __init__(self, layer: LayerContext, compute: ExpertCompute) -> None:
        super().__init__(layer, compute)
        # For each micro-batch: the number of choices that name an expert, which the device counts, and of all choices.
        self._counted: deque[tuple[HostCopy, int]] = deque()

    def sort(self, expert_TK: Tensor, turn: int) -> SingleRankRun:
        layer = self.layer
        with layer.channel.meter.planning():
            routing = route(expert_TK, layer.shape.num_experts)
        if not (expert_TK.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._counted.append((HostCopy(routing.first_G1[-1:]), expert_TK.numel()))
            # While a graph is captured, to ask whether a count has arrived would break the capture.
            self.check(wait=False)
        run = SingleRankRun(routing, check=self.check)
        sums = layer.sums_alone(run.tokens_E, turn)
        return run if sums is None else replace(run, sums=sums)

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

    routing: Routing
    sums: BlockSums | None = None
    check: Callable[[], None] | None = None

    @property
    def tokens_E(self) -> Tensor:
        """Choices of each expert, int64 [E], on the device."""
        return self.routing.first_G1.diff().long()

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Returns the output [T, H] in x's dtype."""
        x_TH = x_TH.contiguous()
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        y_TH, kept = experts_forward(
            x_TH,
            self.routing,
            weight_TK.contiguous(),
            self._matrices(gate_up_S2IH, down_SHI),
            self._blocks(x_TH, down_SHI),
        )
        return y_TH, Saved(x_TH, kept.h_PU, weight_TK)

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, Saved]:
        """Returns what ``forward`` does, but no output that is not ``read``."""
        if read:
            return self.forward(x_TH, weight_TK, wait_for_experts)
        x_TH = x_TH.contiguous()
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        experts, blocks = self._matrices(gate_up_S2IH, down_SHI), self._blocks(x_TH, down_SHI)
        kept = experts_recomputed(x_TH, self.routing, weight_TK.shape[1], experts, blocks)
        return None, Saved(x_TH, kept.h_PU, weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: Saved, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); every expert's weight gradients are written into ``gradients``,
        or not computed where that is None.
        """
        gate_up_S2IH, down_SHI = wait_for_experts().stacked()[:2]
        weight_TK, experts = saved.weight_TK.contiguous(), self._matrices(gate_up_S2IH, down_SHI)
        kept, blocks = Kept(saved.h_P2I, self.routing), self._blocks(dy_TH, down_SHI)
        if gradients is not None and self.sums is not None:
            return self._backward_in_blocks(dy_TH, saved.arrivals_MH, weight_TK, experts, kept, blocks, gradients)
        found = experts_backward(
            dy_TH,
            saved.arrivals_MH,
            weight_TK,
            experts,
            kept,
            blocks,
            None if gradients is None else torch.float32,
            (None, None) if gradients is None else gradients[:2],
        )
        return found.dx_TH, found.dweight_TK

    def _backward_in_blocks(
        self,
        dy_TH: Tensor,
        x_TH: Tensor,
        weight_TK: Tensor,
        experts: ExpertMatrices,
        kept: Kept,
        blocks: TileConfigs,
        gradients: ExpertGradients,
    ) -> tuple[Tensor, Tensor]:
        """``experts_backward``, but for how rows are summed."""
        assert self.sums is not None
        routing, top_k, tile = self.routing, weight_TK.shape[1], blocks.weight_gradient
        dh_PU, wa_PI, dweight_TK, tiles = hidden_gradients(dy_TH, weight_TK, experts, kept, blocks)
        groups = OrderedGroups(routing.entry_P, routing.first_G1, groups_by_size(routing.first_G1))
        of_up, of_down = agreed_blocks(self.sums, groups, top_k, (x_TH, dy_TH), (dh_PU, wa_PI))
        block_gradient(dy_TH, wa_PI, groups, top_k, "left", of_down, tile, gradients.down)
        del wa_PI
        dx_TH = input_gradient(dh_PU, experts, routing, tiles, blocks)
        block_gradient(dh_PU, x_TH, groups, top_k, "right", of_up, tile, gradients.gate_up)
        return dx_TH, dweight_TK

    def _matrices(self, gate_up_S2IH: Tensor, down_SHI: Tensor) -> ExpertMatrices:
        """The expert of each group: itself."""
        first_G1 = self.routing.first_G1
        expert_G = torch.arange(len(first_G1) - 1, dtype=torch.int32, device=first_G1.device)
        return ExpertMatrices(gate_up_S2IH, down_SHI, expert_G, ACTIVATION)

    def _blocks(self, like: Tensor, down_SHI: Tensor) -> TileConfigs:
        return blocks_of(ShapeClass.of(like, down_SHI, len(self.routing.entry_P), ACTIVATION), like.device)


def agreed_blocks(
    sums: BlockSums, groups: OrderedGroups, top_k: int, by_token: tuple[Tensor, Tensor], by_row: tuple[Tensor, Tensor]
) -> tuple[RowBlocks, RowBlocks]:
    """Returns how the gradients of ``gate_up`` and ``down`` are summed. A collective. ``by_token``: x and dy [T, H];
    ``by_row``: gradients of pre-activations and weighted activations, in order of ``groups``.
    """
    token_P = (groups.entry_P // top_k).clamp_min(0)
    of_tokens, of_rows = ([row_sizes_on_device(rows) for rows in sides] for sides in (by_token, by_row))
    sizes_P = [*(sizes[token_P] for sizes in of_tokens), *of_rows]
    # Kernels know no biases, and so ask nothing about routing weights.
    largest_S5 = functional.pad(largest_by_slot(groups.first_G1, *sizes_P), (0, 1))
    up_S, down_S, *_ = sums.agree(largest_S5).unbind(dim=1)
    return RowBlocks(sums.block_rows, up_S.contiguous()), RowBlocks(sums.block_rows, down_S.contiguous())


@dataclass(frozen=True)
class TritonExperts:
    """``ExpertCompute`` by Triton kernels; on the CPU only in Triton's interpreter.

    Blocks follow from the shape of a call and the device, and not from its chunks, which so change no bit.
    """

    @property
    def by_tables(self) -> bool:
        return True

    @property
    def min_rows(self) -> int:
        return 1

    def forward(self, routes: Routes, x: Arrivals, weights: HeldExperts, at: Workplace) -> TritonForward:
        return TritonForward(routes, x, weights)

    def backward(self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts, at: Workplace) -> TritonBackward:
        return TritonBackward(routes, inputs, weights)

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
        weight_TK = None if weight_TK is None else weight_TK.contiguous()
        out_TH.copy_(combine(rows_NH, place_TK.int(), weight_TK, out_TH.dtype))


class TritonForward:
    """``ForwardPass`` by kernels."""

    def __init__(self, routes: Routes, x: Arrivals, weights: HeldExperts) -> None:
        self.routes, self.x = routes, x
        self.rows = x.rows.contiguous()
        self.experts_here = _Stacked.of(weights, self.rows)
        self.blocks = _blocks(self.rows, self.experts_here, routes)
        self.h: list[Tensor] = []

    def experts(self, chunk: ChunkRoutes) -> Tensor:
        if not chunk.num_rows:
            return self.rows.new_empty(0, self.rows.shape[1])
        here, block = self.experts_here, self.blocks.down
        a_PI, routing, tiles = self._up(chunk)
        return grouped_gemm(
            a_PI, here.down_SHI, routing.first_G1, tiles.of(block), here.matrix_S, block, transposed=True
        )

    def first_product(self, chunk: ChunkRoutes) -> None:
        if chunk.num_rows:
            self._up(chunk)

    def _up(self, chunk: ChunkRoutes) -> tuple[Tensor, Routing, RowTiles]:
        """Keeps h and returns the activations of it, and where rows lie."""
        here, blocks = self.experts_here, self.blocks
        routing = _routing(self.routes, chunk, self.x)
        tiles = RowTiles(routing.first_G1, len(routing.entry_P))
        h_P2I, a_PI = up(
            self.rows[_sources(chunk, self.x)],
            here.gate_up_S2IH,
            routing,
            tiles.of(blocks.up),
            here.matrix_S,
            routing.row_TK.shape[1],
            activation=ACTIVATION,
            block=blocks.up,
        )
        self.h.append(h_P2I)
        return a_PI, routing, tiles

    def pre_activations(self) -> Tensor:
        if not self.h:
            return self.rows.new_empty(0, self.experts_here.gate_up_S2IH.shape[1])
        # Autograd keeps one tensor; several chunks' are copied together.
        return self.h[0] if len(self.h) == 1 else torch.cat(self.h)


class TritonBackward:
    """``BackwardPass`` by kernels. What weight gradients need is kept until they are asked for."""

    def __init__(self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts) -> None:
        self.routes = routes
        self.dy, self.x, self.h_P2I, self.weight_M, self.gradients, self.sums = inputs
        self.experts_here = _Stacked.of(weights, self.dy.rows)
        self.blocks = _blocks(self.dy.rows, self.experts_here, routes)
        self.dh: list[Tensor] = []
        self.wa: list[Tensor] = []

    def experts(self, chunk: ChunkRoutes) -> tuple[Tensor, Tensor]:
        rows, weight_M = self.dy.rows, self.weight_M[slice(*chunk.arrivals)]
        if not chunk.num_rows:
            return rows.new_empty(0, rows.shape[1]), torch.empty_like(weight_M)
        here, blocks = self.experts_here, self.blocks
        routing = _routing(self.routes, chunk, self.dy)
        tiles = RowTiles(routing.first_G1, len(routing.entry_P))
        on_one_rank = self.dy.index is not None
        weight_TK = (weight_M[chunk.home_TK] if on_one_rank else weight_M).view_as(routing.row_TK)
        block = blocks.activation_gradient
        dh_P2I, wa_PI, dweight_TK = activation_gradient(
            rows[_sources(chunk, self.dy)],
            here.down_SHI,
            self.h_P2I[slice(*chunk.rows)],
            weight_TK,
            routing,
            RowGroups(routing.first_G1, tiles.of(block), here.matrix_S),
            ACTIVATION,
            block,
        )
        if self.gradients is not None:
            self.dh.append(dh_P2I)
            self.wa.append(wa_PI)
        block = blocks.input_gradient
        dx_PH = grouped_gemm(
            dh_P2I, here.gate_up_S2IH, routing.first_G1, tiles.of(block), here.matrix_S, block, transposed=False
        )
        dweight_M = dweight_TK.view(-1)
        if on_one_rank:
            dweight_M = torch.empty_like(weight_M).index_copy_(0, chunk.home_TK.view(-1), dweight_M)
        return dx_PH, dweight_M

    def weight_gradients(self) -> None:
        gradients = self.gradients
        assert gradients is not None
        if not self.dh:
            if self.sums is not None:
                # The other ranks ask this one too.
                self.sums.agree(self.weight_M.new_zeros(len(gradients.gate_up), 5))
            gradients.gate_up.zero_()
            gradients.down.zero_()
            return
        arrival_P, dh_P2I, wa_PI = self._expert_order()
        first_G1 = self.routes.first_S1
        groups = OrderedGroups(self.dy.place(arrival_P).int(), first_G1, groups_by_size(first_G1))
        x_MH, dy_MH, block = self.x.rows.contiguous(), self.dy.rows, self.blocks.weight_gradient
        if self.sums is not None:
            of_up, of_down = agreed_blocks(self.sums, groups, 1, (x_MH, dy_MH), (dh_P2I, wa_PI))
            block_gradient(dh_P2I, x_MH, groups, 1, "right", of_up, block, gradients.gate_up)
            block_gradient(dy_MH, wa_PI, groups, 1, "left", of_down, block, gradients.down)
            return
        weight_gradient(dh_P2I, x_MH, groups, 1, "right", block, out_GLR=gradients.gate_up)
        weight_gradient(dy_MH, wa_PI, groups, 1, "left", block, out_GLR=gradients.down)

    def _expert_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """All chunks' rows in expert order: (the arrival of each, dh, weighted activations)."""
        routes = self.routes
        if len(routes.chunks) == 1:
            return routes.chunks[0].gather_P, self.dh[0], self.wa[0]
        # The kernels read one side of the product through an index and the other, these, as it lies.
        dh_P2I, wa_PI = (torch.cat(of).index_select(0, routes.order_row_P) for of in (self.dh, self.wa))
        return routes.order_arrival_P, dh_P2I, wa_PI


@dataclass(frozen=True)
class _Stacked:
    """The held experts as kernels want them."""

    gate_up_S2IH: Tensor
    down_SHI: Tensor
    matrix_S: Tensor

    @staticmethod
    def of(weights: HeldExperts, like: Tensor) -> _Stacked:
        """On the device of ``like``."""
        return _Stacked(*weights.stacked()[:2], torch.arange(len(weights), dtype=torch.int32, device=like.device))


def _blocks(rows: Tensor, experts_here: _Stacked, routes: Routes) -> TileConfigs:
    """Of all chunks together, which so use the same."""
    return blocks_of(ShapeClass.of(rows, experts_here.down_SHI, routes.num_rows, ACTIVATION), rows.device)


def _sources(chunk: ChunkRoutes, arrivals: Arrivals) -> slice:
    """Which of ``arrivals.rows`` a chunk's entries are numbered over."""
    return slice(*(chunk.arrivals if arrivals.index is None else chunk.tokens))


def _routing(routes: Routes, chunk: ChunkRoutes, arrivals: Arrivals) -> Routing:
    """The chunk's rows and entries; a held expert without rows is an empty group."""
    if arrivals.index is None:
        entry_P, row_TK = chunk.gather_P - chunk.arrivals[0], chunk.return_M[:, None]
    else:
        row_TK = chunk.return_M[chunk.home_TK]
        entry_P = routes.send_row_N[chunk.gather_P] - chunk.tokens[0] * row_TK.shape[1]
    return Routing(entry_P.int(), row_TK.int(), chunk.first_S1)


def token_product(x_TA: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """Returns x @ weight [T, B] in their dtype, of ``weight`` [A, B], or [B, A] where it is ``transposed``."""
    if not len(x_TA):
        return x_TA.new_empty(0, weight.shape[0 if transposed else 1])
    tile, (first_2, only_1) = _tile_of(x_TA), _one_group(x_TA)
    tiles = tile_table(first_2, len(x_TA), tile.rows)
    return grouped_gemm(x_TA.contiguous(), weight[None], first_2, tiles, only_1, tile, transposed=transposed)


def token_gradient(dy_TB: Tensor, x_TA: Tensor, num_tokens: int, grid: Tensor) -> Tensor:
    """Returns dyᵀ @ x summed over blocks of ``num_tokens``, float64 [B, A], on ``grid``, a float64 on the device."""
    first_2, only_1 = _one_group(x_TA)
    groups = OrderedGroups(torch.arange(len(x_TA), dtype=torch.int32, device=x_TA.device), first_2, only_1)
    blocks = RowBlocks(num_tokens, grid.view(1))
    return block_gradient(dy_TB, x_TA, groups, 1, "right", blocks, _tile_of(x_TA))[0]


def _one_group(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the one group of all rows begins and ends, and its number."""
    device = rows.device
    return to_device([0, len(rows)], device, torch.int32), torch.zeros(1, dtype=torch.int32, device=device)


def _tile_of(rows: Tensor) -> TileConfig:
    if rows.device.type == "cpu":
        return INTERPRETED
    return SINGLE if rows.dtype == torch.float32 else TileConfig()
