"""Parts of a layer beside what others measured of such kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.fused_rate import fused_rate_of, fused_row, fused_sheet
from benchmarks.published.hopper_parts import FITTED_PART, HELD_OUT, HOPPER_PARTS, EvenLayer, parts_sheet
from moesys.lab.show.sheets import markdown_table

SMALL = EvenLayer("a layer", 1536, 480, 64, 8, tokens=512)


def test_a_deduplicated_dispatch_takes_what_triton_distributed_measured():
    assert HOPPER_PARTS[0].simulated_ms() == pytest.approx(HOPPER_PARTS[0].published_ms, rel=0.1)


def test_fusing_hides_part_of_the_product():
    apart, fused = (replace(part, layer=SMALL).simulated_ms() for part in HOPPER_PARTS[1:3])
    dispatch = replace(HOPPER_PARTS[0], layer=SMALL).simulated_ms()
    assert dispatch < fused < apart


def test_the_section_has_each_part_with_its_error():
    small = replace(HOPPER_PARTS[0], layer=SMALL)
    sheet = parts_sheet([replace(small, published_ms=2 * small.simulated_ms())])
    shown = markdown_table(sheet)
    assert sheet.title.startswith("SIMULATED beside published")
    assert "-50" in shown
    assert "1 x 8 H800" in shown


def test_the_rate_that_explains_a_part_is_found_again():
    small = replace(FITTED_PART, layer=replace(SMALL, tokens=4096))
    planted = replace(small, published_ms=small.simulated_ms(0.4))
    assert fused_rate_of(planted) == pytest.approx(0.4, abs=0.01)
    assert fused_rate_of(replace(small, published_ms=0.5 * small.simulated_ms())) is None


def test_held_out_parts_show_their_error_at_each_rate():
    part = HELD_OUT[0]
    row = fused_row(part, (1.0, 0.7))
    assert row.error["0.70"] > row.error["1.00"]
    assert row.error["1.00"] == pytest.approx(part.simulated_ms() / part.published_ms - 1)
    shown = markdown_table(fused_sheet((1.0, 0.7), [part]))
    assert "held out" in shown
    assert "error % at 0.70" in shown
