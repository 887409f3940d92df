"""Tuning the blocks of grouped GEMMs on this machine's GPU, for one published layer or all, and keeping them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.steps import steps_told
from moesys.bench.kernels.aot import Size, select
from moesys.kernels.experts.gemm_timer import GemmTimer
from moesys.kernels.experts.tile_config import Blocks, ShapeClass
from moesys.kernels.experts.tile_space import OPS, blocks_for
from moesys.kernels.experts.tile_tuner import Gpu, cache_file, tune_blocks
from moesys.kernels.experts.tiles import Block
from moesys.lab.show.console import print_full


def tune_size(size: Size, tell: Callable[[str], None]) -> tuple[ShapeClass, Blocks]:
    """In bfloat16, gated by SiLU; what was found is kept for layers of the same class."""
    device = torch.device("cuda")
    x_TH, down_EHI = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((size.T, size.H), (size.E, size.H, size.I))
    )
    shape = ShapeClass.of(x_TH, down_EHI, size.T * size.K, "swiglu")
    timer = GemmTimer(shape, device, lambda op: tell(f"{size.name}: {op}"))
    return shape, tune_blocks(shape, timer, Gpu.of(device))


def tuned_table(rows: Sequence[tuple[Size, ShapeClass, Blocks]], gpu: Gpu) -> Table:
    """What was found, beside what is used untuned."""
    table = Table(title=Text(f"TUNED: {gpu.name}", style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("size", "op", "fastest", "untuned"):
        table.add_column(name, no_wrap=True)
    for size, shape, found in rows:
        untuned = blocks_for(shape, gpu.multiprocessors)
        for op in OPS:
            table.add_row(size.name, op, *(_in_words(getattr(blocks, op)) for blocks in (found, untuned)))
    return table


def _in_words(block: Block) -> str:
    tile = f"{block.rows}x{block.columns}x{block.contraction}"
    return f"{tile}, {block.warps} warps, {block.stages} stages, {block.operands}"


def main(sizes: str) -> int:
    """Prints what was found; 2 without a GPU, or where it cannot be kept."""
    if not torch.cuda.is_available():
        print("tuning times kernels on a GPU, and this machine has none that torch can use", file=sys.stderr)
        return 2
    chosen, gpu = select(sizes), Gpu.of(torch.device("cuda"))
    try:
        with steps_told("tuning", len(OPS) * len(chosen)) as tell:
            rows = [(size, *tune_size(size, tell)) for size in chosen]
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print_full(tuned_table(rows, gpu), [f"kept in {cache_file(gpu)}"])
    return 0
