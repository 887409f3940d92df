"""The parts of a layer's blocks under ``MegaKernel``: groups of rows, units of row tiles, and mixtures of fetches, or
pushes, with products.

All ranks are handled at once: the entries of a rank follow those of the ranks before it. R ranks, G groups of all
ranks, M row tiles, U units of row tiles, B blocks of rows (of a group and a source), X runs, P pieces of work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.compiled import borrowing
from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega.queues import number_in_rank
from moesys.simulator.mega.tiles import RASTER, WHOLE, OrderedTiles, TaskSeconds

# On few ranks nothing is taken together. On some ranks neither are few row tiles of the busiest rank, which together
# are up to a sixth off and by themselves simulate nearly as fast, nor the tasks of few programs, of which each counts.
FINE_RANKS, SOME_RANKS, FINE_TILES, FEW_PROGRAMS = 8, 64, 128, 16
# The least number of units of the busiest rank where tiles are taken together.
UNITS = 16
# If tiles are taken together, links that are busy for less than this part of the busiest one's time are not shared.
QUIET = 1 / 16


@dataclass(frozen=True)
class Coarseness:
    """How much is simulated as one.

    unit_tiles: the largest number of row tiles that a block takes together. programs: the number of programs with which
    a rank is simulated. tasks: the number of tasks that are simulated as one. quiet: a link that is busy for less than
    this part of the busiest one's time is not shared by tasks.
    """

    unit_tiles: int
    programs: int
    tasks: float
    quiet: float = 0.0

    @staticmethod
    def fine(work: TaskSeconds) -> Coarseness:
        """Returns the coarseness in which every row tile, program and task is simulated by itself."""
        return Coarseness(1, work.programs, 1.0)

    @staticmethod
    def of(work: TaskSeconds, plan: TokenPlan, cluster: ClusterSpec) -> Coarseness:
        """Returns a coarseness for a plan. It is fine on few ranks, on some ranks with few row tiles or programs, and
        if there is less than one task per program. Otherwise a unit is the row tiles of a sweep, or fewer if the
        busiest rank would have too few units, and there are as many times fewer programs, so that they take as many
        rounds for a unit. In large domains, and on some hundred ranks, a whole sweep is a tenth off, and half a sweep a
        twentieth.
        """
        tiles, R = int(plan.tokens_R.max()) // work.sizes.rows, plan.load.num_ranks
        fine_ranks = SOME_RANKS if tiles < FINE_TILES or work.programs <= FEW_PROGRAMS else FINE_RANKS
        if fine_ranks >= R or tiles < UNITS * 2 or tiles * work.columns < work.programs:
            return Coarseness.fine(work)
        large_domains = max(cluster.domain_sizes) > FINE_RANKS
        most = RASTER // 2 if large_domains or SOME_RANKS < R <= SOME_RANKS * 4 else RASTER
        unit_tiles = min(most, 1 << (tiles // UNITS).bit_length() - 1)
        programs = max(1, work.programs // unit_tiles)
        return Coarseness(unit_tiles, programs, work.programs / programs, QUIET)


def sums(key: IntArray, amount: FloatArray | IntArray, size: int) -> FloatArray:
    """Returns the sum of the amounts of each key. Sums of integers below 2^53 are exact."""
    return np.bincount(key, weights=amount, minlength=size).astype(np.float64)


def meetings(first: IntArray, end: IntArray, end_B: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns (piece, block, begin, end) of the intersections of pieces, from ``first`` to ``end``, with blocks.

    Pieces do not overlap. Blocks follow one another and end at ``end_B``.
    """
    # Every further piece in a block begins a new intersection, so there are no more than pieces and blocks together.
    found = np.empty((4, len(first) + len(end_B)), dtype=np.int64)
    piece, block, begin, until = found[:, : _meet(first, end, end_B, found)]
    return piece, block, begin, until


@borrowing
def _meet(first, end, end_B, found):  # type: ignore[no-untyped-def]
    """Fills ``found`` and returns the number of intersections."""
    size, last, low = 0, len(end_B) - 1, 0
    for piece in range(len(first)):
        begin = first[piece]
        if begin >= end[piece]:
            continue
        # Most pieces begin where the one before ended, or a little later.
        low = min(low, last)
        near = min(low + 8, last)
        while low < near and end_B[low] <= begin:
            low += 1
        high = low
        if end_B[low] <= begin or (low > 0 and end_B[low - 1] > begin):
            low, high = 0, last
        while low < high:
            middle = (low + high) >> 1
            if end_B[middle] > begin:
                high = middle
            else:
                low = middle + 1
        while True:
            until = min(end[piece], end_B[low])
            if until > begin:
                found[0, size], found[1, size], found[2, size], found[3, size] = piece, low, begin, until
                size += 1
            begin = until
            if begin == end[piece]:
                break
            low += 1
    return size


@dataclass(frozen=True)
class HeldGroups:
    """The experts that ranks hold, by (rank, expert), and the rows that they receive, by (group, source).

    rank_G, rows_G: the rank and the rows of each group; number_G: its number on its rank. source_B, group_B, rows_B:
    the same of blocks that have rows; end_B: the row after each block. Rows are numbered through all ranks.
    """

    rank_G: IntArray
    rows_G: IntArray
    number_G: IntArray
    source_B: IntArray
    group_B: IntArray
    rows_B: IntArray
    end_B: IntArray

    @staticmethod
    def of(plan: TokenPlan) -> HeldGroups:
        num_experts = plan.load.num_experts
        held_RE = plan.layout.replicas_RE > 0
        rank_G = np.nonzero(held_RE)[0]
        group_RE = held_RE.cumsum() - 1
        source, expert, rank, tokens = plan.entries.T
        group = group_RE[rank * num_experts + expert]
        # A plan's entries are sorted by source.
        order = np.argsort(group, kind="stable")
        rows_B = tokens[order]
        rows_G = sums(group, tokens, len(rank_G)).astype(np.int64)
        return HeldGroups(rank_G, rows_G, number_in_rank(rank_G), source[order], group[order], rows_B, rows_B.cumsum())

    def before_own(self) -> IntArray:
        """Returns the rows of each group from sources before its own rank, [G]."""
        before = self.source_B < self.rank_G[self.group_B]
        return sums(self.group_B[before], self.rows_B[before], len(self.rows_G)).astype(np.int64)

    def by_size(self) -> IntArray:
        """Returns the groups rank by rank, largest first."""
        return np.lexsort((-self.rows_G, self.rank_G))


@dataclass(frozen=True)
class TileUnits:
    """Row tiles that blocks take together, in the order of queues. They are of one group and one sweep.

    tiles_U: their number. first_U: the number of row tiles of the rank before them.
    """

    rank_U: IntArray
    tiles_U: IntArray
    first_U: IntArray
    group_U: IntArray

    @staticmethod
    def of(tiles: OrderedTiles, rank_M: IntArray, most: int) -> TileUnits:
        """Returns units of at most ``most`` row tiles, a divisor of ``RASTER``."""
        number_M = number_in_rank(rank_M)
        follows = np.zeros(len(tiles), dtype=bool)
        follows[1:] = tiles.group_M[1:] == tiles.group_M[:-1]
        # A rank's first and last tile are units of their own, as nothing else runs then.
        alone_M = number_M == 0
        alone_M[:-1] |= alone_M[1:]
        alone_M[-1:] = True
        tile_U = np.flatnonzero(~follows | (number_M % most == 0) | alone_M)
        end_U = np.r_[tile_U, len(tiles)][1:]
        return TileUnits(rank_M[tile_U], end_U - tile_U, number_M[tile_U], tiles.group_M[tile_U])

    def __len__(self) -> int:
        return len(self.tiles_U)


@dataclass(frozen=True)
class Mixture:
    """Runs of tasks that come first, cut where work comes between them, and pieces of that work.

    first, end: the tasks of each run of first tasks, numbered through all ranks; unit: the unit that they belong to.
    piece_of, piece: the unit of work and the number of tasks of each piece. order: the order of runs and pieces, which
    are numbered runs first.
    """

    first: IntArray
    end: IntArray
    unit: IntArray
    piece_of: IntArray
    piece: IntArray
    order: IntArray

    @staticmethod
    def of(
        num_ranks: int,
        first: tuple[IntArray, IntArray],
        work: tuple[IntArray, IntArray],
        needed: IntArray,
        parts: int,
        most: int,
    ) -> Mixture:
        """Returns the mixture in which first tasks are at least a share of ``parts`` until they are used up.

        first: rank and number of first tasks of each unit that has some. work: rank and number of tasks of each unit of
        work. needed: the number of its rank's first tasks that it waits for. Pieces have at most ``most`` tasks.
        """
        end_F = first[1].cumsum()
        end_R = sums(first[0], first[1], num_ranks).astype(np.int64).cumsum()
        begin_R = np.r_[0, end_R[:-1]]
        pieces = -(-work[1] // most)
        piece_of = np.repeat(np.arange(len(pieces)), pieces)
        in_unit = np.arange(len(piece_of)) - np.repeat(pieces.cumsum() - pieces, pieces)
        piece = np.minimum(work[1][piece_of] - in_unit * most, most)
        rank = work[0][piece_of]
        before = end_R[rank]
        if parts < WHOLE:
            middle = piece.cumsum() - piece
            middle = middle - middle[np.searchsorted(rank, rank)] + piece // 2
            least = np.maximum(needed[piece_of], middle * parts // (WHOLE - parts))
            # Each rank's numbers are below those of the next one, so the maximum is taken rank by rank.
            before = np.maximum.accumulate(np.minimum(begin_R[rank] + least, before)) if len(before) else before
        cuts = np.sort(np.concatenate([[0], end_F, before]))
        cuts = cuts[np.diff(cuts, prepend=-1) > 0]
        unit = np.searchsorted(end_F, cuts[:-1], "right")
        rank_of_run = first[0][unit]
        order = np.lexsort(
            (np.r_[np.ones(len(unit)), np.zeros(len(piece))], np.r_[cuts[:-1], before], np.r_[rank_of_run, rank])
        )
        return Mixture(cuts[:-1], cuts[1:], unit, piece_of, piece, order)
