"""The ranking of planners, counted by hand: the weight of workloads, who is ranked, and where ours is not fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesys.lab.leaderboard.ranking import lost_settings, ranking, winner
from moesys.lab.leaderboard.scores import PlannerResult, PlannerScores


def result(planner: str, workload: str, cluster: str, sample: int, ms: float, cannot: str = "") -> PlannerResult:
    scores = PlannerScores(cannot=cannot) if cannot else PlannerScores(*([ms] for _ in range(7)))
    return PlannerResult("", "group", workload, "model", cluster, 2, planner, sample, scores)


def test_workloads_weigh_the_same_however_many_settings_they_have() -> None:
    times = {"a": {("w", "1"): 1, ("v", "1"): 4, ("v", "2"): 4}, "b": {("w", "1"): 2, ("v", "1"): 1, ("v", "2"): 4}}
    found = [
        result(planner, workload, cluster, sample, ms)
        for planner, of in times.items()
        for (workload, cluster), ms in of.items()
        for sample in range(2)
    ]
    first, second = ranking(found)
    assert (first.planner, first.place, first.by_workload) == ("a", 1, {"w": 1.0, "v": 2.0})
    assert first.slowdown.estimate == pytest.approx(2**0.5)
    # both are at √2: neither is before the other
    assert (second.planner, second.place) == ("b", 1)
    assert second.slowdown.estimate == pytest.approx(2**0.5)
    assert [(one.workload, one.best, one.slowdown.estimate) for one in lost_settings(found, "a")] == [
        ("v", "b", pytest.approx(4.0))
    ]


def test_who_cannot_plan_somewhere_is_measured_against_and_not_ranked() -> None:
    found = [
        result("a", "w", "1", 0, 2.0),
        result("a", "v", "1", 0, 2.0),
        result("b", "w", "1", 0, 1.0),
        result("b", "v", "1", 0, 0.0, cannot="too few slots"),
    ]
    ranked, unranked = ranking(found)
    assert (ranked.planner, ranked.place, ranked.by_workload) == ("a", 1, {"w": 2.0, "v": 1.0})
    assert (unranked.planner, unranked.place, unranked.slowdown) == ("b", None, None)
    assert unranked.by_workload == {"w": 1.0}
    assert (ranked.cannot, unranked.cannot) == (None, "1 of 2 settings: too few slots")


def test_pairs_with_the_same_scores_are_one_row_and_the_winner_is_named() -> None:
    found = [result(name, "w", "1", sample, ms) for name, ms in (("a", 1), ("b", 2), ("c", 1)) for sample in range(2)]
    # The time of planning is measured, and tells no results apart.
    found[-1] = replace(found[-1], scores=replace(found[-1].scores, planning_ms=[9.0]))
    first, second = ranking(found)
    assert (first.planner, first.same, second.planner, second.same) == ("a", ("c",), "b", ())
    assert winner([first, second]) == (
        "The fastest is a, with a slowdown of 1.000 [1.000, 1.000]; the next of 2 results is b, 2.000 [2.000, 2.000]."
    )
