"""Tables of an exchange: what a plain enumeration of rows says, on every rank, and what ``overlap.routes`` says."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from mega_case import CPU, Case, Drawn

from moesys.kernels.mega.arguments import pull_choices
from moesys.kernels.mega.exchange import (
    Exchange,
    Replicas,
    combine_flags,
    exchange,
    first_rows,
    most_flags,
    ordered_tiles,
    regions,
)
from moesys.kernels.routing import route
from moesys.kernels.symmetric.heap import Heap
from moesys.overlap.mega_executor import replicas_of, tokens_by_replica

# The interpreter is slow.
few = examples(2, 200)


class Row(NamedTuple):
    """A choice, and the number of its replica by (expert, rank)."""

    source: int
    token: int
    choice: int
    replica: int


class Micro(Drawn):
    """A micro-batch of all ranks: who holds what, who chose what, who goes where."""

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks

    @property
    def top_k(self) -> int:
        return self.case.top_k

    @cached_property
    def replicas(self) -> list[tuple[int, int]]:
        """(expert, rank) of each, in the order of their numbers."""
        return [(int(e), int(r)) for e, r in np.argwhere(self.layout.replicas_RE.T > 0)]

    @cached_property
    def rows(self) -> list[Row]:
        """By (source, token, choice): each source's choices of an expert go to its replicas in order of ranks."""
        return [
            Row(source, *place, int(replica))
            for source, replica_TK in enumerate(self.replica_RTK)
            for place, replica in np.ndenumerate(replica_TK.numpy())
            if replica >= 0
        ]

    def arriving(self, rank: int) -> dict[int, list[Row]]:
        """A rank's rows by replica, in the order in which they lie there; replicas of the rank without rows too."""
        found: dict[int, list[Row]] = {p: [] for p, (_, holder) in enumerate(self.replicas) if holder == rank}
        for row in self.rows:
            if row.replica in found:
                found[row.replica].append(row)
        return found

    def tables(self, rank: int, behind: int = 0) -> Exchange:
        """By the code under test; ``behind``: so many more rows than come."""
        routing = route(self.expert_RTK[rank], self.layout.num_experts)
        num_rows = int(self.plan.tokens_R[rank]) + behind
        replicas = replicas_of(self.layout, rank, CPU)
        return exchange(tokens_by_replica(self.plan, CPU), routing.row_TK, replicas, rank, num_rows)


@st.composite
def micros(draw: st.DrawFn) -> Micro:
    tokens = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    num_experts = draw(st.integers(1, 6))
    slots = -(-num_experts // len(tokens)) + draw(st.integers(0, 3))
    sizes = (num_experts, draw(st.integers(1, 4)), 1, 1, "float32", tuple(tokens), slots, ())
    dropped = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return Micro(Case(*sizes, seed=draw(st.integers(0, 2**32)), dropped=dropped, repeats=True))


@few
@given(drawn=micros(), behind=st.integers(0, 3))
def test_a_destination_knows_its_rows_and_a_source_where_they_are(drawn: Micro, behind: int) -> None:
    for rank in range(drawn.num_ranks):
        found = drawn.tables(rank, behind)
        arriving = drawn.arriving(rank)
        assert [drawn.replicas[p] for p in found.replicas.own_G.tolist()] == [drawn.replicas[p] for p in arriving]
        assert found.first_G1.tolist() == [0, *accumulate(len(rows) for rows in arriving.values())]
        here = [row for rows in arriving.values() for row in rows]
        # A place in a source's list finds the choice.
        entries = [route(expert_TK, drawn.layout.num_experts).entry_P for expert_TK in drawn.expert_RTK]
        assert found.source_N.tolist() == [row.source for row in here] + [-1] * behind
        places = found.place_N.tolist()
        assert places[len(here) :] == [-1] * behind
        assert [int(entries[row.source][place]) for row, place in zip(here, places, strict=False)] == [
            row.token * drawn.top_k + row.choice for row in here
        ]
        blocks = [(p, source) for p in arriving for source in range(drawn.num_ranks)]
        counts = [sum(row.source == source for row in arriving[p]) for p, source in blocks]
        assert found.block_rows_B.tolist() == [*counts, 0]
        assert found.block_first_B.tolist() == [0, *accumulate(counts)]

        replica_TK, row_TK = (torch.full_like(drawn.expert_RTK[rank], -1) for _ in range(2))
        for row in drawn.rows:
            if row.source == rank:
                holder = drawn.replicas[row.replica][1]
                replica_TK[row.token, row.choice] = row.replica
                row_TK[row.token, row.choice] = drawn.arriving(holder)[row.replica].index(row)
        assert found.replica_TK.tolist() == replica_TK.tolist()
        assert found.row_TK.tolist() == row_TK.tolist()


@few
@given(drawn=micros(), block_rows=st.sampled_from([1, 4, 16]), of_experts=st.booleans())
def test_both_sides_of_a_combine_mean_the_same_flag(drawn: Micro, block_rows: int, of_experts: bool) -> None:
    tables = [drawn.tables(rank) for rank in range(drawn.num_ranks)]
    flags = [combine_flags(table, rank, block_rows, of_experts) for rank, table in enumerate(tables)]
    # Who may raise each flag of a source: one tile, or one expert, and no other.
    raised_by: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for rank in range(drawn.num_ranks):
        for group, rows in enumerate(drawn.arriving(rank).values()):
            for place, row in enumerate(rows):
                tile = place // block_rows
                first = int(flags[rank].first_B[group * drawn.num_ranks + row.source])
                flag = first if of_experts else first + tile
                assert flag == int(flags[row.source].flag_TK[row.token, row.choice])
                raised_by[row.source, flag].add((row.replica, 0 if of_experts else tile))
    assert all(len(who) == 1 for who in raised_by.values())
    for rank, (table, found) in enumerate(zip(tables, flags, strict=True)):
        assert torch.equal(found.flag_TK >= 0, table.replica_TK >= 0)
        room = most_flags(len(table.row_TK), drawn.top_k, len(drawn.replicas), block_rows, 1)
        assert max((flag for source, flag in raised_by if source == rank), default=-1) < room


@few
@given(drawn=micros(), block_rows=st.sampled_from([1, 4, 16]), order=st.sampled_from(["largest_first", "slots"]))
def test_a_token_is_copied_from_where_it_comes_first(drawn: Micro, block_rows: int, order) -> None:
    positions = [route(e, drawn.layout.num_experts).row_TK for e in drawn.expert_RTK]
    for rank in range(drawn.num_ranks):
        table = drawn.tables(rank)
        tiles = ordered_tiles(table, rank, block_rows, order)
        groups = list(drawn.arriving(rank).values())
        here = [(group, row) for group, rows in enumerate(groups) for row in rows]
        position_NK = torch.full((len(here), drawn.top_k), -1, dtype=torch.int32)
        for n, (_, row) in enumerate(here):
            position_NK[n] = positions[row.source][row.token]
        first_row_N, first_tile_N = first_rows(table, position_NK, tiles)
        # The tile in which each row is, and of each token the earliest.
        tile_of_row = {}
        for tile, (group, first) in enumerate(
            zip(tiles.tiles.group_M.tolist(), tiles.tiles.row_M.tolist(), strict=True)
        ):
            if group >= 0:
                for n in range(first, min(first + block_rows, int(table.first_G1[group + 1]))):
                    tile_of_row[n] = tile
        assert sorted(tile_of_row) == list(range(len(here)))
        for n, (group, row) in enumerate(here):
            same = [m for m, (_, other) in enumerate(here) if (other.source, other.token) == (row.source, row.token)]
            earliest = min(tile_of_row[m] for m in same)
            found, tile = int(first_row_N[n]), int(first_tile_N[n])
            begins = min(tile_of_row[m] for m, (other, _) in enumerate(here) if other == group)
            if earliest < begins:
                assert tile == earliest
                assert found in same
                assert tile_of_row[found] == earliest
            else:
                assert (found, tile) == (-1, -1)


def came(tokens_RG: Sequence[Sequence[int]], rank: int, behind: int = 0) -> Exchange:
    """What comes to ``rank``, which holds all there is, from each source."""
    tokens_RP = torch.tensor(tokens_RG, dtype=torch.int64)
    num_replicas = tokens_RP.shape[1]
    held = torch.arange(num_replicas)
    replicas = Replicas(torch.full_like(held, rank), held, held)
    nothing = torch.full((0, 1), -1)
    return exchange(tokens_RP, nothing, replicas, rank, int(tokens_RP.sum()) + behind)


def queue_of(tokens_RG: Sequence[Sequence[int]], rank: int, block_rows: int, order: str) -> list[tuple[int, int]]:
    """(group, first row) of a rank's row tiles in turn, enumerated."""
    rows_G = [sum(of_group) for of_group in zip(*tokens_RG, strict=True)]
    first_G = [0, *accumulate(rows_G)]
    groups = range(len(rows_G))
    queue = []
    for group in sorted(groups, key=lambda g: -rows_G[g]) if order == "largest_first" else groups:
        tiles = deque(range(first_G[group], first_G[group + 1], block_rows))
        tiles.rotate(-(sum(tokens_RG[source][group] for source in range(rank)) // block_rows))
        # One of each part of the round in turn; the first parts are the longer ones.
        parts = [part.tolist() for part in np.array_split(np.array(tiles, dtype=np.int64), len(tokens_RG))]
        queue += [(group, row) for turn in zip_longest(*parts) for row in turn if row is not None]
    return queue


@st.composite
def tokens_of_groups(draw: st.DrawFn) -> list[list[int]]:
    """From each rank."""
    num_ranks, num_groups = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = st.one_of(st.just(0), st.integers(0, 30))
    return [draw(st.lists(tokens, min_size=num_groups, max_size=num_groups)) for _ in range(num_ranks)]


ORDER = st.sampled_from(["largest_first", "slots"])


@few
@given(tokens_RG=tokens_of_groups(), behind=st.integers(0, 20), block_rows=st.sampled_from([1, 4, 16]), order=ORDER)
def test_tiles_come_in_both_orders_from_one_s_own_rows_on(tokens_RG, behind: int, block_rows: int, order) -> None:
    for rank in range(len(tokens_RG)):
        table = came(tokens_RG, rank, behind)
        tiles = ordered_tiles(table, rank, block_rows, order)
        expected = queue_of(tokens_RG, rank, block_rows, order)
        used, most = len(expected), -(-len(table.source_N) // block_rows) + len(tokens_RG[0])
        assert tiles.tiles.block_rows == block_rows
        assert tiles.tiles.count_1.tolist() == [used]
        group_M, ends_M = tiles.tiles.group_M.tolist(), tiles.group_end_M.tolist()
        assert list(zip(group_M, tiles.tiles.row_M.tolist(), strict=True)) == expected + [(-1, -1)] * (most - used)
        for tile, group in enumerate(group_M[:used]):
            mine = [m for m, other in enumerate(group_M) if other == group]
            assert (int(tiles.first_tile_G[group]), ends_M[tile]) == (min(mine), max(mine) + 1)
        assert ends_M[used:] == [most] * (most - used)


@few
@given(num_ranks=st.integers(1, 9), tiles=st.integers(1, 4), groups=st.integers(1, 3), order=ORDER)
def test_ranks_that_are_equally_far_ask_different_sources(num_ranks: int, tiles: int, groups: int, order) -> None:
    tokens_RG = [[tiles * 4] * groups] * num_ranks
    asked_RM = []
    for rank in range(num_ranks):
        table = came(tokens_RG, rank)
        asked_RM.append(table.source_N[ordered_tiles(table, rank, 4, order).tiles.row_M[: groups * tiles * num_ranks]])
        # First those from here, which need no link; then each source as often as any other.
        assert asked_RM[-1].view(-1, num_ranks)[:, 0].eq(rank).all()
        assert all(sorted(turn) == list(range(num_ranks)) for turn in asked_RM[-1].view(-1, num_ranks).tolist())
    assert all(len(set(asked)) == num_ranks for asked in torch.stack(asked_RM, 1).tolist())


def test_what_a_dead_source_said_before_leads_nowhere_else() -> None:
    """All of its choices were dropped then; in this epoch it should have sent three rows."""
    heap = Heap.virtual(regions(4, 2, 8, torch.float32, 2, 8), 2, "cpu", timeout_s=0.01)
    heap[1].own("entry").fill_(-1)
    heap[1].own("position").fill_(7)
    replicas = Replicas(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    table = exchange(torch.tensor([[0, 0], [1, 2]]), torch.full((4, 2), -1), replicas, 0, 4)
    entry_N, position_NK = pull_choices(heap[0], torch.ones(1, dtype=torch.int32), table, 2, True)
    assert entry_N.tolist() == [0, 0, 0, -1]
    assert position_NK is not None
    tiles = ordered_tiles(table, 0, 1, "slots")
    assert [found.tolist() for found in first_rows(table, position_NK, tiles)] == [[-1] * 4] * 2


@pytest.mark.parametrize("order", ["largest_first", pytest.param("slots", marks=pytest.mark.slow)])
def test_more_row_tiles_than_16_bits_number(order) -> None:
    tokens_RG = [[30_000, 1, 100_001], [40_000, 2, 29_999]]
    tiles = ordered_tiles(came(tokens_RG, 1), 1, 2, order).tiles
    assert int(tiles.count_1) == 35_000 + 2 + 65_000
    expected = queue_of(tokens_RG, 1, 2, order)
    assert list(zip(tiles.group_M.tolist(), tiles.row_M.tolist(), strict=True))[: len(expected)] == expected


@pytest.mark.parametrize(("rank", "place_N"), [(0, [5, 6, 7]), (1, [0, 1, 2, 3, 4])])
def test_replicas_need_not_follow_each_other_in_a_list(rank: int, place_N: list[int]) -> None:
    """The first of two ranks sends the second one its expert's first five tokens, and keeps three."""
    tokens_RP, list_RP = torch.tensor([[3, 5], [0, 0]]), torch.tensor([[5, 0], [0, 0]])
    replicas = Replicas(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([rank]))
    position_TK = torch.arange(8, dtype=torch.int32)[:, None]
    found = exchange(tokens_RP, position_TK, replicas, rank, len(place_N), list_RP)
    assert found.place_N.tolist() == place_N
    assert found.source_N.tolist() == [0] * len(place_N)
    if rank == 0:
        assert found.replica_TK.flatten().tolist() == [1] * 5 + [0] * 3
        assert found.row_TK.flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
