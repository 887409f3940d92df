"""What the kernels' bench found, as tables on a terminal, as a page of Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.stopwatch import Spread
from moesys.bench.kernels.case import FLOPS, Measured
from moesys.bench.kernels.checks import MOST_OF_GROUPED, Finding
from moesys.bench.kernels.contestants import OURS
from moesys.lab.show.console import print_full

WHOLE = "forward + backward"


@dataclass
class Report:
    """All that was found so far. absent: contestants that could not be made, and why.

    source: "measured" on a GPU; "rehearsed" elsewhere, where times mean nothing.
    """

    source: str
    machine: str
    dtype: str
    repeats: int
    absent: dict[str, str] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every check of ours does."""
        wrong = any(row.wrong for row in self.measured if row.contestant == OURS)
        return OURS not in self.absent and not wrong and all(finding.holds for finding in self.findings)

    @property
    def legend(self) -> list[str]:
        return [
            f"{self.machine}; {self.dtype}; {date.today().isoformat()}",
            f"ms: median [p20, p80] of {self.repeats} repetitions, contestants taking turns, the L2 cache of a GPU "
            f"flushed before each. / {OURS}: forward + backward over ours of the same repetition; above 1 we are "
            "faster.",
            "TFLOP/s: 6, 12 and 18 times T·K·H·I for forward, backward and both, padding not counted, nor the router "
            "under the routing 'router', whose time is in all three.",
            "kept: from forward to backward besides inputs and output. peak: of both, besides inputs.",
            f"error: ‖found - right‖ / ‖right‖ from float32, the worst of output and gradients. {OURS}'s are at most "
            f"{MOST_OF_GROUPED} times the least of torch's grouped GEMM. What is wrong is not timed.",
        ]


class Sheet(NamedTuple):
    """A table in words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 3


def sheets(report: Report) -> list[Sheet]:
    """Times, errors, checks of ours; those that have rows."""
    found = [_times(report), _errors(report), _findings(report)]
    return [sheet for sheet in found if sheet.rows]


def print_report(report: Report) -> None:
    for sheet in sheets(report):
        table = Table(title=Text(sheet.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if index < sheet.num_labels else "right")
        for row in sheet.rows:
            table.add_row(*(Text(cell) for cell in row))
        print_full(table)
    for note in (*report.legend, *_absent(report)):
        print(note)


def write_report(report: Report, folder: Path) -> None:
    """``kernels.json`` with every sample, ``kernels.md`` with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    data = asdict(report) | {"benchmark": "kernels", "date": date.today().isoformat()}
    (folder / "kernels.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# Kernels of one device, {date.today().isoformat()}", "", *report.legend]
    lines[3:] = [f"- {note}" for note in (*report.legend[1:], *_absent(report))]
    for sheet in sheets(report):
        lines += ["", f"## {sheet.title}", "", _line(sheet.columns), _line(["---"] * len(sheet.columns))]
        lines += [_line(row) for row in sheet.rows]
    (folder / "kernels.md").write_text("\n".join(lines) + "\n")


def _times(report: Report) -> Sheet:
    columns = ["size", "routing", "contestant"]
    for direction in FLOPS:
        columns += [f"{direction}, ms", "TFLOP/s"]
    rows = []
    for row in (row for row in report.measured if row.samples_ms):
        cells = [row.size.name, row.routing, row.contestant]
        for direction, samples_ms in row.samples_ms.items():
            cells += [str(Spread.of_ratios(samples_ms, [1.0] * len(samples_ms))), f"{row.tflops(direction):.1f}"]
        cells += [_against_ours(report, row), *_megabytes(row)]
        rows.append(cells)
    return Sheet(f"{report.source.upper()}: times", (*columns, f"/ {OURS}", "kept, MB", "peak, MB"), rows)


def _against_ours(report: Report, row: Measured) -> str:
    for other in report.measured:
        same = (other.size, other.routing, other.contestant) == (row.size, row.routing, OURS)
        if same and other is not row and other.samples_ms:
            return str(Spread.of_ratios(row.samples_ms[WHOLE], other.samples_ms[WHOLE]))
    return ""


def _megabytes(row: Measured) -> tuple[str, str]:
    if row.bytes is None:
        return "", ""
    return f"{row.bytes.kept / 1e6:.0f}", f"{row.bytes.peak / 1e6:.0f}"


def _errors(report: Report) -> Sheet:
    names = tuple(dict.fromkeys(name for row in report.measured for name in row.errors))
    rows = []
    for row in report.measured:
        errors = (f"{row.errors[name]:.1e}" if name in row.errors else "" for name in names)
        rows.append((row.size.name, row.routing, row.contestant, *errors, row.wrong))
    return Sheet(f"{report.source.upper()}: errors", ("size", "routing", "contestant", *names, "wrong"), rows)


def _findings(report: Report) -> Sheet:
    rows = [
        (finding.where, finding.what, "holds" if finding.holds else "FAILS", finding.says)
        for finding in report.findings
    ]
    return Sheet(f"CHECKED: {OURS}", ("where", "what", "", "how"), rows, num_labels=4)


def _absent(report: Report) -> list[str]:
    return [f"absent: {name}, {why}" for name, why in report.absent.items()]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
