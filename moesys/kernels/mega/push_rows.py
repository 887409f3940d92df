"""Device functions of MegaKernel B's tasks: rows are pushed back to their sources, and summed there.

A source's staging has a place for each of its choices, so a push needs no agreement with the source. It then raises
the flag that the source's sums wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moesys.kernels.experts.activation_gradient import sum_of_partials
from moesys.kernels.experts.products import rounded
from moesys.kernels.experts.token_rows import plus_term
from moesys.kernels.mega.arguments import is_last
from moesys.kernels.mega.tasks import PUSH, SUM, task_is_ready
from moesys.kernels.symmetric.heap import RANK, at
from moesys.kernels.symmetric.signals import COMBINE, DISPATCH, raise_flag, wait


class RowTile(NamedTuple):
    """A row tile in a kernel: its number, its group, its first row and how many it has."""

    number: Any
    group: Any
    row: Any
    num_rows: Any


class RowSources(NamedTuple):
    """The sources of a tile's rows in a kernel: for each row whether it is ``kept``, the ``rank`` that sent it, and its
    ``entry`` there.
    """

    kept: Any
    rank: Any
    entry: Any


class Task(NamedTuple):
    """A task in a kernel: its place in the queue, its number among its kind, the epoch."""

    place: Any
    number: Any
    epoch: Any


@triton.jit
def push_tile(out, source_row, column, kept, H: tl.constexpr, push_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pushes a tile to its sources from registers, halved until it is ``push_columns`` wide, because each address
    takes two registers.
    """
    if out.shape[1] > push_columns:
        left, right = out.reshape(out.shape[0], 2, out.shape[1] // 2).permute(0, 2, 1).split()
        push_tile(left, source_row, column, kept, H, push_columns)
        push_tile(right, source_row, column + out.shape[1] // 2, kept, H, push_columns)
    else:
        columns = column + tl.arange(0, out.shape[1])
        tl.store(source_row[:, None] + columns[None, :], out, mask=kept[:, None] & (columns < H)[None, :])


@triton.jit
def push_rows(  # type: ignore[no-untyped-def]
    launch, data, task, tile, sources, sizes: tl.constexpr
):
    """Pushes the finished rows of a tile to their sources. Returns whether they were finished."""
    H: tl.constexpr = sizes.H
    came = True
    for column_tile in range(sizes.num_column_tiles):
        flag = tile.number * sizes.num_column_tiles + column_tile + tl.arange(0, 1)
        rank = tl.load(launch.world + RANK).to(tl.int32)
        multiplied = launch.flags.multiplied + flag
        came = came & wait(multiplied, flag >= 0, task.epoch, rank, tile.group, flag, DISPATCH, launch.world)
    task_is_ready(launch.times, task.place, PUSH, tile.group)
    dtype: tl.constexpr = data.out_NH.dtype.element_ty
    staging = at(launch.world, sources.rank, launch.offsets.staging, dtype)
    source_row = staging + sources.entry.to(tl.int64) * H
    here_row = data.out_NH + tile.row.to(tl.int64) * H + tl.arange(0, sources.kept.shape[0]) * H
    if came:
        for start in range(0, H, sizes.copy_columns):
            column = start + tl.arange(0, sizes.copy_columns)
            mask = sources.kept[:, None] & (column < H)[None, :]
            rows = tl.load(here_row[:, None] + column[None, :], mask=mask)
            tl.store(source_row[:, None] + column[None, :], rows, mask=mask)
    return came


@triton.jit
def push_dweights(launch, partial_ptr, row, sources, num_sums: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pushes the routing weights' gradients of a tile's rows to their sources: partial sums, added in order."""
    total = sum_of_partials(partial_ptr, row + tl.arange(0, sources.kept.shape[0]), sources.kept, num_sums)
    dweights = at(launch.world, sources.rank, launch.offsets.dweight, tl.float32)
    tl.store(dweights + sources.entry, total, mask=sources.kept)


@triton.jit
def flags_at_sources(  # type: ignore[no-untyped-def]
    launch, rows, tile, column_tile, came, sizes: tl.constexpr, tile_rows: tl.constexpr
):
    """Returns the flag of these columns of a tile at each of ``RANKS`` sources, -1 where none is to be raised: a source
    has no rows of the tile, or other tiles of its expert are not done, or the columns have not all ``came``.
    """
    num_column_tiles: tl.constexpr = sizes.num_column_tiles
    num_ranks = launch.num_ranks
    source = tl.arange(0, sizes.RANKS)
    inside = source < num_ranks
    block = tile.group * num_ranks + source
    # Here, so that what it gives needs no register during a product.
    group_first = tl.load(rows.exchange.first_G1 + tile.group)
    first = tl.load(rows.exchange.block_first_B + block, mask=inside, other=0)
    num_rows = tl.load(rows.exchange.block_rows_B + block, mask=inside, other=0)
    flag = tl.load(rows.flags.first_B + block, mask=inside, other=0)
    has_rows = inside & (num_rows > 0)
    done = came
    if sizes.experts:
        if came:
            of_group = tl.cdiv(tl.load(rows.exchange.first_G1 + tile.group + 1) - group_first, tile_rows)
            done = is_last(launch.flags.pushed + tile.group * num_column_tiles + column_tile, of_group)
    else:
        flag += (tile.row - group_first) // tile_rows
        has_rows = has_rows & (first < tile.row + tile.num_rows) & (first + num_rows > tile.row)
    return tl.where(has_rows & done, flag * num_column_tiles + column_tile, -1)


@triton.jit
def raise_at_sources(launch, flag, epoch):  # type: ignore[no-untyped-def]
    """Raises what ``flags_at_sources`` has returned."""
    raised = flag >= 0
    source = tl.where(raised, tl.arange(0, flag.shape[0]), 0)
    raise_flag(at(launch.world, source, launch.offsets.combined, tl.int32) + flag, epoch, raised)


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    launch, rows, data, task, num_tokens, sizes: tl.constexpr, block_columns: tl.constexpr
):
    """Sums some columns of some tokens, once their rows are back, in the order of their choices."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    CHOICES: tl.constexpr = sizes.CHOICES
    sum_tokens: tl.constexpr = sizes.sum_tokens
    num_column_tiles: tl.constexpr = sizes.num_column_tiles
    world, replicas = launch.world, rows.exchange.replicas
    token = task.number // num_column_tiles * sum_tokens + tl.arange(0, sum_tokens)
    column_tile = task.number % num_column_tiles
    rank = tl.load(world + RANK)
    lane = tl.arange(0, sum_tokens * CHOICES)
    choice = lane % CHOICES
    lane_token = task.number // num_column_tiles * sum_tokens + lane // CHOICES
    inside = (choice < K) & (lane_token < num_tokens)
    flag = tl.load(rows.flags.flag_TK + lane_token * K + choice, mask=inside, other=-1)
    expected = flag >= 0
    replica = tl.load(rows.exchange.replica_TK + lane_token * K + choice, mask=expected, other=0)
    peer = tl.load(replicas.rank_P + replica, mask=expected, other=-1).to(tl.int32)
    expert = tl.load(replicas.expert_P + replica, mask=expected, other=-1).to(tl.int32)
    place = tl.where(expected, flag * num_column_tiles + column_tile, 0)
    own_flags = at(world, rank, launch.offsets.combined, tl.int32)
    wait(own_flags + place, expected, task.epoch, peer, expert, place, COMBINE, world)
    task_is_ready(launch.times, task.place, SUM, -1)

    column = column_tile * block_columns + tl.arange(0, block_columns)
    mask = (token < num_tokens)[:, None] & (column < H)[None, :]
    total = tl.zeros([sum_tokens, block_columns], dtype=tl.float32)
    own_staging = at(world, rank, launch.offsets.staging, data.out_TH.dtype.element_ty)
    for k in range(K):
        entry = token.to(tl.int64) * K + k
        came = tl.load(rows.flags.flag_TK + entry, mask=token < num_tokens, other=-1) >= 0
        row = own_staging + (entry * H)[:, None] + column[None, :]
        values = tl.load(row, mask=mask & came[:, None], other=0.0).to(tl.float32)
        weight = None
        if data.weight_TK is not None:
            weight = tl.load(data.weight_TK + entry, mask=came, other=0.0)
            weight = tl.broadcast_to(weight[:, None], values.shape)
        total = plus_term(total, values, weight)
    out = data.out_TH + (token.to(tl.int64) * H)[:, None] + column[None, :]
    tl.store(out, rounded(total, data.out_TH.dtype.element_ty), mask=mask)
