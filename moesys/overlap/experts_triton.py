"""Experts on a GPU: Triton kernels that take all slots of a chunk at once, and gather rows as they multiply them.

Nothing is padded: a kernel's row is summed in blocks of its own contraction, whoever shares its tile. Only x and the
pre-activations are kept for backward, as on the CPU.

On one rank nothing travels, and kernels gather from the tokens themselves: a row's *entry* is its (token, k), K entries
a token. On several it is its arrival, one entry each. Either way a chunk's entries are numbered from its first.

T tokens or arrivals of a chunk, K entries of each, P = T·K expert rows, M arrivals, H hidden, I expert width, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import Scratch
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass, TileConfigs
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import RowGroups, RowTiles, groups_by_size
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, block_gradient, weight_gradient
from moesys.kernels.routing.routing import Routing, route
from moesys.overlap.expert_compute import Arrivals, BackwardInputs, Workplace
from moesys.overlap.held_experts import HeldExperts
from moesys.overlap.routes import ChunkRoutes, Routes
from moesys.overlap.single_rank import ACTIVATION, SingleRankExecutor, agreed_blocks


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

    def alone(self, expert_TK: Tensor, num_experts: int) -> SingleRankExecutor:
        return SingleRankExecutor(route(expert_TK, num_experts))

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
