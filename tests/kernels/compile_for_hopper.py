"""A script, for a process in which Triton does not interpret: what tests ask of the compiler for Hopper, in one start.

Writes JSON into a folder: `usual.json`, rows of ``kernels --aot``; `pinned.json`, rows of the products at
blocks whose warps have different work; `mega.json`, rows of MegaKernels. With "sweep" at all sizes and points.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.kernels.aot import POINTS, CompiledKernel, compile_mega, compile_size
from benchmarks.kernels.drawn_layer import SIZES
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import PINNED
from moesys.lab.show.tables import plain

# 3.6 cannot specialise epilogues that split a tile.
SPECIALISES = not triton.__version__.startswith("3.6.")
PRODUCTS = ("up", "down", "activation_gradient", "input_gradient")


def main(folder: Path, sweep: bool) -> None:
    command = ["kernels", "--aot", "--no-mega", "--size", "all" if sweep else SIZES[0].name]
    done = CliRunner().invoke(app, [*command, "--json", str(folder / "usual.json")])
    assert done.exit_code == 0, done.output
    if SPECIALISES:
        write(folder / "pinned.json", compile_pinned(folder / "blocks.json"))
    sizes, points = (SIZES, tuple(POINTS)) if sweep else (SIZES[:1], ("fused",))
    write(folder / "mega.json", [row for size in sizes for row in compile_mega(size, torch.bfloat16, print, points)])


def compile_pinned(path: Path) -> list[CompiledKernel]:
    wide, square = (
        TileConfig(128, columns, 64, warps=4, stages=stages, operands="specialised")
        for columns, stages in ((256, 4), (128, 4))
    )
    path.write_text(TileConfigs(square, wide, square, wide, TileConfig(128, 256, 64, stages=4)).to_json())
    os.environ[PINNED] = str(path)
    try:
        return compile_size(SIZES[0], torch.bfloat16, print, PRODUCTS)
    finally:
        del os.environ[PINNED]


def write(path: Path, rows: Sequence[CompiledKernel]) -> None:
    path.write_text(json.dumps({"rows": plain(rows)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "sweep" in sys.argv)
