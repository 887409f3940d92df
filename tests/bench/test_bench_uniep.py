"""UniEP's rows: both sides of a ratio under the same links and multiprocessors."""

from __future__ import annotations

import moesys as ms
from moesys.bench.harness.sheets import markdown_table
from moesys.bench.published.hopper_parts import EvenLayer
from moesys.bench.published.uniep import overlap_row, overlap_sheet

LAYER = EvenLayer("a layer", 1024, 512, 16, 4, tokens=2000)
NODE = ms.ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=50, expert_tflops=60, multiprocessors=16)


def test_overlap_wins_where_communication_is_much_of_the_step():
    slow = overlap_row(NODE, LAYER, [ms.MegaKernel()])
    assert 1.02 < slow.ratio < 2
    fast = overlap_row(NODE.replace(intra_node_gb_per_s=1e6), LAYER, [ms.MegaKernel()])
    assert fast.ratio < slow.ratio
    assert fast.mega_ms < slow.mega_ms


def test_the_best_point_is_named():
    points = [ms.MegaKernel(dispatch_share=0.25), ms.MegaKernel(fused="none")]
    row = overlap_row(NODE, LAYER, points)
    alone = overlap_row(NODE, LAYER, points[1:])
    assert row.best == points[0]
    assert row.mega_ms < row.apart_ms
    assert row.mega_ms < alone.mega_ms
    sheet = overlap_sheet([row], NODE)
    shown = markdown_table(sheet)
    assert sheet.title.startswith("SIMULATED: 4 ranks; published 1.03 to 1.38")
    assert f"{row.ratio:.2f}" in shown
    assert f"{row.apart_ms / row.mega_ms:.2f}" in shown
    assert "dispatch_share=0.25" in shown
