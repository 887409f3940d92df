"""The pages of the leaderboard: the tables of each group, and a figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from html import escape
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from moesys.files import write_whole
from moesys.lab.leaderboard.planners import OURS, PlannerGroup
from moesys.lab.leaderboard.ranking import RankedPlanner, lost_settings, ranking
from moesys.lab.leaderboard.results import PlannerResult
from moesys.lab.leaderboard.workloads import RoutingSetting
from moesys.lab.show.console import print_full
from moesys.lab.show.figures import OKABE_ITO, STYLE
from moesys.lab.show.html_page import page, section, table
from moesys.lab.show.reports import Report, write
from moesys.lab.show.sheets import Column, Sheet, terminal_table, written_columns

TITLE = "SIMULATED: a leaderboard of planners"


def write_pages(
    folder: Path,
    scored_in: Sequence[RoutingSetting],
    groups: Sequence[PlannerGroup],
    found: Sequence[PlannerResult],
    introduction: Sequence[str],
) -> list[Path]:
    """Writes ``found`` as a page of Markdown and one of HTML, prints each group's ranking, and returns the pages."""
    markdown, html = folder / "leaderboard.md", folder / "leaderboard.html"
    parts = [_tables_and_figure(group, [one for one in found if one.group == group.name]) for group in groups]
    workloads = Sheet("Workloads", _workloads(scored_in))
    sheets = [workloads, *(sheet for tables, _ in parts for sheet in tables)]
    write(Report("leaderboard", TITLE, "simulated", sheets, introduction=introduction), page=markdown)
    write_whole(html, _html(introduction, workloads, parts))
    for tables, _ in parts:
        print_full(terminal_table(replace(tables[0], without=("by_workload", "cannot"))))
    return [markdown, html]


def _tables_and_figure(group: PlannerGroup, found: Sequence[PlannerResult]) -> tuple[list[Sheet], str]:
    """Returns the tables of one group that have rows, the ranking first, and its figure as SVG."""
    ranked, lost = ranking(found), lost_settings(found, OURS.name)
    count = f"{len(lost)} of {len({one.setting for one in found})} settings"
    sheets = [Sheet(f"SIMULATED: {group.name}", ranked, [f"{group.about}."])]
    if lost:
        sheets.append(Sheet(f"{group.name}: {OURS.name} is not the fastest in {count}", lost))
    placed = [one for one in ranked if one.slowdown]
    return sheets, f"<figure>{_svg(ranking_figure(group.name, placed))}</figure>" if placed else ""


@dataclass(frozen=True)
class WorkloadRow:
    name: Annotated[str, Column("workload")]
    about: Annotated[str, Column("routing")]
    where: Annotated[str, Column("models and clusters")]


def _workloads(scored_in: Sequence[RoutingSetting]) -> list[WorkloadRow]:
    about = {one.routing.name: one.routing.about for one in scored_in}
    where: dict[str, list[str]] = {name: [] for name in about}
    for one in scored_in:
        where[one.routing.name].append(f"{one.model_name} on {one.cluster_name}")
    return [WorkloadRow(name, about[name], "; ".join(where[name])) for name in about]


def _html(words: Sequence[str], workloads: Sheet, parts: Sequence[tuple[list[Sheet], str]]) -> str:
    head = f"<h1>{escape(TITLE)}, {date.today().isoformat()}</h1>"
    body = [head, *(f'<p class="note">{escape(paragraph)}</p>' for paragraph in words), _html_table(workloads)]
    for tables, figure in parts:
        body += [figure, *map(_html_table, tables)]
    return page(TITLE, body)


def _html_table(sheet: Sheet) -> str:
    columns = written_columns(sheet)
    left = {column.header for column in columns if column.is_text}
    rows = zip(*(column.cells for column in columns), strict=True)
    drawn = table([column.header for column in columns], rows, sheet.title.replace(" ", "-"), left)
    return section(sheet.title, drawn, " ".join(sheet.notes))


def ranking_figure(group: str, ranked: Sequence[RankedPlanner]) -> Figure:
    """Draws planners by place: slowdown with intervals, and slowdown by workload."""
    workloads = list(ranked[0].by_workload)
    ratio_PW = np.array([[one.by_workload[name] for name in workloads] for one in ranked])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 0.24 * len(ranked) + 2.4), layout="constrained")
        dots, cells = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.1))
        for row, one in enumerate(ranked):
            if (ratio := one.slowdown) is None:
                continue
            if ratio.low is not None and ratio.high is not None:
                dots.plot((ratio.low, ratio.high), (row, row), color=OKABE_ITO[0], linewidth=1.2)
            dots.plot(ratio.estimate, row, "o", color=OKABE_ITO[0], markersize=4)
        dots.set_xscale("log")
        # By default a logarithmic axis writes powers of ten.
        dots.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 1.2, 1.5, 2, 3, 5)))
        dots.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        dots.xaxis.set_minor_formatter(NullFormatter())
        dots.grid(axis="x", linewidth=0.3)
        dots.set_yticks(range(len(ranked)), [one.planner for one in ranked])
        dots.set(xlabel="slowdown, geometric mean", ylim=(len(ranked) - 0.5, -0.5), title=f"SIMULATED: {group}")
        # Cells beyond 2.0 have one colour, or one slow planner would make all others look alike.
        at = range(len(workloads)), range(len(ranked))
        cells.pcolormesh(*at, ratio_PW, shading="nearest", cmap="cividis_r", vmin=1, vmax=2.0)
        for (row, column), value in np.ndenumerate(ratio_PW):
            colour = "white" if value > 1.55 else "black"
            cells.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        cells.set_xticks(range(len(workloads)), workloads, rotation=25, ha="right")
        cells.set_title("slowdown by workload")
        cells.tick_params(axis="y", length=0)
    return figure


def _svg(figure: Figure) -> str:
    """Returns a figure as part of a page: equal bytes for equal figures, and no reference to other files."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
