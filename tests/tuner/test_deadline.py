"""A search that time stops: the best so far, what was not looked at, and going on later."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tuner_cases import CLUSTERS, EP, MODEL, SMALL, cost, costs_of, drawn, session_of

from moesys import Generated, Strategy
from moesys.lab.runs.tuning import SimulatedWorkload
from moesys.tuner.costs import TuneJournal
from moesys.tuner.pick import search
from moesys.tuner.tuned_workload import Deadline, ladder


class Clock(Deadline):
    """Over after so many questions."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    @property
    def is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


def in_time(workload, journal, questions):
    costs = costs_of(workload, session_of(journal, Clock(questions)))
    return costs, partial(search, SMALL, costs, budget=12, seed=0)


def test_a_search_that_time_stops_answers_with_the_best_so_far_and_goes_on_later():
    drawn_load = Generated(num_layers=2, tokens_per_rank=512, steps=6)
    workload = SimulatedWorkload.of(MODEL, CLUSTERS["even"], drawn_load, (0, 1))
    whole = search(SMALL, costs_of(workload), budget=12, seed=0)
    assert (whole.not_seen, str(whole.of)) == ("", "6 steps of seeds 0, 1")
    journal, best_ms, looks = TuneJournal(None, {}), [], []
    for questions in (20, 200, 10**9):
        costs, run = in_time(workload, journal, questions)
        found = run()
        assert found.baseline.strategy == EP
        assert all(costs.session.journal.find(one.strategy.fingerprint(), str(found.of)) for one in found.ranking)
        looks.append(found.of)
        best_ms.append(exact_ms(workload, found.ranking[0].strategy))
        if not found.not_seen:
            break
        assert found.not_seen.startswith("simulating")
    # What it ends with is what a search without a limit finds, and nothing was found out twice.
    assert found == replace(whole, num_points=found.num_points)
    assert best_ms[-1] == min(best_ms)
    assert len(set(looks)) > 1


def test_time_that_is_over_before_the_baseline_was_simulated_is_an_error():
    _, run = in_time(drawn(CLUSTERS["even"]), TuneJournal(None, {}), 0)
    with pytest.raises(ValueError, match=r"the time was over while simulating 12 points, .* give more minutes"):
        run()


def test_a_step_is_simulated_once_however_often_it_is_part_of_a_mean():
    workload, seen = drawn(CLUSTERS["even"], steps=9), []

    class Counting:
        def __getattr__(self, name):
            return getattr(workload, name)

        def step_ms(self, step):
            seen.append(step[0].strategy.fingerprint())
            return workload.step_ms(step)

    costs = costs_of(workload)
    costs.plans.workload = Counting()
    for fidelity in ladder(workload):
        cost(costs, EP, fidelity)
    assert len(seen) == 9
    assert {seed: len(ms) for seed, ms in costs.steps_ms[EP.fingerprint()].items()} == {0: 9}
    # Of a journal alone too.
    again = costs_of(workload, session_of(costs.session.journal))
    cost(again, EP, ladder(workload)[-1])
    assert again.steps_ms[EP.fingerprint()] == costs.steps_ms[EP.fingerprint()]


def exact_ms(workload, strategy: Strategy) -> float:
    return cost(costs_of(workload), strategy, ladder(workload)[-1]).ms
