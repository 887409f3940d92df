"""Where the rows of a dispatch and a combine go, as tables on the device: one rank's part of a token plan.

A source lists its choices in order of (expert, token, choice) (``routing.route``). Replicas are numbered by (expert,
rank), so the plan cuts that list into one piece a replica, one behind the other, which is all that a destination needs
to find its rows. An expert's rows lie there in order of (source, token, choice).

R ranks, P replicas in all, G groups of this rank (its own replicas), B = G·R + 1 blocks (of a group and a source, and
one behind the last), T tokens of this rank, K choices of each, N rows here, M row tiles. Nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.tiles import Tiles
from moesys.kernels.launch import kernel
from moesys.kernels.mega.tables import CHOICES, COMPARED, SUMMED, WRITTEN, make_exchange, make_flags, make_tiles
from moesys.kernels.symmetric.heap import RANK, Heap, Region, at
from moesys.kernels.symmetric.signals import PUBLISH, raise_flag, wait

TileOrder = Literal["largest_first", "slots"]
# Rows of a program that pulls choices.
PULLED = 128
# Longer than any list.
LINE = 1 << 40


class Replicas(NamedTuple):
    """Who holds what, int64, P replicas by (expert, rank).

    ``rank_P``, ``expert_P``: of each; ``own_G``: those of this rank, in the order of its slots.
    """

    rank_P: Tensor
    expert_P: Tensor
    own_G: Tensor


def regions(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, num_ranks: int, num_flags: int
) -> Mapping[str, Region]:
    """What ranks share: T·H elements that are pulled, as many that backward pulls beside them, T·K·H that are pushed,
    and a few numbers for each choice.

    One of each is enough. A peer writes into this rank's staging, and this rank into what peers pull, only in an epoch
    that this rank has published, and it publishes the next one when its combine of the last is done: by then every row
    that was pulled from here has come back.
    """
    entries = tokens * top_k
    return {
        "x": Region((tokens, hidden), dtype),
        "x_again": Region((tokens, hidden), dtype),
        "staging": Region((entries, hidden), dtype),
        "entry": Region((entries,), torch.int32),
        "position": Region((entries,), torch.int32),
        "weight": Region((entries,), torch.float32),
        "dweight": Region((entries,), torch.float32),
        "published": Region((num_ranks,), torch.int32),
        "combined": Region((num_flags,), torch.int32),
    }


def most_flags(tokens: int, top_k: int, num_replicas: int, block_rows: int, column_tiles: int) -> int:
    """A source's flags: each replica's piece of its list reaches into at most two tiles more than it could fill."""
    return (tokens * top_k // block_rows + 2 * num_replicas) * column_tiles


class Exchange(NamedTuple):
    """One micro-batch, seen by one rank. Tables are int32 unless said.

    As a destination: ``first_G1``: a group's first row. ``block_first_B``, ``block_rows_B``: a block's first row and
    rows. ``source_N``, ``place_N``: the rank that a row comes from and its place in that rank's list; both -1 behind
    the last row.

    As a source: ``replica_TK`` (-1 where dropped) and ``row_TK``: the replica, and the row among that replica's.
    ``tokens_RP`` int64: the plan; ``list_RP`` int64: where its tokens begin in a source's list, None where one
    replica follows the other.
    """

    replicas: Replicas
    tokens_RP: Tensor
    list_RP: Tensor | None
    first_G1: Tensor
    block_first_B: Tensor
    block_rows_B: Tensor
    source_N: Tensor
    place_N: Tensor
    replica_TK: Tensor
    row_TK: Tensor

    @property
    def num_ranks(self) -> int:
        return self.tokens_RP.shape[0]


def exchange(
    tokens_RP: Tensor,
    position_TK: Tensor,
    replicas: Replicas,
    rank: int,
    num_rows: int,
    list_RP: Tensor | None = None,
) -> Exchange:
    """Tables of ``rank`` for the plan ``tokens_RP`` int64; ``position_TK``: each choice's place in its list, or -1.

    ``num_rows``: N, at least the rows that come here. ``list_RP`` int64: where what a source sends to a replica begins
    in its list; None: one replica behind the other. One launch.
    """
    (num_ranks, num_replicas), num_groups = tokens_RP.shape, len(replicas.own_G)
    num_blocks = num_groups * num_ranks + 1
    empty = partial(torch.empty, dtype=torch.int32, device=tokens_RP.device)
    found = Exchange(
        replicas=replicas,
        tokens_RP=tokens_RP,
        list_RP=list_RP,
        first_G1=empty(num_groups + 1),
        block_first_B=empty(num_blocks),
        block_rows_B=empty(num_blocks),
        source_N=empty(num_rows),
        place_N=empty(num_rows),
        replica_TK=empty(position_TK.shape),
        row_TK=empty(position_TK.shape),
    )
    sizes = (num_ranks, num_replicas, num_groups, num_rows, position_TK.numel())
    make_exchange[(num_blocks + triton.cdiv(position_TK.numel(), CHOICES),)](
        tokens_RP, position_TK, found, rank, *sizes, CHOICES, COMPARED, SUMMED, WRITTEN
    )
    return found


class Flags(NamedTuple):
    """Which flags of a source say that a tile of rows has come home, in tiles of so many rows; int32.

    ``first_B``: the flag of a block of this rank at the block's source, with flags of tiles to be added to the number
    of a tile inside its group; ``flag_TK``: of what brings a choice home, here; -1 where it is dropped.
    """

    first_B: Tensor
    flag_TK: Tensor


def combine_flags(exchange: Exchange, rank: int, block_rows: int, of_experts: bool) -> Flags:
    """A source numbers the tiles that its pieces reach into, replica by replica, and every destination knows how; or
    has one flag a replica. One launch.
    """
    (num_ranks, num_replicas), num_groups = exchange.tokens_RP.shape, len(exchange.replicas.own_G)
    replica_TK, num_blocks = exchange.replica_TK, len(exchange.block_first_B)
    flag_TK = replica_TK if of_experts else torch.empty_like(replica_TK)
    flags = Flags(torch.empty_like(exchange.block_first_B), flag_TK)
    choices = 0 if of_experts else triton.cdiv(replica_TK.numel(), CHOICES)
    sizes = (num_ranks, num_replicas, num_groups, replica_TK.numel())
    make_flags[(num_blocks + choices,)](exchange, flags, rank, *sizes, block_rows, of_experts, CHOICES, COMPARED)
    return flags


class OrderedTiles(NamedTuple):
    """``tiles``, those of a group in turns; of each group the number of its first, int64 [G]; of each tile the number
    of the first tile behind its group, int32 [M], M behind the last; of each tile the number that it would have if
    those of a group came as they lie, int64 [M].
    """

    tiles: Tiles
    first_tile_G: Tensor
    group_end_M: Tensor
    lies_M: Tensor


def ordered_tiles(exchange: Exchange, rank: int, block_rows: int, order: TileOrder) -> OrderedTiles:
    """Row tiles of ``rank`` with groups in this order.

    Rows of a group lie source by source, so ranks that took tiles as they lie would all pull from the same source, and
    push to it. A rank begins with the tile in which its own rows begin, goes round from there to the one before it, and
    takes one tile of each of R parts of this round in turn: any few tiles have rows of as many sources as they can, and
    ranks that are equally far on have them of different ones. One launch.
    """
    num_groups, device = len(exchange.replicas.own_G), exchange.first_G1.device
    most = -(-len(exchange.source_N) // block_rows) + num_groups
    group_M, row_M, group_end_M, count_1 = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (most, most, most, 1)
    )
    first_tile_G, lies_M = (torch.empty(size, dtype=torch.int64, device=device) for size in (num_groups, most))
    found = OrderedTiles(Tiles(group_M, row_M, count_1, block_rows), first_tile_G, group_end_M, lies_M)
    make_tiles[(max(num_groups, 1),)](
        exchange,
        found,
        rank,
        exchange.num_ranks,
        num_groups,
        most,
        block_rows,
        order == "largest_first",
        SUMMED,
        WRITTEN,
    )
    return found


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
    # All threads have read it before one counts it on: each raises some of the flags.
    tl.debug_barrier()
    tl.store(epoch_ptr, epoch)
    peer = tl.arange(0, RANKS)
    flag = at(world, tl.minimum(peer, num_ranks - 1), published, tl.int32) + tl.load(world + RANK)
    raise_flag(flag, epoch, peer < num_ranks)


@triton.jit
def wait_for_sources(world, published, epoch, num_ranks, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until every rank has published this epoch."""
    peer = tl.arange(0, RANKS)
    flag = at(world, tl.load(world + RANK), published, tl.int32) + tl.minimum(peer, num_ranks - 1)
    wait(flag, peer < num_ranks, epoch, peer, -1, peer, PUBLISH, world)


def pull_choices(
    heap: Heap, epoch_1: Tensor, exchange: Exchange, top_k: int, all_choices: bool
) -> tuple[Tensor, Tensor | None]:
    """(entry_N, position_NK or None): the choice t·K + k that each row is at its source, -1 behind the last row; and
    the places of all choices of that token in its source's list. Waits for all sources.
    """
    num_rows = len(exchange.source_N)
    entry_N = torch.empty_like(exchange.source_N)
    position_NK = entry_N.new_empty(num_rows, top_k) if all_choices else None
    published, entries, positions = (heap.offset(region) for region in ("published", "entry", "position"))
    pulls = ChoicePulls(published, entries, positions, entry_N, position_NK, heap.num_ranks)
    _pull_choices[(triton.cdiv(num_rows, PULLED),)](
        heap.world,
        epoch_1,
        exchange,
        pulls,
        num_rows,
        RANKS=triton.next_power_of_2(heap.num_ranks),
        K=top_k,
        ROWS=PULLED,
    )
    return entry_N, position_NK


class ChoicePulls(NamedTuple):
    """Where sources' regions begin, in bytes, what is written (``pull_choices``), and from how many ranks it comes."""

    published: int
    entries: int
    positions: int
    entry_N: Tensor
    position_NK: Tensor | None
    num_ranks: int


@kernel(do_not_specialize=["num_rows"])
def _pull_choices(  # type: ignore[no-untyped-def]
    world, epoch_ptr, table, pulls, num_rows, RANKS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr
):
    wait_for_sources(world, pulls.published, tl.load(epoch_ptr), pulls.num_ranks, RANKS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(table.source_N + row, mask=row < num_rows, other=-1)
    kept = source >= 0
    source = tl.maximum(source, 0)
    place = tl.load(table.place_N + row, mask=kept, other=0)
    entry = tl.load(at(world, source, pulls.entries, tl.int32) + place, mask=kept, other=0)
    # A source that was given up may have said otherwise before: no row is to come from outside of its region.
    entry = tl.where(kept, tl.maximum(entry, 0), -1)
    tl.store(pulls.entry_N + row, entry, mask=row < num_rows)
    if pulls.position_NK is not None:
        first = at(world, source, pulls.positions, tl.int32) + tl.maximum(entry, 0) // K * K
        for k in range(K):
            position = tl.load(first + k, mask=kept, other=-1)
            tl.store(pulls.position_NK + row.to(tl.int64) * K + k, position, mask=row < num_rows)


def first_rows(exchange: Exchange, position_NK: Tensor, tiles: OrderedTiles) -> tuple[Tensor, Tensor]:
    """int32 [N] both: the row of another group that brings the same token of the same source here in the earliest tile,
    and that tile; -1 where no earlier group has it.
    """
    num_ranks, num_replicas = exchange.tokens_RP.shape
    device, own_G = position_NK.device, exchange.replicas.own_G
    num_groups = len(own_G)
    if not num_groups or not num_replicas:
        return torch.full_like(exchange.source_N, -1), torch.full_like(exchange.source_N, -1)
    # All sources' lists on one line, so that one search finds the replica of any choice.
    list_RP = exchange.list_RP
    if list_RP is None:
        list_RP = exchange.tokens_RP.cumsum(1) - exchange.tokens_RP
    # Of each source's list the ends of replicas, ascending; the first one behind a place is that of its replica.
    end_RP, replica_RP = torch.where(exchange.tokens_RP > 0, list_RP + exchange.tokens_RP, 0).sort(dim=1)
    line = (end_RP + torch.arange(num_ranks, device=device)[:, None] * LINE).reshape(-1)
    source_N1 = exchange.source_N.long().clamp(min=0)[:, None]
    at_NK = torch.searchsorted(line, source_N1 * LINE + position_NK.long().clamp(min=0), right=True)
    turn_NK = at_NK - source_N1 * num_replicas
    # Places behind the list are what a source that was given up said before.
    in_list_NK = (position_NK >= 0) & (turn_NK < num_replicas)
    replica_NK = replica_RP[source_N1, turn_NK.clamp(max=num_replicas - 1)]
    group_P = torch.full((num_replicas,), -1, dtype=torch.int64, device=device)
    group_P[own_G] = torch.arange(num_groups, device=device)
    group_NK = group_P[replica_NK]
    here_NK = in_list_NK & (group_NK >= 0) & (exchange.source_N >= 0)[:, None]
    group_NK = group_NK.clamp(min=0)
    in_block_NK = position_NK - list_RP[source_N1, replica_NK]
    row_NK = exchange.block_first_B.long()[group_NK * num_ranks + source_N1] + in_block_NK

    number_M = torch.empty_like(tiles.lies_M)
    number_M.index_copy_(0, tiles.lies_M, torch.arange(len(number_M), device=device))
    lies_NK = tiles.first_tile_G[group_NK] + (row_NK - exchange.first_G1[group_NK]) // tiles.tiles.block_rows
    # Places of what is not here may lie outside.
    tile_NK = number_M[lies_NK.clamp(0, len(number_M) - 1)]
    tile_NK = torch.where(here_NK, tile_NK, torch.iinfo(torch.int64).max)
    tile_N, k_N = tile_NK.min(1)
    row_N = torch.arange(len(k_N), device=device)
    own_group_N = torch.searchsorted(exchange.first_G1[1:].long(), row_N, right=True).clamp(max=num_groups - 1)
    earlier_N = (exchange.source_N >= 0) & (tile_N < tiles.first_tile_G[own_group_N])
    first_row_N = torch.where(earlier_N, row_NK.gather(1, k_N[:, None])[:, 0], -1)
    return first_row_N.int(), torch.where(earlier_N, tile_N, -1).int()
