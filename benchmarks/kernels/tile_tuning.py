"""Tuning the blocks of grouped GEMMs on this machine's GPU, for one published layer or all, and keeping them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from benchmarks.kernels.aot import Size, tile_words
from moesys.kernels.experts.gemm_timer import GemmTimer
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_space import OPS, blocks_for
from moesys.kernels.experts.tile_tuner import Gpu, cache_file, tune_blocks
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told


def tune_size(size: Size, tell: Callable[[str], None]) -> tuple[ShapeClass, TileConfigs]:
    """In bfloat16, gated by SiLU; what was found is kept for layers of the same class."""
    device = torch.device("cuda")
    x_TH, down_EHI = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((size.T, size.H), (size.E, size.H, size.I))
    )
    shape = ShapeClass.of(x_TH, down_EHI, size.T * size.K, "swiglu")
    timer = GemmTimer(shape, device, lambda op: tell(f"{size.name}: {op}"))
    return shape, tune_blocks(shape, timer, Gpu.of(device))


def _in_words(block: TileConfig) -> str:
    return f"{tile_words(block)}, {block.warps} warps, {block.stages} stages, {block.operands}"


@dataclass(frozen=True)
class Tuned:
    """The fastest tiles of one op, beside what is used untuned."""

    size: Annotated[str, Column("size")]
    op: Annotated[str, Column("op")]
    fastest: Annotated[TileConfig, Column("fastest", _in_words)]
    untuned: Annotated[TileConfig, Column("untuned", _in_words)]


def main(sizes: Sequence[Size]) -> int:
    """Prints what was found; 2 without a GPU, or where it cannot be kept."""
    if not torch.cuda.is_available():
        print("tuning times kernels on a GPU, and this machine has none that torch can use", file=sys.stderr)
        return 2
    gpu, rows = Gpu.of(torch.device("cuda")), []
    try:
        with steps_told("tuning", len(OPS) * len(sizes)) as tell:
            for size in sizes:
                shape, found = tune_size(size, tell)
                untuned = blocks_for(shape, gpu.multiprocessors, gpu.capability)
                rows += [Tuned(size.name, op, getattr(found, op), getattr(untuned, op)) for op in OPS]
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    title = f"TUNED: {gpu.name}"
    publish(Report("kernels tune", title, "measured", [Sheet(title, rows, [f"kept in {cache_file(gpu)}"])]))
    return 0
