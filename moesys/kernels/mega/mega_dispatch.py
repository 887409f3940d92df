"""MegaKernel A: rows are pulled from their sources while the tiles that have theirs are multiplied.

Forward pulls x and multiplies by ``gate_up``, the activation behind it (``up``); backward pulls the output's gradient
and multiplies by ``down``, the activation's gradient behind it (``activation_gradient``). One launch, or two where
everything is to be pulled before anything is multiplied.

The queue mixes fetches, each of which pulls some rows of one row tile, with the tiles of the product, in such an order
that what a tile waits for comes before it (``tasks``).

N rows here in order of groups, G groups, M row tiles, T tokens of this rank, H hidden, I expert width, U = 2·I where
gated, else I.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.activation_gradient import SUM_COLUMNS, Epilogue, GradientRows, store_gradients
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.experts import ExpertMatrices, low_rank_rows
from moesys.kernels.experts.products import LowRankRows, plus_low_rank, rows_by_matrix
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, tile_of
from moesys.kernels.experts.up import rows_by_halves, store_activations
from moesys.kernels.launch import kernel
from moesys.kernels.mega.arguments import MegaMemory, MegaRows, raise_or_count
from moesys.kernels.mega.exchange import TileSequence
from moesys.kernels.mega.point import MegaPoint, columns_at_once, fuses, launch_options, parts_of, programs_at
from moesys.kernels.mega.push_rows import Task
from moesys.kernels.mega.tasks import FETCH, PRODUCT, begin_task, end_task, leave, mixed_task, take, task_is_ready
from moesys.kernels.symmetric.heap import RANK, at, flag_of
from moesys.kernels.symmetric.signals import DISPATCH, PUBLISH, all_came, arrive, set_off, wait


class DispatchRows(NamedTuple):
    """The matrices, and rows of this rank in order of groups.

    ``rows_NH``: those that are pulled. ``wide_NU``, ``narrow_NI``: h and its activation; backward, the gradient of h
    and the weighted activation. Of backward alone: ``h_NU``, ``weight_N``, ``partial_NS`` (``activation_gradient``);
    ``x_NH``: rows of x, where they are pulled again. ``low_rank``: what LoRA adds to the product.
    """

    rows_NH: Tensor
    matrices: Tensor
    wide_NU: Tensor
    narrow_NI: Tensor
    h_NU: Tensor | None = None
    weight_N: Tensor | None = None
    partial_NS: Tensor | None = None
    x_NH: Tensor | None = None
    low_rank: LowRankRows | None = None


class DispatchSizes(NamedTuple):
    """The constants of the kernel.

    ``matrix_stride``: elements between two matrices; ``RANKS``: a power of two, at least R; ``experts``: flags are of
    experts, not tiles; ``fetch``, ``multiply``: which tasks there are; ``share``: of fetches (``tasks``).
    """

    H: int
    top_k: int
    matrix_stride: int
    RANKS: int
    epilogue: Epilogue
    experts: bool
    fetch: bool
    multiply: bool
    share: int
    fetch_rows: int
    fetch_columns: int


def dispatch_up(
    memory: MegaMemory, rows: MegaRows, experts: ExpertMatrices, block: TileConfig, point: MegaPoint
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (x [N, H], h [N, U], a [N, I]) of the rows that come here, from region ``x`` of every rank; see ``up``.
    LoRA makes two launches of one, as its products of rank r come between fetches and products.
    """
    gate_up = experts.gate_up_EUH
    _, U, H = gate_up.shape
    widths = (H, U, U // 2 if GATED[experts.activation] else U)
    x_NH, h_NU, a_NI = (gate_up.new_empty(len(rows.entry_N), width) for width in widths)
    _launch(memory, rows, DispatchRows(x_NH, gate_up, h_NU, a_NI), experts, block, point)
    return x_NH, h_NU, a_NI


def dispatch_activation_gradient(
    memory: MegaMemory,
    rows: MegaRows,
    experts: ExpertMatrices,
    h_NU: Tensor,
    block: TileConfig,
    point: MegaPoint,
    x_again: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns (dy [N, H], dh [N, U], weighted a [N, I], partial sums float32 [N, ⌈I / 32⌉] of the routing weights'
    gradients), from regions ``x`` and ``weight`` of every rank; see ``activation_gradient``. The last result is rows
    [N, H] of region ``x_again``, which are pulled together with those of dy, or None.
    """
    down = experts.down_EHI
    _, H, I = down.shape
    N = len(rows.entry_N)
    dy_NH, dh_NU, wa_NI = (down.new_empty(N, width) for width in (H, h_NU.shape[1], I))
    weight_N = torch.empty(N, dtype=torch.float32, device=down.device)
    num_sums = triton.cdiv(I, min(SUM_COLUMNS, block.columns))
    partial_NS = torch.empty(N, num_sums, dtype=torch.float32, device=down.device)
    x_NH = torch.empty_like(dy_NH) if x_again else None
    data = DispatchRows(dy_NH, down, dh_NU, wa_NI, h_NU, weight_N, partial_NS, x_NH)
    _launch(memory, rows, data, experts, block, point)
    return dy_NH, dh_NU, wa_NI, partial_NS, x_NH


def _launch(
    memory: MegaMemory, rows: MegaRows, data: DispatchRows, experts: ExpertMatrices, block: TileConfig, point: MegaPoint
) -> None:
    tiles, I, back = rows.tiles.tiles, data.narrow_NI.shape[1], data.h_NU is not None
    pair, activation = experts.low_rank[back], experts.activation
    tiles.require(block)
    by_expert = point.granularity == "expert"
    if block.rows % point.fetch_rows:
        raise ValueError(f"fetch_rows={point.fetch_rows} does not divide {block.rows} rows of a tile; use a divisor")
    most_fetches = len(tiles.group_M) * (block.rows // point.fetch_rows)
    memory.require(most_fetches, len(rows.exchange.replicas.own_G), 0, 0)
    name = "dispatch_activation_gradient" if back else "dispatch_up"
    most_products = len(tiles.group_M) * triton.cdiv(I, block.columns)
    sizes = DispatchSizes(
        H=data.rows_NH.shape[1],
        top_k=rows.top_k,
        matrix_stride=data.matrices.stride(0),
        RANKS=triton.next_power_of_2(memory.heap.num_ranks),
        epilogue=Epilogue(I, activation, GATED[activation], min(SUM_COLUMNS, block.columns)),
        experts=by_expert,
        fetch=True,
        multiply=True,
        share=parts_of(point.dispatch_share),
        fetch_rows=point.fetch_rows,
        fetch_columns=columns_at_once(point.fetch_rows, data.rows_NH, block),
    )
    # Fetches and products: in one launch, or in one each.
    fused = fuses(point, "dispatch") and pair is None
    for fetch, multiply in ((True, True),) if fused else ((True, False), (False, True)):
        if not fetch:
            groups = RowGroups(rows.exchange.first_G1, tiles)
            data = data._replace(low_rank=low_rank_rows(pair, data.rows_NH, groups, block, None, back=back))
        _mega_dispatch[(programs_at(point, memory.heap),)](
            memory.launch(name, fetch * most_fetches + multiply * most_products),
            rows,
            _needed_tiles(rows.tiles, block.raster) if by_expert else None,
            data,
            sizes=sizes._replace(fetch=fetch, multiply=multiply),
            **launch_options(block, data.low_rank),
        )


def _needed_tiles(tiles: TileSequence, raster: int) -> Tensor:
    """Returns how many row tiles must be fetched before each sweep if it waits for whole experts, int32 [sweeps]."""
    ends_M = tiles.group_end_M
    last_of_sweep = (torch.arange(0, len(ends_M), raster, device=ends_M.device) + raster - 1).clamp(max=len(ends_M) - 1)
    return ends_M[last_of_sweep].contiguous()


@kernel
def _mega_dispatch(  # type: ignore[no-untyped-def]
    launch, rows, needed_ptr, data, sizes: tl.constexpr, tiling: tl.constexpr
):
    H: tl.constexpr = sizes.H
    epilogue: tl.constexpr = sizes.epilogue
    I: tl.constexpr = epilogue.I
    halves: tl.constexpr = 2 if epilogue.gated else 1
    activation: tl.constexpr = epilogue.activation
    U: tl.constexpr = halves * I
    fetch: tl.constexpr = sizes.fetch
    multiply: tl.constexpr = sizes.multiply
    experts: tl.constexpr = sizes.experts
    raster: tl.constexpr = tiling.raster
    fetches_of_tile: tl.constexpr = tiling.rows // sizes.fetch_rows
    num_column_tiles: tl.constexpr = (I + tiling.columns - 1) // tiling.columns
    tiles = rows.tiles.tiles
    epoch = tl.load(launch.epoch_1)
    num_row_tiles = tl.load(tiles.count_1)
    num_fetches = num_row_tiles * fetches_of_tile if fetch else 0
    num_products = num_row_tiles * num_column_tiles if multiply else 0
    came = all_came(launch.world)
    task = take(launch.queue_2)
    while task < num_fetches + num_products:
        begin_task(launch.times, task)
        if fetch and multiply:
            is_product, number = mixed_task(
                task,
                num_fetches,
                num_products,
                fetches_of_tile if experts else raster * fetches_of_tile,
                raster * num_column_tiles,
                needed_ptr,
                sizes.share,
            )
        else:
            is_product, number = multiply, task
        if is_product:
            row_tile, column_tile = tile_of(number, num_row_tiles, num_column_tiles, raster)
            group = tl.load(tiles.group_M + row_tile)
            row = tl.load(tiles.row_M + row_tile)
            rank = tl.load(launch.world + RANK).to(tl.int32)
            if experts:  # noqa: SIM108, as both would be computed
                flag = group + tl.arange(0, 1)
            else:
                flag = row_tile * fetches_of_tile + tl.arange(0, fetches_of_tile)
            wait(launch.flags.arrived + flag, flag >= 0, epoch, rank, group, flag, DISPATCH, launch.world)
            task_is_ready(launch.times, task, PRODUCT, group)
            num_rows = tl.minimum(tl.load(rows.exchange.first_G1 + group + 1) - row, tiling.rows)
            matrix = data.matrices + group.to(tl.int64) * sizes.matrix_stride
            base = row.to(tl.int64)
            # Rows that a tile lacks are computed from another's operands, and not stored.
            in_rows = tl.minimum(tl.arange(0, tiling.rows), num_rows - 1)
            left_row = data.rows_NH + base * H + (in_rows * H)[:, None]
            column = column_tile * tiling.columns
            wide_row, narrow_row = data.wide_NU + base * U, data.narrow_NI + base * I
            if data.h_NU is None:
                h = rows_by_halves(left_row, matrix, column, H, I, halves, tiling)
                h = plus_low_rank(h, data.low_rank, row, num_rows, group, column, I, halves, True, tiling)
                store_activations(h, wide_row, narrow_row, num_rows, column, I, activation, halves)
            else:
                da = rows_by_matrix(left_row, matrix, column, H, I, False, tiling)
                da = plus_low_rank(da, data.low_rank, row, num_rows, group, column, I, 1, False, tiling)
                weight = tl.load(data.weight_N + row + in_rows)
                num_sums: tl.constexpr = (I + epilogue.sum_columns - 1) // epilogue.sum_columns
                partial_row = data.partial_NS + base * num_sums
                pointers = GradientRows(data.h_NU + base * U, wide_row, narrow_row, partial_row)
                store_gradients(da, column, weight, num_rows, pointers, epilogue)
        else:
            _fetch(launch, Task(task, number, epoch), came, rows, data, sizes, tiling.rows)
        end_task(launch.times, task)
        task = take(launch.queue_2)
    leave(launch.queue_2)


@triton.jit
def _fetch(  # type: ignore[no-untyped-def]
    launch, task, came, rows, data, sizes: tl.constexpr, tile_rows: tl.constexpr
):
    """Fetches some rows of a row tile from their sources, or from an earlier tile that has the same token. ``came``:
    whether the tables are valid.
    """
    H: tl.constexpr = sizes.H
    fetch_rows: tl.constexpr = sizes.fetch_rows
    fetches_of_tile: tl.constexpr = tile_rows // fetch_rows
    world, table, tiles = launch.world, rows.exchange, rows.tiles.tiles
    row_tile = task.number // fetches_of_tile
    group = tl.load(tiles.group_M + row_tile)
    first = tl.load(tiles.row_M + row_tile) + task.number % fetches_of_tile * fetch_rows
    in_fetch = tl.arange(0, fetch_rows)
    group_end = tl.load(table.first_G1 + group + 1)
    kept = first + in_fetch < group_end
    source = tl.load(table.source_N + first + in_fetch, mask=kept, other=0)
    entry = tl.load(rows.entry_N + first + in_fetch, mask=kept, other=0)
    pulled = kept
    rank = tl.load(world + RANK).to(tl.int32)
    copied, of_first_row = None, None
    if rows.first_row_N is not None:
        first_row = tl.load(rows.first_row_N + first + in_fetch, mask=kept, other=-1)
        pulled = kept & (first_row < 0)
        copied = first_row >= 0
        of_first_row = first_row.to(tl.int64) * H
        tile = tl.load(rows.first_tile_N + first + in_fetch, mask=copied, other=0)
        if sizes.experts:
            flag = tl.load(tiles.group_M + tile, mask=copied, other=0)
        else:
            tile_row = tl.load(tiles.row_M + tile, mask=copied, other=0)
            flag = tile * fetches_of_tile + (first_row - tile_row) // fetch_rows
        arrived = launch.flags.arrived + tl.where(copied, flag, 0)
        # Its barrier is more than is needed, as another wait follows.
        came = came & wait(arrived, copied, task.epoch, rank, group, flag, DISPATCH, world)
    peer = tl.arange(0, sizes.RANKS)
    needed = tl.max((pulled[:, None] & (source[:, None] == peer[None, :])).to(tl.int32), 0) > 0
    flag_of_source = flag_of(world, rank, launch.offsets.published, tl.where(needed, peer, 0))
    came = came & wait(flag_of_source, needed, task.epoch, peer, -1, peer, PUBLISH, world)
    task_is_ready(launch.times, task.place, FETCH, group)

    dtype: tl.constexpr = data.rows_NH.dtype.element_ty
    num_tensors: tl.constexpr = 1 if data.x_NH is None else 2
    through = set_off(launch.pace, pulled & (source != rank), num_tensors * H * dtype.primitive_bitwidth // 8)
    of_token = (entry // sizes.top_k).to(tl.int64) * H
    region = at(world, source, launch.offsets.x, dtype) + of_token
    _copy(data.rows_NH, first, kept, region, copied, of_first_row, sizes)
    if data.x_NH is not None:
        # Copied before the flag is raised: a source with all rows of dx publishes the next epoch, and its x changes.
        region = at(world, source, launch.offsets.x_again, dtype) + of_token
        _copy(data.x_NH, first, kept, region, copied, of_first_row, sizes)
    if data.weight_N is not None:
        weight = tl.load(at(world, source, launch.offsets.weight, tl.float32) + entry, mask=kept, other=0.0)
        tl.store(data.weight_N + first + in_fetch, weight, mask=kept)
    arrive(launch.pace, through)
    tiles_of_group = tl.cdiv(group_end - tl.load(table.first_G1 + group), tile_rows)
    fetches_of_group = tiles_of_group * fetches_of_tile
    raise_or_count(launch.flags, task.number, group, fetches_of_group, task.epoch, came, sizes.experts)


@triton.jit
def _copy(rows_NH, first, kept, from_row, copied, of_first_row, sizes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the rows ``first`` and behind it that are ``kept``: from their sources, those that are ``copied`` from the
    row of ``rows_NH`` that begins at ``of_first_row``.
    """
    H: tl.constexpr = sizes.H
    in_fetch = tl.arange(0, sizes.fetch_rows)
    if of_first_row is not None:
        from_row = tl.where(copied, rows_NH + of_first_row, from_row)
        if H * rows_NH.dtype.element_ty.primitive_bitwidth % 128 == 0:
            # Both addresses are aligned, which the compiler does not see behind the choice.
            from_row = tl.multiple_of(from_row, 16)
    here_row = rows_NH + first.to(tl.int64) * H + in_fetch * H
    for start in range(0, H, sizes.fetch_columns):
        column = start + tl.arange(0, sizes.fetch_columns)
        in_row = (column < H)[None, :]
        values = tl.load(from_row[:, None] + column[None, :], mask=kept[:, None] & in_row, other=0.0)
        tl.store(here_row[:, None] + column[None, :], values, mask=kept[:, None] & in_row)
