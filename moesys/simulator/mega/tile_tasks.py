"""The tasks of MegaKernels as a host sees them: which there are, and in which order programs take them.

The same rules as the kernels' own (``kernels.mega``), in numpy. A test
holds both side by side.

R ranks, G groups of a rank (the experts that it holds, each once, in order), M row tiles, N rows of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesys.config import MegaKernel, ModelShape
from moesys.layout import TokenPlan
from moesys.load import IntArray

BoolArray = npt.NDArray[np.bool_]

# A share of 1 in the kernels.
WHOLE = 1024
# Row tiles that sweep all column tiles together.
RASTER = 8


@dataclass(frozen=True)
class TileSizes:
    """Rows and columns of a product's tile, columns of each half of ``gate_up``'s, rows of a fetch, tokens of a sum."""

    rows: int
    columns: int
    halves: int
    fetch_rows: int
    sum_tokens: int

    @staticmethod
    def of(overlap: MegaKernel, model: ModelShape) -> TileSizes:
        """What ``overlap`` declares, else what kernels take on a GPU. Raises ValueError where a fetch has more rows."""
        usual = (64, 64) if model.dtype == "float32" else (128, 256)
        rows, columns = overlap.tile_rows or usual[0], overlap.tile_columns or usual[1]
        if rows % overlap.fetch_rows:
            raise ValueError(
                f"fetch_rows={overlap.fetch_rows} is more than the {rows} rows of a tile that kernels choose for "
                f"dtype={model.dtype!r}; use at most {rows}, or declare tile_rows"
            )
        return TileSizes(rows, columns, max(16, columns // 2), overlap.fetch_rows, overlap.sum_tokens)

    @property
    def fetches(self) -> int:
        """Fetches of a row tile."""
        return self.rows // self.fetch_rows


def rows_of_groups(plan: TokenPlan, rank: int) -> tuple[IntArray, IntArray]:
    """(expert of each group [G], rows of each group from each source [G, R]) of ``rank``."""
    expert_G = np.unique(np.array(plan.layout.experts_of(rank), dtype=np.int64))
    group_E = np.full(plan.load.num_experts, -1)
    group_E[expert_G] = np.arange(len(expert_G))
    source, expert, _, tokens = plan.entries[plan.entries[:, 2] == rank].T
    rows_GR = np.zeros((len(expert_G), plan.load.num_ranks), dtype=np.int64)
    rows_GR[group_E[expert], source] = tokens
    return expert_G, rows_GR


@dataclass(frozen=True)
class RowTiles:
    """Row tiles of a rank in the order of its queue (``exchange.ordered_tiles``), or of all ranks, one behind
    the other.

    ``group_M``, ``row_M``, ``rows_M``: a tile's group, first row and rows. ``first_tile_G``: the number of a group's
    first tile; ``tiles_G``: how many it has. ``end_M``: the number of the first tile behind a tile's group.
    ``number_M``: the number of each tile, of tiles as they lie in their groups.
    """

    group_M: IntArray
    row_M: IntArray
    rows_M: IntArray
    end_M: IntArray
    first_tile_G: IntArray
    tiles_G: IntArray
    number_M: IntArray

    @staticmethod
    def of(rows_GR: IntArray, rank: int, tile_rows: int, order: str) -> RowTiles:
        """Of groups that have ``rows_GR`` rows of each source, which lie one behind the other."""
        rows_G, before_G = rows_GR.sum(axis=1), rows_GR[:, :rank].sum(axis=1)
        return RowTiles.of_ranks(np.full(len(rows_G), rank), rows_G, before_G, rows_GR.shape[1], tile_rows, order)

    @staticmethod
    def of_ranks(
        rank_G: IntArray, rows_G: IntArray, before_G: IntArray, num_ranks: int, tile_rows: int, order: str
    ) -> RowTiles:
        """Of groups of ranks, rising, with ``rows_G`` rows, ``before_G`` of them from sources before their own rank."""
        group_G = np.lexsort((-rows_G if order == "largest_first" else np.zeros_like(rows_G), rank_G))
        tiles_G = -(-rows_G // tile_rows)
        end_G = tiles_G[group_G].cumsum()
        first_tile_G = np.empty_like(tiles_G)
        first_tile_G[group_G] = end_G - tiles_G[group_G]
        group_M = np.repeat(group_G, tiles_G[group_G])
        tile, tiles_M = np.arange(len(group_M)), tiles_G[group_M]
        # From one's own rows on, one tile of each of as many parts as there are ranks in turn.
        turn_M, part_M = np.divmod(tile - first_tile_G[group_M], num_ranks)
        each_M, longer_M = np.divmod(tiles_M, num_ranks)
        begin_M = (before_G // tile_rows)[group_M]
        lies_M = (begin_M + part_M * each_M + np.minimum(part_M, longer_M) + turn_M) % tiles_M
        number_M = np.empty_like(tile)
        number_M[first_tile_G[group_M] + lies_M] = tile
        first_G = rows_G.cumsum() - rows_G
        return RowTiles(
            group_M=group_M,
            row_M=first_G[group_M] + lies_M * tile_rows,
            rows_M=np.minimum(rows_G[group_M] - lies_M * tile_rows, tile_rows),
            end_M=first_tile_G[group_M] + tiles_M,
            first_tile_G=first_tile_G,
            tiles_G=tiles_G,
            number_M=number_M,
        )

    def __len__(self) -> int:
        return len(self.group_M)

    def needed_fetches(self, sizes: TileSizes, by_expert: bool) -> IntArray:
        """How many fetches each sweep of products needs, from the first on, [sweeps]."""
        last = np.arange(RASTER - 1, len(self) + RASTER - 1, RASTER)
        if not by_expert:
            return np.minimum(last + 1, len(self)) * sizes.fetches
        inside = last < len(self)
        return np.where(inside, self.end_M[np.where(inside, last, 0)], len(self)) * sizes.fetches


def swept(num_row_tiles: int, num_column_tiles: int) -> tuple[IntArray, IntArray]:
    """(row tile, column tile) of each product in turn."""
    number = np.arange(num_row_tiles * num_column_tiles)
    first = number // (RASTER * num_column_tiles) * RASTER
    row_tiles = np.minimum(num_row_tiles - first, RASTER)
    in_sweep = number % (RASTER * num_column_tiles)
    return first + in_sweep % row_tiles, in_sweep // row_tiles


def parts_of(share: float) -> int:
    """A share of the tasks as kernels are told it."""
    return round(share * WHOLE)


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
