"""``moesys leaderboard``: all planners on the same routing, models and clusters, by the simulated seconds of a layer.

A layout is planned on micro-batches before the one that it is scored on, except in the group that plans on the current
counts. ``ranking`` has the rules of ranking, ``planners`` who takes part, ``workloads`` the settings.
"""

from __future__ import annotations

import io
import shlex
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

from moesys.config import ModelShape, ModelSpec
from moesys.config.layer_spec import MoeMlp
from moesys.lab.commands.declarations import cluster_of, predictor_of
from moesys.lab.leaderboard.planners import GROUPS, OURS, PlannerGroup, named_planner
from moesys.lab.leaderboard.ranking import RankedPlanner, lost_settings, ranking
from moesys.lab.leaderboard.results import FILE, PlannerResult, results
from moesys.lab.leaderboard.workloads import SCORED, TOKENS_PER_RANK, WARM_UP, RoutingSetting, recorded_in, settings
from moesys.lab.runs.records import take_lock
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.console import print_full
from moesys.lab.show.figures import OKABE_ITO, STYLE
from moesys.lab.show.html_page import page, section, table
from moesys.lab.show.reports import Report, write
from moesys.lab.show.sheets import Column, Sheet, terminal_table, written_columns
from moesys.whole_file import write_whole

TITLE = "SIMULATED: a leaderboard of planners"


@dataclass(frozen=True)
class LeaderboardOptions:
    """The options of the command, as they are given on the command line."""

    seeds: int = 3
    quick: bool = False
    planner: Sequence[str] = ()
    trace: Sequence[Path] = ()
    traces_only: bool = False
    model: str | None = None
    cluster: str | None = None
    slots: int | None = None
    lag: int = 1
    predictor: str = "last"

    @property
    def warm_up(self) -> int:
        """The micro-batches before the first scored one, whose layout is planned on ``WARM_UP`` loads."""
        return WARM_UP + self.lag - 1

    @property
    def command(self) -> str:
        words = ["moesys leaderboard"]
        for name, value in vars(self).items():
            for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                if one:
                    words.append(f"--{name.replace('_', '-')}" + ("" if one is True else f" {shlex.quote(str(one))}"))
        return " ".join(words)

    def groups(self) -> list[PlannerGroup]:
        """Raises ValueError for planners and predictors that do not exist."""
        added = [named_planner(text) for text in self.planner]
        groups = [replace(group.with_planners(added), slots_per_rank=self.slots) for group in GROUPS]
        predictor = predictor_of(self.predictor)
        return [replace(group, lag=self.lag, predictor=predictor) if group.lag else group for group in groups]

    def settings(self) -> list[RoutingSetting]:
        """Raises ValueError for models, clusters and traces that do not exist or do not fit."""
        models: dict[str, ModelShape] = {}
        if self.model:
            spec = ModelSpec.from_config(self.model)
            mlp = spec.layers[spec.moe_layers[0]].mlp
            assert isinstance(mlp, MoeMlp)
            models = {spec.name: mlp.shape}
        return settings(
            [recorded_in(path) for path in self.trace],
            models=models,
            clusters={self.cluster: cluster_of(self.cluster)} if self.cluster else {},
            quick=self.quick,
            traces_only=self.traces_only,
            warm_up=self.warm_up,
        )


def main(out: Path, options: LeaderboardOptions) -> int:
    """Scores what ``out`` has no results of, writes the pages there and prints; returns the exit code.

    Raises ValueError for options that cannot be met, and if another process writes into ``out``.
    """
    groups, scored_in = options.groups(), options.settings()
    out.mkdir(parents=True, exist_ok=True)
    markdown, html = out / "leaderboard.md", out / "leaderboard.html"
    with take_lock(out):
        found = results(scored_in, groups, options.seeds, out)
        parts = [_tables_and_figure(group, [one for one in found if one.group == group.name]) for group in groups]
        workloads = Sheet("Workloads", _workloads(scored_in))
        sheets = [workloads, *(sheet for tables, _ in parts for sheet in tables)]
        words = _introduction(options)
        write(Report("leaderboard", TITLE, "simulated", sheets, introduction=words), page=markdown)
        write_whole(html, _html(words, workloads, parts))
    for tables, _ in parts:
        print_full(terminal_table(replace(tables[0], without=("by_workload", "cannot"))))
    print(f"pages: {markdown} and {html}; every sample: {out / FILE}")
    return 0


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


def _introduction(options: LeaderboardOptions) -> list[str]:
    return [
        f"`{options.command}`; `docs/leaderboard.md` has the rules.",
        f"Forward and backward of a layer without overlap (`Sequential`), {TOKENS_PER_RANK:,} tokens per rank, "
        f"simulated; {options.seeds} seeds. Planners see {options.warm_up} micro-batches and are scored on the next "
        f"{SCORED}. All planners of a group have the same slots, lag, predictor and sharding. Layouts from history are "
        f"planned on micro-batches up to the one that is {options.lag} before the scored one.",
        "Slowdown: a planner's seconds divided by those of the fastest planner of its group in the same setting and "
        "seed; geometric mean over the settings of a workload, then over workloads. The 95 % interval is Student's "
        "over seeds, which are draws, or layers and parts of a recording. A planner that cannot handle some setting "
        "has no place; its other columns are means over the settings that it can handle.",
        "Crossing: routed tokens that leave their NVLink domain. Copies: replicas that a plan brings to ranks that did "
        "not hold them; on current counts, experts that are lent. Restored: experts that are sent in a forward, all "
        "ranks. Memory: an upper bound for a layer's experts and rows on the rank that holds most. Planning: measured, "
        "the median after a first plan; of a layout, and on current counts of the split too.",
        f"Planning was measured on {machine_line(1, ('numpy', 'numba', 'ortools'))}.",
    ]


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
