"""Ranks planners by their time relative to the first of their group, and writes the pages of the leaderboard.

The time in a setting and sample is the mean of simulated seconds over the scored micro-batches, and where a layer waits
for its plan, also the measured median of planning. Geometric means are taken over the settings of a workload, then over
workloads, so that each workload weighs the same. Planners are compared in the same settings and samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from html import escape
from math import exp, inf, log
from pathlib import Path
from typing import Annotated, TypeVar

from benchmarks.leaderboard.planners import OURS, PlannerGroup
from benchmarks.leaderboard.scores import PlannerResult
from benchmarks.leaderboard.workloads import RoutingSetting
from moesys.config import Balance, Split
from moesys.display import counted
from moesys.files import write_whole
from moesys.lab.runs.statistics import PairedRatio, paired_ratio
from moesys.lab.show.figures import OKABE_ITO, draw_forest, style
from moesys.lab.show.pages import PAGE_STYLE, inline_svg, page, sheet_section
from moesys.lab.show.sheets import Column, Report, Sheet, write

PAGE, HTML_PAGE = "leaderboard.md", "leaderboard.html"
TITLE = "SIMULATED: a leaderboard of planners"
RATIO_NOTE = (
    "time / first: the time of a pair divided by that of the first one in the same settings and seeds. On current "
    "counts a layer waits for its plan, so this is the simulated time of the layer and the measured time of planning "
    "together. ~: the interval contains 1, so these seeds show no difference from the first. The intervals of two rows "
    "must not be compared with each other, because each compares its row with the first."
)
# The planners of a figure: the first so many, and the user's.
_MOST_DRAWN = 12
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
# The milliseconds of a layer, by setting and sample.
BySample = dict[tuple[tuple[str, str, str], int], float]


def is_unclear(ratio: PairedRatio) -> bool:
    """Returns whether the interval contains 1. The first one's interval is 1 itself; one seed has no interval."""
    return ratio.low is not None and ratio.high is not None and ratio.low < 1 < ratio.high


def _marked(ratio: PairedRatio) -> str:
    return f"{ratio:.3f}{' ~' if is_unclear(ratio) else ''}"


@dataclass(frozen=True)
class RankedPlanner:
    """One pair of planners in one group. ``place`` is None if it cannot plan in every setting.

    ratio: its time divided by that of the first one, with a 95 % interval over samples. by_workload: the same in the
    settings in which it can plan. layer_ms: the geometric mean over settings. Other columns are means over scored
    micro-batches, ``planning_ms`` is a median. cannot: in how many settings it cannot plan, and the reason in the first
    of them. same: the pairs that are equal to it in every score of every sample, except for the time of planning.
    """

    place: Annotated[int | None, Column("place")]
    planner: Annotated[str, Column("planner + split", align="left", wraps=True, kept=True)]
    ratio: Annotated[PairedRatio | None, Column("time / first [95 %]", _marked, kept=True)]
    by_workload: Annotated[Mapping[str, float], Column("{}", ".3f")]
    regret: Annotated[float | None, Column("regret %", ".1f", 100)]
    forced_balance: Annotated[float | None, Column("forced balance %", ".1f", 100)]
    layer_ms: Annotated[float | None, Column("a layer, ms", ".2f")]
    max_over_mean: Annotated[float | None, Column("max/mean", ".3f")]
    crossing: Annotated[float | None, Column("crossing %", ".1f", 100)]
    copies: Annotated[float | None, Column("copies", ".1f")]
    restored_gb: Annotated[float | None, Column("restored GB", ".2f")]
    memory_gb: Annotated[float | None, Column("memory GB", ".2f")]
    planning_ms: Annotated[float | None, Column("planning ms", ".2f")]
    planning_share: Annotated[float | None, Column("planning %", ".2f", 100)]
    cannot: Annotated[str | None, Column("cannot plan in", wraps=True)]
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostSetting:
    """A setting in which a pair of planners, which the table names, is not the fastest."""

    workload: Annotated[str, Column("workload")]
    model: Annotated[str, Column("model")]
    cluster: Annotated[str, Column("cluster")]
    slots: Annotated[int, Column("slots")]
    best: Annotated[str, Column("fastest planner")]
    best_ms: Annotated[float, Column("fastest, ms", ".2f")]
    own_ms: Annotated[float, Column("this pair, ms", ".2f")]
    slowdown: Annotated[PairedRatio, Column("this pair / fastest [95 %]", _marked)]


def ranking(results: Sequence[PlannerResult]) -> list[RankedPlanner]:
    """Returns the pairs of one group: ranked ones by place, then the others by name."""
    num_settings, by_planner = len({result.setting for result in results}), _grouped(results, lambda one: one.planner)
    able = {planner: _by_sample(of_planner) for planner, of_planner in _able(results).items()}
    first = min(able, key=lambda planner: statistics.fmean(_logs(able[planner]).values()), default=None)
    best_ms = {name: ms for name, (_, ms) in _fastest_by_workload(results).items()}
    ranked = []
    for planner, *same in _grouped(list(by_planner), lambda name: _all_scores(by_planner[name])).values():
        of_planner = by_planner[planner]
        ran = [result for result in of_planner if not result.scores.cannot]
        refused = [result for result in of_planner if result.scores.cannot]
        count = len({result.setting for result in refused})
        ratios = {where: ms / able[first][where] for where, ms in _by_sample(ran).items()} if first else {}
        own_ms = _by_workload(able.get(planner, {}))
        names = ("max_over_mean", "crossing", "copies", "restored_gb", "memory_gb")
        ranked.append(
            RankedPlanner(
                place=None,
                planner=planner,
                ratio=_over_samples_ratio(ratios) if planner in able else None,
                by_workload=_by_workload(ratios),
                regret=max(ms / best_ms[name] for name, ms in own_ms.items()) - 1 if own_ms else None,
                forced_balance=_forced_balance(ran),
                layer_ms=None if refused else statistics.geometric_mean(map(_layer_ms, ran)),
                planning_ms=_over_samples(statistics.median, ran, "planning_ms"),
                planning_share=_planning_share(ran),
                cannot=f"{count} of {num_settings} settings: {refused[0].scores.cannot}" if refused else None,
                same=tuple(same),
                **{name: _over_samples(statistics.fmean, ran, name) for name in names},
            )
        )
    estimates = [one.ratio.estimate for one in ranked if one.ratio]
    placed = [
        replace(one, place=1 + sum(other < one.ratio.estimate for other in estimates)) if one.ratio else one
        for one in ranked
    ]
    return sorted(placed, key=lambda one: (one.place or inf, one.planner))


def winner(ranked: Sequence[RankedPlanner]) -> str:
    """Returns a sentence that names the fastest pair of a group, and how far behind the next one is."""
    placed = [(one.planner, one.ratio) for one in ranked if one.ratio is not None]
    if not placed:
        return "No planner can plan in every setting."
    (first, _), *others = placed
    if not others:
        return f"The fastest is {first}."
    (second, ratio), *_ = others
    unclear = ", which is no clear difference" if is_unclear(ratio) else ""
    words = f"the next of {len(placed)} results is {second}, at {ratio:.3f} times its time{unclear}"
    return f"The fastest is {first}; {words}."


def failures(ranked: Sequence[RankedPlanner]) -> list[str]:
    """Returns a sentence for each row that cannot plan in some setting, with the reason."""
    sentences = []
    for one in ranked:
        if one.cannot:
            names = one.planner, *one.same
            shared = [name for name in one.planner.split(" + ") if all(name in other.split(" + ") for other in names)]
            who = f"{' + '.join(shared) or one.planner} ({len(names)} pairs)" if one.same else one.planner
            sentences.append(f"{who} cannot plan in {one.cannot.rstrip('.')}.")
    return sentences


def _all_scores(results: Sequence[PlannerResult]) -> str:
    """Returns what two pairs have in common that are the same in all but the time of planning, if no layer waits."""
    scores = (replace(one.scores, planning_ms=[]) if one.lag else one.scores for one in results)
    return repr(sorted((one.setting, one.sample, repr(of)) for one, of in zip(results, scores, strict=True)))


@dataclass(frozen=True)
class WorkloadRegret:
    """The fastest pair of a workload among those that can plan in all its settings, and other pairs' regret over it."""

    workload: Annotated[str, Column("workload")]
    best: Annotated[str, Column("fastest planner + split", wraps=True)]
    forced_balance: Annotated[float | None, Column("forced balance %", ".1f", 100)]
    regret: Annotated[Mapping[str, float], Column("regret % of {}", ".1f", 100)]


def regrets(results: Sequence[PlannerResult], pairs: Sequence[str]) -> list[WorkloadRegret]:
    """Returns the fastest pair of each workload of one group, and the regret of ``pairs`` where they can plan."""
    found = []
    for workload, (best, best_ms) in _fastest_by_workload(results).items():
        able = _able([one for one in results if one.workload == workload])
        own_ms = {name: _by_workload(_by_sample(able[name]))[workload] for name in pairs if name in able}
        regret = {name: ms / best_ms - 1 for name, ms in own_ms.items()}
        found.append(WorkloadRegret(workload, best, _forced_balance(able[best]), regret))
    return found


def lost_settings(results: Sequence[PlannerResult], pair: str) -> list[LostSetting]:
    """Returns the settings of one group in which ``pair`` can plan and is not the fastest, the slowest first."""
    lost = []
    for setting, of_setting in _grouped(results, lambda one: one.setting).items():
        ms_of = {
            planner: {result.sample: [_ms(result)] for result in of_planner}
            for planner, of_planner in _able(of_setting).items()
        }
        if pair not in ms_of:
            continue
        mean_ms = {planner: statistics.geometric_mean(ms for [ms] in of.values()) for planner, of in ms_of.items()}
        best = min(mean_ms, key=lambda planner: mean_ms[planner])
        ratio = paired_ratio(ms_of[pair], ms_of[best])
        if mean_ms[best] < mean_ms[pair] and ratio is not None:
            lost.append(LostSetting(*setting, of_setting[0].slots, best, mean_ms[best], mean_ms[pair], ratio))
    return sorted(lost, key=lambda one: -one.slowdown.estimate)


def _fastest_by_workload(results: Sequence[PlannerResult]) -> dict[str, tuple[str, float]]:
    """Returns, by workload, the fastest pair among those that can plan in all its settings, and its milliseconds."""
    fastest = {}
    for workload, here in _grouped(results, lambda one: one.workload).items():
        if ms_of := {planner: _by_workload(_by_sample(of))[workload] for planner, of in _able(here).items()}:
            fastest[workload] = min(ms_of.items(), key=lambda one: one[1])
    return fastest


def _able(results: Sequence[PlannerResult]) -> dict[str, list[PlannerResult]]:
    """Returns the results of each pair that can plan in all their settings."""
    by_planner = _grouped(results, lambda one: one.planner)
    return {planner: of for planner, of in by_planner.items() if not any(one.scores.cannot for one in of)}


def _by_workload(values: BySample) -> dict[str, float]:
    """Returns the geometric mean over settings and samples of each workload."""
    by_workload = _grouped(list(values), lambda where: where[0][0])
    return {name: statistics.geometric_mean(values[where] for where in of) for name, of in by_workload.items()}


def _forced_balance(results: Sequence[PlannerResult]) -> float | None:
    forced = [one for one in results if one.scores.forced_ms]
    shares = {(one.setting, one.sample): statistics.fmean(one.scores.forced_ms) / _ms(one) for one in forced}
    return exp(statistics.fmean(_logs(shares).values())) if shares else None


def _planning_share(results: Sequence[PlannerResult]) -> float | None:
    shares = [statistics.median(one.scores.planning_ms) / _layer_ms(one) for one in results]
    return statistics.fmean(shares) if shares else None


def _by_sample(results: Sequence[PlannerResult]) -> BySample:
    return {(result.setting, result.sample): _ms(result) for result in results}


def _logs(values: BySample) -> dict[int, float]:
    """Returns the mean logarithm of each sample: over the settings of a workload, then over workloads."""
    logs: dict[int, float] = {}
    for sample, of_sample in _grouped(list(values), lambda where: where[1]).items():
        by_workload = _grouped(of_sample, lambda where: where[0][0]).values()
        logs[sample] = statistics.fmean(statistics.fmean(log(values[where]) for where in of) for of in by_workload)
    return logs


def _over_samples_ratio(ratios: BySample) -> PairedRatio | None:
    """Returns the ratio over all workloads, with an interval over samples."""
    logs = _logs(ratios)
    return paired_ratio({sample: [exp(of)] for sample, of in logs.items()}, {sample: [1.0] for sample in logs})


def _ms(result: PlannerResult) -> float:
    """Returns the milliseconds that count: of a layer, and of planning if the layer waits for it."""
    return _layer_ms(result) + (0.0 if result.lag else statistics.median(result.scores.planning_ms))


def _layer_ms(result: PlannerResult) -> float:
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
    added: Sequence[Balance | Split] = (),
) -> Report:
    """Writes ``found`` as a page of Markdown and one of HTML, and returns each group's ranking, to be printed.

    ``added``: the user's planners, whose settings have tables too.
    """
    parts = [_tables_and_figure(group, [one for one in found if one.group == group.name], added) for group in groups]
    rows = [
        WorkloadRow(name, of[0].routing.about, "; ".join(f"{one.model_name} on {one.cluster_name}" for one in of))
        for name, of in _grouped(scored_in, lambda one: one.routing.name).items()
    ]
    workloads = Sheet("Workloads", rows)
    sheets = [workloads, *(sheet for tables, _ in parts for sheet in tables)]
    write(Report("leaderboard", TITLE, "simulated", sheets, introduction=introduction), page=folder / PAGE)
    write_whole(folder / HTML_PAGE, _html(introduction, workloads, parts))
    rankings = [
        replace(ranked, without=("by_workload", "cannot"), notes=failures(ranked.rows)) for (ranked, *_), _ in parts
    ]
    return Report("leaderboard", TITLE, "simulated", rankings, notes=[RATIO_NOTE])


def _tables_and_figure(
    group: PlannerGroup, found: Sequence[PlannerResult], added: Sequence[Balance | Split]
) -> tuple[list[Sheet], str]:
    """Returns the tables of one group that have rows, the ranking first, and its figure as SVG."""
    ranked, num_settings = ranking(found), counted(len({one.setting for one in found}), "setting")
    same = "; ".join(f"{one.planner} = {' = '.join(one.same)}" for one in ranked if one.same)
    title = f"SIMULATED: {group.name}{'' if group.lag else ', with the MEASURED time of planning'}"
    own = {name for member in added if (name := _best_pair(group, ranked, member))}
    mine = {one.place: name for one in ranked for name in (one.planner, *one.same) if one.place and name in own}
    places = [f"Yours: {name} is in place {place} of {len(ranked)}." for place, name in mine.items()]
    notes = [winner(ranked), *places, f"{group.about}.", *([f"The same in every score: {same}."] if same else [])]
    sheets = [Sheet(title, ranked, notes)]
    # A pair has the name of the row that it is in.
    ours = next((one.planner for one in ranked if OURS.name in one.same), OURS.name)
    names = [ours, *sorted(own - {OURS.name, ours})]
    if by_workload := regrets(found, names):
        sheets.append(Sheet(f"{group.name}: by workload", by_workload))
    for name in names:
        if lost := lost_settings(found, name):
            sheets.append(Sheet(f"{group.name}: {name} is not the fastest in {len(lost)} of {num_settings}", lost))
    ratios = {
        f"{one.place}. {one.planner}{' (yours)' * (one.place in mine)}": one.ratio
        for one in ranked
        if one.ratio and one.place and (one.place <= _MOST_DRAWN or one.place in mine)
    }
    return sheets, _figure(title, ratios) if ratios else ""


def _best_pair(group: PlannerGroup, ranked: Sequence[RankedPlanner], member: Balance | Split) -> str | None:
    """Returns the pair of a planner that is first in the ranking."""
    pairs = {pair.name for pair in group.pairs if member in (pair.balance, pair.split)}
    names = (name for one in ranked for name in (one.planner, *one.same) if name in pairs)
    return next(names, None)


def _figure(title: str, ratios: Mapping[str, PairedRatio]) -> str:
    with style(PAGE_STYLE):
        drawn = draw_forest(
            ratios,
            title=title,
            xlabel="time / that of the first (left is faster)",
            words="{:.3f}".format,
            colour=lambda _: OKABE_ITO[0],
        )
    return inline_svg(drawn)


@dataclass(frozen=True)
class WorkloadRow:
    name: Annotated[str, Column("workload")]
    about: Annotated[str, Column("routing", align="left")]
    where: Annotated[str, Column("models and clusters", align="left")]


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
