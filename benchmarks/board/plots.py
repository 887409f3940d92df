"""Draws a group of the leaderboard: who is how far behind the best where, and what that hangs on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.board.standings import Standing
from moesys.lab.show.figures import OKABE_ITO, STYLE

_ROW_INCHES, _MARKERS = 0.24, "osD^vPX*"
# There are more balances than colours for colour-blind eyes.
_COLOURS = (*OKABE_ITO, "#999999", "#7B4173", "#8C6D31", "#637939")
# Beyond this ratio all cells have one colour, or a planner that is far behind would make all others alike.
_DARKEST = 2.0


def ranks_figure(group: str, standings: Sequence[Standing]) -> Figure:
    """Planners by place: over the best, with intervals, and by workload. Those without a place are left out."""
    ranked = [one for one in standings if one.over_best is not None]
    workloads = list(ranked[0].by_workload)
    ratio_PW = np.array([[one.by_workload[name] for name in workloads] for one in ranked])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, _ROW_INCHES * len(ranked) + 2.4), layout="constrained")
        dots, cells = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.1))
        for row, one in enumerate(ranked):
            assert one.over_best is not None
            ratio, colour = one.over_best, OKABE_ITO[0]
            if ratio.low is not None and ratio.high is not None:
                dots.plot((ratio.low, ratio.high), (row, row), color=colour, linewidth=1.2)
            dots.plot(ratio.estimate, row, "o", color=colour, markersize=4)
        _ratio_axis(dots, "x")
        dots.set_yticks(range(len(ranked)), [one.planner for one in ranked])
        dots.set(xlabel="over the best of each setting, geometric mean", ylim=(len(ranked) - 0.5, -0.5))
        dots.set_title(f"SIMULATED: {group}")
        dots.grid(axis="x", linewidth=0.3)
        places = range(len(workloads)), range(len(ranked))
        cells.pcolormesh(*places, ratio_PW, shading="nearest", cmap="cividis_r", vmin=1, vmax=_DARKEST)
        cells.set_xticks(range(len(workloads)), workloads, rotation=25, ha="right")
        cells.set_title("by workload: times the best planner's seconds")
        cells.tick_params(axis="y", length=0)
        for (row, column), ratio in np.ndenumerate(ratio_PW):
            colour = "white" if ratio > 1.55 else "black"
            cells.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return figure


def causes_figure(group: str, standings: Sequence[Standing]) -> Figure:
    """Over the best against balance, crossing and planning time; a colour is a balance, a marker a split."""
    ranked = [one for one in standings if one.over_best is not None]
    names = [one.planner.split(" + ", 1) for one in ranked]
    balances, splits = (list(dict.fromkeys(of)) for of in zip(*sorted(names), strict=True))
    against = (
        ("max_over_mean", "load max/mean", 1.0),
        ("crossing", "crossing, % of routed tokens", 100.0),
        ("planning_ms", "planning, ms, measured", 1.0),
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for panel, (field, label, scale) in zip(panels, against, strict=True):
            for one, (balance, split) in zip(ranked, names, strict=True):
                assert one.over_best is not None
                look: dict[str, Any] = {
                    "color": _COLOURS[balances.index(balance) % len(_COLOURS)],
                    "marker": _MARKERS[splits.index(split) % len(_MARKERS)],
                }
                panel.plot(scale * getattr(one, field), one.over_best.estimate, linestyle="", markersize=5, **look)
            panel.set_xlabel(label)
            panel.grid(linewidth=0.3)
        # some plan nothing, and take no time
        panels[2].set_xscale("symlog", linthresh=0.1)
        panels[2].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _ratio_axis(panels[0], "y")
        panels[0].set_ylabel("over the best of each setting")
        panels[0].set_title(f"SIMULATED: {group}")
        for place, balance in enumerate(balances):
            panels[0].plot([], [], "s", color=_COLOURS[place % len(_COLOURS)], label=balance)
        for place, split in enumerate(splits):
            panels[0].plot([], [], color="grey", linestyle="", marker=_MARKERS[place % len(_MARKERS)], label=split)
        figure.legend(loc="outside right upper", fontsize=8)
    return figure


def svg_of(figure: Figure) -> str:
    """A figure as part of a page: the same bytes for the same figure, and nothing that comes from elsewhere."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _ratio_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis with ratios as they are said: matplotlib's own labels are powers of ten."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(mpl.ticker.LogLocator(base=10, subs=(1, 1.2, 1.5, 2, 3, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
