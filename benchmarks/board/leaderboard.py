"""The leaderboard: all planners on the same routing, models and clusters, by the simulated seconds of a layer.

Held out: a layout is planned on micro-batches before the one that it is scored on, but in the group that plans on the
counts it runs. ``standings`` has the rules of ranking, ``contests`` who takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from typing import Annotated, Self

from benchmarks.board.contests import GROUPS, OURS, Group, Setting, own_planner, settings
from benchmarks.board.outcomes import FILE, Outcome, cases, outcomes
from benchmarks.board.plots import causes_figure, ranks_figure, svg_of
from benchmarks.board.standings import Duel, Refusal, Standing, duels, refusals, standings
from benchmarks.board.workloads import SCORED, WARM_UP, recorded_in
from benchmarks.planner.seconds import TOKENS_PER_RANK
from moesys.lab.runs.records import take_lock
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.console import print_full
from moesys.lab.show.html_page import page, section, table
from moesys.lab.show.reports import Report, write
from moesys.lab.show.sheets import Column, Sheet, terminal_table, written_columns
from moesys.whole_file import write_whole

TITLE = "SIMULATED: a leaderboard of planners"
PACKAGES = ("numpy", "numba", "ortools")
MARKDOWN, HTML = "leaderboard.md", "leaderboard.html"


def main(
    out: Path,
    num_samples: int,
    *,
    quick: bool = False,
    planners: Sequence[str] = (),
    traces: Sequence[Path] = (),
) -> int:
    """Plays what ``out`` does not know yet, writes the pages there and prints; the exit code.

    Raises ValueError for planners and traces that are none, and where another process writes into ``out``.
    """
    own = [own_planner(text) for text in planners]
    groups = [group.with_own(own) for group in GROUPS]
    played_on = settings([recorded_in(path) for path in traces], quick=quick)
    asked = cases(played_on, groups, num_samples)
    out.mkdir(parents=True, exist_ok=True)
    with take_lock(out):
        found = outcomes(asked, out)
        boards = [Board.of(group, [one for one in found if one.group == group.name]) for group in groups]
        workloads = Sheet("Workloads", _workloads(played_on))
        sheets = [workloads, *(sheet for board in boards for sheet in board.sheets)]
        words = _introduction(num_samples, _command(num_samples, quick, planners, traces))
        write(Report("leaderboard", TITLE, "simulated", sheets, introduction=words), page=out / MARKDOWN)
        write_whole(out / HTML, _html(words, workloads, boards))
    for board in boards:
        print_full(terminal_table(board.standings_sheet(by_workload=False)))
    print(f"pages: {out / MARKDOWN} and {out / HTML}; every sample: {out / FILE}")
    return 0


@dataclass(frozen=True)
class Board:
    """One group's part of the page."""

    group: Group
    standings: list[Standing]
    refusals: list[Refusal]
    duels: list[Duel]
    num_settings: int

    @classmethod
    def of(cls, group: Group, found: Sequence[Outcome]) -> Self:
        num_settings = len({one.setting for one in found})
        return cls(group, standings(found), refusals(found), duels(found, OURS.name), num_settings)

    def standings_sheet(self, *, by_workload: bool = True) -> Sheet:
        hidden = () if by_workload else ("by_workload",)
        return Sheet(f"SIMULATED: {self.group.name}", self.standings, [f"{self.group.about}."], without=hidden)

    @property
    def sheets(self) -> list[Sheet]:
        """The tables that have rows."""
        behind = f"{OURS.name} is not the best in {len(self.duels)} of {self.num_settings} settings"
        sheets = [
            self.standings_sheet(),
            Sheet(f"{self.group.name}: {behind}", self.duels),
            Sheet(f"{self.group.name}: who cannot plan everywhere, and has no place", self.refusals),
        ]
        return [sheet for sheet in sheets if sheet.rows]

    @property
    def figures(self) -> str:
        if not any(one.place for one in self.standings):
            return ""
        figures = (draw(self.group.name, self.standings) for draw in (ranks_figure, causes_figure))
        return "".join(f"<figure>{svg_of(figure)}</figure>" for figure in figures)


@dataclass(frozen=True)
class WorkloadRow:
    name: Annotated[str, Column("workload")]
    about: Annotated[str, Column("routing")]
    where: Annotated[str, Column("models and clusters")]


def _workloads(played_on: Sequence[Setting]) -> list[WorkloadRow]:
    about = {one.workload.name: one.workload.about for one in played_on}
    where: dict[str, list[str]] = {name: [] for name in about}
    for one in played_on:
        where[one.workload.name].append(f"{one.model_name} on {one.cluster_name}")
    return [WorkloadRow(name, about[name], "; ".join(where[name])) for name in about]


def _command(num_samples: int, quick: bool, planners: Sequence[str], traces: Sequence[Path]) -> str:
    options = ["--quick"] * quick + [f"--planner {name}" for name in planners] + [f"--trace {path}" for path in traces]
    return " ".join(["python -m benchmarks leaderboard", f"--seeds {num_samples}", *options])


def _introduction(num_samples: int, command: str) -> list[str]:
    return [
        f"`{command}`; rules are in `docs/leaderboard.md`.",
        f"Forward and backward of a layer, one part after another (`Sequential`), {TOKENS_PER_RANK:,} tokens a rank, "
        f"simulated; {num_samples} seeds. Planners see {WARM_UP} micro-batches and are scored on the next {SCORED}. In "
        "a group all have the same slots, lag and sharding. Layouts from history are planned on the micro-batches "
        "before the one that is scored.",
        "Over the best: a planner's seconds over the least of its group in the same setting and seed; the geometric "
        "mean over settings of a workload, then over workloads; its 95 % interval is Student's over seeds, which are "
        "draws, or layers and parts of a recording. Who cannot plan in some setting has no place: its other columns "
        "are of the settings where it can.",
        "Crossing: routed tokens that leave their NVLink domain. Copies: replicas that a plan brings to ranks that did "
        "not hold them; on current counts experts that are lent. Restored: experts on their way in a forward, all "
        "ranks. Memory: of a layer's experts and rows, of the rank that holds most, at most. Planning: measured, the "
        "median after a first plan: of a layout, and on current counts of the split too.",
        f"Planning was measured on {machine_line(1, PACKAGES)}.",
    ]


def _html(words: Sequence[str], workloads: Sheet, boards: Sequence[Board]) -> str:
    head = f"<h1>{escape(TITLE)}, {date.today().isoformat()}</h1>"
    parts = [head, *(f'<p class="note">{escape(said)}</p>' for said in words), _html_table(workloads)]
    for board in boards:
        parts.append(section(board.group.name, board.figures, f"{board.group.about}."))
        parts += [_html_table(sheet) for sheet in board.sheets]
    return page(TITLE, parts)


def _html_table(sheet: Sheet) -> str:
    columns = written_columns(sheet)
    left = {column.header for column in columns if column.is_text}
    rows = zip(*(column.cells for column in columns), strict=True)
    drawn = table([column.header for column in columns], rows, sheet.title.replace(" ", "-"), left)
    return section(sheet.title, drawn)
