"""The command ``leaderboard``. It imports what it needs when it runs, so that ``--help`` does not wait for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesys.lab.commands.options import refusing


def bench_leaderboard(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Pages and results; the same folder goes on where it was stopped.")
    ] = Path("leaderboard"),
    planner: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:CLASS", help="One's own, or module:CLASS, beside the others; may be repeated."),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A workload of one's own; may be repeated.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Draws of each workload, and parts of each recording, which has 4.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Two small settings, in seconds.")] = False,
) -> None:
    """Rank all planners on recorded and generated routing by the simulated seconds of a layer, and write pages.

    All of it takes about ten minutes on one core. A planner of one's own is a class that extends ms.Balance or
    ms.Split (docs/leaderboard.md). For example:
    python -m benchmarks leaderboard --quick --planner my_planners.py:Heaviest
    """
    from benchmarks.board import leaderboard

    with refusing():
        code = leaderboard.main(out, seeds, quick=quick, planners=planner or (), traces=trace or ())
    raise typer.Exit(code)
