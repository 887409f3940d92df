"""What the MegaKernels' bench found, as a table on a terminal, as a page of Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.stopwatch import Spread
from moesys.bench.kernels.aot import Size
from moesys.lab.show.console import print_full

# Sequential by the same kernels, launched one after another, and by stand-alone ones.
SEQUENTIAL, STAND_ALONE = "sequential", "stand-alone kernels"
WHOLE = "forward + backward"


@dataclass
class Contestant:
    """wrong: why it was not timed, "" where it was. samples_ms: of all ranks, by direction and repetition."""

    name: str
    wrong: str = ""
    samples_ms: dict[str, list[float]] = field(default_factory=dict)

    def samples_of(self, direction: str) -> list[float]:
        """``WHOLE``: both directions of a repetition."""
        if direction != WHOLE:
            return self.samples_ms.get(direction, [])
        return [sum(both) for both in zip(*self.samples_ms.values(), strict=True)]


@dataclass(frozen=True)
class Report:
    """source: "measured" on a GPU; "rehearsed" elsewhere, where times mean nothing. ``size.T``: tokens of a rank.

    away_bytes: what the busiest rank's link carries, at least, in each of dispatch and combine.
    """

    source: str
    machine: str
    size: Size
    num_ranks: int
    dtype: str
    gb_per_s: float
    away_bytes: int
    repeats: int
    bit_runs: int
    contestants: Sequence[Contestant]

    @property
    def holds(self) -> bool:
        return not any(contestant.wrong for contestant in self.contestants)

    @property
    def link_ms(self) -> float:
        """Of one dispatch or combine."""
        return self.away_bytes / self.gb_per_s / 1e6

    def best_sequential(self, direction: str) -> Contestant | None:
        """The quickest of the same kernels without overlap."""
        timed = [c for c in self.contestants if c.name.startswith(SEQUENTIAL) and c.samples_of(direction)]
        return min(timed, key=lambda c: statistics.median(c.samples_of(direction)), default=None)

    def speedup(self, contestant: Contestant, direction: str) -> Spread | None:
        """How many times longer the best sequential one takes."""
        best, samples_ms = self.best_sequential(direction), contestant.samples_of(direction)
        return Spread.of_ratios(best.samples_of(direction), samples_ms) if best is not None and samples_ms else None

    @property
    def legend(self) -> list[str]:
        _, T, H, I, E, K = self.size
        graphs = ", eager and as CUDA graphs" if self.source == "measured" else ""
        return [
            f"{self.machine}; {self.dtype}; {date.today().isoformat()}",
            f"{self.size.name}: {self.num_ranks} ranks of {T} tokens, H={H}, I={I}, E={E}, K={K}. A rank's link "
            f"carries {self.gb_per_s:g} GB/s by the device's clock: {self.link_ms:.3g} ms for the "
            f"{self.away_bytes / 1e6:.3g} MB of a dispatch or a combine, and each direction has one of both.",
            f"ms: all ranks, median [p20, p80] of {self.repeats} repetitions, contestants taking turns. x: the best "
            f"'{SEQUENTIAL}' of the same repetition over it, above 1 is faster: the same kernels launched one after "
            f"another, with as many programs as suit them. '{STAND_ALONE}': copies, and kernels that have the whole "
            "device to themselves.",
            f"Bits: output, dx and all gradients equal those of '{STAND_ALONE}' in each of {self.bit_runs} "
            f"runs{graphs}. What differs is not timed.",
            "Virtual ranks share one GPU's multiprocessors, L2 cache and memory. That shows what is hidden behind what "
            "when a link has this pace, and what the queue and the flags cost. It does not show NVLink's latency, its "
            "pace under many small transfers, contention at a receiver, or clocks of several GPUs.",
        ]


def rows_of(report: Report) -> tuple[list[str], list[list[str]]]:
    columns = ["contestant", "bits"]
    directions = ("forward", "backward", WHOLE)
    for direction in directions:
        columns += [f"{direction}, ms", "x"]
    rows = []
    for contestant in report.contestants:
        cells = [contestant.name, contestant.wrong or "equal"]
        for direction in directions:
            samples_ms = contestant.samples_of(direction)
            speedup = report.speedup(contestant, direction)
            cells.append(str(Spread.of_ratios(samples_ms, [1.0] * len(samples_ms))) if samples_ms else "")
            cells.append("" if speedup is None else str(speedup))
        rows.append(cells)
    return columns, rows


def print_report(report: Report) -> None:
    columns, rows = rows_of(report)
    title = Text(f"{report.source.upper()}: MegaKernels over paced links", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_full(table, report.legend)


def write_report(report: Report, folder: Path) -> None:
    """``overlap_mega.json`` with every sample, ``overlap_mega.md`` with the table."""
    folder.mkdir(parents=True, exist_ok=True)
    data = asdict(report) | {"benchmark": "overlap mega", "date": date.today().isoformat()}
    (folder / "overlap_mega.json").write_text(json.dumps(data, indent=1) + "\n")
    columns, rows = rows_of(report)
    hardware = report.machine.partition(",")[0]
    lines = [f"# MegaKernels over paced links, {report.source}: {hardware}, {date.today().isoformat()}", ""]
    lines += [report.legend[0], "", *(f"- {note}" for note in report.legend[1:]), ""]
    lines += [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows)]
    (folder / "overlap_mega.md").write_text("\n".join(lines) + "\n")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
