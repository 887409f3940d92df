"""Tiles of MegaKernels: their sizes, the order in which programs take them, and the seconds of each task.

Sizes and order follow the same rules as the kernels' own (``kernels.mega.exchange``, ``kernels.mega.tasks``), in
numpy; a test compares both.

A task takes seconds of a program for flops and for bytes of its own rank's memory. Programs share their rank's matmul
rate and memory rate evenly, in ``programs`` parts, or in one for each multiprocessor if there are more of these. So a
program moves bytes no faster than its part of the memory rate, and one program alone does not fill a link. In a kernel
that does more than a product, the matmul rate is multiplied by ``fused_rate``. A tile takes the time of its flops,
including those of rows and columns that it lacks, or of its part of the bytes that its group reads and writes at least
once, whichever is longer.

As for ``Sequential``, the model leaves out tables of routing, routing weights and their gradients, and epilogues. G
groups of a rank (the experts that it holds, each once, in order), M row tiles, H hidden, I expert width, b bytes of an
element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec, ModelShape
from moesys.config.overlap import MegaKernel
from moesys.cost import GRADIENT_BYTES, FloatArray, memory_seconds, product_rate
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
        """Returns the sizes that ``overlap`` declares, and for others those of the kernels on a GPU. Raises ValueError
        if a fetch has more rows than a tile.
        """
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
        """Number of fetches of a row tile."""
        return self.rows // self.fetch_rows


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


def parts_of(share: float) -> int:
    """Converts a share of the tasks to the integer that kernels take."""
    return round(share * WHOLE)


# A and B, forward and backward.
DIRECTIONS = (("dispatch_up", "down_combine"), ("dispatch_activation_gradient", "input_gradient_combine"))


@dataclass(frozen=True)
class Products:
    """The tiles of one product of every group. ``columns``: columns of tiles. ``tiles_G``: number of tiles.
    ``seconds_G``: seconds of one tile.
    """

    columns: int
    tiles_G: IntArray
    seconds_G: FloatArray


class TaskSeconds:
    """The tasks of ``overlap`` on ranks of ``cluster``, in one direction.

    programs: those resident on a rank. flop_seconds: a program's seconds per flop, in a kernel of its own and in one
    that does more than a product. byte_seconds: its seconds per byte of memory, 0 if the memory rate is not declared.
    """

    def __init__(self, overlap: MegaKernel, model: ModelShape, cluster: ClusterSpec, backward: bool) -> None:
        self.overlap, self.model, self.backward = overlap, model, backward
        self.sizes = TileSizes.of(overlap, model)
        self.programs = overlap.programs or cluster.multiprocessors
        parts = max(self.programs, cluster.multiprocessors)
        flop_seconds = parts / product_rate(cluster, backward)
        self.flop_seconds = flop_seconds, flop_seconds / cluster.fused_rate
        self.byte_seconds = parts * memory_seconds(1.0, cluster)
        self.tensors_pulled = overlap.tensors_pulled(backward)
        self.fetched_bytes = self.tensors_pulled * model.row_bytes
        self.apart = overlap.combine_share > 0 or overlap.fused in ("dispatch", "none")
        self.launch_names = DIRECTIONS[backward]
        # Columns of B's product, and of sums: H elements.
        self.columns = -(-model.hidden_size // self.sizes.columns)

    def first_product(self, rows_G: IntArray) -> Products:
        """Returns A's product: ``gate_up`` with the activation, or ``down`` with the activation's gradient."""
        H, I = self.model.hidden_size, self.model.intermediate_size
        if self.backward:
            return self._by_rows(rows_G, H, I, self.sizes.columns, 1, H + 5 * I, "dispatch")
        return self._by_rows(rows_G, H, I, self.sizes.halves, 2, H + 3 * I, "dispatch")

    def second_product(self, rows_G: IntArray) -> Products:
        """Returns B's product: ``down``, or ``gate_up`` transposed."""
        H, L = self.model.hidden_size, self.model.intermediate_size * (2 if self.backward else 1)
        return self._by_rows(rows_G, L, H, self.sizes.columns, 1, H + L, "combine")

    def weight_gradients(self, rows_G: IntArray) -> tuple[Products, Products]:
        """Returns the products of the weight gradients of ``gate_up`` and of ``down``."""
        H, I = self.model.hidden_size, self.model.intermediate_size
        return self._by_columns(rows_G, 2 * I, H), self._by_columns(rows_G, H, I)

    def fetch_seconds(self, pulled: FloatArray, local: FloatArray) -> FloatArray:
        """Returns the seconds of a program that fetches rows: from peers, which are written, and local rows, which are
        read as well.
        """
        return self.tensors_pulled * self.push_seconds(pulled, local)

    def push_seconds(self, away: FloatArray, local: FloatArray) -> FloatArray:
        """Returns the seconds of a program that pushes whole rows: all are read, and those that stay are written."""
        return (away + 2 * local) * (self.model.row_bytes * self.byte_seconds)

    def sum_seconds(self, rows: FloatArray, tokens: FloatArray, columns: FloatArray) -> FloatArray:
        """Returns the seconds of a program that sums ``rows`` of so many tokens, in so many columns."""
        return (rows + tokens) * columns * (self.model.bytes_per_element * self.byte_seconds)

    def _by_rows(
        self, rows_G: IntArray, depth: int, width: int, columns: int, halves: int, row_elements: int, side: str
    ) -> Products:
        """Returns a product of each group's rows. ``halves``: the number of matrices of which a tile has so many
        columns. ``side``: the exchange whose rows the kernel moves if it is fused.
        """
        num_columns = -(-width // columns)
        tiles_G = -(-rows_G // self.sizes.rows) * num_columns
        flops = np.full(rows_G.shape, 2.0 * self.sizes.rows * columns * halves * depth)
        bytes_G = (halves * width * depth + rows_G * row_elements) * self.model.bytes_per_element
        return self._products(num_columns, tiles_G, flops, bytes_G, self.overlap.fused in ("both", side))

    def _by_columns(self, rows_G: IntArray, left: int, right: int) -> Products:
        num_columns = -(-right // self.sizes.columns)
        tiles = -(-left // self.sizes.rows) * num_columns
        flops_G = rows_G * np.float64(2 * self.sizes.rows * self.sizes.columns)
        bytes_G = left * right * GRADIENT_BYTES + rows_G * (left + right) * self.model.bytes_per_element
        fused = self.overlap.overlap_weight_gradients
        return self._products(num_columns, np.full(rows_G.shape, tiles), flops_G, bytes_G, fused)

    def _products(
        self, num_columns: int, tiles_G: IntArray, flops_G: FloatArray, bytes_G: IntArray, fused: bool
    ) -> Products:
        tile_bytes_G = bytes_G / np.maximum(tiles_G, 1)
        seconds_G = np.maximum(flops_G * self.flop_seconds[fused], tile_bytes_G * self.byte_seconds)
        return Products(num_columns, tiles_G, seconds_G)
