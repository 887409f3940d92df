"""Ranks of planners, counted by hand: what weighs how much, who is ranked, and where one of ours is behind."""

from __future__ import annotations

import pytest

from benchmarks.board.outcomes import Outcome
from benchmarks.board.play import Scores
from benchmarks.board.standings import duels, refusals, standings


def outcome(planner: str, workload: str, cluster: str, sample: int, ms: float, cannot: str = "") -> Outcome:
    scores = Scores(cannot=cannot) if cannot else Scores(*([ms] for _ in range(7)))
    return Outcome("", "group", workload, "model", cluster, 2, planner, sample, scores)


def test_workloads_weigh_the_same_however_many_settings_they_have() -> None:
    times = {"a": {("w", "1"): 1, ("v", "1"): 4, ("v", "2"): 4}, "b": {("w", "1"): 2, ("v", "1"): 1, ("v", "2"): 4}}
    found = [
        outcome(planner, workload, cluster, sample, ms)
        for planner, of in times.items()
        for (workload, cluster), ms in of.items()
        for sample in range(2)
    ]
    first, second = standings(found)
    assert (first.planner, first.place, first.by_workload) == ("a", 1, {"w": 1.0, "v": 2.0})
    assert first.over_best.estimate == pytest.approx(2**0.5)
    # both are at √2: neither is before the other
    assert (second.planner, second.place) == ("b", 1)
    assert second.over_best.estimate == pytest.approx(2**0.5)
    assert [(duel.workload, duel.best, duel.ours_over_best.estimate) for duel in duels(found, "a")] == [
        ("v", "b", pytest.approx(4.0))
    ]


def test_who_cannot_plan_somewhere_is_measured_against_and_not_ranked() -> None:
    found = [
        outcome("a", "w", "1", 0, 2.0),
        outcome("a", "v", "1", 0, 2.0),
        outcome("b", "w", "1", 0, 1.0),
        outcome("b", "v", "1", 0, 0.0, cannot="too few slots"),
    ]
    ranked, unranked = standings(found)
    assert (ranked.planner, ranked.place, ranked.by_workload) == ("a", 1, {"w": 2.0, "v": 1.0})
    assert (unranked.planner, unranked.place, unranked.over_best) == ("b", None, None)
    assert unranked.by_workload == {"w": 1.0}
    [refusal] = refusals(found)
    assert (refusal.planner, refusal.settings, refusal.reason) == ("b", "1 of 2 settings", "too few slots")
