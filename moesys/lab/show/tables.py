"""Tables of results: a row is a dataclass whose annotations declare its columns, and every format follows from it.

@dataclass(frozen=True)
class Sent:
    link: Annotated[str, Column("link")]
    sent_bytes: Annotated[int, Column("bytes", ",")]
    took: Annotated[Quantiles, Column("us", ".1f")]     # median [p20, p80]
    samples_ms: list[float]                          # no column: only in JSON

    @property
    def gb_per_s(self) -> Annotated[float, Column("GB/s", ".2f", after="sent_bytes")]: ...

print(markdown_table(Sheet("MEASURED: links", rows)))

This module imports neither torch nor pydantic, so that it works where they are missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, TextIO, get_type_hints

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moesys.config.base import CONTROL
from moesys.files import write_whole

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"$\sim$",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "<": r"$<$",
    ">": r"$>$",
    # After the end of a row, LaTeX would read a bracket as its optional argument.
    "[": "{[}",
    "]": "{]}",
} | {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass(frozen=True)
class Column:
    """How a table shows a field or a property of its rows. ``None``, and a key that a mapping lacks, are empty cells.

    header: a terminal breaks it at newlines. A field that holds a mapping has a column for each key, with the key in
    place of ``{}``. A property with the header "" is shown only in JSON.
    form: a format, or a function from the value to its text. A field may have several columns, each with its own form.
    scale: the factor by which a number is multiplied first, such as 100 for per cent.
    after: the field or property that a property follows; by default it is last.
    align: by default the right if a cell begins with a number, else the left.
    wraps: whether a narrow terminal may break the cells into several lines.
    """

    header: str
    form: str | Callable[[Any], str] = ""
    scale: float = 1
    after: str = ""
    align: Literal["", "left", "right"] = ""
    wraps: bool = False

    def words(self, value: Any) -> str:
        if value is None:
            return ""
        scaled = value if self.scale == 1 else self.scale * value
        return self.form(scaled) if callable(self.form) else format(scaled, self.form)


@dataclass(frozen=True)
class Sheet:
    """A table: ``rows`` are dataclasses of one class.

    group_by: the field whose changes separate groups of rows by a line. without: fields that this table leaves out.
    best: the indices of the rows to highlight.
    """

    title: str
    rows: Sequence[Any]
    notes: Sequence[str] = ()
    group_by: str = ""
    without: Collection[str] = ()
    best: Collection[int] = ()


@dataclass(frozen=True)
class WrittenColumn:
    """A column as text."""

    header: str
    cells: tuple[str, ...]
    align: Literal["left", "right"]
    wraps: bool


def figure(value: float) -> str:
    """Formats a number with four digits, and an exponent below 0.001 and from a million: ``0.012``, ``12346``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


def counted(number: int, noun: str) -> str:
    """Returns the number and its noun, singular or plural: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


# --- columns ----------------------------------------------------------------------------------------------------------


def columns_of(row_class: type) -> dict[str, list[Column]]:
    """Returns the columns that a class of rows declares, by field or property, in the order in which they are shown."""
    # By default, names in annotations of functions would be looked up in the class.
    hints = get_type_hints(row_class, vars(sys.modules[row_class.__module__]), include_extras=True)
    found = {each.name: _declared(hints[each.name]) for each in fields(row_class)}
    order = list(found)
    for name, member in vars(row_class).items():
        if isinstance(member, property):
            found[name] = _declared(get_type_hints(member.fget, include_extras=True).get("return"))
            after = next((column.after for column in found[name]), "")
            order.insert(order.index(after) + 1 if after else len(order), name)
    return {name: found[name] for name in order if found[name]}


def written_columns(sheet: Sheet) -> list[WrittenColumn]:
    """Returns all columns of a table except those without a single filled cell."""
    written = []
    for name, columns in columns_of(type(sheet.rows[0])).items() if sheet.rows else ():
        if name in sheet.without:
            continue
        values = [getattr(row, name) for row in sheet.rows]
        for column in columns:
            by_header = {column.header: values}
            if any(isinstance(value, Mapping) for value in values):
                keys = dict.fromkeys(key for value in values for key in value)
                by_header = {column.header.format(key): [value.get(key) for value in values] for key in keys}
            for header, of_rows in by_header.items():
                cells = tuple(printable(column.words(value)) for value in of_rows)
                if header and any(cells):
                    align = column.align or ("right" if any(map(_is_number, cells)) else "left")
                    written.append(WrittenColumn(header, cells, align, column.wraps))
    return written


def _declared(annotation: Any) -> list[Column]:
    return [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Column)]


def _is_number(cell: str) -> bool:
    """Returns whether a cell begins with a number; a unit or a range may follow."""
    first = cell.partition(" ")[0].rstrip("%").replace(",", "")
    try:
        float(first)
    except ValueError:
        return False
    return " x " not in cell


def _rows(columns: Sequence[WrittenColumn]) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in columns), strict=True))


# --- formats ----------------------------------------------------------------------------------------------------------


def terminal_table(sheet: Sheet) -> Table:
    """Returns the table for a terminal."""
    table = Table(title=Text(printable(sheet.title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    columns = written_columns(sheet)
    for column in columns:
        header = Text(column.header.replace(", ", ",\n"))
        table.add_column(header, justify=column.align, no_wrap=not column.wraps)
    groups = [getattr(row, sheet.group_by) if sheet.group_by else None for row in sheet.rows]
    for place, cells in enumerate(_rows(columns)):
        if place and groups[place] != groups[place - 1]:
            table.add_section()
        # Text, because rich would take brackets in a string for its markup.
        table.add_row(*map(Text, cells), style="bold green" if place in sheet.best else None)
    return table


def markdown_table(sheet: Sheet) -> str:
    """Returns a table of GitHub's Markdown, the best rows in bold, without a newline at the end."""
    columns = written_columns(sheet)
    lines = [[escaped(column.header) for column in columns]]
    lines.append(["--:" if column.align == "right" else ":--" for column in columns])
    for place, cells in enumerate(_rows(columns)):
        marks = "**" if place in sheet.best else ""
        lines.append([f"{marks}{escaped(cell)}{marks}" if cell else "" for cell in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def latex_table(sheet: Sheet) -> str:
    """Returns a table for the package booktabs, with the best rows in bold and the title and the notes as caption."""
    columns = written_columns(sheet)
    caption = " ".join(_in_latex(note) for note in (f"{sheet.title}.", *sheet.notes))
    lines = [_latex_row([_in_latex(column.header) for column in columns]), r"\midrule"]
    for place, cells in enumerate(_rows(columns)):
        texts = [_in_latex(cell) for cell in cells]
        lines.append(_latex_row([rf"\textbf{{{of}}}" if of and place in sheet.best else of for of in texts]))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{''.join(column.align[0] for column in columns)}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption}}}",
            r"\end{table}",
            "",
        ]
    )


def plain(value: Any) -> Any:
    """Returns ``value`` in the types of JSON: a dataclass becomes its fields and the properties that are columns."""
    if is_dataclass(value) and not isinstance(value, type):
        names = dict.fromkeys([*(each.name for each in fields(value)), *columns_of(type(value))])
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    # A config is an object of pydantic, which an image for GPUs need not have.
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def escaped(text: str) -> str:
    """Returns one line of Markdown that shows the text as it is."""
    return re.sub(r"([\\`*_<>|])", r"\\\1", _one_line(text))


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def printable(text: str, keep: str = "") -> str:
    """Returns the text with escapes, such as ``\\x1b``, in place of control characters that are not in ``keep``.

    Otherwise text from files of others could move the cursor, or look like lines of moesys.
    """
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


# --- printing ---------------------------------------------------------------------------------------------------------


def print_full(content: RenderableType, notes: Sequence[str] = (), file: TextIO | None = None) -> None:
    """Prints a table or a tree and its notes below, one per line; ``file`` is stdout by default.

    On a terminal the content fits the window, and notes break between words. In a pipe or a file it is plain text as
    wide as its content, where rich would cut names at 80 columns.
    """
    file = file or sys.stdout
    console = Console(file=file)
    if not console.is_terminal:
        widest = Console(file=file, width=10_000)
        console = Console(file=file, width=max(1, Measurement.get(widest, widest.options, content).maximum))
    elif not console.width:
        # Rich believes COLUMNS=0.
        console = Console(file=file, width=80)
    console.print(content)
    for note in notes:
        console.print(printable(note), soft_wrap=not console.is_terminal, highlight=False, markup=False)


def add_head(tree: Tree, words: str) -> Tree:
    """Adds a branch with a heading, and returns the branch."""
    return tree.add(Text(printable(words), style="bold"))


def add_line(tree: Tree, name: str, words: str) -> None:
    """Adds a line with its name in colour."""
    tree.add(Text.assemble((f"{printable(name)}: ", "cyan"), printable(words)))


def print_sheet(sheet: Sheet, file: TextIO | None = None) -> None:
    """Prints a table and its notes."""
    print_full(terminal_table(sheet), sheet.notes, file)


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The tables of one benchmark.

    name: the benchmark's name. title: the title of its page, to which the date is added. source: "measured",
    "simulated" or "rehearsed". introduction: paragraphs of the page above the tables. notes: lines below all tables;
    a table may have notes of its own. data: what JSON holds besides, by name: the rows themselves, with all fields.
    """

    name: str
    title: str
    source: str
    sheets: Sequence[Sheet]
    notes: Sequence[str] = ()
    introduction: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def publish(report: Report, *, page: Path | None = None, json_path: Path | None = None) -> None:
    """Writes the requested files and then prints, because the reader of a pipe may stop before the end."""
    write(report, page=page, json_path=json_path)
    for sheet in filled(report):
        print_sheet(sheet)
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
    """Writes the report as Markdown to ``page`` and as JSON to ``json_path``, if they are given."""
    if page is not None:
        write_whole(page, to_markdown(report))
    if json_path is not None:
        write_whole(json_path, to_json(report))


def to_markdown(report: Report) -> str:
    """Returns a page of ``docs/measured``."""
    parts = [f"# {report.title}, {date.today().isoformat()}", *report.introduction]
    for sheet in filled(report):
        parts += [f"## {sheet.title}", markdown_table(sheet), _listed(sheet.notes)]
    return "\n\n".join(part for part in (*parts, _listed(report.notes)) if part) + "\n"


def to_json(report: Report) -> str:
    """Returns all results, with every sample."""
    head = {"benchmark": report.name, "source": report.source, "date": date.today().isoformat()}
    return json.dumps({**head, **plain(report.data)}, indent=1) + "\n"


def filled(report: Report) -> list[Sheet]:
    """Returns the tables that have rows."""
    return [sheet for sheet in report.sheets if sheet.rows]


def _listed(notes: Sequence[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)
