"""What a bench found, written as a page of Markdown and as JSON and then printed; all three from its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from moesys.files import write_whole
from moesys.lab.show.console import print_full
from moesys.lab.show.sheets import Sheet, markdown_table, plain, terminal_table


@dataclass(frozen=True)
class Report:
    """Tables of one bench.

    name: of the bench. title: of its page, which gets the date. source: "measured", "simulated" or "rehearsed".
    introduction: paragraphs of the page above the tables. notes: lines below all tables; those of one are its own.
    data: what JSON has besides, by name; the rows themselves, with what no table shows.
    """

    name: str
    title: str
    source: str
    sheets: Sequence[Sheet]
    notes: Sequence[str] = ()
    introduction: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def publish(report: Report, *, page: Path | None = None, json_path: Path | None = None) -> None:
    """Writes the files that are asked for, and then prints: whoever reads what is printed may stop before its end."""
    write(report, page=page, json_path=json_path)
    for sheet in filled(report):
        print_full(terminal_table(sheet), sheet.notes)
    for note in report.notes:
        print(note)


def publish_simulated(
    name: str,
    subject: str,
    sheets: Sequence[Sheet],
    introduction: Sequence[str],
    folder: Path | None,
    *,
    data: Mapping[str, Any] | None = None,
    json_path: Path | None = None,
) -> None:
    """Prints simulated tables; with a folder, writes ``<name>_simulated_<date>.md`` there first."""
    page = None if folder is None else folder / f"{name}_simulated_{date.today().isoformat()}.md"
    report = Report(
        name, f"SIMULATED: {subject}", "simulated", sheets, introduction=introduction, data={} if data is None else data
    )
    publish(report, page=page, json_path=json_path)


def write(report: Report, *, page: Path | None = None, json_path: Path | None = None) -> None:
    if page is not None:
        write_whole(page, to_markdown(report))
    if json_path is not None:
        write_whole(json_path, to_json(report))


def to_markdown(report: Report) -> str:
    """A page of docs/measured."""
    parts = [f"# {report.title}, {date.today().isoformat()}", *report.introduction]
    for sheet in filled(report):
        parts += [f"## {sheet.title}", markdown_table(sheet), _listed(sheet.notes)]
    return "\n\n".join(part for part in (*parts, _listed(report.notes)) if part) + "\n"


def to_json(report: Report) -> str:
    """Everything that was found, with all samples."""
    head = {"benchmark": report.name, "source": report.source, "date": date.today().isoformat()}
    return json.dumps({**head, **plain(report.data)}, indent=1) + "\n"


def filled(report: Report) -> list[Sheet]:
    """The tables that have rows."""
    return [sheet for sheet in report.sheets if sheet.rows]


def _listed(notes: Sequence[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)
