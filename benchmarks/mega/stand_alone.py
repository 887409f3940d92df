"""Sequential on stand-alone kernels, for ranks that share a device: copies, then experts, then copies, then sums.

What MegaKernels are compared with: each kernel has the whole device and the blocks that are best for it alone, and
knows its rows beforehand, as Sequential's routes do.

R ranks with T tokens each, H hidden, K choices of a token, N rows of a rank, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.mega.ranks_layer import RanksLayer
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.combine import combine
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import RowGroups, RowTiles, groups_by_size
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.mega.exchange import exchange
from moesys.kernels.routing.routing import Routing, route
from moesys.kernels.symmetric.pacing import paced_copies
from moesys.overlap.mega_executor import replicas_of, tokens_by_replica
from moesys.overlap.single_rank import ACTIVATION
from moesys.overlap.stages import Stages


class Shared:
    """What ranks read of each other, and where they write to each other; one behind the other along the first side."""

    def __init__(self, layer: RanksLayer) -> None:
        _, T, H, _, E, K = layer.size
        num_entries = layer.num_ranks * T * K
        self.x, self.dy, self.weight = (torch.cat(list(of)) for of in (layer.x_RTH, layer.dy_RTH, layer.weight_RTK))
        self.routings = [route(expert_TK, E) for expert_TK in layer.expert_RTK]
        self.entry = torch.cat([routing.entry_P for routing in self.routings])
        self.rows_home = self.x.new_empty(num_entries, H)
        self.dweight_home = self.weight.new_empty(num_entries)


class StandAloneRun:
    """One rank: forward and backward in stages, and what came out."""

    def __init__(self, layer: RanksLayer, rank: int, shared: Shared, link: Tensor | None) -> None:
        _, T, _, _, _, K = layer.size
        device, held = layer.device, layer.held_R[rank]
        self._shared, self._link, self._away_bytes = shared, link, layer.away_bytes(rank)
        self._weight_TK = layer.weight_RTK[rank]
        self._gate_up, self._down = held.stacked()[:2]
        num_rows = int(layer.plan.tokens_R[rank])
        table = exchange(
            tokens_by_replica(layer.plan, device),
            shared.routings[rank].row_TK,
            replicas_of(layer.plan.layout, rank, device),
            rank,
            num_rows,
        )
        source_N = table.source_N.long()
        self._home_N = source_N * T * K + shared.entry[source_N * T * K + table.place_N]
        self._own = slice(rank * T * K, (rank + 1) * T * K)
        self._place_TK = torch.arange(T * K, dtype=torch.int32, device=device).view(T, K)
        self._top_k = K
        in_order_N = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._routing = Routing(in_order_N, in_order_N[:, None], table.first_G1)
        self._tiles = RowTiles(table.first_G1, num_rows)
        self._matrix_S = torch.arange(len(held), dtype=torch.int32, device=device)
        self._blocks = blocks_of(ShapeClass.of(layer.x_RTH[rank], self._down, num_rows, ACTIVATION), device)
        self._gradients = [torch.empty_like(of, dtype=torch.float32) for of in (self._gate_up, self._down)]
        self.results: dict[str, Tensor] = {}

    def stages(self, direction: str) -> Stages[None]:
        """A backward is that of the last forward."""
        return self._forward() if direction == "forward" else self._backward()

    def _forward(self) -> Stages[None]:
        blocks, first_G1 = self._blocks, self._routing.first_G1
        yield
        self._x_NH = self._pulled(self._shared.x)
        self._h_NU, a_NI = up(
            self._x_NH,
            self._gate_up,
            self._routing,
            self._tiles.of(blocks.up),
            self._matrix_S,
            1,
            activation=ACTIVATION,
            block=blocks.up,
        )
        tiles = self._tiles.of(blocks.down)
        self._push(grouped_gemm(a_NI, self._down, first_G1, tiles, self._matrix_S, blocks.down, transposed=True))
        yield
        home = self._shared.rows_home[self._own]
        self.results["y"] = combine(home, self._place_TK, self._weight_TK, home.dtype)
        yield

    def _backward(self) -> Stages[None]:
        blocks, first_G1, shared = self._blocks, self._routing.first_G1, self._shared
        yield
        dy_NH = self._pulled(shared.dy)
        weight_N1 = shared.weight.view(-1)[self._home_N][:, None]
        block = blocks.activation_gradient
        dh_NU, wa_NI, dweight_N1 = activation_gradient(
            dy_NH,
            self._down,
            self._h_NU,
            weight_N1,
            self._routing,
            RowGroups(first_G1, self._tiles.of(block), self._matrix_S),
            ACTIVATION,
            block,
        )
        block = blocks.input_gradient
        tiles = self._tiles.of(block)
        dx_NH = grouped_gemm(dh_NU, self._gate_up, first_G1, tiles, self._matrix_S, block, transposed=False)
        shared.dweight_home.index_copy_(0, self._home_N, dweight_N1.view(-1))
        self._push(dx_NH)
        dgate_up, ddown = self._gradients
        groups = OrderedGroups(self._routing.entry_P, first_G1, groups_by_size(first_G1))
        weight_gradient(dh_NU, self._x_NH, groups, 1, "right", blocks.weight_gradient, out_GLR=dgate_up)
        weight_gradient(dy_NH, wa_NI, groups, 1, "left", blocks.weight_gradient, out_GLR=ddown)
        yield
        home = shared.rows_home[self._own]
        self.results["dx"] = combine(home, self._place_TK, None, home.dtype)
        self.results["dweight"] = shared.dweight_home[self._own].view_as(self._weight_TK).clone()
        self.results["dgate_up"], self.results["ddown"] = dgate_up, ddown
        yield

    def _pulled(self, source: Tensor) -> Tensor:
        with paced_copies(self._link, self._away_bytes):
            return source.index_select(0, self._home_N // self._top_k)

    def _push(self, rows_NH: Tensor) -> None:
        with paced_copies(self._link, self._away_bytes):
            self._shared.rows_home.index_copy_(0, self._home_N, rows_NH)


def stand_alone_runs(layer: RanksLayer, links: Sequence[Tensor | None]) -> list[StandAloneRun]:
    """Of all ranks, which share this device; ``links``: of each (``pacing``)."""
    shared = Shared(layer)
    return [StandAloneRun(layer, rank, shared, link) for rank, link in enumerate(links)]
