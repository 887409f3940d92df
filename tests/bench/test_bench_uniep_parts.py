"""Parts of a layer beside what others measured of such kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesys.bench.harness.sheets import markdown_table
from moesys.bench.published.hopper_parts import HOPPER_PARTS, EvenLayer, parts_sheet

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
