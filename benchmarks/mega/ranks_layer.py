"""The layer of the MegaKernel benchmark on several ranks, and its two implementations.

``MegaRun`` is a rank with MegaKernels. ``StandAloneRun`` is what it is compared with, on ranks that share a device:
copies, experts, copies and sums, where each kernel has the whole device, has the tiles that are best for it alone, and
knows its rows beforehand.

R ranks with T tokens each, H hidden, I expert width, E experts, K choices per token, N rows of a rank, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega.pacing import paced_copies
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.run_planner import split_tokens
from moesys.config import ClusterSpec
from moesys.config.overlap import MegaKernel
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import RowGroups, RowTiles, groups_by_size
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.mega.exchange import exchange, most_flags, regions
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.routing import SortedRouting, route
from moesys.kernels.symmetric.counts import count_regions
from moesys.kernels.symmetric.heap import Region
from moesys.lab.calibrate.timings import StackedExperts
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.device_routes import PendingPlan, RowLimit, device_split, room_for_rows
from moesys.overlap.executor import ExpertGradients
from moesys.overlap.experts_triton import ACTIVATION
from moesys.overlap.mega_executor import MegaKernelRun, Stages, replicas_of, tokens_by_replica

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class RanksLayer:
    """Random inputs of all ranks, in lists by rank; each rank owns E / R whole experts."""

    size: Size
    x_RTH: Sequence[Tensor]
    dy_RTH: Sequence[Tensor]
    weight_RTK: Sequence[Tensor]
    expert_RTK: Sequence[Tensor]
    held_R: Sequence[StackedExperts]
    plan: TokenPlan

    @property
    def num_ranks(self) -> int:
        return len(self.x_RTH)

    @property
    def most_tokens(self) -> int:
        return max(len(x_TH) for x_TH in self.x_RTH)

    @property
    def device(self) -> torch.device:
        return self.x_RTH[0].device

    def away_bytes(self, rank: int) -> int:
        """Returns the bytes of the rows that a rank receives from others."""
        tokens_RER = self.plan.tokens_RER
        rows = int(tokens_RER[:, :, rank].sum() - tokens_RER[rank, :, rank].sum())
        return rows * self.size.H * self.x_RTH[rank].element_size()


def draw_layer(size: Size, num_ranks: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> RanksLayer:
    """Returns a layer of ``size.T`` tokens per rank with uniform choices, the same on every rank and on any device.

    Raises ValueError if ranks would have different numbers of experts.
    """
    _, T, H, I, E, K = size
    if E % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide {E} experts of {size.name!r}; choose a divisor")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    each = E // num_ranks
    choices = [torch.rand(T, E, generator=generator).topk(K).indices for _ in range(num_ranks)]
    weights = [torch.rand(T, K, generator=generator) for _ in range(num_ranks)]
    load = LoadMatrix(np.stack([np.bincount(of_rank.flatten().numpy(), minlength=E) for of_rank in choices]))
    layout = ExpertLayout(np.arange(E).reshape(num_ranks, each), E)
    return RanksLayer(
        size,
        [normal(T, H) for _ in range(num_ranks)],
        [normal(T, H) for _ in range(num_ranks)],
        [weight_TK.to(device) for weight_TK in weights],
        [expert_TK.to(device) for expert_TK in choices],
        [
            StackedExperts(normal(each, 2 * I, H, scale=H**-0.5), normal(each, H, I, scale=I**-0.5))
            for _ in range(num_ranks)
        ],
        split_tokens(load, layout, ClusterSpec(ranks_per_node=num_ranks), EvenSplit()),
    )


def regions_of(layer: RanksLayer, points: Sequence[MegaKernel]) -> dict[str, Region]:
    """Returns the heap regions that these points need."""
    _, _, H, _, E, K = layer.size
    dtype, flags = layer.x_RTH[0].dtype, 0
    for point in points:
        blocks = blocks_at(point, ACTIVATION, dtype, layer.device)
        column_tiles = -(-H // min(blocks.down.columns, blocks.input_gradient.columns))
        flags = max(flags, most_flags(layer.most_tokens, K, E, blocks.down.rows, column_tiles))
    shared = regions(layer.most_tokens, K, H, dtype, layer.num_ranks, flags)
    return {**shared, **count_regions(layer.num_ranks, E)}


class MegaRun:
    """One rank at one point of the search space: forward and backward in stages, and their results.

    on_device: the forward plans on the device with the flow split, which has only one plan if each expert has one
    holder.
    """

    def __init__(
        self, layer: RanksLayer, rank: int, point: MegaKernel, memory: MegaMemory, on_device: bool = False
    ) -> None:
        self._x_TH, self._dy_TH = layer.x_RTH[rank], layer.dy_RTH[rank]
        self._weight_TK, self._held = layer.weight_RTK[rank], layer.held_R[rank]
        plan: Tensor | PendingPlan = tokens_by_replica(layer.plan, layer.device)
        num_rows = int(layer.plan.tokens_R[rank])
        if on_device:
            plan = _pending(layer)
            num_rows = plan.room
        self._executor = MegaKernelRun(
            layer.expert_RTK[rank],
            layer.size.E,
            plan,
            replicas_of(layer.plan.layout, rank, layer.device),
            num_rows,
            memory,
            blocks_at(point, ACTIVATION, self._x_TH.dtype, layer.device),
            point,
        )
        matrices = self._held.stacked()[:2]
        # As in a model, where the gradients of an expert are one vector.
        sizes = [of[0].numel() for of in matrices]
        grad_SN = torch.empty(len(self._held), sum(sizes), device=layer.device)
        of_matrices = zip(grad_SN.split(sizes, dim=1), matrices, strict=True)
        self._gradients = ExpertGradients(*(grad.view(of.shape) for grad, of in of_matrices))
        self.results: dict[str, Tensor] = {}

    def stages(self, direction: str) -> Stages[None]:
        """Runs a direction; a backward belongs to the last forward."""
        if direction == "forward":
            self.results["y"], self._saved = yield from self._executor.forward_stages(
                self._x_TH, self._weight_TK, lambda: self._held
            )
        else:
            self.results["dx"], self.results["dweight"] = yield from self._executor.backward_stages(
                self._dy_TH, self._saved, lambda: self._held, self._gradients
            )
            self.results["dgate_up"], self.results["ddown"] = self._gradients[:2]


def _pending(layer: RanksLayer) -> PendingPlan:
    """Returns a plan that is still to be made, with room for all rows that this rank receives."""
    cluster, choices = ClusterSpec(ranks_per_node=layer.num_ranks), layer.most_tokens * layer.size.K
    usual = room_for_rows(MegaKernel(), layer.most_tokens, layer.size.K, layer.num_ranks)
    room = max(usual, int(layer.plan.tokens_R.max()))
    split = device_split(layer.plan.layout, cluster, FlowSplit(), layer.device)
    return PendingPlan(split, 0, RowLimit(layer.device, range(layer.num_ranks)), room, choices)


# --- stand-alone kernels ----------------------------------------------------------------------------------------------


class SharedTensors:
    """The tensors that ranks read from and write to each other, concatenated over ranks."""

    def __init__(self, layer: RanksLayer) -> None:
        _, T, H, _, E, K = layer.size
        num_entries = layer.num_ranks * T * K
        self.x, self.dy, self.weight = (torch.cat(list(of)) for of in (layer.x_RTH, layer.dy_RTH, layer.weight_RTK))
        self.routings = [route(expert_TK, E) for expert_TK in layer.expert_RTK]
        self.entry = torch.cat([routing.entry_P for routing in self.routings])
        self.rows_home = self.x.new_empty(num_entries, H)
        self.dweight_home = self.weight.new_empty(num_entries)


class StandAloneRun:
    """One rank with stand-alone kernels: forward and backward in stages, and their results."""

    def __init__(self, layer: RanksLayer, rank: int, shared: SharedTensors, link: Tensor | None) -> None:
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
        self._routing = SortedRouting(in_order_N, in_order_N[:, None], table.first_G1)
        self._tiles = RowTiles(table.first_G1, num_rows)
        self._blocks = blocks_of(ShapeClass.of(layer.x_RTH[rank], self._down, num_rows, ACTIVATION), device)
        self._gradients = [torch.empty_like(of, dtype=torch.float32) for of in (self._gate_up, self._down)]
        self.results: dict[str, Tensor] = {}

    def stages(self, direction: str) -> Stages[None]:
        """Runs a direction; a backward belongs to the last forward."""
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
            1,
            activation=ACTIVATION,
            block=blocks.up,
        )
        tiles = self._tiles.of(blocks.down)
        self._push(grouped_gemm(a_NI, self._down, first_G1, tiles, blocks.down, transposed=True))
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
            RowGroups(first_G1, self._tiles.of(block)),
            ACTIVATION,
            block,
        )
        block = blocks.input_gradient
        tiles = self._tiles.of(block)
        dx_NH = grouped_gemm(dh_NU, self._gate_up, first_G1, tiles, block, transposed=False)
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
    """Returns the runs of all ranks, which share this device; ``links``: the paced link of each rank, or None."""
    shared = SharedTensors(layer)
    return [StandAloneRun(layer, rank, shared, link) for rank, link in enumerate(links)]
