"""Tasks of one rank's MegaKernels, one by one: in which order programs take them, and what each needs before it.

R ranks, G groups of a rank (the experts that it holds, each once, in order), M row tiles.
"""

from __future__ import annotations

import numpy as np

from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega.tiles import RASTER, WHOLE, BoolArray, OrderedTiles, TileSizes


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


def needed_fetches(tiles: OrderedTiles, sizes: TileSizes, by_expert: bool) -> IntArray:
    """How many fetches each sweep of products needs, from the first on, [sweeps]."""
    last = np.arange(RASTER - 1, len(tiles) + RASTER - 1, RASTER)
    if not by_expert:
        return np.minimum(last + 1, len(tiles)) * sizes.fetches
    inside = last < len(tiles)
    return np.where(inside, tiles.end_M[np.where(inside, last, 0)], len(tiles)) * sizes.fetches


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
