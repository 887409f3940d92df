"""The kernels behind ``exchange``: each makes all tables of a kind in one launch, as on small tables every operator of
torch costs as much as a kernel.

Programs need nothing of each other: what lies before a block, a tile or a choice, each sums up for itself. Letters are
those of ``exchange``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesys.kernels.launch import kernel

# Choices of a program, replicas that they are compared with at once, blocks and groups that are summed at once, and
# rows and tiles that are written at once.
CHOICES = 128
COMPARED = 32
SUMMED = 256
WRITTEN = 256


@triton.jit
def _rows_before(tokens_RP, source, replica, inside, num_replicas):  # type: ignore[no-untyped-def]
    """Of these replicas' rows those that come from sources before this one."""
    rows = tl.zeros_like(replica).to(tl.int64)
    for earlier in range(source):
        rows += tl.load(tokens_RP + earlier * num_replicas + replica, mask=inside, other=0)
    return rows


@kernel(do_not_specialize=["rank", "num_replicas", "num_groups", "num_rows", "num_choices"])
def make_exchange(  # type: ignore[no-untyped-def]
    tokens_RP, position_TK, found, rank, num_ranks, num_replicas, num_groups, num_rows, num_choices,
    CHOICES: tl.constexpr, COMPARED: tl.constexpr, SUMMED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """A program a block, and then one a few choices; ``found`` is the ``Exchange``."""
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
            end = listed + tl.cumsum(tokens, 0)
            begin = end - tokens
            hit = (begin[None, :] <= position[:, None]) & (position[:, None] < end[None, :])
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
    """Where a block begins, and the rows in it; the one behind the last has none. All share the rows behind the end."""
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
    for start in range(0, num_replicas, SUMMED):
        earlier = start + tl.arange(0, SUMMED)
        listed += tl.sum(tl.load(tokens_RP + source * num_replicas + earlier, mask=earlier < replica, other=0), 0)
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
def make_flags(  # type: ignore[no-untyped-def]
    exchange, flags, rank, num_ranks, num_replicas, num_groups, num_choices, block_rows: tl.constexpr,
    of_experts: tl.constexpr, CHOICES: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """A program a block, and then, for flags of tiles, one a few choices; ``flags`` are the ``Flags``."""
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
    """The flag of a block's tile 0, or of its expert; 0 of the one behind the last."""
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
    """Of the ``wanted`` replicas the flag, at a source, of their tile 0: of all replicas before, it has one for each
    tile that its rows reach into.
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
def make_tiles(  # type: ignore[no-untyped-def]
    exchange, tiles, rank, num_ranks, num_groups, most, block_rows: tl.constexpr, largest_first: tl.constexpr,
    SUMMED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """A program a group, or one for none; ``tiles`` are the ``OrderedTiles``."""
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
        # Of the parts of the round, one tile each in turn.
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
