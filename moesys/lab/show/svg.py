"""Draws figures of a page as SVG text: curves and heat maps over binned steps, spans of ranks.

Colours are classes, which the page's style sheet has in light and dark. Whatever is pointed at says what it is.
B bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from moesys.lab.show.kind_colours import kind_colours
from moesys.lab.show.step_bins import Axis, Bins, FloatArray
from moesys.timeline import Timeline

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 72, 24, 8, 40
INNER = WIDTH - LEFT - RIGHT
HEAT_LEVELS = 16
# Above this quantile of its values a heat map has one colour, or a single peak would leave all others alike.
_HEAT_CAP = 0.98
_CURVE_HEIGHT, _LANE_HEIGHT = 180, 16
_MOST_SPANS = 3000
# Dots are told apart up to so many.
_MOST_DOTS = 60


def number(value: float) -> str:
    """Returns four digits of a number."""
    return f"{value:.4g}" if math.isfinite(value) else "none"


def curves(bins: Bins, values_S: Mapping[str, FloatArray], unit: str) -> str:
    """Draws one or two curves by their names: means over bins, with a band from the least to the largest step where a
    bin has several. ``unit``: what the axis says. A nan leaves its place out.
    """
    known = np.concatenate(list(values_S.values()))
    known = known[np.isfinite(known)]
    if not len(known):
        return '<p class="none">no finite number was written</p>'
    ticks = _ticks(float(known.min()), float(known.max()))
    bottom, width = TOP + _CURVE_HEIGHT, INNER / len(bins)
    slope = _CURVE_HEIGHT / (ticks[-1] - ticks[0])

    def point(b: int, value: float) -> str:
        return f"{LEFT + (b + 0.5) * width:.1f},{bottom - (value - ticks[0]) * slope:.1f}"

    lines = "".join(_y_tick(tick, bottom - (tick - ticks[0]) * slope) for tick in ticks)
    axis = bins.axis()
    parts = [f'<g class="grid">{lines}</g>', _x_axis(axis, bottom), _y_title(unit, TOP + _CURVE_HEIGHT / 2)]
    said: list[list[str]] = [[] for _ in axis.labels]
    for index, (name, values) in enumerate(values_S.items()):
        mean_B, low_B, high_B = bins.mean(values), bins.low(values), bins.high(values)
        drawn = np.flatnonzero(np.isfinite(mean_B)).tolist()
        if not bins.single:
            edge = [point(b, high_B[b]) for b in drawn] + [point(b, low_B[b]) for b in reversed(drawn)]
            parts.append(f'<polygon class="band c{index}" points="{" ".join(edge)}"/>')
        points = [point(b, mean_B[b]) for b in drawn]
        parts.append(f'<polyline class="curve c{index}" points="{" ".join(points)}"/>')
        if len(points) <= _MOST_DOTS:
            places = (place.split(",") for place in points)
            parts += [f'<circle class="c{index}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places]
        for b, words in enumerate(said):
            ends = "" if bins.single else f" ({number(low_B[b])} to {number(high_B[b])})"
            words.append(f"{name} {number(mean_B[b])}{ends}")
    for b, (label, words) in enumerate(zip(axis.labels, said, strict=True)):
        parts.append(_rect("hit", LEFT + b * width, TOP, width, _CURVE_HEIGHT, f"{label}: {'; '.join(words)}"))
    keys = [(f'class="c{index}"', name) for index, name in enumerate(values_S)]
    drawing = _svg(bottom + BOTTOM, f"{', '.join(values_S)} over steps", parts)
    return drawing + (_legend(keys) if len(keys) > 1 else "")


def heat_map(values_LB: FloatArray, rows: Sequence[str], axis: Axis, scale: tuple[float, float], what: str) -> str:
    """Draws a cell for each row and column, coloured by value; a nan is a cell that had nothing to say.

    ``rows``: what each is called, as ``axis`` has it of columns. ``scale``: the value of the first colour, and the
    least one that the last may have, so that small differences look small. ``what``: a value is.
    """
    row_height = min(22.0, max(8.0, 480 / len(rows)))
    bottom = TOP + len(rows) * row_height
    known = values_LB[np.isfinite(values_LB)]
    floor, top = scale
    if len(known):
        top = max(top, float(np.quantile(known, _HEAT_CAP)))
    level_LB = np.clip((np.nan_to_num(values_LB) - floor) / (top - floor), 0, 1) * (HEAT_LEVELS - 1)
    cells = []
    for row, name in enumerate(rows):
        for column, label in enumerate(axis.labels):
            value = values_LB[row, column]
            colour = f"h{round(level_LB[row, column])}" if math.isfinite(value) else "empty"
            cells.append(_rect(f"cell {colour}", column, row, 1, 1, f"{name}, {label}: {number(value)}"))
    placed = f"translate({LEFT},{TOP}) scale({INNER / len(axis.labels):.6g},{row_height:.6g})"
    parts = [f'<g transform="{placed}" shape-rendering="crispEdges">{"".join(cells)}</g>', _x_axis(axis, bottom)]
    every = math.ceil(13 / row_height)
    for row in range(0, len(rows), every):
        y = TOP + (row + 0.5) * row_height
        parts.append(f'<text class="row" x="{LEFT - 6}" y="{y:.1f}">{escape(rows[row])}</text>')
    is_capped = len(known) > 0 and float(known.max()) > top
    return _svg(bottom + BOTTOM, what, parts) + _heat_legend(floor, top, is_capped, what)


def timeline(spans: Timeline) -> tuple[str, int]:
    """Draws the newest spans, a row for each lane of each rank; and returns how many older ones are left out."""
    newest = sorted(spans.spans, key=lambda span: span.start_us)[-_MOST_SPANS:]
    rows = sorted({(span.rank, span.lane) for span in newest})
    kinds = sorted({span.kind for span in newest})
    colours = kind_colours(kinds)
    zero_us, end_us = newest[0].start_us, max(span.end_us for span in newest)
    length_us = max(end_us - zero_us, 1e-3)
    ticks_ms = [tick for tick in _ticks(0, length_us / 1000, 8) if tick <= length_us / 1000]
    per_us, bottom = INNER / length_us, TOP + len(rows) * _LANE_HEIGHT
    parts = []
    for tick in ticks_ms:
        x = LEFT + 1000 * tick * per_us
        parts.append(f'<g class="grid"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/></g>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 16}">{number(tick)}</text>')
    parts.append(f'<text class="x" x="{LEFT + INNER / 2}" y="{bottom + 34}">ms</text>')
    row_of = {row: index for index, row in enumerate(rows)}
    for (rank, lane), row in row_of.items():
        y = TOP + (row + 0.5) * _LANE_HEIGHT
        parts.append(f'<text class="row" x="{LEFT - 6}" y="{y:.1f}">{rank} {escape(lane)}</text>')
    for span in newest:
        y, x = TOP + row_of[span.rank, span.lane] * _LANE_HEIGHT + 1, LEFT + (span.start_us - zero_us) * per_us
        said = (
            f"rank {span.rank}, {span.lane}: {span.kind} {span.detail}".rstrip()
            + f", {number(span.duration_us / 1000)} ms"
        )
        style = f' style="fill:{colours[span.kind]}"'
        parts.append(_rect("span", x, y, max(span.duration_us * per_us, 0.5), _LANE_HEIGHT - 2, said, style))
    keys = [(f'style="background:{colour}"', kind.replace("_", " ")) for kind, colour in colours.items()]
    drawn = _svg(bottom + BOTTOM, "spans of ranks over time", parts) + _legend(keys)
    return drawn, len(spans.spans) - len(newest)


def _svg(height: float, what: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(what)}">'
    return "\n".join([head, *parts, "</svg>"])


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str, style: str = "") -> str:
    place = f'x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"'
    return f'<rect class="{kind}" {place}{style}><title>{escape(title)}</title></rect>'


def _ticks(low: float, high: float, steps: int = 4) -> list[float]:
    """Returns round numbers around the range, about so many steps apart."""
    if low == high == 0:
        high = 1.0
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [tick * step for tick in range(first, last + 1)]


def _y_tick(tick: float, y: float) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="row" x="{LEFT - 6}" y="{y:.1f}">{number(tick)}</text>'


def _y_title(text: str, y: float) -> str:
    return f'<text class="x" transform="translate(14,{y:.1f}) rotate(-90)">{escape(text)}</text>'


def _x_axis(axis: Axis, bottom: float) -> str:
    """Below their columns the round numbers among those of ``axis``, or all if they are few, and what they are."""
    numbers = axis.numbers
    few = len(numbers) < 10
    shown = (
        numbers if few else [tick for tick in _ticks(numbers[0], numbers[-1], 8) if numbers[0] <= tick <= numbers[-1]]
    )
    width = INNER / len(numbers)
    texts = []
    for tick in shown:
        column = int(np.searchsorted(numbers, tick, side="right")) - 1
        x = LEFT + (column + 0.5) * width
        texts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 16:.1f}">{round(tick)}</text>')
    texts.append(f'<text class="x" x="{LEFT + INNER / 2}" y="{bottom + 34:.1f}">{axis.name}</text>')
    return "".join(texts)


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    """``keys``: each a mark's attributes, and what it stands for."""
    marks = "".join(f"<span><i {mark}></i>{escape(name)}</span>" for mark, name in keys)
    return f'<p class="legend">{marks}</p>'


def _heat_legend(floor: float, top: float, is_capped: bool, what: str) -> str:
    ramp = "".join(f'<i class="h{level}"></i>' for level in range(HEAT_LEVELS))
    said = [number(floor), f"{'≥ ' if is_capped else ''}{number(top)}", escape(what)]
    low, high, name = (f"<span>{words}</span>" for words in said)
    return f'<p class="legend">{low}<span class="ramp">{ramp}</span>{high}{name}</p>'
