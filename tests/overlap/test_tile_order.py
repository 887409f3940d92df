"""Kernels have the tasks that their rules say: which there are, in which order, of which group."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from mega_case import Case, Drawn, MegaRun, new_heaps
from task_order import WHOLE, Task, numbers_in_groups, tasks_of_rank, tiles_of_rank

import moesys as ms
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.mega import tasks
from moesys.kernels.mega.exchange import Replicas, exchange, ordered_tiles
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.mega.tasks import TaskTimes
from moesys.overlap.experts_triton import ACTIVATION
from moesys.simulator.mega_pass import RASTER, TileSizes

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
SIZES = {"tile_rows": 16, "tile_columns": 32, "fetch_rows": 16, "sum_tokens": 16}
POINTS = (
    ms.MegaKernel(**SIZES | {"fetch_rows": 8}, dispatch_share=0, deduplicate=True, tile_order="slots"),
    ms.MegaKernel(**SIZES, dispatch_share=0.5, combine_share=0.3, reduce_share=0.6, granularity="expert"),
    ms.MegaKernel(**SIZES, fused="none", overlap_weight_gradients=False),
)[: None if SWEEP else 1]
# Groups of many row tiles and of none, more tiles than a sweep has.
CASE = Case(4, 2, 40, 24, "float32", (96, 8), 3, POINTS, seed=1)


def tasks_of_kernels(case: Case) -> list[tuple[list[Task], ...]]:
    """(launch, kind, group) of this rank's tasks by number, forward and backward, of each point. Collective."""
    drawn, found = Drawn(case), []
    run = MegaRun(drawn, dist.get_rank(), new_heaps(case.num_ranks))
    # What is recorded is asked of memory that is there after the first call.
    memory = run.forward(case.points[0])[0].memory
    for point in case.points:
        times = memory.times = TaskTimes()
        executor, y_TH, saved = run.forward(point)
        forward = times.read()
        run.backward(executor, y_TH, saved)
        found.append(tuple([(task.launch, task.kind, task.group) for task in of] for of in (forward, times.read())))
    return found


def test_tiles_are_those_of_the_kernels_in_their_order(ranks):
    drawn = Drawn(CASE)
    assert drawn.plan.tokens_R.max() > RASTER * SIZES["tile_rows"]
    model = ms.ModelShape(hidden_size=CASE.hidden, intermediate_size=CASE.width, num_experts=4, top_k=2)
    of_kernels = ranks.run(tasks_of_kernels, CASE, num_ranks=2, timeout_s=120)
    for (place, point), backward, rank in product(enumerate(POINTS), (False, True), range(2)):
        assert tasks_of_rank(point, model, drawn.plan, rank, backward) == of_kernels[rank][place][backward]


@examples(4, 200)
@given(
    rows_GR=st.integers(1, 5).flatmap(lambda R: st.lists(st.lists(st.integers(0, 30), min_size=R, max_size=R))),
    tile_rows=st.sampled_from([1, 4, 16]),
    order=st.sampled_from(["largest_first", "slots"]),
)
def test_row_tiles_are_those_of_the_kernels(rows_GR, tile_rows, order):
    num_ranks, num_groups = len(rows_GR[0]) if rows_GR else 1, len(rows_GR)
    rows_GR = np.array(rows_GR, dtype=np.int64).reshape(num_groups, num_ranks)
    held = torch.arange(num_groups)
    for rank in range(num_ranks):
        replicas = Replicas(torch.full_like(held, rank), held, held)
        no_choice = torch.full((0, 1), -1)
        table = exchange(torch.from_numpy(rows_GR.T.copy()), no_choice, replicas, rank, int(rows_GR.sum()))
        of_kernels = ordered_tiles(table, rank, tile_rows, order)
        used = int(of_kernels.tiles.count_1)
        found = tiles_of_rank(rows_GR, rank, tile_rows, order)
        assert found.group_M.tolist() == of_kernels.tiles.group_M[:used].tolist()
        assert found.row_M.tolist() == of_kernels.tiles.row_M[:used].tolist()
        assert found.end_M.tolist() == of_kernels.group_end_M[:used].tolist()
        assert found.first_tile_G.tolist() == of_kernels.first_tile_G.tolist()
        ends_G = rows_GR.sum(axis=1).cumsum()
        assert (found.rows_M == np.minimum(ends_G[found.group_M] - found.row_M, tile_rows)).all()
        # Every place of a group is that of one tile.
        number_M = numbers_in_groups(found, rows_GR.sum(axis=1), tile_rows)
        assert sorted(number_M.tolist()) == list(range(used))


def test_shares_and_sweeps_are_those_of_the_kernels():
    assert tasks.WHOLE.value == WHOLE
    assert TileConfig().raster == RASTER


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("declared", [{}, {"tile_rows": 64, "tile_columns": 32}])
def test_tiles_are_as_large_as_those_of_a_gpu(dtype, declared):
    overlap = ms.MegaKernel(**declared)
    model = ms.ModelShape(hidden_size=64, intermediate_size=48, num_experts=4, top_k=2, dtype=dtype)
    blocks = blocks_at(overlap, ACTIVATION, getattr(torch, dtype), torch.device("cuda"))
    sizes = TileSizes.of(overlap, model)
    assert (blocks.down.rows, blocks.down.columns, blocks.up.columns) == (sizes.rows, sizes.columns, sizes.halves)
    for block in (blocks.activation_gradient, blocks.input_gradient, blocks.weight_gradient):
        assert (block.rows, block.columns, block.raster) == (sizes.rows, sizes.columns, RASTER)
