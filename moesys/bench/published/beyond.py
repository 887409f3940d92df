"""``moesys bench beyond``: strategies between LAER-MoE and ``unified``, on the screen and as a page."""

from __future__ import annotations

from pathlib import Path

from moesys.bench.harness.reports import publish_simulated
from moesys.bench.published.beyond_rows import LAER, OTHER_FIT, UNIFIED, beyond_rows, beyond_sheets
from moesys.bench.published.beyond_sizes import beyond_sizes, sizes_sheet

INTRODUCTION = (
    "`python -m moesys bench beyond`: strategies between LAER-MoE and `unified`, stage by stage. Nothing here was "
    "measured. What the simulator is worth is in the page of `python -m moesys bench reproduce`.",
    "Unified is FSEP with our layout, the flow split and overlap by `MegaKernel()`, as if programs reached the memory "
    "of other nodes as they reach their own node's. Before it stands overlap by `Pipelined(chunks=4)`, which needs no "
    "such thing. Each other stage changes what its name says, and keeps the rest.",
)


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    sheets = beyond_sheets(beyond_rows(), beyond_rows(OTHER_FIT, stages=(LAER, UNIFIED)))
    publish_simulated("beyond", "beyond LAER-MoE", [*sheets, sizes_sheet(beyond_sizes())], INTRODUCTION, out)
    return 0
