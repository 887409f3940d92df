"""Tables of results: a row is a dataclass whose annotations say what it shows; terminal and Markdown follow from it.

@dataclass(frozen=True)
class Sent:
    link: Annotated[str, Column("link")]
    sent_bytes: Annotated[int, Column("bytes", ",")]
    took: Annotated[Spread, Column("us", ".1f")]     # median [p20, p80]
    samples_ms: list[float]                          # no column: in JSON alone

    @property
    def gb_per_s(self) -> Annotated[float, Column("GB/s", ".2f", after="sent_bytes")]: ...

print(markdown_table(Sheet("MEASURED: links", rows)))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """How a field or a property of a row is shown; ``None`` and what a mapping lacks are empty cells.

    header: of a field that holds a mapping, which gets a column for each key, with ``{}`` where the key is to stand; ""
    for a property that stands in JSON alone.
    form: a format, or a function from the value to its words; a field may have several columns, each with its own.
    scale: what a number is multiplied by first, as 100 for per cent.
    after: of a property, the field or the property that it follows; the last without one.
    """

    header: str
    form: str | Callable[[Any], str] = ""
    scale: float = 1
    after: str = ""

    def words(self, value: Any) -> str:
        if value is None:
            return ""
        scaled = value if self.scale == 1 else self.scale * value
        return self.form(scaled) if callable(self.form) else format(scaled, self.form)


@dataclass(frozen=True)
class Sheet:
    """A table: ``rows`` are dataclasses of one class.

    group_by: the field at whose changes a line is left free. without: fields that this table of several does not show.
    """

    title: str
    rows: Sequence[Any]
    notes: Sequence[str] = ()
    group_by: str = ""
    without: Collection[str] = ()


@dataclass(frozen=True)
class WrittenColumn:
    """A column in words; ``is_text`` where no cell begins with a number."""

    header: str
    cells: tuple[str, ...]
    is_text: bool


def columns_of(row_class: type) -> dict[str, list[Column]]:
    """The columns that a class of rows declares, by field or property, in the order in which they are shown."""
    # By default functions in annotations would look their names up in the class.
    hints = get_type_hints(row_class, vars(sys.modules[row_class.__module__]), include_extras=True)
    found = {field.name: _declared(hints[field.name]) for field in fields(row_class)}
    order = list(found)
    for name, member in vars(row_class).items():
        if isinstance(member, property):
            found[name] = _declared(get_type_hints(member.fget, include_extras=True).get("return"))
            after = next((column.after for column in found[name]), "")
            order.insert(order.index(after) + 1 if after else len(order), name)
    return {name: found[name] for name in order if found[name]}


def written_columns(sheet: Sheet) -> list[WrittenColumn]:
    """All columns of a sheet but those in which no row has anything to say."""
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
                cells = tuple(map(column.words, of_rows))
                if header and any(cells):
                    written.append(WrittenColumn(header, cells, not any(map(_is_number, cells))))
    return written


def terminal_table(sheet: Sheet) -> Table:
    """For a terminal: text on the left, numbers on the right."""
    table = Table(title=Text(sheet.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    columns = written_columns(sheet)
    for column in columns:
        header = Text(column.header.replace(", ", ",\n"))
        table.add_column(header, justify="left" if column.is_text else "right", no_wrap=True)
    groups = [getattr(row, sheet.group_by) if sheet.group_by else None for row in sheet.rows]
    for place, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if place and groups[place] != groups[place - 1]:
            table.add_section()
        # Text, because in a string rich would take brackets for its markup.
        table.add_row(*map(Text, cells))
    return table


def markdown_table(sheet: Sheet) -> str:
    """A table of GitHub's Markdown, without a newline at the end."""
    columns = written_columns(sheet)
    lines = [[column.header for column in columns], ["---" if column.is_text else "---:" for column in columns]]
    lines += [list(map(_escaped, cells)) for cells in zip(*(column.cells for column in columns), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(value: Any) -> Any:
    """``value`` as JSON takes it: of a dataclass its fields, and its properties that are columns."""
    if is_dataclass(value) and not isinstance(value, type):
        names = dict.fromkeys([*(field.name for field in fields(value)), *columns_of(type(value))])
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    # A config of pydantic's, which a GPU's image need not have.
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _declared(annotation: Any) -> list[Column]:
    return [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Column)]


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps with a unit or a range behind it."""
    first = cell.partition(" ")[0].rstrip("%").replace(",", "")
    try:
        float(first)
    except ValueError:
        return False
    return " x " not in cell


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
