"""MegaKernel A: rows are pulled from their sources while the tiles that have theirs are multiplied.

Forward pulls x and multiplies by ``gate_up``, the activation behind it (``up``); backward pulls the output's gradient
and multiplies by ``down``, the activation's gradient behind it (``activation_gradient``). One launch, or two where
everything is to be pulled before anything is multiplied.

The queue mixes fetches, each of which pulls some rows of one row tile, with the tiles of the product, in such an order
that what a tile waits for comes before it (``task_queue``).

N rows here in order of groups, G groups, M row tiles, T tokens of this rank, H hidden, I expert width, U = 2·I where
gated, else I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.activation_gradient import SUM_COLUMNS, store_gradients
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.products import rows_by_matrix
from moesys.kernels.experts.tiles import Block, tile_of
from moesys.kernels.experts.up import rows_by_halves, store_activations
from moesys.kernels.mega.arguments import (
    MegaMemory,
    MegaPoint,
    MegaRows,
    launch_options,
    parts_of,
    raise_or_count,
)
from moesys.kernels.mega.exchange import OrderedTiles
from moesys.kernels.mega.task_queue import leave, mixed_task, take
from moesys.kernels.mega.task_times import FETCH, PRODUCT, begin_task, end_task, task_is_ready
from moesys.kernels.symmetric.heap import RANK, at
from moesys.kernels.symmetric.pacing import arrive, set_off
from moesys.kernels.symmetric.signals import DISPATCH, PUBLISH, wait

# Columns that a fetch moves at a time: 16 bytes for each of 256 threads, over 32 rows of 16 bits.
FETCH_COLUMNS = 64


def dispatch_up(
    memory: MegaMemory, rows: MegaRows, gate_up: Tensor, activation: str, block: Block, point: MegaPoint
) -> tuple[Tensor, Tensor, Tensor]:
    """(x [N, H], h [N, U], a [N, I]) of the rows that come here, from region ``x`` of every rank; see ``up``."""
    _, U, H = gate_up.shape
    widths = (H, U, U // 2 if GATED[activation] else U)
    x_NH, h_NU, a_NI = (gate_up.new_empty(len(rows.entry_N), width) for width in widths)
    _launch(memory, rows, x_NH, gate_up, h_NU, a_NI, None, None, None, activation, block, point)
    return x_NH, h_NU, a_NI


def dispatch_activation_gradient(
    memory: MegaMemory,
    rows: MegaRows,
    down: Tensor,
    h_NU: Tensor,
    activation: str,
    block: Block,
    point: MegaPoint,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy [N, H], dh [N, U], weighted a [N, I], partial sums float32 [N, ⌈I / 32⌉] of the routing weights' gradients),
    from regions ``x`` and ``weight`` of every rank; see ``activation_gradient``.
    """
    _, H, I = down.shape
    N = len(rows.entry_N)
    dy_NH, dh_NU, wa_NI = (down.new_empty(N, width) for width in (H, h_NU.shape[1], I))
    weight_N = torch.empty(N, dtype=torch.float32, device=down.device)
    num_sums = triton.cdiv(I, min(SUM_COLUMNS, block.columns))
    partial_NS = torch.empty(N, num_sums, dtype=torch.float32, device=down.device)
    _launch(memory, rows, dy_NH, down, dh_NU, wa_NI, h_NU, weight_N, partial_NS, activation, block, point)
    return dy_NH, dh_NU, wa_NI, partial_NS


def _launch(
    memory: MegaMemory,
    rows: MegaRows,
    rows_NH: Tensor,
    matrices: Tensor,
    wide_NU: Tensor,
    narrow_NI: Tensor,
    h_NU: Tensor | None,
    weight_N: Tensor | None,
    partial_NS: Tensor | None,
    activation: str,
    block: Block,
    point: MegaPoint,
) -> None:
    heap, table, tiles = memory.heap, rows.exchange, rows.tiles.tiles
    tiles.require(block)
    by_expert = point.granularity == "expert"
    if block.rows % point.fetch_rows:
        raise ValueError(f"fetch_rows={point.fetch_rows} does not divide {block.rows} rows of a tile; use a divisor")
    most_fetches = len(tiles.group_M) * (block.rows // point.fetch_rows)
    memory.require(most_fetches, len(rows.matrix_G), 0, 0)
    name = "dispatch_up" if h_NU is None else "dispatch_activation_gradient"
    most_products = len(tiles.group_M) * triton.cdiv(narrow_NI.shape[1], block.columns)
    # Fetches and products: in one launch, or in one each.
    for fetch, multiply in ((True, True),) if point.fuse_dispatch else ((True, False), (False, True)):
        _mega_dispatch[(point.num_programs(rows_NH.device),)](
            heap.world,
            memory.link,
            heap.offset("published"),
            heap.offset("x"),
            heap.offset("weight"),
            memory.epoch_1,
            memory.queue_2,
            memory.arrived,
            memory.fetched_G,
            table.first_G1,
            _needed_tiles(rows.tiles, block.raster) if by_expert else None,
            tiles.group_M,
            tiles.row_M,
            tiles.count_1,
            rows.matrix_G,
            table.source_N,
            rows.entry_N,
            rows.first_row_N,
            rows.first_tile_N,
            rows_NH,
            matrices,
            wide_NU,
            narrow_NI,
            h_NU,
            weight_N,
            partial_NS,
            memory.records(name, fetch * most_fetches + multiply * most_products),
            H=rows_NH.shape[1],
            I=narrow_NI.shape[1],
            matrix_stride=matrices.stride(0),
            top_k=rows.top_k,
            RANKS=triton.next_power_of_2(heap.num_ranks),
            activation=activation,
            gated=GATED[activation],
            experts=by_expert,
            fetch=fetch,
            multiply=multiply,
            share=parts_of(point.dispatch_share),
            fetch_rows=point.fetch_rows,
            fetch_columns=FETCH_COLUMNS,
            sum_columns=min(SUM_COLUMNS, block.columns),
            **launch_options(block, multiply),
        )


def _needed_tiles(tiles: OrderedTiles, raster: int) -> Tensor:
    """How many row tiles must have been fetched before each sweep where it waits for whole experts, int32 [sweeps]."""
    ends_M = tiles.group_end_M
    last_of_sweep = (torch.arange(0, len(ends_M), raster, device=ends_M.device) + raster - 1).clamp(max=len(ends_M) - 1)
    return ends_M[last_of_sweep].contiguous()


@triton.jit
def _mega_dispatch(  # type: ignore[no-untyped-def]
    world,
    link_ptr,
    published,
    x,
    weights,
    epoch_ptr,
    queue_ptr,
    arrived_ptr,
    fetched_ptr,
    first_ptr,
    needed_ptr,
    group_ptr,
    row_ptr,
    count_ptr,
    matrix_ptr,
    source_ptr,
    entry_ptr,
    first_row_ptr,
    first_tile_ptr,
    rows_ptr,
    matrices_ptr,
    wide_ptr,
    narrow_ptr,
    h_ptr,
    weight_ptr,
    partial_ptr,
    times_ptr,
    H: tl.constexpr,
    I: tl.constexpr,
    matrix_stride: tl.constexpr,
    top_k: tl.constexpr,
    RANKS: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    experts: tl.constexpr,
    fetch: tl.constexpr,
    multiply: tl.constexpr,
    share: tl.constexpr,
    fetch_rows: tl.constexpr,
    fetch_columns: tl.constexpr,
    sum_columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    raster: tl.constexpr,
    stages: tl.constexpr,
    operands: tl.constexpr,
):
    U: tl.constexpr = 2 * I if gated else I
    fetches_of_tile: tl.constexpr = block_rows // fetch_rows
    num_column_tiles: tl.constexpr = (I + block_columns - 1) // block_columns
    epoch = tl.load(epoch_ptr)
    num_row_tiles = tl.load(count_ptr)
    num_fetches = num_row_tiles * fetches_of_tile if fetch else 0
    num_products = num_row_tiles * num_column_tiles if multiply else 0
    task = take(queue_ptr)
    while task < num_fetches + num_products:
        begin_task(times_ptr, task)
        if fetch and multiply:
            is_product, number = mixed_task(
                task,
                num_fetches,
                num_products,
                fetches_of_tile if experts else raster * fetches_of_tile,
                raster * num_column_tiles,
                needed_ptr,
                share,
            )
        else:
            is_product, number = multiply, task
        if is_product:
            row_tile, column_tile = tile_of(number, num_row_tiles, num_column_tiles, raster)
            group = tl.load(group_ptr + row_tile)
            row = tl.load(row_ptr + row_tile)
            rank = tl.load(world + RANK).to(tl.int32)
            if experts:  # noqa: SIM108, as both would be computed
                flag = group + tl.arange(0, 1)
            else:
                flag = row_tile * fetches_of_tile + tl.arange(0, fetches_of_tile)
            wait(arrived_ptr + flag, flag >= 0, epoch, rank, group, flag, DISPATCH, world)
            task_is_ready(times_ptr, task, PRODUCT, group)
            num_rows = tl.minimum(tl.load(first_ptr + group + 1) - row, block_rows)
            matrix = matrices_ptr + tl.load(matrix_ptr + group).to(tl.int64) * matrix_stride
            base = row.to(tl.int64)
            # Rows that a tile lacks are computed from another's operands, and not stored.
            in_rows = tl.minimum(tl.arange(0, block_rows), num_rows - 1)
            left_row = rows_ptr + base * H + (in_rows * H)[:, None]
            column = column_tile * block_columns
            wide_row, narrow_row = wide_ptr + base * U, narrow_ptr + base * I
            if h_ptr is None:
                h = rows_by_halves(left_row, matrix, column, H, I, U // I, block_columns, block_contraction, stages)
                store_activations(h, wide_row, narrow_row, num_rows, column, I, activation, U // I)
            else:
                da = rows_by_matrix(left_row, matrix, column, H, I, False, block_columns, block_contraction, stages)
                weight = tl.load(weight_ptr + row + in_rows)
                num_sums: tl.constexpr = (I + sum_columns - 1) // sum_columns
                store_gradients(
                    da, column, weight, num_rows, h_ptr + base * U, wide_row, narrow_row, partial_ptr + base * num_sums,
                    I, activation, gated, sum_columns,
                )  # fmt: skip
        else:
            _fetch(
                world, link_ptr, published, x, weights, epoch, arrived_ptr, fetched_ptr, number,
                first_ptr, group_ptr, row_ptr, source_ptr, entry_ptr, first_row_ptr, first_tile_ptr,
                rows_ptr, weight_ptr, times_ptr, task,
                H, top_k, RANKS, experts, block_rows, fetch_rows, fetch_columns,
            )  # fmt: skip
        end_task(times_ptr, task)
        task = take(queue_ptr)
    leave(queue_ptr)


@triton.jit
def _fetch(  # type: ignore[no-untyped-def]
    world, link_ptr, published, x, weights, epoch, arrived_ptr, fetched_ptr, number,
    first_ptr, group_ptr, row_ptr, source_ptr, entry_ptr, first_row_ptr, first_tile_ptr,
    rows_ptr, weight_ptr, times_ptr, task,
    H: tl.constexpr, top_k: tl.constexpr, RANKS: tl.constexpr, experts: tl.constexpr,
    block_rows: tl.constexpr, fetch_rows: tl.constexpr, fetch_columns: tl.constexpr,
):  # fmt: skip
    """Some rows of a row tile come here: from their sources, or, if an earlier tile has the same token, from there."""
    fetches_of_tile: tl.constexpr = block_rows // fetch_rows
    row_tile = number // fetches_of_tile
    group = tl.load(group_ptr + row_tile)
    first = tl.load(row_ptr + row_tile) + number % fetches_of_tile * fetch_rows
    in_fetch = tl.arange(0, fetch_rows)
    group_end = tl.load(first_ptr + group + 1)
    kept = first + in_fetch < group_end
    source = tl.load(source_ptr + first + in_fetch, mask=kept, other=0)
    entry = tl.load(entry_ptr + first + in_fetch, mask=kept, other=0)
    pulled = kept
    rank = tl.load(world + RANK).to(tl.int32)
    if first_row_ptr is not None:
        first_row = tl.load(first_row_ptr + first + in_fetch, mask=kept, other=-1)
        pulled = kept & (first_row < 0)
        copied = first_row >= 0
        tile = tl.load(first_tile_ptr + first + in_fetch, mask=copied, other=0)
        if experts:
            flag = tl.load(group_ptr + tile, mask=copied, other=0)
        else:
            tile_row = tl.load(row_ptr + tile, mask=copied, other=0)
            flag = tile * fetches_of_tile + (first_row - tile_row) // fetch_rows
        wait(arrived_ptr + tl.where(copied, flag, 0), copied, epoch, rank, group, flag, DISPATCH, world)
    peer = tl.arange(0, RANKS)
    needed = tl.max((pulled[:, None] & (source[:, None] == peer[None, :])).to(tl.int32), 0) > 0
    flag_of_source = at(world, rank, published, tl.int32) + tl.where(needed, peer, 0)
    wait(flag_of_source, needed, epoch, peer, -1, peer, PUBLISH, world)
    task_is_ready(times_ptr, task, FETCH, group)

    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    through = set_off(link_ptr, pulled & (source != rank), H * dtype.primitive_bitwidth // 8)
    away_row = at(world, source, x, dtype) + (entry // top_k).to(tl.int64) * H
    here_row = rows_ptr + first.to(tl.int64) * H + in_fetch * H
    for start in range(0, H, fetch_columns):
        column = start + tl.arange(0, fetch_columns)
        in_row = (column < H)[None, :]
        values = tl.load(away_row[:, None] + column[None, :], mask=pulled[:, None] & in_row, other=0.0)
        if first_row_ptr is not None:
            copy_row = rows_ptr + tl.maximum(first_row, 0).to(tl.int64) * H
            copies = tl.load(copy_row[:, None] + column[None, :], mask=copied[:, None] & in_row, other=0.0)
            values = tl.where(copied[:, None], copies, values)
        tl.store(here_row[:, None] + column[None, :], values, mask=kept[:, None] & in_row)
    if weight_ptr is not None:
        weight = tl.load(at(world, source, weights, tl.float32) + entry, mask=kept, other=0.0)
        tl.store(weight_ptr + first + in_fetch, weight, mask=kept)
    arrive(link_ptr, through)
    tiles_of_group = tl.cdiv(group_end - tl.load(first_ptr + group), block_rows)
    raise_or_count(arrived_ptr, fetched_ptr, number, group, tiles_of_group * fetches_of_tile, epoch, experts)
