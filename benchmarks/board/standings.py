"""Ranks of planners: the geometric mean of how many times the best planner's seconds each takes.

Of a setting and a sample it is a planner's mean over scored micro-batches over the least that any planner of the group
has there. Means are taken over settings of a workload, then over workloads, so that each workload weighs the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, TypeVar

from benchmarks.board.outcomes import Outcome
from moesys.lab.runs.statistics import PairedRatio, paired_ratio
from moesys.lab.show.sheets import Column

Key = TypeVar("Key", bound=Hashable)
# Workload, model and cluster; and of each sample a ratio.
Where = tuple[str, str, str]
BySample = dict[int, float]


def in_words(ratio: PairedRatio) -> str:
    """``1.234 [1.200, 1.269]``; of one sample there is no interval."""
    interval = "" if ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"{ratio.estimate:.3f}{interval}"


@dataclass(frozen=True)
class Standing:
    """One planner in one group. ``place``: None where it cannot plan in every setting, which ``cannot`` says.

    over_best: its 95 % interval is over samples. by_workload: of the settings that it could plan in. layer_ms: a
    geometric mean over settings. Others are means over what was scored, but ``planning_ms`` is a median.
    """

    place: Annotated[int | None, Column("place")]
    planner: Annotated[str, Column("planner + split")]
    over_best: Annotated[PairedRatio | None, Column("over the best [95 %]", in_words)]
    by_workload: Annotated[Mapping[str, float], Column("{}", ".3f")]
    layer_ms: Annotated[float | None, Column("a layer, ms", ".2f")]
    max_over_mean: Annotated[float | None, Column("max/mean", ".3f")]
    crossing: Annotated[float | None, Column("crossing %", ".1f", 100)]
    copies: Annotated[float | None, Column("copies", ".1f")]
    restored_gb: Annotated[float | None, Column("restored GB", ".2f")]
    memory_gb: Annotated[float | None, Column("memory GB", ".2f")]
    planning_ms: Annotated[float | None, Column("planning ms", ".2f")]
    cannot: str


@dataclass(frozen=True)
class Refusal:
    """Why a planner is not ranked: one of the settings in which it cannot plan."""

    planner: Annotated[str, Column("planner + split")]
    settings: Annotated[str, Column("cannot plan in")]
    reason: Annotated[str, Column("why, in the first of them")]


@dataclass(frozen=True)
class Duel:
    """One setting: the planner that was best there, and how far one of ours is behind it."""

    workload: Annotated[str, Column("workload")]
    model: Annotated[str, Column("model")]
    cluster: Annotated[str, Column("cluster")]
    slots: Annotated[int, Column("slots")]
    best: Annotated[str, Column("best planner")]
    best_ms: Annotated[float, Column("a layer, ms", ".2f")]
    ours_ms: Annotated[float, Column("ours, ms", ".2f")]
    ours_over_best: Annotated[PairedRatio, Column("ours over it [95 %]", in_words)]


def standings(outcomes: Sequence[Outcome]) -> list[Standing]:
    """Of one group: those that are ranked by place, then those that are not by name."""
    ratios, num_settings = _ratios(outcomes), len({outcome.setting for outcome in outcomes})
    found = []
    for planner, of_planner in _grouped(outcomes, lambda one: one.planner).items():
        ran = [outcome for outcome in of_planner if not outcome.scores.cannot]
        by_setting = ratios.get(planner, {})
        whole = len(by_setting) == num_settings and len(ran) == len(of_planner)
        reasons = [outcome.scores.cannot for outcome in of_planner if outcome.scores.cannot]
        found.append(
            Standing(
                place=None,
                planner=planner,
                over_best=_over_best(by_setting) if whole else None,
                by_workload={name: _mean(_samples(of)) for name, of in _by_workload(by_setting).items()},
                layer_ms=statistics.geometric_mean(map(_ms, ran)) if whole else None,
                max_over_mean=_mean_of(ran, "max_over_mean"),
                crossing=_mean_of(ran, "crossing"),
                copies=_mean_of(ran, "copies"),
                restored_gb=_mean_of(ran, "restored_gb"),
                memory_gb=_mean_of(ran, "memory_gb"),
                planning_ms=_median_ms(ran),
                cannot=reasons[0] if reasons else "",
            )
        )
    scores = {one.planner: one.over_best.estimate for one in found if one.over_best}
    places = {planner: 1 + sum(other < score for other in scores.values()) for planner, score in scores.items()}
    placed = [replace(one, place=places.get(one.planner)) for one in found]
    return sorted(placed, key=lambda one: (one.place or inf, one.planner))


def refusals(outcomes: Sequence[Outcome]) -> list[Refusal]:
    """Of one group: those who cannot plan everywhere."""
    num_settings, found = len({outcome.setting for outcome in outcomes}), []
    for planner, of_planner in _grouped(outcomes, lambda one: one.planner).items():
        refused = [outcome for outcome in of_planner if outcome.scores.cannot]
        if refused:
            count = len({outcome.setting for outcome in refused})
            found.append(Refusal(planner, f"{count} of {num_settings} settings", refused[0].scores.cannot))
    return found


def duels(outcomes: Sequence[Outcome], ours: str) -> list[Duel]:
    """Of one group: settings in which ``ours`` is not the best, the furthest behind first. Those in which it cannot
    plan are left to ``refusals``.
    """
    found = []
    for of_setting in _grouped(outcomes, lambda one: one.setting).values():
        by_planner = {
            planner: {outcome.sample: [_ms(outcome)] for outcome in of_planner}
            for planner, of_planner in _grouped(of_setting, lambda one: one.planner).items()
            if not any(outcome.scores.cannot for outcome in of_planner)
        }
        if ours not in by_planner:
            continue
        mean_ms = {planner: statistics.geometric_mean(ms for [ms] in of.values()) for planner, of in by_planner.items()}
        best = min(mean_ms, key=lambda planner: mean_ms[planner])
        ratio = paired_ratio(by_planner[ours], by_planner[best])
        if mean_ms[best] < mean_ms[ours] and ratio is not None:
            first = of_setting[0]
            found.append(Duel(*first.setting, first.slots, best, mean_ms[best], mean_ms[ours], ratio))
    return sorted(found, key=lambda duel: -duel.ours_over_best.estimate)


def _ratios(outcomes: Sequence[Outcome]) -> dict[str, dict[Where, BySample]]:
    least: dict[tuple[Where, int], float] = {}
    ran = [outcome for outcome in outcomes if not outcome.scores.cannot]
    for outcome in ran:
        where = outcome.setting, outcome.sample
        least[where] = min(least.get(where, inf), _ms(outcome))
    found: dict[str, dict[Where, BySample]] = {}
    for outcome in ran:
        ratio = _ms(outcome) / least[outcome.setting, outcome.sample]
        found.setdefault(outcome.planner, {}).setdefault(outcome.setting, {})[outcome.sample] = ratio
    return found


def _over_best(by_setting: dict[Where, BySample]) -> PairedRatio | None:
    """Over samples, of each of which all settings count."""
    by_workload = [_samples(of) for of in _by_workload(by_setting).values()]
    samples = set.intersection(*(set(of) for of in by_workload))
    scores = {sample: [statistics.geometric_mean(of[sample] for of in by_workload)] for sample in sorted(samples)}
    return paired_ratio(scores, {sample: [1.0] for sample in scores})


def _by_workload(by_setting: dict[Where, BySample]) -> dict[str, list[BySample]]:
    found: dict[str, list[BySample]] = {}
    for (workload, *_), by_sample in by_setting.items():
        found.setdefault(workload, []).append(by_sample)
    return found


def _samples(of_settings: list[BySample]) -> BySample:
    """The mean over settings, by sample."""
    shared = set.intersection(*(set(by_sample) for by_sample in of_settings))
    return {sample: statistics.geometric_mean(by_sample[sample] for by_sample in of_settings) for sample in shared}


def _mean(by_sample: BySample) -> float:
    return statistics.geometric_mean(by_sample.values())


def _ms(outcome: Outcome) -> float:
    return statistics.fmean(outcome.scores.layer_ms)


def _mean_of(ran: Sequence[Outcome], name: str) -> float | None:
    values = [value for outcome in ran for value in getattr(outcome.scores, name)]
    return statistics.fmean(values) if values else None


def _median_ms(ran: Sequence[Outcome]) -> float | None:
    values = [value for outcome in ran for value in outcome.scores.planning_ms]
    return statistics.median(values) if values else None


def _grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], Key]) -> dict[Key, list[Outcome]]:
    found: dict[Key, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(key(outcome), []).append(outcome)
    return found
