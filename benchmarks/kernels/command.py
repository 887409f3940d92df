"""The command ``kernels``: checks, times and tunes the kernels of one GPU, or compiles them without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import typer

from benchmarks.harness.options import chosen
from benchmarks.kernels.drawn_layer import SIZES, Size
from benchmarks.kernels.gemm_timer import GemmTimer
from benchmarks.kernels.tile_tuning import tune_blocks
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import OPS, Gpu, blocks_for, cache_file
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish


def bench_kernels(
    aot: Annotated[bool, flag("Compile without a GPU and read the machine code.", "--aot")] = False,
    tune: Annotated[bool, flag("Find the fastest tiles on this GPU and keep them.", "--tune")] = False,
    mega: Annotated[bool, flag("Compile MegaKernels too (with --aot).")] = True,
    candidates: Annotated[bool, flag("Compile all tiles that --tune tries (with --aot).", "--candidates")] = False,
    arch: Annotated[
        Literal["sm_90", "sm_100"], option("ARCH", "sm_90 (Hopper) or sm_100 (Blackwell) (with --aot).")
    ] = "sm_90",
    size: Annotated[str, option("NAMES", "Names of layers, separated by commas, or all.")] = "all",
    routing: Annotated[str, option("NAMES", "uniform, balanced, zipf, k-experts, router, or all.")] = "all",
    contestants: Annotated[
        str, option("NAMES", "moesys, grouped_mm, transformers, and more (docs/kernels.md).")
    ] = "all",
    peer: Annotated[
        list[str] | None, option("NAME=DIR", "scattermoe, liger or sonicmoe in DIR; may be repeated.")
    ] = None,
    dtype: Annotated[str, option("DTYPE", "bfloat16, float16 or float32.")] = "bfloat16",
    repeats: Annotated[int, option("N", "Number of timed repetitions; 0 only checks.", min=0)] = 15,
    device: Annotated[str, option("DEVICE", "cuda, or cpu for a rehearsal on a toy in the interpreter.")] = "cuda",
    extras: Annotated[bool, flag("Check graphs, compile, checkpoints and large offsets too.")] = True,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Checks and times the kernels of one GPU and other implementations, compiles them or tunes them."""
    if aot and tune:
        raise typer.BadParameter("--aot and --tune are two commands; give one of them")
    if aot or tune:
        by_name = {known.name: known for known in SIZES}
        with refusing():
            sizes = [by_name[name] for name in chosen("size", size, by_name)]
            if tune:
                return tune_tiles(sizes, output)
        from benchmarks.kernels.aot import main

        raise typer.Exit(main(sizes, mega, candidates, arch, output))
    from benchmarks.kernels import kernels_contest

    with refusing():
        asked = kernels_contest.asked_for(
            size, routing, contestants, peers=peer or (), dtype=dtype, repeats=repeats, extras=extras, device=device
        )
    raise typer.Exit(kernels_contest.main(asked, output))


@dataclass(frozen=True)
class TunedOp:
    """The fastest tiles of one op, and those that it has untuned."""

    size: Annotated[str, Column("size")]
    op: Annotated[str, Column("op")]
    fastest: Annotated[TileConfig, Column("fastest", lambda block: tile_words(block))]
    untuned: Annotated[TileConfig, Column("untuned", lambda block: tile_words(block))]


def tile_words(block: TileConfig) -> str:
    tile = f"{block.rows}x{block.columns}x{block.contraction}"
    return f"{tile}, {block.warps} warps, {block.stages} stages, {block.operands}"


def tune_tiles(sizes: Sequence[Size], output: CommandOutput = AS_TABLES) -> None:
    """Finds, keeps and prints the fastest tiles on this GPU. Raises ValueError without one, and OSError if tiles cannot
    be kept.
    """
    if not torch.cuda.is_available():
        raise ValueError("tuning times kernels on a GPU, and this machine has none that torch can use")
    gpu, rows = Gpu.of(torch.device("cuda")), []
    with steps_told("tuning", len(OPS) * len(sizes), output.quiet) as tell:
        for size in sizes:
            shape, found = tune_size(size, tell)
            untuned = blocks_for(shape, gpu.multiprocessors, gpu.capability)
            rows += [TunedOp(size.name, op, getattr(found, op), getattr(untuned, op)) for op in OPS]
    title = f"TUNED: {gpu.name}"
    sheet = Sheet(title, rows, [f"kept in {cache_file(gpu)}"])
    publish(Report("kernels tune", title, "measured", [sheet]), output)


def tune_size(size: Size, tell: Callable[[str], None]) -> tuple[ShapeClass, TileConfigs]:
    """Tunes in bfloat16 with SwiGLU, and keeps the tiles for layers of the same class."""
    device = torch.device("cuda")
    x_TH, down_EHI = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((size.T, size.H), (size.E, size.H, size.I))
    )
    shape = ShapeClass.of(x_TH, down_EHI, size.T * size.K, "swiglu")
    timer = GemmTimer(shape, device, lambda op: tell(f"{size.name}: {op}"))
    return shape, tune_blocks(shape, timer, Gpu.of(device))
