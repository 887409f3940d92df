"""Tables on the device that say where the rows of a dispatch and a combine go: one rank's part of a token plan.

A source lists its choices in order of (expert, token, choice) (``routing.route``). Replicas are numbered by (expert,
rank), so the plan cuts that list into one consecutive piece per replica, by which a destination finds its rows. At the
destination, an expert's rows are in order of (source, token, choice).

Each kernel makes all tables of a kind in one launch, because for small tables every operator of torch costs as much as
a kernel. Programs are independent: each computes for itself the sums over what precedes its block, tile or choice.
Nothing here waits for the device.

R ranks, P replicas in all, G groups of this rank (its own replicas), B = G·R + 1 blocks (of a group and a source, and
one behind the last), T tokens of this rank, K choices of each, N rows here, M row tiles.
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
from moesys.kernels.symmetric.heap import Region, flags_of_ranks

TileOrder = Literal["largest_first", "slots"]
# Choices of a program, replicas that they are compared with at once, blocks and groups that are summed at once, and
# rows and tiles that are written at once.
CHOICES = 128
COMPARED = 32
SUMMED = 256
WRITTEN = 256
# Longer than any list.
LINE = 1 << 40


class Replicas(NamedTuple):
    """The P replicas of experts, by (expert, rank), int64.

    ``rank_P``, ``expert_P``: the rank and the expert of each; ``own_G``: the replicas of this rank, in slot order.
    """

    rank_P: Tensor
    expert_P: Tensor
    own_G: Tensor


def regions(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, num_ranks: int, num_flags: int
) -> Mapping[str, Region]:
    """Returns the regions that ranks share: T·H elements that are pulled, T·H more that backward pulls too, T·K·H that
    are pushed, and a few numbers for each choice.

    One region of each kind is enough. A peer writes into this rank's staging, and this rank into the regions that peers
    pull, only in an epoch that this rank has published. It publishes the next one when its combine of the last is
    done: by then every row that was pulled from it is back.
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
        "published": flags_of_ranks(num_ranks),
        "combined": Region((num_flags,), torch.int32),
    }


def most_flags(tokens: int, top_k: int, num_replicas: int, block_rows: int, column_tiles: int) -> int:
    """Returns the number of a source's flags: each replica's piece of its list reaches into at most two tiles more than
    it could fill.
    """
    return (tokens * top_k // block_rows + 2 * num_replicas) * column_tiles


class Exchange(NamedTuple):
    """One micro-batch, seen by one rank. Tables are int32 where no dtype is given.

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
    tokens_RP: Tensor, position_TK: Tensor, replicas: Replicas, rank: int, num_rows: int, list_RP: Tensor | None = None
) -> Exchange:
    """Returns the tables of ``rank`` for the plan ``tokens_RP`` int64; ``position_TK``: each choice's place in its
    list, or -1.

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
    _make_exchange[(num_blocks + triton.cdiv(position_TK.numel(), CHOICES),)](
        tokens_RP, position_TK, found, rank, *sizes, CHOICES, COMPARED, SUMMED, WRITTEN
    )
    return found


class Flags(NamedTuple):
    """The flags at a source that are raised when a tile of its rows is back; int32.

    ``first_B``: for each block of this rank, the flag at the block's source; with flags of tiles, the number of a tile
    inside its group is added. ``flag_TK``: for each choice of this rank, the flag of its row; -1 where it is dropped.
    """

    first_B: Tensor
    flag_TK: Tensor


def combine_flags(exchange: Exchange, rank: int, block_rows: int, of_experts: bool) -> Flags:
    """Returns the flags of all tiles: a source numbers the tiles that its pieces reach into, replica by replica, as
    every destination does; or it has one flag per replica. Takes one launch.
    """
    (num_ranks, num_replicas), num_groups = exchange.tokens_RP.shape, len(exchange.replicas.own_G)
    replica_TK, num_blocks = exchange.replica_TK, len(exchange.block_first_B)
    flag_TK = replica_TK if of_experts else torch.empty_like(replica_TK)
    flags = Flags(torch.empty_like(exchange.block_first_B), flag_TK)
    choices = 0 if of_experts else triton.cdiv(replica_TK.numel(), CHOICES)
    sizes = (num_ranks, num_replicas, num_groups, replica_TK.numel())
    _make_flags[(num_blocks + choices,)](exchange, flags, rank, *sizes, block_rows, of_experts, CHOICES, COMPARED)
    return flags


class TileSequence(NamedTuple):
    """Tiles in the order in which they are taken.

    - ``tiles``: the tiles; those of a group are interleaved;
    - ``first_tile_G``: the number of each group's first tile, int64;
    - ``group_end_M``: for each tile, the number of the first tile after its group, int32; M where there is no tile;
    - ``lies_M``: for each tile, its number if the tiles of a group were in memory order, int64.
    """

    tiles: Tiles
    first_tile_G: Tensor
    group_end_M: Tensor
    lies_M: Tensor


def ordered_tiles(exchange: Exchange, rank: int, block_rows: int, order: TileOrder) -> TileSequence:
    """Returns the row tiles of ``rank`` with groups in this order.

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
    found = TileSequence(Tiles(group_M, row_M, count_1, block_rows), first_tile_G, group_end_M, lies_M)
    _make_tiles[(max(num_groups, 1),)](
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


def first_rows(exchange: Exchange, position_NK: Tensor, tiles: TileSequence) -> tuple[Tensor, Tensor]:
    """Returns int32 [N] both: the row of another group that brings the same token of the same source here in the
    earliest tile, and that tile; -1 where no earlier group has it.
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
    # The ends of the replicas in each source's list, ascending; the first one behind a place is that of its replica.
    end_RP, replica_RP = torch.where(exchange.tokens_RP > 0, list_RP + exchange.tokens_RP, 0).sort(dim=1)
    line = (end_RP + torch.arange(num_ranks, device=device)[:, None] * LINE).reshape(-1)
    source_N1 = exchange.source_N.long().clamp(min=0)[:, None]
    at_NK = torch.searchsorted(line, source_N1 * LINE + position_NK.long().clamp(min=0), right=True)
    turn_NK = at_NK - source_N1 * num_replicas
    # After a time-out, positions of a source may be stale and lie behind its list.
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
    # Positions of rows of other ranks may be out of range.
    tile_NK = number_M[lies_NK.clamp(0, len(number_M) - 1)]
    tile_NK = torch.where(here_NK, tile_NK, torch.iinfo(torch.int64).max)
    tile_N, k_N = tile_NK.min(1)
    row_N = torch.arange(len(k_N), device=device)
    own_group_N = torch.searchsorted(exchange.first_G1[1:].long(), row_N, right=True).clamp(max=num_groups - 1)
    earlier_N = (exchange.source_N >= 0) & (tile_N < tiles.first_tile_G[own_group_N])
    first_row_N = torch.where(earlier_N, row_NK.gather(1, k_N[:, None])[:, 0], -1)
    return first_row_N.int(), torch.where(earlier_N, tile_N, -1).int()


# --- kernels --------------------------------------------------------------------------------


@triton.jit
def _rows_before(tokens_RP, source, replica, inside, num_replicas):  # type: ignore[no-untyped-def]
    """Returns how many of these replicas' rows come from sources before this one."""
    rows = tl.zeros_like(replica).to(tl.int64)
    for earlier in range(source):
        rows += tl.load(tokens_RP + earlier * num_replicas + replica, mask=inside, other=0)
    return rows


@kernel(do_not_specialize=["rank", "num_replicas", "num_groups", "num_rows", "num_choices"])
def _make_exchange(  # type: ignore[no-untyped-def]
    tokens_RP, position_TK, found, rank, num_ranks, num_replicas, num_groups, num_rows, num_choices,
    CHOICES: tl.constexpr, COMPARED: tl.constexpr, SUMMED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Fills ``found``, the ``Exchange``: one program per block, and then one per ``CHOICES`` choices."""
    num_blocks = num_groups * num_ranks + 1
    if tl.program_id(0) < num_blocks:
        _fill_block(tokens_RP, found, tl.program_id(0), num_blocks, num_ranks, num_replicas, num_rows, SUMMED, WRITTEN)
    else:
        choice = (tl.program_id(0) - num_blocks) * CHOICES + tl.arange(0, CHOICES)
        inside = choice < num_choices
        position = tl.load(position_TK + choice, mask=inside, other=-1).to(tl.int64)
        found_replica = tl.zeros([CHOICES], tl.int64)
        ahead = tl.zeros([CHOICES], tl.int64)
        listed = tl.full([], 0, tl.int64)
        for start in range(0, num_replicas, COMPARED):
            replica = start + tl.arange(0, COMPARED)
            real = replica < num_replicas
            tokens = tl.load(tokens_RP + rank * num_replicas + replica, mask=real, other=0)
            begin = listed + tl.cumsum(tokens, 0) - tokens
            if found.list_RP is not None:
                begin = tl.load(found.list_RP + rank * num_replicas + replica, mask=real, other=0)
            hit = (begin[None, :] <= position[:, None]) & (position[:, None] < (begin + tokens)[None, :])
            before = _rows_before(tokens_RP, rank, replica, real, num_replicas)
            found_replica += tl.sum(tl.where(hit, replica[None, :] + 1, 0), 1)
            ahead += tl.sum(tl.where(hit, (before - begin)[None, :], 0), 1)
            listed += tl.sum(tokens, 0)
        kept = found_replica > 0
        tl.store(found.replica_TK + choice, (found_replica - 1).to(tl.int32), mask=inside)
        tl.store(found.row_TK + choice, tl.where(kept, position + ahead, -1).to(tl.int32), mask=inside)


@triton.jit
def _fill_block(  # type: ignore[no-untyped-def]
    tokens_RP, found, own, num_blocks, num_ranks, num_replicas, num_rows, SUMMED: tl.constexpr, WRITTEN: tl.constexpr
):
    """Stores where a block begins, and the rows in it; the one behind the last has none. All share the rows behind the
    end.
    """
    own_G = found.replicas.own_G
    source, is_last = own % num_ranks, own == num_blocks - 1
    replica = tl.load(own_G + own // num_ranks, mask=own < num_blocks - 1, other=0)
    first, total, listed = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, num_blocks - 1, SUMMED):
        block = start + tl.arange(0, SUMMED)
        inside = block < num_blocks - 1
        of = tl.load(own_G + block // num_ranks, mask=inside, other=0)
        rows = tl.load(tokens_RP + (block % num_ranks) * num_replicas + of, mask=inside, other=0)
        first += tl.sum(tl.where(block < own, rows, 0), 0)
        total += tl.sum(rows, 0)
    if found.list_RP is None:
        for start in range(0, num_replicas, SUMMED):
            earlier = start + tl.arange(0, SUMMED)
            listed += tl.sum(tl.load(tokens_RP + source * num_replicas + earlier, mask=earlier < replica, other=0), 0)
    else:
        listed = tl.load(found.list_RP + source * num_replicas + replica, mask=own < num_blocks - 1, other=0)
    rows = tl.load(tokens_RP + source * num_replicas + replica, mask=own < num_blocks - 1, other=0)
    tl.store(found.block_first_B + own, first.to(tl.int32))
    tl.store(found.block_rows_B + own, rows.to(tl.int32))
    if (source == 0) | is_last:
        tl.store(found.first_G1 + own // num_ranks, first.to(tl.int32))
    for start in range(0, rows, WRITTEN):
        row = start + tl.arange(0, WRITTEN)
        inside = (row < rows) & (first + row < num_rows)
        tl.store(found.source_N + first + row, source, mask=inside)
        tl.store(found.place_N + first + row, (listed + row).to(tl.int32), mask=inside)
    for start in range(total + own * WRITTEN, num_rows, num_blocks * WRITTEN):
        row = start + tl.arange(0, WRITTEN)
        tl.store(found.source_N + row, -1, mask=row < num_rows)
        tl.store(found.place_N + row, -1, mask=row < num_rows)


@kernel(do_not_specialize=["rank", "num_replicas", "num_groups", "num_choices"])
def _make_flags(  # type: ignore[no-untyped-def]
    exchange, flags, rank, num_ranks, num_replicas, num_groups, num_choices, block_rows: tl.constexpr,
    of_experts: tl.constexpr, CHOICES: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Fills ``flags``: one program per block, and then, for flags of tiles, one per ``CHOICES`` choices."""
    own, num_blocks = tl.program_id(0), num_groups * num_ranks + 1
    if own < num_blocks:
        _flag_block(exchange, flags, own, num_blocks, num_ranks, num_replicas, block_rows, of_experts, COMPARED)
    else:
        choice = (own - num_blocks) * CHOICES + tl.arange(0, CHOICES)
        inside = choice < num_choices
        replica = tl.load(exchange.replica_TK + choice, mask=inside, other=-1).to(tl.int64)
        row = tl.load(exchange.row_TK + choice, mask=inside, other=0)
        first = _first_flags(exchange.tokens_RP, rank, replica, num_replicas, block_rows, COMPARED)
        flag = tl.where(replica >= 0, first + row // block_rows, -1)
        tl.store(flags.flag_TK + choice, flag.to(tl.int32), mask=inside)


@triton.jit
def _flag_block(  # type: ignore[no-untyped-def]
    exchange, flags, own, num_blocks, num_ranks, num_replicas, block_rows: tl.constexpr, of_experts: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """Stores the flag of a block's tile 0, or of its expert; 0 for the block behind the last."""
    block = own + tl.arange(0, 1)
    inside = block < num_blocks - 1
    replica = tl.load(exchange.replicas.own_G + block // num_ranks, mask=inside, other=0)
    if of_experts:
        first = replica
    else:
        first = _first_flags(exchange.tokens_RP, own % num_ranks, replica, num_replicas, block_rows, COMPARED)
    tl.store(flags.first_B + block, tl.where(inside, first, 0).to(tl.int32))


@triton.jit
def _first_flags(  # type: ignore[no-untyped-def]
    tokens_RP, source, wanted, num_replicas, block_rows: tl.constexpr, COMPARED: tl.constexpr
):
    """Returns the flags, at a source, of tile 0 of the ``wanted`` replicas. Each replica has one flag for each tile
    that its rows reach into.
    """
    first = tl.zeros_like(wanted).to(tl.int64)
    flags = tl.full([], 0, tl.int64)
    for start in range(0, num_replicas, COMPARED):
        replica = start + tl.arange(0, COMPARED)
        real = replica < num_replicas
        tokens = tl.load(tokens_RP + source * num_replicas + replica, mask=real, other=0)
        before = _rows_before(tokens_RP, source, replica, real, num_replicas)
        first_tile = before // block_rows
        touched = tl.where(tokens > 0, (before + tokens - 1) // block_rows + 1 - first_tile, 0)
        at = flags + tl.cumsum(touched, 0) - touched - first_tile
        first += tl.sum(tl.where(replica[None, :] == wanted[:, None], at[None, :], 0), 1)
        flags += tl.sum(touched, 0)
    return first


@kernel(do_not_specialize=["rank", "num_groups", "most"])
def _make_tiles(  # type: ignore[no-untyped-def]
    exchange, tiles, rank, num_ranks, num_groups, most, block_rows: tl.constexpr, largest_first: tl.constexpr,
    SUMMED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Fills ``tiles``, the ``TileSequence``: one program per group, or one if there is no group."""
    own = tl.program_id(0)
    real = own < num_groups
    own_first = tl.load(exchange.first_G1 + own, mask=real, other=0)
    own_rows = tl.load(exchange.first_G1 + own + 1, mask=real, other=0) - own_first
    first = 0
    count = 0
    for start in range(0, num_groups, SUMMED):
        group = start + tl.arange(0, SUMMED)
        inside = group < num_groups
        begin = tl.load(exchange.first_G1 + group, mask=inside, other=0)
        rows = tl.load(exchange.first_G1 + group + 1, mask=inside, other=0) - begin
        number = tl.cdiv(rows, block_rows)
        before = group < own
        if largest_first:
            before = (rows > own_rows) | ((rows == own_rows) & before)
        first += tl.sum(tl.where(before, number, 0), 0)
        count += tl.sum(number, 0)
    number = tl.cdiv(own_rows, block_rows)
    at_source = tl.load(exchange.block_first_B + own * num_ranks + rank, mask=real, other=0)
    begin = (at_source - own_first) // block_rows
    for start in range(0, number, WRITTEN):
        tile = start + tl.arange(0, WRITTEN)
        inside = tile < number
        # Take one tile from each part of the round in turn.
        part = tile % num_ranks
        in_round = part * (number // num_ranks) + tl.minimum(part, number % num_ranks) + tile // num_ranks
        lies = (begin + in_round) % number
        tl.store(tiles.tiles.group_M + first + tile, own, mask=inside)
        tl.store(tiles.tiles.row_M + first + tile, own_first + lies * block_rows, mask=inside)
        tl.store(tiles.group_end_M + first + tile, first + number, mask=inside)
        tl.store(tiles.lies_M + first + tile, (first + lies).to(tl.int64), mask=inside)
    if real:
        tl.store(tiles.first_tile_G + own, tl.cast(first, tl.int64))
    for start in range(count + own * WRITTEN, most, tl.num_programs(0) * WRITTEN):
        tile = start + tl.arange(0, WRITTEN)
        inside = tile < most
        tl.store(tiles.tiles.group_M + tile, -1, mask=inside)
        tl.store(tiles.tiles.row_M + tile, -1, mask=inside)
        tl.store(tiles.group_end_M + tile, most, mask=inside)
        tl.store(tiles.lies_M + tile, tile.to(tl.int64), mask=inside)
    if own == 0:
        tl.store(tiles.tiles.count_1, count)
