"""Hosts and kernels have the same tasks: which there are, in which order, of which group."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mega_case import Case, Drawn, MegaRun, new_home

import moesys as ms
from moesys.kernels import task_queue, tiles
from moesys.kernels.task_times import KINDS as KERNEL_KINDS
from moesys.kernels.task_times import TaskTimes
from moesys.overlap.kernel_math import ACTIVATION
from moesys.overlap.mega import point_of
from moesys.overlap.mega_queues import KINDS, WEIGHT_GRADIENTS
from moesys.overlap.tile_simulator import tile_pass
from moesys.overlap.tile_tasks import RASTER, WHOLE, TileSizes

SIZES = {"tile_rows": 16, "tile_columns": 32, "fetch_rows": 16, "sum_tokens": 16}
POINTS = (
    ms.MegaKernel(**SIZES, dispatch_share=0.5, combine_share=0.3, reduce_share=0.6, granularity="expert"),
    ms.MegaKernel(**SIZES | {"fetch_rows": 8}, dispatch_share=0, deduplicate=True, tile_order="slots"),
    ms.MegaKernel(**SIZES, fused="none", overlap_weight_gradients=False),
)
# Groups of many row tiles and of none, more tiles than a sweep has.
CASE = Case(4, 2, 40, 24, "float32", (96, 8), 3, POINTS, seed=1)

Task = tuple[str, str, int]


def tasks_of_kernels(case: Case) -> list[tuple[list[Task], ...]]:
    """(launch, kind, group) of this rank's tasks by number, forward and backward, of each point. Collective."""
    drawn, found = Drawn(case), []
    run = MegaRun(drawn, dist.get_rank(), new_home(case.num_ranks))
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
    cluster = ms.ClusterSpec(ranks_per_node=2, multiprocessors=3)
    of_kernels = ranks.run(tasks_of_kernels, CASE, num_ranks=2, timeout_s=120)
    for (place, point), backward in product(enumerate(POINTS), (False, True)):
        queues = tile_pass(point, model, cluster, drawn.plan, np.zeros(2), backward).queues
        for rank in range(2):
            here = [
                (queues.names[launch], KINDS[kind], int(group))
                for launch, kind, group in zip(queues.launch, queues.kind, queues.group, strict=True)
                if queues.launches.rank[launch] == rank and queues.names[launch] not in WEIGHT_GRADIENTS
            ]
            assert here == of_kernels[rank][place][backward]


def test_kinds_and_shares_are_called_as_kernels_call_them():
    assert task_queue.WHOLE.value == WHOLE
    assert tiles.Block().raster == RASTER
    assert ("", *KINDS) == KERNEL_KINDS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("declared", [{}, {"tile_rows": 64, "tile_columns": 32}])
def test_tiles_are_as_large_as_those_of_a_gpu(dtype, declared):
    overlap = ms.MegaKernel(**declared)
    model = ms.ModelShape(hidden_size=64, intermediate_size=48, num_experts=4, top_k=2, dtype=dtype)
    blocks = point_of(overlap).blocks(ACTIVATION, getattr(torch, dtype), torch.device("cuda"))
    sizes = TileSizes.of(overlap, model)
    assert (blocks.down.rows, blocks.down.columns, blocks.up.columns) == (sizes.rows, sizes.columns, sizes.halves)
    for block in (blocks.activation_gradient, blocks.input_gradient, blocks.weight_gradient):
        assert (block.rows, block.columns, block.raster) == (sizes.rows, sizes.columns, RASTER)
