"""Tables with notes below, on the screen and as a page of docs/measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from io import StringIO
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.lab.show.console import print_full

Section = tuple[Table, list[str]]


def table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """Columns after the first ``left`` are right-aligned."""
    made = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return made


def rendered(found: Sequence[Section]) -> str:
    """As plain text."""
    text = StringIO()
    for made, notes in found:
        print_full(made, notes, file=text)
        text.write("\n")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def page(title: str, introduction: Sequence[str], found: Sequence[Section]) -> str:
    """A page of docs/measured."""
    parts = [f"# {title}", *introduction, "```\n" + rendered(found).strip("\n") + "\n```"]
    return "\n\n".join(parts) + "\n"


def show(parts: Sequence[Section], subject: str, introduction: Sequence[str], name: str, out: Path | None) -> None:
    """Print the tables; with a folder ``out``, write them there first, as ``<name>_simulated_<date>.md``."""
    if out is not None:
        today = date.today().isoformat()
        title = f"SIMULATED: {subject}, {today}"
        (out / f"{name}_simulated_{today}.md").write_text(page(title, introduction, parts))
    for made, notes in parts:
        print_full(made, notes)
