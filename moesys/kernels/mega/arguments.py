"""The arguments of both MegaKernels: the memory of this rank that lasts, and the tables of one micro-batch.

R ranks, T tokens of this rank, K choices of each, N rows here in order of groups, G groups, M row tiles, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.mega.exchange import (
    Exchange,
    Flags,
    Replicas,
    TileSequence,
    combine_flags,
    exchange,
    first_rows,
    ordered_tiles,
)
from moesys.kernels.mega.point import MegaPoint
from moesys.kernels.mega.tasks import TaskTimes
from moesys.kernels.routing import SortedRouting, route
from moesys.kernels.symmetric.counts import Origin, send_counts
from moesys.kernels.symmetric.heap import RANK, Heap, at, flag_of, require_no_capture
from moesys.kernels.symmetric.signals import PUBLISH, TimeoutWatch, raise_flag, wait

# Rows of a program that pulls choices.
PULLED = 128


class OwnFlags(NamedTuple):
    """Flags and counters, int32, that only a rank's own programs use.

    ``arrived``: of each fetch, or each group, that its rows have arrived; ``fetched_G``: how many fetches of a group
    have. ``multiplied``: of each tile of a product that its rows may be pushed; ``pushed``: how many of a group and
    column of tiles have been.
    """

    arrived: Tensor
    fetched_G: Tensor
    multiplied: Tensor
    pushed: Tensor


class RegionOffsets(NamedTuple):
    """The places where regions begin in every arena, in bytes (``exchange.regions``)."""

    published: int
    x: int
    x_again: int
    weight: int
    staging: int
    combined: int
    dweight: int


class MegaLaunch(NamedTuple):
    """The arguments of a launch that are about its rank, and not about rows.

    ``world``: see ``Heap``; ``pace``: of what is pulled and pushed (``signals``), None for as fast as it goes;
    ``epoch_1``; ``queue_2``: tasks taken, and programs that are done; ``times``: where tasks write down when they ran.
    """

    world: Tensor
    pace: Tensor | None
    offsets: RegionOffsets
    epoch_1: Tensor
    queue_2: Tensor
    flags: OwnFlags
    times: Tensor | None
    num_ranks: int


class MegaMemory:
    """The memory of one rank that lasts from epoch to epoch: the heap, and flags and counters of its own programs.
    ``meet``: waits, on the host, until all ranks have called it.

    Flags hold epochs and counters return to zero by themselves, so nothing here is cleared between launches.
    ``epoch_1`` int32, on the device, so that a captured graph counts on when it is replayed. ``times``: where launches
    write the time of each task, None if times are not recorded.
    """

    def __init__(self, heap: Heap, meet: Callable[[], object] = lambda: None) -> None:
        self.heap, self.watch, self.meet = heap, TimeoutWatch(heap), meet
        # Points for which all kernels have been compiled.
        self.compiled: set[Hashable] = set()
        self.times: TaskTimes | None = None
        self.epoch_1 = self._zeros(1)
        # How many exchanges of counts there have been, for each peer (``counts``).
        self.exchanges_R = self._zeros(heap.num_ranks)
        self.pace: Tensor | None = None
        self.queue_2 = self._zeros(2)
        self.flags = OwnFlags(*(self._zeros(0) for _ in OwnFlags._fields))
        self._outgrown: list[Tensor] = []

    def require(self, fetches: int, groups: int, row_tiles: int, column_tiles: int) -> None:
        """Makes room for this many flags; new ones are zeros, which is behind every epoch.

        Raises RuntimeError where that takes new memory while a CUDA graph is captured.
        """
        sizes = {
            "arrived": max(fetches, groups),
            "fetched_G": groups,
            "multiplied": row_tiles * column_tiles,
            "pushed": groups * column_tiles,
        }
        for name, size in sizes.items():
            old = getattr(self.flags, name)
            if len(old) < size:
                require_no_capture("flags of a MegaKernel")
                # A graph captured before goes on with the old ones: they are enough for what it launches.
                self._outgrown.append(old)
                self.flags = self.flags._replace(**{name: self._zeros(max(size, 2 * len(old)))})

    def launch(self, name: str, most_tasks: int) -> MegaLaunch:
        """Returns the arguments of the next launch, of at most ``most_tasks`` tasks."""
        heap = self.heap
        return MegaLaunch(
            world=heap.world,
            pace=self.pace,
            offsets=RegionOffsets(*(heap.offset(region) for region in RegionOffsets._fields)),
            epoch_1=self.epoch_1,
            queue_2=self.queue_2,
            flags=self.flags,
            times=None if self.times is None else self.times.of_launch(name, most_tasks, heap.arena.device),
            num_ranks=heap.num_ranks,
        )

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.heap.arena.device)


class MegaRows(NamedTuple):
    """The rows of one micro-batch on this rank, the same in both directions.

    ``entry_N`` int32: a row's choice t·K + k at its source. ``first_row_N``, ``first_tile_N``: see ``first_rows``, None
    without de-duplication.
    """

    exchange: Exchange
    tiles: TileSequence
    flags: Flags
    entry_N: Tensor
    first_row_N: Tensor | None
    first_tile_N: Tensor | None
    top_k: int


def announce(
    memory: MegaMemory, expert_TK: Tensor, num_experts: int, shared: Mapping[str, Tensor], origin: Origin | None = None
) -> SortedRouting:
    """Publishes this rank's choices and ``shared`` regions, and its counts if all are to plan by them (``counts``),
    with their ``origin``. Ids in ``expert_TK`` that are not in 0..E-1 are dropped.
    """
    routing = route(expert_TK, num_experts)
    if origin is not None:
        send_counts(memory.heap, memory.exchanges_R, routing.first_G1, origin)
    publish(memory.heap, memory.epoch_1, {"entry": routing.entry_P, "position": routing.row_TK, **shared})
    return routing


def arrange(
    memory: MegaMemory,
    routing: SortedRouting,
    tokens_RP: Tensor,
    replicas: Replicas,
    num_rows: int,
    block_rows: int,
    point: MegaPoint,
    list_RP: Tensor | None = None,
) -> MegaRows:
    """Finds the rows that come here, when all ranks have announced theirs; ``num_rows``: N, at least what the plan
    sends here. ``list_RP``: see ``exchange``.
    """
    heap, top_k = memory.heap, routing.row_TK.shape[1]
    table = exchange(tokens_RP, routing.row_TK, replicas, heap.rank, num_rows, list_RP)
    entry_N, position_NK = pull_choices(heap, memory.epoch_1, table, top_k, point.deduplicate)
    tiles = ordered_tiles(table, heap.rank, block_rows, point.tile_order)
    first_row_N, first_tile_N = (None, None) if position_NK is None else first_rows(table, position_NK, tiles)
    flags = combine_flags(table, heap.rank, block_rows, point.granularity == "expert")
    return MegaRows(table, tiles, flags, entry_N, first_row_N, first_tile_N, top_k)


def publish(heap: Heap, epoch_1: Tensor, filled: Mapping[str, Tensor]) -> None:
    """Puts ``filled`` into this rank's regions and begins the next epoch for all ranks. ``epoch_1`` int32 [1]."""
    for name, values in filled.items():
        region = heap.own(name).view(-1)
        region[: values.numel()].copy_(values.reshape(-1))
    _publish[(1,)](
        heap.world, heap.offset("published"), epoch_1, heap.num_ranks, RANKS=triton.next_power_of_2(heap.num_ranks)
    )


@kernel
def _publish(world, published, epoch_ptr, num_ranks, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    epoch = tl.load(epoch_ptr) + 1
    # The counter is raised only when all threads have read it, because each of them raises some of the flags.
    tl.debug_barrier()
    tl.store(epoch_ptr, epoch)
    peer = tl.arange(0, RANKS)
    flag = flag_of(world, tl.minimum(peer, num_ranks - 1), published, tl.load(world + RANK))
    raise_flag(flag, epoch, peer < num_ranks)


@kernel
def _await_sources(world, published, epoch_ptr, num_ranks, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until every rank has published this epoch. One program: if all that pull waited, a rank that is early would
    fill its GPU with them, and keep collectives of other streams from it. Nothing follows, so the barrier is more than
    is needed.
    """
    peer = tl.arange(0, RANKS)
    flag = flag_of(world, tl.load(world + RANK), published, tl.minimum(peer, num_ranks - 1))
    wait(flag, peer < num_ranks, tl.load(epoch_ptr), peer, -1, peer, PUBLISH, world)


def pull_choices(
    heap: Heap, epoch_1: Tensor, exchange: Exchange, top_k: int, all_choices: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns (entry_N, position_NK or None): the choice t·K + k that each row is at its source, -1 behind the last
    row; and the places of all choices of that token in its source's list. Waits for all sources.
    """
    num_rows = len(exchange.source_N)
    entry_N = torch.empty_like(exchange.source_N)
    position_NK = entry_N.new_empty(num_rows, top_k) if all_choices else None
    published, entries, positions = (heap.offset(region) for region in ("published", "entry", "position"))
    ranks = triton.next_power_of_2(heap.num_ranks)
    _await_sources[(1,)](heap.world, published, epoch_1, heap.num_ranks, RANKS=ranks)
    pulls = ChoicePulls(entries, positions, entry_N, position_NK)
    _pull_choices[(triton.cdiv(num_rows, PULLED),)](heap.world, exchange, pulls, num_rows, K=top_k, ROWS=PULLED)
    return entry_N, position_NK


class ChoicePulls(NamedTuple):
    """The places of sources' regions, in bytes, and the tensors that are written (``pull_choices``)."""

    entries: int
    positions: int
    entry_N: Tensor
    position_NK: Tensor | None


@kernel(do_not_specialize=["num_rows"])
def _pull_choices(world, table, pulls, num_rows, K: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(table.source_N + row, mask=row < num_rows, other=-1)
    kept = source >= 0
    source = tl.maximum(source, 0)
    place = tl.load(table.place_N + row, mask=kept, other=0)
    entry = tl.load(at(world, source, pulls.entries, tl.int32) + place, mask=kept, other=0)
    # After a time-out, the entries of a source may be stale: no row may be pulled from outside of its region.
    entry = tl.where(kept, tl.maximum(entry, 0), -1)
    tl.store(pulls.entry_N + row, entry, mask=row < num_rows)
    if pulls.position_NK is not None:
        first = at(world, source, pulls.positions, tl.int32) + tl.maximum(entry, 0) // K * K
        for k in range(K):
            position = tl.load(first + k, mask=kept, other=-1)
            tl.store(pulls.position_NK + row.to(tl.int64) * K + k, position, mask=row < num_rows)


@triton.jit
def raise_or_count(  # type: ignore[no-untyped-def]
    flags, fetch, group, of_group, epoch, came, experts: tl.constexpr
):
    """Raises the flag of a ``fetch``, or, with flags of ``experts``, that of its ``group`` if this is the last of the
    group's ``of_group`` fetches. The counter returns to zero. Does nothing unless the fetch ``came``.
    """
    # Only this GPU reads these flags, and the last count has had a barrier: system scope and barrier are needless.
    if came:
        if experts:
            if is_last(flags.fetched_G + group, of_group):
                raise_flag(flags.arrived + group, epoch)
        else:
            raise_flag(flags.arrived + fetch, epoch)


@triton.jit
def is_last(count_ptr, of):  # type: ignore[no-untyped-def]
    """Returns whether this is the last of ``of`` programs to call it, which then sees what the others stored before."""
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == of - 1
    if last:
        tl.store(count_ptr, 0)
    return last
