"""MegaKernel B: rows are multiplied, pushed home as they come, and summed there; weight gradients fill the waiting.

Forward multiplies activations by ``down`` and sums each token's rows by their routing weights (``combine``); backward
multiplies the gradient of h by ``gate_up``, sums without weights, sends the routing weights' gradients along and has
the tiles of both weight gradients. One launch, or one of each kind of task after another.

The queue: tiles of the product, mixed with pushes where those are tasks of their own; then tiles of weight gradients
mixed with sums. A sum waits for flags that peers raise, and a peer raises them without waiting for anyone's sums.

N rows here in order of groups, G groups, T tokens of this rank, K choices of each, H hidden, L width of a row here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.numerics import rounded
from moesys.kernels.experts.products import rows_by_matrix
from moesys.kernels.experts.tiles import Block, tile_of
from moesys.kernels.experts.weight_gradient import store_outer_product
from moesys.kernels.mega.arguments import MegaMemory, MegaPoint, MegaRows, launch_options, parts_of
from moesys.kernels.mega.push_rows import push_dweights, push_rows, push_tile, raise_at_sources, sum_rows
from moesys.kernels.mega.task_queue import WHOLE, leave, mixed_task, take
from moesys.kernels.mega.task_times import OUTER_PRODUCT, PRODUCT, begin_task, end_task, task_is_ready
from moesys.kernels.symmetric.heap import RANK, at
from moesys.kernels.symmetric.pacing import arrive, set_off
from moesys.kernels.symmetric.signals import raise_flag

# Columns that a push moves at a time.
PUSH_COLUMNS = 32


class WeightGradients(NamedTuple):
    """Both sides of two weight gradients, rows [N, width] of this rank in order of groups, and where they go.

    ``up``: dh by x into [G, U, H]; ``down``: dy by weighted activations into [G, H, I]; results float32.
    """

    dh_NU: Tensor
    x_NH: Tensor
    dgate_up_GUH: Tensor
    dy_NH: Tensor
    wa_NI: Tensor
    ddown_GHI: Tensor


def down_combine(
    memory: MegaMemory, rows: MegaRows, a_NI: Tensor, down: Tensor, weight_TK: Tensor, block: Block, point: MegaPoint
) -> Tensor:
    """y [T, H]: each token's rows by ``down``, wherever they are, times its routing weights (float32)."""
    return _launch(memory, rows, a_NI, down, True, weight_TK, None, None, block, block, point)


def input_gradient_combine(
    memory: MegaMemory,
    rows: MegaRows,
    dh_NU: Tensor,
    gate_up: Tensor,
    partial_NS: Tensor,
    gradients: WeightGradients | None,
    block: Block,
    outer: Block,
    point: MegaPoint,
) -> tuple[Tensor, Tensor]:
    """(dx [T, H], dweight float32 [T, K]); writes ``gradients``, whose tiles are ``outer``, where there are any."""
    heap = memory.heap
    dx_TH = _launch(memory, rows, dh_NU, gate_up, False, None, partial_NS, gradients, block, outer, point)
    T, K = rows.exchange.replica_TK.shape
    dweight_TK = heap.own("dweight")[: T * K].view(T, K)
    # A dropped choice has none, and what lies in the region is another micro-batch's.
    return dx_TH, torch.where(rows.exchange.replica_TK >= 0, dweight_TK, 0.0)


def _launch(
    memory: MegaMemory,
    rows: MegaRows,
    rows_NL: Tensor,
    matrices: Tensor,
    transposed: bool,
    weight_TK: Tensor | None,
    partial_NS: Tensor | None,
    gradients: WeightGradients | None,
    block: Block,
    outer: Block,
    point: MegaPoint,
) -> Tensor:
    heap, table, tiles = memory.heap, rows.exchange, rows.tiles.tiles
    tiles.require(block)
    T, K = table.replica_TK.shape
    H = heap.plan.regions["x"].shape[1]
    N, L = rows_NL.shape
    device = rows_NL.device
    out_TH = torch.empty(T, H, dtype=rows_NL.dtype, device=device)
    apart = point.combine_share > 0 or not point.fuse_combine
    memory.require(0, len(rows.matrix_G), len(tiles.group_M), triton.cdiv(H, block.columns))
    # Rows that are pushed by tasks of their own lie here until then.
    out_NH = torch.empty(N, H, dtype=rows_NL.dtype, device=device) if apart else None
    none = (None,) * 6
    dh, x, dgate_up, dy, wa, ddown = none if gradients is None else gradients
    outer_options = {"outer_rows": outer.rows, "outer_columns": outer.columns, "outer_contraction": outer.contraction}
    kinds: tuple[tuple[bool, ...], ...] = ((True, True, True, True),)
    if not point.fuse_combine:
        kinds = ((True, False, False, False), (False, True, False, False), (False, False, True, True))
    name = "down_combine" if transposed else "input_gradient_combine"
    row_tiles, column_tiles = len(tiles.group_M), triton.cdiv(H, block.columns)
    most_outer = 0 if gradients is None else len(rows.matrix_G) * _outer_tiles(gradients, outer)
    most_sums = triton.cdiv(T, point.sum_tokens) * column_tiles
    for multiply, push, outer_products, sums in kinds:
        most_tasks = row_tiles * (multiply * column_tiles + push) + outer_products * most_outer + sums * most_sums
        _mega_combine[(point.num_programs(device),)](
            heap.world,
            memory.link,
            heap.offset("staging"),
            heap.offset("combined"),
            heap.offset("dweight"),
            memory.epoch_1,
            memory.queue_2,
            memory.multiplied,
            memory.pushed,
            table.first_G1,
            tiles.group_M,
            tiles.row_M,
            tiles.count_1,
            rows.matrix_G,
            table.source_N,
            rows.entry_N,
            table.block_first_B,
            table.block_rows_B,
            rows.flags.first_B,
            rows_NL,
            matrices,
            out_NH,
            partial_NS,
            rows.flags.flag_TK,
            table.replica_TK,
            table.replicas.rank_P,
            table.replicas.expert_P,
            weight_TK,
            out_TH,
            dh,
            x,
            dgate_up,
            dy,
            wa,
            ddown,
            memory.records(name, most_tasks),
            T,
            len(rows.matrix_G),
            heap.num_ranks,
            H=H,
            L=L,
            K=K,
            matrix_stride=matrices.stride(0),
            up_stride=0 if dgate_up is None else dgate_up.stride(0),
            down_stride=0 if ddown is None else ddown.stride(0),
            U=0 if dh is None else dh.shape[1],
            I=0 if wa is None else wa.shape[1],
            num_sums=0 if partial_NS is None else partial_NS.shape[1],
            RANKS=triton.next_power_of_2(heap.num_ranks),
            CHOICES=triton.next_power_of_2(K),
            transposed=transposed,
            experts=point.granularity == "expert",
            apart=apart,
            multiply=multiply,
            push=push and apart,
            outer_products=outer_products and gradients is not None,
            sums=sums,
            product_share=WHOLE.value - parts_of(point.combine_share) if point.fuse_combine else 0,
            outer_share=WHOLE.value - parts_of(point.reduce_share),
            sum_tokens=point.sum_tokens,
            push_columns=PUSH_COLUMNS,
            **outer_options,
            **launch_options(block, multiply or (outer_products and gradients is not None)),
        )
    return out_TH


def _outer_tiles(gradients: WeightGradients, outer: Block) -> int:
    """Tiles of both weight gradients of one group."""
    shapes = (gradients.dgate_up_GUH.shape[1:], gradients.ddown_GHI.shape[1:])
    return sum(triton.cdiv(left, outer.rows) * triton.cdiv(right, outer.columns) for left, right in shapes)


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def _mega_combine(  # type: ignore[no-untyped-def]
    world,
    link_ptr,
    staging,
    combined,
    dweights,
    epoch_ptr,
    queue_ptr,
    multiplied_ptr,
    pushed_ptr,
    first_ptr,
    group_ptr,
    row_ptr,
    count_ptr,
    matrix_ptr,
    source_ptr,
    entry_ptr,
    block_first_ptr,
    block_rows_ptr,
    flag_of_block_ptr,
    rows_ptr,
    matrices_ptr,
    out_rows_ptr,
    partial_ptr,
    flag_ptr,
    replica_ptr,
    rank_of_replica_ptr,
    expert_of_replica_ptr,
    weight_ptr,
    out_ptr,
    dh_ptr,
    x_ptr,
    dgate_up_ptr,
    dy_ptr,
    wa_ptr,
    ddown_ptr,
    times_ptr,
    num_tokens,
    num_groups,
    num_ranks,
    H: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    matrix_stride: tl.constexpr,
    up_stride: tl.constexpr,
    down_stride: tl.constexpr,
    U: tl.constexpr,
    I: tl.constexpr,
    num_sums: tl.constexpr,
    RANKS: tl.constexpr,
    CHOICES: tl.constexpr,
    transposed: tl.constexpr,
    experts: tl.constexpr,
    apart: tl.constexpr,
    multiply: tl.constexpr,
    push: tl.constexpr,
    outer_products: tl.constexpr,
    sums: tl.constexpr,
    product_share: tl.constexpr,
    outer_share: tl.constexpr,
    sum_tokens: tl.constexpr,
    push_columns: tl.constexpr,
    outer_rows: tl.constexpr,
    outer_columns: tl.constexpr,
    outer_contraction: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_contraction: tl.constexpr,
    raster: tl.constexpr,
    stages: tl.constexpr,
    operands: tl.constexpr,
):
    num_column_tiles: tl.constexpr = (H + block_columns - 1) // block_columns
    tiles_of_up: tl.constexpr = ((U + outer_rows - 1) // outer_rows) * ((H + outer_columns - 1) // outer_columns)
    tiles_of_down: tl.constexpr = ((H + outer_rows - 1) // outer_rows) * ((I + outer_columns - 1) // outer_columns)
    epoch = tl.load(epoch_ptr)
    num_row_tiles = tl.load(count_ptr)
    num_products = num_row_tiles * num_column_tiles if multiply else 0
    num_pushes = num_row_tiles if push else 0
    num_outer = num_groups * (tiles_of_up + tiles_of_down) if outer_products else 0
    num_sum_tasks = tl.cdiv(num_tokens, sum_tokens) * num_column_tiles if sums else 0
    task = take(queue_ptr)
    while task < num_products + num_pushes + num_outer + num_sum_tasks:
        begin_task(times_ptr, task)
        if task < num_products + num_pushes:
            is_push, number = mixed_task(
                task, num_products, num_pushes, raster * num_column_tiles, raster, None, product_share
            )
            if is_push:
                row_tile, column_tile = number, 0
            else:
                row_tile, column_tile = tile_of(number, num_row_tiles, num_column_tiles, raster)
            group = tl.load(group_ptr + row_tile)
            row = tl.load(row_ptr + row_tile)
            group_first = tl.load(first_ptr + group)
            num_rows = tl.minimum(tl.load(first_ptr + group + 1) - row, block_rows)
            in_rows = tl.arange(0, block_rows)
            kept = in_rows < num_rows
            tiles_of_group = tl.cdiv(tl.load(first_ptr + group + 1) - group_first, block_rows)
            tile_in_group = (row - group_first) // block_rows
            if is_push:
                if push:
                    source = tl.load(source_ptr + row + in_rows, mask=kept, other=0)
                    entry = tl.load(entry_ptr + row + in_rows, mask=kept, other=0)
                    if partial_ptr is not None:
                        push_dweights(world, dweights, partial_ptr, row, kept, source, entry, num_sums)
                    push_rows(
                        world, staging, multiplied_ptr, epoch, row_tile, group, row, out_rows_ptr, kept, source, entry,
                        times_ptr, task, H, num_column_tiles, push_columns,
                    )  # fmt: skip
                    # Not before, as rows that are still to be computed hold no link.
                    row_bytes: tl.constexpr = H * out_ptr.dtype.element_ty.primitive_bitwidth // 8
                    arrive(link_ptr, set_off(link_ptr, kept & (source != tl.load(world + RANK)), row_bytes))
                    for each_column in range(num_column_tiles):
                        raise_at_sources(
                            world, combined, pushed_ptr, epoch, group, row, num_rows, tile_in_group, tiles_of_group,
                            each_column, block_first_ptr, block_rows_ptr, flag_of_block_ptr, num_ranks,
                            num_column_tiles, RANKS, experts,
                        )  # fmt: skip
            else:
                if multiply:
                    task_is_ready(times_ptr, task, PRODUCT, group)
                    matrix = matrices_ptr + tl.load(matrix_ptr + group).to(tl.int64) * matrix_stride
                    # Rows that a tile lacks are computed from another's operands, and not stored.
                    left_row = rows_ptr + row.to(tl.int64) * L + (tl.minimum(in_rows, num_rows - 1) * L)[:, None]
                    column = column_tile * block_columns
                    out = rows_by_matrix(
                        left_row, matrix, column, L, H, transposed, block_columns, block_contraction, stages
                    )
                    out = rounded(out, out_ptr.dtype.element_ty)
                    if apart:
                        out_row = out_rows_ptr + row.to(tl.int64) * H + in_rows * H
                        push_tile(out, out_row, column, kept, H, push_columns)
                        raise_flag(multiplied_ptr + row_tile * num_column_tiles + column_tile, epoch)
                    else:
                        # Here, so that they need no registers during the product.
                        source = tl.load(source_ptr + row + in_rows, mask=kept, other=0)
                        entry = tl.load(entry_ptr + row + in_rows, mask=kept, other=0)
                        tile_bytes = tl.minimum(block_columns, H - column_tile * block_columns)
                        tile_bytes *= out_ptr.dtype.element_ty.primitive_bitwidth // 8
                        through = set_off(link_ptr, kept & (source != tl.load(world + RANK)), tile_bytes)
                        home_row = at(world, source, staging, out_ptr.dtype.element_ty) + entry.to(tl.int64) * H
                        push_tile(out, home_row, column, kept, H, push_columns)
                        if partial_ptr is not None:  # noqa: SIM102, as one of these is known when it is compiled
                            if column_tile == 0:
                                push_dweights(world, dweights, partial_ptr, row, kept, source, entry, num_sums)
                        arrive(link_ptr, through)
                        raise_at_sources(
                            world, combined, pushed_ptr, epoch, group, row, num_rows, tile_in_group, tiles_of_group,
                            column_tile, block_first_ptr, block_rows_ptr, flag_of_block_ptr, num_ranks,
                            num_column_tiles, RANKS, experts,
                        )  # fmt: skip
        else:
            is_sum, number = mixed_task(
                task - num_products - num_pushes, num_outer, num_sum_tasks, 0, 1, None, outer_share
            )
            if is_sum:
                if sums:
                    sum_rows(
                        world, staging, combined, epoch, number, flag_ptr, replica_ptr, rank_of_replica_ptr,
                        expert_of_replica_ptr, weight_ptr, out_ptr, times_ptr, task, num_tokens,
                        H, K, CHOICES, num_column_tiles, block_columns, sum_tokens,
                    )  # fmt: skip
            else:
                if outer_products:
                    _outer_product(
                        dh_ptr, x_ptr, dgate_up_ptr, dy_ptr, wa_ptr, ddown_ptr, times_ptr, task, number, num_groups,
                        first_ptr, U, H, I, up_stride, down_stride, tiles_of_up, tiles_of_down,
                        outer_rows, outer_columns, outer_contraction, raster, stages,
                    )  # fmt: skip
        end_task(times_ptr, task)
        task = take(queue_ptr)
    leave(queue_ptr)


@triton.jit
def _outer_product(  # type: ignore[no-untyped-def]
    dh_ptr, x_ptr, dgate_up_ptr, dy_ptr, wa_ptr, ddown_ptr, times_ptr, task, number, num_groups, first_ptr,
    U: tl.constexpr, H: tl.constexpr, I: tl.constexpr, up_stride: tl.constexpr, down_stride: tl.constexpr,
    tiles_of_up: tl.constexpr, tiles_of_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_contraction: tl.constexpr, raster: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """A tile of one group's gradient of ``gate_up`` or of ``down``."""
    # One product with widths that are known when it runs: two would each have shared memory of their own.
    of_up = number < num_groups * tiles_of_up
    left_ptr, right_ptr = tl.where(of_up, dh_ptr, dy_ptr), tl.where(of_up, x_ptr, wa_ptr)
    L, R = tl.where(of_up, U, H), tl.where(of_up, H, I)
    if U % 16 == 0 and H % 16 == 0 and I % 16 == 0:
        L, R = tl.multiple_of(L, 16), tl.multiple_of(R, 16)
    number = tl.where(of_up, number, number - num_groups * tiles_of_up)
    tiles_of_matrix = tl.where(of_up, tiles_of_up, tiles_of_down)
    group = number // tiles_of_matrix
    task_is_ready(times_ptr, task, OUTER_PRODUCT, group)
    tile = tile_of(number % tiles_of_matrix, tl.cdiv(L, block_rows), tl.cdiv(R, block_columns), raster)
    out_ptr = tl.where(of_up, dgate_up_ptr, ddown_ptr)
    matrix_stride = tl.where(of_up, tl.cast(up_stride, tl.int64), tl.cast(down_stride, tl.int64))
    store_outer_product(
        left_ptr, right_ptr, None, first_ptr, out_ptr, group, tile[0], tile[1],
        L, R, matrix_stride, 1, False, block_rows, block_columns, block_contraction, stages,
    )  # fmt: skip
