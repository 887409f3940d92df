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
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, TextIO, get_type_hints

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moesys.display import counted, printable
from moesys.files import write_whole

# A narrower column of sentences would make its rows very high.
_LEAST_TEXT = 20


@dataclass(frozen=True)
class Column:
    """How a table shows a field or a property of its rows. ``None``, and a key that a mapping lacks, are empty cells.

    header: a terminal breaks it at newlines. A field that holds a mapping has a column for each key, with the key in
    place of ``{}``. A property with the header "" is shown only in JSON.
    form: a format, or a function from the value to its text. A field may have several columns, each with its own form.
    scale: the factor by which a number is multiplied first, such as 100 for per cent.
    after: the field or property that a property follows; by default it is last.
    align: by default the right if a cell begins with a number, else the left.
    wraps: whether a narrow terminal may break the cells between words into several lines.
    kept: whether even a narrow terminal shows the column. Others are left out, except for the first one.
    """

    header: str
    form: str | Callable[[Any], str] = ""
    scale: float = 1
    after: str = ""
    align: Literal["", "left", "right"] = ""
    wraps: bool = False
    kept: bool = False

    def words(self, value: Any) -> str:
        if value is None:
            return ""
        scaled = value if self.scale == 1 else self.scale * value
        return self.form(scaled) if callable(self.form) else format(scaled, self.form)


@dataclass(frozen=True)
class Sheet:
    """A table: ``rows`` are dataclasses of one class.

    group_by: the field whose changes separate groups of rows by a line. without: fields that this table leaves out.
    best: the indices of the rows to highlight. unclear: those of the rows that show no difference, which are grey.
    """

    title: str
    rows: Sequence[Any]
    notes: Sequence[str] = ()
    group_by: str = ""
    without: Collection[str] = ()
    best: Collection[int] = ()
    unclear: Collection[int] = ()


@dataclass(frozen=True)
class WrittenColumn:
    """A column as text."""

    header: str
    cells: tuple[str, ...]
    align: Literal["left", "right"]
    wraps: bool
    kept: bool

    @property
    def name(self) -> str:
        """The header in one line."""
        return " ".join(self.header.split())

    @property
    def most(self) -> int:
        """The width at which no line is broken, except for headers where they say so."""
        return _widest([*self._header_lines, *self.cells])

    @property
    def least(self) -> int:
        """The least width at which no word is broken; cells are in one line, unless the column wraps."""
        cells = self.cells
        if self.wraps:
            cells = (min(_LEAST_TEXT, _widest(cells)) * " ", *(word for cell in cells for word in cell.split()))
        return _widest([*self.header.split(), *cells])

    def header_within(self, width: int) -> str:
        """Returns the header in lines of at most this width, which is at least ``least``."""
        return "\n".join(
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in self._header_lines
        )

    @property
    def _header_lines(self) -> list[str]:
        return self.header.replace(", ", ",\n").split("\n")


def _widest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts))


def figure(value: float) -> str:
    """Formats a number with four digits, and an exponent below 0.001 and from a million: ``0.012``, ``12346``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


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
                    written.append(WrittenColumn(header, cells, align, column.wraps, column.kept))
    if written:
        written[0] = replace(written[0], kept=True)
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


def rows_of(columns: Sequence[WrittenColumn]) -> list[tuple[str, ...]]:
    """Returns the cells of each row."""
    return list(zip(*(column.cells for column in columns), strict=True))


# --- formats ----------------------------------------------------------------------------------------------------------


class WholeTable:
    """A table for a terminal. Its columns are whole, or they are left out, from the right, and named in a line below.

    framed: whether the title stands above the table, and space around it; in a tree neither does.
    """

    def __init__(self, sheet: Sheet, *, framed: bool = True) -> None:
        self._sheet = sheet
        self._framed = framed
        self._columns = written_columns(sheet)

    def shown(self, width: int) -> list[WrittenColumn]:
        """Returns the columns for which there is room, and those that are always kept."""
        shown = list(self._columns)
        while self._width([column.least for column in shown]) > width:
            others = [place for place, column in enumerate(shown) if not column.kept]
            if not others:
                break
            del shown[others[-1]]
        return shown

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        words = [printable(self._sheet.title)] if self._framed else []
        least = _widest([*(word for line in words for word in line.split()), ""])
        kept = self._width([column.least for column in self._columns if column.kept])
        most = self._width([column.most for column in self._columns])
        return Measurement(max(least, kept), max(_widest([*words, ""]), most))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.shown(options.max_width)
        if self._framed:
            yield Text(printable(self._sheet.title), style="bold")
        yield self._drawn(shown, self._widths(shown, options.max_width))
        if left_out := [column.name for column in self._columns if column not in shown]:
            words = f"+{counted(len(left_out), 'column')} ({', '.join(left_out)}): --wide"
            yield Text(printable(words), style="dim")

    def _width(self, widths: Sequence[int]) -> int:
        return sum(widths) + 3 * len(widths) + (1 if self._framed else -3)

    def _widths(self, shown: Sequence[WrittenColumn], width: int) -> list[int]:
        """Gives each column its least width, and what is left to the narrowest that could use it."""
        widths = [column.least for column in shown]
        while self._width(widths) < width:
            growing = [place for place, column in enumerate(shown) if widths[place] < column.most]
            if not growing:
                break
            widths[min(growing, key=lambda place: widths[place])] += 1
        return widths

    def _drawn(self, shown: Sequence[WrittenColumn], widths: Sequence[int]) -> Table:
        sheet = self._sheet
        table = Table(box=box.SIMPLE_HEAD, show_edge=self._framed, pad_edge=self._framed)
        for column, width in zip(shown, widths, strict=True):
            header = Text(column.header_within(width))
            table.add_column(header, justify=column.align, no_wrap=not column.wraps, width=width)
        groups = [getattr(row, sheet.group_by) if sheet.group_by else None for row in sheet.rows]
        for place, cells in enumerate(rows_of(shown)):
            if place and groups[place] != groups[place - 1]:
                table.add_section()
            style = "bold green" if place in sheet.best else "dim" if place in sheet.unclear else None
            # It is a Text, because rich reads brackets in a string as markup.
            table.add_row(*map(Text, cells), style=style)
        return table


def markdown_table(sheet: Sheet) -> str:
    """Returns a table of GitHub's Markdown, the best rows in bold, without a newline at the end."""
    columns = written_columns(sheet)
    lines = [[escaped(column.header) for column in columns]]
    lines.append(["--:" if column.align == "right" else ":--" for column in columns])
    for place, cells in enumerate(rows_of(columns)):
        marks = "**" if place in sheet.best else ""
        lines.append([f"{marks}{escaped(cell)}{marks}" if cell else "" for cell in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    # Brackets, tildes and ampersands are escaped only where they begin links, struck out text and entities.
    return re.sub(r"([\\`*_<>|$]|\](?=[(\[:])|~(?=~)|&(?=#?\w+;))", r"\\\1", printable(" ".join(text.split())))


# --- printing ---------------------------------------------------------------------------------------------------------


def print_full(
    content: RenderableType, notes: Sequence[str] = (), file: TextIO | None = None, *, wide: bool = False
) -> None:
    """Prints a tree and its notes below, one per line; ``file`` is stdout by default.

    On a terminal the content fits the window, and notes break between words. In a pipe or a file all is plain text as
    wide as its content, where rich would cut names at 80 columns. ``wide`` shows all columns of tables on a terminal
    too.
    """
    window = _window(file)
    widest = Console(file=window.file, width=10_000)
    size = Measurement.get(widest, widest.options, content)
    # The content is wider than the window if columns must be kept.
    width = max(size.minimum, window.width) if window.is_terminal and not wide else size.maximum
    Console(file=window.file, width=max(1, width)).print(content, crop=False)
    _print_notes(window, notes)


def _window(file: TextIO | None = None) -> Console:
    console = Console(file=file or sys.stdout)
    # Rich believes COLUMNS=0.
    return console if console.width else Console(file=console.file, width=80)


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        # It is a Text, because rich replaces :words: in strings by symbols.
        console.print(Text(printable(note)), soft_wrap=not console.is_terminal)


def add_head(tree: Tree, words: str) -> Tree:
    """Adds a branch with a heading, and returns the branch."""
    return tree.add(Text(printable(words), style="bold"))


def add_line(tree: Tree, name: str, words: str) -> None:
    """Adds a line with its name in colour."""
    tree.add(Text.assemble((f"{printable(name)}: ", "cyan"), printable(words)))


def print_sheet(sheet: Sheet, file: TextIO | None = None, *, wide: bool = False) -> None:
    """Prints a table and its notes; ``file`` and ``wide`` as in ``print_full``."""
    print_full(WholeTable(sheet), sheet.notes, file, wide=wide)


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The tables of one benchmark.

    name: the benchmark's name. title: the title of its page, to which the date is added. source: "measured",
    "simulated" or "rehearsed". introduction: paragraphs of the page above the tables. notes: lines below all tables;
    a table may have notes of its own. data: what JSON holds, by name: the rows themselves, with all fields; by default
    the tables.
    """

    name: str
    title: str
    source: str
    sheets: Sequence[Sheet]
    notes: Sequence[str] = ()
    introduction: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandOutput:
    """The output that the options --out, --json, --quiet and --wide of a command ask for."""

    folder: Path | None = None
    as_json: bool = False
    quiet: bool = False
    wide: bool = False

    def files(self, report: Report) -> dict[str, Path]:
        """Creates the folder, and returns the paths of its files for ``write``; none without a folder."""
        if self.folder is None:
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = report.name.replace(" ", "_")
        return {"page": self.folder / f"{stem}.md", "json_path": self.folder / f"{stem}.json"}

    def print_written(self, names: Iterable[str]) -> None:
        """Says which files of the folder were written, below the results."""
        print(f"Written to {self.folder}: {', '.join(names)}", file=sys.stderr if self.as_json else sys.stdout)


AS_TABLES = CommandOutput()


def publish(report: Report, output: CommandOutput = AS_TABLES) -> None:
    """Prints the tables, or the JSON instead. With a folder, it writes both there first, because the reader of a pipe
    may stop before the end.
    """
    files = {}
    try:
        files = output.files(report)
        write(report, **files)
    # Results are not lost with a disk that is full.
    finally:
        if output.as_json:
            print(to_json(report), end="")
        else:
            for sheet in filled(report):
                print_sheet(sheet, wide=output.wide)
            _print_notes(_window(), report.notes)
    if files:
        output.print_written(path.name for path in files.values())


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
    tables = [{"title": sheet.title, "rows": sheet.rows, "notes": sheet.notes} for sheet in filled(report)]
    return json.dumps({**head, **plain(report.data or {"tables": tables})}, indent=1) + "\n"


def filled(report: Report) -> list[Sheet]:
    """Returns the tables that have rows."""
    return [sheet for sheet in report.sheets if sheet.rows]


def _listed(notes: Sequence[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)
