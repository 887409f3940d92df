"""UniEP's rows: both sides of a ratio under the same links and multiprocessors."""

from __future__ import annotations

import moesys as ms
from moesys.bench.uniep.report import uniep_section
from moesys.bench.uniep.rows import Layer, uniep_rows
from moesys.lab.show.console import print_full

MODEL = ms.ModelShape(hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, dtype="bfloat16")
NODE = ms.ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=50, expert_tflops=60, multiprocessors=16)


def test_overlap_wins_where_communication_is_much_of_the_step():
    (slow,) = uniep_rows(NODE, [Layer("a layer", MODEL, 2000)], [ms.MegaKernel()])
    assert 1.02 < slow.ratio < 2
    (fast,) = uniep_rows(NODE.replace(intra_node_gb_per_s=1e6), [Layer("a layer", MODEL, 2000)], [ms.MegaKernel()])
    assert fast.ratio < slow.ratio
    assert fast.mega_ms < slow.mega_ms


def test_the_best_point_is_named(capsys):
    points = [ms.MegaKernel(dispatch_share=0.25), ms.MegaKernel(fused="none")]
    (row,) = uniep_rows(NODE, [Layer("a layer", MODEL, 2000)], points)
    (alone,) = uniep_rows(NODE, [Layer("a layer", MODEL, 2000)], points[1:])
    assert row.best == points[0]
    assert row.mega_ms < row.apart_ms
    assert row.mega_ms < alone.mega_ms
    capsys.readouterr()
    print_full(*uniep_section([row], NODE))
    shown = capsys.readouterr().out
    assert shown.startswith("SIMULATED: 4 ranks; published 1.03 to 1.38")
    assert f"{row.ratio:.2f}" in shown
    assert f"{row.apart_ms / row.mega_ms:.2f}" in shown
    assert "dispatch_share=0.25" in shown
