"""Pages of HTML in one file that needs no other, for light and dark: their parts, and the page of a watched training.

S steps, B bins of steps, L layers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D

from moesys.display import counted, html_table, listed, printable
from moesys.lab.runs.watched_run import NEWEST_STEPS, FloatArray, WatchedRun
from moesys.lab.show.figures import COUNTS, OKABE_ITO, STYLE, TimelinePanel, draw_timelines, placed_rows, short, style
from moesys.lab.show.sheets import Sheet, rows_of, written_columns
from moesys.load import IntArray

# The colour of texts and axes in figures. The page replaces it by its own colour of text, and blue by its own blue.
_INK = "#010203"
PAGE_STYLE: dict[Any, Any] = STYLE | {
    "savefig.transparent": True,
    "grid.alpha": 0.35,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _INK
    ),
}
# Sizes in inches, and the least and the most pixels per point of a figure: below the least its texts are illegible.
_WIDTH, _CURVE_HEIGHT, _LEAST_HEIGHT = 9.6, 2.2, 1.7
_LEAST_SCALE, _MOST_SCALE = 1.04, 1.5
# Above this quantile of its values a heat map has one colour, or a single peak would leave all others alike. Times of
# steps are drawn up to there, or the warm-up would flatten them.
_CAP = 0.98
_MOST_BINS, _MOST_DOTS, _MOST_EVENTS, _MOST_SPANS = 160, 60, 200, 3000
_DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))


# --- parts of pages ---------------------------------------------------------------------------------------------------


def page(title: str, parts: Sequence[str]) -> str:
    """Returns the whole file. ``parts`` are its body, in HTML, whose control characters are escaped."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    lines = ["<!DOCTYPE html>", f'<html lang="en"><head>{head}<style>\n{css}</style></head>', "<body>"]
    return printable("\n".join([*lines, *parts, "</body></html>", ""]), keep="\n\t")


def facts(of: dict[str, str]) -> str:
    """Returns names and facts, beside one another as far as there is room."""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in of.items() if fact)
    return f"<dl>{''.join(items)}</dl>"


def section(title: str, content: str, note: str = "") -> str:
    """Returns a part of a page: a heading, a note if there is one, and content in HTML."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{below}{content}</section>"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (), links: Sequence[str] = ()
) -> str:
    """Returns a table in HTML. ``left``: the columns that are aligned on the left.
    ``links``: as in ``html_table``.
    """
    return html_table(columns, rows, [' class="left"' * (index in left) for index in range(len(columns))], links=links)


def sheet_section(sheet: Sheet) -> str:
    """Returns a table with its title and its notes; the best rows are bold, unclear ones grey."""
    columns = written_columns(sheet)
    marks = [' class="left"' * (column.align == "left") for column in columns]
    styles = dict.fromkeys(sheet.unclear, "unclear") | dict.fromkeys(sheet.best, "best")
    drawn = html_table([column.header for column in columns], rows_of(columns), marks, styles=styles)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in sheet.notes)
    return section(sheet.title, drawn + notes)


class Hint(NamedTuple):
    """A rectangle of a figure's first axes, in the units of its data, and the text that the pointer shows on it."""

    x: tuple[float, float]
    y: tuple[float, float]
    text: str


def inline_svg(figure: Figure, hints: Iterable[Hint] = ()) -> str:
    """Returns a figure drawn with ``PAGE_STYLE`` as part of a page: equal figures give equal bytes, and nothing in it
    refers to other files.
    """
    text = io.StringIO()
    with style(PAGE_STYLE):
        figure.savefig(text, format="svg", dpi=144, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg.replace(_INK, "currentColor").replace(OKABE_ITO[0].lower(), "var(--blue)")
    head, end, _ = svg[svg.index("<svg") :].rpartition("</svg>")
    points = 72 * figure.get_figwidth()
    size = f'style="min-width: {_LEAST_SCALE * points:.0f}px; max-width: {_MOST_SCALE * points:.0f}px"'
    head = head.replace("<svg", f"<svg {size}", 1)
    return f"<figure>{head}{''.join(_hint_rectangles(figure, hints))}{end}</figure>"


def _hint_rectangles(figure: Figure, hints: Iterable[Hint]) -> Iterator[str]:
    width, height = 72 * figure.get_size_inches()
    to_page = figure.axes[0].transData + figure.transFigure.inverted()
    to_page += Affine2D().scale(width, -height).translate(0, height)
    for hint in hints:
        (x0, x1), (y0, y1) = np.sort(to_page.transform(np.transpose([hint.x, hint.y])), axis=0).T
        place = f'x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
        yield f'<rect class="hint" {place}><title>{escape(hint.text)}</title></rect>'


# --- the page of a watched training -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of consecutive steps, so that a hundred thousand steps fit on a page. ``first_B``: where each begins."""

    steps_S: IntArray
    first_B: IntArray

    @classmethod
    def of(cls, steps_S: IntArray) -> Bins:
        """Returns at most ``_MOST_BINS`` bins, whose lengths differ by at most one."""
        num_bins = min(_MOST_BINS, len(steps_S))
        return cls(steps_S, np.arange(num_bins) * len(steps_S) // num_bins)

    @property
    def single(self) -> bool:
        """True if every step has a bin of its own."""
        return len(self.first_B) == len(self.steps_S)

    @property
    def edges(self) -> IntArray:
        """The first step of each bin, and the one after the last."""
        return np.append(self.steps_S[self.first_B], self.steps_S[-1] + 1)

    @property
    def labels(self) -> list[str]:
        """The name of each bin, such as ``step 7`` or ``steps 11–20``."""
        last_B = np.append(self.first_B[1:], len(self.steps_S)) - 1
        ends = zip(self.steps_S[self.first_B].tolist(), self.steps_S[last_B].tolist(), strict=True)
        return [f"step {first}" if first == last else f"steps {first}–{last}" for first, last in ends]

    def mean(self, values: FloatArray) -> FloatArray:
        """Returns the mean of each bin, along axis 0, of values that are finite."""
        counts = np.add.reduceat(np.isfinite(values).astype(float), self.first_B)
        sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), self.first_B)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def range(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the least and the largest finite value of each bin."""
        finite = np.where(np.isfinite(values), values, np.nan)
        return np.fmin.reduceat(finite, self.first_B), np.fmax.reduceat(finite, self.first_B)


def watch_page(run: WatchedRun) -> str:
    """Returns the page of a watched training: its numbers over steps, by layer, and its events."""
    bins = Bins.of(run.steps_S)
    shape = f"{counted(run.num_ranks, 'rank')}, {counted(len(run.layers), 'MoE layer')}"
    title = f"MEASURED: {run.folder.resolve().name}, {shape}"
    parts = [f"<h1>{escape(title)}</h1>", _facts(run)]
    first = sorted(run.numbers, key=lambda name: (name != "loss", name))
    for name in first:
        parts.append(section(as_title(name), curves(bins, {as_title(name): run.numbers[name]}, as_title(name))))
    parts += _loads(run, bins)
    parts.append(section("By layer", _layer_table(run), _LAYER_NOTE))
    parts += _times(run, bins)
    parts.append(section("Events", _events(run), _EVENTS_NOTE))
    return page(run.folder.resolve().name, parts)


def _facts(run: WatchedRun) -> str:
    ended = datetime.fromtimestamp(run.time_s_S[-1], UTC)
    losses = run.numbers.get("loss", np.zeros(0))
    losses = losses[np.isfinite(losses)]
    found = {
        "steps written": f"{len(run.steps_S):,}, from {run.steps_S[0]:,} to {run.steps_S[-1]:,}",
        "newest step (UTC)": f"{ended:%Y-%m-%d %H:%M:%S}",
        "ranks": str(run.num_ranks),
        "MoE layers": str(len(run.layers)),
        "newest loss": _number(losses[-1]) if len(losses) else "none written",
        "load max/mean, median": _number(_median(run.of_layers["load_p50"])),
        "step, median ms": _number(_median(run.step_ms_S)),
        "events": str(len(run.events)),
    }
    return facts(found)


def _loads(run: WatchedRun, bins: Bins) -> list[str]:
    if not run.layers:
        return []
    rows = [f"layer {layer}" for layer in run.layers]
    note = (
        "The busiest rank's tokens over the mean: 1 is balanced. A row is a layer, a cell the median of a step's "
        "micro-batches" + ("." if bins.single else ", a mean over its steps.")
    )
    drawn = heat_map(
        bins.mean(run.of_layers["load_p50"]).T, rows, (bins.edges, bins.labels), (1.0, 1.2), ("step", "load max/mean")
    )
    parts = [section("Load by layer over steps", drawn, note)]
    over_layers = {
        "p50, mean over layers": _of_steps(np.nanmean, run.of_layers["load_p50"]),
        "p95, worst layer": _of_steps(np.nanmax, run.of_layers["load_p95"]),
    }
    parts.append(section("Load over steps", curves(bins, over_layers, "load max/mean")))
    if run.tokens_E:
        note = (
            f"Tokens over the layer's mean, in the newest {min(NEWEST_STEPS, len(run.steps_S))} steps; dark means many."
        )
        parts.append(section("Tokens of experts by layer", token_map(run.tokens_E), note))
    return parts


_LAYER_NOTE = (
    "Load: the busiest rank's tokens over the mean. p50 is the median over steps of the median of a step's "
    "micro-batches, p95 the 95th percentile over steps of theirs. The others are means over steps; milliseconds are "
    "means over ranks too."
)


_EVENTS_NOTE = (
    "Departures from the plan, from which on bits are not those of an undisturbed run; and the first layer of each "
    "rank with a value that is not finite."
)


def _layer_table(run: WatchedRun) -> str:
    columns = {
        "layer": [str(layer) for layer in run.layers],
        "load p50": _by_layer(run.of_layers["load_p50"], np.median),
        "load p95": _by_layer(run.of_layers["load_p95"], lambda values: np.quantile(values, 0.95)),
        "worst load": _by_layer(run.of_layers["load_max"], np.max),
        "experts without tokens": _by_layer(run.of_layers["experts_without_tokens"], np.mean),
        "experts without tokens, most": _by_layer(run.of_layers["experts_without_tokens"], np.max),
        "exposed ms": _by_layer(run.of_layers["exposed_ms"], np.mean),
        "exposed ms, worst rank": _by_layer(run.of_layers["worst_exposed_ms"], np.mean),
        "planning ms": _by_layer(run.of_layers["plan_ms"], np.mean),
        "restored MiB, all ranks": _by_layer(run.of_layers["restored_mib"], np.mean),
    }
    return table(list(columns), zip(*columns.values(), strict=True))


def _times(run: WatchedRun, bins: Bins) -> list[str]:
    parts = [section("Step time", curves(bins, {"step": run.step_ms_S}, "ms", capped=True))]
    if run.layers:
        exposed = {
            "mean of ranks": _of_steps(np.nansum, run.of_layers["exposed_ms"]),
            "worst rank of each layer": _of_steps(np.nansum, run.of_layers["worst_exposed_ms"]),
        }
        note = "A rank blocked by communication, added up over layers."
        parts.append(section("Exposed communication", curves(bins, exposed, "ms per step", capped=True), note))
        restored = {"restored": _of_steps(np.nansum, run.of_layers["restored_mib"])}
        note = "Received to have experts, over layers and ranks."
        parts.append(section("Restored experts", curves(bins, restored, "MiB per step"), note))
    return parts


def _events(run: WatchedRun) -> str:
    if not run.events:
        return '<p class="none">none</p>'
    rows = [(str(step), str(e.layer), str(e.micro_batch), e.what) for step, e in reversed(run.events[-_MOST_EVENTS:])]
    left_out = len(run.events) - len(rows)
    note = f'<p class="note">The newest {len(rows)}; {left_out} before them are not shown.</p>' if left_out else ""
    return note + table(["step", "layer", "micro-batch", "what"], rows, left=[3])


# --- figures of the page ----------------------------------------------------------------------------------------------


def curves(bins: Bins, values_S: dict[str, FloatArray], unit: str, *, capped: bool = False) -> str:
    """Draws curves by their names: means over bins, with a band from the least to the largest step if a bin has
    several. Steps without a finite value are left out. Curves that are all one value become a line of text.

    capped: whether the few largest values may lie above the figure, which a note below it says then.
    """
    known = np.concatenate([values[np.isfinite(values)] for values in values_S.values()])
    if not len(known):
        return '<p class="none">no finite number was written</p>'
    written_S = bins.steps_S[np.any([np.isfinite(values) for values in values_S.values()], axis=0)]
    if known.min() == known.max() and bins.edges[-1] - bins.edges[0] > 1:
        where = "in every step" if len(written_S) == len(bins.steps_S) else f"at {listed('step', written_S.tolist())}"
        return f'<p class="none">{escape(unit)}: {_number(known[0])} {where}</p>'
    top = float(np.quantile(known, _CAP))
    note = ""
    at_B, edges, texts = bins.mean(bins.steps_S.astype(float)), bins.edges.tolist(), [list[str]() for _ in bins.labels]
    with style(PAGE_STYLE):
        figure = Figure(figsize=(_WIDTH, _CURVE_HEIGHT), layout="constrained")
        axes = figure.subplots()
        colours = cycle(OKABE_ITO[place] for place in (0, 3, 2, 4, 1, 5))
        # A curve that lies on an earlier one shows it between its dashes.
        for (name, values), colour, dashes in zip(values_S.items(), colours, cycle(_DASHES)):
            mean_B, (low_B, high_B) = bins.mean(values), bins.range(values)
            # A value between bins without one would not be seen, as lines end at nan.
            shown_B = np.isfinite(mean_B)
            if not bins.single:
                axes.fill_between(at_B[shown_B], low_B[shown_B], high_B[shown_B], color=colour, alpha=0.2, linewidth=0)
            marker = "." if shown_B.sum() <= _MOST_DOTS else ""
            axes.plot(
                at_B[shown_B],
                mean_B[shown_B],
                color=colour,
                linewidth=1.4,
                linestyle=dashes,
                marker=marker,
                label=short(name),
            )
            for place, words in enumerate(texts):
                ends = "" if bins.single else f" ({_number(low_B[place])} to {_number(high_B[place])})"
                words.append(f"{name} {_number(mean_B[place])}{ends}")
        axes.set(xlabel="step", ylabel=unit, xlim=(edges[0] - 0.5, edges[-1] - 0.5))
        axes.grid(axis="y", linewidth=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        if capped and known.max() > 1.5 * top:
            axes.set_ylim(0, 1.15 * top)
            above = counted(int((known > 1.15 * top).sum()), "value")
            note = f'<p class="note">{above} above {_number(1.15 * top)}, up to {_number(known.max())}, not shown.</p>'
        if len(values_S) > 1:
            figure.legend(loc="outside lower center", ncols=4)
    hints = [
        Hint((first - 0.5, after - 0.5), axes.get_ylim(), f"{label}: {'; '.join(words)}")
        for (first, after), label, words in zip(pairwise(edges), bins.labels, texts, strict=True)
    ]
    return inline_svg(figure, hints) + note


def heat_map(
    values_LB: FloatArray,
    rows: Sequence[str],
    columns: tuple[npt.NDArray[Any], Sequence[str]],
    scale: tuple[float, float],
    what: tuple[str, str],
) -> str:
    """Draws a cell for each row and column, coloured by its value; a nan leaves its cell empty.

    ``columns``: where they begin and the last one ends, and their names. ``scale``: the value of the first colour, and
    the least value that the last colour may have, so that small differences look small. ``what``: names the horizontal
    axis and the values. Dark cells have large values.
    """
    (floor, top), (edges, labels) = scale, columns
    known = values_LB[np.isfinite(values_LB)]
    if known.size > 1 and known.min() == known.max() and known.size == values_LB.size:
        return f'<p class="none">{escape(what[1])}: {_number(known[0])} in every cell</p>'
    if len(known):
        top = max(top, float(np.quantile(known, _CAP)))
    height = min(0.3 * len(rows), max(0.1 * len(rows), 5.0))
    every = math.ceil(len(rows) * 0.16 / height)
    with style(PAGE_STYLE):
        figure = Figure(figsize=(_WIDTH, max(height + 0.7, _LEAST_HEIGHT)), layout="constrained")
        axes = figure.subplots()
        shown_LB = np.ma.masked_invalid(values_LB)
        # The cells are pixels, because a path for each cell would be long.
        mesh = axes.pcolormesh(
            edges, np.arange(len(rows) + 1), shown_LB, cmap=COUNTS, vmin=floor, vmax=top, rasterized=True
        )
        axes.set(xlabel=what[0], ylim=(len(rows), 0))
        axes.set_yticks(np.arange(0, len(rows), every) + 0.5, rows[::every])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        beyond = "max" if len(known) and known.max() > top else "neither"
        bar = figure.colorbar(mesh, ax=axes, label=what[1], extend=beyond, pad=0.01, fraction=0.05)
        for steps in bar.ax.findobj(QuadMesh):
            steps.set_rasterized(True)
    ends = edges.tolist()
    hints = [
        Hint((ends[column], ends[column + 1]), (row, row + 1), f"{rows[row]}, {labels[column]}: {_number(value)}")
        for (row, column), value in np.ndenumerate(values_LB)
    ]
    return inline_svg(figure, hints)


def token_map(tokens_E: Mapping[int, IntArray]) -> str:
    """Draws the tokens of each expert, by layer, over the mean of the layer."""
    share_LE = np.full((len(tokens_E), max(map(len, tokens_E.values()))), np.nan)
    for row, of_layer_E in enumerate(tokens_E.values()):
        share_LE[row, : len(of_layer_E)] = of_layer_E / max(of_layer_E.mean(), 1e-300)
    experts = np.arange(share_LE.shape[1] + 1) - 0.5, [f"expert {expert}" for expert in range(share_LE.shape[1])]
    rows = [f"layer {layer}" for layer in tokens_E]
    return heat_map(share_LE, rows, experts, (0.0, 2.0), ("expert", "tokens / mean"))


def timelines(panels: Sequence[TimelinePanel], title: str) -> str:
    """Draws the timelines of strategies below one another, on one scale; the pointer shows what a bar is."""
    with style(PAGE_STYLE):
        figure = draw_timelines(panels, title=title)
    bars = [(at, bar) for at, row in placed_rows(panels) for bar in row.bars]
    hints = [
        Hint((bar.start_ms, bar.end_ms), (at - 0.4, at + 0.4), f"{bar.words}, {_number(bar.end_ms - bar.start_ms)} ms")
        for at, bar in bars[:_MOST_SPANS]
    ]
    return inline_svg(figure, hints)


def as_title(name: str) -> str:
    """Returns ``Grad norm`` for ``grad_norm``."""
    return name[:1].upper() + name[1:].replace("_", " ")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _by_layer(values_SL: FloatArray, reduce: Callable[[FloatArray], float]) -> list[str]:
    """Reduces over the steps in which a layer ran."""
    ran = (values_S[np.isfinite(values_S)] for values_S in values_SL.T)
    return [_number(float(reduce(values)) if len(values) else float("nan")) for values in ran]


def _of_steps(reduce: Callable[..., FloatArray], values_SL: FloatArray) -> FloatArray:
    """Reduces over layers; a step in which no layer ran gives nan."""
    reduced_S = np.full(len(values_SL), np.nan)
    ran_S = np.isfinite(values_SL).any(axis=1)
    reduced_S[ran_S] = reduce(values_SL[ran_S], axis=1)
    return reduced_S


def _median(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
