"""Ranks planners by their slowdown and writes the pages of the leaderboard.

The slowdown in a setting and sample is the planner's mean of simulated seconds over the scored micro-batches, divided
by the least such mean in the group. Geometric means are taken over the settings of a workload, then over workloads, so
that each workload weighs the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from html import escape
from math import inf
from pathlib import Path
from typing import Annotated, TypeVar

import matplotlib as mpl

from moesys.display import counted
from moesys.files import write_whole
from moesys.lab.leaderboard.planners import OURS, PlannerGroup
from moesys.lab.leaderboard.scores import PlannerResult
from moesys.lab.leaderboard.workloads import RoutingSetting
from moesys.lab.runs.statistics import PairedRatio, paired_ratio
from moesys.lab.show.figures import OKABE_ITO, draw_forest
from moesys.lab.show.pages import PAGE_STYLE, inline_svg, page, sheet_section
from moesys.lab.show.tables import Column, Report, Sheet, write

PAGE, HTML_PAGE = "leaderboard.md", "leaderboard.html"
TITLE = "SIMULATED: a leaderboard of planners"
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
BySample = dict[int, float]
# The samples of each setting, by workload, model and cluster.
BySetting = dict[tuple[str, str, str], BySample]


@dataclass(frozen=True)
class RankedPlanner:
    """One pair of planners in one group. ``place`` is None if it cannot plan in every setting.

    slowdown: with a 95 % interval over samples. by_workload: over the settings in which it can plan. layer_ms: the
    geometric mean over settings. Other columns are means over scored micro-batches, ``planning_ms`` is a median.
    cannot: in how many settings it cannot plan, and the reason in the first of them. same: the pairs that are equal to
    it in every score of every sample, except for the time of planning.
    """

    place: Annotated[int | None, Column("place")]
    planner: Annotated[str, Column("planner + split", align="left", wraps=True, kept=True)]
    slowdown: Annotated[PairedRatio | None, Column("slowdown [95 %]", ".3f", kept=True)]
    by_workload: Annotated[Mapping[str, float], Column("{}", ".3f")]
    layer_ms: Annotated[float | None, Column("a layer, ms", ".2f")]
    max_over_mean: Annotated[float | None, Column("max/mean", ".3f")]
    crossing: Annotated[float | None, Column("crossing %", ".1f", 100)]
    copies: Annotated[float | None, Column("copies", ".1f")]
    restored_gb: Annotated[float | None, Column("restored GB", ".2f")]
    memory_gb: Annotated[float | None, Column("memory GB", ".2f")]
    planning_ms: Annotated[float | None, Column("planning ms", ".2f")]
    cannot: Annotated[str | None, Column("cannot plan in", wraps=True)]
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostSetting:
    """A setting in which moesys' own planner is not the fastest."""

    workload: Annotated[str, Column("workload")]
    model: Annotated[str, Column("model")]
    cluster: Annotated[str, Column("cluster")]
    slots: Annotated[int, Column("slots")]
    best: Annotated[str, Column("fastest planner")]
    best_ms: Annotated[float, Column("a layer, ms", ".2f")]
    ours_ms: Annotated[float, Column("ours, ms", ".2f")]
    slowdown: Annotated[PairedRatio, Column("slowdown of ours [95 %]", ".3f")]


def ranking(results: Sequence[PlannerResult]) -> list[RankedPlanner]:
    """Returns the pairs of one group: ranked ones by place, then the others by name."""
    slowdowns, num_settings = _slowdowns(results), len({result.setting for result in results})
    by_planner = _grouped(results, lambda one: one.planner)
    ranked = []
    for planner, *same in _grouped(list(by_planner), lambda name: _all_scores(by_planner[name])).values():
        of_planner = by_planner[planner]
        ran = [result for result in of_planner if not result.scores.cannot]
        refused = [result for result in of_planner if result.scores.cannot]
        count = len({result.setting for result in refused})
        by_setting = slowdowns.get(planner, {})
        workloads = {workload: _over_settings(samples) for workload, samples in _by_workload(by_setting).items()}
        names = ("max_over_mean", "crossing", "copies", "restored_gb", "memory_gb")
        ranked.append(
            RankedPlanner(
                place=None,
                planner=planner,
                slowdown=None if refused else _overall(list(workloads.values())),
                by_workload={name: statistics.geometric_mean(ratios.values()) for name, ratios in workloads.items()},
                layer_ms=None if refused else statistics.geometric_mean(map(_ms, ran)),
                planning_ms=_over_samples(statistics.median, ran, "planning_ms"),
                cannot=f"{count} of {num_settings} settings: {refused[0].scores.cannot}" if refused else None,
                same=tuple(same),
                **{name: _over_samples(statistics.fmean, ran, name) for name in names},
            )
        )
    estimates = [one.slowdown.estimate for one in ranked if one.slowdown]
    placed = [
        replace(one, place=1 + sum(other < one.slowdown.estimate for other in estimates)) if one.slowdown else one
        for one in ranked
    ]
    return sorted(placed, key=lambda one: (one.place or inf, one.planner))


def winner(ranked: Sequence[RankedPlanner]) -> str:
    """Returns a sentence that names the fastest pair of a group, and how far behind the next one is."""
    placed = [one for one in ranked if one.slowdown is not None]
    if not placed:
        return "No planner can plan in every setting."
    first, *others = placed
    assert first.slowdown is not None
    words = f"The fastest is {first.planner}, with a slowdown of {first.slowdown:.3f}"
    if not others:
        return f"{words}."
    assert others[0].slowdown is not None
    after = f"the next of {counted(len(placed), 'result')} is {others[0].planner}, {others[0].slowdown:.3f}"
    return f"{words}; {after}."


def _all_scores(results: Sequence[PlannerResult]) -> str:
    """Returns what two pairs have in common that are the same in all but the time of planning."""
    of = sorted((one.setting, one.sample, repr(replace(one.scores, planning_ms=[]))) for one in results)
    return repr(of)


def lost_settings(results: Sequence[PlannerResult], ours: str) -> list[LostSetting]:
    """Returns the settings of one group in which ``ours`` can plan and is not the fastest, the slowest first."""
    lost = []
    for setting, of_setting in _grouped(results, lambda one: one.setting).items():
        ms_of = {
            planner: {result.sample: [_ms(result)] for result in of_planner}
            for planner, of_planner in _grouped(of_setting, lambda one: one.planner).items()
            if not any(result.scores.cannot for result in of_planner)
        }
        if ours not in ms_of:
            continue
        mean_ms = {planner: statistics.geometric_mean(ms for [ms] in of.values()) for planner, of in ms_of.items()}
        best = min(mean_ms, key=lambda planner: mean_ms[planner])
        ratio = paired_ratio(ms_of[ours], ms_of[best])
        if mean_ms[best] < mean_ms[ours] and ratio is not None:
            lost.append(LostSetting(*setting, of_setting[0].slots, best, mean_ms[best], mean_ms[ours], ratio))
    return sorted(lost, key=lambda one: -one.slowdown.estimate)


def _slowdowns(results: Sequence[PlannerResult]) -> dict[str, BySetting]:
    ran = [result for result in results if not result.scores.cannot]
    together = _grouped(ran, lambda one: (one.setting, one.sample))
    least = {where: min(map(_ms, of_one)) for where, of_one in together.items()}
    slowdowns: dict[str, BySetting] = {}
    for result in ran:
        ratio = _ms(result) / least[result.setting, result.sample]
        slowdowns.setdefault(result.planner, {}).setdefault(result.setting, {})[result.sample] = ratio
    return slowdowns


def _overall(workloads: list[BySample]) -> PairedRatio | None:
    """Returns the slowdown over all workloads, with an interval over the samples that all settings have."""
    ratios = _over_settings(workloads)
    return paired_ratio({sample: [ratio] for sample, ratio in ratios.items()}, {sample: [1.0] for sample in ratios})


def _by_workload(by_setting: BySetting) -> dict[str, list[BySample]]:
    grouped = _grouped(list(by_setting), lambda setting: setting[0])
    return {workload: [by_setting[setting] for setting in settings] for workload, settings in grouped.items()}


def _over_settings(samples: list[BySample]) -> BySample:
    """Returns the geometric mean over settings of each sample that all of them have."""
    shared = sorted(set.intersection(*map(set, samples)))
    return {sample: statistics.geometric_mean(one[sample] for one in samples) for sample in shared}


def _ms(result: PlannerResult) -> float:
    return statistics.fmean(result.scores.layer_ms)


def _over_samples(mean: Callable[[list[float]], float], results: Sequence[PlannerResult], name: str) -> float | None:
    values = [value for result in results for value in getattr(result.scores, name)]
    return mean(values) if values else None


def _grouped(items: Sequence[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# --- pages ---


def write_pages(
    folder: Path,
    scored_in: Sequence[RoutingSetting],
    groups: Sequence[PlannerGroup],
    found: Sequence[PlannerResult],
    introduction: Sequence[str],
) -> Report:
    """Writes ``found`` as a page of Markdown and one of HTML, and returns each group's ranking, to be printed."""
    parts = [_tables_and_figure(group, [one for one in found if one.group == group.name]) for group in groups]
    workloads = Sheet("Workloads", _workloads(scored_in))
    sheets = [workloads, *(sheet for tables, _ in parts for sheet in tables)]
    write(Report("leaderboard", TITLE, "simulated", sheets, introduction=introduction), page=folder / PAGE)
    write_whole(folder / HTML_PAGE, _html(introduction, workloads, parts))
    rankings = [replace(tables[0], without=("by_workload", "cannot"), notes=()) for tables, _ in parts]
    return Report("leaderboard", TITLE, "simulated", rankings)


def _tables_and_figure(group: PlannerGroup, found: Sequence[PlannerResult]) -> tuple[list[Sheet], str]:
    """Returns the tables of one group that have rows, the ranking first, and its figure as SVG."""
    ranked, lost = ranking(found), lost_settings(found, OURS.name)
    count = f"{len(lost)} of {counted(len({one.setting for one in found}), 'setting')}"
    same = [f"The same in every score: {one.planner} = {' = '.join(one.same)}." for one in ranked if one.same]
    sheets = [Sheet(f"SIMULATED: {group.name}", ranked, [winner(ranked), f"{group.about}.", *same])]
    if lost:
        sheets.append(Sheet(f"{group.name}: {OURS.name} is not the fastest in {count}", lost))
    ratios = {f"{one.place}. {one.planner}": one.slowdown for one in ranked if one.slowdown}
    return sheets, _figure(group.name, ratios) if ratios else ""


def _figure(group: str, ratios: Mapping[str, PairedRatio]) -> str:
    with mpl.rc_context(PAGE_STYLE):
        drawn = draw_forest(
            ratios,
            title=f"SIMULATED: {group}",
            xlabel="slowdown, geometric mean (left is faster)",
            words="{:.3f}".format,
            colour=lambda _: OKABE_ITO[0],
        )
    return inline_svg(drawn)


@dataclass(frozen=True)
class WorkloadRow:
    name: Annotated[str, Column("workload")]
    about: Annotated[str, Column("routing", align="left")]
    where: Annotated[str, Column("models and clusters", align="left")]


def _workloads(scored_in: Sequence[RoutingSetting]) -> list[WorkloadRow]:
    about = {one.routing.name: one.routing.about for one in scored_in}
    where: dict[str, list[str]] = {name: [] for name in about}
    for one in scored_in:
        where[one.routing.name].append(f"{one.model_name} on {one.cluster_name}")
    return [WorkloadRow(name, about[name], "; ".join(where[name])) for name in about]


def _html(introduction: Sequence[str], workloads: Sheet, parts: Sequence[tuple[list[Sheet], str]]) -> str:
    body = [f"<h1>{escape(TITLE)}, {date.today().isoformat()}</h1>"]
    for (ranked, *_), _ in parts:
        name, words = ranked.title.removeprefix("SIMULATED: "), ranked.notes[0]
        words = f"{name[:1].upper()}{name[1:]}: {words[:1].lower()}{words[1:]}"
        body.append(f'<p class="headline">{escape(words)}</p>')
    for tables, figure in parts:
        first, *others = map(sheet_section, tables)
        body += [first, f"<section>{figure}</section>", *others]
    body += [sheet_section(workloads), "<h2>How it was scored</h2>"]
    body += [f'<p class="note">{escape(paragraph.replace("`", ""))}</p>' for paragraph in introduction]
    return page(TITLE, body)
