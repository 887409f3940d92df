"""``moesys bench kernels --aot``: what was compiled, as a table or as JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.steps import steps_told
from moesys.bench.kernels.aot import NUM_OPS, Compiled, compile_size, select
from moesys.bench.kernels.aot_mega import NUM_MEGA_OPS, compile_mega
from moesys.lab.show.console import print_full


def aot_table(rows: Sequence[Compiled]) -> Table:
    title = "COMPILED: kernels for sm_90, not run"
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("size", "op", "kernel", "HGMMA", "falls short"):
        table.add_column(name, no_wrap=name != "falls short")
    for name in ("tile", "threads", "registers", "spills", "shared KB", "copies", "loads", "stores", "TMA"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.size != before:
            table.add_section()
        before, code = row.size, row.code
        table.add_row(
            row.size,
            row.op,
            code.name,
            " ".join(code.mma),
            Text(row.wrong, style="red"),
            row.tile,
            str(code.threads),
            str(code.registers),
            str(code.spills),
            f"{code.shared_bytes / 1000:.0f}",
            _bytes(code.copy_bytes),
            _bytes(code.load_bytes),
            _bytes(code.store_bytes),
            str(code.tma_loads),
        )
    return table


def _bytes(widths: tuple[int, ...]) -> str:
    return f"{' '.join(map(str, widths))} B" if widths else ""


def main(sizes: str, json_path: Path | None, mega: bool) -> int:
    """Prints the table, of MegaKernels too with ``mega``; 1 if a kernel falls short."""
    chosen = select(sizes)
    rows: list[Compiled] = []
    num_ops = NUM_OPS + NUM_MEGA_OPS if mega else NUM_OPS
    with warnings.catch_warnings(), steps_told("compiling", num_ops * len(chosen)) as tell:
        warnings.simplefilter("ignore", UserWarning)
        for size in chosen:
            rows += compile_size(size, torch.bfloat16, tell)
            if mega:
                rows += compile_mega(size, torch.bfloat16, tell)
    short = sum(bool(row.wrong) for row in rows)
    note = f"bfloat16, triton {triton.__version__}; {len(rows)} kernels, {short} of them fall short"
    if json_path is not None:
        data = [asdict(row) | {"wrong": row.wrong} for row in rows]
        json_path.write_text(json.dumps(data, indent=1))
    print_full(aot_table(rows), [note])
    return int(short > 0)
