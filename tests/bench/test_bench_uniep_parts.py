"""Parts of a layer beside what others measured of such kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesys.bench.uniep.parts import PARTS
from moesys.bench.uniep.report import parts_section
from moesys.bench.uniep.rows import bfloat16_layer
from moesys.lab.show.console import print_full

SMALL = bfloat16_layer("a layer", 1536, 480, 64, 8, 512)


def test_a_deduplicated_dispatch_takes_what_triton_distributed_measured():
    assert PARTS[0].simulated_ms() == pytest.approx(PARTS[0].published_ms, rel=0.1)


def test_fusing_hides_part_of_the_product():
    apart, fused = (replace(part, layer=SMALL).simulated_ms() for part in PARTS[1:3])
    dispatch = replace(PARTS[0], layer=SMALL).simulated_ms()
    assert dispatch < fused < apart


def test_the_section_has_each_part_with_its_error(capsys):
    parts = [replace(PARTS[0], layer=SMALL, published_ms=2 * replace(PARTS[0], layer=SMALL).simulated_ms())]
    print_full(*parts_section(parts))
    shown = capsys.readouterr().out
    assert shown.startswith("SIMULATED beside published")
    assert "-50" in shown
    assert "1 x 8 H800" in shown
