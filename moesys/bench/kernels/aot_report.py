"""``moesys bench kernels --aot``: what was compiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from moesys.bench.harness.reports import Report, publish
from moesys.bench.harness.sheets import Sheet
from moesys.bench.harness.steps import steps_told
from moesys.bench.kernels.aot import NUM_OPS, Compiled, Size, compile_size
from moesys.bench.kernels.aot_mega import NUM_MEGA_OPS, compile_mega


def main(sizes: Sequence[Size], json_path: Path | None, mega: bool) -> int:
    """Compiles, writes, prints, MegaKernels too with ``mega``; 1 if a kernel falls short."""
    rows: list[Compiled] = []
    num_ops = NUM_OPS + NUM_MEGA_OPS if mega else NUM_OPS
    with warnings.catch_warnings(), steps_told("compiling", num_ops * len(sizes)) as tell:
        warnings.simplefilter("ignore", UserWarning)
        for size in sizes:
            rows += compile_size(size, torch.bfloat16, tell)
            if mega:
                rows += compile_mega(size, torch.bfloat16, tell)
    short = sum(bool(row.wrong) for row in rows)
    title = "COMPILED: kernels for sm_90, not run"
    notes = [f"bfloat16, triton {triton.__version__}; {len(rows)} kernels, {short} of them fall short"]
    sheet = Sheet(title, rows, notes, group_by="size")
    publish(Report("kernels aot", title, "compiled", [sheet], data={"rows": rows}), json_path=json_path)
    return int(short > 0)
