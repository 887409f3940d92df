"""MegaKernel B: multiplies rows, pushes each back to its source, and sums there; weight gradients fill the waits.

Forward multiplies activations by ``down`` and sums each token's rows by their routing weights (``combine``); backward
multiplies the gradient of h by ``gate_up``, sums without weights, sends the routing weights' gradients along and has
the tiles of both weight gradients. One launch, or one of each kind of task after another.

The queue: tiles of the product, mixed with pushes where those are tasks of their own; then tiles of weight gradients
mixed with sums. A sum waits for flags that peers raise, and a peer raises them without waiting for sums.

N rows here in order of groups, G groups, T tokens of this rank, K choices of each, H hidden, L width of a row here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.experts import ExpertMatrices, low_rank_rows
from moesys.kernels.experts.products import LowRankRows, plus_low_rank, rounded, rows_by_matrix
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs, Tiling
from moesys.kernels.experts.tiles import RowGroups, tile_of
from moesys.kernels.experts.weight_gradient import OuterProduct, WeightGradients, store_outer_product
from moesys.kernels.launch import kernel
from moesys.kernels.mega.arguments import MegaMemory, MegaRows
from moesys.kernels.mega.point import MegaPoint, columns_at_once, fuses, launch_options, parts_of, programs_at
from moesys.kernels.mega.push_rows import (
    RowSources,
    RowTile,
    Task,
    flags_at_sources,
    push_dweights,
    push_rows,
    push_tile,
    raise_at_sources,
    sum_rows,
)
from moesys.kernels.mega.tasks import (
    OUTER_PRODUCT,
    PRODUCT,
    WHOLE,
    begin_task,
    end_task,
    leave,
    mixed_task,
    take,
    task_is_ready,
)
from moesys.kernels.symmetric.heap import RANK, at
from moesys.kernels.symmetric.signals import all_came, arrive, raise_flag, set_off

# Columns of a tile that are pushed from registers at a time: 128 bytes of 16 bits side by side.
PUSH_COLUMNS = 64


class CombineRows(NamedTuple):
    """The rows that are multiplied, the matrices, and the places of the product's rows.

    ``out_NH``: the products until push tasks send them, None without such tasks; ``out_TH``: their sums.
    ``weight_TK``: the routing weights, None for 1; ``partial_NS``: see ``dispatch_activation_gradient``. ``low_rank``:
    what LoRA adds to the product.
    """

    rows_NL: Tensor
    matrices: Tensor
    out_NH: Tensor | None
    out_TH: Tensor
    weight_TK: Tensor | None = None
    partial_NS: Tensor | None = None
    low_rank: LowRankRows | None = None


class MegaOuterSizes(NamedTuple):
    """The constants of both weight gradients: widths, elements between two matrices, tiles of a group, tile sizes."""

    U: int
    H: int
    I: int
    up_stride: int
    down_stride: int
    tiles_of_up: int
    tiles_of_down: int
    tiling: Tiling


class CombineSizes(NamedTuple):
    """The constants of the kernel.

    ``RANKS``, ``CHOICES``: powers of two, at least R and K. ``experts``: flags are of experts, not tiles. ``apart``:
    pushes are tasks of their own. ``multiply``, ``push``, ``outer``, ``sums``: which tasks there are. Shares: of tiles
    of the product, and of weight gradients, in the order of the queue (``tasks``). ``push_columns``,
    ``copy_columns``: columns that are pushed at a time from registers, and from memory.
    """

    H: int
    L: int
    K: int
    matrix_stride: int
    transposed: bool
    num_column_tiles: int
    num_sums: int
    RANKS: int
    CHOICES: int
    experts: bool
    apart: bool
    multiply: bool
    push: bool
    outer: MegaOuterSizes | None
    sums: bool
    product_share: int
    outer_share: int
    sum_tokens: int
    push_columns: int
    copy_columns: int


def down_combine(
    memory: MegaMemory,
    rows: MegaRows,
    a_NI: Tensor,
    experts: ExpertMatrices,
    weight_TK: Tensor,
    block: TileConfig,
    point: MegaPoint,
) -> Tensor:
    """Returns y [T, H]: each token's rows by ``down``, wherever they are, times its routing weights (float32)."""
    data = _combined(memory, rows, a_NI, experts, block, point, back=False)._replace(weight_TK=weight_TK)
    _launch(memory, rows, data, True, None, block, block, point)
    return data.out_TH


def input_gradient_combine(
    memory: MegaMemory,
    rows: MegaRows,
    dh_NU: Tensor,
    experts: ExpertMatrices,
    partial_NS: Tensor,
    gradients: WeightGradients | None,
    blocks: TileConfigs,
    point: MegaPoint,
) -> Tensor:
    """Returns dx [T, H]; writes ``gradients`` where there are any."""
    block = blocks.input_gradient
    data = _combined(memory, rows, dh_NU, experts, block, point, back=True)._replace(partial_NS=partial_NS)
    _launch(memory, rows, data, False, gradients, block, blocks.weight_gradient, point)
    return data.out_TH


def routing_weight_gradients(memory: MegaMemory, rows: MegaRows) -> Tensor:
    """Returns dweight, float32 [T, K], which peers have sent when ``input_gradient_combine`` has ended.

    To load a torch operator, which its first call does, can take until no kernel runs: ranks that share a process call
    this when each of them has launched its kernels.
    """
    T, K = rows.exchange.replica_TK.shape
    dweight_TK = memory.heap.own("dweight")[: T * K].view(T, K)
    # A dropped choice has no gradient; its place in the region still has that of another micro-batch.
    return torch.where(rows.exchange.replica_TK >= 0, dweight_TK, 0.0)


def _combined(
    memory: MegaMemory,
    rows: MegaRows,
    rows_NL: Tensor,
    experts: ExpertMatrices,
    block: TileConfig,
    point: MegaPoint,
    *,
    back: bool,
) -> CombineRows:
    H, T = memory.heap.layout.regions["x"].shape[1], len(rows.exchange.replica_TK)
    out_NH = rows_NL.new_empty(len(rows_NL), H) if point.combine_share > 0 or not fuses(point, "combine") else None
    groups, pair = RowGroups(rows.exchange.first_G1, rows.tiles.tiles), experts.low_rank[0 if back else 1]
    thin = low_rank_rows(pair, rows_NL, groups, block, None, back=back)
    matrices = experts.gate_up_EUH if back else experts.down_EHI
    return CombineRows(rows_NL, matrices, out_NH, rows_NL.new_empty(T, H), low_rank=thin)


def _launch(
    memory: MegaMemory,
    rows: MegaRows,
    data: CombineRows,
    transposed: bool,
    gradients: WeightGradients | None,
    block: TileConfig,
    outer: TileConfig,
    point: MegaPoint,
) -> None:
    heap, tiles = memory.heap, rows.tiles.tiles
    tiles.require(block)
    T, K = rows.exchange.replica_TK.shape
    H, num_groups, row_tiles = data.out_TH.shape[1], len(rows.exchange.replicas.own_G), len(tiles.group_M)
    column_tiles = triton.cdiv(H, block.columns)
    memory.require(0, num_groups, row_tiles, column_tiles)
    outer_sizes = None if gradients is None else _outer_sizes(gradients, block, outer)
    kinds: tuple[tuple[bool, ...], ...] = ((True, True, True, True),)
    if not fuses(point, "combine"):
        kinds = ((True, False, False, False), (False, True, False, False), (False, False, True, True))
    name = "down_combine" if transposed else "input_gradient_combine"
    most_outer = 0 if outer_sizes is None else num_groups * (outer_sizes.tiles_of_up + outer_sizes.tiles_of_down)
    most_sums = triton.cdiv(T, point.sum_tokens) * column_tiles
    for multiply, push, outer_products, sums in kinds:
        most_tasks = row_tiles * (multiply * column_tiles + push) + outer_products * most_outer + sums * most_sums
        sizes = CombineSizes(
            H=H,
            L=data.rows_NL.shape[1],
            K=K,
            matrix_stride=data.matrices.stride(0),
            transposed=transposed,
            num_column_tiles=column_tiles,
            num_sums=0 if data.partial_NS is None else data.partial_NS.shape[1],
            RANKS=triton.next_power_of_2(heap.num_ranks),
            CHOICES=triton.next_power_of_2(K),
            experts=point.granularity == "expert",
            apart=data.out_NH is not None,
            multiply=multiply,
            push=push and data.out_NH is not None,
            outer=outer_sizes if outer_products else None,
            sums=sums,
            product_share=WHOLE.value - parts_of(point.combine_share) if fuses(point, "combine") else 0,
            outer_share=WHOLE.value - parts_of(point.reduce_share),
            sum_tokens=point.sum_tokens,
            push_columns=PUSH_COLUMNS,
            copy_columns=columns_at_once(block.rows, data.out_TH, block),
        )
        arguments = (memory.launch(name, most_tasks), rows, data, gradients, T, num_groups)
        _mega_combine[(programs_at(point, heap),)](*arguments, sizes=sizes, **launch_options(block, data.low_rank))


def _outer_sizes(gradients: WeightGradients, block: TileConfig, outer: TileConfig) -> MegaOuterSizes:
    gate_up, down = gradients.dgate_up_GUH, gradients.ddown_GHI
    assert gate_up is not None
    assert down is not None
    (_, U, H), I = gate_up.shape, down.shape[2]

    def tiles(left: int, right: int) -> int:
        return triton.cdiv(left, outer.rows) * triton.cdiv(right, outer.columns)

    tiling = block.tiling._replace(rows=outer.rows, columns=outer.columns, contraction=outer.contraction)
    return MegaOuterSizes(U, H, I, gate_up.stride(0), down.stride(0), tiles(U, H), tiles(H, I), tiling)


@kernel(do_not_specialize=["num_tokens", "num_groups"])
def _mega_combine(  # type: ignore[no-untyped-def]
    launch, rows, data, gradients, num_tokens, num_groups, sizes: tl.constexpr, tiling: tl.constexpr
):
    H: tl.constexpr = sizes.H
    L: tl.constexpr = sizes.L
    num_column_tiles: tl.constexpr = sizes.num_column_tiles
    multiply: tl.constexpr = sizes.multiply
    push: tl.constexpr = sizes.push
    sums: tl.constexpr = sizes.sums
    outer: tl.constexpr = sizes.outer
    outer_products: tl.constexpr = outer is not None
    raster: tl.constexpr = tiling.raster
    dtype: tl.constexpr = data.out_TH.dtype.element_ty
    table, tiles = rows.exchange, rows.tiles.tiles
    epoch = tl.load(launch.epoch_1)
    num_row_tiles = tl.load(tiles.count_1)
    num_products = num_row_tiles * num_column_tiles if multiply else 0
    num_pushes = num_row_tiles if push else 0
    num_outer = num_groups * (outer.tiles_of_up + outer.tiles_of_down) if outer_products else 0
    num_sum_tasks = tl.cdiv(num_tokens, sizes.sum_tokens) * num_column_tiles if sums else 0
    came = all_came(launch.world)
    # Who raises a flag waits until all rows before it have arrived at the source. So a program raises a tile's flags
    # behind its next product, when they have. Products wait for nothing, so that no flag stays away.
    late, through = tl.full([sizes.RANKS], -1, tl.int32), tl.cast(0, tl.int64)
    task = take(launch.queue_2)
    while task < num_products + num_pushes:
        begin_task(launch.times, task)
        is_push, number = mixed_task(
            task, num_products, num_pushes, raster * num_column_tiles, raster, None, sizes.product_share
        )
        if is_push:
            row_tile, column_tile = number, 0
        else:
            row_tile, column_tile = tile_of(number, num_row_tiles, num_column_tiles, raster)
        group = tl.load(tiles.group_M + row_tile)
        row = tl.load(tiles.row_M + row_tile)
        num_rows = tl.minimum(tl.load(table.first_G1 + group + 1) - row, tiling.rows)
        in_rows = tl.arange(0, tiling.rows)
        # After a time-out no row is pushed, because peers may not be in this epoch.
        kept = in_rows < tl.where(came, num_rows, 0)
        tile = RowTile(row_tile, group, row, num_rows)
        if is_push:
            if push:
                source = tl.load(table.source_N + row + in_rows, mask=kept, other=0)
                entry = tl.load(rows.entry_N + row + in_rows, mask=kept, other=0)
                if data.partial_NS is not None:
                    push_dweights(launch, data.partial_NS, row, RowSources(kept, source, entry), sizes.num_sums)
                pushed = push_rows(
                    launch, data, Task(task, number, epoch), tile, RowSources(kept, source, entry), sizes
                )
                # Only now, because rows that are not computed yet must not occupy the link.
                row_bytes: tl.constexpr = H * dtype.primitive_bitwidth // 8
                arrive(launch.pace, set_off(launch.pace, kept & (source != tl.load(launch.world + RANK)), row_bytes))
                for each_column in range(num_column_tiles):
                    flag = flags_at_sources(launch, rows, tile, each_column, came & pushed, sizes, tiling.rows)
                    raise_at_sources(launch, flag, epoch)
        else:
            if multiply:
                task_is_ready(launch.times, task, PRODUCT, group)
                matrix = data.matrices + group.to(tl.int64) * sizes.matrix_stride
                # Rows that a tile lacks are computed from another's operands, and not stored.
                left_row = data.rows_NL + row.to(tl.int64) * L + (tl.minimum(in_rows, num_rows - 1) * L)[:, None]
                column = column_tile * tiling.columns
                out = rows_by_matrix(left_row, matrix, column, L, H, sizes.transposed, tiling)
                transposed: tl.constexpr = sizes.transposed
                out = plus_low_rank(out, data.low_rank, row, num_rows, group, column, H, 1, transposed, tiling)
                out = rounded(out, dtype)
                if sizes.apart:
                    out_row = data.out_NH + row.to(tl.int64) * H + in_rows * H
                    push_tile(out, out_row, column, kept, H, sizes.push_columns)
                    # Only this GPU reads this flag: system scope is more than is needed.
                    raise_flag(launch.flags.multiplied + row_tile * num_column_tiles + column_tile, epoch, came)
                else:
                    arrive(launch.pace, through)
                    raise_at_sources(launch, late, epoch)
                    # Here, so that they need no registers during the product.
                    source = tl.load(table.source_N + row + in_rows, mask=kept, other=0)
                    entry = tl.load(rows.entry_N + row + in_rows, mask=kept, other=0)
                    tile_bytes = tl.minimum(tiling.columns, H - column_tile * tiling.columns)
                    tile_bytes *= dtype.primitive_bitwidth // 8
                    away = kept & (source != tl.load(launch.world + RANK))
                    through = tl.cast(set_off(launch.pace, away, tile_bytes), tl.int64)
                    staging = at(launch.world, source, launch.offsets.staging, dtype)
                    push_tile(out, staging + entry.to(tl.int64) * H, column, kept, H, sizes.push_columns)
                    if data.partial_NS is not None:  # noqa: SIM102, as one of these is known when it is compiled
                        if column_tile == 0:
                            push_dweights(launch, data.partial_NS, row, RowSources(kept, source, entry), sizes.num_sums)
                    late = flags_at_sources(launch, rows, tile, column_tile, came, sizes, tiling.rows)
        end_task(launch.times, task)
        task = take(launch.queue_2)
    if multiply and not sizes.apart:
        arrive(launch.pace, through)
        # Without the condition, Triton 3.6 spills a register.
        if tl.max(late, 0) >= 0:
            raise_at_sources(launch, late, epoch)
    while task < num_products + num_pushes + num_outer + num_sum_tasks:
        begin_task(launch.times, task)
        is_sum, number = mixed_task(
            task - num_products - num_pushes, num_outer, num_sum_tasks, 0, 1, None, sizes.outer_share
        )
        if is_sum:
            if sums:
                sum_rows(launch, rows, data, Task(task, number, epoch), num_tokens, sizes, tiling.columns)
        else:
            if outer_products:
                place = Task(task, number, epoch)
                _outer_product(launch.times, place, gradients, table.first_G1, num_groups, outer)
        end_task(launch.times, task)
        task = take(launch.queue_2)
    leave(launch.queue_2)


@triton.jit
def _outer_product(  # type: ignore[no-untyped-def]
    times_ptr, task, gradients, first_ptr, num_groups, sizes: tl.constexpr
):
    """Stores a tile of one group's gradient of ``gate_up`` or of ``down``."""
    U: tl.constexpr = sizes.U
    H: tl.constexpr = sizes.H
    I: tl.constexpr = sizes.I
    tiles_of_up: tl.constexpr = sizes.tiles_of_up
    tiles_of_down: tl.constexpr = sizes.tiles_of_down
    tiling: tl.constexpr = sizes.tiling
    # One product with widths that are known when it runs: two would each have shared memory of their own.
    of_up = task.number < num_groups * tiles_of_up
    left = tl.where(of_up, gradients.dh_NU, gradients.dy_NH)
    right = tl.where(of_up, gradients.x_NH, gradients.wa_NI)
    L, R = tl.where(of_up, U, H), tl.where(of_up, H, I)
    if U % 16 == 0 and H % 16 == 0 and I % 16 == 0:
        L, R = tl.multiple_of(L, 16), tl.multiple_of(R, 16)
    number = tl.where(of_up, task.number, task.number - num_groups * tiles_of_up)
    tiles_of_matrix = tl.where(of_up, tiles_of_up, tiles_of_down)
    group = number // tiles_of_matrix
    task_is_ready(times_ptr, task.place, OUTER_PRODUCT, group)
    tile = tile_of(number % tiles_of_matrix, tl.cdiv(L, tiling.rows), tl.cdiv(R, tiling.columns), tiling.raster)
    out = tl.where(of_up, gradients.dgate_up_GUH, gradients.ddown_GHI)
    matrix_stride = tl.where(of_up, tl.cast(sizes.up_stride, tl.int64), tl.cast(sizes.down_stride, tl.int64))
    product = OuterProduct(left, right, out, L, R, matrix_stride)
    store_outer_product(product, None, first_ptr, None, group, tile, None, 0, tiling)
