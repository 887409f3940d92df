"""Figures: timelines on one scale, and speed-ups with intervals. It also writes timelines for Perfetto.

A ``draw_*`` function returns a figure in matplotlib's current style. Every title says ``MEASURED`` or ``SIMULATED``.
The same data gives the same bytes of SVG. Colours are told apart by colour-blind eyes (Okabe and Ito's palette); in
maps, dark means many.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from moesys.config.base import python_value
from moesys.files import write_whole
from moesys.lab.runs.comparison import SPEED, Comparison
from moesys.lab.runs.statistics import PairedRatio, seed_ratios
from moesys.lab.show.comparisons import ratio_words
from moesys.lab.show.sheets import figure as digits
from moesys.simulator.simulation import PathPart, Simulation
from moesys.timeline import Source, Span, Timeline

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "moesys",
    "svg.fonttype": "none",
    # matplotlib must not read names of strategies as formulas.
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
GREY = "#8A8A8A"
# Colours go from light to dark; cells without a value are grey.
COUNTS = mpl.colormaps["Blues"].with_extremes(bad="#CCCCCC")
# The most frequent kinds of spans have one colour in all figures; other kinds take the spare ones.
_KIND_COLOURS = {
    "forward": "#BDD7E7",
    "recomputation": "#FDD0A2",
    "backward": "#9E9AC8",
    "idle": "#80808055",
    "other": "#B8A37E",
    "experts": "#0072B2",
    "weight_gradients": "#56B4E9",
    "dispatch": "#E69F00",
    "combine": "#D55E00",
    "restore": "#009E73",
    "reshard": "#CC79A7",
    "counts": "#F0E442",
}
_SPARE_COLOURS = ("#999999", "#444444", "#7B4173", "#8C6D31", "#637939", "#9C9EDE")
# A shorter part of the time axis is narrower than the white lines that part spans.
_SHORT_SPAN_SHARE = 0.002
# The part of the time axis that a letter in a bar takes.
_LETTER_SHARE = 0.008
_LEGEND_COLUMNS = 7
_PASS = re.compile(r"layer (\d+) (forward|recomputation|backward)(?: \d+)?(.*)")
# The width in inches is that of a telephone; long names need more for each character.
_FOREST_WIDTH, _FOREST_ROW, _CHARACTER = 4.7, 0.36, 0.075
# A wider range of ratios has a logarithmic axis.
_LINEAR_RANGE = 4.0


@contextmanager
def style(chosen: Mapping[Any, Any] = STYLE) -> Iterator[None]:
    """Draws and writes figures in a style, without warnings of characters that matplotlib's font lacks: SVG has texts
    as text, which whoever shows it draws with fonts of its own.
    """
    with mpl.rc_context(dict(chosen)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from|Matplotlib currently does not support")
        yield


def short(name: str) -> str:
    """Returns at most 60 characters of a name, or the figure would have no room. Before an underscore, for which
    matplotlib leaves a name out of legends, stands a space of no width.
    """
    name = name if len(name) <= 60 else f"{name[:59]}…"
    return f"\u200b{name}" if name.startswith("_") else name


# --- timelines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineBar:
    """A bar of a timeline. words: what the pointer shows. on_path: whether it lies on the critical path."""

    start_ms: float
    end_ms: float
    kind: str
    words: str
    on_path: bool = False


@dataclass(frozen=True)
class TimelineRow:
    """Bars on one line. label: on the left. owner: the rank, or the heading of a strategy's rows, which has no bars."""

    label: str
    owner: str
    bars: tuple[TimelineBar, ...] = ()


@dataclass(frozen=True)
class TimelinePanel:
    """The timeline of one strategy, of some of its ranks, with its critical path if that is known."""

    name: str
    timeline: Timeline
    ranks: tuple[int, ...]
    critical_path: Sequence[PathPart] = ()

    @property
    def spans(self) -> list[Span]:
        """The spans of the ranks, whose times begin with the step."""
        spans = self.timeline.only(self.ranks).spans
        if self.timeline.source == "simulated":
            return list(spans)
        zero_us = min((span.start_us for span in spans), default=0.0)
        times = ((span.start_us - zero_us, span.end_us - zero_us) for span in spans)
        return [
            Span(span.rank, span.lane, *ends, span.kind, span.detail) for span, ends in zip(spans, times, strict=True)
        ]

    def rows(self) -> list[TimelineRow]:
        """Returns a heading, the passes of layers on the first rank, the critical path, and the lanes of each rank,
        where what is not computed is idle.
        """
        spans, length_ms = self.spans, self.timeline.length_us / 1e3
        rows = [TimelineRow("", f"{short(self.name)}: {digits(length_ms)} ms")]
        if passes := tuple(_passes(spans, self.ranks[0])):
            rows.append(TimelineRow("layers", f"rank {self.ranks[0]}", passes))
        if self.critical_path:
            rows.append(TimelineRow("critical path", "all ranks", tuple(_path_bars(self.critical_path))))
        on_path = {(part.rank if part.is_of_rank else None, part.kind, part.detail) for part in self.critical_path}
        # The lane of computation, then the others as they first appear in time.
        lanes = dict.fromkeys(["compute", *(span.lane for span in sorted(spans, key=lambda span: span.start_us))])
        for rank, lane in product(self.ranks, lanes):
            bars = [_bar(span, on_path) for span in spans if (span.rank, span.lane) == (rank, lane)]
            if lane == "compute" and bars:
                bars += _idle(bars, rank, length_ms)
            if bars:
                rows.append(TimelineRow(lane.replace("_", " "), f"rank {rank}", tuple(bars)))
        return rows


def shown_ranks(of: Simulation, most: int) -> list[int]:
    """Returns the ranks that delay the step most, and others at even distances."""
    num_ranks = of.cluster.num_ranks
    if num_ranks <= most:
        return list(range(num_ranks))
    on_path = [part.rank for part in sorted(of.critical_path, key=lambda part: -part.seconds) if part.is_of_rank]
    evenly = np.linspace(0, num_ranks - 1, most).astype(int).tolist()
    return sorted(list(dict.fromkeys([*list(dict.fromkeys(on_path))[: most // 2], *evenly]))[:most])


def _bar(span: Span, on_path: set[tuple[int | None, str, str]]) -> TimelineBar:
    marked = any((rank, span.kind, span.detail) in on_path for rank in (span.rank, None))
    words = f"rank {span.rank}, {span.lane}: {span.kind} {span.detail}".rstrip()
    return TimelineBar(span.start_us / 1e3, span.end_us / 1e3, span.kind, words, marked)


def _passes(spans: Sequence[Span], rank: int) -> Iterator[TimelineBar]:
    ends: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        if span.rank == rank and span.lane in ("compute", "mega_kernel") and (found := _PASS.match(span.detail)):
            layer, way, rest = found.groups()
            ends.setdefault((way, f"layer {layer} {way}{rest}"), []).extend((span.start_us, span.end_us))
    for (way, words), times_us in ends.items():
        yield TimelineBar(min(times_us) / 1e3, max(times_us) / 1e3, way, words)


def _path_bars(path: Sequence[PathPart]) -> Iterator[TimelineBar]:
    end_ms = 0.0
    for part in path:
        start_ms, end_ms = end_ms, end_ms + 1e3 * part.seconds
        words = f"critical path, {part.share:.0%}: {part.where}, {part.kind} {part.detail}".rstrip()
        yield TimelineBar(start_ms, end_ms, part.kind, words, True)


def _idle(bars: Sequence[TimelineBar], rank: int, length_ms: float) -> list[TimelineBar]:
    gaps, at_ms = [], 0.0
    for start_ms, end_ms in [*sorted((bar.start_ms, bar.end_ms) for bar in bars), (length_ms, length_ms)]:
        if start_ms > at_ms:
            gaps.append(TimelineBar(at_ms, start_ms, "idle", f"rank {rank} computes nothing"))
        at_ms = max(at_ms, end_ms)
    return gaps


def placed_rows(panels: Sequence[TimelinePanel]) -> list[tuple[float, TimelineRow]]:
    """Returns the rows of all panels with their heights on the vertical axis, from top to bottom; a heading has more
    room.
    """
    placed: list[tuple[float, TimelineRow]] = []
    at = -0.7
    for panel in panels:
        for row in panel.rows():
            at += 0.7 if row.bars or not placed else 1.3
            placed.append((at, row))
            at += 0.3
    return placed


def draw_timelines(panels: Sequence[TimelinePanel], *, title: str, new: Callable[..., Figure] = Figure) -> Figure:
    """Draws timelines below one another on one scale of time: passes of layers, the critical path, and the lanes of
    ranks, computation above communication. Spans on the critical path have a dark outline.
    """
    if not any(panel.spans for panel in panels):
        raise ValueError("the timeline has no spans; record or simulate a step first")
    placed = placed_rows(panels)
    kinds = list(dict.fromkeys(bar.kind for _, row in placed for bar in row.bars))
    spare = iter(_SPARE_COLOURS * len(kinds))
    colours = {kind: _KIND_COLOURS.get(kind) or next(spare) for kind in kinds}
    end_ms = max([bar.end_ms for _, row in placed for bar in row.bars]) or 1.0
    drawn = new(figsize=(10, 0.2 * placed[-1][0] + 1.7), layout="constrained")
    axes = drawn.subplots()
    for at, row in placed:
        if not row.bars:
            axes.text(0, at, row.owner, fontweight="bold", va="center")
        # Marked bars come last, or their neighbours would cover their outlines.
        bars = sorted(row.bars, key=lambda bar: bar.on_path)
        short = [bar.end_ms - bar.start_ms < _SHORT_SPAN_SHARE * end_ms for bar in bars]
        marked = [bar.on_path and row.label != "critical path" for bar in bars]
        axes.broken_barh(
            [(bar.start_ms, bar.end_ms - bar.start_ms) for bar in bars],
            (at - 0.4, 0.8),
            facecolors=[colours[bar.kind] for bar in bars],
            edgecolors=[
                _ink() if outlined else colours[bar.kind] if narrow else "white"
                for bar, narrow, outlined in zip(bars, short, marked, strict=True)
            ],
            linewidth=[1.1 if outlined else 0.3 for outlined in marked],
        )
        for bar in row.bars if row.label == "layers" else ():
            room = (bar.end_ms - bar.start_ms) / (_LETTER_SHARE * end_ms)
            words = next((text for text in (bar.words, bar.words.rpartition(" ")[0]) if len(text) < room), "")
            axes.text((bar.start_ms + bar.end_ms) / 2, at, words, ha="center", va="center", fontsize=7, color="black")
    _label_rows(axes, placed)
    axes.set(xlabel="ms", xlim=(0, end_ms), ylim=(placed[-1][0] + 0.6, -0.6), title=title)
    handles = [Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in colours.items()]
    if any(panel.critical_path for panel in panels):
        handles.append(Patch(facecolor="none", edgecolor=_ink(), label="outline: on the critical path"))
    columns = math.ceil(len(handles) / math.ceil(len(handles) / _LEGEND_COLUMNS))
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns)
    return drawn


def draw_timeline(
    timeline: Timeline, ranks: Sequence[int] | None = None, new: Callable[..., Figure] = Figure
) -> Figure:
    """Draws some ranks of one timeline, by default the one that computes longest and the one that computes least."""
    busy_us = timeline.busy_us("compute")
    by_work = sorted(busy_us, key=lambda rank: (-busy_us[rank], rank))
    chosen = tuple(dict.fromkeys([*by_work[:1], *by_work[-1:]]) if ranks is None else ranks)
    title = f"{timeline.source.upper()}: {len(chosen)} of {len(busy_us)} ranks"
    return draw_timelines([TimelinePanel("step", timeline, chosen)], title=title, new=new)


def _label_rows(axes: Axes, placed: Sequence[tuple[float, TimelineRow]]) -> None:
    """Labels the lines on the left with lanes, and each rank on the right."""
    axes.set_yticks([at for at, _ in placed], [row.label for _, row in placed], fontsize=7)
    axes.tick_params(axis="y", length=0)
    above = ""
    for at, row in placed:
        if row.bars and row.owner != above:
            axes.text(1.01, at, row.owner, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        if not row.bars or (row.owner != above and row.label == "compute"):
            axes.axhline(at - 0.5, color=mpl.rcParams["axes.edgecolor"], linewidth=0.5 if row.bars else 0)
        above = row.owner


# --- speed-ups --------------------------------------------------------------------------------------------------------


def verdict_colour(ratio: PairedRatio) -> str:
    """Returns blue for faster, red for slower, and grey where it cannot be told."""
    return {"faster": OKABE_ITO[0], "slower": OKABE_ITO[3]}.get(ratio.verdict, GREY)


def draw_forest(
    ratios: Mapping[str, PairedRatio],
    *,
    title: str,
    xlabel: str,
    words: Callable[[PairedRatio], str],
    colour: Callable[[PairedRatio], str] = verdict_colour,
    single: Mapping[str, Collection[float]] | None = None,
    new: Callable[..., Figure] = Figure,
) -> Figure:
    """Draws a ratio with its interval on each line, below its name and ``words``, and a line at 1. ``single``: the
    ratios of single seeds by name, which are small dots below the interval. ``new``: makes the figure.
    """
    names = [f"{short(name)}  {words(ratio)}" for name, ratio in ratios.items()]
    width = max(_FOREST_WIDTH, _CHARACTER * max(map(len, names)))
    drawn = new(figsize=(width, _FOREST_ROW * len(ratios) + 0.9), layout="constrained")
    axes = drawn.subplots()
    ends, rows = [1.0], np.arange(len(ratios))
    # The line is drawn beside the dots only, because it would run through the names.
    axes.vlines(np.ones(len(ratios)), rows - 0.2, rows + 0.25, color=_ink(), linewidth=1)
    for row, (name, ratio) in enumerate(ratios.items()):
        low, high = ratio.low or ratio.estimate, ratio.high or ratio.estimate
        ends += [low, high]
        axes.plot((low, high), (row, row), color=colour(ratio), linewidth=1.6)
        axes.plot(ratio.estimate, row, "o", color=colour(ratio), markersize=5)
        if dots := (single or {}).get(name):
            ends += dots
            axes.plot(list(dots), [row + 0.17] * len(dots), "o", color=GREY, markersize=2.5)
        # The layout would make the axes narrower where it makes room for names.
        axes.text(0, row - 0.42, names[row], transform=axes.get_yaxis_transform(), va="center", in_layout=False)
    if (range_of_ratios := max(ends) / min(ends)) > _LINEAR_RANGE:
        axes.set_xscale("log")
        subs = (1, 1.5, 2, 3, 5, 7) if range_of_ratios < _LINEAR_RANGE**2 else (1, 3)
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=subs))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", linewidth=0.3)
    axes.set(xlabel=xlabel, ylim=(len(ratios) - 0.5, -0.75), title=title)
    return drawn


def draw_speedups(comparison: Comparison, new: Callable[..., Figure] = Figure) -> Figure:
    """Draws the speed-ups of a comparison, of which there is at least one."""
    rows = [row for row in comparison.rows if row.speedup is not None]
    baseline = comparison.baseline.samples[SPEED]
    return draw_forest(
        {row.name: row.speedup for row in rows if row.speedup is not None},
        title=f"{comparison.source.upper()}: {comparison.experiment.name}",
        xlabel=f"speed-up over {short(comparison.baseline.name)} (right is faster)",
        words=ratio_words,
        single={row.name: seed_ratios(baseline, row.samples[SPEED]).values() for row in rows},
        new=new,
    )


def _ink() -> str:
    return str(mpl.rcParams["text.color"])


# --- traces -----------------------------------------------------------------------------------------------------------

# The process that shows the critical path; ranks have their own numbers.
PATH_PROCESS = -1


def write_chrome_trace(timeline: Timeline, path: Path, critical_path: Sequence[PathPart] = ()) -> Path:
    """Writes a timeline for Perfetto (ui.perfetto.dev) and Chrome (about:tracing), and returns ``path``.

    Ranks are processes, lanes are threads, spans are complete events of Chrome's trace event format. Times are
    microseconds from the start of the first span and of the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": [*_path_events(critical_path, timeline.source), *_events(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source.upper()},
    }
    write_whole(path, json.dumps(trace, default=python_value))
    return path


def _path_events(critical_path: Sequence[PathPart], source: Source) -> Iterator[dict[str, Any]]:
    """Yields the events of a process above the ranks, one for each part of the path, named after its place."""
    if critical_path:
        name = {"name": f"{source.upper()}: critical path"}
        yield {"ph": "M", "name": "process_name", "pid": PATH_PROCESS, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": PATH_PROCESS, "args": {"sort_index": PATH_PROCESS}}
    end_us = 0.0
    for part in critical_path:
        start_us, end_us = end_us, end_us + 1e6 * part.seconds
        place = {"name": part.where, "cat": part.lane, "pid": PATH_PROCESS, "tid": 0}
        details = {"kind": part.kind, "detail": part.detail, "share": round(part.share, 6)}
        yield {"ph": "X", **place, **_times(start_us, end_us), "args": details}


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    zero_us = min((span.start_us for span in timeline.spans), default=0.0)
    lanes = {lane: number for number, lane in enumerate(sorted({span.lane for span in timeline.spans}))}
    events = []
    for rank in sorted({span.rank for span in timeline.spans}):
        title = f"{timeline.source.upper()}: rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title}})
    for rank, lane in sorted({(span.rank, span.lane) for span in timeline.spans}):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes[lane], "args": {"name": lane}})
    for span in timeline.spans:
        place = {"name": span.kind, "cat": span.lane, "pid": span.rank, "tid": lanes[span.lane]}
        times = _times(span.start_us - zero_us, span.end_us - zero_us)
        events.append({"ph": "X", **place, **times, "args": {"detail": span.detail}})
    return events


def _times(start_us: float, end_us: float) -> dict[str, float]:
    """Returns the times of an event in whole nanoseconds. It rounds both ends instead of the length, because otherwise
    a span could end after the next one begins.
    """
    start_ns, end_ns = round(1000 * start_us), round(1000 * end_us)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
