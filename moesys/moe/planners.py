"""Planners: who computes what in one micro-batch, and where rows are sent, from the choices of its tokens.

Four, of which a layer has one for good (``planner_of``): ``AlonePlanner``, where one rank needs no counts on the host;
``HostPlanner``, where hosts exchange counts and plan; ``MegaPlanner`` and ``ChunkPlanner``, where devices do, for
MegaKernels and for messages.

T tokens of this rank, K top-k, E experts, C chunks, R ranks.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.balance.layout_schedule import LayoutSchedule
from moesys.balance.plan import LayerPlan, plan_layer
from moesys.config import ClusterSpec, LayoutInvariant, MegaKernel, ModelShape, Pipelined, Sequential, Strategy
from moesys.kernels.host_copies import HostCopy, to_device
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.moe.agreement import agreed
from moesys.moe.lookahead import Lookahead
from moesys.moe.shards import ExpertShards
from moesys.moe.token_blocks import check_blocks
from moesys.moe.unread_plans import DevicesPlan, SingleRankPlan
from moesys.overlap.block_sums import BlockSums
from moesys.overlap.chunked import ChunkedExecutor
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position, call_bits
from moesys.overlap.executor import Executor
from moesys.overlap.expert_compute import ExpertCompute
from moesys.overlap.node_routes import build_node_routes, gates_of
from moesys.overlap.routes import build_routes, chunk_counts, no_expert, rows_by_chunk
from moesys.schedule import num_chunks

if TYPE_CHECKING:
    from moesys.kernels.mega.exchange import Replicas
    from moesys.kernels.split.chunks import OwnReplicas
    from moesys.overlap.device_routes import RoutedPlan
    from moesys.overlap.device_split import DeviceSplit, PendingPlan
    from moesys.overlap.mega_executor import MegaHome

    _Launched = tuple[Executor, PendingPlan | RoutedPlan, Callable[[], None] | None]


@dataclass(frozen=True)
class MicroBatch:
    """What a layer wants planned.

    expert_TK: the choices of this rank's tokens, int64 [T, K]. compute: how experts are computed. learning: layouts may
    change, and the schedule learns from the micro-batch. upcoming: of the layers that come next, whose layouts are
    settled too. token_block: in training every rank's tokens are a multiple of it, if anything. flags: the flags of
    the forward (``frames.Position``).
    """

    expert_TK: Tensor
    compute: ExpertCompute
    learning: bool
    upcoming: Sequence[LayoutSchedule]
    lookahead: Lookahead
    token_block: int | None = None
    flags: int = 0


class Planned(NamedTuple):
    """``counts``: to be called once, when forward is launched; gives the choices of each expert, int64 [E], on all
    ranks. None where nobody learns from the micro-batch. ``check``: waits for the device, and raises the errors
    that the host did not know of when forward was launched; None if it knows all of them.
    """

    executor: Executor
    plan: LayerPlan | SingleRankPlan | DevicesPlan
    counts: Callable[[], Tensor] | None
    check: Callable[[], None] | None = None


@dataclass
class Planner(ABC):
    """Plans the micro-batches of one layer on one rank, over the layouts of ``schedule``."""

    strategy: Strategy
    shape: ModelShape
    cluster: ClusterSpec
    schedule: LayoutSchedule
    shards: ExpertShards
    channel: Channel

    @abstractmethod
    def plan(self, batch: MicroBatch) -> Planned:
        """Plans a micro-batch, and settles the layouts of the layers that come next."""

    def check(self) -> None:  # noqa: B027
        """Raises errors of micro-batches that the host did not know of when it launched them; here there are none."""

    def _mega_home(self, overlap: MegaKernel, batch: MicroBatch) -> MegaHome:
        timeout_s = overlap.timeout_s or self.channel.timeout_s
        return batch.lookahead.mega_home.get(self.channel.group, batch.expert_TK.device, timeout_s)


@dataclass
class AlonePlanner(Planner):
    """One rank: nothing is planned, and counts stay on the device until they are read. Where ``compute`` must know
    them, ``counting`` plans.
    """

    counting: Planner

    def __post_init__(self) -> None:
        # For each micro-batch: the number of choices that name an expert, which the device counts, and of all choices.
        self._counted: deque[tuple[HostCopy, int]] = deque()

    def plan(self, batch: MicroBatch) -> Planned:
        with self.channel.meter.planning():
            executor = batch.compute.alone(batch.expert_TK, self.shape.num_experts)
        if executor is None:
            return self.counting.plan(batch)
        if not (batch.expert_TK.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._counted.append((HostCopy(executor.routing.first_G1[-1:]), batch.expert_TK.numel()))
            # While a graph is captured, to ask whether a count has arrived would break the capture.
            self.check(wait=False)
        if batch.token_block is not None and batch.learning:
            check_blocks([len(batch.expert_TK)], batch.token_block, self.channel.members)
        schedule, reduction = self.schedule, self.strategy.reduction
        if isinstance(reduction, LayoutInvariant):
            all_experts = tuple(range(self.shape.num_experts))
            tell = partial(schedule.tell, micro_batch=schedule.micro_batch)
            sums = BlockSums(reduction.block_rows, all_experts, executor.tokens_E, self.channel, tell)
            executor = replace(executor, sums=sums)
        plan = SingleRankPlan(
            self.strategy, self.shape, self.cluster, schedule.layout, schedule.micro_batch, executor.tokens_E
        )
        if batch.learning:
            schedule.advance()
        return Planned(executor, plan, (lambda: plan.tokens_E) if batch.learning else None, self.check)

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
            raise no_expert(found, self.shape.num_experts, self.schedule.layer)


@dataclass
class HostPlanner(Planner):
    """Hosts exchange counts, agree on layouts, and each makes the same plan."""

    def plan(self, batch: MicroBatch) -> Planned:
        schedule, overlap, expert_TK, learning = self.schedule, self.strategy.overlap, batch.expert_TK, batch.learning
        deciding = [schedule, *batch.upcoming]
        deadline_s = time.monotonic() + batch.lookahead.plan_timeout_s
        votes = [not learning or each.ready(deadline_s) for each in deciding]
        invalid = self._invalid_id(expert_TK)
        valid_TK = expert_TK if invalid is None else torch.zeros_like(expert_TK)
        counts_CE = chunk_counts(valid_TK, self.shape.num_experts, num_chunks(overlap)).int()
        of_ids = [0, 0] if invalid is None else [1, max(-(2**31), min(invalid, 2**31 - 1))]
        said = torch.tensor([*of_ids, len(expert_TK), *votes], dtype=torch.int32, device=counts_CE.device)
        at = Position("forward", schedule.micro_batch, batch.flags)
        gathered_RN = self.channel.all_gather(torch.cat([counts_CE.flatten(), said]), lane="counts", at=at).cpu().long()
        tokens_RCE = gathered_RN[:, : counts_CE.numel()].view(-1, *counts_CE.shape)
        said_RN = gathered_RN[:, counts_CE.numel() :]
        self._check_ids(said_RN[:, :2].tolist())
        if batch.token_block is not None and learning:
            check_blocks(said_RN[:, 2].tolist(), batch.token_block, self.channel.members)
        if learning:
            _commit(deciding, said_RN[:, 3:])
        load = LoadMatrix(tokens_RCE.sum(dim=1).numpy())

        def make() -> LayerPlan:
            plan = plan_layer(
                self.strategy, self.shape, self.cluster, load, layout=schedule.layout, turn=schedule.micro_batch
            )
            if learning:
                schedule.observe(load)
            return plan

        with self.channel.meter.planning():
            by_own_code = self.strategy.balance.own_code or self.strategy.split.own_code
            plan = _agreed_plan(make, self.channel, counts_CE.device) if by_own_code else make()
            if isinstance(overlap, MegaKernel):
                executor = self._mega_executor(overlap, batch, plan, most_tokens=int(said_RN[:, 2].max()))
            else:
                executor = self._chunked_executor(batch, plan, tokens_RCE)
        return Planned(executor, plan, (lambda: torch.from_numpy(load.tokens_E)) if learning else None)

    def _invalid_id(self, expert_TK: Tensor) -> int | None:
        """Returns an id of this rank that names no expert; None if there is none."""
        if not expert_TK.numel():
            return None
        least, most = (int(each) for each in expert_TK.aminmax())
        return least if least < 0 else most if most >= self.shape.num_experts else None

    def _check_ids(self, invalid_R2: Sequence[Sequence[int]]) -> None:
        """Raises ValueError on all ranks if any rank has an id that names no expert."""
        for rank, (invalid, expert) in zip(self.channel.members, invalid_R2, strict=True):
            if invalid:
                found = f"expert_TK of rank {rank} has the id {expert}"
                raise no_expert(found, self.shape.num_experts, self.schedule.layer)

    def _chunked_executor(self, batch: MicroBatch, plan: LayerPlan, tokens_RCE: Tensor) -> Executor:
        tokens_CRE = np.ascontiguousarray(tokens_RCE.numpy().swapaxes(0, 1))
        overlap, channel = self.strategy.overlap, self.channel.tagged(self.channel.generation)
        assert isinstance(overlap, Sequential | Pipelined)
        parts = batch.expert_TK, tokens_CRE, plan.tokens, channel.rank, batch.compute.min_rows
        block_sums = self._block_sums(plan, batch.expert_TK.device)
        at = (channel, batch.compute, self.shards.memory)
        if not overlap.crosses_once(channel.num_nodes):
            return ChunkedExecutor(overlap, build_routes(*parts), *at, sums=block_sums)
        sums = overlap.sums_by_node(channel.num_nodes)
        routes = build_routes(*parts, gates_of(channel.rank, channel.node_of_rank), collect=sums)
        rows_CRR = rows_by_chunk(tokens_CRE, plan.tokens)
        top_k = batch.expert_TK.shape[1]
        node_routes = build_node_routes(routes, rows_CRR, top_k, self.shape.row_bytes, channel, sums=sums)
        return ChunkedExecutor(overlap, routes, *at, node_routes, block_sums)

    def _block_sums(self, plan: LayerPlan, device: torch.device) -> BlockSums | None:
        """Returns how weight gradients are summed where layouts may not show."""
        reduction = self.strategy.reduction
        if not isinstance(reduction, LayoutInvariant):
            return None
        tell = partial(self.schedule.tell, micro_batch=plan.turn)
        channel = self.channel.tagged(self.channel.generation)
        return BlockSums.of(plan.tokens, reduction.block_rows, channel, tell, device)

    def _mega_executor(self, overlap: MegaKernel, batch: MicroBatch, plan: LayerPlan, most_tokens: int) -> Executor:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.mega_executor import plan_mega

        home, recorder = self._mega_home(overlap, batch), self.channel.recorder
        rank = self.channel.rank
        executor = plan_mega(overlap, self.shape, home, batch.expert_TK, plan.tokens, rank, most_tokens, recorder)
        executor.sums = self._block_sums(plan, batch.expert_TK.device)
        return executor


@dataclass
class DevicePlanner(Planner):
    """Devices exchange counts and plan. Hosts meet only to agree on layouts that are due."""

    def plan(self, batch: MicroBatch) -> Planned:
        schedule, device = self.schedule, batch.expert_TK.device
        if batch.learning:
            self._agree([schedule, *batch.upcoming], batch.lookahead.plan_timeout_s, device)
        layout, turn = schedule.layout, schedule.micro_batch
        executor, pending, check = self._launch(batch, layout, turn)
        plan = DevicesPlan(layout, pending)
        if not batch.learning:
            return Planned(executor, plan, None, check)
        schedule.record(plan.load)

        def counts() -> Tensor:
            tokens_E = plan.tokens_E
            schedule.request()
            return tokens_E

        return Planned(executor, plan, counts, check)

    @abstractmethod
    def _launch(self, batch: MicroBatch, layout: ExpertLayout, turn: int) -> _Launched:
        """Returns the executor of the micro-batch, its plan, which a device makes now or in the forward, and
        ``Planned.check``.
        """

    def _agree(self, deciding: Sequence[LayoutSchedule], timeout_s: float, device: torch.device) -> None:
        """All ranks use the layouts that are due, or none does. Where none is due nobody waits: ranks know alike."""
        if not any(schedule.due for schedule in deciding):
            return
        deadline_s = time.monotonic() + timeout_s
        votes = to_device([schedule.ready(deadline_s) for schedule in deciding], device)
        at = Position("agreement on a layout", deciding[0].micro_batch)
        _commit(deciding, self.channel.all_gather(votes, lane="counts", at=at).cpu())


@dataclass
class MegaPlanner(DevicePlanner):
    """Counts travel, and the plan is made, in the forward of a MegaKernel, as ``Strategy.plans_on_device`` allows."""

    def __post_init__(self) -> None:
        # Tables of the newest layout, on the device since it was settled.
        self._tables: tuple[ExpertLayout, DeviceSplit, Replicas] | None = None

    def _launch(self, batch: MicroBatch, layout: ExpertLayout, turn: int) -> _Launched:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.device_split import device_split
        from moesys.overlap.mega_executor import plan_mega_later, replicas_of

        overlap, expert_TK, channel = self.strategy.overlap, batch.expert_TK, self.channel
        assert isinstance(overlap, MegaKernel)
        with channel.meter.planning():
            if self._tables is None or self._tables[0] is not layout:
                split = device_split(layout, self.cluster, self.strategy.split, expert_TK.device)
                self._tables = layout, split, replicas_of(layout, channel.rank, expert_TK.device)
            _, split, replicas = self._tables
            home, recorder = self._mega_home(overlap, batch), channel.recorder
            planned = plan_mega_later(overlap, self.shape, home, expert_TK, split, replicas, turn, recorder)
        executor, pending = planned
        pending.call = call_bits(channel.identity, Position("forward", turn, batch.flags))
        channel.generation += 1
        return executor, pending, pending.check


@dataclass
class ChunkPlanner(DevicePlanner):
    """Counts travel as a message of the group, and devices make plan and routes (``Strategy.routes_on_device``).

    Where ``compute`` must know rows on the host, ``counting`` plans.
    """

    counting: Planner

    def __post_init__(self) -> None:
        # Tables of the newest layout, and chunks of as many tokens as there were last.
        self._tables: tuple[ExpertLayout, DeviceSplit, OwnReplicas] | None = None
        self._chunk_T1: Tensor | None = None

    def plan(self, batch: MicroBatch) -> Planned:
        return super().plan(batch) if batch.compute.by_tables else self.counting.plan(batch)

    def _launch(self, batch: MicroBatch, layout: ExpertLayout, turn: int) -> _Launched:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.device_routes import chunk_numbers, own_replicas, route_on_device
        from moesys.overlap.device_split import device_split

        overlap, channel, expert_TK = self.strategy.overlap, self.channel, batch.expert_TK
        chunks = num_chunks(overlap)
        if self._tables is None or self._tables[0] is not layout:
            split = device_split(layout, self.cluster, self.strategy.split, expert_TK.device)
            self._tables = layout, split, own_replicas(layout, channel.rank)
        if chunks > 1 and (self._chunk_T1 is None or len(self._chunk_T1) != len(expert_TK)):
            self._chunk_T1 = chunk_numbers(len(expert_TK), chunks, expert_TK.device)
        _, split, own = self._tables
        at = Position("forward", turn, batch.flags, expert_TK.numel())
        pending = route_on_device(expert_TK, self._chunk_T1, chunks, split, own, turn, at, channel)
        executor = ChunkedExecutor(overlap, pending, pending.channel, batch.compute, self.shards.memory)
        # No check is left: the host reads sizes and headers before it sends a message.
        return executor, pending.plan, None


def planner_of(
    strategy: Strategy,
    shape: ModelShape,
    cluster: ClusterSpec,
    schedule: LayoutSchedule,
    shards: ExpertShards,
    channel: Channel,
) -> Planner:
    """Returns the planner of one layer on one of the ranks of ``cluster``."""
    parts = (strategy, shape, cluster, schedule, shards, channel)
    planner = MegaPlanner(*parts) if strategy.plans_on_device else HostPlanner(*parts)
    if cluster.num_ranks == 1:
        return AlonePlanner(*parts, planner)
    return ChunkPlanner(*parts, planner) if strategy.routes_on_device(channel.num_nodes) else planner


def _commit(schedules: Sequence[LayoutSchedule], votes_RN: Tensor) -> None:
    """All ranks use the plans of a schedule that are due where every one of them has voted for it."""
    for schedule, vote in zip(schedules, votes_RN.amin(dim=0).tolist(), strict=True):
        schedule.commit(bool(vote))


def _agreed_plan(make: Callable[[], LayerPlan], channel: Channel, device: torch.device) -> LayerPlan:
    """Returns the plan that code which is not ours makes, where it is the same on every rank."""
    differing = (
        "planned differently from the same counts; let layout() and split() of your own be functions of the problem "
        "and their fields alone"
    )
    return agreed(make, _digest, channel, device, what="planning", differing=differing)


def _digest(plan: LayerPlan) -> bytes:
    digest = hashlib.sha256(plan.layout.fingerprint().encode())
    digest.update(plan.tokens.entries.astype("<i8").tobytes())
    return digest.digest()
