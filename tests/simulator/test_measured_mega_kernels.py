"""The closed form of MegaKernels against the times that were measured on one H200.

Four virtual ranks share the GPU, each with a quarter of its multiprocessors and a link of 100 GB/s. The constants are
those of the GPU's calibration; none is fitted to the page.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import moesys as ms
from benchmarks.mega.mega_contest import PAIRS, points_of
from moesys.balance.run_planner import split_tokens
from moesys.layout import ExpertLayout
from moesys.simulator.mega_pass import mega_pass

MEASURED = Path(__file__).parents[2] / "docs/measured"
R, MULTIPROCESSORS, TOKENS = 4, 132, 8192
MODEL = ms.presets.QWEN3_30B_A3B
SHARED = ("memory_gb_per_s", "expert_tflops", "backward_tflops")
CALIBRATED = (*SHARED, "launch_us", "fused_rate", "tile_rows", "tile_columns")
MS = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def cells(page: str) -> dict[str, list[str]]:
    """Returns the cells of the rows of a page's measured tables, by their first cell."""
    text = (MEASURED / page).read_text().partition("\n## Simulated")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip().replace("\\_", "_") for cell in line.strip("|").split("|")] for line in lines]
    return {name: of for name, *of in rows}


def quarter_of_h200() -> ms.ClusterSpec:
    found = cells("calibrate_h200_2026-11-27.md")
    figures = {name: float(found[name][0]) / (R if name in SHARED else 1) for name in CALIBRATED}
    multiprocessors = MULTIPROCESSORS // R
    return ms.ClusterSpec(ranks_per_node=R, intra_node_gb_per_s=100, multiprocessors=multiprocessors, **figures)


@pytest.mark.parametrize(("backward", "median", "right", "of"), [(False, 0.157, 50, 58), (True, 0.205, 51, 52)])
def test_times_and_order_of_an_h200_are_predicted_from_its_calibration(
    backward: bool, median: float, right: int, of: int
):
    """``median`` of the errors; ``right`` ``of`` the pairs whose measured ranges are apart are in order."""
    generator, E = torch.Generator().manual_seed(0), MODEL.num_experts
    choices = [torch.rand(TOKENS, E, generator=generator).topk(MODEL.top_k).indices.flatten() for _ in range(R)]
    load = ms.planning.LoadMatrix(np.stack([np.bincount(of_rank.numpy(), minlength=E) for of_rank in choices]))
    cluster, layout = quarter_of_h200(), ExpertLayout(np.arange(E).reshape(R, E // R), E)
    plan = split_tokens(load, layout, cluster, ms.EvenSplit())
    measured, simulated_ms, ranges_ms = cells("overlap_h200_2026-11-27.md"), {}, {}
    points = points_of(MULTIPROCESSORS // R)
    # This point is newer than the page.
    del points[PAIRS]
    for name, point in points.items():
        simulated_ms[name] = 1e3 * mega_pass(point, MODEL, cluster, plan, backward, np.zeros(R)).end_R.max()
        match = MS.match(measured[name][1 + backward])
        assert match is not None
        ranges_ms[name] = [float(figure) for figure in match.groups()]
    errors = [simulated_ms[name] / measured_ms - 1 for name, (measured_ms, _, _) in ranges_ms.items()]
    assert np.median(np.abs(errors)) == pytest.approx(median, abs=0.01)
    assert max(np.abs(errors)) < 0.28
    pairs = [sorted(pair, key=lambda name: ranges_ms[name][0]) for pair in combinations(ranges_ms, 2)]
    apart = [(faster, slower) for faster, slower in pairs if ranges_ms[faster][2] < ranges_ms[slower][1]]
    assert sum(simulated_ms[faster] < simulated_ms[slower] for faster, slower in apart) >= right
    assert len(apart) == of
