"""UniEP's rows: both sides of a ratio under the same links and multiprocessors; parts as others measured them."""

from __future__ import annotations

import pytest

import moesys as ms
from experiments.published import uniep
from experiments.published.uniep import EvenLayer, HopperPart, overlap_row, overlap_sheet, part_row, published_parts
from moesys.lab.show.sheets import Sheet, markdown_table

LAYER = EvenLayer(name="a layer", hidden=1024, width=512, experts=16, top_k=4, tokens=2000)
NODE = ms.ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=50, expert_tflops=60, multiprocessors=16)
PARTS = published_parts()
DISPATCH, APART, FUSED = PARTS[:3]


def changed(part: HopperPart, **fields) -> HopperPart:
    return part.model_copy(update={"tokens": 512, **fields})


def test_overlap_wins_where_communication_is_much_of_the_step_over_a_range_of_rates_of_fused_tiles():
    slow, fast = (
        overlap_row(NODE.replace(intra_node_gb_per_s=gb_per_s), LAYER, [ms.MegaKernel()], [1.0, 0.7])
        for gb_per_s in (50, 1e6)
    )
    assert 1.02 < slow.ratio["1.00"] < 2
    assert fast.ratio["1.00"] < slow.ratio["1.00"]
    assert fast.mega_ms["1.00"] < slow.mega_ms["1.00"]
    assert slow.mega_ms["0.70"] > 1.1 * slow.mega_ms["1.00"]
    # What it is compared with has no fused tile.
    assert slow.ratio["0.70"] * slow.mega_ms["0.70"] == pytest.approx(slow.sequential_ms)
    assert slow.to_apart["1.00"] * slow.mega_ms["1.00"] == pytest.approx(slow.apart_ms)


def test_the_best_point_is_named():
    points = [ms.MegaKernel(dispatch_share=0.25), ms.MegaKernel(fused="none")]
    row = overlap_row(NODE, LAYER, points, [1.0])
    alone = overlap_row(NODE, LAYER, points[1:], [1.0])
    assert row.best == points[0]
    assert row.mega_ms["1.00"] < row.apart_ms
    assert row.mega_ms["1.00"] < alone.mega_ms["1.00"]
    sheet = overlap_sheet([row], "4 ranks")
    shown = markdown_table(sheet).replace("\\_", "_")
    assert sheet.title == "SIMULATED: 4 ranks, by fused_rate"
    for words in (f"{row.ratio['1.00']:.2f}", f"{row.to_apart['1.00']:.2f}", "dispatch_share=0.25"):
        assert words in shown


def test_the_paper_is_quoted_as_it_says():
    words = " ".join(uniep.__doc__.split())
    assert "1.03x to 1.38x over state-of-the-art work" in words
    assert "over sequential" not in words


def test_published_parts_name_clusters_and_kernels_that_there_are():
    assert len(PARTS) == 15
    assert [part.use for part in PARTS].count("fitted") == 1
    assert all(part.cluster in uniep.CLUSTERS and part.kernel in uniep.KERNELS for part in PARTS)
    assert all((part.kernel == "fused") == (part.use != "part") for part in PARTS)


def test_a_deduplicated_dispatch_takes_what_triton_distributed_measured():
    assert DISPATCH.simulated_ms() == pytest.approx(DISPATCH.published_ms, rel=0.1)


def test_fusing_hides_part_of_the_product():
    dispatch, apart, fused = (changed(part).simulated_ms() for part in (DISPATCH, APART, FUSED))
    assert dispatch < fused < apart


def test_the_rate_that_explains_a_part_is_found_again():
    small = changed(FUSED, tokens=4096)
    assert changed(small, tokens=4096, published_ms=small.simulated_ms(0.4)).explaining_rate() == pytest.approx(
        0.4, abs=0.01
    )
    assert changed(small, tokens=4096, published_ms=0.5 * small.simulated_ms()).explaining_rate() is None
    assert APART.explaining_rate() is None


def test_parts_show_their_error_at_each_rate():
    held_out = next(part for part in PARTS if part.use == "held out")
    row = part_row(held_out, (1.0, 0.7))
    assert row.error["0.70"] > row.error["1.00"]
    assert row.error["1.00"] == pytest.approx(row.simulated_ms / held_out.published_ms - 1)
    small = changed(DISPATCH)
    planted = part_row(changed(small, published_ms=2 * small.simulated_ms()), (1.0, 0.7))
    assert planted.error == pytest.approx({"1.00": -0.5, "0.70": -0.5})
    shown = markdown_table(Sheet("parts", [row, planted]))
    for words in ("held out", "error % at 0.70", "-50.0", "1 x 8 H800"):
        assert words in shown
