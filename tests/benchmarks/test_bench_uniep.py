"""UniEP's rows: both sides of a ratio under the same links and multiprocessors."""

from __future__ import annotations

import pytest

import moesys as ms
from benchmarks.published.hopper_parts import EvenLayer
from benchmarks.published.uniep import INTRODUCTION, overlap_row, overlap_sheet
from moesys.lab.show.sheets import markdown_table

LAYER = EvenLayer("a layer", 1024, 512, 16, 4, tokens=2000)
NODE = ms.ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=50, expert_tflops=60, multiprocessors=16)


def test_overlap_wins_where_communication_is_much_of_the_step():
    slow = overlap_row(NODE, LAYER, [ms.MegaKernel()], [1.0])
    assert 1.02 < slow.ratio["1.00"] < 2
    fast = overlap_row(NODE.replace(intra_node_gb_per_s=1e6), LAYER, [ms.MegaKernel()], [1.0])
    assert fast.ratio["1.00"] < slow.ratio["1.00"]
    assert fast.mega_ms["1.00"] < slow.mega_ms["1.00"]


def test_ratios_are_shown_over_a_range_of_rates_of_fused_tiles():
    row = overlap_row(NODE, LAYER, [ms.MegaKernel()], [1.0, 0.7])
    assert row.mega_ms["0.70"] > 1.1 * row.mega_ms["1.00"]
    # What it is held against has no fused tile.
    assert row.ratio["0.70"] * row.mega_ms["0.70"] == pytest.approx(row.sequential_ms)
    assert row.to_apart["1.00"] * row.mega_ms["1.00"] == pytest.approx(row.apart_ms)


def test_the_best_point_is_named():
    points = [ms.MegaKernel(dispatch_share=0.25), ms.MegaKernel(fused="none")]
    row = overlap_row(NODE, LAYER, points, [1.0])
    alone = overlap_row(NODE, LAYER, points[1:], [1.0])
    assert row.best == points[0]
    assert row.mega_ms["1.00"] < row.apart_ms
    assert row.mega_ms["1.00"] < alone.mega_ms["1.00"]
    sheet = overlap_sheet([row], NODE)
    shown = markdown_table(sheet)
    assert sheet.title.startswith("SIMULATED: 4 ranks, by fused_rate")
    assert f"{row.ratio['1.00']:.2f}" in shown
    assert f"{row.to_apart['1.00']:.2f}" in shown
    assert "dispatch_share=0.25" in shown


def test_the_paper_is_quoted_as_it_says():
    words = " ".join(INTRODUCTION)
    assert "1.03x to 1.38x over state-of-the-art work" in words
    assert "over sequential" not in words
