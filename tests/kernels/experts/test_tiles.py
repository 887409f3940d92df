"""Tiles: every row in one tile, large groups first; and every task of a persistent kernel taken once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from conftest import assert_equal
from hypothesis import given
from hypothesis import strategies as st
from kernel_references import groups_by_size_reference, tile_table_reference
from torch import Tensor

from moesys.kernels.experts import tiles as module
from moesys.kernels.experts.tiles import groups_by_size, tile_of, tile_table

# Each case says which edge it is: (rows of each group, rows behind them that belong to none, rows of a tile).
EDGES = {
    "no rows": ([0, 0, 0], 0, 16),
    "one group, one row": ([1], 0, 16),
    "a tile exactly full": ([16, 5], 0, 16),
    "one row behind a full tile": ([3, 17], 0, 16),
    "all groups of one size": ([7] * 9, 0, 4),
    "sizes differ, tiles do not": ([14, 16, 15, 16], 0, 16),
    "one group has all": ([0, 0, 900, 0], 0, 2),
    "empty groups at both ends and between": ([0, 5, 0, 0, 12, 0], 0, 4),
    "rising sizes": (range(12), 0, 4),
    "more tiles behind the last than rows": ([3, 0, 9], 800, 4),
    "all dropped": ([0, 0], 100, 16),
    "a thousand groups": (torch.randint(0, 12, (1000,), generator=torch.Generator().manual_seed(0)).tolist(), 0, 4),
    "tiles of one row": ([4, 6, 5], 2, 1),
}


def first_rows(rows_G: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(rows_G)], dtype=torch.int32)


def assert_same_order(first_G1: Tensor) -> None:
    """And the same as of the tiles, where every group has one."""
    order_G, expected_G = groups_by_size(first_G1), groups_by_size_reference(first_G1)
    assert order_G.dtype == torch.int32
    assert torch.equal(order_G, expected_G)
    in_use = tile_table_reference(first_G1, int(first_G1[-1]), 1 << 20)
    assert order_G[: int(in_use.count_1)].tolist() == in_use.group_M[: int(in_use.count_1)].tolist()


@pytest.mark.parametrize(("rows_G", "dropped", "block_rows"), EDGES.values(), ids=EDGES)
def test_edges_agree_with_the_reference(rows_G: Sequence[int], dropped: int, block_rows: int) -> None:
    table = (first_rows(rows_G), sum(rows_G) + dropped, block_rows)
    assert_equal(tile_table(*table), tile_table_reference(*table))
    assert_same_order(table[0])


def test_by_hand() -> None:
    group_M, row_M, count_1, _ = tile_table(first_rows([2, 5, 0, 2]), 10, 4)
    assert count_1.tolist() == [4]
    assert group_M.tolist() == [1, 1, 0, 3, -1, -1, -1]
    assert row_M.tolist() == [2, 6, 0, 7, -1, -1, -1]
    assert groups_by_size(first_rows([2, 5, 0, 2])).tolist() == [1, 0, 3, 2]


@given(
    # a few sizes often, so that there are ties
    rows_G=st.lists(st.one_of(st.sampled_from([0, 4, 8]), st.integers(0, 70)), min_size=1, max_size=30),
    dropped=st.integers(0, 60),
    block_rows=st.sampled_from([1, 4, 16, 128]),
    own=st.sampled_from([1, 8]),
    compared=st.sampled_from([4, 512]),
    written=st.sampled_from([2, 128]),
)
def test_any_groups_however_many_at_once(
    rows_G: list[int], dropped: int, block_rows: int, own: int, compared: int, written: int
) -> None:
    table = (first_rows(rows_G), sum(rows_G) + dropped, block_rows)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"OWN_GROUPS": own, "COMPARED_GROUPS": compared, "WRITTEN_TILES": written}.items():
            patch.setattr(module, name, size)
        assert_equal(tile_table(*table), tile_table_reference(*table))
        assert_same_order(table[0])


@triton.jit
def _take_tasks(tile_T2, taken_T, count_1, num_column_tiles, RASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    count = tl.load(count_1)
    for task in range(tl.program_id(0), count * num_column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_of(task, count, num_column_tiles, RASTER)
        tl.store(tile_T2 + 2 * task, row_tile)
        tl.store(tile_T2 + 2 * task + 1, column_tile)
        tl.atomic_add(taken_T + row_tile * num_column_tiles + column_tile, 1)


@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "raster"),
    [(1, 1, 1), (5, 3, 1), (8, 3, 4), (7, 3, 4), (3, 5, 8), (9, 1, 4), (1, 6, 4), (0, 4, 8)],
    ids=[
        "one task",
        "row by row",
        "full sweeps",
        "the last sweep is short",
        "one short sweep",
        "one column",
        "one row",
        "no rows",
    ],
)
@pytest.mark.parametrize("programs", [1, 3])
def test_every_task_is_taken_once_and_a_sweep_at_a_time(
    row_tiles: int, column_tiles: int, raster: int, programs: int
) -> None:
    tasks = row_tiles * column_tiles
    tile_T2, taken_T = torch.full((tasks, 2), -1), torch.zeros(tasks, dtype=torch.int32)
    _take_tasks[(programs,)](tile_T2, taken_T, torch.tensor([row_tiles], dtype=torch.int32), column_tiles, raster)
    assert taken_T.tolist() == [1] * tasks
    assert tile_T2.tolist() == [
        [row, column]
        for sweep in range(0, row_tiles, raster)
        for column in range(column_tiles)
        for row in range(sweep, min(sweep + raster, row_tiles))
    ]
