"""The layer that the MegaKernels' bench computes on several ranks, and a rank's way through it.

R ranks with T tokens each, H hidden, I expert width, E experts, K choices of a token, N rows of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.aot import Size
from moesys.balance.splits import split_tokens
from moesys.config import ClusterSpec, EvenSplit, FlowSplit, MegaKernel
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.mega.exchange import most_flags, regions
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.symmetric.counts import count_regions
from moesys.kernels.symmetric.heap import Region
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.device_split import PendingPlan, device_split
from moesys.overlap.held_experts import ExpertGradients, ExpertWeights
from moesys.overlap.mega_executor import MegaExecutor, replicas_of, tokens_by_replica
from moesys.overlap.row_limit import RowLimit, room_for_rows
from moesys.overlap.single_rank import ACTIVATION
from moesys.overlap.stages import Stages

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class OwnExperts:
    """Experts of a rank, as executors take them."""

    gate_up_SUH: Tensor
    down_SHI: Tensor

    def stacked(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_SUH, self.down_SHI)

    def __len__(self) -> int:
        return len(self.down_SHI)

    def __getitem__(self, slot: int) -> ExpertWeights:
        return ExpertWeights(self.gate_up_SUH[slot], self.down_SHI[slot])


@dataclass(frozen=True)
class RanksLayer:
    """Random inputs of all ranks, lists by rank; experts lie whole on their owners, E / R each."""

    size: Size
    x_RTH: Sequence[Tensor]
    dy_RTH: Sequence[Tensor]
    weight_RTK: Sequence[Tensor]
    expert_RTK: Sequence[Tensor]
    held_R: Sequence[OwnExperts]
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
        """Of the rows that come to a rank from others."""
        tokens_RER = self.plan.tokens_RER
        rows = int(tokens_RER[:, :, rank].sum() - tokens_RER[rank, :, rank].sum())
        return rows * self.size.H * self.x_RTH[rank].element_size()


def draw_layer(size: Size, num_ranks: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> RanksLayer:
    """``size.T`` tokens on every rank, whose choices are even. The same on every rank, and on any device.

    Raises ValueError where ranks would have different numbers of experts.
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
            OwnExperts(normal(each, 2 * I, H, scale=H**-0.5), normal(each, H, I, scale=I**-0.5))
            for _ in range(num_ranks)
        ],
        split_tokens(load, layout, ClusterSpec(ranks_per_node=num_ranks), EvenSplit()),
    )


def regions_of(layer: RanksLayer, points: Sequence[MegaKernel]) -> dict[str, Region]:
    """What the heap of these points needs."""
    _, _, H, _, E, K = layer.size
    dtype, flags = layer.x_RTH[0].dtype, 0
    for point in points:
        blocks = blocks_at(point, ACTIVATION, dtype, layer.device)
        column_tiles = -(-H // min(blocks.down.columns, blocks.input_gradient.columns))
        flags = max(flags, most_flags(layer.most_tokens, K, E, blocks.down.rows, column_tiles))
    shared = regions(layer.most_tokens, K, H, dtype, layer.num_ranks, flags)
    return {**shared, **count_regions(layer.num_ranks, E)}


class MegaRun:
    """One rank at one point: forward and backward in stages, and what came out. ``on_device``: its forward plans, by
    the exact split, which knows no other plan where experts have one holder.
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
        self._executor = MegaExecutor(
            layer.expert_RTK[rank],
            layer.size.E,
            plan,
            replicas_of(layer.plan.layout, rank, layer.device),
            num_rows,
            memory,
            blocks_at(point, ACTIVATION, self._x_TH.dtype, layer.device),
            point,
        )
        self._gradients = ExpertGradients(
            *(torch.empty_like(matrices, dtype=torch.float32) for matrices in self._held.stacked()[:2])
        )
        self.results: dict[str, Tensor] = {}

    def stages(self, direction: str) -> Stages[None]:
        """A backward is that of the last forward."""
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
    """With room for what is sent here, if that is more than is usual."""
    cluster, choices = ClusterSpec(ranks_per_node=layer.num_ranks), layer.most_tokens * layer.size.K
    usual = room_for_rows(MegaKernel(), layer.most_tokens, layer.size.K, layer.num_ranks)
    room = max(usual, int(layer.plan.tokens_R.max()))
    split = device_split(layer.plan.layout, cluster, FlowSplit(), layer.device)
    return PendingPlan(split, 0, RowLimit(layer.device, range(layer.num_ranks)), room, choices)
