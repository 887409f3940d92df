"""The ranking of planners, counted by hand: weights, places, pairing, failures, and where a pair is not fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.leaderboard.ranking import failures, is_unclear, lost_settings, ranking, regrets, winner
from benchmarks.leaderboard.scores import PlannerResult, PlannerScores


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
    assert (first.planner, first.place, first.by_workload) == ("a", 1, {"w": 1.0, "v": 1.0})
    # b takes twice the time in w and half of it in v: neither is before the other
    assert (second.planner, second.place, second.by_workload) == ("b", 1, {"w": 2.0, "v": pytest.approx(0.5)})
    assert (first.ratio.estimate, second.ratio.estimate) == (1.0, pytest.approx(1.0))
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
    assert (ranked.planner, ranked.place, ranked.by_workload) == ("a", 1, {"w": 1.0, "v": 1.0})
    assert (unranked.planner, unranked.place, unranked.ratio) == ("b", None, None)
    assert unranked.by_workload == {"w": 0.5}
    assert (ranked.cannot, unranked.cannot) == (None, "1 of 2 settings: too few slots")
    assert failures([ranked, unranked]) == ["b cannot plan in 1 of 2 settings: too few slots."]


def test_a_failure_of_all_pairs_of_a_planner_is_told_once() -> None:
    found = [result(f"mine:Bad + {split}", "w", "1", 0, 0.0, cannot="no.") for split in ("even", "flow")]
    assert failures(ranking(found)) == ["mine:Bad (2 pairs) cannot plan in 1 of 1 settings: no."]


def test_rows_are_compared_with_the_first_seed_by_seed() -> None:
    """Seeds differ more than planners do: b always takes 10 % longer than a, c takes 1 % longer on average."""
    ms_of = {"a": (1.0, 2.0, 4.0), "b": (1.1, 2.2, 4.4), "c": (1.1, 1.8, 4.16)}
    found = [result(name, "w", "1", sample, ms) for name, of in ms_of.items() for sample, ms in enumerate(of)]
    first, second, third = ranking(found)
    assert (first.planner, first.ratio.low, first.ratio.high) == ("a", 1.0, 1.0)
    assert (third.planner, third.ratio.low, third.ratio.high) == ("b", pytest.approx(1.1), pytest.approx(1.1))
    assert second.ratio.estimate == pytest.approx((1.1 * 0.9 * 1.04) ** (1 / 3))
    assert [is_unclear(one.ratio) for one in (first, second, third)] == [False, True, False]


def test_pairs_with_the_same_scores_are_one_row_and_the_winner_is_named() -> None:
    found = [result(name, "w", "1", sample, ms) for name, ms in (("a", 1), ("b", 2), ("c", 1)) for sample in range(2)]
    # The time of planning is measured, and tells no results apart.
    found[-1] = replace(found[-1], scores=replace(found[-1].scores, planning_ms=[9.0]))
    first, second = ranking(found)
    assert (first.planner, first.same, second.planner, second.same) == ("a", ("c",), "b", ())
    assert winner([first, second]) == (
        "The fastest is a; the next of 2 results is b, at 2.000 [2.000, 2.000] times its time."
    )


def test_shares_and_regrets_by_hand() -> None:
    """a wins in w and b in v. c has w's least time, but cannot plan in all its settings."""
    ms_of = {"a": ([4.0, 4.0], [9.0]), "b": ([5.0, 5.0], [6.0]), "c": ([1.0, 0.0], [6.6])}
    found = []
    for planner, (in_w, in_v) in ms_of.items():
        for workload, of in (("w", in_w), ("v", in_v)):
            for cluster, ms in enumerate(of):
                one = result(planner, workload, str(cluster), 0, ms, "no." * (not ms))
                # Two of four micro-batches take twice as long as in forced balance; plans take a fifth of their time.
                scores = replace(one.scores, layer_ms=[ms / 2, 3 * ms / 2], planning_ms=[ms / 5], forced_ms=[2.0, 4.0])
                found.append(replace(one, scores=scores) if ms else one)
    first, second, third = ranking(found)
    assert [one.planner for one in (first, second, third)] == ["b", "a", "c"]
    assert [first.regret, second.regret, third.regret] == [pytest.approx(5 / 4 - 1), pytest.approx(9 / 6 - 1), None]
    assert first.forced_balance == pytest.approx(((3 / 5) * (3 / 6)) ** 0.5)
    assert second.forced_balance == pytest.approx(((3 / 4) * (3 / 9)) ** 0.5)
    assert first.planning_share == pytest.approx(1 / 5)
    in_w, in_v = regrets(found, ["a", "c", "d"])
    assert (in_w.workload, in_w.best, in_w.forced_balance) == ("w", "a", pytest.approx(3 / 4))
    assert in_w.regret == {"a": 0}
    assert (in_v.best, in_v.regret) == ("b", {"a": pytest.approx(0.5), "c": pytest.approx(0.1)})


def test_the_time_of_planning_counts_where_a_layer_waits_for_it() -> None:
    """a's layers are shorter than b's by less than its plans take longer; d's plans are c's, and take longer."""
    ms_of = {"a": (10.0, 9.0), "b": (14.0, 1.0), "c": (20.0, 0.5), "d": (20.0, 2.5)}
    found = []
    for planner, (ms, planning_ms) in ms_of.items():
        one = result(planner, "w", "1", 0, ms)
        # One plan of three was interrupted.
        scores = replace(one.scores, planning_ms=[planning_ms, 90.0, planning_ms], forced_ms=[7.5])
        found.append(replace(one, scores=scores))
    assert [one.planner for one in ranking(found)] == ["a", "b", "c"]
    waiting = [replace(one, lag=0) for one in found]
    ranked = ranking(waiting)
    assert [(one.planner, one.ratio.estimate) for one in ranked] == [
        ("b", 1.0),
        ("a", pytest.approx(19 / 15)),
        ("c", pytest.approx(20.5 / 15)),
        ("d", pytest.approx(22.5 / 15)),
    ]
    assert [one.layer_ms for one in ranked] == [pytest.approx(ms) for ms in (14.0, 10.0, 20.0, 20.0)]
    assert ranked[1].planning_share == pytest.approx(9 / 10)
    assert (ranked[1].regret, ranked[1].forced_balance) == (pytest.approx(19 / 15 - 1), pytest.approx(7.5 / 19))
    (in_w,) = regrets(waiting, ["a"])
    assert (in_w.best, in_w.regret) == ("b", {"a": pytest.approx(19 / 15 - 1)})
    (lost,) = lost_settings(waiting, "a")
    assert (lost.best, lost.best_ms, lost.own_ms) == ("b", pytest.approx(15.0), pytest.approx(19.0))
