"""Dispatch, experts and combine as two MegaKernels per direction: pulls, products and pushes overlap by themselves.

This file calls the kernels of ``kernels.mega``, and keeps what backward needs of forward. Rows arrive in expert order,
so that they are never sorted again, and every row is computed as ``experts_triton`` computes it: no point of the search
space changes a bit.

A kernel that waits for a peer occupies its multiprocessors, and virtual ranks share one GPU, where the peer may need
them. Therefore a direction is a generator of *stages*. It pauses where the next kernel needs that all ranks have
completed a kernel, or that their kernels are resident:

- announced: from here on rows are pulled from peers, by kernels that fill the GPU;
- fetched and multiplied: from here on programs wait for those of peers, which must be able to come beside them. So a
  rank has no more programs than its share of the multiprocessors, of each of which one program may need all: what a
  rank launches finds its own share free, whoever else waits. And all ranks launch the same kernels in this stage, as
  one that is loaded first may have to wait for all that runs;
- combined: the kernels that follow wait for no peer, and are launched once all that peers wait for are resident.

Ranks that have a device each run without a pause (``at_once``): their waiting kernels keep no peer's from running.

T tokens of this rank, H hidden, I expert width, K top-k, N rows here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesys.collectives import guarded
from moesys.config import ModelShape
from moesys.config.overlap import MegaKernel
from moesys.frames import Position, call_bits
from moesys.kernels.experts.products import INTERPRETED
from moesys.kernels.experts.tile_config import TileConfigs
from moesys.kernels.experts.tiles import groups_by_size
from moesys.kernels.experts.weight_gradient import OrderedGroups, WeightGradients
from moesys.kernels.launch import to_device
from moesys.kernels.mega.arguments import MegaMemory, MegaRows, announce, arrange, publish
from moesys.kernels.mega.exchange import Replicas, most_flags, regions
from moesys.kernels.mega.mega_combine import down_combine, input_gradient_combine, routing_weight_gradients
from moesys.kernels.mega.mega_dispatch import dispatch_activation_gradient, dispatch_up
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.mega.tasks import TaskTime, TaskTimes
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts
from moesys.kernels.symmetric.heap import Heap, require_no_capture
from moesys.layout import ExpertLayout, TokenPlan
from moesys.limits import too_many_rows
from moesys.load import IntArray
from moesys.overlap.comm.record import Recorder, SpanRecord, stage
from moesys.overlap.device_routes import DeviceSplit, PendingPlan, RowLimit, device_split, room_for_rows
from moesys.overlap.exact_sum import BlockSums
from moesys.overlap.executor import (
    DeviceLaunch,
    Executor,
    ExpertCompute,
    ExpertGradients,
    HeldExperts,
    HostPlan,
    LayerContext,
    SavedTensors,
    WaitForExperts,
)
from moesys.overlap.experts_triton import ACTIVATION, stacked, write_gradients

# The most kernels that a rank compiles at a time, each of which takes seconds.
COMPILERS = 8

Result = TypeVar("Result")
Stages = Generator[None, None, Result]


def at_once(stages: Stages[Result]) -> Result:
    """Runs a direction of this rank on the current stream, without a pause, and returns its result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result


def task_spans(tasks: Sequence[TaskTime], expert_G: Sequence[int]) -> Iterator[SpanRecord]:
    """Yields two spans of each task, by when they began: ``wait``, from when it was taken until it was ready, and then
    its kind. ``expert_G``: the expert of each group of the rank.
    """
    for task in sorted(tasks, key=lambda task: task.start_us):
        lane = f"program {task.program:03d}"
        detail = task.launch if task.group < 0 else f"{task.launch}, expert {expert_G[task.group]}"
        yield SpanRecord(lane, "wait", task.start_us, task.ready_us, f"{task.kind}, {detail}")
        yield SpanRecord(lane, task.kind, task.ready_us, task.end_us, detail)


class MegaExecutor(Executor):
    """Runs plans of hosts, or of devices where ``Strategy.plans_on_device`` allows it: then counts travel, and the plan
    is made, in the forward of a MegaKernel.
    """

    def __init__(self, layer: LayerContext, compute: ExpertCompute) -> None:
        super().__init__(layer, compute)
        self.overlap = cast(MegaKernel, layer.strategy.overlap)
        if layer.strategy.plans_on_device:
            self.planned_by = "devices"
        # Tables of the newest layout, on the device since it was settled.
        self._tables: tuple[ExpertLayout, DeviceSplit, Replicas] | None = None

    def run(self, expert_TK: Tensor, planned: HostPlan) -> MegaKernelRun:
        layer, channel = self.layer, self.layer.channel
        tokens, heaps = planned.plan.tokens, self._heaps(expert_TK.device)
        at = (expert_TK, tokens, channel.rank, planned.most_tokens, channel.recorder)
        run = plan_mega(self.overlap, layer.shape, heaps, *at)
        run.sums = layer.sums_of(planned.plan, expert_TK.device)
        return run

    def launch(self, expert_TK: Tensor, layout: ExpertLayout, at: Position) -> DeviceLaunch:
        layer, channel, device = self.layer, self.layer.channel, expert_TK.device
        with channel.meter.planning():
            if self._tables is None or self._tables[0] is not layout:
                split = device_split(layout, layer.cluster, layer.strategy.split, device)
                self._tables = layout, split, replicas_of(layout, channel.rank, device)
            _, split, replicas = self._tables
            parts = (expert_TK, split, replicas, at.number, channel.recorder)
            run, pending = plan_mega_later(self.overlap, layer.shape, self._heaps(device), *parts)
        pending.call = call_bits(channel.identity, at)
        channel.generation += 1
        return DeviceLaunch(run, pending, pending.check)

    def _heaps(self, device: torch.device) -> MegaHeaps:
        """Returns the heaps that the layers of a linked model share, which the first run of a MegaKernel makes."""
        channel, shared = self.layer.channel, self.layer.shared_memory
        if "mega" not in shared:
            shared["mega"] = MegaHeaps(channel.group, device, self.overlap.timeout_s or channel.timeout_s)
        return cast(MegaHeaps, shared["mega"])


class MegaHeaps:
    """The memory in which the MegaKernels of a group's layers exchange rows: one heap for each shape of rows, which
    layers use in turn, since an epoch ends before the next begins (``kernels.mega.exchange.regions``). A heap grows, on
    all ranks at once, when a micro-batch needs more: to at least twice the size that was too small, so that sizes that
    grow slowly seldom make a new one.

    Raises RuntimeError on the CPU where Triton does not interpret.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> None:
        if device.type == "cpu" and not INTERPRETED.value:
            raise RuntimeError(
                "overlap=MegaKernel() runs on GPUs; on the CPU use Sequential() or Pipelined(), or start Python with "
                "TRITON_INTERPRET=1, which runs it slowly in Triton's interpreter"
            )
        self._group, self._device, self._timeout_s = group, device, timeout_s
        self.members = dist.get_process_group_ranks(group) if group is not None else [0]
        self.num_ranks = len(self.members)
        self.limit = RowLimit(device, self.members)
        self._memory: dict[tuple[int, int, torch.dtype], tuple[tuple[int, int, int], MegaMemory]] = {}

    def memory(self, model: ModelShape, tokens: int, flags: int) -> MegaMemory:
        """Returns the memory of layers like ``model``, for at most so many tokens on any rank and flags of any source.
        A collective: all ranks ask for the same.

        Raises RuntimeError where it would have to grow while a CUDA graph is captured.
        """
        kind, wanted = (model.top_k, model.hidden_size, getattr(torch, model.dtype)), (tokens, flags, model.num_experts)
        sizes, memory = self._memory.get(kind, ((0, 0, 0), None))
        if memory is None or any(more > size for more, size in zip(wanted, sizes, strict=True)):
            require_no_capture("the arena of a MegaKernel")
            tokens, flags, num_experts = (
                size if more <= size else max(more, 2 * size) for more, size in zip(wanted, sizes, strict=True)
            )
            if memory is not None:
                # A peer's kernels may raise flags in the old memory after this rank's have ended.
                memory.watch.wait()
                memory.meet()
            # The old memory is freed first, as both may not fit.
            self._memory.pop(kind, None)
            memory = None
            shared = regions(tokens, *kind, self.num_ranks, flags)
            shared = {**shared, **count_regions(self.num_ranks, num_experts)}
            heap = Heap.of_group(shared, self._group, self._device, self._timeout_s)
            memory = MegaMemory(heap) if self._group is None else MegaMemory(heap, self._meet)
            self._memory[kind] = ((tokens, flags, num_experts), memory)
        return memory

    def _meet(self) -> None:
        barrier = partial(dist.barrier, self._group)
        guarded("a meeting of ranks for a MegaKernel", self._group, barrier, device_type=self._device.type)

    def check(self) -> None:
        """Waits for the device. Raises ``PeerTimeoutError`` if any micro-batch until now was given up, and ValueError
        if a plan that a device made had too many rows for a rank.
        """
        self.limit.wait()
        for _, memory in self._memory.values():
            memory.watch.wait()


def plan_mega(
    overlap: MegaKernel,
    model: ModelShape,
    heaps: MegaHeaps,
    expert_TK: Tensor,
    plan: TokenPlan,
    rank: int,
    most_tokens: int,
    recorder: Recorder | None = None,
) -> MegaKernelRun:
    """Returns the run of one micro-batch; ``most_tokens``: the tokens of the rank with most. A collective.

    Raises ValueError, on all ranks alike, where one would get more rows than ``overlap.rows_cap`` allows, or tiles
    would change bits.
    """
    device = expert_TK.device
    if words := too_many_rows(overlap, plan, most_tokens, model.top_k, heaps.members):
        raise ValueError(words)
    replicas = replicas_of(plan.layout, rank, device)
    blocks, flags = _blocks_and_flags(overlap, model, most_tokens, len(replicas.rank_P), device)
    blocks.require_warpgroups(getattr(torch, model.dtype), device)
    return MegaKernelRun(
        expert_TK,
        model.num_experts,
        tokens_by_replica(plan, device),
        replicas,
        int(plan.tokens_R[rank]),
        heaps.memory(model, most_tokens, flags),
        blocks,
        overlap,
        recorder,
        lists_by_replica(plan, device),
    )


def plan_mega_later(
    overlap: MegaKernel,
    model: ModelShape,
    heaps: MegaHeaps,
    expert_TK: Tensor,
    split: DeviceSplit,
    replicas: Replicas,
    turn: int,
    recorder: Recorder | None = None,
) -> tuple[MegaKernelRun, PendingPlan]:
    """Returns the run of one micro-batch, and its plan, which forward makes on the device by ``split``, for at most
    ``overlap.most_tokens`` on any rank. A collective where the heap is still too small; otherwise no rank waits for
    another here.

    Raises ValueError, on this rank alone, for more tokens than that; on all ranks, where tiles would change bits.
    """
    num_tokens, most_tokens = len(expert_TK), overlap.most_tokens or 0
    if num_tokens > most_tokens:
        raise ValueError(
            f"{num_tokens} tokens of a rank, but most_tokens={most_tokens}, for which all ranks have memory; "
            f"use MegaKernel(most_tokens={num_tokens}), or None where nobody knows"
        )
    blocks, flags = _blocks_and_flags(overlap, model, most_tokens, len(replicas.rank_P), expert_TK.device)
    blocks.require_warpgroups(getattr(torch, model.dtype), expert_TK.device)
    memory = heaps.memory(model, most_tokens, flags)
    room = room_for_rows(overlap, most_tokens, model.top_k, heaps.num_ranks)
    pending = PendingPlan(split, turn, heaps.limit, room, most_tokens * model.top_k)
    executor = MegaKernelRun(expert_TK, model.num_experts, pending, replicas, room, memory, blocks, overlap, recorder)
    return executor, pending


def _blocks_and_flags(
    overlap: MegaKernel, model: ModelShape, most_tokens: int, num_replicas: int, device: torch.device
) -> tuple[TileConfigs, int]:
    """Returns how the products are cut into tiles, and the most flags that any source needs."""
    blocks = blocks_at(overlap, ACTIVATION, getattr(torch, model.dtype), device)
    column_tiles = -(-model.hidden_size // min(blocks.down.columns, blocks.input_gradient.columns))
    return blocks, most_flags(most_tokens, model.top_k, num_replicas, blocks.down.rows, column_tiles)


@dataclass
class MegaKernelRun:
    """Runs one micro-batch of one layer on one rank by MegaKernels.

    ``plan``: the host's, int64 [R, P], or one that each forward makes of all ranks' counts. ``list_RP``: of the host's,
    where a source's tokens for a replica begin in its list (``exchange``). ``sums``: of weight gradients, where layouts
    may not show; these are then launches of their own. ``num_rows``: what it sends here, or may send at most.
    ``blocks``: all of as many rows. ``recorder`` gets spans of every task while it is enabled.
    """

    expert_TK: Tensor
    num_experts: int
    plan: Tensor | PendingPlan
    replicas: Replicas
    num_rows: int
    memory: MegaMemory
    blocks: TileConfigs
    point: MegaKernel
    recorder: Recorder | None = None
    list_RP: Tensor | None = None
    sums: BlockSums | None = None
    _rows: MegaRows | None = field(default=None, init=False)

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, SavedTensors]:
        """Returns the output [T, H] in x's dtype, and h in expert order, with rows of x where the point keeps them,
        else x itself.

        Raises ``PeerTimeoutError``: on the CPU if a rank waited in vain; on a GPU if one did in a direction before,
        as far as the host knows by now (``MegaHeaps.check`` waits until it knows). ValueError, in the same way, if a
        device's plan has too many rows for a rank.
        """
        return at_once(self.forward_stages(x_TH, weight_TK, wait_for_experts))

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, SavedTensors]:
        """Returns what ``forward`` does, whether it is ``read`` or not: it is not proven in which state a heap's epochs
        are after rows that were not pushed back.
        """
        return self.forward(x_TH, weight_TK, wait_for_experts)

    def forward_stages(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts
    ) -> Stages[tuple[Tensor, SavedTensors]]:
        """Runs ``forward`` stage by stage."""
        memory, blocks, point, device = self.memory, self.blocks, self.point, x_TH.device
        self._look()
        held: HeldExperts | None = None
        if not (INTERPRETED.value or x_TH.is_meta or (point, self.num_experts) in memory.compiled):
            # Compiled before anything is published: peers may then wait on their hosts, and not in kernels that time
            # out.
            held = wait_for_experts()
            self._compile(x_TH, held)
            memory.meet()
            memory.compiled.add((point, self.num_experts))
        with self._recording():
            with stage("publish x", device):
                origin = None
                if isinstance(self.plan, PendingPlan):
                    # Plans without a call are not checked: their tokens may have ids that name no expert.
                    origin = Origin(self.plan.call, self.expert_TK.numel()) if self.plan.call else Origin()
                routing = announce(memory, self.expert_TK, self.num_experts, {"x": x_TH}, origin)
            yield
            with stage("arrange", device):
                tokens_RP, row_tile = self._tokens_RP(), blocks.up.rows
                rows = self._rows = arrange(
                    memory, routing, tokens_RP, self.replicas, self.num_rows, row_tile, point, self.list_RP
                )
            experts = stacked(wait_for_experts() if held is None else held)
            with stage("dispatch and up", device):
                x_NH, h_NU, a_NI = dispatch_up(memory, rows, experts, blocks.up, point)
            yield
            with stage("down and combine", device):
                y_TH = down_combine(memory, rows, a_NI, experts, weight_TK.contiguous(), blocks.down, point)
            yield
        noted = self._note(y_TH)
        if isinstance(self.plan, PendingPlan):
            self.plan.noted = noted
        return y_TH, SavedTensors(x_NH if point.keep_x else x_TH, h_NU, weight_TK)

    def backward(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None. Raises as ``forward`` does.
        """
        return at_once(self.backward_stages(dy_TH, saved, wait_for_experts, gradients))

    def backward_stages(
        self, dy_TH: Tensor, saved: SavedTensors, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> Stages[tuple[Tensor, Tensor]]:
        """Runs ``backward`` stage by stage."""
        rows, memory, blocks, point, device = self._rows, self.memory, self.blocks, self.point, dy_TH.device
        assert rows is not None
        self._look()
        with self._recording():
            with stage("publish dy", device):
                # Peers may compute weight gradients even if this rank does not.
                again = {} if point.keep_x else {"x_again": saved.arrivals_MH}
                publish(memory.heap, memory.epoch_1, {"x": dy_TH, "weight": saved.weight_TK, **again})
            yield
            held = wait_for_experts()
            experts = stacked(held)
            with stage("dispatch and activation gradient", device):
                x_again = not point.keep_x and gradients is not None
                dy_NH, dh_NU, wa_NI, partial_NS, x_NH = dispatch_activation_gradient(
                    memory, rows, experts, saved.h_P2I, blocks.activation_gradient, point, x_again
                )
            yield
            outer = fused = None
            if gradients is not None:
                x_NH = saved.arrivals_MH if x_NH is None else x_NH
                outer = WeightGradients(dh_NU, x_NH, gradients.gate_up, dy_NH, wa_NI, gradients.down)
                if point.overlap_weight_gradients and gradients.gate_up is not None:
                    # The gradients of adapters are still to be written, by launches of their own.
                    fused, outer = outer, outer._replace(dgate_up_GUH=None, ddown_GHI=None)
            with stage("input gradient and combine", device):
                dx_TH = input_gradient_combine(memory, rows, dh_NU, experts, partial_NS, fused, blocks, point)
            yield
            dweight_TK = routing_weight_gradients(memory, rows)
            if outer is not None and (fused is None or held.adapters is not None):
                with stage("weight gradients", device):
                    in_order, first_G1 = (
                        torch.arange(len(dh_NU), dtype=torch.int32, device=device),
                        rows.exchange.first_G1,
                    )
                    groups = OrderedGroups(in_order, first_G1, groups_by_size(first_G1))
                    write_gradients(1, experts, blocks, self.sums, held.adapters, groups, outer)
        written = *(gradients or ()), *(() if held.adapters is None else held.adapters.gradients)
        self._note(dx_TH, dweight_TK, *(each for each in written if each is not None))
        return dx_TH, dweight_TK

    def _compile(self, x_TH: Tensor, experts: HeldExperts) -> None:
        """Compiles the kernels of both directions, side by side: on the meta device they do not run."""
        import triton

        replicas, heap = Replicas(*(table.to("meta") for table in self.replicas)), self.memory.heap.on_meta()
        plan = torch.empty(heap.num_ranks, len(replicas.rank_P), dtype=torch.int64, device="meta")
        expert_TK, x_TH = self.expert_TK.to("meta"), x_TH.to("meta")
        matrices = experts.stacked()[:2]
        # The gradients of an expert lie in one vector, even if its matrices do not.
        num_elements = sum({of.stride(0) for of in matrices})
        weights = [torch.empty_strided(of.shape, of.stride(), dtype=x_TH.dtype, device="meta") for of in matrices]
        gradients = [
            torch.empty_strided(of.shape, (num_elements, *of.stride()[1:]), dtype=torch.float32, device="meta")
            for of in matrices
        ]
        adapters = None if experts.adapters is None else experts.adapters.on_meta()
        held = cast(HeldExperts, SimpleNamespace(stacked=lambda: weights, adapters=adapters))
        memory, pace = MegaMemory(heap), self.memory.pace
        memory.pace = None if pace is None else pace.to("meta")
        dry = replace(self, expert_TK=expert_TK, plan=plan, replicas=replicas, memory=memory, recorder=None)
        weight_TK = torch.empty(expert_TK.shape, dtype=torch.float32, device="meta")
        with ThreadPoolExecutor(COMPILERS) as pool, triton.AsyncCompileMode(pool), torch.cuda.device_of(self.expert_TK):
            y_TH, saved = dry.forward(x_TH, weight_TK, lambda: held)
            for wanted in (ExpertGradients(*gradients), None):
                dry.backward(y_TH, saved, lambda: held, wanted)

    def _tokens_RP(self) -> Tensor:
        if not isinstance(self.plan, PendingPlan):
            return self.plan
        memory = self.memory
        return self.plan.make(receive_counts(memory.heap, memory.epoch_1, memory.exchanges_R, self.num_experts))

    def _look(self) -> None:
        if isinstance(self.plan, PendingPlan):
            self.plan.limit.look()
        self.memory.watch.look()

    def _note(self, *outputs: Tensor) -> torch.cuda.Event | None:
        # Time-outs are noted first, because counts mean nothing after one.
        self.memory.watch.note(outputs)
        return self.plan.limit.note() if isinstance(self.plan, PendingPlan) else None

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Records the task times of what is launched inside."""
        recorder, replicas = self.recorder, self.replicas
        if recorder is None or not recorder.enabled:
            yield
            return
        times = self.memory.times = TaskTimes()
        try:
            yield
        finally:
            self.memory.times = None
        recorder.add_later(lambda: task_spans(times.read(), replicas.expert_P[replicas.own_G].tolist()))


def replicas_of(layout: ExpertLayout, rank: int, device: torch.device) -> Replicas:
    """Returns the replicas of a layout; duplicates of an expert on one rank share the work of the first."""
    expert_P, rank_P = np.nonzero(layout.replicas_RE.T)
    place = {(int(r), int(e)): p for p, (e, r) in enumerate(zip(expert_P, rank_P, strict=True))}
    own = [place[rank, expert] for expert in layout.held_by_rank[rank]]
    return Replicas(*(to_device(values, device) for values in (rank_P, expert_P, own)))


def tokens_by_replica(plan: TokenPlan, device: torch.device) -> Tensor:
    """Returns what each source sends to each replica, int64 [R, P]."""
    return _by_replica(plan, plan.entries[:, 3], device)


def lists_by_replica(plan: TokenPlan, device: torch.device) -> Tensor:
    """Returns where in the list of each source the tokens for each replica begin, int64 [R, P]."""
    # Entries are sorted by source and expert, and then in the order of the source's list.
    source, tokens = plan.entries[:, 0], plan.entries[:, 3]
    before = np.cumsum(tokens) - tokens
    return _by_replica(plan, before - before[np.searchsorted(source, source)], device)


def _by_replica(plan: TokenPlan, of_entry: IntArray, device: torch.device) -> Tensor:
    index_RE = np.full((plan.layout.num_ranks, plan.layout.num_experts), -1)
    expert_P, rank_P = np.nonzero(plan.layout.replicas_RE.T)
    index_RE[rank_P, expert_P] = np.arange(len(rank_P))
    source, expert, destination, _ = plan.entries.T
    found_RP = np.zeros((plan.layout.num_ranks, len(rank_P)), dtype=np.int64)
    found_RP[source, index_RE[destination, expert]] = of_entry
    return to_device(found_RP, device)
