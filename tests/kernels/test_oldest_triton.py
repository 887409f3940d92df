"""The oldest Triton that moesys runs on, torch 2.11's, compiles the kernels too, and spills nothing: a sample.

`make aot` compiles all of them, for Hopper and Blackwell.
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
from moesys.kernels.experts.tile_config import ShapeClass
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.mega import point
from moesys.kernels.mega.point import blocks_at

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv" / "oldest-triton"
# Compiles the ops whose sizes have words and named tuples, and those that need most registers.
SCRIPT = """
import json, torch, triton, warnings
warnings.simplefilter("ignore")
from benchmarks.kernels.aot import compile_mega, compile_size
from benchmarks.kernels.drawn_layer import SIZES
rows = compile_size(SIZES[0], torch.bfloat16, lambda step: None, ("up", "split", "dW1", "dW1_blocks"))
rows += compile_mega(SIZES[0], torch.bfloat16, lambda step: None, ["fused"], ["input_gradient"])
print(json.dumps([triton.__version__, [row.code.name for row in rows], [row.wrong for row in rows if row.wrong]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="make .venv/oldest-triton installs it")
@pytest.mark.timeout(900)
def test_the_oldest_triton_compiles_and_spills_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(OLDEST), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    version, kernels, wrong = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith("3.6.")
    assert {"_up", "_push", "_outer_products", "_mega_combine"} <= set(kernels)
    assert wrong == []


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
