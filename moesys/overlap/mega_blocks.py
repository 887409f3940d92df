"""Blocks of a layer under ``MegaKernel``: runs of equal tasks, one for each row tile and stage, in the order of queues.

A task of a block is the mean of those that it stands for. Tasks of a row tile follow one another, where kernels take
the first columns of a whole sweep first; and a rank's sums begin when all of its rows are home, where kernels begin
each when its own are.

R ranks, G groups and M row tiles of a rank, X runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.overlap.mega_queues import (
    FETCH,
    OUTER_PRODUCT,
    PRODUCT,
    PUSH,
    SUM,
    WEIGHT_GRADIENTS,
    Launch,
    Queues,
    RunsOfKind,
    joined,
)
from moesys.overlap.mega_work import Work
from moesys.overlap.tile_tasks import RASTER, WHOLE, RowTiles, parts_of, rows_of_groups, swept

# Parts of its columns that a sweep of tiles which push is taken in. In one, tiles that push to the same peer would all
# be done at one time.
COLUMN_PARTS = 3


@dataclass(frozen=True)
class Mixture:
    """Runs of tasks that come first, cut where work comes between them, and pieces of work: ``tile_tasks.mixed`` for
    runs.

    ``first``, ``end``: numbers of the first tasks of each run. ``piece_of``, ``piece``: the unit of work and the tasks
    of each piece. ``order``: of runs of first tasks, then of pieces of work.
    """

    first: IntArray
    end: IntArray
    piece_of: IntArray
    piece: IntArray
    order: IntArray

    @staticmethod
    def of(first_ends: IntArray, work: IntArray, needed: IntArray, parts: int, most: int) -> Mixture:
        """``first_ends``: where units of first tasks end; ``work``: tasks of each unit of work, and how many first ones
        it has ``needed``. Pieces have at most ``most`` tasks.
        """
        num_first = int(first_ends[-1]) if len(first_ends) else 0
        pieces = -(-work // most)
        piece_of = np.repeat(np.arange(len(work)), pieces)
        in_unit = np.arange(len(piece_of)) - np.repeat(pieces.cumsum() - pieces, pieces)
        piece = np.minimum(work[piece_of] - in_unit * most, most)
        before = np.full(len(piece), num_first)
        if parts < WHOLE:
            middle = piece.cumsum() - piece + piece // 2
            before = np.minimum(np.maximum(needed[piece_of], middle * parts // (WHOLE - parts)), num_first)
            before = np.maximum.accumulate(before) if len(before) else before
        cuts = np.unique(np.concatenate([[0], first_ends, before]))
        first, end = cuts[:-1], cuts[1:]
        order = np.lexsort((np.r_[np.ones(len(first)), np.zeros(len(piece))], np.r_[first, before]))
        return Mixture(first, end, piece_of, piece, order)


class RankBlocks:
    """What comes to one rank, and its launches.

    ``gates``: the first number of its own, of which there are ``num_gates``. ``seen_R``: when this rank sees that
    others have published, in seconds.
    """

    def __init__(self, work: Work, plan: TokenPlan, rank: int, seen_R: FloatArray, gates: int) -> None:
        self.work, self.rank, self.seen_R = work, rank, seen_R
        self.sizes, self.by_expert = work.sizes, work.overlap.granularity == "expert"
        _, self.rows_GR = rows_of_groups(plan, rank)
        self.rows_G = self.rows_GR.sum(axis=1)
        self.choices = int(plan.load.tokens_RE[rank].sum())
        self.tiles = RowTiles.of(self.rows_GR, rank, self.sizes.rows, work.overlap.tile_order)
        self.copies = self._copied(plan) if work.overlap.deduplicate else None
        self.most = max(1, work.programs // 4)
        # One for its sums, one for its pushes, of each row tile or group that it has come, and that it is multiplied.
        self.home, self.pushed, self.arrived = gates, gates + 1, gates + 2
        self.multiplied = self.arrived + (len(self.rows_G) if self.by_expert else len(self.tiles))
        # Of each group that all of it has come.
        self.grouped = self.multiplied + len(self.tiles)
        self.num_gates = self.grouped + len(self.rows_G) - gates

    def launches(self) -> list[Launch]:
        return [*self._dispatch(), *self._combine()]

    def _copied(self, plan: TokenPlan) -> tuple[FloatArray, IntArray]:
        """The part of each block whose tokens an earlier group brings, if tokens choose experts independently; and of
        each group the earlier one that its fetches wait for to copy rows, -1 for none: the last that is as likely to be
        needed as not.
        """
        order = np.argsort(self.tiles.first_tile_G, kind="stable")
        choices_R = np.maximum(plan.load.tokens_RE.sum(axis=1), 1)
        until = self.rows_GR[order].cumsum(axis=0) / choices_R
        before = until - self.rows_GR[order] / choices_R
        others = self.work.model.top_k - 1
        copied_GR = np.zeros(self.rows_GR.shape)
        copied_GR[order] = 1 - (1 - before) ** others
        # That a row is a copy from each group, in order; of rows of the sources that later groups have.
        share_R = self.rows_GR.sum(axis=0) / max(1, self.rows_GR.sum())
        from_group = ((1 - before) ** others - (1 - until) ** others) @ share_R
        ends = np.r_[0.0, from_group.cumsum()]
        copies_from_G = np.full(len(order), -1)
        for place, group in enumerate(order):
            # With flags of experts nothing of a group can be copied before all of it has come.
            rows = max(1, self.rows_G[group]) if self.by_expert else self.sizes.fetch_rows
            need = 1 - 0.5 ** (1 / rows)
            last = np.searchsorted(ends, ends[place] - need, "right") - 1
            copies_from_G[group] = order[last] if last >= 0 else -1
        return copied_GR, copies_from_G

    def _dispatch(self) -> list[Launch]:
        work, sizes, tiles = self.work, self.sizes, self.tiles
        products = work.first_product(self.rows_G)
        needed_S = tiles.needed_fetches(sizes, self.by_expert)
        tile = np.arange(len(tiles))
        mixture = Mixture.of(
            (tile + 1) * sizes.fetches,
            np.full(len(tiles), products.columns),
            needed_S[tile // RASTER],
            parts_of(work.overlap.dispatch_share) if self._fused("dispatch") else WHOLE,
            self.most,
        )
        of_tile = mixture.first // sizes.fetches
        in_tile = mixture.first % sizes.fetches * sizes.fetch_rows
        rows = np.clip(tiles.rows_M[of_tile] - in_tile, 0, (mixture.end - mixture.first) * sizes.fetch_rows)
        rows_XR = self._rows(tiles.group_M[of_tile], tiles.row_M[of_tile] + in_tile, rows)
        if self.copies is not None:
            rows_XR *= 1 - self.copies[0][tiles.group_M[of_tile]]
        rows_XR[:, self.rank] = 0.0
        # Fetches without rows take no time, and no program is asked for them.
        count = -(-rows // sizes.fetch_rows)
        rows_XR /= np.maximum(count, 1)[:, None]
        pulled = rows_XR.sum(axis=1)
        gate = self.arrived + (tiles.group_M if self.by_expert else tile)
        opens = (np.arange(len(count)), gate[of_tile])
        wait = np.full(len(count), -1)
        if self.copies is not None:
            group, copies_from_G = tiles.group_M[of_tile], self.copies[1]
            opens = (np.r_[opens[0], opens[0]], np.r_[opens[1], self.grouped + group])
            wait = np.where(copies_from_G[group] >= 0, self.grouped + copies_from_G[group], -1)
        fetches = RunsOfKind.of(
            FETCH,
            count,
            memory=work.fetch_seconds(pulled, rows / np.maximum(count, 1) - pulled),
            floor=np.where(rows_XR > 0, self.seen_R, 0.0).max(axis=1, initial=0.0),
            group=tiles.group_M[of_tile],
            gate=wait,
            opens=opens,
            bytes_XR=rows_XR * work.row_bytes,
        )
        of_piece = mixture.piece_of
        multiplied = RunsOfKind.of(
            PRODUCT,
            mixture.piece,
            compute=products.seconds_G[tiles.group_M[of_piece]],
            gate=gate[of_piece],
            group=tiles.group_M[of_piece],
            flops=products.tile_flops_G[tiles.group_M[of_piece]],
        )
        return self._mixed(False, fetches, multiplied, mixture)

    def _combine(self) -> list[Launch]:
        work, tiles = self.work, self.tiles
        products, columns = work.second_product(self.rows_G), work.columns
        rows_MR = self._rows(tiles.group_M, tiles.row_M, tiles.rows_M)
        local_M = rows_MR[:, self.rank].copy()
        rows_MR[:, self.rank] = 0.0
        tile = np.arange(len(tiles))
        seconds_M = products.seconds_G[tiles.group_M]
        flops_M = products.tile_flops_G[tiles.group_M]
        bytes_MR = rows_MR * work.row_bytes
        pushed = (tile, np.full(len(tiles), self.pushed))
        tail = self._tail()
        if not work.apart:
            of_run, part = swept(len(tiles), COLUMN_PARTS)
            tasks = columns // COLUMN_PARTS + (part < columns % COLUMN_PARTS)
            multiplied = RunsOfKind.of(
                PRODUCT,
                tasks,
                compute=seconds_M[of_run],
                group=tiles.group_M[of_run],
                flops=flops_M[of_run],
                opens=(np.arange(len(of_run)), np.full(len(of_run), self.pushed)),
                bytes_XR=bytes_MR[of_run] / columns,
            )
            head = [Launch.plain(self.rank, work.launch_names[1], multiplied, True)]
        else:
            last = np.minimum((tile // RASTER + 1) * RASTER, len(tiles))
            parts = WHOLE - parts_of(work.overlap.combine_share) if self._fused("combine") else WHOLE
            mixture = Mixture.of((tile + 1) * columns, np.ones_like(tile), last * columns, parts, self.most)
            of_run = mixture.first // columns
            multiplied = RunsOfKind.of(
                PRODUCT,
                mixture.end - mixture.first,
                compute=seconds_M[of_run],
                group=tiles.group_M[of_run],
                flops=flops_M[of_run],
                opens=(np.arange(len(of_run)), self.multiplied + of_run),
            )
            pushes = RunsOfKind.of(
                PUSH,
                mixture.piece,
                memory=work.push_seconds(rows_MR.sum(axis=1), local_M),
                gate=self.multiplied + tile,
                group=tiles.group_M,
                opens=pushed,
                bytes_XR=bytes_MR,
            )
            head = self._mixed(True, multiplied, pushes, mixture)
        if self._fused("combine"):
            return [joined(head[0], tail[0]), *tail[1:]]
        return head + tail

    def _tail(self) -> list[Launch]:
        """Weight gradients and sums, the last of B's tasks; or weight gradients by launches of their own behind it."""
        work, overlap = self.work, self.work.overlap
        tokens = -(-self.choices // work.model.top_k)
        tasks = -(-tokens // work.sizes.sum_tokens) * work.columns
        sizes = (np.array([size], dtype=np.float64) for size in (self.choices, tokens, work.model.hidden_size))
        seconds = float(work.sum_seconds(*sizes)[0]) / max(tasks, 1)
        each = work.weight_gradients(self.rows_G) if work.backward else ()
        fused = each if overlap.overlap_weight_gradients else ()
        count, seconds_Y, flops_Y = (
            np.concatenate([np.zeros(0, dtype), *(getattr(of, name) for of in fused)])
            for name, dtype in (("tiles_G", np.int64), ("seconds_G", np.float64), ("tile_flops_G", np.float64))
        )
        parts = WHOLE - parts_of(overlap.reduce_share)
        ends = count.cumsum()
        most = self.most if parts < WHOLE else max(tasks, 1)
        mixture = Mixture.of(ends, np.array([tasks]), np.zeros(1, dtype=np.int64), parts, most)
        of_run = np.searchsorted(ends, mixture.first, "right")
        outer = RunsOfKind.of(
            OUTER_PRODUCT,
            mixture.end - mixture.first,
            compute=seconds_Y[of_run],
            group=of_run % max(len(self.rows_G), 1),
            flops=flops_Y[of_run],
        )
        pieces = np.zeros(len(mixture.piece), dtype=np.int64)
        sums = RunsOfKind.of(SUM, mixture.piece, compute=np.full(len(pieces), seconds), gate=self.home + pieces)
        tail = [Launch(self.rank, work.launch_names[1], (outer, sums), mixture.order, True)]
        if not fused:
            by_size = np.argsort(-self.rows_G, kind="stable")
            for name, of in zip(WEIGHT_GRADIENTS, each, strict=False):
                runs = RunsOfKind.of(
                    OUTER_PRODUCT,
                    of.tiles_G[by_size],
                    compute=of.seconds_G[by_size],
                    group=by_size,
                    flops=of.tile_flops_G[by_size],
                )
                tail.append(Launch.plain(self.rank, name, runs, True))
        return tail

    def _fused(self, side: str) -> bool:
        return self.work.overlap.fused in ("both", side)

    def _mixed(self, combines: bool, first: RunsOfKind, work: RunsOfKind, mixture: Mixture) -> list[Launch]:
        """In one launch, or in one each."""
        name = self.work.launch_names[combines]
        if self._fused("combine" if combines else "dispatch"):
            return [Launch(self.rank, name, (first, work), mixture.order, combines)]
        return [Launch.plain(self.rank, name, kind, combines) for kind in (first, work)]

    def _rows(self, group: IntArray, row: IntArray, rows: IntArray) -> FloatArray:
        """Rows by source, [len, R], of pieces of groups that begin at ``row`` of all rows and have ``rows``."""
        end_GR = self.rows_GR.ravel().cumsum().reshape(self.rows_GR.shape)
        first_GR = end_GR - self.rows_GR
        last = np.minimum(end_GR[group], (row + rows)[:, None])
        return np.maximum(last - np.maximum(first_GR[group], row[:, None]), 0).astype(np.float64)


def queues_of_blocks(
    work: Work, cluster: ClusterSpec, plan: TokenPlan, published_R: FloatArray, start_R: FloatArray
) -> Queues:
    """All blocks of all ranks, which have published at ``published_R`` and launch at ``start_R`` seconds."""
    R, flag_seconds = cluster.num_ranks, cluster.flag_us * 1e-6
    ranks: list[RankBlocks] = []
    num_gates = 0
    for rank in range(R):
        seen_R = published_R + np.where(np.arange(R) == rank, 0.0, flag_seconds)
        ranks.append(RankBlocks(work, plan, rank, seen_R, num_gates))
        num_gates += ranks[-1].num_gates
    # Whoever pushes rows home tells, when all are there, those whose rows they are.
    pairs = np.unique(plan.entries[:, [2, 0]], axis=0)
    pushed_R, home_R = (np.array([getattr(of_rank, name) for of_rank in ranks]) for name in ("pushed", "home"))
    return Queues.of(
        [launch for of_rank in ranks for launch in of_rank.launches()],
        np.repeat(np.arange(R), [of_rank.num_gates for of_rank in ranks]),
        (pushed_R[pairs[:, 0]], home_R[pairs[:, 1]]),
        cluster,
        start_R,
    )
