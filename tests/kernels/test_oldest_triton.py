"""The installed Triton and the oldest that moesys runs on, torch 2.11's, compile every kernel and every tile that is
tuned, and spill nothing in default tiles.

`make aot` compiles those that compute for Blackwell too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesys.config.overlap import MegaKernel
from moesys.kernels.experts import tile_tuner
from moesys.kernels.experts.tile_config import ShapeClass
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.mega import point
from moesys.kernels.mega.point import blocks_at

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv" / "oldest-triton"
SCRIPT = Path(__file__).with_name("compile_all.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["", "3.6."])
def test_every_kernel_compiles_and_spills_nothing(version: str) -> None:
    if version and not OLDEST.is_dir():
        pytest.skip("make .venv/oldest-triton installs it")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [*[str(OLDEST)] * bool(version), str(ROOT), str(ROOT / "tests/overlap")]
    )
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"].startswith(version)
    assert found["known"] >= 40
    assert (found["not"], found["wrong"]) == ([], [])


@pytest.mark.parametrize("old", [False, True])
def test_ways_that_triton_cannot_compile_are_no_candidates(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    monkeypatch.setattr(tile_tuner, "OLD_TRITON", old)
    shape = ShapeClass(2048, 768, 128, 8, "swiglu", "bfloat16", 2048)
    for op in tile_tuner.OPS:
        ways = {block.operands for block in tile_tuner.candidates(op, shape)}
        refused = tile_tuner.refused_ways(op, "swiglu")
        assert ways | refused.keys() == {"pointers", "tma", "specialised"}
        assert not ways & refused.keys()
        assert ("specialised" in refused) == (op == "weight_gradient" or (old and op in ("up", "activation_gradient")))


def test_tiles_of_weight_gradients_are_narrow_where_wide_ones_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (MegaKernel(), "swiglu", torch.bfloat16, torch.device("meta"))
    monkeypatch.setattr(point, "OLD_TRITON", False)
    assert blocks_at(*given, 90).weight_gradient.columns == 256
    assert blocks_at(*given, 100).weight_gradient.columns == 128
    monkeypatch.setattr(point, "OLD_TRITON", True)
    old = blocks_at(*given, 90)
    assert (old.weight_gradient.columns, old.input_gradient.columns) == (128, 256)
    # What is asked for narrower stays so.
    assert blocks_at(MegaKernel(tile_columns=64), *given[1:], 100).weight_gradient.columns == 64
    shape = ShapeClass(2048, 768, 128, 8, "swiglu", "bfloat16", 2048)
    columns = [blocks_of(shape, torch.device("meta"), capability).weight_gradient.columns for capability in (90, 100)]
    assert columns == [256, 128]
