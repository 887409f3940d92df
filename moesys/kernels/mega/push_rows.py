"""How MegaKernel B's rows go home, and what is done with them there: device functions of its tasks.

A source's staging has a place for each of its choices, so whoever pushes needs to ask nobody; then he raises the flag
that the source's sums wait for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesys.kernels.experts.activation_gradient import sum_of_partials
from moesys.kernels.experts.combine import plus_term
from moesys.kernels.experts.numerics import rounded
from moesys.kernels.mega.arguments import is_last
from moesys.kernels.mega.task_times import PUSH, SUM, task_is_ready
from moesys.kernels.symmetric.heap import RANK, at
from moesys.kernels.symmetric.signals import COMBINE, DISPATCH, raise_flag, wait


@triton.jit
def push_tile(out, home_row, column, kept, H: tl.constexpr, push_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile goes home from registers; halved until it is ``push_columns`` wide, as its addresses take two each."""
    if out.shape[1] > push_columns:
        left, right = out.reshape(out.shape[0], 2, out.shape[1] // 2).permute(0, 2, 1).split()
        push_tile(left, home_row, column, kept, H, push_columns)
        push_tile(right, home_row, column + out.shape[1] // 2, kept, H, push_columns)
    else:
        columns = column + tl.arange(0, out.shape[1])
        tl.store(home_row[:, None] + columns[None, :], out, mask=kept[:, None] & (columns < H)[None, :])


@triton.jit
def push_rows(  # type: ignore[no-untyped-def]
    world, staging, multiplied_ptr, epoch, row_tile, group, row, out_rows_ptr, kept, source, entry,
    times_ptr, task, H: tl.constexpr, num_column_tiles: tl.constexpr, push_columns: tl.constexpr,
):  # fmt: skip
    """The finished rows of a tile go home."""
    for column_tile in range(num_column_tiles):
        flag = row_tile * num_column_tiles + column_tile + tl.arange(0, 1)
        rank = tl.load(world + RANK).to(tl.int32)
        wait(multiplied_ptr + flag, flag >= 0, epoch, rank, group, flag, DISPATCH, world)
    task_is_ready(times_ptr, task, PUSH, group)
    dtype: tl.constexpr = out_rows_ptr.dtype.element_ty
    home_row = at(world, source, staging, dtype) + entry.to(tl.int64) * H
    here_row = out_rows_ptr + row.to(tl.int64) * H + tl.arange(0, kept.shape[0]) * H
    for start in range(0, H, push_columns):
        column = start + tl.arange(0, push_columns)
        mask = kept[:, None] & (column < H)[None, :]
        tl.store(
            home_row[:, None] + column[None, :], tl.load(here_row[:, None] + column[None, :], mask=mask), mask=mask
        )


@triton.jit
def push_dweights(world, dweights, partial_ptr, row, kept, source, entry, num_sums: tl.constexpr):  # type: ignore[no-untyped-def]
    """The routing weights' gradients of a tile's rows go home: partial sums, added in order."""
    total = sum_of_partials(partial_ptr, row + tl.arange(0, kept.shape[0]), kept, num_sums)
    tl.store(at(world, source, dweights, tl.float32) + entry, total, mask=kept)


@triton.jit
def raise_at_sources(  # type: ignore[no-untyped-def]
    world, combined, pushed_ptr, epoch, group, row, num_rows, tile_in_group, tiles_of_group, column_tile,
    block_first_ptr, block_rows_ptr, flag_of_block_ptr, num_ranks,
    num_column_tiles: tl.constexpr, RANKS: tl.constexpr, experts: tl.constexpr,
):  # fmt: skip
    """Tells the sources of a tile's rows, or of an expert's when all its tiles are done, that these columns came."""
    source = tl.arange(0, RANKS)
    inside = source < num_ranks
    block = group * num_ranks + source
    first = tl.load(block_first_ptr + block, mask=inside, other=0)
    rows = tl.load(block_rows_ptr + block, mask=inside, other=0)
    flag = tl.load(flag_of_block_ptr + block, mask=inside, other=0)
    has_rows = inside & (rows > 0)
    if experts:
        tell = is_last(pushed_ptr + group * num_column_tiles + column_tile, tiles_of_group)
    else:
        tell = True
        flag += tile_in_group
        has_rows = has_rows & (first < row + num_rows) & (first + rows > row)
    if tell:
        at_source = at(world, tl.where(inside, source, 0), combined, tl.int32)
        raise_flag(at_source + flag * num_column_tiles + column_tile, epoch, has_rows)


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    world, staging, combined, epoch, number, flag_ptr, replica_ptr, rank_of_replica_ptr, expert_of_replica_ptr,
    weight_ptr, out_ptr, times_ptr, task, num_tokens, H: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    num_column_tiles: tl.constexpr, block_columns: tl.constexpr, sum_tokens: tl.constexpr,
):  # fmt: skip
    """Some columns of some tokens: their rows, when they have come home, in the order of their choices."""
    token = number // num_column_tiles * sum_tokens + tl.arange(0, sum_tokens)
    column_tile = number % num_column_tiles
    rank = tl.load(world + RANK)
    lane = tl.arange(0, sum_tokens * CHOICES)
    choice = lane % CHOICES
    lane_token = number // num_column_tiles * sum_tokens + lane // CHOICES
    inside = (choice < K) & (lane_token < num_tokens)
    flag = tl.load(flag_ptr + lane_token * K + choice, mask=inside, other=-1)
    expected = flag >= 0
    replica = tl.load(replica_ptr + lane_token * K + choice, mask=expected, other=0)
    peer = tl.load(rank_of_replica_ptr + replica, mask=expected, other=-1).to(tl.int32)
    expert = tl.load(expert_of_replica_ptr + replica, mask=expected, other=-1).to(tl.int32)
    place = tl.where(expected, flag * num_column_tiles + column_tile, 0)
    own_flags = at(world, rank, combined, tl.int32)
    wait(own_flags + place, expected, epoch, peer, expert, place, COMBINE, world)
    task_is_ready(times_ptr, task, SUM, -1)

    column = column_tile * block_columns + tl.arange(0, block_columns)
    mask = (token < num_tokens)[:, None] & (column < H)[None, :]
    total = tl.zeros([sum_tokens, block_columns], dtype=tl.float32)
    own_staging = at(world, rank, staging, out_ptr.dtype.element_ty)
    for k in range(K):
        entry = token.to(tl.int64) * K + k
        came = tl.load(flag_ptr + entry, mask=token < num_tokens, other=-1) >= 0
        row = own_staging + (entry * H)[:, None] + column[None, :]
        values = tl.load(row, mask=mask & came[:, None], other=0.0).to(tl.float32)
        weight = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + entry, mask=came, other=0.0)
            weight = tl.broadcast_to(weight[:, None], values.shape)
        total = plus_term(total, values, weight)
    out = out_ptr + (token.to(tl.int64) * H)[:, None] + column[None, :]
    tl.store(out, rounded(total, out_ptr.dtype.element_ty), mask=mask)
