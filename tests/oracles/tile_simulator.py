"""One pass of one layer under ``MegaKernel``, task by task, on a few simulated ranks.

Every task that the kernels have, in the order of their queues (``task_order``), on as many programs, waits for the same
flags, takes what ``task_seconds`` says, and shares links with the others (``events``). This is what the block level
(``layer_pass``) is held against. Which tokens chose which experts is drawn once for all: a plan knows counts only.

R ranks, G groups and M row tiles of a rank, N its rows, K choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from task_order import mixed, needed_fetches, numbers_in_groups, rows_of_groups, swept, tiles_of_rank

from moesys.config import ClusterSpec, ModelShape
from moesys.config.overlap import MegaKernel
from moesys.cost import FloatArray
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega.events import Times, run_all
from moesys.simulator.mega.layer_pass import MegaPass, link_seconds_of, pass_of, publish_seconds
from moesys.simulator.mega.queues import (
    FETCH,
    OUTER_PRODUCT,
    PRODUCT,
    PUSH,
    SUM,
    WEIGHT_GRADIENTS,
    Launch,
    Machine,
    Pairs,
    PeerTraffic,
    Queues,
    RunsOfKind,
    joined,
)
from moesys.simulator.mega.tiles import RASTER, WHOLE, BoolArray, Products, TaskSeconds, parts_of


@dataclass(frozen=True)
class TilePass:
    """Every run of ``queues`` is one task."""

    queues: Queues
    times: Times
    result: MegaPass


def tile_pass(
    overlap: MegaKernel,
    model: ModelShape,
    cluster: ClusterSpec,
    plan: TokenPlan,
    start_R: FloatArray,
    backward: bool,
    experts_R: FloatArray | None = None,
) -> TilePass:
    """As ``layer_pass.QueuedPass``."""
    work = TaskSeconds(overlap, model, cluster, backward)
    machine = Machine.of(cluster, work.programs)
    published_R = start_R + publish_seconds(overlap, model, cluster, plan, backward)
    begin_R = published_R if experts_R is None else np.maximum(published_R, experts_R)
    queues = _Tasks(work, cluster, plan).queues()
    launched_R = begin_R + machine.gap_seconds
    times = run_all(queues.runs, queues.gates, queues.launches, machine, published_R, launched_R)
    link_seconds = link_seconds_of(queues, machine.byte_seconds_L)
    return TilePass(queues, times, pass_of(queues, times, work.programs, link_seconds, begin_R, plan))


class _Rows:
    """What comes to one rank: rows of groups, by source and token, in tiles.

    ``token_of_S``: of each source's choices in the order of its list; ``list_SER``: where in that its pieces begin.
    """

    def __init__(
        self, work: TaskSeconds, plan: TokenPlan, rank: int, token_of_S: list[IntArray], list_SER: IntArray
    ) -> None:
        self.rank = rank
        expert_G, rows_GR = rows_of_groups(plan, rank)
        self.rows_G = rows_GR.sum(axis=1)
        self.tiles = tiles_of_rank(rows_GR, rank, work.sizes.rows, work.overlap.tile_order)
        (num_groups, num_ranks), blocks = rows_GR.shape, rows_GR.ravel()
        self.source_N = np.repeat(np.tile(np.arange(num_ranks), num_groups), blocks)
        group_N = np.repeat(np.arange(num_groups), self.rows_G)
        in_block_N = np.arange(len(group_N)) - np.repeat(blocks.cumsum() - blocks, blocks)
        place_N = list_SER[self.source_N, expert_G[group_N], rank] + in_block_N
        self.token_N = np.empty(len(group_N), dtype=np.int64)
        for source, token in enumerate(token_of_S):
            of_source = self.source_N == source
            self.token_N[of_source] = token[place_N[of_source]]
        in_group_N = np.arange(len(group_N)) - (self.rows_G.cumsum() - self.rows_G)[group_N]
        number_M = numbers_in_groups(self.tiles, self.rows_G, work.sizes.rows)
        self.tile_N = number_M[self.tiles.first_tile_G[group_N] + in_group_N // work.sizes.rows]
        self.fetch_N = self.tile_N * work.sizes.fetches + in_group_N % work.sizes.rows // work.sizes.fetch_rows
        # The row of an earlier group that brings the same token, -1 where there is none.
        self.copied_N = np.full(len(group_N), -1)
        if work.overlap.deduplicate and len(group_N):
            key_N = self.source_N << 40 | self.token_N
            order = np.lexsort((self.tile_N, key_N))
            is_first = np.concatenate([[True], np.diff(key_N[order]) != 0])
            earliest_N = np.empty_like(order)
            earliest_N[order] = order[np.flatnonzero(is_first)[is_first.cumsum() - 1]]
            earlier = self.tile_N[earliest_N] < self.tiles.first_tile_G[group_N]
            self.copied_N = np.where(earlier, earliest_N, -1)


class _Tasks:
    """All tasks of all ranks, and the gates that they wait for."""

    def __init__(self, work: TaskSeconds, cluster: ClusterSpec, plan: TokenPlan) -> None:
        self.work, self.cluster, self.plan = work, cluster, plan
        self.by_expert = work.overlap.granularity == "expert"
        self.gate_rank: list[IntArray] = []
        none = np.zeros(0, dtype=np.int64)
        self.gate_opens: list[Pairs] = [(none, none)]
        self.num_gates = 0
        self.choices_R = plan.load.tokens_RE.sum(axis=1)
        self.tokens_R = -(-self.choices_R // work.model.top_k)
        self.blocks_R = -(-self.tokens_R // work.sizes.sum_tokens)
        # Of each sum one.
        self.home_R = np.array([self._gates(r, int(blocks) * work.columns) for r, blocks in enumerate(self.blocks_R)])

    def queues(self) -> Queues:
        R, loads = self.cluster.num_ranks, self.plan.load.tokens_RE
        token_of_S = [_drawn_tokens(tokens_E, self.work.model.top_k, source) for source, tokens_E in enumerate(loads)]
        tokens_SX = self.plan.tokens_RER.reshape(R, -1)
        list_SER = (tokens_SX.cumsum(axis=1) - tokens_SX).reshape(self.plan.tokens_RER.shape)
        launches = []
        for rank in range(R):
            rows = _Rows(self.work, self.plan, rank, token_of_S, list_SER)
            launches += [*self._dispatch(rows), *self._combine(rows, np.bincount(token_of_S[rank], minlength=1))]
        opens = np.concatenate([np.stack(pair) for pair in self.gate_opens], axis=1)
        return Queues.of(launches, np.concatenate(self.gate_rank), (opens[0], opens[1]), self.cluster)

    # --- tasks of a rank ------------------------------------------------------------------------------------

    def _dispatch(self, rows: _Rows) -> list[Launch]:
        work, sizes, tiles = self.work, self.work.sizes, rows.tiles
        num_fetches = len(tiles) * sizes.fetches
        arrived = self._gates(rows.rank, len(rows.rows_G) if self.by_expert else len(tiles))
        group_F = np.repeat(tiles.group_M, sizes.fetches)
        pulled_N = rows.copied_N < 0
        rows_FR = np.zeros((num_fetches, self.cluster.num_ranks))
        np.add.at(rows_FR, (rows.fetch_N[pulled_N], rows.source_N[pulled_N]), 1)
        local_F = rows_FR[:, rows.rank] + np.bincount(rows.fetch_N[~pulled_N], minlength=num_fetches)
        needing, needed = np.nonzero(rows_FR)
        rows_FR[:, rows.rank] = 0
        fetch = np.arange(num_fetches)
        opens = (fetch, arrived + (group_F if self.by_expert else fetch // sizes.fetches))
        wait_F = np.full(num_fetches, -1)
        if not pulled_N.all():
            copied = self._gates(rows.rank, num_fetches)
            waiter, earlier = rows.fetch_N[~pulled_N], rows.fetch_N[rows.copied_N[~pulled_N]]
            waiter, earlier = _distinct(waiter, group_F[earlier] if self.by_expert else earlier)
            wait_F[waiter] = copied + waiter
            if self.by_expert:
                self.gate_opens.append((arrived + earlier, copied + waiter))
            else:
                opens = (np.concatenate([fetch, earlier]), np.concatenate([opens[1], copied + waiter]))
        fetches = _tasks(
            FETCH,
            rows.rank,
            num_fetches,
            memory=work.fetch_seconds(rows_FR.sum(axis=1), local_F),
            gate=wait_F,
            needs=(needing, needed),
            group=group_F,
            opens=opens,
            exchanged=_exchanged(rows_FR * work.fetched_bytes),
        )
        of_rows = work.first_product(rows.rows_G)
        row_tile, _ = swept(len(tiles), of_rows.columns)
        gate = arrived + (tiles.group_M[row_tile] if self.by_expert else row_tile)
        products = self._products(rows.rank, of_rows, tiles.group_M[row_tile], gate=gate)
        sweep = np.arange(len(row_tile)) // (RASTER * of_rows.columns)
        needed = needed_fetches(tiles, sizes, self.by_expert)[sweep]
        is_work = mixed(num_fetches, needed, parts_of(work.overlap.dispatch_share))
        return self._mixed(rows.rank, False, fetches, products, is_work)

    def _combine(self, rows: _Rows, choices_T: IntArray) -> list[Launch]:
        work, tiles, rank = self.work, rows.tiles, rows.rank
        of_rows = work.second_product(rows.rows_G)
        row_tile, column_tile = swept(len(tiles), of_rows.columns)
        group = tiles.group_M[row_tile]
        rows_MR = np.zeros((len(tiles), self.cluster.num_ranks))
        np.add.at(rows_MR, (rows.tile_N, rows.source_N), 1)
        local_M = rows_MR[:, rank].copy()
        rows_MR[:, rank] = 0
        tile, column, gate = self._tells(rows)
        tail = self._tail(rows, choices_T)
        if work.apart:
            multiplied, all_M = self._gates(rank, len(tiles)), np.arange(len(tiles))
            products = self._products(rank, of_rows, group, opens=(np.arange(len(row_tile)), multiplied + row_tile))
            pushes = _tasks(
                PUSH,
                rank,
                len(tiles),
                memory=work.push_seconds(rows_MR.sum(axis=1), local_M),
                gate=multiplied + all_M,
                group=tiles.group_M,
                opens=(tile, gate),
                exchanged=_exchanged(rows_MR * work.model.row_bytes),
            )
            needed = np.minimum((all_M // RASTER + 1) * RASTER, len(tiles)) * of_rows.columns
            is_work = mixed(len(row_tile), needed, WHOLE - parts_of(work.overlap.combine_share))
            head = self._mixed(rank, True, products, pushes, is_work)
        else:
            width = np.minimum(work.model.hidden_size - column_tile * work.sizes.columns, work.sizes.columns)
            # Of a row tile and column, the task that pushes it.
            task_MC = np.empty((len(tiles), of_rows.columns), dtype=np.int64)
            task_MC[row_tile, column_tile] = np.arange(len(row_tile))
            exchanged = _exchanged(rows_MR[row_tile] * (width * work.model.bytes_per_element)[:, None])
            products = self._products(rank, of_rows, group, opens=(task_MC[tile, column], gate), exchanged=exchanged)
            head = [Launch.plain(np.array([rank]), work.launch_names[1], products, True)]
        if work.overlap.fused in ("both", "combine"):
            return [joined(head[0], tail[0]), *tail[1:]]
        return head + tail

    def _tail(self, rows: _Rows, choices_T: IntArray) -> list[Launch]:
        """Weight gradients and sums, the last of B's tasks; or weight gradients by launches of their own behind it."""
        work, overlap, rank = self.work, self.work.overlap, rows.rank
        blocks, columns = int(self.blocks_R[rank]), work.columns
        number = np.arange(blocks * columns)
        block, column = number // columns, number % columns
        of_block = np.arange(len(choices_T)) // work.sizes.sum_tokens
        choices = np.bincount(of_block, weights=choices_T, minlength=max(blocks, 1))[block].astype(np.float64)
        tokens = np.minimum(self.tokens_R[rank] - block * work.sizes.sum_tokens, work.sizes.sum_tokens)
        width = np.minimum(work.model.hidden_size - column * work.sizes.columns, work.sizes.columns)
        seconds = work.sum_seconds(choices, tokens.astype(np.float64), width.astype(np.float64))
        sums = _tasks(SUM, rank, len(number), compute=seconds, gate=self.home_R[rank] + number)
        each = work.weight_gradients(rows.rows_G) if work.backward else ()
        group = [np.repeat(np.arange(len(rows.rows_G)), of.tiles_G) for of in each]
        if not overlap.overlap_weight_gradients:
            # A launch for each matrix, whose tiles come largest groups first.
            by_size = np.argsort(np.argsort(-rows.rows_G, kind="stable"))
            tail = [Launch.plain(np.array([rank]), work.launch_names[1], sums, True)]
            for name, of, of_tile in zip(WEIGHT_GRADIENTS, each, group, strict=False):
                in_order = of_tile[np.argsort(by_size[of_tile], kind="stable")]
                tail.append(
                    Launch.plain(np.array([rank]), name, self._products(rank, of, in_order, kind=OUTER_PRODUCT), True)
                )
            return tail
        if not each:
            return [Launch.plain(np.array([rank]), work.launch_names[1], sums, True)]
        up, down = (
            self._products(rank, of, of_tile, kind=OUTER_PRODUCT) for of, of_tile in zip(each, group, strict=True)
        )
        is_sum = mixed(len(up) + len(down), np.zeros_like(number), WHOLE - parts_of(overlap.reduce_share))
        return [Launch(np.array([rank]), work.launch_names[1], (up, down, sums), _order(is_sum), True)]

    def _products(
        self, rank: int, of: Products, group: IntArray, kind: int = PRODUCT, **waits_and_tells: Any
    ) -> RunsOfKind:
        """``waits_and_tells``: fields of ``RunsOfKind``."""
        return _tasks(
            kind,
            rank,
            len(group),
            compute=of.seconds_G[group],
            group=group,
            **waits_and_tells,
        )

    def _mixed(
        self, rank: int, combines: bool, first: RunsOfKind, work: RunsOfKind, is_work: BoolArray
    ) -> list[Launch]:
        """In one launch, or in one each."""
        name = self.work.launch_names[combines]
        if self.work.overlap.fused in ("both", "combine" if combines else "dispatch"):
            return [Launch(np.array([rank]), name, (first, work), _order(is_work), combines)]
        return [Launch.plain(np.array([rank]), name, kind, combines) for kind in (first, work)]

    # --- flags ----------------------------------------------------------------------------------------------

    def _tells(self, rows: _Rows) -> tuple[IntArray, IntArray, IntArray]:
        """(row tile, column, gate) of what tells sums that rows have come home, each once."""
        columns, num_tiles = np.arange(self.work.columns), len(rows.tiles)
        first_N = self.home_R[rows.source_N] + rows.token_N // self.work.sizes.sum_tokens * len(columns)
        tile, first = _distinct(rows.tile_N, first_N)
        if self.by_expert:
            # One flag for a group, column and source, which is raised when all tiles of the group have come home.
            pushed = self._gates(rows.rank, len(rows.rows_G) * len(columns))
            group, first = _distinct(rows.tiles.group_M[tile], first)
            told = pushed + (group * len(columns))[:, None] + columns
            self.gate_opens.append((told.ravel(), (first[:, None] + columns).ravel()))
            tile, first = np.arange(num_tiles), pushed + rows.tiles.group_M * len(columns)
        column = np.broadcast_to(columns, (len(tile), len(columns)))
        return np.repeat(tile, len(columns)), column.ravel(), (first[:, None] + columns).ravel()

    def _gates(self, rank: int, count: int) -> int:
        """Numbers of ``count`` new gates of a rank, from the one that is returned on."""
        self.gate_rank.append(np.full(count, rank))
        self.num_gates += count
        return self.num_gates - count


def _order(is_work: BoolArray) -> IntArray:
    """Of tasks that are numbered first ones first, work behind: which comes when."""
    order, num_first = np.empty(len(is_work), dtype=np.int64), int((~is_work).sum())
    order[~is_work] = np.arange(num_first)
    order[is_work] = np.arange(num_first, len(is_work))
    return order


def _tasks(kind: int, rank: int, number: int, **fields: Any) -> RunsOfKind:
    """Runs of one task each."""
    return RunsOfKind(kind, np.full(number, rank), np.ones(number, dtype=np.int64), **fields)


def _exchanged(bytes_XR: FloatArray) -> PeerTraffic:
    run, peer = np.nonzero(bytes_XR)
    return PeerTraffic(run, peer, bytes_XR[run, peer], np.ones(len(run)))


def _distinct(left: IntArray, right: IntArray) -> Pairs:
    """Each pair once."""
    pairs = np.unique(left << 40 | right)
    return pairs >> 40, pairs & ((1 << 40) - 1)


def _drawn_tokens(tokens_E: IntArray, top_k: int, source: int) -> IntArray:
    """The token of each of a source's choices, in order of (expert, token): who chose what, drawn from the counts."""
    total = int(tokens_E.sum())
    token = np.random.default_rng(source).permutation(-(-total // top_k) * top_k)[:total] // top_k
    expert = np.repeat(np.arange(len(tokens_E)), tokens_E)
    return token[np.lexsort((token, expert))]
