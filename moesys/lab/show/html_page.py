"""What pages of HTML are made of: one file that needs nothing else, for light and dark; sections and tables in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from matplotlib import colormaps
from matplotlib.colors import to_hex

from moesys.lab.show.svg import HEAT_LEVELS

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #d9dee4; --c0: #0072b2;
  --c1: #d55e00; --empty: #eceff2; }
body { font: 15px/1.45 system-ui, sans-serif; background: var(--paper); color: var(--ink); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; } .note, .legend, .none { color: var(--soft); font-size: .87rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-size: 1.05rem; overflow-wrap: anywhere; }
section { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto; font-size: 11px; }
svg text { fill: var(--soft); } text.x { text-anchor: middle; }
text.row { text-anchor: end; dominant-baseline: central; }
.grid line { stroke: var(--line); } .curve { fill: none; stroke-width: 1.6; } .band { opacity: .2; }
polyline.c0 { stroke: var(--c0); } polyline.c1 { stroke: var(--c1); }
.band.c0, circle.c0 { fill: var(--c0); } .band.c1, circle.c1 { fill: var(--c1); }
.hit { fill: transparent; } .hit:hover { fill: var(--soft); fill-opacity: .15; }
.cell:hover, .span:hover { fill-opacity: .6; } .empty { fill: var(--empty); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: center; padding-left: 7.5%; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; } .ramp i { margin: 0; }
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: normal; vertical-align: bottom; } .left { text-align: left; }
"""
_DARK = """
:root { --paper: #14181d; --ink: #e6e9ec; --soft: #9aa4ae; --line: #2c333b; --c0: #56b4e9; --c1: #e69f00;
  --empty: #1e242b; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Returns the whole file. ``parts`` are its body, in HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    lines = ["<!DOCTYPE html>", f'<html lang="en"><head>{head}<style>{_style()}</style></head>', "<body>"]
    return "\n".join([*lines, *parts, "</body></html>", ""])


def _style() -> str:
    """High values are dark on light paper, and light on dark."""
    cividis = [to_hex(colormaps["cividis"](level / (HEAT_LEVELS - 1))) for level in range(HEAT_LEVELS)]
    light, dark = (
        "".join(f".h{level} {{ fill: {colour}; background: {colour}; }}" for level, colour in enumerate(ramp))
        for ramp in (reversed(cividis), cividis)
    )
    return f"{_STYLE}{light}\n@media (prefers-color-scheme: dark) {{ {_DARK}\n{dark} }}"


def section(title: str, content: str, note: str = "") -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{content}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str, left: Collection[str] = ()) -> str:
    """``left``: the columns that are text."""
    marks = [' class="left"' if column in left else "" for column in columns]
    head = "".join(f"<th{mark}>{escape(column)}</th>" for mark, column in zip(marks, columns, strict=True))
    lines = ("".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
