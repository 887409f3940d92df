"""Display: how results show themselves in an interactive session, as one line, a table, HTML, a data frame or a plot;
and the words that messages and tables have in common.

matplotlib and pandas are imported only by the methods that need them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Values by the name of their column: sequences or arrays of one length.
Columns = Mapping[str, Any]

# The most characters of a line, and the most rows and columns of a table.
_MOST_CHARACTERS, _MOST_ROWS, _MOST_COLUMNS = 190, 20, 20
# Only the first numbers of longer lists are shown.
_MOST_NUMBERS = 12
# Characters that move the cursor, end a line or change the direction of what follows.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Display:
    """Base of results. A class says its facts in a few words and its values by column; its other forms follow."""

    def _facts(self) -> str:
        """Returns what identifies the object, in a few words: its sizes with their nouns, and its main number."""
        raise NotImplementedError

    def _columns(self) -> Columns:
        """Returns all values by column, one observation per row, for ``to_pandas``."""
        raise NotImplementedError

    def _shown(self) -> Columns:
        """Returns the table that people see, by default ``_columns``. Of a larger one they see the first part."""
        return self._columns()

    def to_pandas(self) -> pd.DataFrame:
        """Returns the values as a data frame, one observation per row. Raises ImportError without pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("to_pandas() needs pandas, which is not installed; run pip install pandas") from None
        return pd.DataFrame(dict(self._columns()))

    def __repr__(self) -> str:
        line = f"{type(self).__name__}: {printable(self._facts())}"
        return f"<{line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + '…'}>"

    def __str__(self) -> str:
        """Returns the line and the table below it, whose columns are aligned."""
        head, lefts, rows, more = _cells(self._shown())
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(row, widths, lefts, strict=True)
            )
            for row in (head, *rows)
        ]
        return "\n".join([repr(self), *(line.rstrip() for line in lines), *([more] if more else [])])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield console.render_str(str(self), markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Returns the line and the table as HTML that refers to nothing outside."""
        return html_part(repr(self)[1:-1], self._shown())


def by_column(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Columns:
    """Returns rows of values as columns of these names."""
    table = list(rows)
    return {name: [row[place] for row in table] for place, name in enumerate(names)}


def html_part(title: str, columns: Columns, notes: Sequence[str] = (), right: Collection[str] = ()) -> str:
    """Returns a table in HTML below its title, and its notes below the table. ``right``: columns of texts that are
    aligned on the right, as columns of numbers are.
    """
    head, lefts, rows, more = _cells(columns)
    sides = ["left" if left and name not in right else "right" for name, left in zip(head, lefts, strict=True)]
    table = html_table(head, rows, [f' style="text-align: {side}"' for side in sides])
    below = "".join(f"<p><small>{escape(note)}</small></p>" for note in (*([more] if more else []), *notes))
    return f"<div><p>{escape(title)}</p>{table}{below}</div>"


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    marks: Sequence[str],
    *,
    styles: Mapping[int, str] | None = None,
    links: Sequence[str] = (),
) -> str:
    """Returns a table in HTML. ``marks``: the attributes of the cells of each column. ``styles``: classes of rows.
    ``links``: the address that the first cell of each row links to.
    """

    def line(tag: str, cells: Sequence[str], link: str = "") -> str:
        texts = list(map(escape, cells))
        if link:
            texts[0] = f'<a href="{escape(link)}">{texts[0]}</a>'
        return "".join(f"<{tag}{mark}>{text}</{tag}>" for mark, text in zip(marks, texts, strict=True))

    classes = {row: f' class="{style}"' for row, style in (styles or {}).items()}
    rows = list(rows)
    linked = zip(rows, links or [""] * len(rows), strict=True)
    body = "\n".join(
        f"<tr{classes.get(row, '')}>{line('td', cells, link)}</tr>" for row, (cells, link) in enumerate(linked)
    )
    return f"<table><thead><tr>{line('th', head)}</tr></thead><tbody>\n{body}\n</tbody></table>"


def named(path: str) -> Any:
    """Returns what ``module:name`` names, which is imported now. Results name in this way what draws them, because it
    is above them in the order of imports.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _cells(columns: Columns) -> tuple[list[str], list[bool], list[list[str]], str]:
    """Returns the headers, which columns are aligned on the left, the rows, and what is left out, in words."""
    some = list(columns.items())[:_MOST_COLUMNS]
    num_rows = len(some[0][1]) if some else 0
    parts = [list(values[:_MOST_ROWS]) for _, values in some]
    lefts = [any(isinstance(value, str) for value in part) for part in parts]
    rows = [[_cell(value) for value in row] for row in zip(*parts, strict=True)]
    rest = [
        f"{shown} of {number:,} {noun}"
        for shown, number, noun in ((len(rows), num_rows, "rows"), (len(some), len(columns), "columns"))
        if number > shown
    ]
    return [name for name, _ in some], lefts, rows, ", ".join(rest)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, bool) or not isinstance(value, Real):
        return printable(str(value))
    if isinstance(value, Integral):
        return f"{value:,}"
    return f"{float(value):,.0f}" if 1000 <= abs(float(value)) < 1e15 else f"{float(value):.4g}"


# --- words ------------------------------------------------------------------------------------------------------------


@cache
def version_of(package: str, absent: str = "") -> str:
    """Returns the version of an installed package, ``absent`` of others."""
    try:
        return version(package)
    except PackageNotFoundError:
        return absent


def counted(number: int, noun: str) -> str:
    """Returns the number and its noun, singular or plural: ``1 rank``, ``2,048 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Returns ``ranks 0, 3``: the first numbers, and how many more there are; ``none`` if there are none."""
    if not numbers:
        return "none"
    more = f" and {len(numbers) - _MOST_NUMBERS} more" if len(numbers) > _MOST_NUMBERS else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_MOST_NUMBERS]))}{more}"


def printable(text: str, keep: str = "") -> str:
    """Returns the text with escapes, such as ``\\x1b``, in place of control characters that are not in ``keep``.

    Otherwise text from files of others could move the cursor, or look like lines of moesys.
    """
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


# --- plots ------------------------------------------------------------------------------------------------------------


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Returns the given axes, or those of a new figure of pyplot, which notebooks show; ``size`` in inches."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def pyplot_axes(drawn_by: str, *args: Any) -> Axes:
    """Returns the axes of a new figure of pyplot that a function of the lab draws, which ``drawn_by`` names."""
    import matplotlib.pyplot as plt

    # It loads the backend, which a notebook's makes interactive: the end of the context would undo that.
    plt.draw_if_interactive()
    with plt.rc_context(named("moesys.lab.show.figures:STYLE")):
        axes: Axes = named(drawn_by)(*args, new=plt.figure).axes[0]
    return axes


def draw_map(tokens_RE: Any, title: str, label: str, ax: Axes | None) -> Axes:
    """Draws counts [rank, expert] as a map: the more, the darker, and grey if there are none."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    num_ranks, num_experts = tokens_RE.shape
    size = (min(max(0.2 * num_experts, 4.0), 12.0), min(max(0.3 * num_ranks, 2.4), 8.0))
    axes = _axes(ax, size)
    axes.set_facecolor("#dddddd")
    image = axes.imshow(np.ma.masked_equal(tokens_RE, 0), cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=label, format="{x:,.0f}")
    axes.set(xlabel="expert", ylabel="rank")
    axes.set_title(title, loc="left", parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return axes


def draw_bars(value_of: Mapping[str, float], title: str, label: str, ax: Axes | None) -> Axes:
    """Draws a bar for each name that has a value, from top to bottom, and its share of the sum."""
    shown = {name.replace("_", " "): value for name, value in value_of.items() if value}
    axes = _axes(ax, (6.4, 0.9 + 0.3 * len(shown)))
    bars = axes.barh(list(shown), list(shown.values()), color="#0072B2")
    axes.bar_label(bars, [f" {value / sum(shown.values()):.1%}" for value in shown.values()])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", parse_math=False)
    return axes
