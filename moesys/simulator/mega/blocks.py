"""Blocks of a layer under ``MegaKernel``: runs of equal tasks of one stage and one or several row tiles, in the order
of queues.

A task of a block is the mean of the tasks that it stands for. Blocks differ from kernels in two ways: A's tasks of a
row tile follow one another, while kernels take the first columns of a whole sweep first; and a rank's sums begin when
all of its rows have come back, while kernels begin each sum when its own rows have.

All ranks are handled at once: the entries of a rank follow those of the ranks before it. R ranks, G groups of all
ranks, M row tiles, U units of row tiles, B blocks of rows (of a group and a source), X runs, P pieces of work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega.queues import (
    FETCH,
    OUTER_PRODUCT,
    PRODUCT,
    PUSH,
    SUM,
    WEIGHT_GRADIENTS,
    Launch,
    PeerTraffic,
    Queues,
    RunsOfKind,
    joined,
)
from moesys.simulator.mega.tiles import RASTER, WHOLE, OrderedTiles, TaskSeconds, parts_of
from moesys.simulator.mega.units import Coarseness, HeldGroups, Mixture, TileUnits, meetings, sums

# The parts of B's columns in which a sweep is taken if its tiles are not taken together. In one part, all tiles that
# push to the same peer would end at the same time.
COLUMN_PARTS = 8
# For each row tile of a unit, a piece of work has a quarter as many tasks as a rank has programs.
PIECES = 4


class Blocks:
    """The blocks of all ranks, and their gates."""

    def __init__(self, work: TaskSeconds, cluster: ClusterSpec, plan: TokenPlan, coarse: Coarseness) -> None:
        self.work, self.plan = work, plan
        self.sizes, self.by_expert = work.sizes, work.overlap.granularity == "expert"
        self.all_ranks = np.arange(cluster.num_ranks)
        self.groups = groups = HeldGroups.of(plan)
        self.choices_R = plan.load.tokens_RE.sum(axis=1)
        self.tiles = OrderedTiles.of(
            groups.rank_G,
            groups.rows_G,
            groups.before_own(),
            len(self.all_ranks),
            self.sizes.rows,
            work.overlap.tile_order,
        )
        self.rank_M = groups.rank_G[self.tiles.group_M]
        self.units = TileUnits.of(self.tiles, self.rank_M, coarse.unit_tiles)
        self.copies = self._copied() if work.overlap.deduplicate else None
        self.column_parts = max(1, min(work.columns, COLUMN_PARTS // coarse.unit_tiles))
        self.most = max(1, work.programs // PIECES) * coarse.unit_tiles
        # Gates of each rank for its sums and for its pushes, of each unit or group for its arrival, of each unit for
        # its product, and of each group for the arrival of all of it.
        arrivals = groups.rank_G if self.by_expert else self.units.rank_U
        gates = [self.all_ranks, self.all_ranks, arrivals, self.units.rank_U, groups.rank_G]
        self.gate_rank = np.concatenate(gates)
        self.home, self.pushed, self.arrived, self.multiplied, self.grouped = np.cumsum([0, *map(len, gates)])[:-1]

    def launches(self) -> list[Launch]:
        return [*self._dispatch(), *self._combine()]

    def _dispatch(self) -> list[Launch]:
        work, sizes, units, groups = self.work, self.sizes, self.units, self.groups
        products = work.first_product(groups.rows_G)
        mixture = Mixture.of(
            len(self.all_ranks),
            (units.rank_U, units.tiles_U * sizes.fetches),
            (units.rank_U, units.tiles_U * products.columns),
            self._needed_tiles() * sizes.fetches,
            parts_of(work.overlap.dispatch_share) if self._fused("dispatch") else WHOLE,
            self.most,
        )
        unit = mixture.unit
        group, rank = units.group_U[unit], units.rank_U[unit]
        # The fetches of each run, row tile by row tile. Those without rows take no time, and no program takes them.
        tile_ends = np.arange(1, len(self.tiles) + 1) * sizes.fetches
        run, tile, first, end = meetings(mixture.first, mixture.end, tile_ends)
        in_tile = (first - tile * sizes.fetches) * sizes.fetch_rows
        of_piece = np.clip(self.tiles.rows_M[tile] - in_tile, 0, (end - first) * sizes.fetch_rows)
        count = sums(run, -(-of_piece // sizes.fetch_rows), len(group)).astype(np.int64)
        rows = sums(run, of_piece, len(group)) / np.maximum(count, 1)
        begin = self.tiles.row_M[tile]
        piece, block, first, end = meetings(begin + in_tile, begin + in_tile + of_piece, groups.end_B)
        # The number of fetches that have rows of the block.
        bring = (end - 1 - begin[piece]) // sizes.fetch_rows - (first - begin[piece]) // sizes.fetch_rows + 1
        run, source = run[piece], groups.source_B[block]
        a_task = (end - first) / count[run]
        if self.copies is not None:
            # A fetch whose rows are all copied pulls nothing.
            copied = self.copies[0][block]
            a_task, bring = a_task * (1 - copied), bring * (1 - copied ** ((end - first) / bring))
        away = source != rank[run]
        needs = (run[a_task > 0], source[a_task > 0])
        run, source, a_task, share = run[away], source[away], a_task[away], (bring / count[run])[away]
        pulled = sums(run, a_task, len(group))
        gate_U = self.arrived + (units.group_U if self.by_expert else np.arange(len(units)))
        opens = (np.arange(len(group)), gate_U[unit])
        wait = np.full(len(group), -1)
        if self.copies is not None:
            copies_from_G = self.copies[1]
            opens = (np.r_[opens[0], opens[0]], np.r_[opens[1], self.grouped + group])
            wait = np.where(copies_from_G[group] >= 0, self.grouped + copies_from_G[group], -1)
        fetches = RunsOfKind(
            FETCH,
            rank,
            count,
            memory=work.fetch_seconds(pulled, rows - pulled),
            group=groups.number_G[group],
            gate=wait,
            needs=needs,
            opens=opens,
            exchanged=PeerTraffic(run, source, a_task * work.fetched_bytes, share),
        )
        unit = mixture.piece_of
        multiplied = self._products(PRODUCT, products.seconds_G, units.group_U[unit], mixture.piece, gate=gate_U[unit])
        return self._mixed(False, fetches, multiplied, mixture.order)

    def _combine(self) -> list[Launch]:
        work, units, groups = self.work, self.units, self.groups
        products, columns = work.second_product(groups.rows_G), work.columns
        row_M = self.tiles.row_M
        tile, block, first, end = meetings(row_M, row_M + self.tiles.rows_M, groups.end_B)
        unit = np.repeat(np.arange(len(units)), units.tiles_U)[tile]
        source, shared = groups.source_B[block], end - first
        away = source != units.rank_U[unit]
        local_U = sums(unit[~away], shared[~away], len(units)) / units.tiles_U
        unit, source, shared = unit[away], source[away], shared[away] / units.tiles_U[unit[away]]
        # Bytes and share of one row tile of each unit.
        tile_bytes, tile_share = shared * work.model.row_bytes, 1 / units.tiles_U[unit]
        of_part, part, tasks = self._parts()
        head: list[Launch]
        if not work.apart:
            run_UC = np.empty((len(units), self.column_parts), dtype=np.int64)
            run_UC[of_part, part] = np.arange(len(of_part))
            exchanged = PeerTraffic(
                run_UC[unit].ravel(),
                np.repeat(source, self.column_parts),
                np.repeat(tile_bytes / columns, self.column_parts),
                np.repeat(tile_share, self.column_parts),
            )
            opens = (np.arange(len(of_part)), self.pushed + units.rank_U[of_part])
            multiplied = self._products(
                PRODUCT, products.seconds_G, units.group_U[of_part], tasks, opens=opens, exchanged=exchanged
            )
            head = [Launch.plain(self.all_ranks, work.launch_names[1], multiplied, True)]
        else:
            mixture = Mixture.of(
                len(self.all_ranks),
                (units.rank_U[of_part], tasks),
                (units.rank_U, units.tiles_U),
                self._swept_tiles() * columns,
                WHOLE - parts_of(work.overlap.combine_share) if self._fused("combine") else WHOLE,
                # One piece per unit.
                RASTER,
            )
            of_run = of_part[mixture.unit]
            opens, tasks = (np.arange(len(of_run)), self.multiplied + of_run), mixture.end - mixture.first
            multiplied = self._products(PRODUCT, products.seconds_G, units.group_U[of_run], tasks, opens=opens)
            away_U = sums(unit, shared, len(units))
            pushes = RunsOfKind(
                PUSH,
                units.rank_U,
                mixture.piece,
                memory=work.push_seconds(away_U, local_U),
                gate=self.multiplied + np.arange(len(units)),
                group=groups.number_G[units.group_U],
                opens=(np.arange(len(units)), self.pushed + units.rank_U),
                exchanged=PeerTraffic(unit, source, tile_bytes, tile_share),
            )
            head = self._mixed(True, multiplied, pushes, mixture.order)
        tail = self._tail()
        if self._fused("combine"):
            return [joined(head[0], tail[0]), *tail[1:]]
        return head + tail

    def _tail(self) -> list[Launch]:
        """Returns the launch of weight gradients and sums, which are B's last tasks; or that of sums, and after it
        those of weight gradients.
        """
        work, overlap, groups, R = self.work, self.work.overlap, self.groups, len(self.all_ranks)
        tokens_R = -(-self.choices_R // work.model.top_k)
        tasks_R = -(-tokens_R // work.sizes.sum_tokens) * work.columns
        width_R = np.full(R, float(work.model.hidden_size))
        seconds_R = work.sum_seconds(self.choices_R.astype(np.float64), tokens_R.astype(np.float64), width_R)
        each = work.weight_gradients(groups.rows_G) if work.backward else ()
        fused = each if overlap.overlap_weight_gradients else ()
        # Weight gradients of both matrices of each group, sorted by rank.
        group_Y = np.tile(np.arange(len(groups.rows_G)), len(fused))
        by_rank = np.argsort(groups.rank_G[group_Y], kind="stable")
        group_Y = group_Y[by_rank]
        count_Y = np.concatenate([np.zeros(0, np.int64), *(of.tiles_G for of in fused)])[by_rank]
        seconds_Y = np.concatenate([np.zeros(0), *(of.seconds_G for of in fused)])[by_rank]
        parts = WHOLE - parts_of(overlap.reduce_share)
        mixture = Mixture.of(
            R,
            (groups.rank_G[group_Y], count_Y),
            (self.all_ranks, tasks_R),
            np.zeros(R, dtype=np.int64),
            parts,
            self.most if parts < WHOLE else max(1, int(tasks_R.max())),
        )
        group = group_Y[mixture.unit]
        outer = RunsOfKind(
            OUTER_PRODUCT,
            groups.rank_G[group],
            mixture.end - mixture.first,
            compute=seconds_Y[mixture.unit],
            group=groups.number_G[group],
        )
        rank = mixture.piece_of
        sums = RunsOfKind(
            SUM, rank, mixture.piece, compute=(seconds_R / np.maximum(tasks_R, 1))[rank], gate=self.home + rank
        )
        tail = [Launch(self.all_ranks, work.launch_names[1], (outer, sums), mixture.order, True)]
        if not fused:
            by_size = groups.by_size()
            for name, of in zip(WEIGHT_GRADIENTS, each, strict=False):
                runs = self._products(OUTER_PRODUCT, of.seconds_G, by_size, of.tiles_G[by_size])
                tail.append(Launch.plain(self.all_ranks, name, runs, True))
        return tail

    def _needed_tiles(self) -> IntArray:
        """Returns the number of row tiles, from its rank's first on, that the sweep of each unit waits for, [U]."""
        last_U = self._swept_tiles()
        if not self.by_expert:
            return last_U
        begin_U = np.searchsorted(self.rank_M, self.units.rank_U)
        return self.tiles.end_M[begin_U + last_U - 1] - begin_U

    def _swept_tiles(self) -> IntArray:
        """Returns the number of row tiles of its rank until the end of each unit's sweep, [U]."""
        tiles_R = np.bincount(self.rank_M, minlength=len(self.all_ranks))
        return np.minimum((self.units.first_U // RASTER + 1) * RASTER, tiles_R[self.units.rank_U])

    def _parts(self) -> tuple[IntArray, IntArray, IntArray]:
        """Returns (unit, part of B's columns, tasks) of each run of products, sweep by sweep. All units of a sweep take
        one part before the next.
        """
        units, parts, columns = self.units, self.column_parts, self.work.columns
        unit, part = np.tile(np.arange(len(units)), parts), np.repeat(np.arange(parts), len(units))
        order = np.lexsort((unit, part, (units.first_U // RASTER)[unit], units.rank_U[unit]))
        unit, part = unit[order], part[order]
        return unit, part, units.tiles_U[unit] * (columns // parts + (part < columns % parts))

    def _copied(self) -> tuple[FloatArray, IntArray]:
        """Returns the part of each block whose tokens an earlier group of its rank brings, if tokens choose experts
        independently, [B]; and for each group the earlier group for which its fetches wait to copy rows, -1 for none:
        the last one that is at least as likely to be needed as not.
        """
        groups, R = self.groups, len(self.all_ranks)
        choices_R = np.maximum(self.choices_R, 1)
        copied_B, copies_from_G = np.zeros(len(groups.rows_B)), np.full(len(groups.rows_G), -1)
        others = self.work.model.top_k - 1
        for rank in self.all_ranks:
            group = np.flatnonzero(groups.rank_G == rank)
            of_rank = np.flatnonzero(groups.rank_G[groups.group_B] == rank)
            place_G = np.argsort(self.tiles.first_tile_G[group], kind="stable")
            rows_GR = np.zeros((len(group), R))
            rows_GR[groups.number_G[groups.group_B[of_rank]], groups.source_B[of_rank]] = groups.rows_B[of_rank]
            until = rows_GR[place_G].cumsum(axis=0) / choices_R
            before = until - rows_GR[place_G] / choices_R
            copied_GR = np.zeros(rows_GR.shape)
            copied_GR[place_G] = 1 - (1 - before) ** others
            copied_B[of_rank] = copied_GR[groups.number_G[groups.group_B[of_rank]], groups.source_B[of_rank]]
            # The probability that a row is a copy from each group, in order, over the sources of later groups.
            share_R = rows_GR.sum(axis=0) / max(1, rows_GR.sum())
            ends = np.r_[0.0, (((1 - before) ** others - (1 - until) ** others) @ share_R).cumsum()]
            for place, number in enumerate(place_G):
                # With flags per expert, rows of a group can be copied only after all of it has come.
                rows = max(1, groups.rows_G[group[number]]) if self.by_expert else self.sizes.fetch_rows
                last = np.searchsorted(ends, ends[place] - (1 - 0.5 ** (1 / rows)), "right") - 1
                if last >= 0:
                    copies_from_G[group[number]] = group[place_G[last]]
        return copied_B, copies_from_G

    def _products(
        self, kind: int, seconds_G: FloatArray, group: IntArray, tasks: IntArray, **waits_and_opens: Any
    ) -> RunsOfKind:
        """Returns runs of so many tasks of a product of each ``group``. ``waits_and_opens``: fields of the runs."""
        rank, number = self.groups.rank_G[group], self.groups.number_G[group]
        return RunsOfKind(kind, rank, tasks, compute=seconds_G[group], group=number, **waits_and_opens)

    def _fused(self, side: str) -> bool:
        return self.work.overlap.fused in ("both", side)

    def _mixed(self, combines: bool, first: RunsOfKind, work: RunsOfKind, order: IntArray) -> list[Launch]:
        """Returns the runs in one launch if they are fused, and otherwise in one launch each."""
        name = self.work.launch_names[combines]
        if self._fused("combine" if combines else "dispatch"):
            return [Launch(self.all_ranks, name, (first, work), order, combines)]
        return [Launch.plain(self.all_ranks, name, kind, combines) for kind in (first, work)]


def queues_of_blocks(work: TaskSeconds, cluster: ClusterSpec, plan: TokenPlan, coarse: Coarseness) -> Queues:
    """Returns the queues of the blocks of all ranks."""
    blocks = Blocks(work, cluster, plan, coarse)
    # A rank that has pushed all results tells the ranks that they belong to.
    sends_RR = np.zeros((cluster.num_ranks, cluster.num_ranks), dtype=bool)
    sends_RR[plan.entries[:, 2], plan.entries[:, 0]] = True
    destination, source = np.nonzero(sends_RR)
    return Queues.of(
        blocks.launches(),
        blocks.gate_rank,
        (blocks.pushed + destination, blocks.home + source),
        cluster,
        coarse.tasks,
        work.programs / coarse.programs,
    )
