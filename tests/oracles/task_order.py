"""Tasks of one rank's MegaKernels, one by one: in which order programs take them, and what each needs before it.

R ranks, G groups of a rank (the experts that it holds, each once, in order), M row tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ModelShape
from moesys.config.overlap import MegaKernel
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega_pass import RASTER, BoolArray, TileSizes

# A share of 1 in the kernels.
WHOLE = 1024
# A and B, forward and backward.
DIRECTIONS = (("dispatch_up", "down_combine"), ("dispatch_activation_gradient", "input_gradient_combine"))

Task = tuple[str, str, int]


@dataclass(frozen=True)
class OrderedTiles:
    """Row tiles of all ranks, rank by rank, in the order of their queues (``kernels.mega.exchange.ordered_tiles``).

    group_M, row_M, rows_M: the group, the first row and the number of rows of each tile. end_M: the number of the first
    tile after the tile's group. first_tile_G: the number of a group's first tile.
    """

    group_M: IntArray
    row_M: IntArray
    rows_M: IntArray
    end_M: IntArray
    first_tile_G: IntArray

    @staticmethod
    def of(
        rank_G: IntArray, rows_G: IntArray, before_G: IntArray, num_ranks: int, tile_rows: int, order: str
    ) -> OrderedTiles:
        """Returns the tiles of groups, sorted by rank, with ``rows_G`` rows that follow one another, of which
        ``before_G`` are from sources before their own rank.
        """
        group_G = np.lexsort((-rows_G if order == "largest_first" else np.zeros_like(rows_G), rank_G))
        tiles_G = -(-rows_G // tile_rows)
        end_G = tiles_G[group_G].cumsum()
        first_tile_G = np.empty_like(tiles_G)
        first_tile_G[group_G] = end_G - tiles_G[group_G]
        group_M = np.repeat(group_G, tiles_G[group_G])
        tile, tiles_M = np.arange(len(group_M)), tiles_G[group_M]
        # From the rank's own rows on, tiles are taken in turn from as many parts as there are ranks.
        turn_M, part_M = np.divmod(tile - first_tile_G[group_M], num_ranks)
        each_M, longer_M = np.divmod(tiles_M, num_ranks)
        begin_M = (before_G // tile_rows)[group_M]
        lies_M = (begin_M + part_M * each_M + np.minimum(part_M, longer_M) + turn_M) % tiles_M
        first_G = rows_G.cumsum() - rows_G
        return OrderedTiles(
            group_M=group_M,
            row_M=first_G[group_M] + lies_M * tile_rows,
            rows_M=np.minimum(rows_G[group_M] - lies_M * tile_rows, tile_rows),
            end_M=first_tile_G[group_M] + tiles_M,
            first_tile_G=first_tile_G,
        )

    def __len__(self) -> int:
        return len(self.group_M)


def rows_of_groups(plan: TokenPlan, rank: int) -> tuple[IntArray, IntArray]:
    """(expert of each group [G], rows of each group from each source [G, R]) of ``rank``."""
    expert_G = np.unique(np.array(plan.layout.experts_of(rank), dtype=np.int64))
    group_E = np.full(plan.load.num_experts, -1)
    group_E[expert_G] = np.arange(len(expert_G))
    source, expert, _, tokens = plan.entries[plan.entries[:, 2] == rank].T
    rows_GR = np.zeros((len(expert_G), plan.load.num_ranks), dtype=np.int64)
    rows_GR[group_E[expert], source] = tokens
    return expert_G, rows_GR


def tiles_of_rank(rows_GR: IntArray, rank: int, tile_rows: int, order: str) -> OrderedTiles:
    """Of groups that have ``rows_GR`` rows of each source, which lie one behind the other."""
    rows_G, before_G = rows_GR.sum(axis=1), rows_GR[:, :rank].sum(axis=1)
    return OrderedTiles.of(np.full(len(rows_G), rank), rows_G, before_G, rows_GR.shape[1], tile_rows, order)


def numbers_in_groups(tiles: OrderedTiles, rows_G: IntArray, tile_rows: int) -> IntArray:
    """The number of each tile in the queue, [M], of tiles as they lie in their groups, groups by their first tiles."""
    in_group_M = (tiles.row_M - (rows_G.cumsum() - rows_G)[tiles.group_M]) // tile_rows
    number_M = np.empty_like(in_group_M)
    number_M[tiles.first_tile_G[tiles.group_M] + in_group_M] = np.arange(len(tiles))
    return number_M


def needed_fetches(tiles: OrderedTiles, fetches: int, by_expert: bool) -> IntArray:
    """How many fetches each sweep of products needs, from the first on, [sweeps]."""
    last = np.arange(RASTER - 1, len(tiles) + RASTER - 1, RASTER)
    if not by_expert:
        return np.minimum(last + 1, len(tiles)) * fetches
    inside = last < len(tiles)
    return np.where(inside, tiles.end_M[np.where(inside, last, 0)], len(tiles)) * fetches


def swept(num_row_tiles: int, num_column_tiles: int) -> tuple[IntArray, IntArray]:
    """(row tile, column tile) of each product in turn."""
    number = np.arange(num_row_tiles * num_column_tiles)
    first = number // (RASTER * num_column_tiles) * RASTER
    row_tiles = np.minimum(num_row_tiles - first, RASTER)
    in_sweep = number % (RASTER * num_column_tiles)
    return first + in_sweep % row_tiles, in_sweep // row_tiles


def mixed(num_first: int, needed_W: IntArray, parts: int) -> BoolArray:
    """Whether each task of a queue is work, [first + W]; else it is the next of ``num_first`` that come before work.

    ``needed_W``: how many of those each work task needs before it; at least ``parts`` / ``WHOLE`` of all tasks until
    then are.
    """
    work = np.arange(len(needed_W))
    before_W = np.full(len(needed_W), num_first)
    if parts < WHOLE:
        before_W = np.minimum(np.maximum(needed_W, work * parts // (WHOLE - parts)), num_first)
    is_work = np.zeros(num_first + len(needed_W), dtype=bool)
    is_work[work + before_W] = True
    return is_work


def tasks_of_rank(overlap: MegaKernel, model: ModelShape, plan: TokenPlan, rank: int, backward: bool) -> list[Task]:
    """(launch, kind, group) of each task of a rank, in the order in which programs take them, without the launches of
    weight gradients.
    """
    sizes, H, I = TileSizes.of(overlap, model), model.hidden_size, model.intermediate_size
    _, rows_GR = rows_of_groups(plan, rank)
    tiles, first, second = tiles_of_rank(rows_GR, rank, sizes.rows, overlap.tile_order), *DIRECTIONS[backward]
    fetches = sizes.rows // overlap.fetch_rows

    def products(columns: int) -> tuple[IntArray, IntArray]:
        row_tile, _ = swept(len(tiles), columns)
        return tiles.group_M[row_tile], np.arange(len(row_tile)) // (RASTER * columns)

    group, sweep = products(-(-I // (sizes.columns if backward else sizes.halves)))
    needed = needed_fetches(tiles, fetches, overlap.granularity == "expert")[sweep]
    pulls = ("fetch", np.repeat(tiles.group_M, fetches))
    share = round(overlap.dispatch_share * WHOLE) if overlap.fused in ("both", "dispatch") else WHOLE
    found = _in_order(first, pulls, ("product", group), needed, share)
    columns = -(-H // sizes.columns)
    group, _ = products(columns)
    fused = overlap.fused in ("both", "combine")
    if overlap.combine_share or not fused:
        needed = np.minimum((np.arange(len(tiles)) // RASTER + 1) * RASTER, len(tiles)) * columns
        share = WHOLE - round(overlap.combine_share * WHOLE) if fused else WHOLE
        found += _in_order(second, ("product", group), ("push", tiles.group_M), needed, share)
    else:
        found += [(second, "product", of) for of in group.tolist()]
    tokens = -(-int(plan.load.tokens_RE[rank].sum()) // model.top_k)
    sums = np.full(-(-tokens // overlap.sum_tokens) * columns, -1)
    outer = np.zeros(0, dtype=np.int64)
    if backward and overlap.overlap_weight_gradients:
        each = [-(-left // sizes.rows) * -(-right // sizes.columns) for left, right in ((2 * I, H), (H, I))]
        outer = np.concatenate([np.repeat(np.arange(len(rows_GR)), tiles_of) for tiles_of in each])
    share = WHOLE - round(overlap.reduce_share * WHOLE)
    return found + _in_order(second, ("outer_product", outer), ("sum", sums), np.zeros_like(sums), share)


def _in_order(
    launch: str, first: tuple[str, IntArray], work: tuple[str, IntArray], needed_W: IntArray, parts: int
) -> list[Task]:
    is_work = mixed(len(first[1]), needed_W, parts)
    group = np.empty(len(is_work), dtype=np.int64)
    group[~is_work], group[is_work] = first[1], work[1]
    return [(launch, (first, work)[of][0], at) for of, at in zip(is_work.tolist(), group.tolist(), strict=True)]
