"""Tiles of MegaKernels as a host sees them: how large they are, and in which order programs take them.

The same rules as the kernels' own (``kernels.mega.exchange``, ``kernels.mega.task_queue``), in numpy. A test holds both
side by side.

G groups of a rank (the experts that it holds, each once, in order), M row tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesys.config import MegaKernel, ModelShape
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


@dataclass(frozen=True)
class OrderedTiles:
    """Row tiles of all ranks, one rank's behind the other's, in the order of its queue
    (``kernels.mega.exchange.ordered_tiles``).

    ``group_M``, ``row_M``, ``rows_M``: a tile's group, first row and rows. ``end_M``: the number of the first tile
    behind a tile's group. ``first_tile_G``: the number of a group's first tile.
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
        """Returns the tiles of groups of ranks, rising, with ``rows_G`` rows that lie one behind the other, of which
        ``before_G`` are from sources before their own rank.
        """
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


def parts_of(share: float) -> int:
    """A share of the tasks as kernels are told it."""
    return round(share * WHOLE)
