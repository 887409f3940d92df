"""Draws figures as SVG and PNG: loads before and after balancing, spans of ranks, speed-up along a parameter, losses,
memory. Writes timelines for Perfetto.

A function of a figure draws it, writes it to ``<path_stem>.svg`` and ``<path_stem>.png`` and returns both paths. Every
title says ``MEASURED`` or ``SIMULATED``. The same data gives the same bytes of SVG. Colours are told apart by
colour-blind eyes (Okabe and Ito's palette, and cividis from light to dark for counts).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from moesys.config import BYTES_PER_GB
from moesys.files import whole_file, write_whole
from moesys.lab.runs.statistics import CONFIDENCE, PairedRatio
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.critical_path import PathPart
from moesys.timeline import Source, Span, Timeline

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "moesys",
    # Names of strategies are no formulas, whatever is in them.
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
# The most frequent kinds of spans have one colour in all figures; other kinds take the spare ones.
_KIND_COLOURS = {
    "experts": "#0072B2",
    "weight_gradients": "#56B4E9",
    "dispatch": "#E69F00",
    "combine": "#D55E00",
    "restore": "#009E73",
    "reshard": "#CC79A7",
    "counts": "#F0E442",
}
_SPARE_COLOURS = ("#999999", "#444444", "#7B4173", "#8C6D31", "#637939", "#9C9EDE")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
# Counts are written where a digit has so much of a cell's width, and a row so much of the map's height.
_DIGIT_INCHES, _ROW_INCHES = 0.07, 0.2
# A shorter part of the time axis is narrower than the white lines that part spans.
_SHORT_SPAN_SHARE = 0.002
_LEGEND_COLUMNS = 8
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def computed_tokens(plan: TokenPlan) -> IntArray:
    """Returns the tokens that each rank computes for each expert under a plan, int64 [R, E]."""
    tokens_RE = np.zeros((plan.load.num_ranks, plan.load.num_experts), dtype=np.int64)
    _, expert, destination, tokens = plan.entries.T
    np.add.at(tokens_RE, (destination, expert), tokens)
    return tokens_RE


def load_heat_map(
    before_RE: IntArray,
    after_RE: IntArray,
    path_stem: Path,
    *,
    name: str,
    source: Source,
    labels: tuple[str, str] = ("before", "after"),
) -> list[Path]:
    """Draws the tokens of each expert on each rank, before and after balancing, on one colour scale; above them the
    sums of ranks and their mean. The map is white where there are no tokens.

    ``before_RE``, ``after_RE``: tokens computed, int [R, E], as ``computed_tokens`` counts them.
    """
    if before_RE.shape != after_RE.shape:
        raise ValueError(f"before has shape {before_RE.shape} and after {after_RE.shape}; give [R, E] of one layer")
    R, E = before_RE.shape
    most, busiest = max(before_RE.max(), after_RE.max(), 1), max(before_RE.sum(1).max(), after_RE.sum(1).max(), 1)
    with mpl.rc_context(STYLE):
        panel_inches = min(max(0.45 * R, 3.0), 6.0)
        map_inches = min(max(0.24 * E, 2.6), 9.0)
        counts_fit = panel_inches / R >= _DIGIT_INCHES * len(str(most)) and map_inches / E >= _ROW_INCHES
        figure = Figure(figsize=(2 * panel_inches + 1.6, map_inches + 1.9), layout="constrained")
        figure.suptitle(f"{source.upper()}: {name}, tokens of each expert on each rank", x=0.01, ha="left")
        sums, maps = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1, max(2.5, min(0.24 * E, 7))))
        for tokens_RE, label, top, axes in zip((before_RE, after_RE), labels, sums, maps, strict=True):
            tokens_R = tokens_RE.sum(1)
            mean = tokens_R.mean()
            top.bar(range(R), tokens_R, color="#56B4E9", width=0.8)
            top.axhline(mean, color="black", linewidth=0.8, linestyle="--")
            top.set(title=f"{label}: max/mean {tokens_R.max() / mean if mean else 1:.2f}", ylim=(0, 1.05 * busiest))
            shown_ER = np.ma.masked_equal(tokens_RE.T, 0)
            image = axes.imshow(shown_ER, cmap="cividis_r", vmin=0, vmax=most, aspect="auto")
            axes.spines[:].set_visible(True)
            axes.set_xlabel("rank")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.get_major_locator().set_params(integer=True)
            if counts_fit:
                _write_counts(axes, tokens_RE, most)
        sums[0].set_ylabel("tokens")
        maps[0].set_ylabel("expert")
        figure.align_ylabels([sums[0], maps[0]])
        figure.colorbar(image, ax=list(maps), label="tokens", aspect=30, pad=0.02)
        return _save(figure, path_stem)


def timeline_chart(
    timeline: Timeline, path_stem: Path, *, name: str, ranks: Sequence[int] | None = None, max_ranks: int = 8
) -> list[Path]:
    """Draws the spans of ranks over time and writes the figure; see ``draw_timeline``."""
    with mpl.rc_context(STYLE):
        return _save(draw_timeline(timeline, name=name, ranks=ranks, max_ranks=max_ranks), path_stem)


def draw_timeline(timeline: Timeline, *, name: str, ranks: Sequence[int] | None = None, max_ranks: int = 8) -> Figure:
    """Draws the spans of ranks over time in matplotlib's current style: the lanes of each rank one below another,
    computation above communication.

    If there are more than ``max_ranks`` ranks, only some are drawn, evenly chosen, with the one that ends last among
    them; ``ranks`` chooses others.
    """
    if not timeline.spans:
        raise ValueError("the timeline has no spans; record or simulate a step first")
    all_ranks = sorted({span.rank for span in timeline.spans})
    chosen = list(ranks) if ranks is not None else _some_ranks(timeline, all_ranks, max_ranks)
    spans = [span for span in timeline.spans if span.rank in set(chosen)]
    rows = {row: index for index, row in enumerate(lanes_of(spans, chosen))}
    kinds = list(dict.fromkeys(span.kind for lane in _lanes_in_order(spans) for span in spans if span.lane == lane))
    spare = iter(_SPARE_COLOURS * len(kinds))
    colours = {kind: _KIND_COLOURS.get(kind) or next(spare) for kind in kinds}
    zero_us = min(span.start_us for span in timeline.spans)
    short_us = _SHORT_SPAN_SHARE * timeline.length_us
    figure = Figure(figsize=(10, 0.2 * len(rows) + 1.7), layout="constrained")
    axes = figure.subplots()
    for (rank, lane), row in rows.items():
        on_lane = [span for span in spans if (span.rank, span.lane) == (rank, lane)]
        axes.broken_barh(
            [((span.start_us - zero_us) / 1e3, span.duration_us / 1e3) for span in on_lane],
            (row - 0.4, 0.8),
            facecolors=[colours[span.kind] for span in on_lane],
            edgecolors=[colours[span.kind] if span.duration_us < short_us else "white" for span in on_lane],
            linewidth=0.3,
        )
    _label_lanes(axes, list(rows))
    shown = f"{len(chosen)} of {len(all_ranks)} ranks" if len(chosen) < len(all_ranks) else f"{len(chosen)} ranks"
    axes.set(xlabel="ms", xlim=(0, timeline.length_us / 1e3 or 1), ylim=(len(rows) - 0.4, -0.6))
    axes.set_title(f"{timeline.source.upper()}: {name}, {shown}")
    figure.legend(
        handles=[Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in colours.items()],
        loc="outside lower center",
        ncols=math.ceil(len(colours) / math.ceil(len(colours) / _LEGEND_COLUMNS)),
    )
    return figure


def speedup_chart(
    parameter: str,
    values: Sequence[float],
    speedups: Mapping[str, Sequence[PairedRatio | None]],
    path_stem: Path,
    *,
    name: str,
    source: Source,
    baseline: str,
) -> list[Path]:
    """Draws the speed-up of each strategy along a parameter, with the band of its interval; None leaves a gap.

    ``values``: of the parameter, one for each ratio of every strategy. ``parameter`` names it, with its unit.
    """
    for strategy, ratios in speedups.items():
        if len(ratios) != len(values):
            raise ValueError(
                f"{strategy} has {len(ratios)} ratios for {len(values)} values of {parameter}; give as many"
            )
    nan = float("nan")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        for index, (strategy, ratios) in enumerate(speedups.items()):
            colour = OKABE_ITO[index % len(OKABE_ITO)]
            # One seed has no interval, and no band.
            low, high = (
                [nan if ratio is None or getattr(ratio, end) is None else getattr(ratio, end) for ratio in ratios]
                for end in ("low", "high")
            )
            middle = [nan if ratio is None else ratio.estimate for ratio in ratios]
            axes.fill_between(values, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(values, middle, color=colour, marker="osD^vPX*"[index % 8], markersize=4, label=strategy)
        n = sorted({ratio.n for ratios in speedups.values() for ratio in ratios if ratio is not None})
        seeds = f"n = {n[0]}" if len(n) == 1 else f"n = {n[0]} to {n[-1]}" if n else "n = 0"
        axes.set(xlabel=parameter, ylabel=f"speed-up against {baseline}", xticks=list(values))
        axes.set_title(f"{source.upper()}: {name}\nband: {100 * CONFIDENCE:.0f} % interval, paired by seed, {seeds}")
        axes.grid(axis="y", linewidth=0.3)
        axes.legend()
        return _save(figure, path_stem)


def loss_chart(losses: Mapping[str, Mapping[int, Sequence[float]]], path_stem: Path, *, name: str) -> list[Path]:
    """Draws losses over steps, the mean over seeds, and below them the largest relative difference from the losses of
    the first strategy.

    ``losses``: by strategy, the baseline first, and seed, in nats a token; every sequence as long as the others.
    Strategies compute the same, so their lines lie on one another above, and only the lower panel tells them apart.
    """
    shared = sorted(set.intersection(*(set(by_seed) for by_seed in losses.values()))) if losses else []
    if not shared:
        raise ValueError("the strategies share no seed with losses; run the same seeds of each")
    curves = {strategy: np.array([by_seed[seed] for seed in shared]) for strategy, by_seed in losses.items()}
    baseline, *others = curves
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        equal = []
        for index, (strategy, losses_NS) in enumerate(curves.items()):
            line = {"color": OKABE_ITO[index % len(OKABE_ITO)], "linestyle": _DASHES[index % len(_DASHES)]}
            top.plot(losses_NS.mean(0), label=strategy, linewidth=1.5, **line)
            with np.errstate(invalid="ignore"):
                apart_S = np.where(losses_NS == curves[baseline], 0, np.abs(losses_NS / curves[baseline] - 1)).max(0)
            if strategy in others and not apart_S.any():
                equal.append(strategy)
            elif strategy in others:
                # A single step between equal ones has no line, and shows as a dot.
                shown_S = np.where(apart_S > 0, apart_S, np.nan)
                bottom.plot(shown_S, label=strategy, linewidth=1, marker=".", markersize=2.5, clip_on=False, **line)
        n = f"{len(shared)} seed{'s' * (len(shared) > 1)}"
        top.set(ylabel="loss, nats a token", title=f"MEASURED: {name}, mean of {n}")
        top.legend()
        bottom.set(xlabel="step", ylabel=f"|loss / {baseline}'s − 1|")
        bottom.set_title("largest of all seeds" + (f"; bit-equal: {', '.join(equal)}" if equal else ""), fontsize=9)
        if bottom.lines:
            _scale_by_decades(bottom)
        else:
            bottom.set_yticks([])
            bottom.text(0.5, 0.5, "no loss differs in a bit", ha="center", va="center", transform=bottom.transAxes)
        return _save(figure, path_stem)


def memory_chart(
    parts: Mapping[str, Mapping[str, float]], path_stem: Path, *, have_gb: float | None = None
) -> list[Path]:
    """Draws the most bytes that a rank holds, with one bar per strategy, by part. ``have_gb``: the memory of a rank, in
    units of 1e9 bytes.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 1.6 + 0.45 * len(parts)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(parts))
        for index, part in enumerate(dict.fromkeys(part for of in parts.values() for part in of)):
            widths = np.array([of.get(part, 0.0) for of in parts.values()]) / BYTES_PER_GB
            axes.barh(list(parts), widths, left=left, color=OKABE_ITO[index % len(OKABE_ITO)], label=part, height=0.6)
            left += widths
        if have_gb is not None:
            axes.axvline(have_gb, color="black", linewidth=1, linestyle="--", label=f"{have_gb:g} GB that it has")
        axes.invert_yaxis()
        axes.set(xlabel="GB", title="SIMULATED: memory of the rank that holds most")
        figure.legend(loc="outside lower center", ncols=4)
        return _save(figure, path_stem)


def _save(figure: Figure, path_stem: Path) -> list[Path]:
    path_stem.parent.mkdir(parents=True, exist_ok=True)
    svg, png = (path_stem.with_name(f"{path_stem.name}.{form}") for form in ("svg", "png"))
    with whole_file(svg) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
    with whole_file(png) as file:
        figure.savefig(file, format="png", dpi=150)
    return [svg, png]


def _scale_by_decades(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, over whole decades, with powers of ten as its labels.

    matplotlib's own labels are formulas, and ``STYLE`` turns those off.
    """
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    logs = np.log10(drawn[np.isfinite(drawn)])
    axes.set_yscale("log")
    if len(logs):
        first = math.floor(logs.min())
        axes.set_ylim(10.0**first, 10.0 ** max(math.ceil(logs.max()), first + 1))
    axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _power_of_ten(value: float, _: int | None = None) -> str:
    """Returns a power of ten as text: ``_power_of_ten(1e-4) == "10⁻⁴"``."""
    return f"10{str(round(math.log10(value))).translate(_SUPERSCRIPTS)}"


def _write_counts(axes: Axes, tokens_RE: IntArray, most: int) -> None:
    for (rank, expert), tokens in np.ndenumerate(tokens_RE):
        if tokens:
            colour = "white" if tokens > 0.5 * most else "black"
            axes.text(rank, expert, str(tokens), ha="center", va="center", fontsize=6, color=colour)


def _some_ranks(timeline: Timeline, all_ranks: list[int], count: int) -> list[int]:
    if len(all_ranks) <= count:
        return all_ranks
    last = max(timeline.spans, key=lambda span: span.end_us).rank
    evenly = [all_ranks[i] for i in np.linspace(0, len(all_ranks) - 1, count).astype(int)]
    if last not in evenly:
        evenly[min(range(count), key=lambda i: abs(evenly[i] - last))] = last
    return evenly


def lanes_of(spans: Sequence[Span], ranks: Sequence[int]) -> list[tuple[int, str]]:
    """Returns each (rank, lane) that has spans, from top to bottom."""
    there = {(span.rank, span.lane) for span in spans}
    return [(rank, lane) for rank in ranks for lane in _lanes_in_order(spans) if (rank, lane) in there]


def _lanes_in_order(spans: Sequence[Span]) -> list[str]:
    """Returns the lane of computation, then the others as they first appear in time."""
    first_seen = dict.fromkeys(span.lane for span in sorted(spans, key=lambda span: span.start_us))
    return sorted(first_seen, key=lambda lane: lane != "compute")


def _label_lanes(axes: Axes, rows: list[tuple[int, str]]) -> None:
    """Labels the ticks with lanes, and adds a line and a name for every rank."""
    axes.set_yticks(range(len(rows)), [lane.replace("_", " ") for _, lane in rows], fontsize=7)
    axes.tick_params(axis="y", length=0)
    for rank in dict.fromkeys(rank for rank, _ in rows):
        of_rank = [index for index, row in enumerate(rows) if row[0] == rank]
        if of_rank[0]:
            axes.axhline(of_rank[0] - 0.5, color=mpl.rcParams["axes.edgecolor"], linewidth=0.5)
        axes.annotate(
            f"rank {rank}",
            (1.01, (of_rank[0] + of_rank[-1]) / 2),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
        )


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
    write_whole(path, json.dumps(trace))
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
        yield {
            "ph": "X",
            "name": part.where,
            "cat": part.lane,
            "pid": PATH_PROCESS,
            "tid": 0,
            **_times(start_us, end_us),
            "args": {"kind": part.kind, "detail": part.detail, "share": round(part.share, 6)},
        }


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
        events.append(
            {
                "ph": "X",
                "name": span.kind,
                "cat": span.lane,
                "pid": span.rank,
                "tid": lanes[span.lane],
                **_times(span.start_us - zero_us, span.end_us - zero_us),
                "args": {"detail": span.detail},
            }
        )
    return events


def _times(start_us: float, end_us: float) -> dict[str, float]:
    """Returns the times of an event in whole nanoseconds. It rounds both ends instead of the length, because otherwise
    a span could end after the next one begins.
    """
    start_ns, end_ns = round(1000 * start_us), round(1000 * end_us)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
